"""What ranks say when they meet, and what is wrong with it.

Terms
  signature   lines of text that must be the same on every rank, such as the sizes of a batch
  shared      lines of text that must be the same on ranks of one replica: the sizes of its own samples
  content     a number that ranks of one replica must have in common: a digest of the tokens of their share
  word        all that a rank has to say, once something is amiss

    agree(rows) -> bool                              of the numbers that always travel
    disagreement(operation, words) -> StepFailed     None if they agree but for how many steps there were
    cause(error) -> str          digest(text) -> int          as_int(value) -> int          as_float(bits) -> float
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from csc.errors import CscError, RankLost, StepFailed
from csc.runtime.texts import first_line

SAME_SAMPLES = (
    "Give the ranks of a replica the same samples: those of compiled.dp_rank, shuffled with the same seed, and skip a "
    "batch on all of them or on none. No gradient was touched"
)

CHANGED = "the model has changed"  # in the signature of a rank whose programs are for the model as it was


@dataclass(frozen=True)
class Said:
    """What a rank says in a meeting, besides the operation. replica: its place on the dp axis. value, meets: numbers
    for the others, which need not agree.
    """

    signature: tuple[str, ...] = ()
    replica: int = 0
    content: int = 0
    value: float = 0.0
    shared: tuple[str, ...] = ()
    meets: int = 0


NOTHING = Said()


@dataclass(frozen=True)
class Word:
    """What a rank says when something is amiss. cause: see `cause`."""

    operation: str
    cause: str
    signature: tuple[str, ...]
    content: int
    replica: int
    shared: tuple[str, ...] = ()


def disagreement(operation: str, words: Sequence[Word]) -> StepFailed | None:
    """The first thing in which ranks differ, as an error."""
    first = words[0]
    for rank, word in enumerate(words):
        if word.operation != first.operation:
            return StepFailed(
                f"rank 0 is at '{first.operation}', and rank {rank} at '{word.operation}'",
                operation,
                "Every rank calls the same things in the same order, as often as the others: look for a rank whose "
                "data ended earlier, or for a call that only some ranks make",
            )
        if (CHANGED in word.signature) != (CHANGED in first.signature):
            there, not_there = (rank, 0) if CHANGED in word.signature else (0, rank)
            return StepFailed(
                f"the model has changed on rank {there} since it was compiled, and not on rank {not_there}",
                operation,
                "Make the same change on every rank, before the same step; a note on that rank says what has changed. "
                "No gradient was touched",
            )
        if word.signature != first.signature:
            return StepFailed(
                f"rank 0 and rank {rank} were given different batches: "
                f"{_difference(first.signature, word.signature, 0, rank)}",
                operation,
                "Give every rank the same global batch, or with local=True its replica's samples in as many "
                "microbatches. No gradient was touched",
            )
    for replica in sorted({word.replica for word in words}):
        ranks = [rank for rank, word in enumerate(words) if word.replica == replica]
        had = [(words[rank].shared, words[rank].content) for rank in ranks]
        other = next((rank for rank, one in zip(ranks, had) if one != had[0]), None)
        if other is not None:
            return _other_samples(operation, words, ranks[0], other)
    return None


def _other_samples(operation: str, words: Sequence[Word], one: int, other: int) -> StepFailed:
    """Two ranks of a replica differ in its samples."""
    local = words[one].shared or words[other].shared
    found = f"rank {one} and rank {other} were given batches of the same sizes with other tokens"
    if local:
        same = words[one].shared == words[other].shared
        what = "other tokens" if same else _difference(words[one].shared, words[other].shared, one, other)
        found = f"rank {one} and rank {other} belong to one replica and were given different samples: {what}"
    remedy = (
        SAME_SAMPLES
        if local
        else "Give every rank the same global batch: shuffle with the same seed everywhere, and skip a batch on all "
        "ranks or on none. No gradient was touched"
    )
    return StepFailed(found, operation, remedy)


def agree(rows: Sequence[Sequence[int]]) -> bool:
    """Whether nobody failed, and operation, step and signature are the same; the content within each replica.

    A row: operation, step, failed, signature, replica, content, value, meets; texts as digests.
    """
    contents = {(row[4], row[5]) for row in rows}
    same = len({tuple(row[:4]) for row in rows}) == 1 and len(contents) == len({row[4] for row in rows})
    return same and not rows[0][2]


def _difference(one: Sequence[str], other: Sequence[str], first: int, second: int) -> str:
    ours = [line for line in one if line not in other] or ["fewer entries"]
    theirs = [line for line in other if line not in one] or ["fewer entries"]
    return f"{ours[0]} on rank {first}, {theirs[0]} on rank {second}"


def cause(error: BaseException | None) -> str:
    """Why a rank failed, as others tell of it; "" if it did not, or only saw another one go."""
    if error is None or isinstance(error, RankLost):
        return ""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in rank")]
    said = str(error) if isinstance(error, CscError) else f"{type(error).__name__}: {first_line(error)}"
    return " ".join([said, *(f"({note})" for note in notes)])


def digest(text: str) -> int:
    """64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def as_int(value: float) -> int:
    """The bits of a float64."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def as_float(bits: int) -> float:
    """The inverse."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
