"""Real processes that are killed, at each kind of place of a step: the part `processes` of benchmarks.faults.

Terms
  place    where a rank is when it kills itself: each action of its schedule (F, B, W, messages), the sums over
           replicas, the meetings (before a step, for the norm, in a save), and two of a recovery from another death
  fault    a rank, a step and a place; a *job* has one, or as many after each other as its mesh can lose

Ranks are forked from one process that has imported everything, over gloo, with a model of two layers: what is measured
is whether jobs go on, and how long it takes them. `summary` has

    faults_tried, lost_steps, wrong_losses (more than 1e-6 beside a run without faults), hangs
    microbatches_repeated_max      of one replica and step: those that all its ranks had finished, done again by others
    detect_seconds_p95             from the kill until another rank knows, over all others
    recover_seconds_p95            from then until new groups are there
    frozen, frozen_without_a_sentence        ranks that are stopped: the others are to end with a sentence

Times are of a machine that may be busy: `load` has its load average by core.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import csc
from csc.errors import RankLost
from csc.ir.groups import Group
from csc.ir.schedule import Action
from csc.runtime import executor
from csc.runtime.survival import Survival

STEPS, MICROBATCHES, LENGTH, WORDS, WIDTH = 5, 3, 8, 32, 16
LIMIT = 120.0  # seconds after which a job hangs
TIMEOUT = 40.0  # of csc.compile
FROZEN = 5.0  # the same, where a rank is stopped
RECOVERY = ("the report of a recovery", "the groups of a recovery")
SAVE = "the shards of what is saved"


@dataclass(frozen=True)
class Setting:
    """What is compiled, and what of it may be lost."""

    mesh: str
    survive: csc.Survive
    zero: int = 0

    @property
    def of(self) -> csc.Mesh:
        """The mesh."""
        return csc.Mesh.parse(self.mesh)


SETTINGS = (
    Setting("dp=4", csc.Survive(3, copies=1)),
    Setting("dp=2,pp=2", csc.Survive(1, copies=1)),
    Setting("dp=3,pp=2", csc.Survive(2, copies=1)),
    Setting("dp=2,tp=2", csc.Survive(1, copies=1)),
    Setting("dp=2,cp=2", csc.Survive(1, copies=1)),
    Setting("dp=4", csc.Survive(1, copies=1), zero=1),
    Setting("dp=4", csc.Survive(1), zero=2),
    Setting("pp=3", csc.Survive(1, mirror=True)),
    Setting("dp=2,pp=2", csc.Survive(1, mirror=True)),
    Setting("dp=4", csc.Survive(1, mirror=True), zero=3),
)


@dataclass(frozen=True)
class Fault:
    """At the count-th time that a rank is at a place of a step. number: the signal that it sends itself."""

    rank: int
    step: int
    place: str
    count: int = 1
    number: int = int(signal.SIGKILL)


@dataclass
class Job:
    """What came of some processes. codes: None for one that had to be ended."""

    setting: Setting
    faults: list[Fault]
    codes: list[int | None]
    told: dict[int, dict[str, Any]]
    killed: dict[int, dict[str, float]]
    finished: dict[int, dict[str, Any]]  # the last step in which a rank had finished any microbatch, and these
    errors: dict[int, str] = field(default_factory=dict)


class Block(torch.nn.Module):
    """Attention and a residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = [one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.qkv(hidden).chunk(3, -1)]
        seen = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(-2))
        return hidden + self.down(torch.nn.functional.gelu(self.up(hidden)))


class Model(torch.nn.Module):
    """An embedding, two layers and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, width)
        self.layers = torch.nn.ModuleList(Block(width) for _ in range(2))
        self.head = torch.nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def batch(mesh: csc.Mesh, step: int) -> dict[str, torch.Tensor]:
    """Of one step; some labels do not count, in each sample others."""
    made = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (mesh.dp * MICROBATCHES, LENGTH), generator=made)
    counts = torch.rand(tokens.shape, generator=made) < 0.7
    return {"tokens": tokens, "labels": torch.where(counts, tokens.roll(1, 1), -100)}


def compiled_for(setting: Setting, survives: bool, timeout: float, width: int = WIDTH) -> Any:
    """The model, with the same weights every time."""
    torch.manual_seed(0)
    survive = setting.survive if survives else None
    return csc.compile(
        Model(width), mesh=setting.of, example=batch(setting.of, 0), microbatches=MICROBATCHES, schedule="1f1b",
        check=False, zero=setting.zero, survive=survive, timeout=timeout,
    )  # fmt: skip


def train(compiled: Any, mesh: csc.Mesh, losses: list[float], saved: Path) -> None:
    """Some steps; losses: as they come."""
    optimizer = compiled.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)  # Adam makes steps of rounding errors
    for step in range(STEPS):
        loss = compiled.train_step(batch(mesh, step))
        compiled.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if step == STEPS - 2:
            compiled.save(saved)


# --- one rank ----------------------------------------------------------------------------------------------------


class Striker:
    """Ends this rank where a fault says; notes each place of the third step."""

    def __init__(self, faults: Sequence[Fault], losses: list[float], folder: Path) -> None:
        self.rank = int(os.environ["RANK"])
        self._faults = [one for one in faults if one.rank == self.rank]
        self._losses, self._folder = losses, folder
        self._seen: dict[Fault, int] = {}
        self._finished: tuple[int, list[int]] = (0, [])  # of a step, which microbatches
        self.survival: Any = None
        self.places: list[str] = []

    def at(self, place: str) -> None:
        """The rank is at a place."""
        step = len(self._losses)
        if step in (2, STEPS - 1):
            self.places.append(place)
        for fault in self._faults:
            if step == fault.step and place == fault.place:
                self._seen[fault] = self._seen.get(fault, 0) + 1
                if self._seen[fault] == fault.count:
                    told = {"time": time.time(), "step": step}
                    (self._folder / f"killed_{self.rank}.json").write_text(json.dumps(told))
                    os.kill(os.getpid(), fault.number)

    def finished(self, action: Action) -> None:
        """It has added the gradients of a microbatch, and says so where it is read after its death."""
        flight = self.survival._flight if self.survival is not None else None
        if flight is None:
            return
        if self._finished[0] != flight.step:
            self._finished = (flight.step, [])
        self._finished[1].append(flight.todo[action.microbatch])
        told = {"step": flight.step, "finished": self._finished[1]}
        (self._folder / f"finished_{self.rank}.json").write_text(json.dumps(told))

    def hook(self, compiled: Any) -> None:
        """Into whatever tells where a rank is."""
        survival = self.survival = compiled.trainer().transport.meeting.survival
        positions = type(compiled.trainer().transport.meeting.positions)
        moved, agreed, regroup = positions.moved, Survival._agreed, Survival._regroup

        computes = executor._Step.compute

        def at(own: Any, place: Any) -> None:
            if place is not None:
                self.at(_kind(str(place)))
            moved(own, place)

        def compute(own: Any, action: Action) -> None:
            computes(own, action)
            if "W" in action.kind:
                self.finished(action)

        def reports(own: Any, *arguments: Any) -> Any:
            self.at(RECOVERY[0])
            return agreed(own, *arguments)

        def groups(own: Any, *arguments: Any) -> Any:
            self.at(RECOVERY[1])
            return regroup(own, *arguments)

        positions.moved = at
        setattr(executor._Step, "compute", compute)  # noqa: B010
        if survival is not None:
            setattr(Survival, "_agreed", reports)  # noqa: B010
            setattr(Survival, "_regroup", groups)  # noqa: B010


def _kind(place: str) -> str:
    """Without the number of the step."""
    return place.split(" of step ")[0].strip("'")


def rank(folder: Path, setting: Setting, faults: Sequence[Fault], timeout: float) -> None:
    """Train, and tell what came of it."""
    of, losses = setting.of, list[float]()
    compiled = compiled_for(setting, True, timeout)
    compiled.compile_for(batch(of, 0))
    striker = Striker(faults, losses, folder)
    striker.hook(compiled)
    try:
        train(compiled, of, losses, folder / "saved")
    finally:
        survival = striker.survival
        told = {
            "losses": losses, "places": striker.places, "recoveries": survival.recoveries, "dead": survival.deaths.dead
        }  # fmt: skip
        (folder / f"told_{striker.rank}.json").write_text(json.dumps(told))


# --- jobs --------------------------------------------------------------------------------------------------------


def job(setting: Setting, faults: Sequence[Fault], timeout: float = TIMEOUT) -> Job:
    """Fork the ranks of a mesh, and wait for those that are not killed."""
    count = setting.of.size
    with tempfile.TemporaryDirectory(prefix="csc-faults-") as name:
        folder = Path(name)
        pids, _store = _started(folder, setting, faults, timeout, count)
        frozen = [pids[one.rank] for one in faults if one.number == signal.SIGSTOP]
        codes = _ended(pids, frozen)
        told = {one: json.loads(text) for one, text in _read(folder, "told_{}.json", count)}
        killed = {one: json.loads(text) for one, text in _read(folder, "killed_{}.json", count)}
        finished = {one: json.loads(text) for one, text in _read(folder, "finished_{}.json", count)}
        return Job(setting, list(faults), codes, told, killed, finished, dict(_read(folder, "error_{}.txt", count)))


def _read(folder: Path, name: str, count: int) -> Iterator[tuple[int, str]]:
    for one in range(count):
        with contextlib.suppress(OSError):
            yield one, (folder / name.format(one)).read_text()


Main = Callable[[Path, Setting, Sequence[Fault], float], None]


def _started(
    folder: Path, setting: Setting, faults: Sequence[Fault], timeout: float, count: int, main: Main | None = None
) -> tuple[list[int], dist.Store]:
    """The processes, and the store where they find each other. That has threads, and what one of them holds at a fork
    the new process would wait for without an end: so it is made behind the forks.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pids = [_forked(folder, setting, faults, timeout, one, count, port, main) for one in range(count)]
    return pids, dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def _forked(
    folder: Path, setting: Setting, faults: Sequence[Fault], timeout: float, own: int, count: int, port: int,
    main: Main | None,
) -> int:  # fmt: skip
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        torch.set_num_threads(1)
        place = {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
        os.environ.update({name: str(value) for name, value in {**place, **meeting}.items()})
        output = (folder / f"output_{own}.txt").open("w")
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        (main or rank)(folder, setting, faults, timeout)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        code = 3 if isinstance(error, RankLost) else 1
        (folder / f"error_{own}.txt").write_text(str(error) if code == 3 else traceback.format_exc())
    util._exit_function()  # type: ignore[attr-defined]
    os._exit(code)


def _ended(pids: Sequence[int], frozen: Sequence[int]) -> list[int | None]:
    """Exit codes, minus a signal's number; None for what had to be ended. Those that are stopped are ended last."""
    found: dict[int, int] = {}
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and not set(pids) - set(frozen) <= found.keys():
        for pid in set(pids) - found.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                found[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in set(pids) - found.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [found.get(pid) for pid in pids]


def undisturbed(setting: Setting) -> list[float]:
    """The losses of all ranks in this process."""
    losses = list[float]()
    with tempfile.TemporaryDirectory(prefix="csc-faults-") as name:
        train(compiled_for(setting, False, TIMEOUT), setting.of, losses, Path(name) / "saved")
    return losses


def places_of(setting: Setting) -> list[tuple[int, str]]:
    """Every rank with each of its places, by a job without faults."""
    found = job(setting, [])
    assert set(found.codes) == {0}, found.errors
    return [(one, place) for one, told in found.told.items() for place in dict.fromkeys(told["places"])]


def chains(setting: Setting, wanted: int) -> list[list[Fault]]:
    """Jobs with so many faults in all: the ranks and places of a mesh in turns. Each rank of a job dies in a replica of
    its own; the last fault of every third job comes in the middle of a recovery.
    """
    of, most = setting.of, setting.survive.failures
    every = places_of(setting)
    order = random.Random(0).sample(every, len(every))
    jobs: list[list[Fault]] = []
    at = 0
    while sum(map(len, jobs)) < wanted:
        own: list[Fault] = []
        hit: set[int] = set()
        for step in range(1, 1 + most):
            while of.coordinates(order[at % len(order)][0]).dp in hit:
                at += 1
            victim, place = order[at % len(order)]
            at += 1
            hit.add(of.coordinates(victim).dp)
            own.append(Fault(victim, STEPS - 1 if place in SAVED else step, place))
        if most > 1 and len(jobs) % 3 == 2:
            before = own[-2]
            own[-1] = Fault(own[-1].rank, before.step, RECOVERY[len(jobs) % 2])
        jobs.append(own)
    return jobs


SAVED = ("save", SAVE, "the index of what is saved", "the configuration of what is saved")


# --- what came of them -------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Over all jobs."""

    tried: int = 0
    lost_steps: int = 0
    wrong: int = 0
    hangs: int = 0
    repeated: int = 0
    detect: list[float] = field(default_factory=list)
    recover: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, found: Job, losses: Sequence[float]) -> None:
        """Of one job. Whoever has told all its steps is a survivor; the others are killed, or spare."""
        self.tried += len(found.killed)
        self.hangs += found.codes.count(None)
        survivors = [told for told in found.told.values() if len(told["losses"]) == STEPS]
        dead = [code for code in found.codes if code == -signal.SIGKILL]
        if not survivors or len(dead) != len(found.killed) or found.errors:
            self.lost_steps += STEPS - max((len(told["losses"]) for told in found.told.values()), default=0)
            errors = "; ".join(found.errors.values())
            self.failed.append(f"{found.setting} {found.faults}: {found.codes} {errors[-800:]}")
        for told in survivors:
            self.wrong += any(abs(a - b) > 1e-6 * max(1, abs(b)) for a, b in zip(told["losses"], losses, strict=True))
            for one, seen in told["dead"].items():
                if int(one) in found.killed:
                    self.detect.append(seen - found.killed[int(one)]["time"])
            self.recover += [one["done"] - one["seen"] for one in told["recoveries"]]
        if found.setting.survive.copies:
            self.repeated = max([self.repeated, *map(len, repeated(found))])

    @property
    def text(self) -> str:
        """So far."""
        return (
            f"{self.tried} faults, {self.lost_steps} steps lost, {self.wrong} losses wrong, {self.hangs} hangs, "
            f"{self.repeated} again, seen within {p95(self.detect)} s, together within {p95(self.recover)} s (p95)"
        )


def repeated(found: Job) -> Iterator[set[int]]:
    """Of each recovery, what all ranks of a lost replica had finished, and others have done again."""
    survivors = [told for told in found.told.values() if len(told["losses"]) == STEPS]
    recoveries = max((told["recoveries"] for told in survivors), key=len, default=[])
    mesh = found.setting.of
    for victim in found.killed:
        finished = [found.finished.get(one, {}) for one in mesh.group(Group.REPLICA, victim)]
        for recovery in recoveries:
            if all(one.get("step") == recovery["step"] for one in finished):
                yield set.intersection(*(set(one["finished"]) for one in finished), set(recovery["again"]))


def p95(values: Sequence[float]) -> float | None:
    """The 95th percentile; None of nothing."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else None


def measured(faults: int, frozen: int, settings: Sequence[Setting], tell: Any = print) -> dict[str, Any]:
    """All of it. faults: how many kills, over all settings."""
    tally, silent, stopped = Tally(), 0, 0
    losses = [undisturbed(setting) for setting in settings]
    jobs = [chains(setting, math.ceil(faults / len(settings))) for setting in settings]
    for turn in zip_longest(*jobs):  # so that a run that is cut short has had all settings
        for setting, expected, own in zip(settings, losses, turn, strict=True):
            if own is not None:
                failed = len(tally.failed)
                tally.add(job(setting, own), expected)
                named = f"{setting.mesh}, zero={setting.zero}" if setting.zero else setting.mesh
                tell("\n".join([f"{named}: {tally.text}", *tally.failed[failed:]]))
    for i in range(frozen):
        place = ("the sum of gradients", "F 0 0", "train_step")[i % 3]
        found = job(Setting("dp=2", csc.Survive(1)), [Fault(i % 2, 2, place, 1, int(signal.SIGSTOP))], FROZEN)
        stopped += 1
        other = 1 - i % 2
        silent += found.codes[other] != 3 or other not in found.errors
    cores = os.cpu_count() or 1
    return {
        "faults_tried": tally.tried, "lost_steps": tally.lost_steps, "wrong_losses": tally.wrong,
        "hangs": tally.hangs, "microbatches_repeated_max": tally.repeated,
        "detect_seconds_p95": p95(tally.detect), "recover_seconds_p95": p95(tally.recover),
        "frozen": stopped, "frozen_without_a_sentence": silent, "load": round(os.getloadavg()[0] / cores, 2),
        "failed": tally.failed,
    }  # fmt: skip


# --- what copies cost while all is well --------------------------------------------------------------------------


PRICED = "dp=2"
PRICED_STEPS = 12


def price_of_copies() -> tuple[int, float]:
    """Bytes that each rank sends after a microbatch, and by how much a step takes longer: the median over steps of two
    jobs without faults.
    """
    of, found = csc.Mesh.parse(PRICED), []
    for copies in (0, 1):
        with tempfile.TemporaryDirectory(prefix="csc-faults-") as name:
            setting, folder = Setting(PRICED, csc.Survive(1, copies)), Path(name)
            pids, _store = _started(folder, setting, [], TIMEOUT, of.size, timed)
            assert set(_ended(pids, [])) == {0}
            found.append(json.loads((folder / "timed_0.json").read_text()))
    (without, _), (seconds, sent) = found
    return sent // (PRICED_STEPS * MICROBATCHES), seconds / without - 1


def timed(folder: Path, setting: Setting, faults: Sequence[Fault], timeout: float) -> None:
    """The median of a rank's steps, of a wider model; and what it has sent."""
    compiled = compiled_for(setting, True, timeout, width=128)
    given = batch(setting.of, 0)
    compiled.train_step(given)
    survival, seconds = compiled.trainer(check=False).transport.meeting.survival, []
    before = 0 if survival._copies is None else survival._copies.sent
    for _ in range(PRICED_STEPS):
        began = time.perf_counter()
        compiled.train_step(given)
        seconds.append(time.perf_counter() - began)
    sent = 0 if survival._copies is None else survival._copies.sent - before
    (folder / f"timed_{os.environ['RANK']}.json").write_text(json.dumps([sorted(seconds)[len(seconds) // 2], sent]))
