"""Batches: whose rows are whose, which samples a process brings, and how they become microbatches of a few sizes."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from csc.capture.batch import (
    NOTHING_TOLD,
    check_lists,
    is_beginnings,
    is_longest,
    sample_axis,
    slices,
    split_batch,
)
from csc.check.eager import IN_HALF, EagerStep
from csc.check.first import EXACT, too_much
from csc.check.judge import LOSS, Reference, judge
from csc.driver.compiler import Compiler
from csc.driver.options import shown
from csc.errors import InputError
from csc.ir.mesh import Mesh
from csc.ir.program import TOKENS
from csc.runtime import batches
from csc.runtime.batches import sizes
from csc.runtime.launch import several_processes
from csc.runtime.meeting import CHANGED, OWN_SAMPLES, Meeting, StepVote, Vote, VoteNumbers, digest

# --- Whose rows are whose --------------------------------------------------------------------------------------------
#
# How many rows of each entry of a batch belong to each of its samples is read off the batch.
#
# Terms
#   samples    rows of the token ids
#   kind       image, video or audio: what an entry's name speaks of
#   places     tokens that stand for features of a kind, in each sample
#   items      images, videos or recordings of a kind, those of the first sample first
#   measure    an entry with a row for each item that tells how many places it has: a grid, a size, a mask of frames
#   document   one of the sequences that are packed into rows of tokens: as `cu_seqlens` says, or positions that start
#              again


KINDS = {
    "video": ("video", "second_per_grid"),
    "audio": ("audio", "input_features", "feature_attention"),
    "image": ("image", "pixel"),
}
TYPES = {"image": 1, "video": 2, "audio": 3}  # of tokens, in Hugging Face's mm_token_type_ids
GRIDS = ("grid_thw", "grid_hws")  # of patches, whose rows the features are
SIZES = (*GRIDS, "image_sizes", "spatial_shapes")
MERGED = "merge_sizes"  # how many patches along each side become one token


@dataclass(frozen=True)
class Belonging:
    """rows: of each sample, along dimension `dim`. begins: the entry says where sequences begin in these rows, which
    are not its own (`cu_seqlens`).
    """

    rows: tuple[int, ...]
    dim: int = 0
    begins: bool = False


@dataclass(frozen=True)
class PlaceholderCounts:
    """of: in each sample; runs: how many groups of them stand together, in each sample."""

    of: tuple[int, ...]
    runs: tuple[int, ...]


def token_ids(model: nn.Module) -> dict[str, int]:
    """The placeholders of each kind."""
    config = getattr(model, "config", None)
    tokens = {kind: getattr(config, f"{kind}_token_{end}", None) for kind in KINDS for end in ("index", "id")}
    return {kind: token for kind, token in tokens.items() if isinstance(token, int)}


def belongings(tensors: Mapping[str, torch.Tensor], tokens: Mapping[str, int]) -> dict[str, Belonging]:
    """tokens: placeholders by kind. An entry that is not in the result has rows of which nothing is known.

    Samples have as many items as their places ask for: of items without a measure all are alike, grids and sizes say in
    which proportion they are. Else each run of places is an item, or every sample with places has one.
    """
    text = next((tensors[name] for name in TOKENS if name in tensors and tensors[name].dim() == 2), None)
    if text is None:
        return {}
    samples = len(text)
    belonging_of: dict[str, Belonging] = {}
    for kind in KINDS:
        of_kind = {name: tensor for name, tensor in tensors.items() if kind_of(name) == kind and tensor.dim()}
        of_kind = {name: tensor for name, tensor in of_kind.items() if tensor.shape[:2] != text.shape}
        of_kind = {name: tensor for name, tensor in of_kind.items() if not is_beginnings(name, tensor)}
        if of_kind:
            belonging_of |= _ofkind_of(of_kind, samples, _places(kind, tensors, tokens))
    for name, tensor in tensors.items():
        if name not in belonging_of and kind_of(name) is None and tensor.dim():
            if sample_axis(name, tensors) == 1:  # position ids of several axes
                belonging_of[name] = Belonging((1,) * samples, dim=1)
            elif len(tensor) == samples and tensor.dim() > 1:
                belonging_of[name] = Belonging((1,) * samples)
            elif tensor.shape[1:3] == text.shape:
                belonging_of[name] = Belonging((1,) * samples, dim=1)
    return belonging_of | _beginnings(tensors, text, belonging_of)


def _beginnings(
    tensors: Mapping[str, torch.Tensor], text: torch.Tensor, known: Mapping[str, Belonging]
) -> dict[str, Belonging]:
    """Of the entries that say where sequences begin, in tokens or in rows of features (patches): in those of which
    there are as many as where the last one ends.
    """
    found: dict[str, Belonging] = {}
    mask = tensors.get("attention_mask", text)
    tokens = [(text.shape[1],) * len(text)]
    if mask.shape == text.shape and not mask.is_meta and int((mask != 0).sum()) != text.numel():
        tokens.append(tuple((mask != 0).sum(1).tolist()))  # of which padding has been taken away
    for name, tensor in tensors.items():
        if not is_beginnings(name, tensor):
            continue
        kinds = KINDS if kind_of(name) is None else (kind_of(name),)
        features = [own.rows for entry, own in known.items() if own.dim == 0 and kind_of(entry) in kinds]
        rows_of_samples = [*features, *(tokens if kind_of(name) is None else ())]
        fitting = {rows for rows in rows_of_samples if sum(rows) == int(tensor[-1])}
        if len(fitting) == 1:
            found[name] = Belonging(fitting.pop(), begins=True)
    return found


def by_count(name: str, tensors: Mapping[str, torch.Tensor], known: Mapping[str, Belonging]) -> Belonging | None:
    """Of an entry whose name says nothing: as many rows of each sample as it has items of a kind, or documents, where
    the batch has as many of them as the entry has rows. None: the batch has as many of nothing.

    Raises InputError if it has as many of several, which belong to other samples, or if each sample could have equally
    many.
    """
    rows = len(tensors[name])
    items = {own.rows for entry, own in known.items() if not own.begins and own.dim == 0 and kind_of(entry)}
    fitting = {counts for counts in items | {_documents(tensors, known)} if sum(counts) == rows}
    if fitting and rows % samples_of(tensors) == 0:
        samples = samples_of(tensors)
        fitting.add((rows // samples,) * samples)
    if len(fitting) > 1:
        raise InputError(
            f"the batch entry {name!r} has {rows} rows, and nothing says whose they are: of the samples, "
            f"{' or '.join(map(str, sorted(map(list, fitting))))}", "batch",
            f"say with csc.compile(divide={{{name!r}: ...}}) how many rows each sample has",
        )  # fmt: skip
    return Belonging(fitting.pop()) if fitting else None


def _documents(tensors: Mapping[str, torch.Tensor], known: Mapping[str, Belonging]) -> tuple[int, ...]:
    """How many each sample has; none at all where nothing says where they begin, or one is in two samples."""
    for name, own in known.items():
        if own.begins and kind_of(name) is None:
            begins, ends = tensors[name], _ends(own.rows)
            if not all(bool((begins == end).any()) for end in ends):
                return ()
            return tuple(int(((begins > low) & (begins <= high)).sum()) for low, high in zip([0, *ends], ends))
    positions = tensors.get("position_ids")
    if positions is None or positions.dim() != 2 or positions.is_meta or bool((positions[:, 0] != 0).any()):
        return ()
    return tuple((positions == 0).sum(1).tolist())


def _ends(rows: Sequence[int]) -> list[int]:
    """Where the rows of each sample end."""
    return [sum(rows[: sample + 1]) for sample in range(len(rows))]


def miscounted(tensors: Mapping[str, torch.Tensor], known: Collection[str]) -> tuple[str, str, int] | None:
    """(entry, grid, patches by the grid) of packed rows of patches that are not as many; known: other entries."""
    for name, tensor in tensors.items():
        beside = {entry: tensors[entry] for entry in tensors if kind_of(entry) == kind_of(name)}
        patches = _patches(beside) if kind_of(name) is not None else None
        if patches is not None and name not in known and tensor.is_floating_point() and tensor.dim() == 2:
            return name, next(entry for entry in beside if entry.endswith(GRIDS)), sum(patches)
    return None


def kind_of(name: str) -> str | None:
    """What an entry's name speaks of."""
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), None)


def _places(kind: str, tensors: Mapping[str, torch.Tensor], tokens: Mapping[str, int]) -> PlaceholderCounts | None:
    """None if nothing tells which tokens they are."""
    ids, types = tensors.get("input_ids"), tensors.get("mm_token_type_ids")
    if kind in tokens and ids is not None and ids.dim() == 2:
        mask = ids == tokens[kind]
    elif types is not None and types.dim() == 2:
        mask = types == TYPES[kind]
    else:
        return None
    follows = nn.functional.pad(mask, (1, -1))
    return PlaceholderCounts(tuple(mask.sum(1).tolist()), tuple((mask & ~follows).sum(1).tolist()))


def _ofkind_of(
    entries: Mapping[str, torch.Tensor], samples: int, places: PlaceholderCounts | None
) -> dict[str, Belonging]:
    measure = _measure(entries)
    features = next((tensor for tensor in entries.values() if tensor.is_floating_point()), None)
    if measure is None and features is None:
        return {}
    items = len(measure) if measure is not None else len(features)  # type: ignore[arg-type]
    slots = measure is None and features is not None and features.dim() > 4 and items == samples
    counts = None if slots else _told(entries, samples, items)
    if counts is None and not slots and places is not None:
        counts = _counted(entries, measure, items, places)
    if counts is None and items % samples == 0:
        counts = [items // samples] * samples
    if counts is None:
        return {}
    belonging_of = {}
    patches = _patches(entries) if measure is not None else None
    for name, tensor in entries.items():
        if len(tensor) == items:
            belonging_of[name] = Belonging(tuple(counts))
        elif patches is not None and len(tensor) == sum(patches):
            belonging_of[name] = Belonging(tuple(sum(part) for part in _split(patches, counts)))
        elif len(tensor) == samples:
            belonging_of[name] = Belonging((1,) * samples)
    return belonging_of


def _told(entries: Mapping[str, torch.Tensor], samples: int, items: int) -> list[int] | None:
    """By an entry that says how many items each sample has."""
    for name, tensor in entries.items():
        if "num_" in name and tensor.shape == (samples,) and int(tensor.sum()) == items:
            return tensor.tolist()
    return None


def _counted(
    entries: Mapping[str, torch.Tensor], measure: torch.Tensor | None, items: int, places: PlaceholderCounts
) -> list[int] | None:
    """How many items have these places."""
    alike = measure is None or bool((measure == measure[:1]).all())
    items_of_sample = _in_order(places.of, [1] * items if alike else _weights(entries))
    if items_of_sample is None and sum(places.runs) == items:
        items_of_sample = list(places.runs)
    if items_of_sample is None and sum(map(bool, places.of)) == items:
        items_of_sample = [int(place > 0) for place in places.of]
    return items_of_sample


def _in_order(places: Sequence[int], weights: Sequence[int]) -> list[int] | None:
    """How many of the items, which come in order and have places in proportion to their weights, are each sample's;
    None if that does not come out even.
    """
    counts, following = [], 0
    for place in places:
        first, missing = following, place * sum(weights)
        while missing > 0 and following < len(weights):
            missing -= weights[following] * sum(places)
            following += 1
        if missing:
            return None
        counts.append(following - first)
    return counts if following == len(weights) else None


def _measure(entries: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """What tells the items apart: a row for each."""
    for name, tensor in entries.items():
        if name.endswith(SIZES) and tensor.dim() == 2:
            return tensor
    for name, tensor in entries.items():
        if name.endswith("attention_mask") and tensor.dim() == 2:
            return tensor.sum(1, keepdim=True)
    return None


def _weights(entries: Mapping[str, torch.Tensor]) -> list[int]:
    """Of each item, in proportion to its places; where none are (frames, tiles), nothing comes out even."""
    measure = _measure(entries)
    assert measure is not None
    merged = next((tensor for name, tensor in entries.items() if name.endswith(MERGED)), None)
    sizes = measure.prod(1)
    return (sizes // merged.to(sizes) ** 2 if merged is not None and merged.dim() == 1 else sizes).tolist()


def _patches(entries: Mapping[str, torch.Tensor]) -> list[int] | None:
    """Of each item, where a grid says so."""
    grid = next((tensor for name, tensor in entries.items() if name.endswith(GRIDS) and tensor.dim() == 2), None)
    return None if grid is None else grid.prod(1).tolist()


def _split(values: Sequence[int], counts: Sequence[int]) -> list[Sequence[Any]]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [values[end - count : end] for end, count in zip(ends, counts)]


# --- The entries of a batch beside those of the example that a model was compiled for --------------------------------


BatchOrMicrobatches = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def check_entries(example: BatchOrMicrobatches, batch: BatchOrMicrobatches, model: nn.Module) -> None:
    """Each microbatch of a list, or the batch. What the model's own `check_batch` raises is raised."""
    expected, extra = split_batch(fullest(example) if isinstance(example, (list, tuple)) else example)
    for microbatch in batch if isinstance(batch, (list, tuple)) else [batch]:
        entries, other = split_batch(microbatch)
        for name in expected.keys() | entries.keys():
            if name not in entries and not _may_lack(entries, expected, name):
                raise InputError(f"the batch has no entry {name!r}", "batch", _keys_remedy(expected))
            if name not in expected:
                raise InputError(
                    f"the batch has an entry {name!r} that the example had not", "batch", _keys_remedy(expected)
                )
            if name in entries and entries[name].dtype != expected[name].dtype:
                raise InputError(
                    f"the batch entry {name!r} is {entries[name].dtype}, the example's was {expected[name].dtype}",
                    "batch", f"convert it with .to({expected[name].dtype}), or compile with such an example",
                )  # fmt: skip
        if other.keys() != extra.keys() or any(repr(other[name]) != repr(extra[name]) for name in extra):
            changed = [name for name in extra if name in other and _is_number(other[name]) and _is_number(extra[name])]
            changed = [name for name in changed if repr(other[name]) != repr(extra[name])]
            as_tensors = ", ".join(f"{name!r}: torch.tensor({other[name]!r})" for name in changed)
            raise InputError(
                f"the batch's plain values are {other!r}, the example's were {extra!r}", "batch",
                "values that are no tensors are compiled in: "
                + (f"give a number that changes from batch to batch as a tensor, {{{as_tensors}}}, in the example too "
                   "(one program serves all its values); or " if changed else "")
                + "compile again with an example that has these",
            )  # fmt: skip
        _check_lacking(expected.keys() - entries.keys(), entries, model)
        check = getattr(model, "check_batch", None)
        if callable(check):
            check({**entries, **other})


def fullest_first(microbatches: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those with the most entries first: a program for the others runs beside one for them."""
    return sorted(microbatches, key=lambda microbatch: -len(microbatch))


def fullest(microbatches: Sequence[Any]) -> Any:
    """The first one with the most entries."""
    return max(microbatches, key=len)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _may_lack(entries: Mapping[str, Any], expected: Mapping[str, Any], name: str) -> bool:
    """Whether an entry may be absent: of images, videos or sounds, of which the batch has no entry at all."""
    kind = kind_of(name)
    return kind is not None and not any(other in entries and kind_of(other) == kind for other in expected)


def _check_lacking(names: Set[str], entries: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """InputError if the text has places for what a batch lacks: the model would read them as words."""
    ids = entries.get("input_ids")
    tokens = token_ids(model)
    for name in sorted(names):
        token = tokens.get(kind_of(name) or "")
        places = 0 if ids is None or token is None else int((ids == token).sum())
        if places:
            raise InputError(
                f"the batch has no entry {name!r}, and the text has {places} placeholders for it", "batch",
                f"add it, or leave out the placeholders (token {token})",
            )  # fmt: skip


def _keys_remedy(expected: Mapping[str, Any]) -> str:
    return f"give the entries of the example: {', '.join(sorted(expected))}; or compile with another example"


# --- A batch, divided into microbatches of as many samples each, every one with what belongs to its samples ----------
#
# Terms
#   divide    what a user says: for entries by name "samples" (a row for each sample), "whole" (every microbatch has all
#             of it), the number of the dimension that has a place for each sample, or a function from the batch to the
#             numbers of rows of each sample; or one function from the batch and the number of microbatches to these


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
        arguments = {type(module) for module in model.modules()} if self._unknown - entries else ()
        for name in sorted(self._unknown - entries):
            if not any(name in inspect.signature(module.forward).parameters for module in arguments):
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
        known |= _counted_rows(tensors, known, whole)
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
        belonging_of = belongings(tensors, token_ids(compiler.model)) | _divided_as_told(self._said, tensors)
        return {name: belonging for name, belonging in belonging_of.items() if name not in self._said_whole}


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


def _counted_rows(
    tensors: Mapping[str, torch.Tensor], known: Mapping[str, Belonging], whole: Set[str]
) -> dict[str, Belonging]:
    """Of entries of which nothing else is known. InputError for one that says where sequences begin, nobody knows in
    what.
    """
    found: dict[str, Belonging] = {}
    for name in sorted(tensors.keys() - known.keys() - whole):
        if is_beginnings(name, tensors[name]):
            raise InputError(
                f"the batch entry {name!r} says where sequences begin, the last of which ends at "
                f"{int(tensors[name][-1])}, and the batch has no rows that are as many", "batch",
                "let it end where the tokens of all samples do, one behind the other (or those without padding, by "
                f"attention_mask), give a list of ready microbatches, or say csc.compile(divide={{{name!r}: 'whole'}})",
            )  # fmt: skip
        if tensors[name].dim() and len(tensors[name]) != samples_of(tensors):
            counted = by_count(name, tensors, known)
            found |= {} if counted is None else {name: counted}
    return found


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


def _divided_as_told(
    divide: Mapping[str, str | int | Rows], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Belonging]:
    """What a user's mapping says of a batch."""
    belonging_of: dict[str, Belonging] = {}
    for name, how in divide.items():
        if how == WHOLE or name not in tensors:
            continue
        samples = samples_of(tensors, {entry: axis for entry, axis in divide.items() if isinstance(axis, int)})
        if isinstance(how, int):
            if tensors[name].shape[how : how + 1] != (samples,):
                raise InputError(
                    f"divide says that samples of {name!r} lie along its dimension {how}, and it is "
                    f"{list(tensors[name].shape)}, for {samples} samples", "batch",
                    "name the dimension that has as many places as the batch has samples",
                )  # fmt: skip
            belonging_of[name] = Belonging((1,) * samples, how)
            continue
        counts = [1] * samples if isinstance(how, str) else how(tensors)
        rows = counts.tolist() if isinstance(counts, torch.Tensor) else counts
        good = isinstance(rows, (list, tuple)) and all(isinstance(row, int) and row >= 0 for row in rows)
        if not good or len(rows) != samples or sum(rows) != len(tensors[name]):
            raise InputError(
                f"divide says {rows!r} of the batch entry {name!r}, which has {len(tensors[name])} rows, for {samples} "
                "samples", "batch", "give each sample's number of rows; together they are all of the entry's",
            )  # fmt: skip
        belonging_of[name] = Belonging(tuple(rows))
    return belonging_of


def samples_of(tensors: Mapping[str, torch.Tensor], axes: Mapping[str, int] = NOTHING_TOLD) -> int:
    """How many a batch has: rows of the token ids, else of the first entry that has any."""
    named = [name for name in TOKENS if name in tensors]
    name = (named or [name for name, tensor in tensors.items() if tensor.dim()])[0]
    return tensors[name].shape[sample_axis(name, tensors, axes)]


def _by_function(divide: Callable[[Batch, int], Any], batch: Batch, parts: int) -> list[Batch]:
    """The microbatches that a user's function makes. InputError if they are not so many mappings."""
    microbatches = divide(batch, parts)
    if (
        not isinstance(microbatches, (list, tuple))
        or len(microbatches) != parts
        or not all(hasattr(microbatch, "items") for microbatch in microbatches)
    ):
        gave = f"{len(microbatches)}" if isinstance(microbatches, (list, tuple)) else f"a {type(microbatches).__name__}"
        raise InputError(
            f"divide was asked for {parts} microbatches and gave {gave}", "batch",
            f"return a list of {parts} mappings with the entries of the batch",
        )  # fmt: skip
    return list(microbatches)


def _divided(
    tensors: Mapping[str, torch.Tensor], parts: int, known: Mapping[str, Belonging], whole: Collection[str]
) -> list[dict[str, torch.Tensor]]:
    """Entries of which nothing is known are cut into equal slices. A microbatch lacks those that it has no row of."""
    for belonging in known.values():
        if len(belonging.rows) % parts:
            if len(belonging.rows) == 1 and sum(_documents(tensors, known)) > 1:
                raise InputError(
                    f"the batch is one row of {sum(_documents(tensors, known))} packed documents, and {parts} "
                    "microbatches x replicas ask for as many rows", "batch",
                    f"give a list of {parts} ready microbatches, each a row of documents of its own: "
                    f"[collator(samples[i::{parts}]) for i in range({parts})]; or pack {parts} rows of one length",
                )  # fmt: skip
            raise InputError(
                f"the batch has {len(belonging.rows)} samples; {parts} microbatches x replicas do not fit", "batch",
                f"take a multiple of {parts} samples (drop_last=True), give a list of {parts} ready microbatches, or "
                "change microbatches or the mesh's dp",
            )  # fmt: skip
    microbatches = slices({name: tensor for name, tensor in tensors.items() if name not in known}, parts, whole)
    for name, belonging in known.items():
        samples_each = len(belonging.rows) // parts
        rows = [sum(belonging.rows[i * samples_each : (i + 1) * samples_each]) for i in range(parts)]
        if belonging.begins:
            for microbatch, begins in zip(microbatches, _cut_beginnings(name, tensors[name], rows), strict=True):
                microbatch.update({} if begins is None else {name: begins})
            continue
        for microbatch, tensor in zip(microbatches, tensors[name].split(rows, belonging.dim), strict=True):
            if tensor.shape[belonging.dim] or not len(tensors[name]):
                microbatch[name] = tensor.contiguous()
    return [{name: microbatch[name] for name in tensors if name in microbatch} for microbatch in microbatches]


def _cut_beginnings(name: str, tensor: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor | None]:
    """Those of each microbatch, from 0 on; None: it has none of the rows. rows: how many each microbatch has of those
    in which sequences begin. InputError if a sequence is in two microbatches.
    """
    found: list[torch.Tensor | None] = []
    for low, high in zip([0, *_ends(rows)], _ends(rows)):
        if not bool((tensor == high).any()):
            raise InputError(
                f"the batch entry {name!r} has a sequence that goes on across row {high}, where a microbatch ends",
                "batch", "let sequences end where samples do, or give a list of ready microbatches",
            )  # fmt: skip
        ends = tensor[(tensor > low) & (tensor <= high)] - low
        found.append(torch.cat([tensor.new_zeros(1), ends]) if high > low else None)
    return found


def with_longest_of_all(microbatches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Microbatches as a collator makes each: the longest sequence of one is that of all of them, as of a batch that is
    divided, since an entry without a dimension is the same in all.
    """
    names = {name for microbatch in microbatches for name in microbatch if is_longest(name, microbatch)}
    longest = {
        name: torch.stack([microbatch[name] for microbatch in microbatches if name in microbatch]).amax()
        for name in names
        if all(getattr(microbatch.get(name), "shape", None) in (None, ()) for microbatch in microbatches)
    }
    return [microbatch | {name: longest[name] for name in longest if name in microbatch} for microbatch in microbatches]


# --- Whose samples a process brings to a step, and what ranks tell each other of them before it ----------------------
#
# Terms
#   own     the batch has the samples of this process' replica alone; else it is the global batch, the same on every
#           rank, as it always is where replicas share ranks
#   parts   into how many microbatches the batch is divided


Ready = list[dict[str, Any]]
Result = TypeVar("Result")


class ReplicaShare(list[dict[str, Any]]):
    """The microbatches of one replica. said: what the step was divided into, for all replicas: ranks compare it."""

    def __init__(self, microbatches: Iterable[dict[str, Any]] = (), said: tuple[str, ...] = ()) -> None:
        super().__init__(microbatches)
        self.said = said


def place(mesh: Mesh) -> tuple[int, int]:
    """(dp_rank, dp_size): under torchrun the replica of this process. One process alone runs all of them; and where
    replicas share ranks no process has the samples of one alone, so that each loads all.
    """
    if not several_processes() or mesh.replicas_share_ranks:
        return 0, 1
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    return mesh.replicas_of(rank)[0], mesh.dp


class Share:
    """Of one step."""

    def __init__(
        self, mesh: Mesh, microbatches: int, meeting: Meeting, local: bool, said: tuple[str, ...] = ()
    ) -> None:
        self._meeting = meeting
        self._said = said
        self.own = local and meeting.group is not None and not mesh.replicas_share_ranks
        self._replicas = [mesh.replicas_of(rank)[0] for rank in range(mesh.size)]
        self.parts = microbatches * (1 if self.own else mesh.dp)

    @property
    def _replica(self) -> int:
        return self._replicas[dist.get_rank()] if self.own else 0

    def agree(
        self, operation: str, divide: Callable[[], Ready], prepare: Callable[[Ready], tuple[Vote, Result]]
    ) -> tuple[Ready, Result, list[VoteNumbers]]:
        """Divide the batch and prepare its step on every rank, with one meeting; with two where each has its own
        samples: the first completes what ranks of a replica leave out.
        """
        if not self.own:

            def both() -> tuple[Vote, tuple[Ready, Result]]:
                ready = divide()
                vote, result = prepare(ready)
                return vote, (ready, result)

            (ready, result), votes = self._meeting.votes(operation, both)
            return ready, result, votes

        def samples() -> tuple[Vote, Ready]:
            ready = divide()
            content = digest("\n".join(sizes(ready)))  # compared below, within replicas
            return Vote((f"{len(ready)} microbatches of a replica", *self._said), dist.get_rank(), content), ready

        ready, votes = self._meeting.votes(operation, samples)
        if len({(replica, vote.content) for replica, vote in zip(self._replicas, votes)}) > len(set(self._replicas)):
            texts = self._meeting.texts(OWN_SAMPLES, batches.told(ready))
            self._meeting.began()  # if it is refused now, it is on every rank
            ready = batches.completed(ready, texts, self._replicas, dist.get_rank())
        result, votes = self._meeting.votes(OWN_SAMPLES, lambda: prepare(ready))
        return ready, result, votes

    def waits(self, ready: Ready, changed: bool) -> Vote:
        """The vote of a rank without a program for its microbatches. changed: it had one, for the model as it was."""
        step = StepVote(unserved=True)
        if self.own:
            return Vote((CHANGED,) * changed, self._replica, shared=sizes(ready), step=step)
        return Vote((*sizes(ready), CHANGED if changed else "no program yet"), step=step)

    def known(self, ready: Ready, vote: Vote, decides: Sequence[str], meets: Set[str]) -> Vote:
        """The vote of a rank with one. vote: its runtime's; decides: what the microbatches decide; meets: what meets in
        them (csc.driver.checking).
        """
        if not self.own:
            return replace(vote, signature=sizes(ready))
        step = replace(_met(vote.step, ready, meets), common=digest("\n".join((*vote.signature, *decides))))
        return replace(vote, signature=(), shared=sizes(ready), step=step)

    def first(self, ready: Ready, vote: Vote, decides: Sequence[str], meets: Set[str]) -> Vote:
        """The same once all have one."""
        if not self.own:
            return replace(vote, signature=sizes(ready))
        signature = (*vote.signature, *decides)
        return replace(vote, signature=signature, shared=sizes(ready), step=_met(vote.step, ready, meets))

    def served(self, votes: Sequence[VoteNumbers]) -> bool:
        """Whether every rank has a program, and what replicas must have in common is so as far as anybody can tell."""
        return len({vote.step.common for vote in votes}) == 1 and not any(vote.step.unserved for vote in votes)

    def meets(self, votes: Sequence[VoteNumbers]) -> frozenset[str]:
        """What meets in the step where ranks have samples of their own: the kinds of their shares, and whether the
        sizes of these differ.
        """
        if not self.own:
            return frozenset()
        kinds = {f"replicas of kind {vote.step.kind}" for vote in votes}
        uneven = len({vote.step.sizes for vote in votes}) > 1
        return frozenset(kinds | {"replicas of other sizes"} if uneven else kinds)

    def of_all(self, ready: Ready) -> Ready:
        """The microbatches of all replicas. All ranks call it, right after a meeting."""
        return batches.of_all(self._meeting, self._replicas, ready) if self.own else ready


def _met(step: StepVote, ready: Ready, meets: Set[str]) -> StepVote:
    """With the kind and sizes of a replica's samples."""
    return replace(step, kind=digest("\n".join(sorted(meets))), sizes=digest("\n".join(sizes(ready))))


# --- Microbatches of many widths, padded to a few: each size of microbatches is a program, and compiled once ---------
#
# Terms
#   width      the length of the rows of token ids, which `attention_mask` and `labels` have, too
#   padded     to the right: with a token that is no placeholder, the mask 0 and the label -100
#   step       between widths: 8, and an eighth of the power of two below a width from 128 on (16, 32, ...): at most an
#              eighth of the places are padding
#   trial      of one microbatch: eager PyTorch's loss and gradients padded and not, with one token and with the batch's
#              own in disorder: the same to rounding, as far as csc's check allows for it
#
# Where nobody says anything, the example's widths stay as they are, and others are padded where the graph shows that
# the loss is a mean over targets and that tokens are added up, never chosen by what they are (csc.analysis.tokens),
# and where a trial of that width has gone well: padding is no target then, and what would read it would do so in each
# batch. The rule looks at a microbatch alone: a run that is taken up pads as it did before.


log = logging.getLogger("csc")

IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # of which 0 is text
COUNTING = ("tokens", "terms")  # of csc.runtime.specs.LossSpec: weights of losses that are means over targets
IGNORED = -100  # the label that is none
LEAST, PARTS = 8, 8  # the smallest step between widths, and how many there are to the next power of two
SAME = ""


Key = tuple[frozenset[str], int]  # the names of a microbatch's tensors, and a width


@dataclass
class Trials:
    """Of a model as it is. answers: by entries and width, why it is not to be padded to that width, or SAME."""

    answers: dict[Key, str] = field(default_factory=dict)

    def learn(self, microbatch: Batch, width: int, answer: str) -> None:
        """What a trial gave."""
        self.answers[_entries(microbatch), width] = answer

    def answer(self, microbatch: Batch, width: int) -> str | None:
        """None: nobody has tried."""
        return self.answers.get((_entries(microbatch), width))


@dataclass(frozen=True)
class Widths:
    """wanted: as `csc.compile` is told; None: where a trial allows it."""

    wanted: bool | tuple[int, ...] | None = None

    @classmethod
    def of(cls, given: Any) -> Widths:
        """InputError for what says no widths."""
        if given is None or isinstance(given, bool):
            return cls(given)
        listed = list(given) if isinstance(given, (list, tuple, range)) else []
        if not listed or not all(
            isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in listed
        ):
            raise InputError(
                f"widths is {shown(given)}", "compile",
                "pass a list of widths such as [512, 1024, 2048], True for csc's own, False for none, or nothing",
            )  # fmt: skip
        return cls(tuple(sorted(set(listed))))

    def target(self, microbatch: Batch, example: Set[int]) -> int | None:
        """The width that a microbatch is to have; None: its own. example: the widths of the example."""
        width = _width(microbatch)
        if width is None or self.wanted is False:
            return None
        if isinstance(self.wanted, tuple):
            target = next((wanted for wanted in self.wanted if wanted >= width), width)
        elif self.wanted is None:
            known = [known_width for known_width in example if width <= known_width <= rounded(width)]
            target = min(known, default=rounded(width))
        else:
            target = rounded(width)
        return target if target != width else None

    def padded(self, microbatch: Batch, example: Set[int], trials: Trials, model: nn.Module) -> dict[str, Any]:
        """A microbatch as programs are made for it. InputError: it is to be padded, and nobody knows with what."""
        target = self.target(microbatch, example)
        if target is None:
            return dict(microbatch)
        unknown = unfit(microbatch)
        if self.wanted is not None and unknown:
            raise InputError(
                f"widths= pads microbatches, and this one cannot be: {unknown}", "batch",
                "pad in the loader, and leave widths= out",
            )  # fmt: skip
        if unknown or (self.wanted is None and trials.answer(microbatch, target) != SAME):
            return dict(microbatch)
        return pad(microbatch, target, filling(microbatch, model)[0])

    def untried(self, microbatches: Sequence[Batch], example: Set[int], trials: Trials) -> list[tuple[Batch, int]]:
        """Microbatches, and widths, of which a trial would tell whether they may be padded so: one for each width."""
        found: dict[Key, tuple[Batch, int]] = {}
        for microbatch in microbatches if self.wanted is None else ():
            target = self.target(microbatch, example)
            if target is not None and not unfit(microbatch) and trials.answer(microbatch, target) is None:
                found.setdefault((_entries(microbatch), target), (microbatch, target))
        return list(found.values())


def rounded(width: int) -> int:
    """The width that one is padded to."""
    step = max(LEAST, 2 ** (width.bit_length() - 1) // PARTS)
    return -(-width // step) * step


def widths_of(batch: Any) -> frozenset[int]:
    """Of a batch, or of listed microbatches."""
    listed = batch if isinstance(batch, (list, tuple)) else [batch]
    return frozenset(width for entry in listed if (width := _width(entry)) is not None)


def pad(microbatch: Batch, width: int, token: int) -> dict[str, Any]:
    """A microbatch that is `unfit` for no reason, with rows of this width."""
    values = {IDS: token, MASK: 0, LABELS: IGNORED} | dict.fromkeys(TOKEN_TYPES, 0)
    more = width - microbatch[IDS].shape[1]
    return {
        name: nn.functional.pad(entry, (0, more), value=values[name]) if name in values else entry
        for name, entry in microbatch.items()
    }


def unfit(microbatch: Batch) -> str:
    """Why nobody knows how a microbatch is padded; "" if it is known."""
    tensors = split_batch(microbatch)[0]
    for name in (IDS, MASK, LABELS):
        entry = tensors.get(name)
        if entry is None or entry.dim() != 2 or entry.shape != tensors[IDS].shape or entry.is_floating_point():
            return f"it takes {IDS}, {MASK} and {LABELS}, whole numbers by row and place"
    width = tensors[IDS].shape[1]
    for name, entry in tensors.items():
        beside = name in TOKEN_TYPES and entry.shape == tensors[IDS].shape
        if name not in (IDS, MASK, LABELS) and not beside and kind_of(name) is None and width in entry.shape[1:]:
            return f"the entry {name!r} has a value for each token"
    return ""


def filling(microbatch: Batch, model: nn.Module) -> list[int]:
    """Tokens to pad with, no placeholders: what pads the microbatch already, what the model's config names, any."""
    ids, mask = microbatch[IDS], microbatch[MASK]
    config = getattr(model, "config", None)
    named = [getattr(source, "pad_token_id", None) for source in (config, getattr(config, "text_config", None))]
    held = (
        [] if ids.is_meta else [*ids[mask == 0][:1].tolist(), *(token for token in named if isinstance(token, int)), 0]
    )
    tokens_seen = [] if ids.is_meta else ids.flatten().unique().tolist()
    placeholders = set(token_ids(model).values())
    return [token for token in dict.fromkeys([*held, *tokens_seen]) if token >= 0 and token not in placeholders] or [0]


def tried(model: nn.Module, microbatch: Batch, width: int, trainable: Set[str]) -> str:
    """Whether padding to a width leaves eager PyTorch's loss and gradients as they are: SAME, or why not. trainable:
    as csc.check.eager has it.
    """
    if too_much(model):
        return too_much(model)
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in microbatch.values()):
        return "the batch has no values here"
    if any(parameter.dtype in IN_HALF for parameter in model.parameters()):
        return "it computes in 16 bits, where a difference cannot be told from rounding"
    tokens = filling(microbatch, model)
    try:
        right = Reference(model, microbatch, trainable, "auto")
        step = right.step()
        padded = pad(microbatch, width, tokens[0])
        disordered = _disordered(padded, tokens, microbatch[IDS].shape[1])
        steps = [Reference(model, batch, trainable, "auto").step() for batch in (padded, disordered)]
    except Exception as error:  # of the user's model: a table of positions may end
        log.info("a trial with padding to %d failed: %s: %s", width, type(error).__name__, error)
        return f"it fails then ({type(error).__name__})"
    if not _same_bits(*steps):
        return "its loss or gradients depend on the token that it is padded with"
    return (
        SAME
        if all(_alike(right, step, step_tried) for step_tried in steps)
        else "its loss or gradients are others then"
    )


def _disordered(padded: Batch, tokens: Sequence[int], width: int) -> dict[str, Any]:
    """With any of the tokens from a width on."""
    ids, other = padded[IDS].clone(), torch.Generator().manual_seed(0)
    behind = ids[:, width:]
    behind.copy_(torch.tensor(tokens)[torch.randint(len(tokens), behind.shape, generator=other)])
    return {**padded, IDS: ids}


def _same_bits(one: EagerStep, other: EagerStep) -> bool:
    """What nothing reads is multiplied by 0: to the bit, where nothing is added up in an order of its own."""
    exact = all(gradient.is_cpu for gradient in one.gradients.values())
    return one.loss == other.loss and (
        not exact or all(torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items())
    )


def _alike(eager: Reference, right: EagerStep, tried_step: EagerStep) -> bool:
    """Whether two steps are the same to rounding, in float32."""

    def rounding() -> Mapping[str, float]:
        if eager.in_half():
            return dict.fromkeys([LOSS, *right.gradients], 0.0)
        return eager.moved(right, torch.finfo(torch.float32).eps / 2)

    drawn = right.unknown | tried_step.unknown
    return not drawn and judge(right, tried_step.loss, tried_step.gradients, [EXACT], rounding).good


def _width(microbatch: Batch) -> int | None:
    ids = microbatch.get(IDS) if hasattr(microbatch, "get") else None
    return ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None


def _entries(microbatch: Batch) -> frozenset[str]:
    return frozenset(name for name, value in microbatch.items() if isinstance(value, torch.Tensor))
