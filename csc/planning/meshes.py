"""Which meshes so many devices can make for the samples of one step.

Terms
  layout      a mesh with its microbatches: each of dp replicas takes `microbatches` of `samples` samples through its
              pipeline
  node        devices that fast links join; tensor-parallel ranks stand within one
  form        how ranks divide a model: whether those of tp share out tokens between products (`sequence_parallel`), and
              the components whose samples they (`vision_tower.tp=1`) or those of cp (`vision_tower.cp=1`) share out
  division    what layouts that need the same traced graphs have in common: tp, cp, form and the samples of a microbatch

    layouts(devices, step, sizes, node, regions) -> [MeshLayout]      in the plain form
    layout.in_form(form) -> MeshLayout      layout.division -> MeshDivision
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from csc.ir.mesh import Mesh

CONTEXT = 8  # ranks that share a sequence, at most


@dataclass(frozen=True)
class MeshForm:
    """apart: components with a tp of 1; whole: those with a cp of 1."""

    apart: tuple[str, ...] = ()
    sequence: bool = False
    whole: tuple[str, ...] = ()


PLAIN = MeshForm()


@dataclass(frozen=True)
class MeshDivision:
    """samples: of a microbatch."""

    tp: int
    cp: int
    samples: int
    form: MeshForm = PLAIN

    def __str__(self) -> str:
        named = [f"tp={self.tp}", f"cp={self.cp}", *(f"{component}.tp=1" for component in self.form.apart)]
        named += [f"{component}.cp=1" for component in self.form.whole]
        return ", ".join([*named, "sequence_parallel"] if self.form.sequence else named)


@dataclass(frozen=True)
class MeshLayout:
    """samples: of a microbatch. microbatches: of a replica. sequence: tokens are shared out between products."""

    mesh: Mesh
    samples: int
    microbatches: int
    sequence: bool = False

    @property
    def division(self) -> MeshDivision:
        apart = tuple(name for name, tp in self.mesh.components if tp == 1)
        form = MeshForm(apart, self.sequence, self.mesh.whole_sequences)
        return MeshDivision(self.mesh.tp, self.mesh.cp, self.samples, form)

    def in_form(self, form: MeshForm) -> MeshLayout:
        """The same devices and samples; with a tp (cp) of 1 nothing of the form is about tp (cp)."""
        several = self.mesh.tp > 1
        own = tuple((component, 1) for component in form.apart if several)
        mesh = replace(self.mesh, components=own, whole_sequences=form.whole)
        return replace(self, mesh=mesh, sequence=form.sequence and several)

    def __str__(self) -> str:
        shared = ", sequence_parallel" if self.sequence else ""
        return f"{self.mesh}{shared}, {self.microbatches} microbatches of {self.samples}"


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
