"""Ranks that are killed while they train: what is planned then, and real processes."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import csc
from csc.checkpoints import files, restoring
from csc.errors import InputError
from csc.runtime.stores import Guarded, answered, connected
from csc.runtime.survival import Again, Held, Regrouping, Report, Survival, Taking, dealt_to, planned, shares
from tests import launching
from tests.compiler import small
from tests.runtime import survival_worker
from tests.runtime.survival_worker import STEPS, Fault


def test_every_microbatch_is_dealt_once() -> None:
    for before in range(1, 7):
        for left in range(1, before + 1):
            for microbatches in range(1, 6):
                found = shares(left, before, microbatches)
                assert sorted(chain.from_iterable(found)) == list(range(before * microbatches))
                assert max(map(len, found)) - min(map(len, found)) <= 1
    assert dealt_to(2, [7, 8, 9], [3, 1]) == [[9], [7, 8]]


def test_what_a_rank_has_is_counted_once() -> None:
    reports = {
        0: Report(9, [], step=4, total=6, counted={0: [0, 1]}, drawn=5),
        1: Report(9, [], step=4, total=6, counted={1: [0]}, drawn=5),
        4: Report(9, [], step=4, total=6, counted={0: [4, 5]}),
        5: Report(8, []),  # it has not heard yet that the step begins
    }
    plan = planned(reports, [[0, 1], [4, 5]])
    counted = [{0: [0, 1, 4, 5]}, {1: [0]}]
    assert plan == Regrouping([0, 1, 4, 5], 9, [], 4, None, 5, [[1, 3, 5], [2, 4]], counted, [], [False] * 2)
    assert Regrouping.read(json.dumps(asdict(plan)).encode()) == plan


def test_what_the_lost_replica_had_sent_is_kept() -> None:
    """One that a stage had sent and another one had not is done again, and counts for the other one alone."""
    held = [Held(2, 4, 0, [2]), Held(2, 3, 0, [2, 3])], [Held(3, 4, 1, [2, 3])]  # one of them is of the step before
    reports = {
        0: Report(9, [], step=4, total=6, counted={0: [0, 1]}, held=held[0]),
        1: Report(9, [], step=4, total=6, counted={1: [0, 1]}, held=held[1]),
        4: Report(9, [], step=4, total=6, counted={0: [4, 5]}),
        5: Report(9, [], step=4, total=6, counted={1: [4, 5]}),
    }
    assert Report.read(json.dumps(asdict(reports[1])).encode()) == reports[1]
    plan = planned(reports, [[0, 1], [4, 5]])
    assert plan.todo == [[3], []] and plan.takes == [Taking(0, 2, 0), Taking(1, 3, 1)]
    assert plan.counted == [{0: [0, 1, 4, 5, 2]}, {1: [0, 1, 4, 5, 2, 3]}]
    twice = {**reports, 4: replace(reports[4], held=[Held(2, 4, 0, [2, 3])])}  # an older copy, of the same
    assert planned(twice, [[0, 1], [4, 5]]).takes == [Taking(0, 2, 0), Taking(1, 3, 1)]


def test_a_step_that_one_rank_has_finished_is_done() -> None:
    reports = {0: Report(9, [], step=4, total=6), 1: Report(9, [], ended=4, row=[1.0, 2.0])}
    plan = planned(reports, [[0], [1]])
    assert plan.row == [1.0, 2.0] and plan.step == 4 and not plan.todo
    between = planned({0: Report(9, [], ended=4, row=[1.0]), 1: Report(10, [[7]], ended=4, row=[1.0])}, [[0], [1]])
    assert (between.step, between.rounds, between.rows) == (0, 10, [[7]])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": "pp=2", "survive": 1}, "has 1 replica, and 1 lost rank may take as many away"),
        ({"mesh": "dp=2", "survive": 2}, "use 3 replicas or more"),
        ({"mesh": "dp=2", "survive": -1}, "pass how many ranks may die"),
        ({"mesh": "dp=2", "survive": True}, "pass how many ranks may die"),
        ({"mesh": "dp=2", "zero": 3, "survive": 1}, "with zero=3 a rank cannot be lost"),
        ({"mesh": "dp=2", "survive": csc.Survive(2)}, "use 3 replicas or more"),
        ({"mesh": "pp=2", "survive": 1}, r"or survive=csc\.Survive\(1, mirror=True\)"),
        ({"mesh": "dp=2,pp=2", "zero": 1, "survive": csc.Survive(1, mirror=True)}, "mirror=True is for pipelines"),
        ({"mesh": "dp=2", "survive": csc.Survive(1, mirror=True)}, "mirror=True is for pipelines"),
        ({"mesh": "dp=3", "zero": 3, "survive": csc.Survive(1, mirror=True)}, "use microbatches=2"),
        ({"mesh": "tp=2,pp=2", "survive": csc.Survive(1, mirror=True)}, "use mesh='pp=4'"),
        ({"mesh": "pp=1", "survive": csc.Survive(1, mirror=True)}, "of two ranks or more"),
        (
            {"mesh": "pp=2", "survive": csc.Survive(1, mirror=True), "memory": "1GB,2GB"},
            "which one is lost is not known",
        ),
    ],
)
def test_what_cannot_be_survived_is_refused_before_training(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        csc.compile(lambda: small.text(2), example=small.text_batch(4), **options)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"failures": 2, "mirror": True}, "one other alone"), ({"copies": 1, "mirror": True}, "one other alone"),
     ({"mirror": 1}, "pass True or False"), ({"copies": -1}, "copies is -1")],
)  # fmt: skip
def test_what_survive_does_not_take(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        csc.Survive(**given)


def told(directory: Path, ranks: list[int]) -> list[dict[str, Any]]:
    return [json.loads((directory / f"told_{rank}.json").read_text()) for rank in ranks]


def check_undisturbed(directory: Path, mesh: str, left: list[int]) -> None:
    """Those that are left have the losses and weights of a run in which nobody died."""
    of, losses = csc.Mesh.parse(mesh), list[float]()
    alone = survival_worker.compiled_for(of, None)
    survival_worker.trained(alone, of, losses)
    weights = dict(alone.named_parameters())
    for one in told(directory, left):
        torch.testing.assert_close(torch.tensor(one["losses"]), torch.tensor(losses), rtol=1e-6, atol=1e-6)
        for name, values in one["weights"].items():
            torch.testing.assert_close(torch.tensor(values), weights[name].detach(), rtol=1e-5, atol=1e-6, msg=name)
    names = {name for one in told(directory, left) for name in one["weights"]}
    assert len(losses) == STEPS and names == set(weights)


@pytest.mark.gloo
def test_one_rank_after_the_other_is_killed(tmp_path: Path) -> None:
    """The first one in a microbatch, one in the sum of gradients, one between a step and the optimizer."""
    faults = [Fault(0, 1, "F 0 1"), Fault(2, 2, "the sum of gradients"), Fault(1, 3, "clip_grad_norm_")]
    launching.ranks(survival_worker.main, 4, tmp_path, "dp=4", faults, csc.Survive(3, copies=1), dying=3)
    check_undisturbed(tmp_path, "dp=4", [3])
    _, in_sums, between_steps = told(tmp_path, [3])[0]["recoveries"]
    assert in_sums["step"] == 3 and len(in_sums["again"]) <= 1, "the last copy may have been on its way"
    assert (between_steps["step"], between_steps["again"]) == (0, [])


@pytest.mark.gloo
def test_the_store_where_the_ranks_met_dies_with_rank_0(tmp_path: Path) -> None:
    launching.ranks(survival_worker.beside_the_store, 2, tmp_path, "dp=2", [Fault(0, 1, "BW 0 1")], 1, dying=1)
    check_undisturbed(tmp_path, "dp=2", [1])


@pytest.mark.gloo
def test_a_pipeline_that_loses_a_rank_is_taken_out(tmp_path: Path) -> None:
    faults = [Fault(1, 2, "BW 1 0")]
    launching.ranks(survival_worker.main, 4, tmp_path, "dp=2,pp=2", faults, 1, True, dying=1)
    check_undisturbed(tmp_path, "dp=2,pp=2", [2, 3])
    assert (tmp_path / "spare_0.txt").exists()
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "zero", "faults", "left"),
    [
        ("dp=4", 1, [Fault(1, 2, "train_step")], [0, 2, 3]),  # between its step of a shard and the next gathering
        ("dp=4", 2, [Fault(2, 2, "BW 0 1")], [0, 1, 3]),
        ("dp=4", 1, [Fault(0, 3, "the shards of what is saved")], [1, 2, 3]),
        ("dp=2,cp=2", 0, [Fault(3, 2, "BW 0 1")], [0, 1]),
        ("dp=2,pp=2", 0, [Fault(1, 2, "BW 1 1")], [2, 3]),
    ],
)
def test_shards_and_sequences_are_not_lost(
    tmp_path: Path, mesh: str, zero: int, faults: list[Fault], left: list[int]
) -> None:
    launching.ranks(survival_worker.main, 4, tmp_path, mesh, faults, csc.Survive(1, copies=1), True, zero, dying=1)
    check_undisturbed(tmp_path, mesh, left)
    reports = told(tmp_path, left)
    assert all(len(report["recoveries"]) == 1 for report in reports)
    check_checkpoint(tmp_path, reports)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ([Fault(1, 1, "BW 0 1", 1, int(signal.SIGSTOP))], "rank 1"),
        pytest.param(
            [Fault(0, 1, "BW 0 0"), Fault(1, 1, "the sum of gradients", 1, int(signal.SIGSTOP))],
            "others do not go on: .*rank 1 has not answered",
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_a_rank_that_is_silent_ends_the_job_in_a_sentence(tmp_path: Path, faults: list[Fault], said: str) -> None:
    """In a step; while the others come together without one that was killed."""
    mesh = f"dp={len(faults) + 1}"
    launching.ranks(survival_worker.beside_a_stopped_rank, len(faults) + 1, tmp_path, mesh, faults, dying=len(faults))
    (sentence, seconds), *more = [json.loads(path.read_text()) for path in tmp_path.glob("said_*.json")]
    assert re.search(said, sentence) and "stopped" in sentence and re.search("last checkpoint|saved weights", sentence)
    assert 8 < seconds < 8 * len(faults) + 60 and not more


def test_a_store_whose_process_is_stopped_is_not_waited_for() -> None:
    asleep, awake = threading.Event(), threading.Event()
    with pytest.raises(RuntimeError, match=r"timed out: rank 1 has not answered for 0\.05 s"):
        answered(lambda: asleep.wait(5), 0.05, "rank 1")
    asleep.set()
    store = Guarded(dist.HashStore(), 5.0, "rank 1")
    store.set("a", "b")
    assert (store.get("a"), store.check(["a"]), store.check(["c"])) == (b"b", True, False)
    with pytest.raises(RuntimeError, match="nobody has written c"):
        store.wait(["c"], timedelta(seconds=0.02))
    with pytest.raises(ZeroDivisionError):
        answered(lambda: 1 / 0, 5.0, "rank 1")
    with pytest.raises(Again):  # it is known that its process has died
        answered(lambda: awake.wait(60), 600.0, "rank 1", has_died)
    awake.set()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RuntimeError, match="connection refused: rank 1 has ended"):
        connected("127.0.0.1", port, 600.0, "rank 1")
    inner = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    inner.set("a", "b")
    assert connected("127.0.0.1", inner.port, 600.0, "rank 1").get("a") == b"b"


def has_died() -> None:
    raise Again


def test_a_spare_rank_asks_nobody_who_has_left() -> None:
    """The store of a process that has ended would be tried until the timeout."""

    class Leaving:
        left, dead = set[int](), dict[int, float]()

        def wait(self, among: set[int], seconds: float) -> bool:
            self.left |= among
            return True

    def asked(*arguments: object) -> bool:
        pytest.fail("a rank was asked that has left")

    spare = SimpleNamespace(
        _trainers=[], _meeting=SimpleNamespace(give_up=lambda why: None), me=3, is_spare=True, deaths=Leaving(),
        _are_back=asked, _flight=None, _without=[],
    )  # fmt: skip
    with pytest.raises(SystemExit) as end:
        Survival._wait_as_spare(spare, [2], Regrouping([0, 1], 0, []))
    assert end.value.code == 0


def check_checkpoint(directory: Path, reports: list[dict[str, Any]]) -> None:
    """Those that are left have written all weights, as they have them, and all of the optimizer's state."""
    index = files.read(files.find(directory / "saved_run"))
    values = {name: weight for report in reports for name, weight in report["weights"].items()}
    for name, stored in index.parameters.items():
        assert torch.equal(restoring.whole(index, stored, name), torch.tensor(values[name])), name
    momenta = {name for name, key, _ in index.of_optimizer() if key == "momentum_buffer"}
    assert momenta == index.trained
    for name, key, stored in index.of_optimizer():
        assert restoring.whole(index, stored, f"{key} of {name}").isfinite().all()


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "zero", "victims"),
    [
        ("dp=2,pp=2", 0, [1]),
        pytest.param("dp=3", 0, [0, 2], marks=pytest.mark.long),
        pytest.param("dp=2,pp=2", 0, [0, 3], marks=pytest.mark.long),
        pytest.param("dp=2,tp=2", 0, [0], marks=pytest.mark.long),
        pytest.param("dp=2,cp=2", 0, [3], marks=pytest.mark.long),
        pytest.param("dp=3", 1, [1, 1], marks=pytest.mark.long),
        pytest.param("dp=2,pp=2", 2, [2], marks=pytest.mark.long),
    ],
)
def test_killed_ranks_that_are_started_again_train_with_the_others(
    tmp_path: Path, mesh: str, zero: int, victims: list[int]
) -> None:
    """With those of their replicas; one after the other."""
    of = csc.Mesh.parse(mesh)
    launching.ranks(
        survival_worker.rejoining, of.size, tmp_path, mesh, victims, zero, dying=len(victims), again=True
    )  # fmt: skip
    found = [json.loads((tmp_path / f"told_{rank}.json").read_text()) for rank in range(of.size)]
    assert all(found[victim][0] for victim in victims)
    steps = 2 * len(victims) + 3
    alone = survival_worker.compiled_for(of, None)
    optimizer, expected = alone.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9), []
    torch.manual_seed(1)
    for step in range(steps):
        expected.append(float(alone.train_step(survival_worker.samples(of)[step % STEPS])))
        alone.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights = dict(alone.named_parameters())
    for start, own, values in found:
        torch.testing.assert_close(torch.tensor(own), torch.tensor(expected[start:]), rtol=1e-6, atol=1e-6)
        for name, value in values.items():
            if torch.tensor(value).shape == weights[name].shape:  # a tensor-parallel rank has a part
                torch.testing.assert_close(
                    torch.tensor(value), weights[name].detach(), rtol=1e-5, atol=1e-6, msg=name
                )  # fmt: skip


@pytest.mark.gloo
@pytest.mark.long
def test_a_rank_whose_optimizer_would_lack_its_state_is_not_taken_up(tmp_path: Path) -> None:
    launching.ranks(survival_worker.refused, 2, tmp_path, dying=1, again=True)
    assert (tmp_path / "done.txt").exists(), "the other one trains on"
    said = (tmp_path / "refused.txt").read_text()
    assert "goes on without rank 1, and takes up nobody" in said and "no optimizer was made with compiled.opt" in said


def mirrored_without(directory: Path, mesh: str, fault: Fault, zero: int = 0, check: bool = False) -> None:
    """Those that are left of one pipeline, or of ranks with shards, have the losses, norms and weights of one process,
    and train on as a rank fewer.
    """
    folder = directory / "ranks"
    folder.mkdir()
    torch.manual_seed(5)
    read = small.dropped()
    values = {name: value + 0.02 * torch.randn_like(value) for name, value in read.state_dict().items()}
    save_file({name: value for name, value in values.items() if name != "head.weight"}, directory / "start.safetensors")
    (directory / "alone").mkdir()
    survival_worker.mirrored(directory / "alone", mesh, [], zero)
    losses, figures, rate, weights, _ = json.loads((directory / "alone" / "told_alone.json").read_text())
    of = csc.Mesh.parse(mesh)
    launching.ranks(survival_worker.mirrored, of.size, folder, mesh, [fault], zero, check, dying=1)
    assert (folder / f"killed_{fault.rank}.txt").exists()
    for rank in set(range(of.size)) - {fault.rank}:
        own = json.loads((folder / f"told_{rank}.json").read_text())
        torch.testing.assert_close(torch.tensor(own[0]), torch.tensor(losses), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(torch.tensor(own[1]), torch.tensor(figures), rtol=1e-6, atol=1e-6)
        assert own[2] == rate
        fewer = csc.Mesh(pp=3) if mesh == "dp=2,pp=2" else replace(of, dp=of.dp - 1 or 1, pp=of.pp - 1 or 1)
        assert csc.Mesh.parse(own[4]) == fewer
        for name, values in own[3].items():
            torch.testing.assert_close(
                torch.tensor(values), torch.tensor(weights[name]), rtol=1e-5, atol=1e-6, msg=name
            )


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "zero", "place"),
    [
        ("pp=2", 0, "BW 1 0"),
        ("dp=2,pp=2", 0, "BW 1 0"),
        pytest.param("dp=2", 3, "F 0 1", marks=pytest.mark.long),
    ],
)
def test_ranks_with_mirrors_go_on_without_one(tmp_path: Path, mesh: str, zero: int, place: str) -> None:
    """In the second of two steps whose gradients are added: those of the first one are not lost."""
    mirrored_without(tmp_path, mesh, Fault(1, 2, place, 2), zero)


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "fault", "zero", "check"),
    [
        ("pp=3", Fault(0, 0, "F 0 1"), 0, False),
        ("pp=3", Fault(1, 2, "the gradients for the next rank's copy"), 0, False),
        ("pp=4", Fault(2, 2, "the gradients for the next rank's copy"), 0, False),  # the others wait for live ones
        ("pp=3", Fault(2, 2, "the end of a step"), 0, False),
        ("pp=3", Fault(1, 3, "clip_grad_norm_"), 0, True),  # where the step is done and the optimizer has not stepped
        ("pp=3", Fault(2, 3, "eval_step"), 0, False),
        ("pp=4", Fault(2, 3, "'train_step'"), 0, False),
        ("pp=3", Fault(0, 5, "the index of what is saved"), 0, False),
        ("pp=3", Fault(1, 5, "collect"), 0, False),
        ("dp=3", Fault(0, 2, "the gradients for the next rank's copy"), 3, False),
        ("dp=3", Fault(2, 3, "clip_grad_norm_"), 3, True),
        ("dp=2", Fault(0, 5, "collect"), 3, False),
        ("dp=2,pp=2", Fault(0, 0, "F 0 1"), 0, False),
        ("dp=2,pp=2", Fault(0, 2, "the end of a step"), 0, False),
        ("dp=2,pp=2", Fault(3, 2, "BW 1 1"), 0, True),
        ("dp=2,pp=2", Fault(2, 3, "clip_grad_norm_"), 0, False),
        ("dp=2,pp=2", Fault(0, 5, "the index of what is saved"), 0, False),
        ("dp=2,pp=2", Fault(1, 5, "collect"), 0, False),
    ],
)
def test_ranks_with_mirrors_lose_one_anywhere(
    tmp_path: Path, mesh: str, fault: Fault, zero: int, check: bool
) -> None:  # fmt: skip
    mirrored_without(tmp_path, mesh, fault, zero, check)


@pytest.mark.gloo
@pytest.mark.long
def test_what_two_lost_ranks_of_a_pipeline_had_is_gone(tmp_path: Path) -> None:
    faults = [Fault(rank, 1, "the gradients for the next rank's copy") for rank in (1, 2)]
    with pytest.raises(AssertionError, match=r"ranks 1, 2 died.* in the memory of one other rank alone"):
        launching.ranks(survival_worker.main, 3, tmp_path, "pp=3", faults, csc.Survive(1, mirror=True), dying=2)
