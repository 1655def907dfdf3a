"""One plan for batches whose samples differ: the mesh, microbatches and stages with the least mean step.

Terms
  way        a mesh, a number of microbatches and a plan for both
  batch      the samples of one step, drawn at random; each is divided as `csc.balanced` does, and its step simulated
  step       seconds of the slowest replica, and what follows its last action: gradients added, the optimizer
  replanned  each batch with the best of the plans made for any of them: what a plan for each batch would take

    plan_for_lengths(compiled, lengths, asked, tell) -> LengthsPlan

First every way is planned for the mean microbatch; those that are near the fastest are tried on batches. Around the
best of them plans are made for the means of single batches; the one with the least mean over all batches is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from csc.balance.loader import Decider
from csc.balance.sample_costs import Costs, Lengths, of_stages, rates_of
from csc.driver.compiled import CompiledModel
from csc.errors import CscError, InputError
from csc.ir.program import Options, Program
from csc.passes.partition import given_schedule
from csc.passes.pipeline_problem import problem
from csc.passes.step_end import seconds_behind
from csc.planning.assign.step import AlikeSizes, Floats, large_enough
from csc.planning.plan import PipelinePlan, plan
from csc.planning.problem import Problem, mean
from csc.reports.data import Probes, probes

NEAR = 1.3  # times the fastest for the mean microbatch: ways that are tried on batches
TRIED = 6  # of them at most
PER_MICROBATCH = (1, 2, 4, 8)  # samples
AS_GOOD = 0.005  # of a step: choices that differ by less are alike
GROWTH = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # batch sizes that are looked at, in that of the step
SHARES = (0.3, 0.1)  # of the time for one plan: of a way, of a batch


@dataclass(frozen=True)
class LengthsRequest:
    """batch_size: samples of a step, of all replicas; batches: how many are drawn; multiple, packed: as for balance;
    seconds: for plans.
    """

    batch_size: int
    batches: int
    multiple: int
    packed: bool
    seconds: float


@dataclass(frozen=True)
class Alternative:
    """mean: seconds of the mean microbatch's step; step, spread: of the batches' steps the mean and the standard
    deviation, None: not tried; peak: bytes of the fullest rank with mean microbatches; why: there is no plan.
    """

    mesh: str
    microbatches: int
    mean: float | None = None
    step: float | None = None
    spread: float | None = None
    peak: float | None = None
    layout: str = ""
    why: str = ""


@dataclass(frozen=True)
class LengthsPlan:
    """ways: the fastest first. stages: regions of the chosen plan's stages, placement: their ranks; partitions: how
    many were compared; static, replanned: mean seconds of a batch's step; alike: by batch size how many of 59 batches
    choose this partition, enough: the size from which on all do; error: of the costs, relative.
    """

    ways: tuple[Alternative, ...]
    schedule: str
    stages: tuple[tuple[str, ...], ...]
    placement: tuple[int, ...]
    partitions: int
    static: float
    replanned: float
    alike: dict[int, int]
    enough: int | None
    error: float

    @property
    def loss(self) -> float:
        """What the one plan takes more than one for each batch, as a part of that."""
        return self.static / self.replanned - 1

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "loss": self.loss}


@dataclass(frozen=True)
class _Planned:
    """A plan for one mesh and number of microbatches. end: seconds behind the last action."""

    options: Options
    plan: PipelinePlan
    costs: Costs
    end: float

    def decider(self, table: Lengths, asked: LengthsRequest) -> Decider:
        return Decider(
            table, self.costs, asked.packed, self.options.mesh.dp, self.options.microbatches, asked.multiple, rounds=0
        )

    def steps(self, table: Lengths, asked: LengthsRequest, batches: Sequence[Sequence[int]]) -> Floats:
        """Of each batch. InputError for a sample that fits nowhere."""
        own = self.decider(table, asked)
        return np.array([own.decide(batch).seconds + self.end for batch in batches])


def plan_for_lengths(
    compiled: CompiledModel, table: Lengths, asked: LengthsRequest, tell: Callable[[str], None]
) -> LengthsPlan:
    """The way and the plan with the least mean step. The size of the mesh is kept.

    InputError for fewer samples than a step has, for an example whose sizes cannot vary, and where no way has a plan.
    """
    _check(compiled.options, len(table), asked.batch_size)
    tell("costs of samples")
    costed = probes(compiled, table)
    made = _Making(costed.programs[-1], costed, table, asked, time.monotonic() + asked.seconds)
    planned, ways = made.ways(compiled.options, tell)
    batches = [_draw(len(table), asked.batch_size, 1000 + number) for number in range(asked.batches)]
    tried = _tried(made, ways, planned, batches, tell)
    if not tried:
        raise InputError(next((way.why for way in ways if way.why), "no way has a plan"), "csc plan --lengths",
                         "allow more memory, or take smaller steps")  # fmt: skip
    tell("plans for single batches")
    pool = made.around(min(tried, key=lambda pair: pair[0])[1], batches)
    seconds = np.array([one.steps(table, asked, batches) for one in pool])  # [plan][batch]
    best = int(seconds.mean(axis=1).argmin())
    tell("batch sizes")
    found = made.alike(pool, best)
    chosen = pool[best]
    names = [region.name for region in made.program.regions]
    return LengthsPlan(
        tuple(sorted(ways, key=lambda way: (way.step or np.inf, way.mean or np.inf))), chosen.plan.schedule.name,
        tuple(tuple(names[unit] for unit in stage) for stage in chosen.plan.stages), chosen.plan.placement, len(pool),
        float(seconds[best].mean()), float(seconds.min(axis=0).mean()), found.shares, found.least, chosen.costs.error,
    )  # fmt: skip


def _check(options: Options, samples: int, batch_size: int) -> None:
    if options.mesh.cp * options.mesh.tp > 1:
        raise InputError(
            f"the mesh is {options.mesh}, and samples are costed on whole layers", "csc plan --lengths",
            "plan with cp=1 and tp=1",
        )  # fmt: skip
    if samples < batch_size:
        raise InputError(
            f"there are {samples} samples, and a step has {batch_size}", "csc plan", "take smaller steps"
        )  # fmt: skip
    given = [name for name in ("stages", "cuts", "placement") if getattr(options, name) is not None]
    given += ["schedule"] if given_schedule(options) is not None else []
    if given:
        raise InputError(
            f"{given[0]} is given, and it is what --lengths looks for", "csc plan --lengths",
            "leave it out; a schedule may be named, as in --schedule 1f1b",
        )  # fmt: skip


@dataclass(frozen=True)
class _Making:
    """What plans are made of. end: when there is no more time for them."""

    program: Program
    probes: Probes
    table: Lengths
    asked: LengthsRequest
    end: float

    def ways(
        self, options: Options, tell: Callable[[str], None]
    ) -> tuple[dict[tuple[str, int], _Planned], list[Alternative]]:
        """Each mesh and number of microbatches with its plan for the mean microbatch."""
        planned: dict[tuple[str, int], _Planned] = {}
        ways: list[Alternative] = []
        for own in _options(options, self.asked.batch_size, len(self.program.regions)):
            key = (str(own.mesh), own.microbatches)
            tell(f"{key[0]}, {key[1]} microbatches: plan")
            try:
                one = planned[key] = self.planned(own, self.mean(own, range(len(self.table))), SHARES[0])
            except CscError as error:
                ways.append(Alternative(*key, why=str(error)))
                continue
            ways.append(
                Alternative(*key, one.plan.makespan + one.end, peak=max(one.plan.peak_memory), layout=one.plan.layout)
            )
        return planned, ways

    def mean(self, options: Options, batch: Sequence[int]) -> Floats:
        """Features of the mean microbatch of a step with samples like these."""
        layout = self._decider_of(batch)
        each = self.asked.batch_size / (options.mesh.dp * options.microbatches)
        return np.concatenate([[1.0], each * layout.mean(axis=0)])

    def _decider_of(self, batch: Sequence[int]) -> Floats:
        units, own = self.table.units[list(batch)], self.table.tokens[list(batch), None]
        return np.hstack([units, units**2, own, own**2])

    def planned(self, options: Options, features: Floats, share: float) -> _Planned:
        """The plan for microbatches with these features. InputError if nothing fits."""
        problems = [problem(one, options) for one in self.probes.programs]
        rates, _ = rates_of(problems, self.probes.counted)
        limit = max(1.0, share * (self.end - time.monotonic()))
        found = plan(
            replace(mean(rates, problems[-1], features.tolist()), microbatches=options.microbatches),
            schedule=options.schedule, chunks=options.chunks, limit=limit,
        )  # fmt: skip
        return self._of(options, found, problems)

    def _of(self, options: Options, found: PipelinePlan, problems: Sequence[Problem]) -> _Planned:
        costs = of_stages(problems, self.probes.counted, found.stages, found.placement, found.schedule)
        end = seconds_behind(self.program, options, found.stages, found.placement)
        return _Planned(options, found, costs, end)

    def around(self, one: _Planned, batches: Sequence[Sequence[int]]) -> list[_Planned]:
        """Plans of the same way for the means of single batches, each partition once, the given one first."""
        pool = {(one.plan.stages, one.plan.placement): one}
        for batch in batches:
            other = self.planned(one.options, self.mean(one.options, batch), SHARES[1])
            pool.setdefault((other.plan.stages, other.plan.placement), other)
        return list(pool.values())

    def alike(self, pool: Sequence[_Planned], best: int) -> AlikeSizes:
        """From which size on batches choose the best plan, or one that is as good."""
        sizes = {round(growth * self.asked.batch_size) for growth in GROWTH}
        options = pool[best].options
        steps = [one.decider(self.table, self.asked).step([0]) for one in pool]

        def chooses(size: int, number: int) -> bool:
            features = self.mean(options, _draw(len(self.table), size, 10**6 + number))
            seconds = [one.seconds_of(np.tile(features, (options.microbatches, 1))) for one in steps]
            return seconds[best] <= min(seconds) * (1 + AS_GOOD)

        return large_enough(chooses, [size for size in sizes if 1 <= size <= len(self.table)])


def _options(options: Options, batch_size: int, regions: int) -> Iterator[Options]:
    """Every split of the mesh into replicas and pipeline ranks, with every number of microbatches that is looked at.
    What is said of each pipeline rank, or of a component's stages, keeps their number.
    """
    mesh = options.mesh
    fixed = bool(mesh.own_stages) or any(isinstance(one, tuple) for one in (options.hardware, options.memory))
    total = mesh.dp * mesh.pp
    lengths = [mesh.pp] if fixed else [pp for pp in range(1, min(total, regions) + 1) if total % pp == 0]
    for pp in lengths:
        dp = total // pp
        counts = {batch_size // (dp * each) for each in PER_MICROBATCH} | {options.microbatches}
        for count in sorted(counts):
            if 0 < count <= batch_size // dp:
                yield replace(options, mesh=replace(mesh, dp=dp, pp=pp), microbatches=count)


def _tried(
    made: _Making,
    ways: list[Alternative],
    planned: Mapping[tuple[str, int], _Planned],
    batches: Sequence[Sequence[int]],
    tell: Callable[[str], None],
) -> list[tuple[float, _Planned]]:
    """The mean steps of the ways that are worth trying on batches, which are entered in `ways`. One whose mean fits in
    memory and batches do not is none of them.
    """
    tried: list[tuple[float, _Planned]] = []
    fastest = 0.0
    for way in sorted((way for way in ways if way.mean is not None), key=lambda way: way.mean or 0.0):
        if tried and (len(tried) == TRIED or (way.mean or 0.0) > NEAR * fastest):
            break
        one, place = planned[way.mesh, way.microbatches], ways.index(way)
        tell(f"{way.mesh}, {way.microbatches} microbatches")
        try:
            steps = one.steps(made.table, made.asked, batches)
        except CscError as error:
            ways[place] = replace(way, why=str(error))
            continue
        ways[place] = replace(way, step=float(steps.mean()), spread=float(steps.std()))
        fastest = fastest or way.mean or 0.0
        tried.append((float(steps.mean()), one))
    return tried


def _draw(count: int, size: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).choice(count, size, replace=False).tolist()
    return found
