"""Short texts that ranks tell each other, as bytes: nothing is unpickled.

gathered_texts(text, group) -> [text of every rank]
first_line(error) -> what a backend's error says, without source locations and advice
is_silence(line) -> whether that is of a wait that took too long
"""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from csc import devices


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
