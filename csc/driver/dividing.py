"""A batch, divided into microbatches of as many samples each, every one with what belongs to its samples.

Terms
  divide    what a user says: for entries by name "samples" (a row for each sample), "whole" (every microbatch has all
            of it), the number of the dimension that has a place for each sample, or a function from the batch to the
            numbers of rows of each sample; or one function from the batch and the number of microbatches to these

    Dividing(divide).cut(batch, parts, compiler) -> [microbatch]
    samples_of(tensors) -> int
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from csc.capture.batch import NOTHING_TOLD, TOKENS, check_lists, sample_axis, slices, split_batch
from csc.driver.belonging import Belonging, belongings, miscounted, token_ids
from csc.driver.compiler import Compiler
from csc.errors import InputError

Batch = Mapping[str, Any]
Rows = Callable[[Batch], Any]
Divide = Mapping[str, str | int | Rows] | Callable[[Batch, int], Sequence[Batch]]
SAMPLES, WHOLE = "samples", "whole"


class Dividing:
    """How batches of one model are divided. divide: what the user says; None: as the batch shows."""

    def __init__(self, divide: Divide | None = None) -> None:
        if divide is not None and not callable(divide):
            _check(divide)
        self._divide = divide
        self._unknown = set(self._said)

    def check_names(self, entries: Set[str], model: nn.Module) -> None:
        """InputError if it is said of a name that is no entry of batches. entries: those of the example."""
        arguments = {type(one) for one in model.modules()} if self._unknown - entries else ()
        for name in sorted(self._unknown - entries):
            if not any(name in inspect.signature(one.forward).parameters for one in arguments):
                close = difflib.get_close_matches(name, sorted(entries), n=1)
                raise InputError(
                    f"divide says how {name!r} is divided, which is no entry of the batch", "compile",
                    f"did you mean {close[0]!r}?" if close else f"entries are {', '.join(sorted(entries))}",
                )  # fmt: skip
        self._unknown = set()

    def cut(self, batch: Batch, parts: int, compiler: Compiler) -> list[dict[str, Any]]:
        """A batch as `parts` microbatches. InputError for an entry that cannot be divided, and for one whose rows do
        not fit what is said of it.
        """
        if parts > 1 and callable(self._divide):
            return [tensors | extra for tensors, extra in map(split_batch, _by_function(self._divide, batch, parts))]
        tensors, extra = split_batch(batch)
        if parts == 1:
            return [{**tensors, **extra}]
        check_lists(extra, tensors)
        known = self._known(tensors, compiler)
        _check_patches(tensors, known.keys() | self._said_whole)
        whole = self._said_whole | compiler.whole_entries(batch, parts, known.keys() | self._said_whole)
        return [microbatch | extra for microbatch in _divided(tensors, parts, known, whole)]

    def check(self, batch: Batch, parts: int, compiler: Compiler, whole: Set[str]) -> None:
        """InputError if an entry was cut that has no sample dimension. whole: what has none, as the program shows."""
        if parts == 1 or callable(self._divide):
            return
        known = self._known(split_batch(batch)[0], compiler)
        uncut = self._said_whole | compiler.whole_entries(batch, parts, known.keys() | self._said_whole)
        for name in sorted(whole - uncut):
            raise InputError(
                f"the batch entry {name!r} has no sample dimension, as the model uses it, and would be cut into "
                f"{parts} parts", "batch",
                f"say csc.compile(divide={{{name!r}: 'whole'}}), or give a list of {parts} ready microbatches, each "
                "with the whole of it",
            )  # fmt: skip

    @property
    def axes(self) -> Mapping[str, int]:
        """Along which dimension samples of an entry lie, where it is said."""
        first = {name: 0 for name, how in self._said.items() if how == SAMPLES or callable(how)}
        return first | {name: how for name, how in self._said.items() if isinstance(how, int)}

    @property
    def _said(self) -> Mapping[str, str | int | Rows]:
        return self._divide if isinstance(self._divide, Mapping) else {}

    @property
    def _said_whole(self) -> Set[str]:
        return {name for name, how in self._said.items() if how == WHOLE}

    def _known(self, tensors: Mapping[str, torch.Tensor], compiler: Compiler) -> dict[str, Belonging]:
        """Whose rows are whose, of the entries that it is said or known of."""
        found = belongings(tensors, token_ids(compiler.model)) | _told(self._said, tensors)
        return {name: belonging for name, belonging in found.items() if name not in self._said_whole}


def _check_patches(tensors: Mapping[str, torch.Tensor], known: Collection[str]) -> None:
    wrong = miscounted(tensors, known)
    if wrong is not None:
        name, grid, patches = wrong
        raise InputError(
            f"the batch entry {name!r} has {len(tensors[name])} rows, and {grid!r} counts {patches} patches",
            "batch",
            "give both as the model's processor makes them; if rows are something else, say with "
            f"csc.compile(divide={{{name!r}: ...}}) how many each sample has",
        )


def _check(divide: Any) -> None:
    if not isinstance(divide, Mapping):
        raise InputError(
            f"divide is {divide!r}", "compile",
            "map entries to how they are divided, or give a function from the batch and a number to so many "
            "microbatches",
        )  # fmt: skip
    for name, how in divide.items():
        axis = isinstance(how, int) and not isinstance(how, bool) and how >= 0
        if not callable(how) and not axis and how not in (SAMPLES, WHOLE):
            raise InputError(
                f"divide has {how!r} for {name!r}", "compile",
                f"use {SAMPLES!r}, {WHOLE!r}, the number of the dimension along which samples lie (0, 1, ...), or a "
                "function from the batch to each sample's number of rows",
            )  # fmt: skip


def _told(divide: Mapping[str, str | int | Rows], tensors: Mapping[str, torch.Tensor]) -> dict[str, Belonging]:
    """What a user's mapping says of a batch."""
    found: dict[str, Belonging] = {}
    for name, how in divide.items():
        if how == WHOLE or name not in tensors:
            continue
        samples = samples_of(tensors, {one: axis for one, axis in divide.items() if isinstance(axis, int)})
        if isinstance(how, int):
            if tensors[name].shape[how : how + 1] != (samples,):
                raise InputError(
                    f"divide says that samples of {name!r} lie along its dimension {how}, and it is "
                    f"{list(tensors[name].shape)}, for {samples} samples", "batch",
                    "name the dimension that has as many places as the batch has samples",
                )  # fmt: skip
            found[name] = Belonging((1,) * samples, how)
            continue
        given = [1] * samples if isinstance(how, str) else how(tensors)
        rows = given.tolist() if isinstance(given, torch.Tensor) else given
        good = isinstance(rows, (list, tuple)) and all(isinstance(one, int) and one >= 0 for one in rows)
        if not good or len(rows) != samples or sum(rows) != len(tensors[name]):
            raise InputError(
                f"divide says {rows!r} of the batch entry {name!r}, which has {len(tensors[name])} rows, for {samples} "
                "samples", "batch", "give each sample's number of rows; together they are all of the entry's",
            )  # fmt: skip
        found[name] = Belonging(tuple(rows))
    return found


def samples_of(tensors: Mapping[str, torch.Tensor], axes: Mapping[str, int] = NOTHING_TOLD) -> int:
    """How many a batch has: rows of the token ids, else of the first entry that has any."""
    named = [name for name in TOKENS if name in tensors]
    name = (named or [name for name, tensor in tensors.items() if tensor.dim()])[0]
    return tensors[name].shape[sample_axis(name, tensors, axes)]


def _by_function(divide: Callable[[Batch, int], Any], batch: Batch, parts: int) -> list[Batch]:
    """The microbatches that a user's function makes. InputError if they are not so many mappings."""
    found = divide(batch, parts)
    if not isinstance(found, (list, tuple)) or len(found) != parts or not all(hasattr(one, "items") for one in found):
        gave = f"{len(found)}" if isinstance(found, (list, tuple)) else f"a {type(found).__name__}"
        raise InputError(
            f"divide was asked for {parts} microbatches and gave {gave}", "batch",
            f"return a list of {parts} mappings with the entries of the batch",
        )  # fmt: skip
    return list(found)


def _divided(
    tensors: Mapping[str, torch.Tensor], parts: int, known: Mapping[str, Belonging], whole: Collection[str]
) -> list[dict[str, torch.Tensor]]:
    """Entries of which nothing is known are cut into equal slices. A microbatch lacks those that it has no row of."""
    for belonging in known.values():
        if len(belonging.rows) % parts:
            raise InputError(
                f"the batch has {len(belonging.rows)} samples; {parts} microbatches x replicas do not fit", "batch",
                f"take a multiple of {parts} samples (drop_last=True), give a list of {parts} ready microbatches, or "
                "change microbatches or the mesh's dp",
            )  # fmt: skip
    found = slices({name: tensor for name, tensor in tensors.items() if name not in known}, parts, whole)
    for name, belonging in known.items():
        each = len(belonging.rows) // parts
        rows = [sum(belonging.rows[i * each : (i + 1) * each]) for i in range(parts)]
        for microbatch, tensor in zip(found, tensors[name].split(rows, belonging.dim), strict=True):
            if tensor.shape[belonging.dim] or not len(tensors[name]):
                microbatch[name] = tensor.contiguous()
    return [{name: microbatch[name] for name in tensors if name in microbatch} for microbatch in found]
