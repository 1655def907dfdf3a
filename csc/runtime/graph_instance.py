"""One microbatch in flight on a stage, whose parts are launched as they were recorded for an earlier one.

Terms: an *instance* is what is recorded for one microbatch in flight: places for what comes in, and what F keeps for B
and B for W, in memory of its own. It is *held* from F on, for as long as the executor has its token (InFlight). A part
is *proven* on the first microbatch that comes to it: the stage's function runs, too, on what was given, and its results
are used; only a part that gave the same bits is launched for later ones. (Where the function itself gives other bits
when it runs again, results may be as far apart as csc.runtime.tried_function allows.)

    instance = Instance(work, weights, constants)
    instance.first(asked, batch, received)       F as it has run, recorded and proven; any error
    instance.forward(batch, received) -> sent, or None: this batch is laid out otherwise, or what was lasting is not
    instance.take() -> InFlight                  .is_free, .recorded: the parts that are launched
    instance.rest(kind, received, weights)       B, W or BW: a generator of (name, gradient); returns (sent, kept)

The order of an instance's launches is that of its recordings, F first, so its parts share a pool. Parts that keep
nothing share another one with all that a trainer records: whatever they made was copied out when the next one begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from csc.runtime.graph_places import FixedPlaces, NestedCopy, UnfitError, fresh, same_bits, tensors_in
from csc.runtime.loaded_program import StageFunctions
from csc.runtime.made_once import Constants
from csc.runtime.recorded_part import Leave, LeavingPlaces, RecordedPart, Recorder, Run
from csc.runtime.tapped_forward import Asked, handed, table
from csc.runtime.tried_function import apart

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
    """See the module. weights: what recordings read. constants: of the rank."""

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
        """Any error: then nothing of it is used. asked: F as it has run on this batch."""
        own = {id(one) for one in self._constants.lasting()}
        self._entries = list(asked.entries)
        self._lasting = {
            name: [one if id(one) in own else None for one in _flat(results, f"layers.tables.{name} makes")]
            for name, results in asked.tables.items()
        }
        given = self._given(asked.tables, batch, received)
        assert given is not None
        elsewhere = [one for one in given if one.device != self._work.device]
        if elsewhere:
            raise UnfitError(f"it is given a tensor of {elsewhere[0].device}")
        self._places = FixedPlaces(given)
        self._places.fill(given)
        names = list(received)
        part = self._work.recorded(self._forward_of(names), self._pool if self._work.keeps else self._work.shared)
        part.launch()
        wanted = [*asked.sent.values(), *(tensors_in(asked.saved) if self._work.keeps else ())]
        found = [*part.left, *tensors_in(part.kept)]

        def again() -> list[torch.Tensor]:
            other = Asked(self._work.functions.forward, batch, received, self._weights, self._constants)
            return [*other.sent.values(), *(tensors_in(other.saved) if self._work.keeps else ())]

        _compare(found, wanted, again)
        self._parts["F"], self._kept["F"] = part, part.kept

    def _forward_of(self, names: list[str]) -> Callable[..., Any]:
        """F over the places."""

        def run(leave: Leave) -> Any:
            places = iter(fresh(self._places.tensors))
            tables = {
                name: tuple(next(places) if one is None else one for one in lasting)
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
            for one, kept in zip(tables[name], lasting, strict=True):
                if kept is None:
                    moving.append(one)
                elif one is not kept:
                    return None
        moving += _flat([batch[name] for name in self._entries], "the batch has")
        return [*moving, *received.values()]

    def forward(self, batch: Mapping[str, Any], received: Tensors) -> dict[str, torch.Tensor] | None:
        """See the module."""
        forward = self._work.functions.forward
        tables = {name: table(forward, name)(batch, self._constants) for name in self._lasting}
        given = self._given(tables, batch, received)
        if given is None or not self._places.fits(given):
            return None
        self._places.fill(given)
        part = self._parts["F"]
        part.launch()
        return {name: tensor for (_, name), tensor in part.leaving()}

    # B, W and BW

    def rest(self, kind: str, received: Tensors, weights: Tensors) -> Rest:
        """See the module. kept: the token's place for W is taken by what B keeps where B runs as it is."""
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
            found: tuple[dict[str, torch.Tensor], Any] = functions.backward_input(
                kept, received, weights, self._constants
            )
            return found
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
            own = dict(zip(names, fresh(places.tensors), strict=True))
            work = self._work_of(kind, kept, own, self._weights)
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
        found = [*(part.left[one] for one in differing), *part.left[number:], *tensors_in(part.kept)]

        def again() -> list[torch.Tensor]:
            gradients = []
            while True:
                try:
                    gradients.append(next(work)[1])
                except StopIteration as end:
                    sent, kept = end.value
                    return [*(gradients[one] for one in differing), *sent.values(), *tensors_in(kept)]

        _compare(found, [*differing.values(), *ends], again)


def _flat(tensors: Iterable[Any], whose: str) -> list[torch.Tensor]:
    found = list(tensors)
    other = next((one for one in found if not isinstance(one, torch.Tensor)), None)
    if other is not None:
        raise UnfitError(f"{whose} a {type(other).__name__}, which is no tensor")
    return found


def _compare(
    found: list[torch.Tensor], wanted: list[torch.Tensor], again: Callable[[], list[torch.Tensor]]
) -> None:  # fmt: skip
    """again: the function's results once more. UnfitError if they differ."""
    if len(found) == len(wanted) and all(map(same_bits, found, wanted)):
        return
    if len(found) != len(wanted):
        raise UnfitError(f"it gave {len(found)} tensors when it was launched again, not {len(wanted)}")
    if all(map(same_bits, again(), wanted)):
        raise UnfitError("it gave other bits when it was launched again than when it ran")
    why = apart(found, wanted)
    if why:
        raise UnfitError(f"launched again: {why}")
