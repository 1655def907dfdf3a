"""What the check asks of the compiler that it judges: programs, and nothing of how they are made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from torch import nn

from csc.ir.program import Options, Program


class Compiles(Protocol):
    """The compiler of one model (csc.driver.compiler)."""

    @property
    def model(self) -> nn.Module: ...

    def of(self, model: nn.Module) -> Self:
        """The compiler of another model, which keeps nothing."""

    def finished(self, microbatch: Mapping[str, Any], options: Options) -> Program:
        """The planned Program for a microbatch."""

    def complete(self, microbatch: Mapping[str, Any]) -> dict[str, Any]:
        """A microbatch as its programs take it."""

    def whole_entries(self, batch: Mapping[str, Any], parts: int) -> frozenset[str]:
        """Entries that are not cut into microbatches."""

    def emit(self, program: Program, options: Options, directory: Path, microbatch: Mapping[str, Any]) -> Path:
        """Write a program directory."""
