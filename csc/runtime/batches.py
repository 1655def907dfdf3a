"""Batches: check what the user gives against what the program was compiled for, and split it."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from csc.errors import InputError, StepFailed
from csc.runtime.loaded_program import LoadedProgram, read_tensors
from csc.runtime.meeting import OWN_SAMPLES, SAME_SAMPLES, Meeting, Vote
from csc.runtime.rank import Rank
from csc.runtime.specs import InputSpec, Manifest
from csc.runtime.weights import digest as tensor_digest
from csc.runtime.weights import with_own_memory

# --- Batches: check what the user gives against what the program was compiled for, and split it ----------------------
#
# Terms: the *global batch* is the same on every rank. Along dim 0 it is split over dp replicas first, then over
# microbatches: microbatch mb of replica d is rows [(d * m + mb) * b, (d * m + mb + 1) * b) of m microbatches of b
# rows. Or it comes as a list of m * dp ready microbatches in that order (needed when dim 0 does not count samples, as
# with packed image patches, and when microbatches differ in length). A *local* batch has the samples of one replica
# alone, and is split in the same way.


SAMPLED = 2**10  # numbers of a tensor: enough to tell batches apart, in well under a millisecond
GlobalBatch = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Microbatch:
    """One microbatch: what it holds, and which of the programs is for its sizes."""

    tensors: Mapping[str, torch.Tensor]
    program: int


@dataclass(frozen=True)
class Microbatches:
    """The microbatches of replicas, in order. whole: these are all replicas."""

    of: Mapping[int, Sequence[Microbatch]]
    whole: bool

    def of_rank(self, rank: Rank) -> list[Microbatch]:
        """Those of a rank's step, as it numbers them."""
        count = rank.program.manifest.microbatches * len(rank.replicas)
        return [self.of[replica][mb] for replica, mb in map(rank.served, range(count))]

    @property
    def all(self) -> list[Microbatch]:
        """Replica after replica."""
        return [microbatch for microbatches in self.of.values() for microbatch in microbatches]


def split(manifests: Sequence[Manifest], batch: GlobalBatch, replicas: Sequence[int] | None = None) -> Microbatches:
    """Microbatches of these replicas, whose samples the batch has; None: of every replica. InputError names the key,
    what was expected, what was found and the remedy.

    manifests: of the programs of one model for several sizes; microbatches may be of any of them. Entries that are None
    count as absent. Other values than tensors are refused: they were fixed when the model was compiled.
    """
    first = manifests[0]
    every = first.mesh.replicas
    of, count = list(every if replicas is None else replicas), first.microbatches
    total = len(of) * count
    if isinstance(batch, Sequence):
        if len(batch) != total:
            raise InputError(
                f"the batch is a list of {len(batch)} microbatches, the program takes {count} microbatches "
                f"on each of {len(of)} replicas = {total}",
                "batch",
                f"Give {total}, or compile for another number",
            )
        ready = [_tensors(_for(manifests, mb), mb, f"batch[{i}]") for i, mb in enumerate(batch)]
    elif hasattr(batch, "items"):  # a dict, or an HF BatchEncoding, which is a UserDict
        tensors = _tensors(_for(manifests, batch), batch, "batch")
        parts = {name: _cut(first, name, tensor, total, len(of)) for name, tensor in tensors.items()}
        ready = [{name: part[i] for name, part in parts.items()} for i in range(total)]
    else:
        raise InputError(
            f"the batch is a {type(batch).__name__}",
            "batch",
            "Give a dict of tensors, or a list of microbatches",
        )
    _check_whole(first, ready)
    placed = [_placed(manifests, microbatch, f"microbatch {i}", total) for i, microbatch in enumerate(ready)]
    rows = {replica: placed[d * count : (d + 1) * count] for d, replica in enumerate(of)}
    return Microbatches(rows, len(of) == len(every))


def read(manifests: Sequence[Manifest], microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that a program reads: the one that reads most of what is there."""
    names = {name for name, value in microbatch.items() if value is not None}
    able = [manifest for manifest in manifests if all(spec.name in names for spec in manifest.inputs)]
    chosen = max(able, key=lambda manifest: len(manifest.inputs), default=manifests[0])
    used = {spec.name for spec in chosen.inputs} | chosen.fixed.keys()
    return {name: value for name, value in microbatch.items() if name in used}


def sizes(microbatches: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """A line for every entry of every microbatch: dtype and shape of a tensor, another value as it is."""
    return tuple(
        f"microbatch {i}: {name} {_text(value.dtype, tuple(value.shape))}"
        if isinstance(value, torch.Tensor)
        else f"microbatch {i}: {name}={value!r:.100}"
        for i, microbatch in enumerate(microbatches)
        for name, value in sorted(microbatch.items())
    )


def whose(rank: Rank, local: bool) -> list[int] | None:
    """The replicas whose samples a batch has that a process is given; None: all of them, as always where replicas share
    ranks. local: those of its own alone.
    """
    return [*rank.replicas] if local and not rank.program.manifest.mesh.replicas_share_ranks else None


def vote(manifest: Manifest, dealt: Microbatches, replica: int) -> Vote:
    """The sizes of all microbatches, or where they are one replica's alone how many, and a digest of the whole numbers
    (tokens, labels, masks) of this replica's share; of all samples where replicas share ranks, each of which says one.

    Of features nothing is read, nor of what is not on the CPU; of a tensor at most SAMPLED numbers, spread over it.
    """
    digest, apart = hashlib.blake2b(digest_size=8), not manifest.mesh.replicas_share_ranks
    replica = replica if apart else 0
    for one in dealt.of[replica] if apart else dealt.all:
        for _, tensor in sorted(one.tensors.items()):
            if tensor.device.type == "cpu" and not tensor.is_floating_point() and not tensor.is_complex():
                flat = tensor.detach().reshape(-1)
                digest.update(flat[:: 1 + flat.numel() // SAMPLED].contiguous().numpy().tobytes())
    content = int.from_bytes(digest.digest(), "little", signed=True)
    lines = sizes(one.tensors for one in dealt.all)
    if dealt.whole:
        return Vote(lines, replica, content)
    first = dealt.of[replica][0].tensors
    whole = tuple(f"{name} is {tensor_digest(first[name])}" for name in shared(manifest) if name in first)
    return Vote(whole, replica, content, shared=lines)


def shared(manifest: Manifest) -> list[str]:
    """The inputs that all samples of a step share."""
    return [spec.name for spec in manifest.inputs if spec.whole or not spec.shape]


def check_present(manifest: Manifest, microbatch: Mapping[str, torch.Tensor], names: Iterable[str], rank: int) -> None:
    """InputError if one of these entries, which a rank reads, is on the meta device: it has a size and no values."""
    for name in names:
        if microbatch[name].is_meta and manifest.device != "meta":
            raise InputError(
                f"key {name!r} has no values on rank {rank}, whose stages read it",
                "batch",
                "Load it there: compiled.needs names the entries that a process has to load",
            )


def _placed(
    manifests: Sequence[Manifest], microbatch: Mapping[str, torch.Tensor], where: str, total: int
) -> Microbatch:
    """The microbatch with the first program that takes it; the complaint is that of the first one."""
    complaints = []
    for index, manifest in enumerate(manifests):
        if {spec.name for spec in manifest.inputs} | manifest.fixed.keys() != microbatch.keys() | manifest.fixed.keys():
            continue
        try:
            for spec in manifest.inputs:
                _check(spec, microbatch[spec.name], where, total)
            for name, values in manifest.fixed.items():
                _check_fixed(name, values, microbatch.get(name), where)
        except InputError as error:
            complaints.append(error)
        else:
            return Microbatch(microbatch, index)
    raise complaints[0]


def from_file(program: LoadedProgram, file: Path | None) -> GlobalBatch:
    """A global batch from safetensors. Inputs in the size of one microbatch, like the program's own example,
    are repeated.
    """
    manifest = program.manifest
    tensors = program.example() if file is None else read_tensors(file, remedy="Give a safetensors file")
    if all(tuple(tensors[s.name].shape) == s.shape for s in manifest.inputs if s.name in tensors):
        return [tensors] * (manifest.microbatches * manifest.mesh.dp)
    return tensors


def _for(manifests: Sequence[Manifest], batch: Mapping[str, Any]) -> Manifest:
    """A program that reads all of the entries, and no other; the first one if there is none, to complain about it."""
    given = {name for name, value in batch.items() if value is not None}
    for manifest in manifests:
        names = {spec.name for spec in manifest.inputs}
        if names <= given <= names | manifest.fixed.keys():
            return manifest
    return manifests[0]


def _tensors(manifest: Manifest, batch: Mapping[str, Any], where: str) -> dict[str, torch.Tensor]:
    """The entries that the program reads; complains about others, and about missing ones."""
    specs = {spec.name: spec for spec in manifest.inputs}
    entries = {name: value for name, value in batch.items() if value is not None}
    for name in entries:
        if name not in specs and name not in manifest.fixed:
            close = difflib.get_close_matches(name, specs, 1)
            raise InputError(
                f"key {name!r} is not an input of the program; inputs: {', '.join(specs)}",
                where,
                f"Did you mean {close[0]!r}?" if close else "Leave it out, or compile with it in the example batch",
            )
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in specs.items():
        if name not in entries:
            raise InputError(
                f"key {name!r} is missing: expected {_text(spec.dtype, spec.shape)} for each microbatch",
                where,
                f"Add it; the keys given are {', '.join(entries) or 'none'}",
            )
        value = entries[name]
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"key {name!r}: expected a tensor, found {type(value).__name__}", where, "Convert it first"
            )
        tensors[name] = value
    return tensors | {name: entries[name] for name in manifest.fixed if isinstance(entries.get(name), torch.Tensor)}


def _cut(manifest: Manifest, name: str, tensor: torch.Tensor, total: int, replicas: int) -> tuple[torch.Tensor, ...]:
    if any(spec.name == name and (spec.whole or not spec.shape) for spec in manifest.inputs):
        return (tensor,) * total
    how = f"{manifest.microbatches} microbatches on {replicas} replicas"
    if tensor.dim() == 0:
        raise InputError(
            f"key {name!r} has no dimension to split over {how}", "batch", "Give a list of ready microbatches"
        )
    if tensor.shape[0] % total:
        raise InputError(
            f"key {name!r}: dim 0 is {tensor.shape[0]}, which {how} = {total} microbatches do not divide",
            "batch",
            f"Make it a multiple of {total}, or give a list of {total} ready microbatches",
        )
    return tensor.split(tensor.shape[0] // total) if tensor.shape[0] else (tensor,) * total


def _check_whole(manifest: Manifest, ready: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """InputError if microbatches differ in an entry that all of a batch's samples share."""
    for spec in manifest.inputs:
        if spec.whole or not spec.shape:
            values = [microbatch[spec.name] for microbatch in ready if spec.name in microbatch]
            values = [value for value in values if not value.is_meta]
            if any(value is not values[0] and not torch.equal(value, values[0]) for value in values[1:]):
                raise InputError(
                    f"key {spec.name!r} has no sample dimension, and microbatches differ in it",
                    "batch",
                    "Give every microbatch the same, as the whole batch has it; what differs from sample to sample "
                    "needs a dimension for samples, the first one",
                )


def _check(spec: InputSpec, tensor: torch.Tensor, where: str, total: int) -> None:
    if tensor.dtype != spec.dtype:
        raise InputError(
            f"key {spec.name!r}: expected dtype {_name(spec.dtype)}, found {_name(tensor.dtype)}",
            where,
            f"Convert it with .to(torch.{_name(spec.dtype)})",
        )
    if tuple(tensor.shape) != spec.shape:
        raise InputError(
            f"key {spec.name!r}: expected shape {list(spec.shape)}, found {list(tensor.shape)}",
            where,
            f"The program has this size in each of {total} microbatches: pad, crop, or compile again",
        )
    if spec.table is not None and tensor.device.type == "cpu" and tensor.numel():
        least, most = torch.aminmax(tensor)
        if least < 0 or most >= spec.table[1]:
            raise _no_row(spec.name, tensor, *spec.table, where)
    if spec.classes is not None and tensor.device.type == "cpu" and tensor.numel():
        _check_labels(spec.name, tensor, *spec.classes, where)


def _check_labels(name: str, labels: torch.Tensor, classes: int, ignored: int, first: int, where: str) -> None:
    """InputError for a label that is no class, where it is read."""
    numbers = labels.detach().numpy()  # which is quicker with few
    wrong = (numbers != ignored) & ((numbers < 0) | (numbers >= classes))
    if first:
        wrong[..., :first] = False
    if not wrong.any():
        return
    place = torch.from_numpy(wrong).nonzero()[0].tolist()
    at = f"in sample {place[0]}" + (f" at {place[1:]}" if place[1:] else "")
    raise InputError(
        f"key {name!r}: the label {int(labels[tuple(place)])} {at} is none of the {classes} classes of the loss, nor "
        f"{ignored} for none",
        where,
        f"Write {ignored} where nothing is to be learned; use the tokenizer of this model",
    )


def _no_row(name: str, ids: torch.Tensor, table: str, rows: int, where: str) -> InputError:
    """What to say of an id that the embedding has no row for."""
    first = ((ids < 0) | (ids >= rows)).nonzero()[0].tolist()
    place = f"in sample {first[0]}" + (f" at {first[1:]}" if first[1:] else "") if first else "alone"
    return InputError(
        f"key {name!r}: the id {int(ids[tuple(first)])} {place} is no row of {table!r}, which has {rows}",
        where,
        "Use the tokenizer of this model, put a token of the vocabulary in place of padding, or resize the embedding "
        "before compiling",
    )


def _check_fixed(name: str, values: list, tensor: torch.Tensor | None, where: str) -> None:
    if tensor is not None and tensor.tolist() != values:
        raise InputError(
            f"key {name!r}: expected the values {values}, found {tensor.tolist()}",
            where,
            "The model takes decisions from these values, so a program holds for one of them: compile again",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{_name(dtype)}{list(shape)}"


# --- Steps to which every rank brings its own replica's samples ------------------------------------------------------
#
# Terms
#   replica's ranks    ranks of one replica have the same samples; each may leave out features that its stages do not
#                      read
#   features           entries of floating point: pixels, sounds. What is made of whole numbers is there on every rank
#   told               of every microbatch the dtype and the size of each entry, and whether there are values, as text
#   absent             an entry on the meta device: it has a size and no values
#
# What a step needs beyond its own samples is asked for once for each new size: programs are made for microbatches of
# all replicas, and compared on rank 0 with eager PyTorch. Nothing is unpickled.


CHUNK = 32 * 2**20  # bytes

Ready = list[dict[str, Any]]
Told = list[dict[str, tuple[str, list[int], bool]]]  # of each microbatch by entry: dtype, shape, whether it has values


def told(ready: Sequence[Mapping[str, Any]]) -> str:
    """What a rank has of its microbatches."""
    return json.dumps(
        [
            {
                name: (str(value.dtype).removeprefix("torch."), list(value.shape), not value.is_meta)
                for name, value in microbatch.items()
                if isinstance(value, torch.Tensor)
            }
            for microbatch in ready
        ]
    )


def completed(ready: Sequence[Mapping[str, Any]], texts: Sequence[str], replicas: Sequence[int], rank: int) -> Ready:
    """Microbatches with absent features for those that another rank of the replica has. texts: what all ranks told.

    StepFailed, on every rank, if ranks of any replica have other samples.
    """
    words = [_read(text) for text in texts]
    for replica in sorted(set(replicas)):
        _refuse_other([(rank, words[rank]) for rank, of in enumerate(replicas) if of == replica])
    microbatches = [dict(microbatch) for microbatch in ready]
    for word in (words[one] for one, of in enumerate(replicas) if of == replicas[rank]):
        for microbatch, entries in zip(microbatches, word):
            for name, (dtype, shape, _) in entries.items():
                if name not in microbatch:
                    microbatch[name] = torch.empty(shape, dtype=_dtype(dtype), device="meta")
    return microbatches


def _refuse_other(words: Sequence[tuple[int, Told]]) -> None:
    """StepFailed if these ranks of a replica differ in more than in features that some have left out."""
    places = [{name for _, word in words for name in word[place]} for place in range(len(words[0][1]))]
    for place, names in enumerate(places):
        for name in sorted(names):
            descriptions = {rank: tuple(map(str, word[place][name][:2])) for rank, word in words if name in word[place]}
            first, entry = next(iter(descriptions.items()))
            absent = None if _dtype(entry[0]).is_floating_point else "nothing"
            for rank, _ in words:
                other = " ".join(descriptions[rank]) if rank in descriptions else absent
                if other is not None and other != " ".join(entry):
                    raise StepFailed(
                        f"rank {first} and rank {rank} belong to one replica and were given different samples: "
                        f"microbatch {place}: {name} is {' '.join(entry)} on rank {first}, {other} on rank {rank}",
                        "train_step",
                        SAME_SAMPLES,
                    )


def of_all(meeting: Meeting, replicas: Sequence[int], ready: Sequence[Mapping[str, Any]]) -> Ready:
    """The microbatches of all replicas, in order. All ranks call it, right after a meeting in which they agreed to.

    replicas: of every rank. An entry that no rank has values of is absent, and on other ranks than 0 every feature.
    RankLost.
    """
    words = [_read(text) for text in meeting.texts(OWN_SAMPLES, told(ready))]
    sources = _sources(words, replicas)
    tensors: dict[str, torch.Tensor] = {}
    for rank in sorted(set(sources.values())):
        for features in (False, True):
            names = [n for n, one in sources.items() if one == rank and _is_feature(n, words[rank]) == features]
            if names:
                tensors |= meeting.guarded(lambda: _moved(meeting, rank, names, ready, features), OWN_SAMPLES)  # noqa: B023
    microbatches: Ready = []
    for replica in dict.fromkeys(sorted(replicas)):
        first = replicas.index(replica)
        for place, entries in enumerate(words[first]):
            plain = {
                name: plain_entries
                for name, plain_entries in ready[place].items()
                if not isinstance(plain_entries, torch.Tensor)
            }
            moved = {
                name: tensors.get(_key(replica, place, name), torch.empty(shape, dtype=_dtype(dtype), device="meta"))
                for name, (dtype, shape, _) in entries.items()
            }
            microbatches.append({**moved, **plain})
    return microbatches


def _read(text: str) -> Told:
    return json.loads(text)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _key(replica: int, place: int, name: str) -> str:
    return f"{replica}/{place}/{name}"


def _is_feature(key: str, word: Told) -> bool:
    _, place, name = key.split("/", 2)
    return _dtype(word[int(place)][name][0]).is_floating_point


def _sources(words: Sequence[Told], replicas: Sequence[int]) -> dict[str, int]:
    """The first rank that has values of an entry of a microbatch, by key."""
    rank_of: dict[str, int] = {}
    for rank, (replica, word) in enumerate(zip(replicas, words, strict=True)):
        for place, entries in enumerate(word):
            for name, (_, _, has_values) in entries.items():
                if has_values:
                    rank_of.setdefault(_key(replica, place, name), rank)
    return rank_of


def _moved(
    meeting: Meeting, source: int, names: Sequence[str], ready: Sequence[Mapping[str, Any]], features: bool
) -> dict[str, torch.Tensor]:
    """These tensors of one rank, on all ranks; features on rank 0 alone."""
    rank, group = dist.get_rank(), meeting.group
    if features and rank not in (0, source):
        return {}
    tensors = {}
    if rank == source:
        places = [(name, *name.split("/", 2)[1:]) for name in names]
        tensors = {key: with_own_memory(ready[int(place)][name]) for key, place, name in places}
        if features and rank == 0:
            return tensors

    def move(tensor: torch.Tensor) -> None:
        if not features:
            dist.broadcast(tensor, src=source, group=group)
        elif rank == source:
            dist.send(tensor, 0, group=group)
        else:
            dist.recv(tensor, source, group=group)

    content = (
        torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8) if tensors else torch.empty(0, dtype=torch.uint8)
    )
    size = torch.tensor([content.numel()])
    move(size)
    if rank != source:
        content = torch.empty(int(size), dtype=torch.uint8)
    for start in range(0, int(size), CHUNK):
        move(content[start : start + CHUNK])
    return tensors or load(content.numpy().tobytes())


# --- Batches that are prepared by a thread of their own while the one before is trained on ---------------------------
#
# While the caller works on a batch, up to `depth` more are fetched and prepared, in order, by one thread. What raises
# there, the loader or `prepare`, is raised here in place of that batch. The thread ends with the iterator: at the last
# batch, at an error, or when the loop is left.


Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Fetched(Generic[Batch]):
    """position: where the loader stood when it had given this batch and no other; None if it does not say. coming: the
    one after it, None for the last.
    """

    batch: Batch
    position: Any
    coming: Future[tuple[Batch, Any] | None]

    def following(self) -> Batch | None:
        """The batch after this one, once it is fetched; None if there is none, or an error, which comes in its turn."""
        result = self.coming.result() if self.coming.exception() is None else None
        return result[0] if result is not None else None


def ahead(batches: Iterable[Batch], prepare: Callable[[Batch], None], depth: int) -> Iterator[Fetched[Batch]]:
    """The batches in order; `prepare` has returned for each."""
    source = iter(batches)
    says = getattr(batches, "state_dict", None) if hasattr(batches, "load_state_dict") else None

    def fetch() -> tuple[Batch, Any] | None:
        for batch in source:
            position = says() if says is not None else None
            prepare(batch)
            return batch, position
        return None

    with ThreadPoolExecutor(1, "csc-ahead") as thread:
        coming = deque(thread.submit(fetch) for _ in range(depth))
        try:
            while (fetched := coming.popleft().result()) is not None:
                coming.append(thread.submit(fetch))
                yield Fetched(*fetched, coming[0])
        finally:
            thread.shutdown(wait=True, cancel_futures=True)
