"""The check of several processes: rank 1 runs the program while rank 0 runs eager PyTorch.

Terms: both ranks hold the whole model, the batch and the files of all ranks. They *can share* the check if model and
batch are the same to the bit; else rank 0 runs the program itself, too. Headers travel as JSON, tensors as they are:
nothing is unpickled. The group is that over which programs are handed out.

    can_share(tensors, group) -> bool                ranks 0 and 1 call it
    send_step(make, group)                           rank 1
    received_step(group, device) -> () -> EagerStep       rank 0: a context; what it gives waits for the step, or raises
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from csc.check.eager import EagerStep
from csc.errors import CscError
from csc.runtime.consistency import checksum
from csc.runtime.meeting import answering, heard, told

FIRST, SECOND = 0, 1
CHECKED = "the program was checked"


def can_share(tensors: Callable[[], Iterable[torch.Tensor]], group: dist.ProcessGroup) -> bool:
    """Whether ranks 0 and 1 have these tensors alike, and both have values for them."""
    own = _checksums(tensors)
    if dist.get_rank() == SECOND:
        _send_json(own, group)
        return bool(_received_json(FIRST, group))
    same = own is not None and own == _received_json(SECOND, group)
    _send_json(same, group, to=SECOND)
    return same


def _checksums(tensors: Callable[[], Iterable[torch.Tensor]]) -> list[int] | None:
    try:
        return [int(checksum(tensor)) for tensor in tensors()]
    except Exception:  # on the meta device, too large to copy: then this rank is of no help
        return None


def send_step(make: Callable[[], EagerStep], group: dist.ProcessGroup) -> None:
    """Send the step that `make` returns to rank 0, or what it raises, which rank 0 then raises on all ranks."""
    try:
        step = make()
    except BaseException as error:  # from the keyboard, too: rank 0 would wait for it
        _send_json({"error": told(error, f"rank {SECOND} failed while it ran the program")}, group)
        if isinstance(error, Exception):
            return
        raise
    rows = [[name, str(g.dtype).removeprefix("torch."), list(g.shape)] for name, g in step.gradients.items()]
    _send_json({"loss": step.loss, "unknown": sorted(step.unknown), "gradients": rows}, group)
    for gradient in step.gradients.values():
        _send(gradient.detach().cpu().contiguous(), FIRST, group)


@contextmanager
def received_step(group: dist.ProcessGroup, device: torch.device) -> Iterator[Callable[[], EagerStep]]:
    """A step that nobody has asked for is received at the end, so that rank 1 does not wait."""
    waiting = True

    def step() -> EagerStep:
        nonlocal waiting
        waiting = False
        header = _received_json(SECOND, group)
        if "error" in header:
            raise heard(header["error"])
        gradients = {}
        for name, dtype, shape in header["gradients"]:
            gradients[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            _receive(gradients[name], SECOND, group)
        found = {name: gradient.to(device) for name, gradient in gradients.items()}
        return EagerStep(float(header["loss"]), found, frozenset(header["unknown"]))

    try:
        yield step
    finally:
        if waiting:
            with suppress(CscError):  # what this rank raises or has found comes first
                step()


def _send_json(content: Any, group: dist.ProcessGroup, to: int = FIRST) -> None:
    text = bytearray(json.dumps(content).encode())
    _send(torch.tensor([len(text)]), to, group)
    _send(torch.frombuffer(text, dtype=torch.uint8), to, group)


def _received_json(source: int, group: dist.ProcessGroup) -> Any:
    length = torch.zeros(1, dtype=torch.int64)
    _receive(length, source, group)
    text = torch.empty(int(length), dtype=torch.uint8)
    _receive(text, source, group)
    return json.loads(text.numpy().tobytes())


def _send(tensor: torch.Tensor, to: int, group: dist.ProcessGroup) -> None:
    if tensor.numel():
        with answering(f"rank {to}", CHECKED):
            dist.send(_bytes(tensor), to, group=group)


def _receive(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    if tensor.numel():
        with answering(f"rank {source}", CHECKED):
            dist.recv(_bytes(tensor), source, group=group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: gloo does not take every dtype."""
    return tensor.reshape(-1).view(torch.uint8)
