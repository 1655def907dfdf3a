"""What the captures of a model assumed: one set, asked before every step whether it holds.

Terms
  match      of a microbatch: the capture that is for it, and the microbatch as that takes it
  key        of a match: the capture's name, and dtypes and sizes; microbatches of one key have the same program
  miss       what a capture assumed that does not hold (csc.ir.capture_guards)

What a match needs beside the assumptions of each capture belongs to the model: functions of its code that run on the
host, and whether its code can be run without data to see what it calls for other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from csc.capture.batch import split_batch
from csc.capture.model_guards import Changed, ModelGuards
from csc.capture.trace.mutations import Slot
from csc.capture.trace.replay import LatestReplays, Replay
from csc.capture.trace.traced_model import HoistedCalls
from csc.capture.watches import FileState
from csc.ir.capture_guards import CaptureGuards, Miss

Key = tuple[str, tuple[tuple[str, str, tuple[int, ...]], ...]]  # the capture, and name, dtype and sizes of each entry


@dataclass(frozen=True)
class Match:
    """given: the microbatch; batch: as its programs take it: with what the host makes of it, and the capture's values
    where the model does the same for both. capture: the guards that hold, None: none do; misses: then why, of each.
    """

    given: Mapping[str, Any]
    batch: Mapping[str, Any]
    capture: CaptureGuards | None
    misses: tuple[Miss, ...] = ()
    key: Key | None = None  # None where no capture is for it

    @property
    def answers(self) -> tuple[str, ...]:
        """What the microbatch decides."""
        return self.capture.answers if self.capture is not None else ()

    @property
    def kind(self) -> str:
        """Of its capture: what that assumed but for sizes as such."""
        return self.capture.kind if self.capture is not None else ""

    @property
    def entries(self) -> frozenset[str]:
        """The names of its tensors."""
        return frozenset(name for name, value in self.batch.items() if isinstance(value, torch.Tensor))

    @property
    def why(self) -> str:
        """A sentence on what is missing."""
        if not self.misses:
            return "nothing was captured before"
        return "; ".join(dict.fromkeys(map(str, self.misses[-3:])))


@dataclass
class Guards:
    """It only grows.

    host: functions of the model that run on the host, for every batch. deciding: batch entries whose values decide what
    the graph is. captures: what each assumed, those that hold for most first met. replayed: whether the model's code
    runs without data, which shows what it does for other values; None if nobody has tried. moves: whether it moves rows
    of tensors by numbers. decides: whether it takes decisions by its batch alone. written: attributes and buffers that
    its forward writes, and does not compute with. files: that it read, as they were. opaque_reads: attributes of opaque
    modules that it reads. axes: the dimension along which samples of an entry lie, where it is told. model: the model
    as it was. runs: of its code, the latest ones.
    """

    host: HoistedCalls = field(default_factory=HoistedCalls)
    deciding: set[str] = field(default_factory=set)
    captures: tuple[CaptureGuards, ...] = ()
    replayed: bool | None = None
    moves: bool = False
    decides: bool = False
    written: set[Slot] = field(default_factory=set)
    files: Mapping[str, FileState] = field(default_factory=dict)
    opaque_reads: set[Slot] = field(default_factory=set)
    axes: Mapping[str, int] = field(default_factory=dict)
    model: ModelGuards | None = None
    runs: LatestReplays = field(default_factory=LatestReplays, compare=False)

    def match(self, model: nn.Module, microbatch: Mapping[str, Any]) -> Match:
        """The first capture that is for a microbatch; an earlier answer stays when others are added."""
        tensors, extra, run = self.with_rows(model, microbatch)
        plain, calls = plain_texts(extra), run.calls if run is not None else None
        computed = self.host.made(tensors) - microbatch.keys()
        misses = []
        frozen = frozen_in(model) if any(capture.flags for capture in self.captures) else frozenset()
        for capture in self.captures:
            unknown = computed - capture.sizes.entries.keys()  # of a function that captures of other batches run
            known = {name: tensors[name] for name in tensors if name not in unknown} if unknown else tensors
            match = capture.match(known, plain, calls, frozen)
            if not isinstance(match, Miss):
                shapes = tuple((name, str(t.dtype), tuple(t.shape)) for name, t in sorted(match.items()))
                return Match(microbatch, {**match, **extra}, capture, (), (capture.name, shapes))
            misses.append(match)
        self._refuse_what_the_host_does(model, microbatch)
        return Match(microbatch, {**tensors, **extra}, None, tuple(misses))

    def changed(self) -> Changed:
        """What of the model is not as it was assumed to be; nothing where a value was replaced by an equal one."""
        return Changed() if self.model is None or self.model.holds() else self.model.changed()

    @property
    def replays(self) -> bool:
        """Whether batches are matched by running the model's code without data."""
        return bool(self.replayed and self.deciding)

    def with_rows(
        self, model: nn.Module, microbatch: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any], Replay | None]:
        """(tensors, with what the host makes of them and the numbers of the rows that the model moves; other values;
        what the model's code does, if that matters).
        """
        tensors, extra = split_batch(microbatch)
        tensors |= self.host.entries(model, tensors)[0]
        if not self.replays:
            return tensors, extra, None
        run = self.runs.of(model, tensors, extra, self.host, self.moves, self.decides)
        return {**tensors, **(run.rows if run is not None else {})}, extra, run

    def _refuse_what_the_host_does(self, model: nn.Module, microbatch: Mapping[str, Any]) -> None:
        """InputError if a function refuses the batch that captures of batches with the same entries run. One that
        others alone run says nothing against it: with sound a function is called with more than without.
        """
        entries, _ = split_batch(microbatch)
        for call, error in self.host.entries(model, entries)[1]:
            for capture in self.captures:
                names = capture.sizes.entries.keys()
                if names - self.host.made(names) == entries.keys() and f"{call.prefix}_0" in names:
                    raise error

    def of(self, name: str) -> Guards:
        """These, as if one capture were the only one."""
        return replace(self, captures=tuple(capture for capture in self.captures if capture.name == name))

    def add(self, new: CaptureGuards, instead: str = "") -> None:
        """Know of a capture; instead: of the one of this name, at its place."""
        name = instead or new.name
        if all(capture.name != name for capture in self.captures):
            self.captures = (*self.captures, new)
        else:
            rest = [capture for capture in self.captures if capture.name == name or capture.name != new.name]
            self.captures = tuple(new if capture.name == name else capture for capture in rest)

    def copy(self) -> Guards:
        """As they are now, for keeping: without what belongs to this process."""
        return replace(
            self,
            deciding=set(self.deciding),
            written=set(self.written),
            opaque_reads=set(self.opaque_reads),
            model=None,
        )

    def extend(self, less: Guards) -> bool:
        """Whether all that `less` knows of the host and of deciding entries is known here."""
        return self.host.calls[: len(less.host.calls)] == less.host.calls and self.deciding >= less.deciding

    def joined(self, more: Guards) -> Guards:
        """What both know. What the model's code does is as `more` says if that extends these."""
        names = {capture.name for capture in self.captures}
        base = more if more.extend(self) else self
        return replace(
            base,
            deciding=self.deciding | more.deciding,
            captures=(*self.captures, *(capture for capture in more.captures if capture.name not in names)),
            decides=self.decides or more.decides,
            written=self.written | more.written,
            files={**more.files, **self.files},
            opaque_reads=self.opaque_reads | more.opaque_reads,
            axes=self.axes,
            model=self.model,
            runs=self.runs,
        )


def frozen_in(model: nn.Module) -> frozenset[str]:
    """Names of the parameters whose requires_grad is False."""
    return frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)


def plain_texts(extra: Mapping[str, Any]) -> dict[str, str]:
    """Entries that are no tensors, as text."""
    return {name: repr(value) for name, value in sorted(extra.items())}
