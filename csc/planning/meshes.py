"""Which meshes so many devices can make for the samples of one step.

Terms
  layout      a mesh with its microbatches: each of dp replicas takes `microbatches` of `samples` samples through its
              pipeline
  node        devices that fast links join; tensor-parallel ranks stand within one
  form        how ranks divide a model: whether those of tp share out tokens between products (`sequence_parallel`);
              components of which fewer of them divide the layers, and all share out the samples (`vision_tower.tp=1`);
              those of which the ranks of cp share out the samples (`vision_tower.cp=1`) or the tokens (`context`)
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
    """own: components with a tp of their own, and this; whole: those with a cp of 1; spread: those whose tokens all
    ranks of cp share out.
    """

    own: tuple[tuple[str, int], ...] = ()
    sequence: bool = False
    whole: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()


PLAIN = MeshForm()


@dataclass(frozen=True)
class MeshDivision:
    """samples: of a microbatch."""

    tp: int
    cp: int
    samples: int
    form: MeshForm = PLAIN

    def __str__(self) -> str:
        named = [f"tp={self.tp}", f"cp={self.cp}", *(f"{component}.tp={tp}" for component, tp in self.form.own)]
        named += [f"{component}.cp=1" for component in self.form.whole]
        named += [f"context {component}={self.cp}" for component in self.form.spread]
        return ", ".join([*named, "sequence_parallel"] if self.form.sequence else named)


@dataclass(frozen=True)
class MeshLayout:
    """samples: of a microbatch. microbatches: of a replica. sequence: tokens are shared out between products. spread:
    components whose tokens all ranks of cp share out.
    """

    mesh: Mesh
    samples: int
    microbatches: int
    sequence: bool = False
    spread: tuple[str, ...] = ()

    @property
    def division(self) -> MeshDivision:
        form = MeshForm(self.mesh.components, self.sequence, tuple(dict(self.mesh.own_cp)), self.spread)
        return MeshDivision(self.mesh.tp, self.mesh.cp, self.samples, form)

    def in_form(self, form: MeshForm) -> MeshLayout:
        """The same devices and samples; with a tp (cp) of 1 nothing of the form is about tp (cp)."""
        several = self.mesh.tp > 1
        mesh = replace(self.mesh, components=form.own if several else (), own_cp=tuple((one, 1) for one in form.whole))
        spread = form.spread if self.mesh.cp > 1 else ()
        return replace(self, mesh=mesh, sequence=form.sequence and several, spread=spread)

    @property
    def context(self) -> dict[str, int]:
        """Of its components, as the option has it."""
        return dict.fromkeys(self.spread, self.mesh.cp)

    def __str__(self) -> str:
        shared = "".join(f", context {component}={self.mesh.cp}" for component in self.spread)
        shared += ", sequence_parallel" if self.sequence else ""
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
