"""Timelines: what they sum up, the way through JSON and back, and files that are not timelines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from csc.errors import InputError
from csc.ir.schedule import Action, Schedule
from csc.simulation.pipeline import Pipeline
from csc.simulation.simulate import simulate
from csc.simulation.timeline import Event, Timeline, Transfer, from_json, to_json

from .orders import runs

MEASURED = Timeline(
    "measured",
    (
        (
            Event(0, Action("F", 0, 0), 0.5, 1.5),
            Event(0, Action.recv(("B", 1, 0), 0), 1.5, 3.0),
            Event(0, Action("B", 0, 0), 3.0, 4.0),
            Event(0, Action("REDUCE"), 4.0, 4.5),
        ),
        (),
    ),
    (Transfer("B", 1, 0, 0, 1, 0, 2.0, 3.0, 8.0),),
    (((0.0, 10.0), (0.5, 30.0), (4.0, 10.0)), ()),
    (10.0, 2.0),
)


def test_sums() -> None:
    assert MEASURED.makespan == 4.0
    assert MEASURED.busy == (2.5, 0.0)  # waiting in a RECV is idle time
    assert MEASURED.bubble == (1.5, 4.0) and MEASURED.bubble_share == (0.375, 1.0)
    assert MEASURED.peak_memory == (30.0, 2.0) and MEASURED.peak_activations == (20.0, 0.0)
    assert MEASURED.ranks[0][0].seconds == 1.0


def test_measured_round_trip() -> None:
    assert from_json(json.loads(json.dumps(to_json(MEASURED)))) == MEASURED


@settings(max_examples=60, deadline=None)
@given(runs())
def test_predicted_round_trip(run: tuple[Pipeline, Schedule, int]) -> None:
    timeline = simulate(run[0], run[1])
    assert from_json(json.loads(json.dumps(to_json(timeline)))) == timeline


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        (["format"], "other", "t.json: this is not a timeline"),
        (["version"], 2, "version is 2"),
        (["name"], None, "'name' is not a string"),
        (["state"], None, "'state' is missing"),
        (["state"], [1.0], "2 ranks, 2 memory curves and 1 states"),
        (["state", 0], "1", "state 0: '1' is not a finite number"),
        (["ranks"], {}, "'ranks' is missing or not a list"),
        (["ranks", 1], 3, "rank 1: 'events' is missing"),
        (["ranks", 0, 1], "F 0 0", "rank 0, event 1: 'F 0 0' is not a list"),
        (["ranks", 0, 1], ["F 0 0", 1.0], "event 1: .* is not \\[action, start, end\\]"),
        (["ranks", 0, 1, 0], "G 0 0", "rank 0: 'G 0 0' is not an action"),
        (["ranks", 0, 1, 0], "F 0 0 | F 0 1", "event 1: .* is not one action"),
        (["ranks", 0, 1, 0], "F 0 0\nrank 1: F 1 0", "event 1: .* is not one action"),
        (["ranks", 0, 1, 0], "", "event 1: '' is not one action"),
        (["ranks", 0, 1, 0], "\nhello", "'hello' does not start with"),
        (["ranks", 0, 1, 1], float("nan"), "event 1: nan is not a finite number"),
        (["ranks", 0, 1, 1], True, "event 1: True is not"),
        (["ranks", 0, 1, 1], -1.0, "event 1: -1.0 is not"),
        (["ranks", 0, 1, 2], 10**400, "event 1: 1000000"),
        (["ranks", 0, 1, 2], 1.0, "event 1: it ends at 1.0 before it starts at 1.5"),
        (["ranks", 0, 0], ["F 0 0", 2.0, 2.5], "rank 0: entry 1 is earlier than entry 0"),
        (["transfers", 0, 0], "X", "transfer 0: .* is not \\[kind"),
        (["transfers", 0, 1], 1.5, "transfer 0: .* is not \\[kind"),
        (["transfers", 0, 5], 2, "transfer 0: it is between ranks 1 and 2, there are 2"),
        (["transfers", 0, 8], None, "transfer 0: None is not"),
        (["transfers", 0, 7], 0.0, "transfer 0: it ends at 0.0 before"),
        (["memory", 0, 1], [1.0], "memory of rank 0, point 1: .* is not \\[time, bytes\\]"),
        (["memory", 0, 0, 0], 3.0, "memory of rank 0: entry 1 is earlier"),
        (["memory", 0, 0, 1], float("inf"), "memory of rank 0, point 0: inf is not"),
    ],
)
def test_refuses(path: list[Any], value: object, part: str) -> None:
    data: Any = json.loads(json.dumps(to_json(MEASURED)))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputError, match=part):
        from_json(data, "t.json")


@pytest.mark.parametrize("data", [None, [], 3, "text", {}, {"format": []}])
def test_refuses_other_json(data: object) -> None:
    with pytest.raises(InputError, match="this is not a timeline"):
        from_json(data)
