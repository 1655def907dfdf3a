"""Short texts that ranks tell each other, as bytes: nothing is unpickled.

gathered_texts(text, group) -> [text of every rank]
first_line(error) -> what a backend's error says, without source locations and advice
is_silence(line) -> whether that is of a wait that took too long
is_lost(error) -> whether it is of a rank that went away or is silent
cannot(error, what, where) -> CscError, if it is not: of what the backend does not do
"""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from csc import devices
from csc.errors import CscError

CONNECTIONS = re.compile(  # in what backends say of them; "gloo/transport" is where gloo's errors of them come from
    r"gloo/transport|connect|closed|closure|reset by peer|broken pipe|time?d? ?-?out|aborted|socket|remote|unreachable|"
    r"shut ?down|destroyed|eof|watchdog",
    re.IGNORECASE,
)


def gathered_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Every rank's text, by rank. All ranks of the group (None: the default one) call it."""
    device = devices.meeting_place(str(dist.get_backend_config(group)))
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded, group=group)
    return [bytes(row[: int(size)].cpu().tolist()).decode() for row, size in zip(rows, sizes)]


def first_line(error: BaseException) -> str:
    """The first line of an error, or its kind if it says nothing."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*|\s*This is typically caused by.*$", "", line).rstrip(". ")[:200]


def is_silence(line: str) -> bool:
    """Whether the first line of a backend's error says that nobody answered in time."""
    return "timed out" in line.lower() or "timeout" in line.lower()


def is_lost(error: BaseException) -> bool:
    """Whether an error of a process group says that a rank went away or is silent; else it is of the call itself, as
    of a dtype that the backend does not take.
    """
    typed = getattr(dist, "DistError", ())
    return bool(CONNECTIONS.search(str(error))) or (isinstance(error, typed) and "support" not in str(error))


def cannot(error: BaseException, what: str, where: str) -> CscError:
    """What the backend does not do. what: that was asked of it; where: which rank asked."""
    backend = dist.get_backend_config() if dist.is_initialized() else "torch.distributed"
    return CscError(
        f"the process group ({backend}) does not do '{what}' ({first_line(error)}): it takes neither every dtype nor "
        "every operation, and of float8, int16 and uint16 gloo has no sums",
        where,
        "Have what ranks exchange in float32, bfloat16, float16, int32 or int64 (model.to(torch.bfloat16)), or choose "
        "a mesh without that exchange",
    )
