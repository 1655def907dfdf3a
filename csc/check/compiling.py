"""When programs are checked, and what the check asks of the compiler that it judges."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from torch import nn

from csc.errors import InputError
from csc.ir.program import Options, Program

# --- When programs are checked ---------------------------------------------------------------------------------------


def checks(given: bool | int | None) -> bool | int:
    """True: before a program's first step; a number: and at each step of which it is a divisor; False: never.

    None: True, unless CSC_CHECK is 0. InputError for what is no such thing.
    """
    if given is None:
        return os.environ.get("CSC_CHECK", "1").lower() not in ("0", "false", "off", "no")
    if not isinstance(given, int) or given < 0:
        raise InputError(f"check is {given!r}", "compile", "use True, False, or a number of steps between two checks")
    return given if isinstance(given, bool) else given or False


# --- What the check asks of the compiler that it judges: programs, and nothing of how they are made ------------------


class Compiles(Protocol):
    """The compiler of one model (csc.driver.compiler)."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def axes(self) -> Mapping[str, int]:
        """Along which dimension samples of an entry lie, where that is told (csc.capture.batch.sample_axis)."""

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
