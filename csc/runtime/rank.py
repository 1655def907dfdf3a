"""A rank: one position of the mesh with what it needs to run its part of a program.

Terms: a rank's *replica* is its index on the dp axis, its *position* the one on the pp axis, its *piece* the one on
the cp axis.

    Rank(program, rank, functions, endpoint, constants, device, visibility)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from csc.runtime.program import LoadedProgram, StageFunctions, Visibility
from csc.runtime.specs import StageSpec
from csc.runtime.transport import Endpoint


@dataclass(frozen=True)
class Rank:
    """One rank of a program, ready to run. `functions` are those of its stages."""

    program: LoadedProgram
    rank: int
    functions: Mapping[int, StageFunctions]
    endpoint: Endpoint
    constants: Mapping[str, torch.Tensor]
    device: torch.device
    visibility: Visibility | None = None  # what the masks of a microbatch are made of, if tokens are spread

    @property
    def position(self) -> int:
        """Index on the pp axis."""
        return self.program.manifest.mesh.coordinates(self.rank).pp

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages that it runs, in order."""
        return self.program.manifest.stages_of(self.position)

    @property
    def replica(self) -> int:
        """Index on the dp axis."""
        return self.program.manifest.mesh.coordinates(self.rank).dp

    @property
    def piece(self) -> int:
        """Index on the cp axis."""
        return self.program.manifest.mesh.coordinates(self.rank).cp

    @property
    def context_group(self) -> tuple[int, ...]:
        """The ranks among which the tokens of its microbatches are spread, itself included."""
        mesh = self.program.manifest.mesh
        return tuple(mesh.rank_of(dp=self.replica, pp=self.position, cp=c) for c in range(mesh.cp))
