"""A rank: one position of the mesh with what it needs to run its part of a program.

Terms: a rank's *position* is its index on the pp axis, its *cp rank* and *tp rank* those on the cp and the tp axis, its
*replicas* those whose samples it works on. They are one, but at a position that replicas share: there the rank does
each action of the schedule for all of them, and numbers their microbatches in turns.

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
from csc.ir.schedule import Action
from csc.runtime.loaded_program import LoadedProgram, StageFunctions, Visibility
from csc.runtime.made_once import Constants
from csc.runtime.shared_actions import repeated
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

    @cached_property
    def replicas(self) -> range:
        """Whose samples it works on."""
        return self.program.manifest.mesh.replicas_of(self.rank)

    def served(self, number: int) -> tuple[int, int]:
        """The replica, and its microbatch, of a microbatch of this rank's step."""
        return self.program.manifest.mesh.served(self.rank, number)

    def named(self, action: Action) -> str:
        """An action as the schedule has it, and for which of several replicas it is done."""
        if len(self.replicas) == 1 or action.microbatch < 0:
            return f"'{action}'"
        replica, microbatch = self.served(action.microbatch)
        return f"'{action._replace(microbatch=microbatch)}' of replica {replica}"

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """What it does in a step."""
        return repeated(self.program.schedule.ranks[self.position], len(self.replicas))

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
