"""Steps to which every rank brings its own replica's samples.

Terms
  replica's ranks    ranks of one replica have the same samples; each may leave out features that its stages do not read
  features           entries of floating point: pixels, sounds. What is made of whole numbers is there on every rank
  told               of every microbatch the dtype and the size of each entry, and whether there are values, as text
  absent             an entry on the meta device: it has a size and no values

    told(ready) -> text                               completed(ready, texts, replicas, rank) -> ready, with absent
                                                      features for those that ranks of the same replica have
    of_all(meeting, replicas, ready) -> ready         of all replicas, in order; features have values on rank 0 alone

What a step needs beyond its own samples is asked for once for each new size: programs are made for microbatches of all
replicas, and compared on rank 0 with eager PyTorch. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from csc.errors import StepFailed
from csc.runtime.meeting import OWN_SAMPLES, Meeting
from csc.runtime.saving import with_own_memory
from csc.runtime.words import SAME_SAMPLES

CHUNK = 32 * 2**20  # bytes

Ready = list[dict[str, Any]]
Told = list[dict[str, tuple[str, list[int], bool]]]  # of each microbatch by entry: dtype, shape, whether it has values


def told(ready: Sequence[Mapping[str, Any]]) -> str:
    """What a rank has of its microbatches."""
    return json.dumps(
        [
            {
                name: (str(one.dtype).removeprefix("torch."), list(one.shape), not one.is_meta)
                for name, one in microbatch.items()
                if isinstance(one, torch.Tensor)
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
        _refuse_other([(one, words[one]) for one, of in enumerate(replicas) if of == replica])
    found = [dict(microbatch) for microbatch in ready]
    for word in (words[one] for one, of in enumerate(replicas) if of == replicas[rank]):
        for microbatch, entries in zip(found, word):
            for name, (dtype, shape, _) in entries.items():
                if name not in microbatch:
                    microbatch[name] = torch.empty(shape, dtype=_dtype(dtype), device="meta")
    return found


def _refuse_other(words: Sequence[tuple[int, Told]]) -> None:
    """StepFailed if these ranks of a replica differ in more than in features that some have left out."""
    places = [{name for _, word in words for name in word[place]} for place in range(len(words[0][1]))]
    for place, names in enumerate(places):
        for name in sorted(names):
            given = {rank: tuple(map(str, word[place][name][:2])) for rank, word in words if name in word[place]}
            first, entry = next(iter(given.items()))
            absent = None if _dtype(entry[0]).is_floating_point else "nothing"
            for rank, _ in words:
                other = " ".join(given[rank]) if rank in given else absent
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
    found: Ready = []
    for replica in dict.fromkeys(sorted(replicas)):
        first = replicas.index(replica)
        for place, entries in enumerate(words[first]):
            plain = {name: one for name, one in ready[place].items() if not isinstance(one, torch.Tensor)}
            own = {
                name: tensors.get(_key(replica, place, name), torch.empty(shape, dtype=_dtype(dtype), device="meta"))
                for name, (dtype, shape, _) in entries.items()
            }
            found.append({**own, **plain})
    return found


def _read(text: str) -> Told:
    return json.loads(text)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _key(replica: int, place: int, name: str) -> str:
    return f"{replica}/{place}/{name}"


def _is_feature(key: str, word: Told) -> bool:
    _, place, name = key.split("/", 2)
    return _dtype(word[int(place)][name][0]).is_floating_point


def _sources(words: Sequence[Told], replicas: Sequence[int]) -> dict[str, int]:
    """The first rank that has values of an entry of a microbatch, by key."""
    found: dict[str, int] = {}
    for rank, (replica, word) in enumerate(zip(replicas, words, strict=True)):
        for place, entries in enumerate(word):
            for name, (_, _, there) in entries.items():
                if there:
                    found.setdefault(_key(replica, place, name), rank)
    return found


def _moved(
    meeting: Meeting, source: int, names: Sequence[str], ready: Sequence[Mapping[str, Any]], features: bool
) -> dict[str, torch.Tensor]:
    """These tensors of one rank, on all ranks; features on rank 0 alone."""
    rank, group = dist.get_rank(), meeting.group
    if features and rank not in (0, source):
        return {}
    own = {}
    if rank == source:
        places = [(name, *name.split("/", 2)[1:]) for name in names]
        own = {key: with_own_memory(ready[int(place)][name]) for key, place, name in places}
        if features and rank == 0:
            return own

    def move(tensor: torch.Tensor) -> None:
        if not features:
            dist.broadcast(tensor, src=source, group=group)
        elif rank == source:
            dist.send(tensor, 0, group=group)
        else:
            dist.recv(tensor, source, group=group)

    content = torch.frombuffer(bytearray(save(own)), dtype=torch.uint8) if own else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([content.numel()])
    move(size)
    if rank != source:
        content = torch.empty(int(size), dtype=torch.uint8)
    for start in range(0, int(size), CHUNK):
        move(content[start : start + CHUNK])
    return own or load(content.numpy().tobytes())
