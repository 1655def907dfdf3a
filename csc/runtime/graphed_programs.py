"""The programs of one trainer whose stages a device records and launches again: see csc.runtime.graphed_stage.

    programs = GraphedPrograms(device, asked)   asked: whether anything is to be recorded; CPUs have nothing for it
    programs.add(ranks, fused) -> ranks         of one more program; fused: what Inductor compiles of the same programs
    programs.rows() -> [GraphRow]
    unrecorded(program, rank, stage) -> str     what program.json and the files say against a stage; "": nothing

Of several programs (sizes) KEPT at most have recordings at once: the one that has not been used for the longest time
gives up its own for another, whose sizes have come often enough. Where that goes round, the last one runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from csc import devices
from csc.kernels.recordable import DRAWS, GATHERED, MEETS
from csc.runtime.graph_places import FixedPlaces
from csc.runtime.graphed_stage import GraphedStage, GraphRow
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.rank import Rank
from csc.runtime.recorded_part import LeavingPlaces, Recorder
from csc.runtime.specs import StageSpec

if TYPE_CHECKING:
    from csc.runtime.fused_members import FusedMembers

log = logging.getLogger("csc")

KEPT = 4  # programs
GIVEN_UP = 2  # times that a program may have lost its recordings


class GraphedPrograms:
    """See the module."""

    def __init__(self, device: torch.device, asked: bool) -> None:
        self._recorder = devices.graphs(device) if asked else None
        self._shared = self._recorder.pool() if self._recorder is not None else None
        self._places, self._copies = LeavingPlaces(device), dict[str, FixedPlaces]()
        if asked and self._recorder is None:
            log.warning("cuda_graphs: skipped, as there are none on a device of type %s", device.type)
        self._all: list[OneProgram] = []
        self._recent: list[OneProgram] = []  # those with recordings, the last one used last

    def add(self, ranks: list[Rank], fused: FusedMembers | None) -> list[Rank]:
        """The ranks, with functions that record."""
        if self._recorder is None:
            return ranks
        number = len(self._all)
        settled = partial(fused.is_settled, number) if fused is not None else _always
        one = OneProgram(self._recorder, self._shared, self._places, self._copies, self._entered, self._used, settled)
        self._all.append(one)
        return [replace(rank, functions=one.functions(rank)) for rank in ranks]

    def rows(self) -> list[GraphRow]:
        """Of all stages of all programs."""
        return [row for one in self._all for stage in one.stages for row in stage.rows()]

    def _entered(self, program: OneProgram) -> bool:
        if program in self._recent:
            return True
        if len(self._recent) >= KEPT:
            if program.given_up >= GIVEN_UP:
                return False
            self._recent.pop(0).forget()
        self._recent.append(program)
        return True

    def _used(self, program: OneProgram) -> None:
        if program in self._recent and self._recent[-1] is not program:
            self._recent.remove(program)
            self._recent.append(program)


def _always() -> bool:
    return True


class OneProgram:
    """What its stages share with those of all programs."""

    def __init__(
        self, recorder: Recorder, shared: Any, places: LeavingPlaces, copies: dict[str, FixedPlaces],
        entered: Callable[[OneProgram], bool], used: Callable[[OneProgram], None], settled: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.recorder, self.shared, self.places, self.copies = recorder, shared, places, copies
        self._entered, self._used, self._settled = entered, used, settled
        self.stages: list[GraphedStage] = []
        self.given_up = 0

    def functions(self, rank: Rank) -> dict[int, Any]:
        """Of a rank's stages."""
        made = [GraphedStage(rank, spec, self, unrecorded(rank.program, rank, spec)) for spec in rank.stages]
        self.stages += made
        return {spec.stage: one.functions for spec, one in zip(rank.stages, made, strict=True)}

    def enters(self) -> bool:
        """Whether it may have recordings."""
        return self._settled() and self._entered(self)

    def used(self) -> None:
        """What it has recorded is used now."""
        self._used(self)

    def forget(self) -> None:
        """Give them up."""
        self.given_up += 1
        for stage in self.stages:
            stage.forget()


def unrecorded(program: LoadedProgram, rank: Rank, stage: StageSpec) -> str:
    """See the module. What calls say shows when they run (csc.runtime.recorded_part)."""
    manifest = program.manifest
    edited = [name for name in program.edited if name.endswith(".py")]
    if edited:
        return f"{edited[0]} was edited, and what it does besides its results would be done once"
    if stage.contexts or rank.met:
        return MEETS
    if manifest.divided[stage.stage]:
        return GATHERED
    if any(draw.region in stage.regions for draw in manifest.draws):
        return f"it draws random numbers, and {DRAWS}"
    return ""
