"""The HTML page: self-contained, escaped, and with the run's own numbers."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from csc.ir.schedule import Action, Schedule
from csc.simulation.page import BASE, GAP, LEFT, LETTER, MEANING, NUMBER, RIGHT, WIDTH, page, svg
from csc.simulation.pipeline import Link, Network, Pipeline, StageWork
from csc.simulation.simulate import simulate
from csc.simulation.timeline import Event, Timeline

from .orders import chain, gpipe, interleaved, one_f_one_b, runs

EVIL = "</script></title></style><script>alert('1')</script><img src=x onerror=\"alert(2)\"> & co"
STAGE = StageWork(0.010, 0.012, 0.006, saved=100.0, stashed=20.0, state=300.0)
PIPELINE = Pipeline((STAGE,) * 4, chain(4, 1e6), Network(Link(1e-4, 1e9)))
PLAN = simulate(PIPELINE, one_f_one_b(PIPELINE, 6), name="plan")
BASELINE = simulate(PIPELINE, gpipe(PIPELINE, 6), name=EVIL)


class Reader(HTMLParser):
    """Tags, their attributes, and the text of each kind of element; every element that must be closed is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)


def embedded(text: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    data: dict[str, Any] = json.loads(found)
    return data


def test_the_page_is_whole_and_asks_for_nothing() -> None:
    text = page([PLAN, BASELINE], "a run", bound=0.1, limit=500.0)
    reader = Reader(text)
    assert reader.open == []
    assert not any({"src", "href", "action"} & attributes.keys() for _, attributes in reader.tags)
    assert not re.search(r"https?:|url\(|@import|\bimport\b|fetch\(|XMLHttp|WebSocket", text)
    assert [tag for tag, _ in reader.tags].count("script") == 2
    assert "default-src 'none'" in text
    ids = {attributes["id"] for _, attributes in reader.tags if "id" in attributes}
    assert set(re.findall(r'getElementById\("(\w+)"\)', text)) <= ids


def test_names_are_escaped() -> None:
    for text in (page([BASELINE], EVIL), page([BASELINE, PLAN], "fine")):
        reader = Reader(text)
        assert [tag for tag, _ in reader.tags].count("script") == 2
        assert [tag for tag, _ in reader.tags].count("img") == 0
        assert EVIL in ["".join(reader.text["td"][i : i + 1]) for i in range(len(reader.text["td"]))]
    assert "".join(Reader(page([], EVIL)).text["h1"]) == EVIL
    assert embedded(page([BASELINE], EVIL))["runs"][0]["name"] == EVIL


def decoded(steps: list[int], tick: float) -> list[float]:
    times, now = [], 0
    for step in steps:
        now += step
        times.append(now * tick)
    return times


@settings(max_examples=40, deadline=None)
@given(runs())
def test_the_page_holds_the_run(run: tuple[Pipeline, Schedule, int]) -> None:
    timeline = simulate(run[0], run[1])
    data = embedded(page([timeline], "", bound=timeline.makespan))
    (found,) = data["runs"]
    close = data["tick"] * 0.51
    assert data["bound"] * data["tick"] == pytest.approx(timeline.makespan, abs=close)
    for events, drawn in zip(timeline.ranks, found["ranks"], strict=True):
        assert [data["kinds"][kind] for kind in drawn["kind"]] == [event.action.kind for event in events]
        assert drawn["stage"] == [event.action.stage for event in events]
        assert drawn["microbatch"] == [event.action.microbatch for event in events]
        expected = [time for event in events for time in (event.start, event.end)]
        assert decoded(drawn["times"], data["tick"]) == pytest.approx(expected, abs=close)
    for curve, drawn in zip(timeline.memory, found["memory"], strict=True):
        assert decoded(drawn["times"], data["tick"]) == pytest.approx([time for time, _ in curve], abs=close)
        assert drawn["sizes"] == [round(size) for _, size in curve]
    moves = found["moves"]
    starts = decoded(moves["start"], data["tick"])
    rows = [
        (kind, a, b, mb, first, last)
        for kind, a, b, mb, first, last in zip(
            *(moves[key] for key in ("kind", "source", "destination", "microbatch", "from", "to")), strict=True
        )
    ]
    assert rows == [
        (t.kind, t.source, t.destination, t.microbatch, t.source_rank, t.destination_rank) for t in timeline.transfers
    ]
    assert starts == pytest.approx([t.start for t in timeline.transfers], abs=close)


def test_runs_share_one_scale_and_start_at_their_own_beginning() -> None:
    late = Timeline("late", ((Event(0, Action("F", 0, 0), 5.0, 7.0),),), (), (((5.0, 9.0),),), (9.0,))
    early = Timeline("early", ((Event(0, Action("F", 0, 0), 0.0, 4.0),),), (), (((0.0, 9.0),),), (9.0,))
    data = embedded(page([late, early], ""))
    times = [decoded(run["ranks"][0]["times"], data["tick"]) for run in data["runs"]]
    assert times == [pytest.approx([0.0, 2.0]), pytest.approx([0.0, 4.0])]


def test_later_chunks_have_their_level() -> None:
    pipeline = Pipeline((StageWork(1.0, 1.0, has_w=False),) * 4, chain(4))
    (run,) = embedded(page([simulate(pipeline, interleaved(pipeline, 2, 2))], ""))["runs"]
    assert run["levels"] == {"0": 0, "2": 1, "1": 0, "3": 1}


def test_the_table_leaves_out_what_is_not_known() -> None:
    plain = Reader(page([PLAN], "")).text["th"]
    assert "makespan" in plain and "over the bound" not in plain and "against the first" not in plain
    assert "over the bound" in Reader(page([PLAN], "", bound=0.1)).text["th"]
    assert "against the first" in Reader(page([PLAN, BASELINE], "")).text["th"]


def test_a_run_that_did_not_record_memory_has_no_lane_for_it() -> None:
    unknown = replace(PLAN, name="measured", memory=((),) * 4, state=(0.0,) * 4)
    runs_of = {run["name"]: run["recorded"] for run in embedded(page([PLAN, unknown], ""))["runs"]}
    assert runs_of == {"plan": True, "measured": False}
    assert "memory: activations" not in page([unknown], "") and "memory: activations" in page([PLAN, unknown], "")
    alone, both = svg([unknown], ""), svg([PLAN, unknown], "")
    assert "memory not recorded" in alone and "0 B" not in alone
    assert 'class="lane"' not in alone and "memory:" not in alone
    assert both.count('class="lane"') == 4 and "fullest rank" in both and "memory not recorded" in both


def test_legends_say_what_colours_numbers_and_gaps_are() -> None:
    kinds = {event.action.kind for events in PLAN.ranks for event in events}
    drawn = page([PLAN, BASELINE], "", limit=500.0, bound=0.1)
    legend = drawn[drawn.index('class="legend"') : drawn.index('class="buttons"')]
    picture = svg([PLAN, BASELINE], "", limit=500.0, bound=0.1)
    for words in (NUMBER, GAP, "memory: activations", *(MEANING[kind] for kind in kinds)):
        assert words in legend and words in picture
    assert all(BASE[kind] in legend for kind in kinds)
    assert BASE["SEND"] != BASE["RECV"], "a measured run has both"


def test_nothing_of_the_page_is_wider_than_its_window() -> None:
    """What cannot be broken scrolls in a box of its own; there is no wide minimum."""
    text = page([PLAN, BASELINE], "t" * 500, bound=0.1)
    style = text[text.index("<style>") : text.index("</style>")]
    assert text.count("<table") == text.count('<div class="table"><table') == 1
    assert re.search(r"\.table \{[^}]*overflow-x: auto", style) and "overflow-wrap: anywhere" in style
    assert all(int(width) <= 320 for width in re.findall(r"width: (\d+)px", style))
    rules = dict(re.findall(r"^([^\n{}]+) \{([^}]*)\}", style, re.M))
    assert "nowrap" not in rules["th, td"] and "flex-wrap: wrap" in rules[".legend"]


@pytest.mark.parametrize("own_scale", [False, True])
@pytest.mark.parametrize("title", ["short", " ".join(["language_model on 6 stages;"] * 12)])
def test_nothing_of_the_picture_is_cut(title: str, own_scale: bool) -> None:
    """Text is taken to be LETTER of its size wide a letter, as in vector.py; no two legend entries meet."""
    slow = replace(BASELINE, name="n" * 300)
    text = svg([PLAN, slow], title, 0.1, 500.0, own_scale)
    assert "max-width: 100%; height: auto" in text
    for x, width in re.findall(r'<rect[^>]* x="([\d.]+)"[^>]* width="([\d.]+)"', text):
        assert float(x) + float(width) <= WIDTH
    sizes = {"title": 14, "head": 12}
    for style, x, words in re.findall(r'<text(?: class="(\w+)")? x="([\d.]+)" y="[\d.]+">(.*?)</text>', text):
        plain = html.unescape(re.sub(r"<[^>]+>", "", words))
        assert float(x) + LETTER * sizes.get(style, 11) * len(plain) <= WIDTH
    rows: dict[str, list[tuple[float, float]]] = {}
    legend = text[text.rindex("</path>" if "</path>" in text else "<path") :]
    entries = re.findall(r'<text x="([\d.]+)" y="([\d.]+)">(.*?)</text>', legend)
    for x, y, words in entries:
        rows.setdefault(y, []).append((float(x), float(x) + LETTER * 11 * len(html.unescape(words))))
    assert len(entries) >= 7
    for spans in rows.values():
        assert all(end < start for (_, end), (start, _) in pairwise(spans))


def test_each_run_on_its_own_scale() -> None:
    """Both are as wide as the picture, each on an axis of its own; on a common scale the short one is a tenth."""
    long = simulate(PIPELINE, one_f_one_b(PIPELINE, 60), name="long")

    def ends(own_scale: bool) -> list[float]:
        bars = r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="18"'
        upper, lower = svg([PLAN, long], "", own_scale=own_scale).split('class="head"')[1:]
        return [max(float(x) + float(width) for x, width in re.findall(bars, half)) for half in (upper, lower)]

    assert ends(True) == [pytest.approx(WIDTH - RIGHT, abs=1)] * 2
    short, full = ends(False)
    assert full == pytest.approx(WIDTH - RIGHT, abs=1)
    assert short - LEFT == pytest.approx((full - LEFT) * PLAN.makespan / long.makespan, abs=1)
    for own_scale in (False, True):
        boxes = [attributes for tag, attributes in Reader(page([PLAN, long], "", own_scale=own_scale)).tags
                 if attributes.get("id") == "own"]  # fmt: skip
        assert len(boxes) == 1 and ("checked" in boxes[0]) == own_scale
    assert '<label hidden><input type="checkbox" id="own"' in page([PLAN], "")


def test_a_note_is_text() -> None:
    assert EVIL in "".join(Reader(page([PLAN], "", note=EVIL)).text["p"])


@settings(max_examples=30, deadline=None)
@given(runs())
def test_any_run_can_be_drawn(run: tuple[Pipeline, Schedule, int]) -> None:
    timeline = simulate(run[0], run[1])
    assert Reader(page([timeline, timeline], "", limit=1.0)).open == []
    assert Reader(svg([timeline, timeline], "", limit=1.0, own_scale=True)).open == []


def test_nothing_to_draw() -> None:
    assert embedded(page([], ""))["runs"] == []
    empty = Timeline("empty", ((), ()), (), (((0.0, 0.0),), ()), (0.0, 0.0))
    assert embedded(page([empty], ""))["runs"][0]["makespan"] == 0
