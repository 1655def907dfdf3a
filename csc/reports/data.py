"""What balance makes of lengths: how they are distributed, what a step takes, which sizes are compiled.

Terms
  ways     random: shuffled samples, equally many in a microbatch; sorted: by tokens, equally many; balanced: csc's;
           equal: every microbatch the mean, which no samples are, for scale
  example  the model's example microbatch: samples are costed as more and fewer of its rows and units

    of_lengths(compiled, lengths, batch_size, multiple, packed, steps) -> DataReport
    probes(compiled, lengths) -> Probes          what samples are costed by
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from csc.balance.loader import Decider, shape_of
from csc.balance.sample_costs import Costs, Lengths, of_problems
from csc.capture.batch import split_batch
from csc.driver.compiled import CompiledModel
from csc.errors import InputError
from csc.ir.program import Program
from csc.passes.pipeline_problem import problem
from csc.planning.assign.step import Floats, SampleCosts, Size
from csc.reports.varied_sizes import Length, Sampler, lengths, sampler

SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
BINS = 48  # of a histogram
WIDTHS = (1.0, 1.5, 2.0)  # of the example's


@dataclass(frozen=True)
class Histogram:
    """counts: samples in bins of one width, from `first` to `last`."""

    first: float
    last: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class DataReport:
    """distribution: by name the values below which the parts SHARES of the samples are, and the mean; histograms: by
    name; units: the names of kinds, in the order that sizes have them; batch_size: samples of a step. seconds: of a
    step by way, the mean; sizes: of microbatches (units of each kind, rows, width); outside: microbatches of the steps
    that had none of them; error: of the costs, relative.
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
    histograms: dict[str, Histogram]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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
        own = decider.decide(indices)
        outside += sum(size not in known for replica in own.sizes for size in replica)
        sums["balanced"] += own.seconds
        sums["random"] += _dealt(step, list(range(batch_size)))
        sums["sorted"] += _dealt(step, np.argsort(-table.tokens[indices], kind="stable").tolist())
        mean = np.concatenate([[1.0], step.samples.sum(axis=0) / (mesh.dp * microbatches)])
        sums["equal"] += step.seconds_of(np.tile(mean, (microbatches, 1)))
    columns = {"tokens": table.tokens, **dict(zip(table.names, table.units.T))}
    return DataReport(
        len(table), {name: _shares(column) for name, column in columns.items()},
        {way: seconds / steps for way, seconds in sums.items()}, decider.sizes, outside,
        steps * mesh.dp * microbatches, costs.error, batch_size, table.names,
        {name: _histogram(column) for name, column in columns.items()},
    )  # fmt: skip


def _histogram(column: Floats) -> Histogram:
    """Of at most BINS bins, and no more than there are whole numbers."""
    first, last = float(column.min()), float(column.max())
    counts, _ = np.histogram(column, bins=max(1, min(BINS, round(last - first) + 1)), range=(first, last))
    return Histogram(first, last, tuple(counts.tolist()))


def _shares(column: Floats) -> dict[str, float]:
    return {**{f"{share:.0%}": float(np.quantile(column, share)) for share in SHARES}, "mean": float(column.mean())}


def _dealt(step: SampleCosts, order: Sequence[int]) -> float:
    """Seconds of the slowest replica if samples go to microbatches in this order, equally many to each."""
    replicas = [list(order[r :: step.replicas]) for r in range(step.replicas)]
    parts = [[part.tolist() for part in np.array_split(own, step.microbatches)] for own in replicas]
    return max(step.seconds(parts))


def _costs(compiled: CompiledModel, table: Lengths) -> Costs:
    found = probes(compiled, table)
    return of_problems(
        compiled.program, [problem(one, compiled.options) for one in found.programs], found.counted
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
        own = [copies * one for one in units]
        positions = copies * rows * wide
        counted.append([1.0, *own, *(one**2 for one in own), positions, positions * wide])
    programs = tuple(source.program(copies, {text: wide}) for copies, wide in points)
    return Probes(programs, np.array(counted, dtype=np.float64))


def _wide(text: Length, share: float) -> int:
    return text.size + round(text.size * (share - 1) / text.step) * text.step


def _text(source: Sampler) -> Length:
    """The length of the language model's rows. InputError if the example's cannot be another."""
    text = next((one for one in lengths(source) if one.name == "text"), None)
    if text is None:
        raise InputError(
            "the model takes rows of one length only", "csc data", "balance is for samples of different lengths"
        )
    return text


def _units(compiled: CompiledModel, kinds: int) -> list[int]:
    """How many units the example's microbatch has: rows of its features, in order."""
    tensors, _ = split_batch(compiled.inspected.microbatch)
    found = [len(one) for one in tensors.values() if one.is_floating_point() and one.dim() > 1]
    if len(found) < kinds:
        raise InputError(
            f"the lengths have {kinds} kinds of units beside tokens, and the example {len(found)} entries of features",
            "csc data", "leave out the columns that no encoder pays for",
        )  # fmt: skip
    return found[:kinds]
