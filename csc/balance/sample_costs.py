"""The lengths of a dataset's samples, and what samples cost a compiled model, stage by stage."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from csc.driver.compiled import CompiledModel
from csc.errors import InputError
from csc.ir.program import Program
from csc.ir.schedule import Schedule
from csc.planning.assign.step import BatchLayout, Floats
from csc.planning.problem import Problem, SizeRates, fitted, loads, mean, pipeline, placed
from csc.planning.schedules.work import orders_of
from csc.simulation.pipeline import Pipeline
from csc.simulation.pipeline import from_json as pipeline_from_json
from csc.simulation.pipeline import to_json as written

# --- The lengths of a dataset's samples: what an assignment knows of them, read without loading a sample -------------
#
# Terms
#   tokens   positions that a sample takes in the language model, those of its images among them
#   units    what else it has, counted: tiles, images, frames, patches; whatever an encoder pays for


TOKENS = "tokens"
REMEDY = (
    "give a column of whole numbers with the tokens of each sample, or a dict such as {'tokens': ..., 'tiles': ...}"
)


@dataclass(frozen=True)
class Lengths:
    """tokens: [sample]; units: [sample][kind], of these names."""

    tokens: Floats
    units: Floats
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def read(given: Any, dataset: Any) -> Lengths:
    """InputError for columns of another length than the dataset, and for numbers that are no lengths: which sample."""
    count = len(dataset)
    if callable(given):
        columns = _called(given, count)
    elif isinstance(given, Mapping):
        columns = dict(given)
    else:
        columns = {TOKENS: given}
    return _checked(
        {name: _column(name, column, dataset) for name, column in columns.items()}, count, "the dataset has"
    )


def of_file(path: str | Path) -> Lengths:
    """InputError for a file that holds no such columns. Nothing in it is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, AttributeError) as error:
        raise InputError(
            f"it holds no columns: {error}", str(path), "write it with numpy.savez(file, tokens=...)"
        ) from None
    first = columns.get(TOKENS, next(iter(columns.values()), np.zeros(0)))
    return _checked(columns, len(first) if first.ndim else 0, f"{TOKENS!r} has")


def _called(length_of: Callable[[int], Any], count: int) -> dict[str, Any]:
    """What a function says of each sample: a number of tokens, or a mapping."""
    rows = [length_of(index) for index in range(count)]
    rows = [row if isinstance(row, Mapping) else {TOKENS: row} for row in rows]
    for index, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise InputError(
                f"lengths gives {', '.join(map(str, row))} for sample {index}, and {', '.join(map(str, rows[0]))} for "
                "sample 0", "lengths", "give the same names for every sample, 0 where it has nothing of the kind",
            )  # fmt: skip
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {TOKENS: 0})}


def _column(name: str, column: Any, dataset: Any) -> Any:
    """The values of a column: themselves, or those of the dataset's column of that name."""
    if not isinstance(column, str):
        return column
    known = getattr(dataset, "column_names", None)
    if known is not None and column not in known:
        raise InputError(
            f"the dataset has no column {column!r} for {name}", "lengths", f"its columns are {', '.join(known)}"
        )
    try:
        return dataset[column]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise InputError(
            f"the dataset gives no column {column!r} for {name}: {type(error).__name__}", "lengths",
            "give the numbers themselves, one for each sample, or a function of a sample's number",
        ) from error  # fmt: skip


def _checked(columns: Mapping[str, Any], count: int, whose: str) -> Lengths:
    if TOKENS not in columns:
        raise InputError(
            f"there is no column {TOKENS!r} among {', '.join(map(str, columns)) or 'none'}", "lengths", REMEDY
        )
    numbers = {name: _numbers(name, column, count, whose) for name, column in columns.items()}
    tokens = numbers.pop(TOKENS)
    if count and tokens.min() < 1:
        raise InputError(
            f"sample {int(tokens.argmin())} has no tokens", "lengths", "leave such samples out of the dataset"
        )
    units = np.stack(list(numbers.values()), axis=1) if numbers else np.zeros((count, 0))
    return Lengths(tokens, units, tuple(numbers))


def _numbers(name: str, column: Any, count: int, whose: str) -> Floats:
    try:
        values = np.asarray(list(column) if not hasattr(column, "__array__") else column, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the column {name!r} holds something that is no number ({error})", "lengths", REMEDY
        ) from None
    if values.ndim != 1 or len(values) != count:
        raise InputError(
            f"there are {' x '.join(map(str, values.shape)) or 'no'} values of {name!r}, and {whose} {count} samples",
            "lengths", "give one number for each sample, in the dataset's order",
        )  # fmt: skip
    wrong = ~np.isfinite(values) | (values < 0) | (values != np.floor(values))
    if wrong.any():
        index = int(wrong.argmax())
        raise InputError(
            f"sample {index} has {values[index]:g} {name}", "lengths", "lengths are whole numbers of at least 0"
        )
    return values


# --- What samples cost a compiled model, stage by stage --------------------------------------------------------------
#
# Rates of features are fitted to a few groups of real samples.
#
# Terms
#   probe      a group of samples that is collated and traced, so that its costs are known
#   features   of a microbatch, as csc.planning.assign.step has them: (1, units, their squares, positions, pairs)
#   typical    a probe as most microbatches are, which is not fitted: by how much it is off is the error
#
# A trace counts every pair of a row; rates are fitted to that. Samples that are packed in one row see themselves
# alone, which is what the features of a microbatch count.


log = logging.getLogger("csc")

POOR = 0.1  # an error from which on a fit is a warning
SPARE = 1  # probes more than there are features
Collated = Callable[[Sequence[int]], Mapping[str, Any]]


@dataclass(frozen=True)
class Costs:
    """pipeline: with the rates of features in its loads. orders: of each rank, over positions. room: bytes for
    activations by rank; None: nobody says. error: of the seconds of a typical microbatch, relative.
    """

    pipeline: Pipeline
    placement: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    room: tuple[float, ...] | None
    error: float


def measured(
    compiled: CompiledModel, layout: BatchLayout, names: Sequence[str], collated: Collated, typical: float
) -> Costs:
    """layout: of all samples; names: of the kinds of their units; collated: makes a microbatch of a group; typical: how
    many samples a microbatch has. InputError if a probe cannot be traced, or
    its regions are not those of the example.
    """
    program = compiled.program
    groups = probes(layout, max(1, round(typical)))
    problems = [compiled.inspected.problem(collated(group)) for group in groups]
    regions = [region.name for region in program.regions]
    for group, sizes in zip(groups, problems):
        if [unit.name for unit in sizes.units] != regions:
            raise InputError(
                f"a microbatch of samples {_listed(group)} has other regions than the example", "csc.balanced",
                "compile with an example that has every entry which the dataset's samples have",
            )  # fmt: skip
    counted = _counted(layout, groups)
    rates = of_problems(program, problems, counted)
    if rates.error > POOR:
        log.warning(
            "lengths explain what a microbatch takes poorly: that of samples %s is off by %.0f%%; microbatches will be "
            "less balanced than they could be. Is there something that encoders pay for and lengths do not say (%s)?",
            _listed(groups[-1]), 100 * rates.error, ", ".join(("tokens", *names)),
        )  # fmt: skip
    return rates


def of_problems(program: Program, problems: Sequence[Problem], counted: Floats) -> Costs:
    """The costs of a program's stages, from the same model's problems at several sizes and the features of each; the
    last one tells how far the others are off.
    """
    assert program.schedule is not None
    place = {region.name: index for index, region in enumerate(program.regions)}
    stages = [[place[name] for name in stage.regions] for stage in program.stages]
    return of_stages(problems, counted, stages, [stage.rank for stage in program.stages], program.schedule)


def of_stages(
    problems: Sequence[Problem],
    counted: Floats,
    stages: Sequence[Sequence[int]],
    home: Sequence[int],
    schedule: Schedule,
) -> Costs:
    """The same of any stages: the units of each, its rank, and the order of work."""
    placement = tuple(home)
    limits = problems[-1].limits
    problems = [placed(sized, stages, placement) for sized in problems]  # each unit as it is on its own rank
    rates, error = rates_of(problems, counted)
    total = replace(mean(rates, problems[-1], counted[-1].tolist()), scale=None)
    built = pipeline(total, stages)
    built = replace(built, loads=loads(rates, total, stages, []))
    room = None
    if limits is not None:
        state = [0.0] * (1 + max(placement))
        for stage, rank in zip(built.stages, placement):
            state[rank] += stage.state
        limit_of_rank = limits if isinstance(limits, tuple) else (limits,) * len(state)
        room = tuple(limit - held for limit, held in zip(limit_of_rank, state))
    return Costs(built, placement, tuple(map(tuple, orders_of(schedule))), room, error)


def _listed(group: Sequence[int]) -> str:
    return ", ".join(map(str, group))


def _counted(layout: BatchLayout, groups: Sequence[Sequence[int]]) -> Floats:
    """Features as a trace sees them: of the microbatch's sizes, whoever sees whom in it."""
    features = layout.features(groups)
    kinds = layout.units.shape[1]
    features[:, 1 + kinds : 1 + 2 * kinds] = features[:, 1 : 1 + kinds] ** 2
    if layout.packed:
        features[:, -1] = features[:, -2] ** 2
    return features


def probes(layout: BatchLayout, typical: int) -> list[list[int]]:
    """Groups that tell features apart, and last the typical one: chosen greedily among groups of one to three samples,
    each the one that is the least explained by those before (pivoted orthogonalisation). All have some of every kind of
    units that there is.
    """
    full = np.flatnonzero((layout.units > 0).all(axis=1))
    if not len(full):
        raise InputError(
            "no sample has something of every kind of units, and costs are measured on such", "lengths",
            "put a sample with all of them into the dataset, or leave a kind out that there is nothing of",
        )  # fmt: skip
    by = [full[np.argsort(column[full], kind="stable")] for column in (layout.lengths, *layout.units.T)]
    picked = [int(order[round(q * (len(order) - 1))]) for order in by for q in (0.0, 0.25, 0.5, 0.75, 1.0)]
    picked = list(dict.fromkeys(picked))
    candidates = [[i] * n for i in picked for n in (1, 2, 3)] + [[i, j] for i in picked for j in picked if i < j]
    rows = _counted(layout, candidates)
    rows = rows / np.maximum(rows.max(axis=0), 1e-300)
    chosen: list[int] = []
    left = rows.copy()
    while len(chosen) < rows.shape[1]:
        sizes = (left**2).sum(axis=1)
        best = int(sizes.argmax())
        if sizes[best] < 1e-12:
            break
        chosen.append(best)
        unit = left[best] / np.sqrt(sizes[best])
        left = left - np.outer(left @ unit, unit)
    spare = [k for k in range(len(candidates) // 2, len(candidates)) if k not in chosen][:SPARE]
    middle = len(by[0]) // 2
    near = by[0][max(0, middle - typical // 2) :][:typical]
    return [candidates[k] for k in (*chosen, *spare)] + [near.tolist()]


def rates_of(problems: Sequence[Problem], counted: Floats) -> tuple[SizeRates, float]:
    """What each feature adds to each unit, and by how much the typical problem, the last one, is off. Features that the
    probes do not tell apart from others add nothing.
    """
    known, kept = counted[:-1], [0]
    order = [0, counted.shape[1] - 2, counted.shape[1] - 1, *range(1, counted.shape[1] - 2)]
    for feature in order[1:]:
        columns = known[:, [*kept, feature]]
        scaled = columns / np.maximum(np.abs(columns).max(axis=0), 1e-300)
        if np.linalg.matrix_rank(scaled, tol=1e-6) == len(kept) + 1:
            kept.append(feature)
    found = fitted(problems[:-1], known[:, kept].tolist())
    nothing = [tuple(_nothing(rate) for rate in row) for row in (found.units[0], found.values[0])]
    units = [found.units[kept.index(f)] if f in kept else nothing[0] for f in range(counted.shape[1])]
    values = [found.values[kept.index(f)] if f in kept else nothing[1] for f in range(counted.shape[1])]
    rates = SizeRates(tuple(units), tuple(values), found.error)
    right = sum(unit.work for unit in problems[-1].units)
    predicted = sum(unit.work for unit in mean(rates, problems[-1], counted[-1].tolist()).units)
    return rates, max(found.error, abs(predicted / right - 1) if right else 0.0)


def _nothing(rate: Any) -> Any:
    figures = ("forward", "backward_input", "backward_weight", "saved", "stashed", "size", "gradient_size")
    return replace(rate, **{name: 0.0 for name in figures if hasattr(rate, name)})


def to_json(costs: Costs) -> dict[str, Any]:
    """Numbers to the last digit: for the ranks that have not measured."""
    return {**{field.name: getattr(costs, field.name) for field in fields(Costs)}, "pipeline": written(costs.pipeline)}


def from_json(data: Mapping[str, Any]) -> Costs:
    """What `to_json` wrote, once it has been JSON."""
    return Costs(
        pipeline_from_json(data["pipeline"], "costs"),
        tuple(data["placement"]),
        tuple(map(tuple, data["orders"])),
        None if data["room"] is None else tuple(data["room"]),
        data["error"],
    )
