"""What the learning curves of all pairs together say of each pair's end: a pair that is hardly trained, or not at all,
is judged by what its encoder made of others and its language model of others, too.

Terms
  figure    of a score: -log error; the score itself where one of them is above `perfect`. Higher is better
  doubling  log2 of samples / those at the end: 0 at the end, -1 with half of them

    figure(pair, d) = a + b d + 2^(GROWTH d) (e_encoder(d) + l_llm(d) + p_pair(d) + noise)

a and b are free. e, l and p are Gaussian processes with mean 0, smooth over LENGTH doublings; e and l have variance 1,
p has OWN, and noise NOISE, in units of the deviation of all figures. What sides make of their pairs grows with
training, and scores of short trainings have much noise, so a pair's own early score says less of its end than the sum
of its sides. The four numbers were chosen on the tasks that docs/search.md names, and none of them matters much.

Source: C. E. Rasmussen and C. K. I. Williams, Gaussian Processes for Machine Learning, 2006, section 2.7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from csc.model_search.similarity import Floats

Pair = tuple[str, str]  # encoder, language model
Curve = tuple[tuple[int, float], ...]  # (samples, score)
LEAST = 1e-6  # of an error, whose logarithm is taken
GROWTH, LENGTH, OWN, NOISE = 0.2, 9.0, 0.02, 0.05
FREE = 1e4  # the variance of a and b, which is as good as infinite


def figure(curves: Mapping[Pair, Curve], perfect: float) -> Callable[[float], float]:
    """What a score of these curves is compared by."""
    best = max((score for curve in curves.values() for _, score in curve), default=perfect)
    return (lambda score: -math.log(max(LEAST, perfect - score))) if best <= perfect else (lambda score: score)


def forecast(curves: Mapping[Pair, Curve], pairs: Sequence[Pair], samples: int, perfect: float) -> dict[Pair, float]:
    """By pair the figure to be expected after so many samples. curves: of any pairs, a point at least. It takes the
    cube of the number of points.
    """
    points = [(pair, math.log2(reached / samples)) for pair, curve in curves.items() for reached, _ in curve]
    of = figure(curves, perfect)
    known = np.array([of(score) for curve in curves.values() for _, score in curve])
    mean, deviation = float(known.mean()), float(known.std()) or 1.0
    covariance = _covariance(points, points)
    covariance[np.diag_indices(len(points))] += NOISE * np.exp2([2 * GROWTH * doubling for _, doubling in points])
    weights = np.linalg.solve(covariance, (known - mean) / deviation)
    expected = mean + deviation * (_covariance([(pair, 0.0) for pair in pairs], points) @ weights)
    return dict(zip(pairs, expected.tolist()))


def _covariance(left: Sequence[tuple[Pair, float]], right: Sequence[tuple[Pair, float]]) -> Floats:
    """(left, right), of figures without their noise."""
    names = [[np.array([pair[side] for pair, _ in points], np.str_) for points in (left, right)] for side in (0, 1)]
    encoders, llms = (np.equal.outer(*sides).astype(np.float64) for sides in names)
    here, there = (np.array([doubling for _, doubling in points]) for points in (left, right))
    smooth = np.exp(-(np.subtract.outer(here, there) ** 2) / (2 * LENGTH**2))
    grown = np.exp2(GROWTH * np.add.outer(here, there))
    return FREE * (1 + np.outer(here, there)) + grown * smooth * (encoders + llms + OWN * encoders * llms)
