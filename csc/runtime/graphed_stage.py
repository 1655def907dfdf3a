"""Stages whose parts are launched as a device has recorded them, called as the functions of their rank's module."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from csc import devices
from csc.ir.schedule import Action
from csc.kernels.recordable import DRAWS, GATHERED, MEETS
from csc.runtime.loaded_program import LoadedProgram, StageFunctions
from csc.runtime.made_once import Constants
from csc.runtime.rank import Rank
from csc.runtime.recorded_part import (
    Asked,
    FixedPlaces,
    GraphWeights,
    Leave,
    LeavingPlaces,
    NestedCopy,
    RecordedPart,
    Recorder,
    Run,
    UnfitError,
    fresh,
    handed,
    same_bits,
    table,
    tensors_in,
)
from csc.runtime.specs import StageSpec
from csc.runtime.tried_function import apart

if TYPE_CHECKING:
    from csc.runtime.fusing import FusedMembers


# --- One microbatch in flight on a stage, whose parts are launched as they were recorded for an earlier one ----------
#
# Terms: an *instance* is what is recorded for one microbatch in flight: places for what comes in, and what F keeps for
# B and B for W, in memory of its own. It is *held* from F on, for as long as the executor has its token (InFlight). A
# part is *proven* on the first microbatch that comes to it: the stage's function runs, too, on what was given, and its
# results are used; only a part that gave the same bits is launched for later ones. (Where the function itself gives
# other bits when it runs again, results may be as far apart as csc.runtime.compiled_function allows.)
#
# The order of an instance's launches is that of its recordings, F first, so its parts share a pool. Parts that keep
# nothing share another one with all that a trainer records: whatever they made was copied out when the next one
# begins.


Tensors = Mapping[str, torch.Tensor]
Rest = Generator[tuple[str, torch.Tensor], None, tuple[dict[str, torch.Tensor], Any]]
GRADIENT, SENT = "gradient", "sent"


@dataclass
class RecordedWork:
    """Of one stage, for all its instances. shared: the pool for parts that keep nothing. refuse(part, error): a part
    runs as it is from now on. refused: why, by part.
    """

    functions: StageFunctions
    recorder: Recorder
    shared: Any
    device: torch.device
    refuse: Callable[[str, Exception], None]
    refused: dict[str, str]
    places: LeavingPlaces

    @property
    def keeps(self) -> bool:
        """Whether F keeps anything."""
        return self.functions.backward_input is not None or self.functions.backward is not None

    def recorded(self, run: Run, pool: Any, before: Run | None = None) -> RecordedPart:
        """See csc.runtime.recorded_part."""
        return RecordedPart(self.recorder, run, pool, self.places, self.device, before)


class InFlight:
    """What stands for all that an instance keeps, while its microbatch is in flight."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance


class Instance:
    """What is recorded for one microbatch in flight. weights: what recordings read. constants: of the rank."""

    def __init__(self, work: RecordedWork, weights: Tensors, constants: Constants) -> None:
        self._work, self._weights, self._constants = work, weights, constants
        self._pool = work.recorder.pool()
        self._parts: dict[str, RecordedPart] = {}
        self._received: dict[str, tuple[list[str], FixedPlaces]] = {}
        self._kept: dict[str, Any] = {}  # by the part that kept it
        self._token: weakref.ref[InFlight] | None = None
        self._entries: list[str] = []
        self._lasting: dict[str, list[torch.Tensor | None]] = {}  # of tables; None: copied in
        self._places = FixedPlaces(())

    @property
    def is_free(self) -> bool:
        """Whether no microbatch has it."""
        return self._token is None or self._token() is None

    @property
    def recorded(self) -> frozenset[str]:
        """The parts that are launched."""
        return frozenset(self._parts)

    def take(self) -> InFlight:
        """For the microbatch whose F has just run."""
        token = InFlight(self)
        self._token = weakref.ref(token)
        return token

    # F

    def first(self, asked: Asked, batch: Mapping[str, Any], received: Tensors) -> None:
        """Records and proves F. asked: F as it has run on this batch. Raises any error: then nothing of it is used."""
        lasting = {id(tensor) for tensor in self._constants.lasting()}
        self._entries = list(asked.entries)
        self._lasting = {
            name: [
                tensor if id(tensor) in lasting else None for tensor in _flat(results, f"layers.tables.{name} makes")
            ]
            for name, results in asked.tables.items()
        }
        inputs = self._given(asked.tables, batch, received)
        assert inputs is not None
        elsewhere = [tensor for tensor in inputs if tensor.device != self._work.device]
        if elsewhere:
            raise UnfitError(f"it is given a tensor of {elsewhere[0].device}")
        self._places = FixedPlaces(inputs)
        self._places.fill(inputs)
        names = list(received)
        part = self._work.recorded(self._forward_of(names), self._pool if self._work.keeps else self._work.shared)
        part.launch()
        wanted = [*asked.sent.values(), *(tensors_in(asked.saved) if self._work.keeps else ())]
        tensors = [*part.left, *tensors_in(part.kept)]

        def again() -> list[torch.Tensor]:
            other = Asked(self._work.functions.forward, batch, received, self._weights, self._constants)
            return [*other.sent.values(), *(tensors_in(other.saved) if self._work.keeps else ())]

        _compare(tensors, wanted, again)
        self._parts["F"], self._kept["F"] = part, part.kept

    def _forward_of(self, names: list[str]) -> Callable[..., Any]:
        """F over the places."""

        def run(leave: Leave) -> Any:
            places = iter(fresh(self._places.tensors))
            tables = {
                name: tuple(next(places) if tensor is None else tensor for tensor in lasting)
                for name, lasting in self._lasting.items()
            }
            batch = {name: next(places) for name in self._entries}
            received = {name: next(places) for name in names}
            forward = handed(self._work.functions.forward, tables)
            sent, saved = forward(batch, received, self._weights, self._constants)
            for name, tensor in sent.items():
                leave((SENT, name), tensor)
            return saved if self._work.keeps else None

        return run

    def _given(
        self, tables: Mapping[str, tuple[torch.Tensor, ...]], batch: Mapping[str, Any], received: Tensors
    ) -> list[torch.Tensor] | None:
        """What is copied in; None if something that lasted was made anew."""
        moving: list[torch.Tensor] = []
        for name, lasting in self._lasting.items():
            for tensor, kept in zip(tables[name], lasting, strict=True):
                if kept is None:
                    moving.append(tensor)
                elif tensor is not kept:
                    return None
        moving += _flat([batch[name] for name in self._entries], "the batch has")
        return [*moving, *received.values()]

    def forward(self, batch: Mapping[str, Any], received: Tensors) -> dict[str, torch.Tensor] | None:
        """Launches F on a batch and returns what it sends, by name. Returns None, with nothing launched, where the
        batch is laid out otherwise than the recorded one, or a tensor that lasts lies elsewhere.
        """
        forward = self._work.functions.forward
        tables = {name: table(forward, name)(batch, self._constants) for name in self._lasting}
        inputs = self._given(tables, batch, received)
        if inputs is None or not self._places.fits(inputs):
            return None
        self._places.fill(inputs)
        part = self._parts["F"]
        part.launch()
        return {name: tensor for (_, name), tensor in part.leaving()}

    # B, W and BW

    def rest(self, kind: str, received: Tensors, weights: Tensors) -> Rest:
        """Runs B, W or BW: yields (name, gradient) pairs, and returns what is sent and what is kept for W. The part is
        launched where it was recorded; until then it is proven. kept: the token's place for W is taken by what B keeps
        where B runs as it is.
        """
        part = self._parts.get(kind)
        if part is None or kind in self._work.refused:
            return (yield from self._proving(kind, received, weights))
        self._fill(kind, received)
        part.launch()
        sent: dict[str, torch.Tensor] = {}
        for (what, name), tensor in part.leaving():
            if what == SENT:
                sent[name] = tensor
            else:
                yield name, tensor
        return sent, self._token and self._token()

    def _read(self, kind: str) -> Any:
        """What F or B has kept for a part."""
        return self._kept["B" if kind == "W" else "F"]

    def _work_of(self, kind: str, kept: Any, received: Tensors, weights: Tensors) -> Rest:
        """The stage's own function. It may write over what was kept, and takes lists apart."""
        functions = self._work.functions
        if kind == "B":
            assert functions.backward_input is not None
            result: tuple[dict[str, torch.Tensor], Any] = functions.backward_input(
                kept, received, weights, self._constants
            )
            return result
        if kind == "W":
            assert functions.backward_weight is not None
            yield from functions.backward_weight(kept, weights, self._constants)
            return {}, None
        assert functions.backward is not None
        return (yield from functions.backward(kept, received, weights, self._constants)), None

    def _fill(self, kind: str, received: Tensors) -> None:
        names, places = self._received[kind]
        places.fill([received[name] for name in names])

    def _recorded(self, kind: str, received: Tensors, spare: NestedCopy) -> RecordedPart:
        """spare: for the warm-up."""
        names, places = list(received), FixedPlaces(list(received.values()))
        self._received[kind] = names, places
        self._fill(kind, received)

        def run(leave: Leave, kept: Any) -> Any:
            weights_given = dict(zip(names, fresh(places.tensors), strict=True))
            work = self._work_of(kind, kept, weights_given, self._weights)
            while True:
                try:
                    name, gradient = next(work)
                except StopIteration as end:
                    sent, left = end.value
                    break
                leave((GRADIENT, name), gradient)
                del gradient
            for name, tensor in sent.items():
                leave((SENT, name), tensor)
            return left

        keeps = kind == "B" and self._work.functions.backward_weight is not None
        pool = self._pool if keeps else self._work.shared
        return self._work.recorded(
            lambda leave: run(leave, fresh(self._read(kind))), pool, lambda leave: run(leave, spare.take())
        )

    def _proving(self, kind: str, received: Tensors, weights: Tensors) -> Rest:
        """The function as it is, with the recording of the same beside it."""
        part: RecordedPart | None = None
        kept, again = fresh(self._read(kind)), None
        if kind not in self._work.refused:
            try:
                spare, beside = NestedCopy(self._read(kind)), NestedCopy(self._read(kind))
                part = self._recorded(kind, received, spare)
                kept, again = beside.take(), spare.take()  # a launch may write over it, too
                part.launch()
            except Exception as error:  # of whatever cannot be recorded
                self._work.refuse(kind, error)
                part = None
        work, number = self._work_of(kind, kept, received, weights), 0
        differing: dict[int, torch.Tensor] = {}
        while True:
            try:
                name, gradient = next(work)
            except StopIteration as end:
                sent, kept = end.value
                break
            if part is not None and not (number < len(part.left) and same_bits(part.left[number], gradient)):
                differing[number] = gradient
            number += 1
            yield name, gradient
            del gradient
        if part is None:
            return sent, kept
        try:
            ends = [*sent.values(), *tensors_in(kept)]
            other = self._work_of(kind, again, received, weights)
            self._compare_rest(part, other, differing, number, ends)
        except Exception as error:
            self._work.refuse(kind, error)
            return sent, kept
        self._parts[kind], self._kept[kind] = part, part.kept
        return sent, self._token and self._token()

    def _compare_rest(
        self, part: RecordedPart, work: Rest, differing: Mapping[int, torch.Tensor], number: int,
        ends: list[torch.Tensor],
    ) -> None:  # fmt: skip
        """differing: of so many gradients those that are not the same. work: the function, to be run again."""
        tensors = [*(part.left[name] for name in differing), *part.left[number:], *tensors_in(part.kept)]

        def again() -> list[torch.Tensor]:
            gradients = []
            while True:
                try:
                    gradients.append(next(work)[1])
                except StopIteration as end:
                    sent, kept = end.value
                    return [*(gradients[name] for name in differing), *sent.values(), *tensors_in(kept)]

        _compare(tensors, [*differing.values(), *ends], again)


def _flat(tensors: Iterable[Any], whose: str) -> list[torch.Tensor]:
    flat = list(tensors)
    other = next((tensor for tensor in flat if not isinstance(tensor, torch.Tensor)), None)
    if other is not None:
        raise UnfitError(f"{whose} a {type(other).__name__}, which is no tensor")
    return flat


def _compare(
    tensors: list[torch.Tensor], wanted: list[torch.Tensor], again: Callable[[], list[torch.Tensor]]
) -> None:  # fmt: skip
    """again: the function's results once more. UnfitError if they differ."""
    if len(tensors) == len(wanted) and all(map(same_bits, tensors, wanted)):
        return
    if len(tensors) != len(wanted):
        raise UnfitError(f"it gave {len(tensors)} tensors when it was launched again, not {len(wanted)}")
    if all(map(same_bits, again(), wanted)):
        raise UnfitError("it gave other bits when it was launched again than when it ran")
    why = apart(tensors, wanted)
    if why:
        raise UnfitError(f"launched again: {why}")


# --- A stage whose parts are launched as a device has recorded them --------------------------------------------------
#
# It is called as the functions of its rank's file are.
#
# A stage runs as it is until so many microbatches of its sizes have come (MET): only then, each in its turn, as many
# instances are recorded as there are microbatches in flight. What cannot be recorded runs
# as it is, part by part; without F nothing is.


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


class GraphedStage:
    """The functions of one stage, which launch what was recorded of them. why: why nothing of it is recorded; "":
    nothing speaks against it.
    """

    def __init__(self, rank: Rank, spec: StageSpec, room: OneProgram, why: str = "") -> None:
        self._plain = rank.functions[spec.stage]
        self._rank, self._stage, self._room = rank.rank, spec.stage, room
        self._specs = [
            parameter.local for parameter in rank.program.manifest.parameters if spec.stage in parameter.stages
        ]
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
        """The functions that the executor calls in place of the rank's own."""
        plain = self._plain
        return StageFunctions(
            forward=self._forward,
            backward_input=None if plain.backward_input is None else self._backward_input,
            backward_weight=None if plain.backward_weight is None else self._backward_weight,
            backward=None if plain.backward is None else self._backward,
            loss_tokens=plain.loss_tokens,
        )

    def _refuse(self, part: str, error: Exception) -> None:
        why = str(error) if isinstance(error, UnfitError) else f"{type(error).__name__}: {_line(error)}"
        if part not in self.refused:
            self.refused[part] = why
            named = f"stage {self._stage}" if part == "F" else f"{part} of stage {self._stage}"
            log.warning("cuda_graphs: %s of rank %d runs as it is: %s", named, self._rank, why)
        if part == "F":
            self.forget()

    def forget(self) -> None:
        """Gives up all recordings; sizes have to be met again before new ones are made. Microbatches in flight go on
        with what they have.
        """
        if self._instances:
            self._room.recorder.finish()  # what was launched still runs
        self._instances, self._weights, self._met = [], None, 0

    def rows(self) -> list[GraphRow]:
        """Returns a row for each part of the stage: whether it is recorded, or why it runs as it is."""
        parts_here = [part for part, name in PARTS.items() if getattr(self._plain, name) is not None]
        without = self.refused.get("F", "")
        return [
            GraphRow(
                self._rank, self._stage, part, sum(part in instance.recorded for instance in self._instances),
                self.refused.get(part) or (f"its F runs as it is: {without}" if without else ""),
            )
            for part in parts_here
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
        result: tuple[dict[str, torch.Tensor], Any] = self._plain.forward(batch, received, weights, constants)
        return result

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
        return next((instance for instance in self._instances if instance.is_free), None)

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
        call = Asked(self._plain.forward, batch, received, weights, constants)
        try:
            if self._weights is None:
                self._weights, self._stamp = GraphWeights(self._specs, weights, self._room.copies), _stamp(constants)
                self._weights.take(weights)
            instance = Instance(self._work, self._weights.values, constants)
            instance.first(call, batch, received)
        except Exception as error:  # of whatever cannot be recorded
            self._refuse("F", error)
            return call.sent, call.saved
        self._instances.append(instance)
        log.info("cuda_graphs: stage %d: %d of %d in flight recorded", self._stage, len(self._instances), self._most)
        return call.sent, instance.take()


def in_flight(actions: Sequence[Action], stage: int) -> int:
    """The most microbatches of a stage that are between F and the last of B, W or BW on its rank."""
    last = {action.microbatch: i for i, action in enumerate(actions) if action.computes and action.stage == stage}
    now, most = 0, 0
    for i, action in enumerate(actions):
        if action.computes and action.stage == stage:
            now += action.kind == "F"
            most = max(most, now)
            now -= last[action.microbatch] == i
    return most


def _stamp(constants: Constants) -> list[tuple[int, int]]:
    """Changes when someone writes to what outlives a step."""
    return [(id(constant), constant._version) for constant in constants.lasting()]


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


# --- The programs of one trainer whose stages a device records and launches again ------------------------------------
#
# Of several programs (sizes) KEPT at most have recordings at once: the one that has not been used for the longest time
# gives up its own for another, whose sizes have come often enough. Where that goes round, the last one runs as it is.


KEPT = 4  # programs
GIVEN_UP = 2  # times that a program may have lost its recordings


class GraphedPrograms:
    """The programs of one trainer. asked: whether anything is to be recorded; a device without graphs is told in the
    log, and everything runs as it is.
    """

    def __init__(self, device: torch.device, asked: bool) -> None:
        self._recorder = devices.graphs(device) if asked else None
        self._shared = self._recorder.pool() if self._recorder is not None else None
        self._places, self._copies = LeavingPlaces(device), dict[str, FixedPlaces]()
        if asked and self._recorder is None:
            log.warning("cuda_graphs: skipped, as there are none on a device of type %s", device.type)
        self._all: list[OneProgram] = []
        self._recent: list[OneProgram] = []  # those with recordings, the last one used last

    def add(self, ranks: list[Rank], fused: FusedMembers | None) -> list[Rank]:
        """Returns the ranks of one more program, with functions that record. fused: what Inductor compiles of the same
        programs.
        """
        if self._recorder is None:
            return ranks
        number = len(self._all)
        settled = partial(fused.is_settled, number) if fused is not None else _always
        graphed = OneProgram(
            self._recorder, self._shared, self._places, self._copies, self._entered, self._used, settled
        )
        self._all.append(graphed)
        return [replace(rank, functions=graphed.functions(rank)) for rank in ranks]

    def rows(self) -> list[GraphRow]:
        """Returns a row for each part of all stages of all programs."""
        return [row for program in self._all for stage in program.stages for row in stage.rows()]

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
        stages = [GraphedStage(rank, spec, self, unrecorded(rank.program, rank, spec)) for spec in rank.stages]
        self.stages += stages
        return {spec.stage: stage.functions for spec, stage in zip(rank.stages, stages, strict=True)}

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
    """Returns why nothing of a stage can be recorded, as program.json and the files of the program say it; "" where
    nothing speaks against it. What calls say shows when they run (csc.runtime.recorded_part).
    """
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
