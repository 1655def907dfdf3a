"""Which meshes so many devices can make for the samples of one step.

Terms
  layout      a mesh with its microbatches: each of dp replicas takes `microbatches` of `samples` samples through its
              pipeline
  node        devices that fast links join; tensor-parallel ranks stand within one

    layouts(devices, step, sizes, node, regions) -> [MeshLayout]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from csc.ir.mesh import Mesh

CONTEXT = 8  # ranks that share a sequence, at most


@dataclass(frozen=True)
class MeshLayout:
    """samples: of a microbatch. microbatches: of a replica."""

    mesh: Mesh
    samples: int
    microbatches: int

    def __str__(self) -> str:
        return f"{self.mesh}, {self.microbatches} microbatches of {self.samples}"


def layouts(devices: int, step: int, sizes: Collection[int], node: int, regions: int) -> list[MeshLayout]:
    """All that use every device and every sample of a step alike, those of least cp and then tp first.

    step: samples of a step; sizes: samples that a microbatch may have; node: devices of a node; regions: of the model,
    of which each pipeline rank has one at least.
    """
    return [
        MeshLayout(Mesh(dp=dp, pp=pp, cp=cp, tp=tp), samples, step // (dp * samples))
        for cp in _divisors(devices, CONTEXT)
        for tp in _divisors(devices // cp, node)
        for samples in sorted(sizes)
        for pp in _divisors(devices // (tp * cp), regions)
        if step % ((dp := devices // (tp * cp * pp)) * samples) == 0
    ]


def _divisors(number: int, most: int) -> Iterator[int]:
    return (one for one in range(1, min(number, most) + 1) if number % one == 0)
