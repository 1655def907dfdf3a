"""The benchmark of pipelines: its baselines, its model of torch's schedules, its processes, and its figures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch.torch_version import TorchVersion

from benchmarks.pipeline import published_fsdp, report, rows_file
from benchmarks.pipeline.baselines import (
    AGNOSTIC,
    EQUAL,
    RIVALS,
    TEMPLATE,
    Baseline,
    apart,
    balanced,
    baselines,
    equal_layers,
    templates,
    torch_baseline,
)
from benchmarks.pipeline.cases import Case, Numbers, cases, of_case
from benchmarks.pipeline.emulated_ranks import BUSY, DOUBLE, TARGET, Measured, seconds_of, stretched, work
from benchmarks.pipeline.emulated_ranks import EQUAL as CSC
from benchmarks.pipeline.published import Row as Published
from benchmarks.pipeline.published import error
from benchmarks.pipeline.real import Real, _work, together
from benchmarks.pipeline.real import makespan as measured_makespan
from benchmarks.pipeline.simulated import Pair, Planned, Row, _pairs, evaluate, run
from benchmarks.pipeline.summary import document, geomean, over_torch, summary
from benchmarks.pipeline.torch_gradients import FROZEN
from benchmarks.pipeline.torch_schedules import TORCH, chain, modelled, placement, without_gradients
from csc.errors import CscError, InputError
from csc.ir.schedule import Action, verify
from csc.planning.problem import Problem, Unit, Value, pipeline
from csc.planning.schedules import SCHEDULES
from csc.simulation.pipeline import Link, Network, Pipeline, StageWork, peak_memory, to_json
from csc.simulation.simulate import makespan
from csc.simulation.timeline import Event, Timeline

OF_THIS_TORCH = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="rival schedules of torch 2.11 differ: ZB-V fails over gloo, and interleaved ZB misses no gradient",
)
FIELDS = (
    "makespan_over_bound_geomean",
    "makespan_over_bound_equal_memory_geomean",
    "worst_speedup_over_any_baseline",
    "worst_speedup_over_any_baseline_own_bytes",
    "peak_memory_error_max",
    "published_error_geomean",
    "speedup_over_best_rival_geomean",
    "best_rival_over_bound_trained_geomean",
    "best_rival_over_bound_frozen_geomean",
    "speedup_over_unaware_heavy_encoder_geomean",
    "speedup_over_unaware_geomean",
    "paced_error_max",
    "real_error",
    "paced_speedup_over_torch",
    "plan_seconds_max",
    "plan_seconds_64x256",
)


def model(vision: int, audio: int, llm: int, frozen: bool = False) -> tuple[Problem, tuple[bool, ...]]:
    """Encoders with a patch embedding and a projector, an LLM with an embedding, a merge of features and a head."""
    units: list[Unit] = []
    layers: list[bool] = []
    values: list[Value] = []

    def add(component: str, seconds: float, layer: bool, train: bool, back: bool, reads: list[int]) -> int:
        b, w = (seconds if back else 0.0), (seconds if train else 0.0)
        units.append(Unit(f"{component} {len(units)}", component, seconds, b, w, back, train, 8.0, 4.0 * train, 100.0))
        layers.append(layer)
        for maker in reads:
            values.append(Value(maker, (len(units) - 1,), (back and units[maker].has_b,), 2.0, 2.0))
        return len(units) - 1

    features = []
    for name, depth, seconds in (("vision", vision, 2.0), ("audio", audio, 0.5)):
        if depth:
            last = add(name, 0.1, False, not frozen, not frozen, [])
            for _ in range(depth):
                last = add(name, seconds, True, not frozen, not frozen, [last])
            features.append(add(f"{name}_projector", 0.1, False, True, True, [last]))
    features.append(add("llm", 0.1, False, True, True, []))
    last = add("llm", 0.0, False, False, True, features)
    for _ in range(llm):
        last = add("llm", 1.0, True, True, True, [last])
    add("llm", 0.3, False, True, True, [last])
    return Problem(tuple(units), tuple(values), ranks=3, microbatches=6), tuple(layers)


# --- splits ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 5), st.integers(0, 4), st.integers(1, 6), st.integers(1, 9))
def test_equal_layers_gives_stages_as_many_layers(vision: int, audio: int, llm: int, stages: int) -> None:
    whole, layers = model(vision, audio, llm)
    if stages > sum(layers):
        with pytest.raises(ValueError, match="layers cannot fill"):
            equal_layers(whole, layers, stages)
        return
    split = equal_layers(whole, layers, stages)
    assert [u for stage in split for u in stage] == list(range(len(whole.units)))
    counts = [sum(layers[u] for u in stage) for stage in split]
    assert max(counts) - min(counts) <= 1 and min(counts) >= 1
    for ahead, behind in pairwise(split):  # what is no layer stays with its own component, a projector with its encoder
        first, last = whole.units[behind[0]], whole.units[ahead[-1]]
        assert layers[ahead[-1]] or first.component != last.component
        assert not first.component.endswith("_projector")


def test_balanced_is_the_best_contiguous_split_by_forward_time() -> None:
    whole, _ = model(3, 2, 4)
    forward = [unit.forward for unit in whole.units]
    best = min(
        max(sum(forward[a:b]) for a, b in pairwise((0, *cut, len(forward))))
        for cut in product(range(1, len(forward)), repeat=2)
        if cut[0] < cut[1]
    )
    split = balanced(whole, 3)
    assert [u for stage in split for u in stage] == list(range(len(forward)))
    assert max(sum(forward[u] for u in stage) for stage in split) == pytest.approx(best)


def test_templates_are_all_ratios() -> None:
    whole, layers = model(3, 2, 4)
    whole = replace(whole, ranks=5)
    found = dict(templates(whole, layers))
    wanted = {f"{v}:{a}:{5 - v - a}" for v in range(1, 4) for a in range(1, 3) if 1 <= 5 - v - a <= 4}
    assert set(found) == wanted
    for ratio, split in found.items():
        assert sorted(u for stage in split for u in stage) == list(range(len(whole.units)))
        parts = [{whole.units[u].component.removesuffix("_projector") for u in stage} for stage in split]
        assert [len(part) for part in parts] == [1] * 5
        assert [sum(part == {name} for part in parts) for name in ("vision", "audio", "llm")] == list(
            map(int, ratio.split(":"))
        )
        pipe = pipeline(whole, split)  # the encoders stand beside each other
        vision = int(ratio.split(":")[0])
        assert ("F", vision - 1, vision) not in pipe.messages


# --- torch's schedules in numbers ------------------------------------------------------------------------------------


def line(count: int, frozen: int, times: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> Pipeline:
    """A chain whose first stages are frozen."""
    f, b, w = times
    stages = tuple(
        StageWork(f, has_b=False, has_w=False) if s < frozen else StageWork(f, b, w, saved=8.0, stashed=4.0)
        for s in range(count)
    )
    sizes = {("F", s, s + 1): 0.0 for s in range(count - 1)}
    return Pipeline(stages, sizes | {("B", s + 1, s): 0.0 for s in range(frozen, count - 1)})


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(TORCH)), st.integers(2, 4), st.integers(1, 3), st.integers(0, 3))
def test_torchs_orders_are_whole_schedules(name: str, ranks: int, rounds: int, frozen: int) -> None:
    count = ranks * TORCH[name].chunks
    pipe = line(count, min(frozen, count - 1), (1.0, 1.5, 0.5))
    microbatches = 2 * ranks * rounds
    schedule = modelled(name, pipe, ranks, microbatches)
    verify(schedule, pipe.messages, pipe.has_b, pipe.has_w, microbatches)
    assert tuple(schedule.placement.values()) == placement(name, ranks)
    work_of = [0.0] * ranks
    for s, rank in enumerate(placement(name, ranks)):
        work_of[rank] += microbatches * pipe.stages[s].work
    assert makespan(pipe, schedule) >= max(work_of)


@given(st.integers(2, 5), st.integers(1, 3), st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_torchs_makespans_on_equal_stages(ranks: int, rounds: int, b: float, w: float) -> None:
    m = ranks * rounds
    alone = 1 + b + w
    for name in ("torch GPipe", "torch 1F1B"):
        pipe = line(ranks, 0, (1.0, b, w))
        assert makespan(pipe, modelled(name, pipe, ranks, m)) == pytest.approx((m + ranks - 1) * alone)
    pipe = line(2 * ranks, 0, (1.0, b, w))
    if rounds > 1:
        found = makespan(pipe, modelled("torch interleaved 1F1B", pipe, ranks, m))
        assert found == pytest.approx((2 * m + ranks - 1) * alone)


def test_torchs_backward_is_fused_where_it_does_not_split() -> None:
    pipe = line(3, 1)
    kinds = [{a.kind for a in actions if a.computes} for actions in modelled("torch 1F1B", pipe, 3, 6).ranks]
    assert kinds == [{"F"}, {"F", "BW"}, {"F", "BW"}]
    assert peak_memory(pipe, modelled("torch 1F1B", pipe, 3, 6)) == [0.0, 16.0, 8.0]
    split = modelled("torch ZB-V", line(4, 0), 2, 6)
    assert {a.kind for actions in split.ranks for a in actions if a.computes} >= {"F", "B", "W"}


def test_only_chains_are_for_torch() -> None:
    assert chain(line(4, 2))
    skipping = Pipeline((StageWork(1.0),) * 3, {("F", 0, 1): 1.0, ("F", 0, 2): 1.0, ("F", 1, 2): 1.0})
    assert not chain(skipping)
    whole, _ = model(4, 8, 4)
    whole = replace(whole, ranks=10)
    for name in TORCH:
        found = torch_baseline(name, whole)
        assert found.seconds is None and found.note == "not a chain of stages"
    alone, _ = model(2, 0, 4)
    found = torch_baseline("torch ZB-V", replace(alone, ranks=6))
    assert found.seconds is None and found.note == "11 regions cannot fill 12 stages"


def test_torchs_memory_counts_what_w_needs_of_one_unit() -> None:
    whole, _ = model(3, 0, 3)
    units = (replace(unit, state=0.0, stashed=20.0 * unit.has_w) for unit in whole.units)
    found = torch_baseline("torch 1F1B", replace(whole, units=tuple(units)))
    assert found.seconds is not None
    # Three microbatches in flight on the first rank, and for a moment 20 bytes of a unit for the 8 that it saved.
    assert found.activations == max((3 - s) * 8.0 * len(stage) for s, stage in enumerate(found.stages)) + 12.0


# --- cases, pairs and rows -------------------------------------------------------------------------------------------


def test_the_cases() -> None:
    assert len(cases()) == 9 * 3 * 3 * 2 and len(set(cases())) == len(cases())
    assert set(cases(quick=True)) <= set(cases())
    assert {case.frozen for case in cases(quick=True)} == {"all trainable", "encoder frozen", "projector only"}


def numbers_of(frozen: bool) -> Numbers:
    whole, layers = model(3, 2, 4, frozen)
    return Numbers(replace(whole, network=Network(Link(1e-6, 1e6))), layers, 0.4, 1e4, 0.0, ("a note",))


def test_a_case_without_state() -> None:
    found = of_case(numbers_of(True), Case("VLM-S", "encoder frozen", 4, "a40"))
    assert found.ranks == 4 and {unit.state for unit in found.units} == {0.0}
    assert numbers_of(True).heavy and not numbers_of(False).heavy
    assert not replace(numbers_of(True), encoders=0.3).heavy


@pytest.fixture(scope="module")
def row() -> Row:
    return evaluate(Case("VALM-S", "encoder frozen", 3, "a40"), numbers_of(True))


@pytest.mark.slow
def test_a_row_keeps_to_its_limits(row: Row) -> None:
    blind = row.pair(AGNOSTIC).baseline
    assert row.plans["equal"].activations <= blind.activations * (1 + 1e-9)
    assert row.plans["double"].activations <= 2 * blind.activations * (1 + 1e-9)
    assert row.plans["equal"].memory >= row.plans["equal"].activations + 100
    assert row.plans["double"].makespan >= row.shared_bound
    for plan in row.plans.values():
        bound = row.bound if plan.chunks == 1 else row.shared_bound
        assert plan.over_bound == pytest.approx(plan.makespan / bound)
        assert plan.over_single == pytest.approx(plan.makespan / row.bound)
    names = [pair.baseline.name for pair in row.pairs]
    assert names[: 3 + len(TORCH)] == [EQUAL, AGNOSTIC, TEMPLATE, *TORCH]
    assert names[3 + len(TORCH) :] == [name for name, *_ in RIVALS if name in names]
    assert {"rival 1F1B", "rival interleaved 1F1B, 3 chunks", "rival ZB-V"} <= set(names)
    for pair in row.pairs:
        assert pair.speedup is None or pair.baseline.wrong or pair.speedup >= 1 - 1e-9
    assert (row.pair(AGNOSTIC).speedup or 0) >= 1


def test_the_best_template_is_the_fastest() -> None:
    found = numbers_of(True)
    whole = of_case(found, Case("VALM-S", "encoder frozen", 4, "a40"))
    seconds = []
    for _, split in templates(whole, found.layers):
        pipe = pipeline(whole, split)
        seconds.append(makespan(pipe, apart(SCHEDULES["1f1b"](pipe, tuple(range(4)), whole.microbatches), pipe)))
    best = next(each for each in baselines(whole, found.layers) if each.name == TEMPLATE)
    assert best.seconds == min(seconds)


def planned(makespan_: float, activations: float) -> Planned:
    return Planned(makespan_, 1.1, 1.1, activations, activations, 1, "", 0.5)


def test_pairs_keep_to_the_activations_of_the_baseline() -> None:
    asked = []

    def within(limit: float) -> Planned:
        asked.append(limit)
        if limit < 2:
            raise InputError("too small", "plan", "more")
        return planned(9.0, limit)

    others = [
        Baseline("slow", 20.0, 10.0),
        Baseline("fast and large", 5.0, 100.0),
        Baseline("lean", 8.0, 3.0),
        Baseline("leaner", 30.0, 1.0),
        Baseline("wrong", 1.0, 1.0, wrong=(2,)),
        Baseline("none", None),
    ]
    pairs = {pair.baseline.name: pair for pair in _pairs(others, [planned(10.0, 10.0), planned(4.0, 20.0)], within)}
    assert asked == [1.0, 3.0]  # the others have a plan that is faster and no larger
    assert pairs["slow"].speedup == 20 / 9  # the plan for the lean one is small enough for it too
    assert pairs["fast and large"].speedup == 5 / 4
    assert pairs["lean"].speedup == 8 / 9
    assert pairs["leaner"].speedup is None and not pairs["leaner"].fits
    assert pairs["wrong"].speedup is None and pairs["wrong"].fits
    assert pairs["none"].speedup is None and pairs["none"].fits


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.gloo
@OF_THIS_TORCH
def test_emulated_processes_of_both_runtimes() -> None:
    pipe = Pipeline(
        (StageWork(0.004, has_b=False, has_w=False), StageWork(0.002, 0.002, 0.002)),
        {("F", 0, 1): 400.0},
    )
    schedule = SCHEDULES["1f1b"](pipe, (0, 1), 4)
    own = {"kind": "csc", "pipeline": to_json(pipe), "schedule": str(schedule), "steps": 2}
    four = line(4, 1, (0.001, 0.001, 0.001))
    theirs = {"kind": "torch", "pipeline": to_json(four), "microbatches": 4, "steps": 1}
    failing = {
        "kind": "torch",
        "name": "torch interleaved 1F1B",
        "pipeline": to_json(four),
        "microbatches": 5,
        "steps": 1,
    }
    names = ["torch interleaved 1F1B", "torch ZB-V"]
    host = {"kind": "host", "size": 1000.0, "wait": 1e-4}
    answers = work([own, failing, *(theirs | {"name": name} for name in names), {"kind": "link"}, host], 2)
    expected = makespan(pipe, schedule)
    assert len(answers[0]["makespans"]) == 2
    assert all(0 < answers[-1][what] < 0.1 for what in ("action", "handling", "processor"))
    assert all(seconds >= expected for seconds in answers[0]["makespans"])
    assert answers[0]["busy"] == [pytest.approx(b, abs=0.1) for b in (0.016, 0.024)]
    assert "multiple of the number of rounds" in answers[1]["error"]
    for name, answer in zip(names, answers[2:4]):
        (seconds,) = answer["makespans"]
        least = [0.004 * (f1 + f2) for f1, f2 in ((1, 3), (3, 3))]
        if name == "torch interleaved 1F1B":
            assert seconds >= max(least)
            assert all(busy >= each for busy, each in zip(answer["busy"], least))
    assert answers[4]["latency"] > 0 and answers[4]["bandwidth"] > 0


@pytest.mark.gloo
@OF_THIS_TORCH
@pytest.mark.long
def test_torch_misses_the_gradients_that_it_is_said_to_miss() -> None:
    ranks = 3
    for (name, kind), answer in zip(TORCH.items(), work([{"kind": "gradients", "name": n} for n in TORCH], ranks)):
        assert answer["missing"] == without_gradients(name, line(ranks * kind.chunks, FROZEN)), name
        assert not answer["wrong"]


def test_emulated_steps_leave_cores_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for a core are late, whatever the simulator says."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    few, many = (SCHEDULES["1f1b"](line(4, 1, (1.0, 1.0, 1.0)), (0, 1, 2, 3), count) for count in (8, 800))
    assert seconds_of([few], 3e-4) == TARGET
    computed = 3e-4 * sum(map(len, many.ranks))
    assert seconds_of([few, many], 3e-4) == pytest.approx(computed / 2 / BUSY) and computed / 2 > TARGET * BUSY


def test_stretched_messages_take_their_planned_time() -> None:
    network = Network(Link(0.0, 100.0), Link(0.0, 10.0), ranks_per_node=1)
    pipe = replace(line(2, 0, (1.0, 2.0, 3.0)), messages={("F", 0, 1): 50.0, ("B", 1, 0): 20.0}, network=network)
    slow = stretched(pipe, (0, 1), 0.5, Link(1e-3, 1e4))
    assert [(s.forward, s.backward_input, s.backward_weight) for s in slow.stages] == [(0.5, 1.0, 1.5)] * 2
    for channel, size in pipe.messages.items():
        assert slow.messages[channel] / 1e4 == pytest.approx(0.5 * size / 10.0)


# --- figures ---------------------------------------------------------------------------------------------------------


def runs() -> list[Measured]:
    case, other = Case("VLM-S", "encoder frozen", 4, "a40"), Case("VALM-S", "all trainable", 4, "a40")
    return [
        Measured(case, CSC, 1.0, 1.02, (1.02,), 0.1),
        Measured(case, DOUBLE, 1.0, 0.96, (0.96,), 0.1),
        Measured(case, "torch 1F1B", 1.5, 1.53, (1.53,), 0.1),
        Measured(case, "torch ZB-V", 0.9, 0.9, (0.9,), 0.1, wrong=(1,)),
        Measured(case, "torch GPipe", 2.0, 2.5, (2.5,), 0.1),
        Measured(other, CSC, 1.0, 1.01, (1.01,), 0.1),
        Measured(other, "torch 1F1B", 0.0, None, (), 0.1, note="not a chain of stages"),
    ]


REAL = Real(2.0, 2.1, (2.1, 2.2), {"F 0": 1.0}, {"F 0": 1.05}, "auto", (3, 4))


@pytest.mark.slow
def test_the_summary(row: Row) -> None:
    light = replace(
        row,
        case=Case("ALM-S", "projector only", 3, "a40"),
        heavy=False,
        plans={
            "equal": planned(10.0, 1.0),
            "double": planned(8.0, 2.0),
            "equal, one stage": planned(10.0, 1.0),
            "double, one stage": replace(planned(8.0, 2.0), over_bound=1.3),
        },
        pairs=(
            Pair(Baseline(AGNOSTIC, 12.0, 1.0), 1.2),
            Pair(Baseline("torch ZB-V", 7.0, 1.0, wrong=(3,)), 0.7),
            Pair(Baseline("torch 1F1B", 9.0, 1.0), None, fits=False),
        ),
        plan_seconds=77.0,
    )
    found = summary([row, light], runs(), REAL)
    assert tuple(found) == FIELDS
    gain = (row.pair(AGNOSTIC).baseline.seconds or 0) / row.plans["equal"].makespan
    assert found["speedup_over_unaware_heavy_encoder_geomean"] == pytest.approx(gain)
    assert found["speedup_over_unaware_geomean"] == pytest.approx(math.sqrt(gain * 1.2))
    assert found["makespan_over_bound_geomean"] == pytest.approx(
        math.sqrt(row.plans["double, one stage"].over_bound * 1.3)
    )
    right = [p.speedup for p in row.pairs if p.speedup is not None and not p.baseline.wrong]
    assert found["worst_speedup_over_any_baseline"] == min(*right, 1.2)
    assert found["paced_error_max"] == pytest.approx(0.04)
    assert found["paced_speedup_over_torch"] == pytest.approx(1.53 / 1.02)
    assert found["real_error"] == pytest.approx(0.05)
    assert found["plan_seconds_max"] == 77.0
    assert over_torch(runs()) == {"VLM-S, encoder frozen, 4 ranks, a40": 1.53 / 1.02}
    assert set(summary([], [], None).values()) == {None}
    assert geomean([2.0, 8.0]) == pytest.approx(4.0)


@pytest.mark.slow
def test_the_document_is_json(row: Row) -> None:
    link = Link(1e-4, 1e9)
    data = json.loads(json.dumps(document([row], (link, runs(), [{"name": "torch 1F1B"}]), REAL, {"VALM-S": ("n",)})))
    assert set(data["summary"]) == set(FIELDS)
    assert data["simulated"][0]["case"]["configuration"] == "VALM-S"
    assert data["emulated"][0]["error"] == pytest.approx(0.02)
    assert data["versions"]["torch"] and data["date"] and data["machine"]["system"]


def test_a_run_goes_on_from_its_file_of_rows(row: Row, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert rows_file.read(file) == {}
    rows_file.append(file, row)
    with file.open("a") as cut_off:
        cut_off.write(file.read_text()[:100])
    known = rows_file.read(file)
    assert list(known) == [row.case]
    assert rows_file.without_stages(known[row.case]) == rows_file.without_stages(row)

    def unwanted(again: Row) -> None:
        raise AssertionError(f"{again.case.name} is in the file")

    assert run([row.case], 1, lambda what, done, all_: None, known, unwanted) == [known[row.case]]


def test_tables_fit_160_columns(row: Row) -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    gradients: list[dict[str, Any]] = [
        {"name": "torch ZB-V", "missing": [2], "error": 1e-7},
        {"name": "torch GPipe", "error": "no"},
    ]
    report.show(console, [row], Link(1e-4, 1e9), runs(), gradients, REAL)
    text = console.export_text()
    assert "…" not in text
    for words in ("VALM-S enc 3 a40 +", "int 1F1B", "x over torch's best", "fails: no", "paced_error_max", "+5.0%"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 160


def test_only_computes_count_in_a_measured_run() -> None:
    def event(rank: int, action: Action, start: float, end: float) -> Event:
        return Event(rank, action, start, end)

    ranks = (
        (event(0, Action("F", 0, 0), 1.0, 2.0), event(0, Action("F", 0, 1), 2.0, 3.5)),
        (event(1, Action.recv(("F", 0, 1), 0), 0.0, 2.0), event(1, Action("W", 1, 0), 2.0, 5.0)),
    )
    timeline = Timeline("measured", ranks, (), ((), ()), (0.0, 0.0))
    assert measured_makespan(timeline) == 4.0
    assert _work(timeline) == {"F 0": 2.5, "W 1": 3.0}


def test_a_command_that_fails_says_why() -> None:
    import sys

    with pytest.raises(CscError, match="it failed: ValueError: no"):
        together([[sys.executable, "-c", "raise ValueError('no')"]])


def test_what_stands_beside_a_published_run_is_what_its_source_moves() -> None:
    profile = published_fsdp.device()
    few, many = (published_fsdp.beside(profile, 8 * 10**9, ranks, False) for ranks in (8, 128))
    compiled = published_fsdp.beside(profile, 8 * 10**9, 8, True)
    copies = "FSDP's copies"
    assert few[copies] == many[copies] == pytest.approx(14 * 8e9 / (0.9 * 2.4e12))
    assert few["optimizer, clipping, casts"] == pytest.approx(16 * many["optimizer, clipping, casts"])
    assert many["processors held by NCCL"] == pytest.approx(24 / 108 * 8 * 8e9 * 127 / 128 / 50e9)
    assert {name for name in few if few[name] != compiled[name]} == {"rotation in complex numbers"}
    rows = [Published("a", "tokens/s", 100.0, 125.0, {}), Published("b", "tokens/s", 125.0, 100.0, {})]
    assert error(rows) == pytest.approx(0.25) and error([]) is None
