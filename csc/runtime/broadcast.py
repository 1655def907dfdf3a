"""One rank makes something, the others get it as bytes; or all raise the same error.

Terms: the *first* rank is rank 0 of the default process group. Names and sizes travel as JSON, contents as they are,
in chunks: nothing is unpickled. The group is a gloo one of its own, whose timeout is that of a long compilation.

    broadcast_group() -> group                         every rank creates it, in the same order of things
    first_makes(make, group) -> {name: bytes}        None if `make` gave None on the first rank
    told(error, doing) -> [text]                     an error as texts, for a rank that raises `heard(texts)`
    with answering(who, doing):                      RankLost, if who went away
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from csc import errors
from csc.errors import CscError, RankLost
from csc.runtime.texts import cannot, is_lost

LONGEST = timedelta(hours=24)  # of a compilation that others wait for
CHUNK = 32 * 2**20  # bytes

Files = Mapping[str, bytes]


def broadcast_group() -> dist.ProcessGroup:
    """A group of all ranks. All of them call it."""
    return dist.new_group(backend="gloo", timeout=LONGEST)


def first_makes(make: Callable[[], Files | None], group: dist.ProcessGroup) -> dict[str, bytes] | None:
    """What `make` returns on the first rank, on every rank; on the others `make` is not called.

    Raises, on every rank, the CscError that `make` raises; another error of it goes on as it is on the first rank, and
    as a CscError elsewhere. RankLost if the first rank goes away.
    """
    if dist.get_rank() != 0:
        return _received(group)
    try:
        made = make()
    except BaseException as error:  # from the keyboard, too: the others would wait for a day
        _send({"error": told(error, "rank 0 failed while it compiled")}, {}, group)
        raise
    listed = None if made is None else [[name, len(content)] for name, content in made.items()]
    _send({"files": listed}, made or {}, group)
    return None if made is None else dict(made)


def told(error: BaseException, doing: str) -> list[str]:
    """An error as texts that `heard` makes one of again. doing: a clause, for what is no CscError."""
    if isinstance(error, CscError):
        return [type(error).__name__, error.what, error.where, error.remedy]
    said = (str(error).strip().splitlines() or [""])[0]
    return ["CscError", f"{doing}: {type(error).__name__}: {said}", "", "See its own output"]


def heard(texts: Sequence[str]) -> CscError:
    """The error that another rank has told of."""
    kind, what, where, remedy = texts
    found: type[CscError] = getattr(errors, kind, CscError)
    return found(what, where, remedy)


def _send(header: Mapping[str, Any], files: Files, group: dist.ProcessGroup) -> None:
    text = json.dumps(header).encode()
    _broadcast(torch.tensor([len(text)]), group)
    _broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), group)
    content = bytearray(b"".join(files.values()))
    for start in range(0, len(content), CHUNK):
        _broadcast(torch.frombuffer(content[start : start + CHUNK], dtype=torch.uint8), group)


def _received(group: dist.ProcessGroup) -> dict[str, bytes] | None:
    length = torch.zeros(1, dtype=torch.int64)
    _broadcast(length, group)
    header = json.loads(_bytes(int(length), group))
    if "error" in header:
        raise heard(header["error"])
    if header["files"] is None:
        return None
    total = sum(size for _, size in header["files"])
    content = b"".join(_bytes(min(CHUNK, total - start), group) for start in range(0, total, CHUNK))
    files, start = {}, 0
    for name, size in header["files"]:
        files[name] = content[start : start + size]
        start += size
    return files


def _bytes(size: int, group: dist.ProcessGroup) -> bytes:
    chunk = torch.empty(size, dtype=torch.uint8)
    _broadcast(chunk, group)
    return chunk.numpy().tobytes()


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    with answering("a rank", "the program was handed out"):
        dist.broadcast(tensor, src=0, group=group)


@contextmanager
def answering(who: str, doing: str) -> Iterator[None]:
    """RankLost in place of what a process group raises, or a CscError of what its backend does not do. who: went away;
    doing: meanwhile, a clause.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise cannot(error, doing, f"rank {dist.get_rank()}") from error
        said = (str(error).strip().splitlines() or [""])[0][:200]
        raise RankLost(
            f"{who} went away while {doing} ({said})",
            f"rank {dist.get_rank()}",
            "Look at the output of the others for the cause, then start again",
        ) from error
