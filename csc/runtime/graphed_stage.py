"""A stage whose parts are launched as a device has recorded them, called as the functions of its rank's file are.

    stage = GraphedStage(rank, stage spec, room)
    stage.functions -> StageFunctions        in place of the rank's own
    stage.forget()                           gives up what was recorded; sizes have to be met again
    stage.rows() -> [GraphRow]               what is recorded, and what runs as it is

A stage runs as it is until so many microbatches of its sizes have come (MET): only then, each in its turn, as many
instances are recorded as there are microbatches in flight (csc.runtime.graph_instance). What cannot be recorded runs as
it is, part by part; without F nothing is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from csc.ir.schedule import Action
from csc.runtime.graph_instance import InFlight, Instance, RecordedWork
from csc.runtime.graph_places import FixedPlaces, UnfitError
from csc.runtime.graph_weights import GraphWeights
from csc.runtime.loaded_program import StageFunctions
from csc.runtime.made_once import Constants
from csc.runtime.rank import Rank
from csc.runtime.recorded_part import LeavingPlaces, Recorder
from csc.runtime.specs import StageSpec
from csc.runtime.tapped_forward import Asked

log = logging.getLogger("csc")

MET = 8  # microbatches of its sizes that run as they are: what comes once is not recorded
MOVES = 3  # times that what was recorded may turn out to be elsewhere, before all runs as it is
PARTS = {"F": "forward", "B": "backward_input", "W": "backward_weight", "BW": "backward"}


@dataclass(frozen=True)
class GraphRow:
    """A part of a stage of a rank. instances: that have recorded it. why: it runs as it is; "": it will be recorded."""

    rank: int
    stage: int
    part: str
    instances: int
    why: str = ""


class GraphRoom(Protocol):
    """What all stages of a trainer share: see csc.runtime.graphed_programs."""

    recorder: Recorder
    shared: Any
    places: LeavingPlaces
    copies: dict[str, FixedPlaces]

    def enters(self) -> bool: ...

    def used(self) -> None: ...


class GraphedStage:
    """See the module. why: why nothing of it is recorded; "": nothing speaks against it."""

    def __init__(self, rank: Rank, spec: StageSpec, room: GraphRoom, why: str = "") -> None:
        self._plain = rank.functions[spec.stage]
        self._rank, self._stage, self._room = rank.rank, spec.stage, room
        self._specs = [one.local for one in rank.program.manifest.parameters if spec.stage in one.stages]
        self._most = in_flight(rank.actions, spec.stage)
        self.refused: dict[str, str] = {}
        self._work = RecordedWork(
            self._plain, room.recorder, room.shared, rank.device, self._refuse, self.refused, room.places
        )
        self._instances: list[Instance] = []
        self._weights: GraphWeights | None = None
        self._stamp: Any = None
        self._met, self._moves = 0, 0
        if why:
            self._refuse("F", UnfitError(why))

    @property
    def functions(self) -> StageFunctions:
        """See the module."""
        own = self._plain
        return StageFunctions(
            forward=self._forward,
            backward_input=None if own.backward_input is None else self._backward_input,
            backward_weight=None if own.backward_weight is None else self._backward_weight,
            backward=None if own.backward is None else self._backward,
            loss_tokens=own.loss_tokens,
        )

    def _refuse(self, part: str, error: Exception) -> None:
        why = str(error) if isinstance(error, UnfitError) else f"{type(error).__name__}: {_line(error)}"
        if part not in self.refused:
            self.refused[part] = why
            what = f"stage {self._stage}" if part == "F" else f"{part} of stage {self._stage}"
            log.warning("cuda_graphs: %s of rank %d runs as it is: %s", what, self._rank, why)
        if part == "F":
            self.forget()

    def forget(self) -> None:
        """See the module. Microbatches in flight go on with what they have."""
        if self._instances:
            self._room.recorder.finish()  # what was launched still runs
        self._instances, self._weights, self._met = [], None, 0

    def rows(self) -> list[GraphRow]:
        """See the module."""
        there = [part for part, name in PARTS.items() if getattr(self._plain, name) is not None]
        without = self.refused.get("F", "")
        return [
            GraphRow(
                self._rank, self._stage, part, sum(part in one.recorded for one in self._instances),
                self.refused.get(part) or (f"its F runs as it is: {without}" if without else ""),
            )
            for part in there
        ]  # fmt: skip

    # what the executor calls

    def _forward(
        self, batch: Mapping[str, Any], received: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor],
        constants: Mapping[str, torch.Tensor],
    ) -> tuple[dict[str, torch.Tensor], Any]:  # fmt: skip
        instance = self._free(weights, constants) if isinstance(constants, Constants) else None
        if instance is not None:
            sent = instance.forward(batch, received)
            if sent is not None:
                return sent, instance.take()
        elif self._adds() and isinstance(constants, Constants):
            return self._first(batch, received, weights, constants)
        found: tuple[dict[str, torch.Tensor], Any] = self._plain.forward(batch, received, weights, constants)
        return found

    def _backward_input(
        self, saved: Any, received: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], constants: Any
    ) -> Any:
        if not isinstance(saved, InFlight):
            assert self._plain.backward_input is not None
            return self._plain.backward_input(saved, received, weights, constants)
        work = saved.instance.rest("B", received, weights)
        try:
            name, _ = next(work)
        except StopIteration as end:
            return end.value
        raise AssertionError(f"B gave a gradient of {name}")

    def _backward_weight(self, stashed: Any, weights: Mapping[str, torch.Tensor], constants: Any) -> Iterator[Any]:
        if not isinstance(stashed, InFlight):
            assert self._plain.backward_weight is not None
            yield from self._plain.backward_weight(stashed, weights, constants)
        else:
            yield from stashed.instance.rest("W", {}, weights)

    def _backward(
        self, saved: Any, received: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], constants: Any
    ) -> Any:
        if not isinstance(saved, InFlight):
            assert self._plain.backward is not None
            return (yield from self._plain.backward(saved, received, weights, constants))
        sent, _ = yield from saved.instance.rest("BW", received, weights)
        return sent

    # instances

    def _free(self, weights: Mapping[str, torch.Tensor], constants: Constants) -> Instance | None:
        """One that no microbatch has, if what was recorded is still so."""
        if "F" in self.refused or self._weights is None:
            return None
        self._room.used()
        if not self._weights.take(weights) or self._stamp != _stamp(constants):
            self._moves += 1
            if self._moves >= MOVES:
                self._refuse("F", UnfitError("its parameters or constants are elsewhere, or others, again and again"))
            else:
                log.info("cuda_graphs: stage %d is to be recorded anew: what it reads is elsewhere", self._stage)
                self.forget()
            return None
        return next((one for one in self._instances if one.is_free), None)

    def _adds(self) -> bool:
        """Whether one more is to be recorded."""
        if "F" in self.refused or len(self._instances) >= self._most:
            return False
        self._met += 1
        return self._met > MET and (bool(self._instances) or self._room.enters())

    def _first(
        self, batch: Mapping[str, Any], received: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor],
        constants: Constants,
    ) -> tuple[dict[str, torch.Tensor], Any]:  # fmt: skip
        """F as it is, and a recording of it."""
        asked = Asked(self._plain.forward, batch, received, weights, constants)
        try:
            if self._weights is None:
                self._weights, self._stamp = GraphWeights(self._specs, weights, self._room.copies), _stamp(constants)
                self._weights.take(weights)
            instance = Instance(self._work, self._weights.values, constants)
            instance.first(asked, batch, received)
        except Exception as error:  # of whatever cannot be recorded
            self._refuse("F", error)
            return asked.sent, asked.saved
        self._instances.append(instance)
        log.info("cuda_graphs: stage %d: %d of %d in flight recorded", self._stage, len(self._instances), self._most)
        return asked.sent, instance.take()


def in_flight(actions: Sequence[Action], stage: int) -> int:
    """The most microbatches of a stage that are between F and the last of B, W or BW on its rank."""
    last = {one.microbatch: i for i, one in enumerate(actions) if one.computes and one.stage == stage}
    now, most = 0, 0
    for i, one in enumerate(actions):
        if one.computes and one.stage == stage:
            now += one.kind == "F"
            most = max(most, now)
            now -= last[one.microbatch] == i
    return most


def _stamp(constants: Constants) -> list[tuple[int, int]]:
    """Changes when someone writes to what outlives a step."""
    return [(id(one), one._version) for one in constants.lasting()]


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
