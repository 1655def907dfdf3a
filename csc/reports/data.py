"""What balance makes of lengths: how they are distributed, what a step takes, one plan for samples that differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from csc.balance.loader import Decider, shape_of
from csc.balance.sample_costs import Costs, Lengths, of_problems, of_stages, rates_of
from csc.capture.batch import split_batch
from csc.driver.compiled import CompiledModel
from csc.errors import CscError, InputError
from csc.ir.program import Options, Program
from csc.passes.partition import given_schedule
from csc.passes.pipeline_problem import problem
from csc.passes.step_end import seconds_behind
from csc.planning.assign.step import AlikeSizes, Floats, SampleCosts, Size, large_enough
from csc.planning.plan import PipelinePlan, plan
from csc.planning.problem import Problem, mean
from csc.reports.varied_sizes import Length, Sampler, lengths, sampler

# --- What balance makes of lengths: how they are distributed, what a step takes, which sizes are compiled ------------
#
# Terms
#   ways     random: shuffled samples, equally many in a microbatch; sorted: by tokens, equally many; balanced: csc's;
#            equal: every microbatch the mean, which no samples are, for scale
#   example  the model's example microbatch: samples are costed as more and fewer of its rows and units


SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
WIDTHS = (1.0, 1.5, 2.0)  # of the example's


@dataclass(frozen=True)
class DataReport:
    """distribution: by name the values below which the parts SHARES of the samples are, and the mean; seconds: of a
    step by way, the mean; sizes: of microbatches (units of each kind, in the order of `units`, rows, width); outside:
    microbatches of the steps that had none of them; error: of the costs, relative; batch_size: samples of a step.
    """

    samples: int
    distribution: dict[str, dict[str, float]]
    seconds: dict[str, float]
    sizes: list[Size]
    outside: int
    microbatches: int
    error: float
    batch_size: int
    units: tuple[str, ...]


def of_lengths(
    compiled: CompiledModel, table: Lengths, batch_size: int, multiple: int, packed: bool, steps: int
) -> DataReport:
    """steps: how many random ones are simulated. InputError for fewer samples than a step has, for fewer of those than
    microbatches, and for an example whose sizes cannot vary.
    """
    mesh, microbatches = compiled.options.mesh, compiled.options.microbatches
    if len(table) < batch_size:
        raise InputError(
            f"there are {len(table)} samples, and a step has {batch_size}", "csc data", "take smaller steps"
        )
    costs = _costs(compiled, table)
    decider = (
        Decider(table, costs, packed, mesh.dp, microbatches, multiple).with_shapes(batch_size).with_sizes(batch_size)
    )
    sums = dict.fromkeys(("random", "sorted", "balanced", "equal"), 0.0)
    outside, known = 0, set(decider.sizes)
    for seed in range(steps):
        indices = np.random.default_rng(1000 + seed).choice(len(table), batch_size, replace=False).tolist()
        step = decider.step(indices)
        decided = decider.decide(indices)
        outside += sum(size not in known for replica in decided.sizes for size in replica)
        sums["balanced"] += decided.seconds
        sums["random"] += _dealt(step, list(range(batch_size)))
        sums["sorted"] += _dealt(step, np.argsort(-table.tokens[indices], kind="stable").tolist())
        mean = np.concatenate([[1.0], step.samples.sum(axis=0) / (mesh.dp * microbatches)])
        sums["equal"] += step.seconds_of(np.tile(mean, (microbatches, 1)))
    columns = {"tokens": table.tokens, **dict(zip(table.names, table.units.T))}
    return DataReport(
        len(table), {name: _shares(column) for name, column in columns.items()},
        {name: seconds / steps for name, seconds in sums.items()}, decider.sizes, outside,
        steps * mesh.dp * microbatches, costs.error, batch_size, table.names,
    )  # fmt: skip


def _shares(column: Floats) -> dict[str, float]:
    return {**{f"{share:.0%}": float(np.quantile(column, share)) for share in SHARES}, "mean": float(column.mean())}


def _dealt(step: SampleCosts, order: Sequence[int]) -> float:
    """Seconds of the slowest replica if samples go to microbatches in this order, equally many to each."""
    replicas = [list(order[r :: step.replicas]) for r in range(step.replicas)]
    parts = [[part.tolist() for part in np.array_split(replica, step.microbatches)] for replica in replicas]
    return max(step.seconds(parts))


def _costs(compiled: CompiledModel, table: Lengths) -> Costs:
    probed = probes(compiled, table)
    return of_problems(
        compiled.program, [problem(program, compiled.options) for program in probed.programs], probed.counted
    )  # fmt: skip


@dataclass(frozen=True)
class Probes:
    """The model at several sizes, and the features of each."""

    programs: tuple[Program, ...]
    counted: Floats


def probes(compiled: CompiledModel, table: Lengths) -> Probes:
    """Of the example's rows and units, two and three times as many, and of rows of other widths. InputError for an
    example whose sizes cannot vary.
    """
    source = sampler(compiled)
    text = _text(source)
    rows, _ = shape_of(compiled.inspected.microbatch)
    units = _units(compiled, len(table.names))
    points = [(copies, _wide(text, share)) for copies in (1, 2, 3) for share in WIDTHS]
    points.append((2, _wide(text, 1.25)))
    counted = []
    for copies, wide in points:
        units_each = [copies * unit for unit in units]
        positions = copies * rows * wide
        counted.append([1.0, *units_each, *(unit**2 for unit in units_each), positions, positions * wide])
    programs = tuple(source.program(copies, {text: wide}) for copies, wide in points)
    return Probes(programs, np.array(counted, dtype=np.float64))


def _wide(text: Length, share: float) -> int:
    return text.size + round(text.size * (share - 1) / text.step) * text.step


def _text(source: Sampler) -> Length:
    """The length of the language model's rows. InputError if the example's cannot be another."""
    text = next((length for length in lengths(source) if length.name == "text"), None)
    if text is None:
        raise InputError(
            "the model takes rows of one length only", "csc data", "balance is for samples of different lengths"
        )
    return text


def _units(compiled: CompiledModel, kinds: int) -> list[int]:
    """How many units the example's microbatch has: rows of its features, in order."""
    tensors, _ = split_batch(compiled.inspected.microbatch)
    sizes = [len(tensor) for tensor in tensors.values() if tensor.is_floating_point() and tensor.dim() > 1]
    if len(sizes) < kinds:
        raise InputError(
            f"the lengths have {kinds} kinds of units beside tokens, and the example {len(sizes)} entries of features",
            "csc data", "leave out the columns that no encoder pays for",
        )  # fmt: skip
    return sizes[:kinds]


# --- One plan for batches whose samples differ: the mesh, microbatches and stages with the least mean step -----------
#
# Terms
#   way        a mesh, a number of microbatches and a plan for both
#   batch      the samples of one step, drawn at random; each is divided as `csc.balanced` does, and its step simulated
#   step       seconds of the slowest replica, and what follows its last action: gradients added, the optimizer
#   replanned  each batch with the best of the plans made for any of them: what a plan for each batch would take
#
# First every way is planned for the mean microbatch; those that are near the fastest are tried on batches. Around the
# best of them plans are made for the means of single batches; the one with the least mean over all batches is kept.


NEAR = 1.3  # times the fastest for the mean microbatch: ways that are tried on batches
TRIED = 6  # of them at most
PER_MICROBATCH = (1, 2, 4, 8)  # samples
AS_GOOD = 0.005  # of a step: choices that differ by less are alike
GROWTH = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # batch sizes that are looked at, in that of the step
TRIED_SHARES = (0.3, 0.1)  # of the time for one plan: of a way, of a batch


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
        decider = self.decider(table, asked)
        return np.array([decider.decide(batch).seconds + self.end for batch in batches])


def plan_for_lengths(
    compiled: CompiledModel, table: Lengths, asked: LengthsRequest, tell: Callable[[str], None]
) -> LengthsPlan:
    """The way and the plan with the least mean step. The size of the mesh is kept.

    InputError for fewer samples than a step has, for an example whose sizes cannot vary, and where no way has a plan.
    """
    _check(compiled.options, len(table), asked.batch_size)
    tell("costs of samples")
    costed = probes(compiled, table)
    making = _Making(costed.programs[-1], costed, table, asked, time.monotonic() + asked.seconds)
    planned, rows = making.ways(compiled.options, tell)
    batches = [_draw(len(table), asked.batch_size, 1000 + number) for number in range(asked.batches)]
    tried = _tried(making, rows, planned, batches, tell)
    if not tried:
        raise InputError(next((row.why for row in rows if row.why), "no way has a plan"), "csc plan --lengths",
                         "allow more memory, or take smaller steps")  # fmt: skip
    tell("plans for single batches")
    pool = making.around(min(tried, key=lambda pair: pair[0])[1], batches)
    seconds = np.array([plan.steps(table, asked, batches) for plan in pool])  # [plan][batch]
    best = int(seconds.mean(axis=1).argmin())
    tell("batch sizes")
    alike = making.alike(pool, best)
    chosen = pool[best]
    names = [region.name for region in making.program.regions]
    return LengthsPlan(
        tuple(sorted(rows, key=lambda row: (row.step or np.inf, row.mean or np.inf))), chosen.plan.schedule.name,
        tuple(tuple(names[unit] for unit in stage) for stage in chosen.plan.stages), chosen.plan.placement, len(pool),
        float(seconds[best].mean()), float(seconds.min(axis=0).mean()), alike.shares, alike.least, chosen.costs.error,
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
    placed = [name for name in ("stages", "cuts", "placement") if getattr(options, name) is not None]
    placed += ["schedule"] if given_schedule(options) is not None else []
    if placed:
        raise InputError(
            f"{placed[0]} is given, and it is what --lengths looks for", "csc plan --lengths",
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
        rows: list[Alternative] = []
        for options_here in _options(options, self.asked.batch_size, len(self.program.regions)):
            key = (str(options_here.mesh), options_here.microbatches)
            tell(f"{key[0]}, {key[1]} microbatches: plan")
            try:
                one = planned[key] = self.planned(
                    options_here, self.mean(options_here, range(len(self.table))), TRIED_SHARES[0]
                )
            except CscError as error:
                rows.append(Alternative(*key, why=str(error)))
                continue
            rows.append(
                Alternative(*key, one.plan.makespan + one.end, peak=max(one.plan.peak_memory), layout=one.plan.layout)
            )
        return planned, rows

    def mean(self, options: Options, batch: Sequence[int]) -> Floats:
        """Features of the mean microbatch of a step with samples like these."""
        layout = self._decider_of(batch)
        samples = self.asked.batch_size / (options.mesh.dp * options.microbatches)
        return np.concatenate([[1.0], samples * layout.mean(axis=0)])

    def _decider_of(self, batch: Sequence[int]) -> Floats:
        units, tokens = self.table.units[list(batch)], self.table.tokens[list(batch), None]
        return np.hstack([units, units**2, tokens, tokens**2])

    def planned(self, options: Options, features: Floats, share: float) -> _Planned:
        """The plan for microbatches with these features. InputError if nothing fits."""
        problems = [problem(program, options) for program in self.probes.programs]
        rates, _ = rates_of(problems, self.probes.counted)
        limit = max(1.0, share * (self.end - time.monotonic()))
        planned = plan(
            replace(mean(rates, problems[-1], features.tolist()), microbatches=options.microbatches),
            schedule=options.schedule, chunks=options.chunks, limit=limit,
        )  # fmt: skip
        return self._of(options, planned, problems)

    def _of(self, options: Options, planned: PipelinePlan, problems: Sequence[Problem]) -> _Planned:
        costs = of_stages(problems, self.probes.counted, planned.stages, planned.placement, planned.schedule)
        end = seconds_behind(self.program, options, planned.stages, planned.placement)
        return _Planned(options, planned, costs, end)

    def around(self, one: _Planned, batches: Sequence[Sequence[int]]) -> list[_Planned]:
        """Plans of the same way for the means of single batches, each partition once, the given one first."""
        pool = {(one.plan.stages, one.plan.placement): one}
        for batch in batches:
            other = self.planned(one.options, self.mean(one.options, batch), TRIED_SHARES[1])
            pool.setdefault((other.plan.stages, other.plan.placement), other)
        return list(pool.values())

    def alike(self, pool: Sequence[_Planned], best: int) -> AlikeSizes:
        """From which size on batches choose the best plan, or one that is as good."""
        sizes = {round(growth * self.asked.batch_size) for growth in GROWTH}
        options = pool[best].options
        steps = [plan.decider(self.table, self.asked).step([0]) for plan in pool]

        def chooses(size: int, number: int) -> bool:
            features = self.mean(options, _draw(len(self.table), size, 10**6 + number))
            seconds = [decider.seconds_of(np.tile(features, (options.microbatches, 1))) for decider in steps]
            return seconds[best] <= min(seconds) * (1 + AS_GOOD)

        return large_enough(chooses, [size for size in sizes if 1 <= size <= len(self.table)])


def _options(options: Options, batch_size: int, regions: int) -> Iterator[Options]:
    """Every split of the mesh into replicas and pipeline ranks, with every number of microbatches that is looked at.
    What is said of each pipeline rank, or of a component's stages, keeps their number.
    """
    mesh = options.mesh
    fixed = bool(mesh.own("pp")) or any(isinstance(value, tuple) for value in (options.hardware, options.memory))
    total = mesh.dp * mesh.pp
    lengths = [mesh.pp] if fixed else [pp for pp in range(1, min(total, regions) + 1) if total % pp == 0]
    for pp in lengths:
        dp = total // pp
        counts = {batch_size // (dp * samples) for samples in PER_MICROBATCH} | {options.microbatches}
        for count in sorted(counts):
            if 0 < count <= batch_size // dp:
                yield replace(options, mesh=replace(mesh, dp=dp, pp=pp), microbatches=count)


def _tried(
    making: _Making,
    rows: list[Alternative],
    planned: Mapping[tuple[str, int], _Planned],
    batches: Sequence[Sequence[int]],
    tell: Callable[[str], None],
) -> list[tuple[float, _Planned]]:
    """The mean steps of the ways that are worth trying on batches, which are entered in `rows`. One whose mean fits in
    memory and batches do not is none of them.
    """
    tried: list[tuple[float, _Planned]] = []
    fastest = 0.0
    for row in sorted((row for row in rows if row.mean is not None), key=lambda row: row.mean or 0.0):
        if tried and (len(tried) == TRIED or (row.mean or 0.0) > NEAR * fastest):
            break
        plan, place = planned[row.mesh, row.microbatches], rows.index(row)
        tell(f"{row.mesh}, {row.microbatches} microbatches")
        try:
            steps = plan.steps(making.table, making.asked, batches)
        except CscError as error:
            rows[place] = replace(row, why=str(error))
            continue
        rows[place] = replace(row, step=float(steps.mean()), spread=float(steps.std()))
        fastest = fastest or row.mean or 0.0
        tried.append((float(steps.mean()), plan))
    return tried


def _draw(count: int, size: int, seed: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).choice(count, size, replace=False).tolist()
    return drawn
