"""How alike representations are, and clusters of those that are.

Terms
  representation   (samples, features): what one candidate makes of the probe samples; candidates differ in width
  distance         1 - linear CKA: 0 for representations that are equal up to rotation and scale, at most 1
  medoid           the member of a cluster with the least sum of distances to the others
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Clusters:
    """members: the candidates of each cluster, by number, in order; medoids: one of each."""

    members: tuple[tuple[int, ...], ...]
    medoids: tuple[int, ...]

    def of(self, candidate: int) -> int:
        """The cluster of a candidate."""
        return next(number for number, members in enumerate(self.members) if candidate in members)


def linear_cka(x: Floats, y: Floats) -> float:
    """|Y'X|^2 / (|X'X| |Y'Y|) of centred columns, in Frobenius norms: 0 to 1.

    x, y: (samples, features) of the same samples. A representation that is the same for all samples is like nothing: 0.
    """
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    # With fewer samples than features the products of samples are smaller, and have the same norms.
    left, right = x @ x.T, y @ y.T
    norm = float(np.linalg.norm(left) * np.linalg.norm(right))
    smallest = np.finfo(np.float64).tiny
    return float(np.sum(left * right)) / norm if norm > smallest else 0.0


def distances(representations: Sequence[Floats]) -> Floats:
    """1 - linear CKA of every two; symmetric, 0 on the diagonal."""
    count = len(representations)
    apart = np.zeros((count, count))
    for i in range(count):
        for j in range(i):
            apart[i, j] = apart[j, i] = min(1.0, max(0.0, 1.0 - linear_cka(representations[i], representations[j])))
    return apart


def clusters(apart: Floats, count: int) -> Clusters:
    """At most `count` clusters of average linkage, in the order of their first members."""
    size = len(apart)
    if size == 1 or count >= size:
        singles = tuple((number,) for number in range(size))
        return Clusters(singles, tuple(range(size)))
    labels = fcluster(linkage(squareform(apart, checks=False), "average"), max(1, count), "maxclust")
    members = tuple(
        tuple(int(number) for number in np.flatnonzero(labels == label)) for label in dict.fromkeys(labels.tolist())
    )
    return Clusters(members, tuple(_medoid(apart, member) for member in members))


def _medoid(apart: Floats, members: Sequence[int]) -> int:
    return min(members, key=lambda candidate: (float(apart[candidate, list(members)].sum()), candidate))
