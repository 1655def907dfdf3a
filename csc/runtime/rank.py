"""A rank: one position of the mesh with what it needs to run its part of a program.

Terms: a rank's *replica* is its index on the dp axis, its *stage* the one on the pp axis.

    Rank(program, rank, module, endpoint, constants, device)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

from csc.runtime.program import LoadedProgram
from csc.runtime.specs import StageSpec
from csc.runtime.transport import Endpoint


@dataclass(frozen=True)
class Rank:
    """One rank of a program, ready to run."""

    program: LoadedProgram
    rank: int
    module: ModuleType
    endpoint: Endpoint
    constants: Mapping[str, torch.Tensor]
    device: torch.device

    @property
    def stage(self) -> StageSpec:
        return self.program.manifest.stages[self.program.manifest.mesh.coordinates(self.rank).pp]

    @property
    def replica(self) -> int:
        """Index on the dp axis."""
        return self.program.manifest.mesh.coordinates(self.rank).dp
