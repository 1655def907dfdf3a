"""Emulated ranks and recorded timelines: real processes, messages and order; waits of the modelled time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import handmade
import pytest
import torch

from csc.errors import InputError
from csc.ir.schedule import verify
from csc.planning.schedules import SCHEDULES
from csc.runtime.emulated import emulated, emulated_program, expected, run
from csc.runtime.loaded_program import load
from csc.runtime.timelines import gathered, record, timeline
from csc.runtime.trainer import Trainer
from csc.runtime.transport import InProcess
from csc.simulation.pipeline import Link, Loads, Network, Pipeline, StageWork, from_json, to_json
from csc.simulation.simulate import makespan
from csc.simulation.timeline import from_json as read_timeline
from tests.launching import ranks, run_csc, torchrun
from tests.simulation.random_loads import taken_for

ALIKE = Pipeline(
    (
        StageWork(0.002, has_b=False, has_w=False),
        StageWork(0.003, 0.002, 0.001, saved=100, stashed=50, fused=5, state=7),
        StageWork(0.001, 0.002, 0.003),
    ),
    {("F", 0, 1): 1000.0, ("F", 1, 2): 3.0, ("F", 0, 2): 1.0, ("B", 2, 1): 5.0},
    Network(Link(1e-4, 1e9), Link(1e-3), 2),
)
PIPELINE = replace(ALIKE, loads=Loads.scaled(ALIKE.stages, ALIKE.messages, (1.0, 0.5, 2.0)))


def test_pipelines_survive_their_json() -> None:
    assert from_json(json.loads(json.dumps(to_json(PIPELINE)))) == PIPELINE
    for broken in (None, {}, to_json(PIPELINE) | {"stages": [{"forward": "1"}]}, to_json(PIPELINE) | {"loads": [-1.0]}):
        with pytest.raises(InputError, match=r"program.json, plan: these are no figures of a pipeline"):
            from_json(broken, "program.json, plan")


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 0)])
def test_paced_ranks_do_every_action_in_order_and_wait(placement: tuple[int, ...]) -> None:
    schedule = SCHEDULES["1f1b"](PIPELINE, placement, 3)
    program = emulated(PIPELINE, schedule)
    verify(schedule, PIPELINE.messages, PIPELINE.has_b, PIPELINE.has_w, 3)
    factor = 0.5
    (traces,) = run(program, InProcess(program.program), steps=1, factor=factor)
    found = timeline(gathered(traces), program.program.manifest, "emulated")
    for rank, events in enumerate(found.ranks):
        assert tuple(event.action for event in events) == schedule.ranks[rank]
        for event in events:
            if event.action.computes:
                action = event.action
                assert event.seconds >= factor * taken_for(PIPELINE, action.kind, action.stage, action.microbatch)
    moved = [action for actions in schedule.ranks for action in actions if action.kind == "SEND"]
    assert len(found.transfers) == len(moved)
    assert all(transfer.start <= transfer.end for transfer in found.transfers)


def test_a_factor_stretches_waits_and_not_messages() -> None:
    slow = Pipeline((StageWork(0.001, 0.001, 0.001),) * 2, {("F", 0, 1): 0.0, ("B", 1, 0): 0.0}, Network(Link(0.5)))
    program = emulated(slow, SCHEDULES["1f1b"](slow, (0, 1), 1))
    assert expected(program) == pytest.approx(6 * 0.001 + 2 * 0.5)  # F F, then BW BW, and a message each way
    assert expected(program, 100) == pytest.approx(6 * 0.1 + 2 * 0.5)


def test_timelines_of_a_real_step(tmp_path: Path) -> None:
    trainer = Trainer(load(handmade.write(tmp_path / "p", dp=2)), trace=True)
    trainer.train_step(handmade.batch(8))
    found = timeline(gathered(trainer.timeline), trainer.program.manifest)
    assert len(found.ranks) == 3 and found.start == 0.0
    sizes = {(t.kind, t.source, t.destination): t.size for t in found.transfers}
    assert sizes == dict.fromkeys([("F", 0, 1), ("F", 1, 2), ("B", 1, 0), ("B", 2, 1)], 240.0) | {
        ("F", 0, 2): 480.0,
        ("B", 2, 0): 480.0,
    }


def test_the_step_of_median_time_is_written(tmp_path: Path) -> None:
    trainer = Trainer(load(handmade.write(tmp_path / "p")), trace=True)
    trainer.train_step(handmade.batch(4))
    manifest, trace = trainer.program.manifest, gathered(trainer.timeline)
    steps = [
        {rank: [replace(t, start=t.start * factor, end=t.end * factor) for t in timed] for rank, timed in trace.items()}
        for factor in (5, 1, 3, 2)
    ]
    makespans = [timeline(step, manifest).makespan for step in steps]
    assert record(tmp_path / "three.json", steps[:3], manifest, "measured") == pytest.approx(makespans[2])
    assert record(tmp_path / "four.json", steps, manifest, "measured") == pytest.approx(makespans[3])
    written = read_timeline(json.loads((tmp_path / "four.json").read_text()))
    assert written.makespan == pytest.approx(makespans[3])


def test_programs_without_a_plan_cannot_be_paced(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no figures of a pipeline"):
        emulated_program(load(handmade.write(tmp_path / "p")))
    with pytest.raises(InputError, match="has 2 replicas"):
        emulated_program(load(handmade.write(tmp_path / "q", dp=2)))


@pytest.mark.long
@pytest.mark.gloo
def test_paced_processes_take_at_least_the_simulated_time(tmp_path: Path) -> None:
    directory = handmade.write(tmp_path / "p", schedule="1f1b")
    table = json.loads((directory / "program.json").read_text())
    free = Pipeline(tuple(StageWork(0.01, 0.01, 0.005) for _ in range(3)), handmade_messages(table))
    table["plan"] = {"pipeline": to_json(free)}
    (directory / "program.json").write_text(json.dumps(handmade.sealed(table)))
    command = ["-m", "csc.run", directory, "--emulate", 1.0, "--steps", 2, "--json", "--timeline", tmp_path / "t.json"]
    done = torchrun(3, *command)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    schedule = load(directory).schedule
    expected = makespan(free, schedule)
    assert len(rows) == 2
    for row in rows:
        assert row["expected"] == pytest.approx(expected)
        assert row["seconds"] >= expected, "messages and waits only ever add time"
    found = read_timeline(json.loads((tmp_path / "t.json").read_text()))
    assert [tuple(e.action for e in events) for events in found.ranks] == list(schedule.ranks)


def handmade_messages(table: dict) -> dict[tuple[str, int, int], float]:
    return {(m["kind"], m["source"], m["destination"]): 240.0 * len(m["values"]) for m in table["messages"]}


@pytest.mark.gloo
def test_a_measured_run_writes_its_timeline(tmp_path: Path) -> None:
    directory = handmade.write(tmp_path / "p")
    ranks(run_csc, 3, str(directory), "--steps", "2", "--timeline", str(tmp_path / "out/measured.json"))
    found = read_timeline(json.loads((tmp_path / "out/measured.json").read_text()))
    assert [tuple(e.action for e in events) for events in found.ranks] == list(load(directory).schedule.ranks)
    torch.testing.assert_close(found.start, 0.0)
