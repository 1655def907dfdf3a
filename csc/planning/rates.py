"""What each feature of a microbatch costs every unit: loads per stage from a model's numbers at a few sizes.

Terms
  feature   a number that a microbatch has: 1, tiles, tokens, the sum of its samples' squared lengths, ...
  rates     for each feature the seconds and bytes that one of it adds to a unit, or to a value between units

    fitted(problems, features) -> SizeRates        the same model's problems at several sizes, and the features of each
    mean(rates, problem, features) -> Problem      with the numbers of such a microbatch
    loads(rates, problem, stages, features) -> Loads   of these stages, for microbatches with these features

Rates are never below 0: the least squares are those of Lawson and Hanson (1974).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from csc.errors import InputError
from csc.planning.problem import Problem, Unit, Value, pipeline
from csc.simulation.pipeline import Loads, StageWork, hosted

UNIT = ("forward", "backward_input", "backward_weight", "saved", "stashed")
VALUE = ("size", "gradient_size")


@dataclass(frozen=True)
class SizeRates:
    """units[f]: the model's units with what one of feature f adds; values[f]: likewise. error: by how much the fit was
    off for the problems it was made from: the largest difference in seconds of a whole step, relative.
    """

    units: tuple[tuple[Unit, ...], ...]
    values: tuple[tuple[Value, ...], ...]
    error: float


def fitted(problems: Sequence[Problem], features: Sequence[Sequence[float]]) -> SizeRates:
    """Rates by least squares, each number relative to itself. InputError if there are fewer problems than features or
    they are not of one model.
    """
    counts = np.array(features, dtype=np.float64)
    names = {tuple(unit.name for unit in problem.units) for problem in problems}
    if counts.ndim != 2 or len(counts) != len(problems) or len(names) != 1:
        raise InputError(
            "the problems are not of one model, each with its features", "rates", "plan the same model at several sizes"
        )
    if np.linalg.matrix_rank(counts) < counts.shape[1]:
        raise InputError(
            f"{len(problems)} sizes do not tell {counts.shape[1]} features apart", "rates",
            "plan the model at more sizes, in which the features vary apart from each other",
        )  # fmt: skip
    first = problems[0]
    units = [_fitted([problem.units[u] for problem in problems], UNIT, counts) for u in range(len(first.units))]
    values = [_fitted([problem.values[v] for problem in problems], VALUE, counts) for v in range(len(first.values))]
    found = SizeRates(tuple(zip(*units)), tuple(zip(*values)) or ((),) * counts.shape[1], 0.0)
    return replace(found, error=max(_error(found, problem, one) for problem, one in zip(problems, features)))


def _fitted(ones: Sequence[Any], figures: Sequence[str], counts: npt.NDArray[np.float64]) -> list[Any]:
    """One unit or value for each feature."""
    found: dict[str, npt.NDArray[np.float64]] = {}
    for name in figures:
        numbers = np.array([getattr(one, name) for one in ones], dtype=np.float64)
        weights = 1 / np.where(numbers > 0, numbers, numbers.max() or 1.0)
        scale = counts.max(axis=0)  # columns of one size, or the constant drowns in squares
        found[name] = nnls(counts / scale * weights[:, None], numbers * weights)[0] / scale
    changed = [{name: float(found[name][f]) for name in figures} for f in range(counts.shape[1])]
    return [replace(ones[0], **one) for one in changed]


def _error(rates: SizeRates, problem: Problem, features: Sequence[float]) -> float:
    right = sum(unit.work for unit in problem.units)
    return abs(sum(unit.work for unit in mean(rates, problem, features).units) / right - 1) if right else 0.0


def mean(rates: SizeRates, problem: Problem, features: Sequence[float]) -> Problem:
    """The problem of a microbatch with these features: that of the mean plans for all."""
    units = [_sum(ones, UNIT, features) for ones in zip(*rates.units)]
    values = [_sum(ones, VALUE, features) for ones in zip(*rates.values)]
    return replace(problem, units=tuple(units), values=tuple(values))


def _sum(ones: Sequence[Any], figures: Sequence[str], features: Sequence[float]) -> Any:
    changed = {name: sum(count * getattr(one, name) for count, one in zip(features, ones)) for name in figures}
    return replace(ones[0], **changed)


def loads(
    rates: SizeRates, problem: Problem, stages: Sequence[Sequence[int]], features: Sequence[Sequence[float]]
) -> Loads:
    """What microbatches with these features, of which the first is 1, take on these stages.

    What B and W, one right after the other, take for a moment is that of the largest unit for each feature: at least
    as much as it is.
    """
    bare = replace(problem, scale=None, action=0.0, handling=0.0)
    each = [
        pipeline(replace(bare, units=units, values=values), stages) for units, values in zip(rates.units, rates.values)
    ]
    each[0] = hosted(each[0], problem.action, problem.handling)  # once for a microbatch, not for each of its tokens
    stage_rates: list[tuple[StageWork, ...]] = list(zip(*(one.stages for one in each)))
    channels = each[0].messages
    return Loads(
        tuple(tuple(map(float, one)) for one in features),
        tuple(stage_rates),
        {channel: tuple(one.messages[channel] for one in each) for channel in channels},
    )
