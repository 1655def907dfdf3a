"""Stages that are recorded and launched again give the bits of stages that run, whatever comes between.

The recorder is that of tests/recording.py: what would be read after it was overwritten on a GPU is noise here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import handmade
import pytest
import torch

from csc import devices
from csc.ir.schedule import parse
from csc.runtime import graphed_stage
from csc.runtime.graphed_stage import GraphedPrograms, GraphRow, in_flight
from csc.runtime.loaded_program import load
from csc.runtime.recorded_part import FixedPlaces, LeavingPlaces, RecordedPart, UnfitError, fresh, same_bits, tensors_in
from csc.runtime.trainer import Trainer
from tests.recording import CpuRecorder, recorded_on_cpus

CPU = torch.device("cpu")
ONE, THREE, V = (0, 0, 0), (0, 1, 2), (0, 1, 0)
Step = tuple[torch.Tensor, dict[str, torch.Tensor]]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CpuRecorder:
    monkeypatch.setattr(graphed_stage, "MET", 2)
    return recorded_on_cpus(monkeypatch)


def both(path: Path, **options: Any) -> list[Trainer]:
    """A trainer that runs all, and one that records, of one program."""
    directory = handmade.write(path / "program", **options)
    return [Trainer(load(directory), graphs=graphs) for graphs in (False, True)]


def steps(
    trainer: Trainer, count: int = 5, accumulate: int = 1, to_none: bool = True,
    between: Callable[[Trainer, int], None] = lambda trainer, number: None,
) -> list[Step]:  # fmt: skip
    """Loss and gradients of each step, AdamW after so many."""
    parameters = list(trainer.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    found = []
    for number in range(count):
        batch = handmade.batch(trainer.microbatches * trainer.program.manifest.mesh.dp, seed=number)
        loss = trainer.train_step(batch)
        grads = {n: p.grad.clone() for n, p in trainer.named_parameters() if p.grad is not None}
        found.append((loss.clone(), grads))
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        between(trainer, number)
    return found


def assert_same(found: list[Step], expected: list[Step]) -> None:
    for number, ((loss, grads), (right, sums)) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(loss, right), number
        assert grads.keys() == sums.keys()
        assert [name for name in sums if not torch.equal(grads[name], sums[name])] == [], number


def rows(trainer: Trainer) -> dict[tuple[int, str], GraphRow]:
    return {(row.stage, row.part): row for row in trainer.graphs.rows()}


@pytest.mark.parametrize(
    ("options", "accumulate", "to_none"),
    [
        ({"placement": ONE, "schedule": "gpipe"}, 1, True),
        ({"placement": ONE, "schedule": "1f1b", "frozen": "prefix"}, 1, False),
        ({"placement": THREE, "schedule": "1f1b"}, 2, False),
        ({"placement": THREE, "schedule": "zb-h1", "frozen": "middle"}, 1, True),
        ({"placement": THREE, "schedule": "zb-h2"}, 2, True),
        ({"placement": V, "schedule": "auto"}, 1, True),
        ({"placement": V, "schedule": "1f1b", "dp": 2, "dtype": "float64"}, 1, False),
        ({"placement": ONE, "microbatches": 1}, 3, True),
        ({"placement": THREE, "dtype": "bfloat16", "weight": "sum"}, 1, True),
        ({"placement": (1, 0, 1), "cp": 2}, 1, True),
    ],
    ids=str,
)  # fmt: skip
def test_the_bits_are_those_of_stages_that_run(
    tmp_path: Path, recorder: CpuRecorder, options: dict[str, Any], accumulate: int, to_none: bool
) -> None:
    plain, recorded = both(tmp_path, **options)
    expected = steps(plain, 6, accumulate, to_none)
    assert not recorder.launches
    assert_same(steps(recorded, 6, accumulate, to_none), expected)
    assert max(recorder.launches) > 2
    assert all(not row.why for row in recorded.graphs.rows())
    frozen = handmade.FROZEN[options.get("frozen", "none")]
    if not frozen:
        assert all(row.instances for row in recorded.graphs.rows())


def test_as_many_are_recorded_as_are_in_flight(tmp_path: Path, recorder: CpuRecorder) -> None:
    _, trainer = both(tmp_path, placement=THREE, schedule="1f1b", microbatches=6)
    steps(trainer, 4)
    found = {(row.stage, row.part): row.instances for row in trainer.graphs.rows()}
    assert [found[stage, "F"] for stage in range(3)] == [3, 2, 1]
    count = len(recorder.launches)
    steps(trainer, 2)
    assert len(recorder.launches) == count, "later steps record nothing"
    assert min(recorder.launches) > 4


def test_in_flight() -> None:
    schedule = parse("# x\nrank 0: F 0 0 | F 0 1 | B 0 0 | F 0 2 | W 0 0 | BW 0 1 | BW 0 2 | F 1 0 | F 1 1 | REDUCE")
    assert in_flight(schedule.ranks[0], 0) == 3
    assert in_flight(schedule.ranks[0], 1) == 1, "F alone keeps nothing"


def test_what_was_handed_over_stays(tmp_path: Path, recorder: CpuRecorder) -> None:
    """`.grad` is the user's: no later launch writes into it."""
    _, trainer = both(tmp_path, placement=ONE)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(trainer: Trainer, number: int) -> None:
        trainer.train_step(handmade.batch(4, seed=50 + number))
        grads = [p.grad for p in trainer.parameters() if p.grad is not None]
        kept.extend((one, one.clone()) for one in grads)
        trainer.zero_grad()

    steps(trainer, 5, between=keep)
    assert max(recorder.launches) > 2 and all(torch.equal(one, copy) for one, copy in kept)


def test_a_parameter_that_is_replaced(tmp_path: Path, recorder: CpuRecorder, caplog: pytest.LogCaptureFixture) -> None:
    def replace(trainer: Trainer, number: int) -> None:
        if number == 2:
            for parameter in trainer.parameters():
                parameter.data = parameter.data * 0.5

    plain, recorded = both(tmp_path, placement=THREE)
    expected = steps(plain, 6, between=replace)
    with caplog.at_level(logging.INFO, "csc"):
        assert_same(steps(recorded, 6, between=replace), expected)
    assert "is to be recorded anew" in caplog.text
    assert all(row.instances for row in recorded.graphs.rows())


def test_parameters_that_are_replaced_again_and_again(tmp_path: Path, recorder: CpuRecorder) -> None:
    def replace(trainer: Trainer, number: int) -> None:
        for parameter in trainer.parameters():
            parameter.data = parameter.data.clone()

    plain, recorded = both(tmp_path, placement=ONE)
    expected = steps(plain, 12, between=replace)
    assert_same(steps(recorded, 12, between=replace), expected)
    assert "again and again" in rows(recorded)[0, "F"].why and "its F runs as it is" in rows(recorded)[0, "W"].why


def test_a_constant_that_is_written_to(tmp_path: Path, recorder: CpuRecorder, caplog: pytest.LogCaptureFixture) -> None:
    """What a program makes of its constants once is made anew then, elsewhere."""

    def write(trainer: Trainer, number: int) -> None:
        if number == 2:
            for rank in trainer.ranks:
                for constant in rank.constants.values():
                    constant.mul_(2.0)

    plain, recorded = both(tmp_path, placement=ONE)
    expected = steps(plain, between=write)
    with caplog.at_level(logging.INFO, "csc"):
        assert_same(steps(recorded, between=write), expected)
    assert "is to be recorded anew" in caplog.text


def test_a_step_that_fails_in_its_middle(tmp_path: Path, recorder: CpuRecorder) -> None:
    """What it had in flight is free again, and what it left in memory is read by nobody."""
    broken = {"now": False}

    def fail(trainer: Trainer, number: int) -> None:
        if number == 3:
            broken["now"] = True
            with pytest.raises(Exception, match="broken"):
                trainer.train_step(handmade.batch(4, seed=99))
            broken["now"] = False

    plain, recorded = both(tmp_path, placement=THREE, schedule="1f1b")
    for trainer in (plain, recorded):
        for rank in trainer.ranks:
            send = rank.endpoint.send

            def sending(message: Any, microbatch: int, values: Any, send: Any = send) -> None:
                if broken["now"] and message.kind == "B" and microbatch == 1:
                    raise RuntimeError("broken")
                send(message, microbatch, values)

            rank.endpoint.send = sending  # type: ignore[method-assign]
    expected = steps(plain, 7, between=fail)
    assert_same(steps(recorded, 7, between=fail), expected)
    assert max(recorder.launches) > 3


@pytest.mark.parametrize("part", [0, 1, 2])
def test_an_error_while_recording_leaves_the_function(
    tmp_path: Path, recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: int
) -> None:
    """Of F the whole stage, of another part that part."""
    record, count = recorder.record, iter(range(100))

    def failing(run: Callable[[], Any], pool: Any) -> Any:
        if next(count) == part:
            run()
            raise RuntimeError("out of memory\nand more")
        return record(run, pool)

    monkeypatch.setattr(recorder, "record", failing)
    plain, recorded = both(tmp_path, placement=ONE, microbatches=1, text="# x\n" + "rank 0: " + ORDER)
    expected = steps(plain)
    assert_same(steps(recorded), expected)
    refused = [row for row in recorded.graphs.rows() if row.why]
    assert {row.why for row in refused if "its F" not in row.why} == {"RuntimeError: out of memory"}
    assert "runs as it is: RuntimeError: out of memory" in caplog.text and max(recorder.launches) > 1


ORDER = "F 0 0 | F 1 0 | F 2 0 | B 2 0 | W 2 0 | B 1 0 | B 0 0 | W 1 0 | W 0 0 | REDUCE"


def test_a_schedule_with_both_ways_back(tmp_path: Path, recorder: CpuRecorder) -> None:
    """Of one stage some microbatches have B and W apart, others BW: an instance proves each way when it comes."""
    order = (
        "F 0 0 | F 0 1 | F 1 0 | F 1 1 | F 2 0 | BW 2 0 | BW 1 0 | B 0 0 | F 2 1 | B 2 1 | B 1 1 | W 2 1 | W 1 1 | "
        "BW 0 1 | W 0 0 | F 0 2 | F 1 2 | F 2 2 | B 2 2 | W 2 2 | BW 1 2 | BW 0 2 | REDUCE"
    )
    plain, recorded = both(tmp_path, placement=ONE, microbatches=3, text=f"# x\nrank 0: {order}")
    expected = steps(plain, 6)
    assert_same(steps(recorded, 6), expected)
    assert {row.part for row in recorded.graphs.rows()} == {"F", "B", "W", "BW"}
    assert all(row.instances and not row.why for row in recorded.graphs.rows())


@pytest.mark.parametrize("part", [0, 1, 2, 5])
def test_a_launch_that_gives_other_bits_is_not_used(
    tmp_path: Path, recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: int
) -> None:
    """Of F nothing of the stage is, of another part all else is."""
    record = recorder.record

    def wrong(run: Callable[[], Any], pool: Any) -> Any:
        launch, made = record(run, pool)
        if len(recorder.launches) - 1 != part:
            return launch, made
        recording = pool[-1]

        def launching() -> None:
            launch()
            for tensor in (*recording.made.values(), *recording.written):
                tensor.mul_(1 + 2**-20) if tensor.is_floating_point() else None

        return launching, made

    monkeypatch.setattr(recorder, "record", wrong)
    plain, recorded = both(tmp_path, placement=ONE, microbatches=1, text="# x\n" + "rank 0: " + ORDER)
    expected = steps(plain)
    assert_same(steps(recorded), expected)
    assert caplog.text.count("gave other bits when it was launched again than when it ran") == 1
    assert sum(bool(row.why) for row in recorded.graphs.rows()) == (3 if part < 3 else 1)


def test_a_function_that_does_not_repeat_itself(tmp_path: Path, recorder: CpuRecorder) -> None:
    """As kernels that add in any order: each run rounds otherwise. Then no launch has to have the bits of a run."""
    _, trainer = both(tmp_path, placement=ONE, microbatches=1)
    stage = trainer.graphs._all[0].stages[0]
    forward, calls = stage._plain.forward, iter(range(1000))

    def rounding(*given: Any) -> Any:
        sent, saved = forward(*given)
        return {name: tensor * (1 + 2e-7 * (next(calls) % 2)) for name, tensor in sent.items()}, saved

    object.__setattr__(stage._plain, "forward", rounding)
    steps(trainer)
    assert rows(trainer)[0, "F"].instances == 1


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_functions_that_write_over_what_was_kept(
    tmp_path: Path, recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """As B and W do with gradients that F has made (a head in chunks): a warm-up, a run and a launch are not three."""
    text = handmade.STAGE_2.replace("    return sent, (z, d)", "    z.mul_(received['loss'])\n    return sent, (z, d)")
    text = text.replace("    z, d = saved\n    yield", "    z, d = saved\n    d.mul_(3)\n    yield")
    assert text.count("mul_(") == 2
    monkeypatch.setattr(handmade, "STAGE_2", text)
    plain, recorded = both(tmp_path, placement=THREE, schedule=schedule)
    expected = steps(plain)
    assert_same(steps(recorded), expected)
    assert all(row.instances and not row.why for row in recorded.graphs.rows())
    assert not expected[0][1]["embed"].isnan().any()


def test_a_batch_laid_out_otherwise_runs_as_it_is(tmp_path: Path, recorder: CpuRecorder) -> None:
    plain, recorded = both(tmp_path, placement=ONE, microbatches=1)
    found: list[list[Step]] = []
    for trainer in (plain, recorded):
        found.append([])
        for number in range(9):
            batch = handmade.batch(1, seed=number)
            if number % 3 == 2:
                batch = {name: one.T.contiguous().T for name, one in batch.items()}
            if number % 3 == 1:
                batch["ids"] = batch["ids"][:1].expand(handmade.ROWS, -1)
            loss = trainer.train_step(batch)
            found[-1].append((loss, {n: p.grad.clone() for n, p in trainer.named_parameters() if p.grad is not None}))
    assert_same(found[1], found[0])
    assert 1 < recorder.launches[0] < 6


def test_an_edited_file_is_not_recorded(tmp_path: Path, recorder: CpuRecorder) -> None:
    """What it prints or counts would be done once."""
    directory = handmade.write(tmp_path / "program", placement=ONE)
    with (directory / "layers/stage_1.py").open("a") as file:
        file.write("\nprint('edited')\n")
    trainer = Trainer(load(directory), graphs=True)
    steps(trainer)
    assert not recorder.launches and all("layers/stage_1.py was edited" in row.why for row in trainer.graphs.rows()
                                         if row.part == "F")  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "old", "new", "why"),
    [
        (
            0,
            "a = torch.tanh(h @",
            "a = 0 * torch.rand_like(h) + torch.tanh(h @",
            "aten::rand_like: a replay",
        ),
        (1, "    return", "    float(a.sum())\n    return", "aten::_local_scalar_dense: the host waits for values"),
        (2, "safe, count)\n\ndef", "safe, count, 'and')\n\ndef", "it keeps a str, which is no tensor"),
    ],
)
def test_what_draws_waits_or_is_no_tensor_runs_as_it_is(
    tmp_path: Path, recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch, stage: int, old: str, new: str, why: str
) -> None:
    """Found in the warm-up, before anything of it is recorded; the other stages are recorded."""
    text = (handmade.STAGE_0, handmade.STAGE_1, handmade.STAGE_2)[stage]
    changed = text.replace(old, new, 1).replace("safe, count = saved", "safe, count, *_ = saved")
    assert changed != text
    monkeypatch.setattr(handmade, f"STAGE_{stage}", changed)
    plain, recorded = both(tmp_path, placement=ONE)
    expected = steps(plain)
    assert_same(steps(recorded), expected)
    found = rows(recorded)
    assert [other for other in range(3) if found[other, "F"].why] == [stage]
    assert why in found[stage, "F"].why and max(recorder.launches) > 1


def test_a_mask_that_selects_waits_for_its_count(tmp_path: Path, recorder: CpuRecorder) -> None:
    old, new = "(dx @ weights", "(dx[dx.sum((1, 2)) > -1e9] @ weights"
    assert old in handmade.STAGE_1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handmade, "STAGE_1", handmade.STAGE_1.replace(old, new))
        plain, recorded = both(tmp_path, placement=ONE)
    expected = steps(plain)
    assert_same(steps(recorded), expected)
    found = rows(recorded)
    assert found[1, "F"].instances and "aten::index: the host waits for values" in found[1, "B"].why


def test_sizes_that_come_by_turns(tmp_path: Path, recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs have recordings at once; the one that has not run for the longest time gives its own up."""
    monkeypatch.setattr(graphed_stage, "KEPT", 1)
    first, second = (handmade.write(tmp_path / name, placement=ONE, microbatches=1) for name in "ab")
    found = []
    for graphs in (False, True):
        trainer = Trainer(load(first), graphs=graphs)
        other = Trainer(load(second), graphs=graphs, weights=dict(trainer.named_parameters()))
        if graphs:
            other.graphs = trainer.graphs
            other._members = [
                other.graphs.add(Trainer(load(second), dict(trainer.named_parameters()))._members[0], None)
            ]
        found.append([step for _ in range(4) for one in (trainer, other) for step in steps(one, 5)])
    assert_same(found[1], found[0])
    programs = trainer.graphs._all
    assert [one.given_up for one in programs] == [2, 1] and max(recorder.launches) > 1
    assert len(trainer.graphs._recent) == 1


def test_cpus_have_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, recorded = both(tmp_path)
    assert "cuda_graphs: skipped" in caplog.text and recorded.graphs.rows() == []
    assert_same(steps(recorded, 2), steps(plain, 2))
    assert devices.graphs(CPU) is None


def test_what_inductor_compiles_is_recorded_once_it_is_settled(tmp_path: Path, recorder: CpuRecorder) -> None:
    """A step that tries compiled functions runs them beside others: nothing of that is to be launched again."""
    trainer = Trainer(load(handmade.write(tmp_path / "program", placement=ONE)))
    settled: list[int] = []
    fused: Any = SimpleNamespace(is_settled=lambda number: number in settled)
    trainer.graphs = GraphedPrograms(CPU, True)
    trainer._members = [trainer.graphs.add(trainer._members[0], fused)]
    steps(trainer, 3)
    assert not recorder.launches
    settled.append(0)
    steps(trainer, 3)
    assert recorder.launches


# the pieces


def test_places_of_expanded_tensors() -> None:
    row = torch.arange(3.0)
    places = FixedPlaces([row.expand(4, 3)])
    places.fill([row.add(1).expand(4, 3)])
    assert torch.equal(places.tensors[0], row.add(1).expand(4, 3))
    assert places.fits([row.expand(4, 3)]) and not places.fits([row.expand(4, 3).contiguous()])
    assert FixedPlaces([torch.ones(1, 3)]).fits([torch.ones(5, 6)[2:3, :3]]), "a row has no stride to the next"
    with pytest.raises(ValueError, match="came where"):
        places.fill([torch.ones(1, 3)])


def test_bits() -> None:
    assert same_bits(torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), 0.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor(True), torch.tensor(True)) and not same_bits(torch.zeros(2), torch.zeros(2, 1))


def test_fresh_values_are_other_objects_over_the_same_memory() -> None:
    """Kernels keep on a tensor what they have made of it; in a recording that would be of the microbatch before."""
    one = torch.ones(2)
    one.kept = 1  # type: ignore[attr-defined]
    nested = ([one], {"a": one}, None)
    found = fresh(nested)
    nested[0].clear()  # type: ignore[union-attr]
    again = found[0][0]
    assert again is found[1]["a"] and again.data_ptr() == one.data_ptr() and not hasattr(again, "kept")
    with pytest.raises(UnfitError, match="it keeps a str"):
        tensors_in((one, "x"))


def test_what_a_kernel_keeps_on_a_mask_is_recorded(recorder: CpuRecorder) -> None:
    """csc.kernels.packing unpacks a mask once: what it has unpacked in the warm-up is of another microbatch later."""
    mask, out = FixedPlaces([torch.ones(3)]), LeavingPlaces(CPU)

    def unpacked(tensor: torch.Tensor) -> torch.Tensor:
        if not hasattr(tensor, "kept"):
            tensor.kept = tensor.detach().clone()  # type: ignore[attr-defined]
        kept: torch.Tensor = tensor.kept  # type: ignore[attr-defined]
        return kept

    def run(leave: Any) -> Any:
        given = fresh(mask.tensors)[0]
        leave(("sent", "x"), unpacked(given) * 2)
        return given

    mask.fill([torch.ones(3)])
    part = RecordedPart(recorder, run, recorder.pool(), out, CPU)
    for value in (1.0, 5.0):
        mask.fill([torch.full((3,), value)])
        part.launch()
        assert torch.equal(dict(part.leaving())["sent", "x"], torch.full((3,), 2 * value))
