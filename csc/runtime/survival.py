"""Ranks that die while they train: the others come together without them, and finish the step in flight.

Terms
  member      a process that trains now, known for good by its number at the start; *place*: its rank among members
  replica     a whole pipeline with all that belongs to it; one that has lost a rank is taken out, and its other ranks
              are *spare*: they train no more, until those that were killed are back
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
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from csc import devices
from csc.errors import InputError, RankLost
from csc.ir.groups import RANDOM, Group
from csc.ir.mesh import Mesh
from csc.runtime import context, executor, joining
from csc.runtime import loss as loss_terms
from csc.runtime.batches import Microbatches
from csc.runtime.c10d import Distributed
from csc.runtime.copies import Copies, Copy
from csc.runtime.deaths import Deaths, own_host
from csc.runtime.executor import Alone, Computed, StepResult, Timed, computed
from csc.runtime.gradients import GradientSums, of_any, reduce, wait_sum
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.meeting import LATE, NEWS, FewerRanks, Meeting, StepVote, is_silence, let_go
from csc.runtime.rank import Rank
from csc.runtime.specs import StepCounts
from csc.runtime.stores import ANSWER, LOOK, Guarded, connected
from csc.runtime.trainer import counted
from csc.runtime.transport import Work, finished

if TYPE_CHECKING:
    from csc.runtime.trainer import Trainer

log = logging.getLogger("csc")


@dataclass(frozen=True)
class Survive:
    """How many killed ranks a job survives, for `csc.compile(..., survive=...)`.

    Args:
        failures: Ranks that may be killed, at once or one after the other.
        copies: After this number of microbatches each rank sends its sums of gradients to a rank of another replica.
            Then only that number of a lost replica's microbatches is computed again. It takes two more gradient buffers
            on each rank. 0: nothing is sent.
        mirror: One rank may be lost, and all others go on as a mesh of one rank fewer, the step that is under way from
            its beginning. Of several pipelines each is the mirror of another; in one pipeline, and with zero=3, each
            rank also keeps the parameters of the one before it, and steps them alike: that takes parameters, gradients
            and the optimizer's state of a second rank on each, and sends a rank's gradients once a step.

    Raises:
        InputError: A number is not whole, or below 0; or more than one rank is to be lost with mirror=True.
    """

    failures: int = 1
    copies: int = 0
    mirror: bool = False

    def __post_init__(self) -> None:
        for name, value in (("failures", self.failures), ("copies", self.copies)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(
                    f"survive: {name} is {value!r}", "compile",
                    "pass how many ranks may die at once, such as survive=1, or csc.Survive(1, copies=1); None: none",
                )  # fmt: skip
        if not isinstance(self.mirror, bool):
            raise InputError(f"survive: mirror is {self.mirror!r}", "compile", "pass True or False")
        if self.mirror and (self.failures > 1 or self.copies):
            raise InputError(
                "survive: with mirror=True a rank's parameters are in the memory of one other alone, and the step is "
                f"begun again: failures={self.failures} and copies={self.copies} are not for that", "compile",
                "pass csc.Survive(1, mirror=True), or use several replicas",
            )  # fmt: skip


class Again(Exception):
    """Another member has died meanwhile."""


# --- before training ---------------------------------------------------------------------------------------------


def check(mesh: Mesh, survive: Survive, zero: int = 0) -> None:
    """InputError unless so many ranks may die at once, whichever they are."""
    where, failures = "compile", survive.failures
    if survive.mirror:
        divides = zero >= 3 and mesh.size == mesh.dp
        pipelines = mesh.size == mesh.dp * mesh.pp and mesh.pp > 1 and not zero
        if mesh.size < 2 or not (divides or pipelines or mesh.size == mesh.pp):
            raise InputError(
                f"mirror=True is for pipelines of two ranks or more without other axes than dp and pp, or zero=3 "
                f"without other axes than dp, and the mesh is {mesh} with zero={zero}", where,
                f"use mesh='pp={max(2, mesh.size)}'; or leave mirror out: replicas have copies of each other's weights"
            )  # fmt: skip
    elif mesh.dp <= failures:
        needed = f"dp={failures + 1}" if mesh.components else replace(mesh, dp=failures + 1)
        raise InputError(
            f"the mesh {mesh} has {mesh.dp} replica{'s' * (mesh.dp > 1)}, and {failures} lost "
            f"rank{'s' * (failures > 1)} may take as many away: no copy of some weights would be left", where,
            f"use {failures + 1} replicas or more (mesh='{needed}'), or "
            + (f"survive={mesh.dp - 1}" if mesh.dp > 1 else "checkpoints")
            + ("; or survive=csc.Survive(1, mirror=True), with which a neighbour has a copy" if mesh.size == mesh.pp > 1
               else ""),
        )  # fmt: skip
    if mesh.components or mesh.order != Mesh.AXES:
        raise InputError(
            f"a rank of the mesh {mesh} cannot be lost: components have sizes of their own, or ranks another order",
            where, "use one mesh for the whole model, in the usual order, or leave survive= out",
        )  # fmt: skip


# --- one step on one rank ----------------------------------------------------------------------------------------


@dataclass
class Flight:
    """Microbatches are known by their number in the global batch, replica after replica. counted: of each stage that
    gives gradients or the loss, those whose this rank has. others: those that other ranks of its place have.
    """

    step: int
    total: int
    todo: list[int]
    counted: dict[int, list[int]] = field(default_factory=dict)
    others: dict[int, list[int]] = field(default_factory=dict)
    sums: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # by stage
    losses: dict[int, float] = field(default_factory=dict)
    dtype: int = 0
    drawn: int | None = None
    reduced: GradientSums | None = None
    row: list[float] | None = None  # losses of all, once they are added
    adds: bool = False  # whether it is in the second half
    stale: bool = False  # whether parameters lack what other ranks have stepped
    trace: list[Timed] = field(default_factory=list)

    def results(
        self, trainer: Trainer, dealt: Microbatches, vote: StepVote, drawn: int, copying: Copying | None
    ) -> dict[int, StepResult]:
        """Go on from wherever it is, to the end of the step."""
        (rank,) = trainer.ranks
        if self.row is None:
            self.adds = False
            for stage in _counting(rank):
                self.counted.setdefault(stage, [])
            if self.stale:
                trainer.own.gather()
                self.stale = False
            self._seed(rank, drawn)
            self._work(trainer, rank, dealt, copying)
            self.adds = True
            self.reduced = self._reduced(rank, vote.uneven)
            self.row = finished(self._combined(trainer, rank, dealt))
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
            finished(wait_sum(rank.endpoint, step, rank.group(Group.WORLD), "seed of the step's random numbers"))
            self.drawn = int(step)

    def _work(self, trainer: Trainer, rank: Rank, dealt: Microbatches, copying: Copying | None) -> None:
        """Microbatches that are to be done here, as many at once as the schedule has."""
        if not self.todo:
            return
        every, manifest = dealt.all, rank.program.manifest
        ranks = [trainer.member(microbatch.program) for microbatch in every]
        firsts = executor.first_samples(member.program.manifest.samples_drawn for member in ranks)
        read = [trainer.on_device(microbatch.tensors, member) for microbatch, member in zip(every, ranks, strict=True)]
        rank.endpoint.recent.keep(len(every) * len(context.contexts(rank)))
        read = [dict(context.attach(member, one)) for member, one in zip(ranks, read, strict=True)]
        batches, weights = finished(loss_terms.weighed(ranks, read, of_all=True))
        held = trainer.working(rank)
        while self.todo:
            now = self.todo[: manifest.microbatches]
            given = [self._attached(rank, batches[i], i, firsts[i]) for i in now]
            weights_now = {place: weights[i] for place, i in enumerate(now)}
            chunk = Chunk(now, weights_now, frozenset(self._skipped(now)))
            loss_stage = manifest.loss.stage
            tell = None if copying is None else self._copied(copying, chunk, loss_stage)
            work = computed(
                rank, [ranks[i] for i in now], given, held, weights_now, trainer.is_profiled(), trainer.within,
                trainer.ahead, Alone(tell, chunk.skips),
            )  # fmt: skip
            self._add(chunk, finished(work), loss_stage)

    def _attached(self, rank: Rank, batch: Mapping[str, Any], number: int, first: int) -> dict[str, Any]:
        batch = {**batch, **{name: met.number for name, met in rank.met.items()}}
        return batch if self.drawn is None else {**batch, RANDOM: executor.of_microbatch(self.drawn, number, first)}

    def _skipped(self, now: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Stages and places of microbatches that count elsewhere, or here already."""
        for stage in {*self.counted, *self.others}:
            known = {*self.counted.get(stage, ()), *self.others.get(stage, ())}
            yield from ((stage, place) for place, number in enumerate(now) if number in known)

    def _add(self, chunk: Chunk, work: Computed, loss_stage: int) -> None:
        """What microbatches gave. All of it, or nothing of it if this is stopped before its last line."""
        sums = {stage: added(self.sums.get(stage, {}), own) for stage, own in work.gradients.of_stages.items()}
        losses = {**self.losses, **chunk.losses(work.losses, loss_stage)}
        dtypes = [loss_terms.DTYPES.index(loss.dtype) for loss in work.losses.values()]
        counted = {stage: [*own, *chunk.counted(stage)] for stage, own in self.counted.items()}
        self.dtype, self.trace = next(iter(dtypes), self.dtype), [*self.trace, *work.trace]
        self.sums, self.losses, self.counted, self.todo = sums, losses, counted, self.todo[len(chunk.now) :]

    def _copied(self, copying: Copying, chunk: Chunk, loss_stage: int) -> Callable[..., None]:
        """Called after each microbatch of a stage: its holder is to have the sums of the step until then."""

        def copied(
            stage: int, count: int, sums: Mapping[str, torch.Tensor], losses: Mapping[int, torch.Tensor]
        ) -> None:
            if count % copying.every and count < len(chunk.now):
                return
            losses_now = {**self.losses, **chunk.losses(losses, stage, count)} if stage == loss_stage else {}
            about = {
                "step": self.step, "counted": [*self.counted[stage], *chunk.counted(stage, count)],
                "losses": list(losses_now.items()),
                "dtype": [loss_terms.DTYPES.index(loss.dtype) for loss in losses.values()],
            }  # fmt: skip
            copying.copies.send(str(stage), about, added(self.sums.get(stage, {}), sums))

        return copied

    def take(self, stage: int, copy: Copy) -> None:
        """Add what a rank had that is lost."""
        about = copy.about
        self.sums[stage] = added(self.sums.get(stage, {}), copy.tensors)
        self.counted[stage] = [*self.counted.get(stage, ()), *about["counted"]]
        self.losses.update({number: loss for number, loss in about["losses"] if number in about["counted"]})
        self.dtype = next(iter(about["dtype"]), self.dtype)

    def _reduced(self, rank: Rank, uneven: bool) -> GradientSums:
        """The sums over all replicas, beside those of this one, which are needed if that fails."""
        held = [p for p in rank.program.manifest.parameters if rank.position in p.ranks]
        sums = GradientSums(held, [stage.stage for stage in rank.stages])
        for stage in sorted(self.sums, reverse=True):
            sums.buffers = added(sums.buffers, self.sums[stage])
        if any(action.kind == "REDUCE" for action in rank.actions):
            rank.endpoint.at("the sum of gradients")
            reached = None
            if uneven:
                names = [spec.name for spec in rank.program.manifest.parameters]
                reached = finished(of_any(sums, names, rank))
            finished(reduce(sums, rank, reached))
        return sums

    def _combined(self, trainer: Trainer, rank: Rank, dealt: Microbatches) -> Work[list[float]]:
        """As csc.runtime.loss.combine, by number of the microbatch."""
        rank.endpoint.at("the end of a step")
        count, once = self.total, rank.group(Group.TENSOR)[0] == rank.rank
        row = [0.0] * (count + 1 + len(astuple(StepCounts())))
        if once:
            for number, part in self.losses.items():
                row[number] = part
        if rank.rank == 0:  # which has the batch of all
            row[count + 1 :] = map(float, astuple(counted(trainer.manifests, dealt.all)))
        if self.losses and rank.group(Group.POSITION)[0] == rank.rank:
            row[count] = float(self.dtype)
        total = torch.tensor(row, dtype=torch.float64, device=rank.device)
        yield from wait_sum(rank.endpoint, total, rank.group(Group.WORLD), "loss over all ranks")
        combined: list[float] = total.tolist()
        return combined


@dataclass(frozen=True)
class Chunk:
    """Microbatches that are done together: their numbers and weights, by place; those that are skipped, by stage."""

    now: Sequence[int]
    weights: Mapping[int, float]
    skips: frozenset[tuple[int, int]]

    def counted(self, stage: int, count: int | None = None) -> list[int]:
        """Of a stage; of the first so many."""
        return [number for place, number in enumerate(self.now[:count]) if (stage, place) not in self.skips]

    def losses(self, losses: Mapping[int, torch.Tensor], stage: int, count: int | None = None) -> dict[int, float]:
        """By number. losses: by place. stage: which has them, if any are there."""
        having = set(self.counted(stage, count))
        return {
            self.now[place]: loss_terms.weighted(loss, self.weights[place]) for place, loss in losses.items()
            if self.now[place] in having
        }  # fmt: skip


@dataclass(frozen=True)
class Copying:
    """Of sums, after every so many microbatches."""

    copies: Copies
    every: int


def added(sums: Mapping[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Both, by name; what is given stays as it is."""
    summed = dict(sums)
    for name, gradient in more.items():
        summed[name] = summed[name] + gradient if name in summed else gradient
    return summed


def _counting(rank: Rank) -> list[int]:
    """The stages of a rank whose gradients count, or whose loss."""
    giving = {action.stage for action in rank.actions if "W" in action.kind and action.computes}
    loss = rank.program.manifest.loss.stage
    return [stage.stage for stage in rank.stages if stage.stage in giving or stage.stage == loss]


# --- what members tell each other --------------------------------------------------------------------------------


class Held(NamedTuple):
    """A copy that a rank holds: whose sums of which stage, in which step, of which microbatches."""

    member: int
    step: int
    stage: int
    counted: list[int]


class Taking(NamedTuple):
    """Who adds a copy to its own."""

    holder: int
    member: int
    stage: int


@dataclass(frozen=True)
class Report:
    """rounds: how many meetings it has finished; rows: what was said in the last one. step: in which it is, 0 for none;
    total: how many microbatches that has; counted: by stage, those whose gradients it has; held: those of ranks that
    are lost; stale: whether it has to be given what other ranks have stepped. ended, row: the last step that it has
    finished, and its losses.
    """

    rounds: int
    rows: list[list[int]]
    step: int = 0
    total: int = 0
    counted: dict[int, list[int]] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    stale: bool = False
    drawn: int | None = None
    ended: int = 0
    row: list[float] | None = None

    @classmethod
    def read(cls, text: bytes) -> Report:
        """What JSON has of it."""
        fields_read = json.loads(text)
        fields_read["counted"] = _by_stage(fields_read["counted"])
        return cls(**{**fields_read, "held": [Held(*item) for item in fields_read["held"]]})


@dataclass(frozen=True)
class Regrouping:
    """members: by place. todo: by replica, what it has to do. counted: by place in a replica and by stage, what any of
    them has; takes: what is counted among it and held as a copy. stale: by place in a replica, whether parameters that
    ranks step in shards are still to be gathered.
    """

    members: list[int]
    rounds: int
    rows: list[list[int]]
    step: int = 0
    row: list[float] | None = None
    drawn: int | None = None
    todo: list[list[int]] = field(default_factory=list)
    counted: list[dict[int, list[int]]] = field(default_factory=list)
    takes: list[Taking] = field(default_factory=list)
    stale: list[bool] = field(default_factory=list)

    @classmethod
    def read(cls, text: bytes) -> Regrouping:
        """What JSON has of it."""
        fields_read = json.loads(text)
        fields_read["takes"] = [Taking(*item) for item in fields_read["takes"]]
        return cls(**{**fields_read, "counted": [_by_stage(item) for item in fields_read["counted"]]})


def _by_stage(told: Mapping[str, list[int]]) -> dict[int, list[int]]:
    return {int(stage): numbers for stage, numbers in told.items()}


def dealt_to(replicas: int, numbers: Sequence[int], done: Sequence[int] = ()) -> list[list[int]]:
    """Which microbatches each replica has: always to the one with the fewest. done: how many each has already."""
    dealt: list[list[int]] = [[] for _ in range(replicas)]
    load = list(done) or [0] * replicas
    for number in numbers:
        least = load.index(min(load))
        dealt[least].append(number)
        load[least] += 1
    return dealt


def shares(replicas: int, before: int, microbatches: int) -> list[list[int]]:
    """Which microbatches each replica has in a whole step: its own as before, and some of those that are lost."""
    shares_of_all = [list(range(replica * microbatches, (replica + 1) * microbatches)) for replica in range(replicas)]
    extra = dealt_to(replicas, range(replicas * microbatches, before * microbatches))
    return [[*share, *more] for share, more in zip(shares_of_all, extra, strict=True)]


def planned(reports: Mapping[int, Report], replicas: Sequence[Sequence[int]]) -> Regrouping:
    """What members do now. replicas: those that are left, each with its members."""
    latest = max(reports.values(), key=lambda report: report.rounds)
    plan = Regrouping([rank for replica in replicas for rank in replica], latest.rounds, latest.rows)
    step = max(report.step for report in reports.values())
    if not step:
        return plan
    row = next((report.row for report in reports.values() if report.ended == step), None)
    if row is not None:
        return replace(plan, step=step, row=row)
    drawn = next(
        (report.drawn for report in reports.values() if report.drawn is not None and report.step == step), None
    )
    total, known = max(report.total for report in reports.values()), list[dict[int, list[int]]]()
    takes, missing = list[Taking](), set[int]()
    for place in zip(*replicas, strict=True):
        counted_here, more = _known([(member, reports[member]) for member in place], step)
        takes += more
        known.append(counted_here)
        begun = [member for member in place if reports[member].step == step]
        missing |= {m for m in range(total) if not begun or any(m not in numbers for numbers in counted_here.values())}
    load = [
        max((len(n) for rank in replica for n in reports[rank].counted.values()), default=0) for replica in replicas
    ]
    todo = dealt_to(len(replicas), sorted(missing), load)
    stale = [any(reports[member].stale for member in place) for place in zip(*replicas, strict=True)]
    return replace(plan, step=step, drawn=drawn, todo=todo, counted=known, takes=takes, stale=stale)


def _known(ranks: Sequence[tuple[int, Report]], step: int) -> tuple[dict[int, list[int]], list[Taking]]:
    """What ranks of one place have of each stage, themselves and in copies: no microbatch twice. The copies that are
    among it.
    """
    known: dict[int, list[int]] = {}
    takes = []
    for _, report in ranks:
        if report.step == step:
            for stage, numbers in report.counted.items():
                known.setdefault(stage, []).extend(numbers)
    for holder, report in ranks:
        for held in sorted(report.held, key=lambda held: -len(held.counted)):
            if held.step == step and held.counted and not set(held.counted).intersection(known.get(held.stage, ())):
                known.setdefault(held.stage, []).extend(held.counted)
                takes.append(Taking(holder, held.member, held.stage))
    return known, takes


def _transport(trainer: Trainer) -> Distributed:
    assert isinstance(trainer.transport, Distributed)
    return trainer.transport


# --- a process ---------------------------------------------------------------------------------------------------


class Survival:
    """Of one process. All make it at the same time, right after a meeting."""

    def __init__(self, given: Survive, mesh: Mesh, meeting: Meeting, seconds: float) -> None:
        if any(map(devices.aborts, re.split("[:,]", str(dist.get_backend_config())))):
            raise InputError(
                "survive= is for gloo, and the processes meet over NCCL", "compile",
                "train without it and with checkpoints, or dist.init_process_group('gloo') before",
            )  # fmt: skip
        self.given, self._meeting, self._seconds = given, meeting, seconds
        self.failures, self.mirror = given.failures, given.mirror
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
        self._copies = Copies(self.me, host, seconds) if given.copies else None
        ports = [self._store.port, self._copies.address[1] if self._copies is not None else 0]
        found = [json.loads(text) for text in meeting.texts("survive", json.dumps([*self.deaths.address, *ports]))]
        self._stores = [(host, port) for host, _, port, _ in found]
        self._holders = [(host, port) for host, _, _, port in found]
        self.deaths.connect([(host, port) for host, port, _, _ in found], seconds)
        self._send_copies()
        self._refuses = ""  # why nobody can be taken up
        self._jobs = joining.job_store()  # asked for now: a host that is gone would be waited for
        self._announce()
        self.recoveries: list[dict[str, Any]] = []  # when each was begun and done, and what was done again
        self.lacks = False  # whether a rank is lost that is mirrored, so that there is to be a mesh of fewer

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

    def results(self, trainer: Trainer, dealt: Microbatches, vote: StepVote, drawn: int) -> dict[int, StepResult]:
        """Of this rank's step. vote: what any rank has said of it. RankLost if it cannot be finished."""
        if self.mirror:
            return self._mirrored(trainer, dealt, vote, drawn)
        flight = self._flight = self._begun(trainer)
        flight.stale = vote.stale
        while True:
            try:
                results = flight.results(trainer, dealt, vote, drawn, self._copying)
            except RankLost as error:
                self._go_on(error, trainer, messages=not flight.adds)
            else:
                self._ended, self._flight = (flight.step, flight.row), None
                return results

    def _go_on(self, error: RankLost, trainer: Trainer, messages: bool = True) -> None:
        """After an error in a step, with those that are left. messages: see `leave` of the transport. The error itself
        where no rank is known to have died.
        """
        let_go(error)
        if not self.lost(LATE if is_silence(error.what) else NEWS):
            if is_silence(error.what):  # a meeting, too, would wait for the one that is silent
                self._meeting.give_up(error.what)
            raise error
        _transport(trainer).leave(messages=messages)
        self.recover(error)

    def _mirrored(
        self, trainer: Trainer, dealt: Microbatches, vote: StepVote, drawn: int
    ) -> dict[int, StepResult]:  # fmt: skip
        """A step of ranks with mirrors, as of any; then gradients go to these. FewerRanks: it is to begin again."""
        if self.lacks:  # since all agreed on the step
            raise FewerRanks
        count, (rank,) = trainer.program.manifest.microbatches, trainer.ranks
        flight = self._flight = Flight(self._meeting.step, count, list(range(count)))
        results: dict[int, StepResult] = {}
        try:
            results = trainer.results(dealt, vote, drawn)
            if trainer.own.mirror is not None:
                gradients, endpoint = results[rank.rank].gradients, rank.endpoint
                endpoint.at("the gradients for the next rank's copy")
                trainer.own.mirror.exchange({**gradients.buffers, **gradients.shards})
            flight.reduced = results[rank.rank].gradients
            rank.endpoint.at("the end of a step")
            done = torch.zeros(1, device=rank.device)
            finished(wait_sum(rank.endpoint, done, rank.group(Group.WORLD), "the end of a step"))
            flight.row = []
        except RankLost as error:
            self._go_on(error, trainer)
            if flight.row is None:
                self._flight = None
                raise FewerRanks from None
        self._ended, self._flight = (flight.step, flight.row), None
        return results

    def _begun(self, trainer: Trainer) -> Flight:
        step, manifest = self._meeting.step, trainer.program.manifest
        replica = self.mesh.coordinates(self.members.index(self.me)).dp
        count = manifest.microbatches
        flight = Flight(step, self._before.dp * count, shares(self.mesh.dp, self._before.dp, count)[replica])
        if self._coming is not None and self._coming.step == step:
            self._take(flight, self._coming)
        self._coming = None
        return flight

    def _take(self, flight: Flight, plan: Regrouping) -> None:
        """What a plan has for this rank of a step in flight. Not again if it is stopped: a copy is no longer held."""
        place = self.members.index(self.me)
        replica, within = divmod(place, len(self.members) // self.mesh.dp)
        flight.todo, flight.drawn, flight.reduced = list(plan.todo[replica]), plan.drawn, None
        for taking in plan.takes:
            if taking.holder == self.me and self._copies is not None:
                flight.take(taking.stage, self._copies.of(taking.member)[str(taking.stage)])
                self._copies.drop(taking.member, str(taking.stage))
        flight.others = plan.counted[within]

    # copies

    @property
    def _copying(self) -> Copying | None:
        return Copying(self._copies, self.given.copies) if self._copies is not None and self._copies.is_on else None

    def _send_copies(self) -> None:
        """To the rank of the same place in the next replica."""
        if self._copies is not None:
            place = self.members.index(self.me)
            alike = self.mesh.group(Group.SAMPLES, place)
            holder = self.members[alike[(alike.index(place) + 1) % len(alike)]]
            self._copies.to(self._holders[holder] if holder != self.me else None)

    def _held(self, gone: Sequence[int]) -> list[Held]:
        """Copies of those whose replica has lost a rank."""
        if self._copies is None:
            return []
        lost = {other for member in gone for other in self._before.group(Group.REPLICA, member)}
        return [
            Held(member, copy.about["step"], int(stage), copy.about["counted"])
            for member in sorted(lost - {self.me}) for stage, copy in self._copies.of(member).items()
        ]  # fmt: skip

    # deaths

    def _gone(self) -> list[int]:
        """All that have died, spare ones too. What is decided follows from this and from what ranks report, so that
        ranks that had come together before another death and ranks that had not decide the same.
        """
        return sorted(self.deaths.dead)

    def lost(self, seconds: float = 0.0) -> bool:
        """Whether a rank has died since they last came together, or is seen to have within so many seconds."""
        alive = set(range(self._before.size)).difference(self._without)
        return self.deaths.wait(alive, seconds) and self._gone() != self._without

    def recover(self, error: BaseException) -> None:
        """Come together with the members that are left. RankLost if that cannot be."""
        began = time.time()
        end = time.monotonic() + self._seconds
        if self._copies is not None:
            self._copies.to(None)
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
                alive = set(range(self._before.size)).difference(gone)
                self.deaths.wait(alive, LATE if is_silence(str(broken)) else NEWS)
                if self._gone() == gone:
                    raise self._cannot(gone, f"they did not come together again ({broken})") from error
                continue
            break
        now = time.time()
        new = [rank for rank in gone if rank not in self._without]
        self._without = gone
        seen = min(self.deaths.dead[rank] for rank in new)
        self._send_copies()
        self._announce()
        again = sorted(chain.from_iterable(plan.todo))
        self.recoveries.append({"seen": seen, "began": began, "done": now, "step": plan.step, "again": again})
        self._tell(new, plan, now - seen)

    def _left(self, gone: Sequence[int], error: BaseException) -> list[list[int]]:
        """The replicas that are whole, each with its members. RankLost if there is none, or too many are lost."""
        left = sorted(self.deaths.left)
        if left:
            raise self._cannot(gone, f"rank {left[0]} has ended by itself") from error
        if self.mirror:
            if len(gone) > 1:
                raise self._cannot(gone, "the parameters of each are in the memory of one other rank alone") from error
            return [[rank for rank in range(self._before.size) if rank not in gone]]
        replicas = dict.fromkeys(self._before.group(Group.REPLICA, rank) for rank in range(self._before.size))
        complete = [list(replica) for replica in replicas if not set(replica).intersection(gone)]
        if not complete:
            raise self._cannot(gone, "no replica is left whole") from error
        if self._before.dp - len(complete) > self.failures:
            raise self._cannot(gone, f"survive={self.failures} covers so many, in replicas of their own") from error
        return complete

    def _cannot(self, gone: Sequence[int], why: str) -> RankLost:
        named = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
        self._meeting.give_up(f"{named} died")
        return RankLost(
            f"{named} died, and the others do not go on: {why}", f"rank {self.me} at the start",
            "Start again from the last checkpoint",
        )  # fmt: skip

    # a rank that comes back

    def _announce(self) -> None:
        if self.members[0] == self.me:
            others = [self._stores[rank] for rank in range(self._before.size) if rank != self.me]
            joining.announce(self._jobs, self._stores[self.me], others, self._refuses)

    def waiting(self) -> bool:
        """Whether all that were lost wait to be taken up, spare ranks too. The first member knows."""
        if not self.has_lost or self.members[0] != self.me or self._refuses:
            return False
        lost = [rank for rank in range(self._before.size) if rank not in self.members]
        return self._gone() == lost and joining.all_ask(self._store, lost)

    def refuse(self, why: str) -> None:
        """Take up nobody from now on, and say why to whoever asks. All members call it."""
        self._refuses = why
        self._announce()
        if self.members[0] == self.me:
            log.warning("ranks that come back are not taken up: %s", why)

    def end(self) -> None:
        """No other rank may be lost from now on. All members call it, and use this object no more; the store of its
        process is still asked.
        """
        self.recoveries[-1]["done"] = time.time()
        self.refuse("they go on as a mesh of a rank fewer")
        self.deaths.close()

    def admit(self, steps: int, calls: int) -> joining.Admission:
        """Leave the groups of now for those with all that come back. All members call it, and use this object no more.
        RankLost.
        """
        source = self.members[0]
        name = f"joined/{self._meeting.rounds}"
        admission = joining.Admission(self._store_of(source), name, source, steps, calls)
        self._leave()
        self.deaths.close()
        if self._copies is not None:
            self._copies.to(None)
        if self.me == source:
            self._store.set(joining.ADMITTED, admission.told())
        admission.enter(self.me, self._before.size, self._seconds)
        return admission

    def _leave(self) -> None:
        for trainer in (one for ref in self._trainers if (one := ref()) is not None):
            _transport(trainer).leave()
        self._meeting.leave()
        for forget in self.forget:
            forget()
        if dist.is_initialized():
            dist.destroy_process_group()

    # coming together

    def _check(self, gone: Sequence[int]) -> None:
        if self._gone() != list(gone) or self.deaths.left:
            raise Again

    def _stop(self, gone: Sequence[int]) -> None:
        if self._gone() != list(gone):
            raise RuntimeError("connection closed: a rank has died")

    def _agreed(self, gone: Sequence[int], replicas: Sequence[Sequence[int]], end: float) -> Regrouping:
        """What the lowest rank that is alive decides, once all have said how far they are."""
        alive = [rank for rank in range(self._before.size) if rank not in gone]
        common = dist.PrefixStore("-".join(map(str, gone)), self._store_of(alive[0], gone))
        store = Guarded(common, self._seconds, f"rank {alive[0]}")
        store.set(f"report/{self.me}", json.dumps(asdict(self._report(gone))))
        if self.me == alive[0]:
            reports = {}
            for rank in alive:
                self._await(store, f"report/{rank}", gone, end, f"rank {rank} has not come")
                reports[rank] = Report.read(store.get(f"report/{rank}"))
            store.set("plan", json.dumps(asdict(planned(reports, replicas))))
        self._await(store, "plan", gone, end, "not all of them have come, or the first of them has not said so")
        return Regrouping.read(store.get("plan"))

    def _store_of(self, member: int, gone: Sequence[int] | None = None) -> dist.Store:
        """gone: who is known to have died; Again if it, too, does before it answers."""
        if member == self.me:
            return self._store
        who, store = f"rank {member}", self._stores[member]
        if gone is None:
            return connected(*store, self._seconds, who)
        return connected(*store, self._seconds, who, lambda: self._check(gone))

    def _await(self, store: Guarded, key: str, gone: Sequence[int], end: float, silent: str) -> None:
        while not store.check([key]):
            self._check(gone)
            if time.monotonic() > end:
                raise self._cannot(gone, f"{silent} within {self._seconds:g} s: stopped, or cut off")
            time.sleep(LOOK)

    def _report(self, gone: Sequence[int]) -> Report:
        flight, meeting = self._flight, self._meeting
        ended, row = self._ended
        report = Report(meeting.rounds, meeting.rows, held=self._held(gone), ended=ended, row=row)
        if flight is None:
            return report
        return replace(
            report, step=flight.step, total=flight.total, counted=flight.counted, stale=flight.stale, drawn=flight.drawn
        )

    def _regroup(self, plan: Regrouping, gone: Sequence[int]) -> None:
        """New process groups, and what the plan says of the step in flight."""
        self._leave()
        trainers = [one for ref in self._trainers if (one := ref()) is not None]
        place, wait = plan.members.index(self.me), timedelta(seconds=self._seconds)
        name = f"groups/{'-'.join(map(str, gone))}"
        common = dist.PrefixStore(name, self._store_of(plan.members[0], gone))
        self._common = Guarded(common, self._seconds, f"rank {plan.members[0]}", lambda: self._stop(gone))
        dist.init_process_group("gloo", store=self._common, rank=place, world_size=len(plan.members), timeout=wait)
        self._meeting.rejoin(self._seconds, common)
        self.members, self._known = plan.members, (plan.rounds, plan.rows)
        if self.mirror:
            self.lacks = True
            for trainer in trainers:
                trainer.own.stand_in(*gone)
        else:
            lost = {replica for member in gone for replica in self._before.replicas_of(member)}
            self.mesh = replace(self._before, dp=len(plan.members) * self._before.dp // self._before.size)
            for trainer in trainers:
                trainer.regroup(self.mesh, place, [replica for replica in self._before.replicas if replica not in lost])
        flight = self._flight
        if flight is None:
            self._coming = plan if plan.step and plan.row is None else None
        elif plan.row is not None:
            if flight.reduced is None:
                raise self._cannot(gone, f"the losses of step {plan.step} are known, its gradients are not")
            flight.row = plan.row
        elif not self.lacks:
            self._take(flight, plan)
            flight.stale = plan.stale[place % (self.mesh.size // self.mesh.dp)]

    def _tell(self, gone: Sequence[int], plan: Regrouping, seconds: float) -> None:
        if plan.members[0] == self.me and self.lacks:
            log.warning(
                "rank %s died: the %d others go on without it, %.2f s after that was seen%s",
                ", ".join(map(str, gone)), len(plan.members), seconds,
                f"; step {plan.step} begins again" if plan.step and plan.row is None else "",
            )  # fmt: skip
        elif plan.members[0] == self.me:
            again = sum(map(len, plan.todo))
            log.warning(
                "rank%s %s died: %d of %d replicas train on, %.2f s after that was seen%s", "s" * (len(gone) > 1),
                ", ".join(map(str, gone)), self.mesh.dp, self._before.dp, seconds,
                f"; {again} microbatches of step {plan.step} are done by others" if again else "",
            )  # fmt: skip

    def _wait_as_spare(self, gone: Sequence[int], plan: Regrouping) -> None:
        """This process' replica lacks a rank: it waits until another rank dies, and says what it has then; or until the
        members have ended, and ends; or until the killed ones are there again, and ends as one that is to be started
        again.
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
        members = set(plan.members)
        while not self.deaths.left & members:
            if self.deaths.wait(members, 1.0) and self.deaths.dead.keys() & members:
                return
            if not self.deaths.left & members and self._are_back(gone, plan.members[0]):  # nobody asks those that left
                log.warning(
                    "rank %d ends with code %d: rank%s %s asked to be taken up again, and it is to be, too", self.me,
                    joining.AGAIN, "s" * (len(gone) > 1), ", ".join(map(str, gone)),
                )  # fmt: skip
                self.deaths.end_as_dead()
                raise SystemExit(joining.AGAIN)
        raise SystemExit(0)

    def _are_back(self, gone: Sequence[int], first: int) -> bool:
        """Whether all that had died ask the first member to be taken up."""
        with contextlib.suppress(RuntimeError):  # it has just died, or ended
            store = connected(*self._stores[first], ANSWER, f"rank {first}")
            return joining.all_ask(Guarded(store, ANSWER, f"rank {first}"), gone)
        return False
