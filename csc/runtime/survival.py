"""Ranks that die while they train: the others come together without them, and finish the step in flight.

Terms
  member      a process that trains now, known for good by its number at the start; *place*: its rank among members
  replica     a whole pipeline with all that belongs to it; one that has lost a rank is taken out, and its other ranks
              are *spare*: they train no more
  flight      what one rank has of the step that is under way: which microbatches it has done, and the sums of their
              gradients before any other replica's are added
  report      what a rank says of itself after a death; *plan*: what the lowest rank makes of all reports

A step of a job that survives has two halves. First each replica does its microbatches and meets nobody else; so one
that is whole always gets to the end of that. Then gradients and losses are added over replicas. If a rank has died, one
of these sums fails, for all within milliseconds: whoever gets an error closes its sums. What was added in part is
dropped, what each replica had before is kept; the lost replica's microbatches are dealt to the others, and sums are
made again. If any rank came out of the last sum, all have had their gradients: the step is done, and only its loss has
to be told. Later steps have the same microbatches, dealt to the replicas that are left.

Ranks tell each other of this over stores: every process has one (torch's TCPStore), that of the lowest rank alive is
used. So it does not matter which rank dies. A death meanwhile begins it again, under another name: that of all dead.

    survival = Survival(failures, mesh, meeting, seconds)     every process makes it
    survival.trains(trainer)              one whose ranks are regrouped; before it has any step
    survival.results(trainer, dealt, uneven, drawn)           a step
    survival.lost(seconds) -> bool        whether a member has died
    survival.recover(error)               all members call it, sooner or later; RankLost if it cannot be
    survival.rows(number)                 of a meeting that others have finished
    survival.reduced(program)             as the replicas that are left run it
    check(mesh, failures, options)        InputError, before training
"""

from __future__ import annotations

import json
import logging
import re
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from csc import devices
from csc.errors import InputError, RankLost
from csc.ir.groups import RANDOM, Group
from csc.ir.mesh import Mesh
from csc.runtime import context, executor
from csc.runtime import loss as loss_terms
from csc.runtime.batches import Microbatches
from csc.runtime.c10d import Distributed
from csc.runtime.deaths import Deaths, own_host
from csc.runtime.executor import StepResult, Timed, computed
from csc.runtime.gradients import GradientSums, of_any, reduce, wait_sum
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.meeting import NEWS, Meeting, let_go
from csc.runtime.rank import Rank
from csc.runtime.specs import StepCounts
from csc.runtime.trainer import counted

if TYPE_CHECKING:
    from csc.runtime.trainer import Trainer

log = logging.getLogger("csc")

LOOK = 0.005  # seconds between two looks into a store
Result = TypeVar("Result")


class Again(Exception):
    """Another member has died meanwhile."""


# --- before training ---------------------------------------------------------------------------------------------


def check(mesh: Mesh, failures: int, refused: Mapping[str, str]) -> None:
    """InputError unless so many ranks may die at once, whichever they are. refused: options that cannot be had with it,
    and why.
    """
    where = "compile"
    if mesh.dp <= failures:
        needed = f"dp={failures + 1}" if mesh.components else replace(mesh, dp=failures + 1)
        raise InputError(
            f"the mesh {mesh} has {mesh.dp} replica{'s' * (mesh.dp > 1)}, and {failures} lost "
            f"rank{'s' * (failures > 1)} may take as many away: no copy of some weights would be left", where,
            f"use {failures + 1} replicas or more (mesh='{needed}'), or survive={mesh.dp - 1}"
            + (", and checkpoints" if mesh.dp == 1 else ""),
        )  # fmt: skip
    if mesh.components or mesh.order != Mesh.AXES:
        raise InputError(
            f"a rank of the mesh {mesh} cannot be lost: components have sizes of their own, or ranks another order",
            where, "use one mesh for the whole model, in the usual order, or leave survive= out",
        )  # fmt: skip
    if mesh.cp > 1:
        raise InputError(
            f"a rank of the mesh {mesh} cannot be lost: ranks share sequences", where, "use cp=1, or leave survive= out"
        )
    for option, why in refused.items():
        raise InputError(f"with {option} a rank cannot be lost: {why}", where, f"leave {option} or survive= out")


# --- one step on one rank ----------------------------------------------------------------------------------------


@dataclass
class Flight:
    """Microbatches are known by their number in the global batch, replica after replica."""

    step: int
    total: int
    todo: list[int]
    done: list[int] = field(default_factory=list)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    dtype: int = 0
    drawn: int | None = None
    reduced: GradientSums | None = None
    row: list[float] | None = None  # losses of all, once they are added
    adds: bool = False  # whether it is in the second half
    trace: list[Timed] = field(default_factory=list)

    def results(self, trainer: Trainer, dealt: Microbatches, uneven: bool, drawn: int) -> dict[int, StepResult]:
        """Go on from wherever it is, to the end of the step."""
        (rank,) = trainer.ranks
        if self.row is None:
            self.adds = False
            self._seed(rank, drawn)
            self._work(trainer, rank, dealt)
            self.adds = True
            self.reduced = self._reduced(rank, uneven)
            self.row = _run(self._combined(trainer, rank, dealt))
        assert self.reduced is not None
        count = self.total
        parts, dtype, counts = self.row[:count], int(self.row[count]), self.row[count + 1 :]
        losses = loss_terms.Losses(
            tuple((part, 1.0) for part in parts), loss_terms.DTYPES[dtype], StepCounts(*counts)
        )  # fmt: skip
        return {rank.rank: StepResult(self.reduced, losses, self.trace)}

    def _seed(self, rank: Rank, drawn: int) -> None:
        if self.drawn is None and rank.program.manifest.random:
            step = torch.tensor([drawn if rank.rank == 0 else 0], dtype=torch.int64, device=rank.device)
            _run(wait_sum(rank.endpoint, step, rank.group(Group.WORLD), "seed of the step's random numbers"))
            self.drawn = int(step)

    def _work(self, trainer: Trainer, rank: Rank, dealt: Microbatches) -> None:
        """Microbatches that are to be done here, as many at once as the schedule has."""
        if not self.todo:
            return
        every, manifest = dealt.all, rank.program.manifest
        ranks = [trainer.member(one.program) for one in every]
        read = [trainer.on_device(one.tensors, member) for one, member in zip(every, ranks, strict=True)]
        batches, weights = _run(loss_terms.weighed(ranks, read, of_all=True))
        held = trainer.working(rank)
        while self.todo:
            now = self.todo[: manifest.microbatches]
            given = [self._attached(rank, ranks[i], batches[i], i) for i in now]
            own = {place: weights[i] for place, i in enumerate(now)}
            work = computed(
                rank, [ranks[i] for i in now], given, held, own, trainer.is_profiled(), trainer.within, trainer.ahead
            )
            self._add(now, _run(work), own)

    def _attached(self, rank: Rank, member: Rank, batch: Mapping[str, Any], number: int) -> dict[str, Any]:
        batch = {**context.attach(member, batch), **{name: met.number for name, met in rank.met.items()}}
        return batch if self.drawn is None else {**batch, RANDOM: executor.of_microbatch(self.drawn, number)}

    def _add(self, now: Sequence[int], work: Any, weights: Mapping[int, float]) -> None:
        """What microbatches gave. All of it, or nothing of it if this is stopped before its last line."""
        work.gradients.merge()
        sums = dict(self.sums)
        for name, gradient in work.gradients.buffers.items():
            sums[name] = sums[name] + gradient if name in sums else gradient
        losses = {now[place]: loss_terms.weighted(loss, weights[place]) for place, loss in work.losses.items()}
        dtypes = [loss_terms.DTYPES.index(loss.dtype) for loss in work.losses.values()]
        self.dtype, self.trace = next(iter(dtypes), self.dtype), [*self.trace, *work.trace]
        self.sums, self.losses = sums, {**self.losses, **losses}
        self.done, self.todo = [*self.done, *now], self.todo[len(now) :]

    def drop(self) -> None:
        """Other ranks of the replica have not done the same."""
        self.done, self.sums, self.losses, self.reduced = [], {}, {}, None

    def _reduced(self, rank: Rank, uneven: bool) -> GradientSums:
        """The sums over all replicas, beside those of this one, which are needed if that fails."""
        held = [p for p in rank.program.manifest.parameters if rank.position in p.ranks]
        sums = GradientSums(held, [stage.stage for stage in rank.stages])
        sums.buffers = dict(self.sums)
        if any(action.kind == "REDUCE" for action in rank.actions):
            rank.endpoint.at("the sum of gradients")
            reached = None
            if uneven:
                names = [spec.name for spec in rank.program.manifest.parameters]
                reached = _run(of_any(sums, names, rank))
            _run(reduce(sums, rank, reached))
        return sums

    def _combined(self, trainer: Trainer, rank: Rank, dealt: Microbatches) -> Generator[str, None, list[float]]:
        """As csc.runtime.loss.combine, by number of the microbatch."""
        rank.endpoint.at("the end of a step")
        every = dealt.all
        count, once = self.total, rank.group(Group.TENSOR)[0] == rank.rank
        row = [0.0] * (count + 1 + len(astuple(StepCounts())))
        if once:
            for number, part in self.losses.items():
                row[number] = part
            if rank.position == 0:
                counts = counted(trainer.manifests, [every[number] for number in self.done])
                row[count + 1 :] = map(float, astuple(counts))
        if self.losses and rank.group(Group.POSITION)[0] == rank.rank:
            row[count] = float(self.dtype)
        whole = torch.tensor(row, dtype=torch.float64, device=rank.device)
        yield from wait_sum(rank.endpoint, whole, rank.group(Group.WORLD), "loss over all ranks")
        found: list[float] = whole.tolist()
        return found


def _run(work: Generator[str, None, Result]) -> Result:
    """To its end, over a transport that blocks."""
    try:
        wait = next(work)
    except StopIteration as end:
        result: Result = end.value
        return result
    raise AssertionError(f"it waits for {wait}")


# --- what members tell each other --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """rounds: how many meetings it has finished; rows: what was said in the last one. step: in which it is, 0 for none;
    total: how many microbatches that has; done: those whose gradients it has. ended, row: the last step that it has
    finished, and its losses.
    """

    rounds: int
    rows: list[list[int]]
    step: int = 0
    total: int = 0
    done: list[int] = field(default_factory=list)
    drawn: int | None = None
    ended: int = 0
    row: list[float] | None = None


@dataclass(frozen=True)
class Regrouping:
    """members: by place. keeps, todo: by replica, whether it keeps what it has done, and what it has to do."""

    members: list[int]
    rounds: int
    rows: list[list[int]]
    step: int = 0
    row: list[float] | None = None
    drawn: int | None = None
    keeps: list[bool] = field(default_factory=list)
    todo: list[list[int]] = field(default_factory=list)


def dealt_to(replicas: int, numbers: Sequence[int], done: Sequence[int] = ()) -> list[list[int]]:
    """Which microbatches each replica has: always to the one with the fewest. done: how many each has already."""
    found: list[list[int]] = [[] for _ in range(replicas)]
    load = list(done) or [0] * replicas
    for number in numbers:
        least = load.index(min(load))
        found[least].append(number)
        load[least] += 1
    return found


def shares(replicas: int, before: int, microbatches: int) -> list[list[int]]:
    """Which microbatches each replica has in a whole step: its own as before, and some of those that are lost."""
    own = [list(range(one * microbatches, (one + 1) * microbatches)) for one in range(replicas)]
    extra = dealt_to(replicas, range(replicas * microbatches, before * microbatches))
    return [[*one, *more] for one, more in zip(own, extra, strict=True)]


def planned(reports: Mapping[int, Report], replicas: Sequence[Sequence[int]]) -> Regrouping:
    """What members do now. replicas: those that are left, each with its members."""
    latest = max(reports.values(), key=lambda one: one.rounds)
    plan = Regrouping([one for replica in replicas for one in replica], latest.rounds, latest.rows)
    step = max(one.step for one in reports.values())
    if not step:
        return plan
    row = next((one.row for one in reports.values() if one.ended == step), None)
    if row is not None:
        return replace(plan, step=step, row=row)
    drawn = next((one.drawn for one in reports.values() if one.drawn is not None and one.step == step), None)
    kept = []
    for replica in replicas:
        done = [sorted(reports[one].done) if reports[one].step == step else [] for one in replica]
        kept.append(done[0] if all(one == done[0] for one in done) else [])
    total = max(one.total for one in reports.values())
    missing = sorted(set(range(total)) - {number for own in kept for number in own})
    todo = dealt_to(len(replicas), missing, [len(own) for own in kept])
    return replace(plan, step=step, drawn=drawn, keeps=[bool(own) for own in kept], todo=todo)


class _Guarded(dist.Store):
    """A store in which nobody waits for the dead. stop: asked meanwhile, raises."""

    def __init__(self, store: dist.Store, stop: Callable[[], None]) -> None:
        super().__init__()
        self._store, self._stop = store, stop

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until they are there."""
        while not self._store.check(list(keys)):
            self._stop()
            time.sleep(LOOK)

    def get(self, key: str) -> bytes:
        """Once it is there."""
        self.wait([key])
        return self._store.get(key)

    def set(self, key: str, value: Any) -> None:
        """As the store."""
        self._store.set(key, value)

    def add(self, key: str, number: int) -> int:
        """As the store."""
        return self._store.add(key, number)

    def check(self, keys: list[str]) -> bool:
        """As the store."""
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As the store."""
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """As the store."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """As the store."""
        return self._store.num_keys()


def _transport(trainer: Trainer) -> Distributed:
    assert isinstance(trainer.transport, Distributed)
    return trainer.transport


# --- a process ---------------------------------------------------------------------------------------------------


class Survival:
    """Of one process. All make it at the same time, right after a meeting."""

    def __init__(self, failures: int, mesh: Mesh, meeting: Meeting, seconds: float) -> None:
        if any(map(devices.aborts, re.split("[:,]", str(dist.get_backend_config())))):
            raise InputError(
                "survive= is for gloo, and the processes meet over NCCL", "compile",
                "train without it and with checkpoints, or dist.init_process_group('gloo') before",
            )  # fmt: skip
        self.failures, self._meeting, self._seconds = failures, meeting, seconds
        self.me = dist.get_rank()
        self.members = list(range(dist.get_world_size()))
        self._before, self.mesh = mesh, mesh  # as it was compiled, and as it is
        self._trainers: list[weakref.ref[Trainer]] = []
        self.forget: list[Callable[[], None]] = []  # called when all groups are gone
        self._flight: Flight | None = None
        self._coming: Regrouping | None = None  # for a step that this rank has not begun
        self._ended: tuple[int, list[float] | None] = (0, None)
        self._known: tuple[int, list[list[int]]] = (0, [])
        self._without: list[int] = []  # who was dead when they last came together
        self.is_spare = False
        self._common: dist.Store | None = None  # of the groups of now
        host = own_host()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.deaths = Deaths(self.me, len(self.members), host)
        told = json.dumps([*self.deaths.address, self._store.port])
        found = [json.loads(text) for text in meeting.texts("survive", told)]
        self._stores = [(host, port) for host, _, port in found]
        self.deaths.connect([(host, port) for host, port, _ in found], seconds)
        self.recoveries: list[dict[str, float]] = []  # when each was begun and done

    @property
    def has_lost(self) -> bool:
        """Whether there are fewer replicas than at the start."""
        return self.mesh != self._before

    def trains(self, trainer: Trainer) -> None:
        """All members make the same ones in the same order."""
        self._trainers.append(weakref.ref(trainer))

    def reduced(self, program: LoadedProgram) -> LoadedProgram:
        """A program that was compiled for all replicas, for those that are left."""
        if not self.has_lost:
            return program
        return replace(program, manifest=replace(program.manifest, mesh=self.mesh))

    def rows(self, number: int) -> list[list[int]] | None:
        """What all said in the meeting with this number, if a member had finished it when another died."""
        return self._known[1] if self._known[0] == number else None

    # a step

    def results(self, trainer: Trainer, dealt: Microbatches, uneven: bool, drawn: int) -> dict[int, StepResult]:
        """Of this rank's step. RankLost if it cannot be finished."""
        flight = self._flight = self._begun(trainer)
        while True:
            try:
                found = flight.results(trainer, dealt, uneven, drawn)
            except RankLost as error:
                let_go(error)
                if not self.lost(NEWS):
                    raise
                _transport(trainer).leave(messages=not flight.adds)
                self.recover(error)
            else:
                self._ended, self._flight = (flight.step, flight.row), None
                return found

    def _begun(self, trainer: Trainer) -> Flight:
        step, manifest = self._meeting.step, trainer.program.manifest
        replica = self.mesh.coordinates(self.members.index(self.me)).dp
        count = manifest.microbatches
        flight = Flight(step, self._before.dp * count, shares(self.mesh.dp, self._before.dp, count)[replica])
        if self._coming is not None and self._coming.step == step:
            flight.todo, flight.drawn = self._coming.todo[replica], self._coming.drawn
        self._coming = None
        return flight

    # deaths

    def _gone(self) -> list[int]:
        """All that have died, spare ones too. What is decided follows from this and from what ranks report, so that
        ranks that had come together before another death and ranks that had not decide the same.
        """
        return sorted(self.deaths.dead)

    def lost(self, seconds: float = 0.0) -> bool:
        """Whether a rank has died since they last came together, or is seen to have within so many seconds."""
        others = set(range(self._before.size)).difference(self._without)
        return self.deaths.wait(others, seconds) and self._gone() != self._without

    def recover(self, error: BaseException) -> None:
        """Come together with the members that are left. RankLost if that cannot be."""
        began = time.time()
        end = time.monotonic() + self._seconds
        while True:
            gone = self._gone()
            replicas = self._left(gone, error)
            try:
                plan = self._agreed(gone, replicas, end)
                if self.me not in plan.members:
                    self._wait_as_spare(gone, plan)
                    end = time.monotonic() + self._seconds
                    continue
                self._regroup(plan, gone)
            except Again:
                continue
            except RuntimeError as broken:
                if self._gone() == gone:
                    raise self._cannot(gone, f"they did not come together again ({broken})") from error
                continue
            break
        now = time.time()
        new = [one for one in gone if one not in self._without]
        self._without = gone
        seen = min(self.deaths.dead[one] for one in new)
        self.recoveries.append({"seen": seen, "began": began, "done": now})
        self._tell(new, plan, now - seen)

    def _left(self, gone: Sequence[int], error: BaseException) -> list[list[int]]:
        """The replicas that are whole, each with its members. RankLost if there is none, or too many are lost."""
        left = sorted(self.deaths.left)
        if left:
            raise self._cannot(gone, f"rank {left[0]} has ended by itself") from error
        replicas = dict.fromkeys(self._before.group(Group.REPLICA, rank) for rank in range(self._before.size))
        whole = [list(replica) for replica in replicas if not set(replica).intersection(gone)]
        if not whole:
            raise self._cannot(gone, "no replica is left whole") from error
        if self._before.dp - len(whole) > self.failures:
            raise self._cannot(gone, f"survive={self.failures} covers so many, in replicas of their own") from error
        return whole

    def _cannot(self, gone: Sequence[int], why: str) -> RankLost:
        named = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
        self._meeting.give_up(f"{named} died")
        return RankLost(
            f"{named} died, and the others do not go on: {why}", f"rank {self.me} at the start",
            "Start again from the last checkpoint",
        )  # fmt: skip

    # coming together

    def _check(self, gone: Sequence[int]) -> None:
        if self._gone() != list(gone) or self.deaths.left:
            raise Again

    def _stop(self, gone: Sequence[int]) -> None:
        if self._gone() != list(gone):
            raise RuntimeError("connection closed: a rank has died")

    def _agreed(self, gone: Sequence[int], replicas: Sequence[Sequence[int]], end: float) -> Regrouping:
        """What the lowest rank that is alive decides, once all have said how far they are."""
        alive = [one for one in range(self._before.size) if one not in gone]
        store = dist.PrefixStore("-".join(map(str, gone)), self._store_of(alive[0]))
        store.set(f"report/{self.me}", json.dumps(asdict(self._report())))
        if self.me == alive[0]:
            reports = {}
            for one in alive:
                self._await(store, f"report/{one}", gone, end, f"rank {one} has not come")
                reports[one] = Report(**json.loads(store.get(f"report/{one}")))
            store.set("plan", json.dumps(asdict(planned(reports, replicas))))
        self._await(store, "plan", gone, end, "not all of them have come, or the first of them has not said so")
        return Regrouping(**json.loads(store.get("plan")))

    def _store_of(self, member: int) -> dist.Store:
        if member == self.me:
            return self._store
        host, port = self._stores[member]
        return dist.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=self._seconds))

    def _await(self, store: dist.Store, key: str, gone: Sequence[int], end: float, silent: str) -> None:
        while not store.check([key]):
            self._check(gone)
            if time.monotonic() > end:
                raise self._cannot(gone, f"{silent} within {self._seconds:g} s: stopped, or cut off")
            time.sleep(LOOK)

    def _report(self) -> Report:
        flight, meeting = self._flight, self._meeting
        ended, row = self._ended
        report = Report(meeting.rounds, meeting.rows, ended=ended, row=row)
        if flight is None:
            return report
        return replace(report, step=flight.step, total=flight.total, done=flight.done, drawn=flight.drawn)

    def _regroup(self, plan: Regrouping, gone: Sequence[int]) -> None:
        """New process groups, and what the plan says of the step in flight."""
        trainers = [one for ref in self._trainers if (one := ref()) is not None]
        for trainer in trainers:
            _transport(trainer).leave()
        self._meeting.leave()
        for forget in self.forget:
            forget()
        if dist.is_initialized():
            dist.destroy_process_group()
        place, wait = plan.members.index(self.me), timedelta(seconds=self._seconds)
        name = f"groups/{'-'.join(map(str, gone))}"
        common = dist.PrefixStore(name, self._store_of(plan.members[0]))
        self._common = _Guarded(common, lambda: self._stop(gone))  # held here: torch holds what is below Python alone
        dist.init_process_group("gloo", store=self._common, rank=place, world_size=len(plan.members), timeout=wait)
        mesh = replace(self._before, dp=len(plan.members) * self._before.dp // self._before.size)
        self._meeting.rejoin(self._seconds, common)
        for trainer in trainers:
            trainer.regroup(mesh, place)
        self.members, self.mesh = plan.members, mesh
        self._known = (plan.rounds, plan.rows)
        replica, flight = mesh.replicas_of(place)[0], self._flight
        if flight is None:
            self._coming = plan if plan.step and plan.row is None else None
        elif plan.row is not None:
            if flight.reduced is None:
                raise self._cannot(gone, f"the losses of step {plan.step} are known, its gradients are not")
            flight.row = plan.row
        else:
            flight.reduced = None
            if not plan.keeps[replica]:
                flight.drop()
            flight.todo, flight.drawn = list(plan.todo[replica]), plan.drawn

    def _tell(self, gone: Sequence[int], plan: Regrouping, seconds: float) -> None:
        if plan.members[0] == self.me:
            again = sum(map(len, plan.todo))
            log.warning(
                "rank%s %s died: %d of %d replicas train on, %.2f s after that was seen%s", "s" * (len(gone) > 1),
                ", ".join(map(str, gone)), self.mesh.dp, self._before.dp, seconds,
                f"; {again} microbatches of step {plan.step} are done by others" if again else "",
            )  # fmt: skip

    def _wait_as_spare(self, gone: Sequence[int], plan: Regrouping) -> None:
        """This process' replica lacks a rank: it waits until another rank dies, and says what it has then; or until the
        members have ended, and ends.
        """
        trainers = [one for ref in self._trainers if (one := ref()) is not None]
        for trainer in trainers:
            _transport(trainer).leave()
        self._meeting.give_up(f"rank {self.me} is spare")
        if dist.is_initialized():
            dist.destroy_process_group()
        self._flight, self._without = None, list(gone)
        if not self.is_spare:
            self.is_spare = True
            log.warning("rank %d is spare from now on: its replica has lost a rank", self.me)
        while not self.deaths.left.intersection(plan.members):
            if self.lost(1.0):
                return
        raise SystemExit(0)
