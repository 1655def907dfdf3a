"""A rank: one position of the mesh with what it needs to run its part of a program.

Terms: a rank's *replica* is its index on the dp axis, its *position* the one on the pp axis, its *cp rank* and
*tp rank* those on the cp and the tp axis.

    Rank(program, rank, functions, endpoint, constants, device, visibility, met)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from csc.ir.groups import Group
from csc.ir.mesh import Coordinates
from csc.runtime.loaded_program import LoadedProgram, StageFunctions, Visibility
from csc.runtime.made_once import Constants
from csc.runtime.specs import ContextSpec, StageSpec
from csc.runtime.tensor_group import Met
from csc.runtime.transport import Endpoint


@dataclass(frozen=True)
class Rank:
    """One rank of a program, ready to run. `functions` are those of its stages."""

    program: LoadedProgram
    rank: int
    functions: Mapping[int, StageFunctions]
    endpoint: Endpoint
    constants: Constants
    device: torch.device
    visibility: Mapping[str, Visibility] = field(default_factory=dict)  # by component: what masks are made of
    met: Mapping[str, Met] = field(default_factory=dict)  # with tp > 1: where collectives meet, by the batch's names
    _groups: dict[Any, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _at(self) -> Coordinates:
        return self.program.manifest.mesh.coordinates(self.rank)

    @property
    def position(self) -> int:
        """Index on the pp axis."""
        return self._at.pp

    @cached_property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages that it runs, in order."""
        return self.program.manifest.stages_of(self.position)

    @property
    def replica(self) -> int:
        """Index on the dp axis."""
        return self._at.dp

    @property
    def cp_rank(self) -> int:
        """Index on the cp axis."""
        return self._at.cp

    @property
    def tp_rank(self) -> int:
        """Index on the tp axis."""
        return self._at.tp

    def group(self, what: Group, positions: Sequence[int] | None = None) -> tuple[int, ...]:
        """As `Mesh.group`, of this rank."""
        key = what, None if positions is None else tuple(positions)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = self.program.manifest.mesh.group(what, self.rank, positions)
        return found

    def sharing(self, spec: ContextSpec) -> tuple[int, ...]:
        """The ranks among which a component's tokens are, itself included."""
        group = self.group(spec.group)
        first = group.index(self.rank) // spec.ranks * spec.ranks
        return group[first : first + spec.ranks]
