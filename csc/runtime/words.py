"""What ranks say when they meet, and what is wrong with it.

Terms
  signature   lines of text that must be the same on every rank, such as the sizes of a batch
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


@dataclass(frozen=True)
class Said:
    """What a rank says in a meeting, besides the operation. replica: its place on the dp axis."""

    signature: tuple[str, ...] = ()
    replica: int = 0
    content: int = 0
    value: float = 0.0


NOTHING = Said()


@dataclass(frozen=True)
class Word:
    """What a rank says when something is amiss. cause: see `cause`."""

    operation: str
    cause: str
    signature: tuple[str, ...]
    content: int
    replica: int


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
        if word.signature != first.signature:
            return StepFailed(
                f"rank 0 and rank {rank} were given different batches: {_difference(first, word, rank)}",
                operation,
                "Give every rank the same global batch. No gradient was touched",
            )
    for replica in sorted({word.replica for word in words}):
        ranks = [rank for rank, word in enumerate(words) if word.replica == replica]
        other = next((rank for rank in ranks if words[rank].content != words[ranks[0]].content), None)
        if other is not None:
            return StepFailed(
                f"rank {ranks[0]} and rank {other} were given batches of the same sizes with other tokens",
                operation,
                "Give every rank the same global batch: shuffle with the same seed everywhere, and skip a batch on "
                "all ranks or on none. No gradient was touched",
            )
    return None


def agree(rows: Sequence[Sequence[int]]) -> bool:
    """Whether nobody failed, and operation, step and signature are the same; the content within each replica.

    A row: operation, step, failed, signature, replica, content, value; texts as digests.
    """
    contents = {(row[4], row[5]) for row in rows}
    same = len({tuple(row[:4]) for row in rows}) == 1 and len(contents) == len({row[4] for row in rows})
    return same and not rows[0][2]


def _difference(one: Word, other: Word, rank: int) -> str:
    ours = [line for line in one.signature if line not in other.signature] or ["fewer entries"]
    theirs = [line for line in other.signature if line not in one.signature] or ["fewer entries"]
    return f"{ours[0]} on rank 0, {theirs[0]} on rank {rank}"


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
