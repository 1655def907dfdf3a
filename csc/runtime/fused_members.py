"""The programs of one trainer, whose functions Inductor compiles: see csc.runtime.fused_program.

members = FusedMembers(folder, device, positions)      folder: where artifacts are kept; None: for this process alone
members.add(program)                              in the order in which the trainer takes them
members.says(numbers) -> flags                    before a step with these programs: see csc.runtime.fused_program
with members.step(calls, flags, meeting): ...     around what computes; calls: (number of the program, call)
members.is_settled(number)                        whether the functions of a program are those that it goes on with
members.rows() -> [FusedRow]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import reduce
from operator import or_

import torch

from csc.runtime.function_folder import FunctionFolder
from csc.runtime.function_order import TorchState
from csc.runtime.fused_program import BUSY, PREPARES, READY, Call, FusedProgram
from csc.runtime.fused_words import FusedWord, told
from csc.runtime.inductor import FusedRow, fused_functions, lacks
from csc.runtime.kept_program import PREFIX, KeptProgram
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.meeting import Meeting
from csc.runtime.side_by_side import Background


class FusedMembers:
    """See the module. positions: of this process' ranks on the pp axis."""

    def __init__(self, folder: FunctionFolder | None, device: torch.device, positions: Iterable[int]) -> None:
        self._folder = folder or FunctionFolder.of(None)
        self._device, self._positions = device, sorted(set(positions))
        self._background = Background()
        self._programs: list[FusedProgram] = []

    def add(self, program: LoadedProgram) -> None:
        """Its modules are imported."""
        later = bool(self._programs)
        functions = fused_functions(program.package, self._folder.path)
        own = later or self._folder.own is not None
        kept = None if own else KeptProgram(self._folder.path, _key(program, self._positions))
        self._programs.append(
            FusedProgram(
                len(self._programs), functions, self._folder.path, kept, self._device, self._background,
                self._positions, lacks(self._device), later, self._folder.workers.take,
            )
        )  # fmt: skip

    def says(self, numbers: Iterable[int]) -> int:
        """Of the programs with these numbers."""
        return reduce(or_, (self._programs[number].says for number in numbers), 0)

    @contextmanager
    def step(self, calls: Sequence[tuple[int, Call]], flags: int, meeting: Meeting) -> Iterator[None]:
        """All ranks have agreed on the step; flags: those that any rank says."""
        numbers = list(dict.fromkeys(number for number, _ in calls))
        hold = bool(flags & BUSY)

        def before() -> list[FusedWord]:
            for number in numbers:
                of_one = {id(call[0]): call for other, call in reversed(calls) if other == number}
                self._programs[number].before(of_one.values, hold)
            return [word for number in numbers if (word := self._programs[number].word(hold)) is not None]

        if flags & PREPARES or (flags & READY and not hold):
            words = told(meeting, before)
            for number in {*numbers, *(word.program for word in words)}:
                self._programs[number].settle(words, hold)
        else:
            before()
        yield
        for number in numbers:
            self._programs[number].after()

    def is_settled(self, number: int) -> bool:
        """Whether the functions of a program are those that it goes on with."""
        return self._programs[number].is_settled

    def rows(self) -> list[FusedRow]:
        """Of all functions that were called."""
        return [row for program in self._programs for row in program.rows()]


def _key(program: LoadedProgram, positions: Sequence[int]) -> str:
    """Of what the functions of a program are compiled for on some ranks, its layer files as they are now."""
    layers = [file.read_text() for file in sorted((program.directory / "layers").glob("*.py"))]
    told = json.dumps([layers, list(positions), asdict(TorchState.now())])
    return f"{program.manifest.fingerprint[:PREFIX]}-{hashlib.sha256(told.encode()).hexdigest()[:32]}"
