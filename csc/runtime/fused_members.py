"""The programs of one trainer, whose functions Inductor compiles: see csc.runtime.fused_program.

members = FusedMembers(folder, device)            folder: where artifacts are kept; None: for this process alone
members.add(program)                              in the order in which the trainer takes them
with members.step(calls, hold): ...               around what computes; calls: (number of the program, call)
members.busy(numbers) -> bool                     whether one of these programs is being compiled in the background
members.rows() -> [FusedRow]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from csc.runtime.function_folder import FunctionFolder
from csc.runtime.function_order import TorchState
from csc.runtime.fused_program import PREFIX, Call, FusedProgram
from csc.runtime.inductor import FusedRow, fused_functions
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.side_by_side import Background


class FusedMembers:
    """See the module."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        self._folder = FunctionFolder.of(folder)
        self._device = device
        self._background = Background()
        self._programs: list[FusedProgram] = []

    def add(self, program: LoadedProgram) -> None:
        """Its modules are imported."""
        later = bool(self._programs)
        functions = fused_functions(program.package, self._device, self._folder.path, later)
        key = "" if later or self._folder.own is not None else _key(program)
        background = self._background if later else None
        self._programs.append(FusedProgram(functions, self._folder.path, key, self._device, background))

    def busy(self, numbers: Iterable[int]) -> bool:
        """Of the programs with these numbers."""
        return any(self._programs[number].busy for number in numbers)

    @contextmanager
    def step(self, calls: Sequence[tuple[int, Call]], hold: bool) -> Iterator[None]:
        """All ranks have agreed on the step; hold: some rank is busy with one of its programs."""
        numbers = dict.fromkeys(number for number, _ in calls)
        for number in numbers:
            of_one = {id(call[0]): call for other, call in reversed(calls) if other == number}
            self._programs[number].prepare(of_one.values)
            self._programs[number].before(hold)
        yield
        for number in numbers:
            self._programs[number].after()

    def rows(self) -> list[FusedRow]:
        """Of all functions that were called."""
        return [row for program in self._programs for row in program.rows()]


def _key(program: LoadedProgram) -> str:
    """Of what the functions of a program are compiled for, its layer files as they are now."""
    layers = [file.read_text() for file in sorted((program.directory / "layers").glob("*.py"))]
    told = json.dumps([layers, asdict(TorchState.now())])
    return f"{program.manifest.fingerprint[:PREFIX]}-{hashlib.sha256(told.encode()).hexdigest()[:32]}"
