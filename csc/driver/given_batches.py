"""What a compiled model is given to run on: the example, and the batch of each step, divided into microbatches.

given = GivenBatches(example, dividing, programs)
given.example, .known                         the example batch, and whether there is one
given.ready(batch, options) -> [microbatch]   replica after replica
given.microbatch(options)                     the example's fullest one
given.padded([microbatch]) -> [microbatch]    to a few widths (csc.driver.widths)
given.untried([microbatch])                   microbatches, and widths to which they may turn out to be padded
given.check(batch)                            InputError for entries that the example has not
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from csc.capture.batch import split_batch
from csc.driver.dividing import Dividing
from csc.driver.entries import check_entries, fullest
from csc.driver.model_programs import ModelPrograms
from csc.driver.widths import Widths, widths_of
from csc.errors import InputError
from csc.ir.program import Options
from csc.runtime.trainer import Trainer

Example = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class GivenBatches:
    """example: a batch, a function that makes one, or None: the first batch of a step is the example then."""

    def __init__(
        self,
        example: Example | Callable[[], Example] | None,
        dividing: Dividing,
        programs: ModelPrograms,
        widths: Widths,
    ) -> None:
        self._example, self.dividing, self._programs, self.widths = example, dividing, programs, widths

    def of(self, programs: ModelPrograms) -> GivenBatches:
        """The same for other programs of the model."""
        return GivenBatches(self._example, self.dividing, programs, self.widths)

    @property
    def known(self) -> bool:
        """Whether there is an example."""
        return self._example is not None

    @property
    def example(self) -> Example:
        """The example batch. InputError: none was given."""
        if callable(self._example):
            self._example = self._example()
        if self._example is None:
            raise InputError(
                "there is no example batch", "compile", "pass example=batch, one batch as your data loader makes it"
            )
        return self._example

    @example.setter
    def example(self, batch: Example) -> None:
        self._example = batch

    def ready(self, batch: Any, options: Options, parts: int | None = None) -> list[dict[str, Any]]:
        """The microbatches of a global batch, replica after replica; a list of them as it is. parts: how many, where it
        is not a global one.
        """
        listed = isinstance(batch, (list, tuple))
        split = [split_batch(one) for one in (batch or [None] if listed else [batch])]
        for number, (tensors, _) in enumerate(split):
            if all(not len(one) for one in tensors.values() if one.dim()) and any(t.dim() for t in tensors.values()):
                raise InputError(
                    f"microbatch {number} has no samples" if listed else "the batch has no samples", "batch",
                    "leave the step out on all ranks, or see why the loader gave nothing (drop_last=True)",
                )  # fmt: skip
        if listed:
            return [tensors | extra for tensors, extra in split]
        return self.cut(batch, options.microbatches * options.mesh.dp if parts is None else parts)

    def cut(self, batch: Any, parts: int) -> list[dict[str, Any]]:
        """A batch as `parts` microbatches of as many samples each. InputError: an entry cannot be divided."""
        example = self.example if self.known else batch
        listed = example if isinstance(example, (list, tuple)) else [example]
        entries: set[str] = {name for one in listed if isinstance(one, Mapping) for name in one}
        self.dividing.check_names(entries, self._programs.compiler.model)
        return self.dividing.cut(batch, parts, self._programs.compiler)

    def padded(self, ready: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Microbatches, each of its width or of one of the few. InputError: one that is to be padded cannot be."""
        if not self._pads:
            return list(map(dict, ready))
        example, model = self._example_widths, self._programs.compiler.model
        return [self.widths.padded(one, example, self._programs.set.trials, model) for one in ready]

    def untried(self, ready: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
        """Those of the microbatches that a trial would tell of, and the widths; where programs are compared alone."""
        return self.widths.untried(ready, self._example_widths, self._programs.set.trials) if self._pads else []

    @property
    def _pads(self) -> bool:
        """Nobody tries what nobody wants compared."""
        wanted = self.widths.wanted
        return bool(wanted) or (wanted is None and self.known and bool(self._programs.settings.check))

    @property
    def _example_widths(self) -> frozenset[int]:
        return widths_of(self.example) if self.known else frozenset()

    def check_cut(self, batch: Any, trainer: Trainer, parts: int) -> None:
        """InputError if an entry was cut that has no sample dimension, as the program shows."""
        if parts > 1 and not isinstance(batch, (list, tuple)):
            whole = {item.name for item in trainer.program.manifest.inputs if item.whole}
            self.dividing.check(batch, parts, self._programs.compiler, whole)

    def check(self, batch: Any, own: bool = False) -> None:
        """InputError for other entries than the example's. own: there is no example in it for other ranks."""
        if not self.known and own:
            return
        if not self.known:
            self._example = batch
        check_entries(self.example, batch, self._programs.compiler.model)

    def microbatch(self, options: Options) -> dict[str, Any]:
        """The example's first microbatch of those with the most entries; all of the example if none has all entries."""
        found = fullest(self.padded(self.ready(self.example, options)))
        if isinstance(self.example, (list, tuple)):
            return found
        tensors, extra = split_batch(self.example)
        return found if found.keys() >= tensors.keys() else {**tensors, **extra}

    def full(self, ready: Sequence[Mapping[str, Any]], options: Options) -> dict[str, Any] | None:
        """The example's fullest microbatch if it has entries that all of these lack."""
        example = fullest(self.example) if isinstance(self.example, (list, tuple)) else self.example
        return None if fullest(ready).keys() >= split_batch(example)[0].keys() else self.microbatch(options)
