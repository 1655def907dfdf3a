"""A process that was started again takes the place of one that was killed, between two steps.

Terms
  job       what survives: ranks that were started together, some of them killed since. It says in torchrun's store,
            which outlives ranks, where it can be asked
  joins     of a process: it was not there when the others stopped training. All that were lost come back at once

A rank that joins has nothing. The *source*, the lowest of those that were left, gives it weights, the state of the
optimizer and of torch's generator, and the number of steps; then all build what ranks build at a start, in new groups.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from csc.errors import InputError, RankLost
from csc.runtime.meeting import store_of_processes

JOB, ADMITTED, ASKS = "job", "admitted", "joins"
LOOK = 0.05  # seconds between two looks into a store


@dataclass(frozen=True)
class Admission:
    """store, name: where all meet. steps: how many were trained; calls: how many steps of any kind were begun."""

    store: dist.Store
    name: str
    source: int
    steps: int
    calls: int
    joins: bool = False

    def told(self) -> str:
        """For those that join."""
        return json.dumps([self.name, self.source, self.steps, self.calls])

    def enter(self, rank: int, ranks: int, seconds: float) -> None:
        """Form the default group. RankLost if one of them does not come."""
        store = dist.PrefixStore(self.name, self.store)
        try:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds)
            )
        except RuntimeError as error:
            raise RankLost(
                f"not all ranks came when one was taken up again ({error})", f"rank {rank}",
                "Start again from the last checkpoint",
            ) from error  # fmt: skip


def job_store() -> dist.Store | None:
    """torchrun's; None where a rank has the store, which may have died with it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return store_of_processes("survive")


def announce(host: str, port: int, refuses: str) -> None:
    """To whoever is started again."""
    store = job_store()
    if store is not None:
        with contextlib.suppress(RuntimeError):  # it is gone: nobody can join
            store.set(JOB, json.dumps([host, port, refuses]))


def is_under_way() -> bool:
    """Whether this process was started beside a job that trains."""
    store = None if dist.is_initialized() else job_store()
    return store is not None and bool(store.check([JOB]))


def ask(rank: int, seconds: float) -> Admission | None:
    """Wait until the job takes this process up. InputError if it takes none; RankLost if it does not in time."""
    jobs = job_store()
    if jobs is None or not jobs.check([JOB]):
        return None
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        host, port, refuses = json.loads(jobs.get(JOB))
        if refuses:
            raise InputError(
                f"the job goes on without rank {rank}, and takes up nobody: {refuses}", "rejoin",
                "start all ranks again from the next checkpoint",
            )  # fmt: skip
        with contextlib.suppress(RuntimeError):  # the rank that was to be asked has died as well
            store = dist.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=5))
            store.set(f"{ASKS}/{rank}", "")
            while time.monotonic() < end:
                if store.check([ADMITTED]):
                    name, source, steps, calls = json.loads(store.get(ADMITTED))
                    return Admission(store, name, source, steps, calls, joins=True)
                time.sleep(LOOK)
    raise RankLost(
        f"a job is under way that does not take up rank {rank} within {seconds:g} s: it may have ended, or lacks other "
        "ranks, too", "rejoin", "start every rank that was lost; or all of them from the last checkpoint",
    )  # fmt: skip


@torch.no_grad()
def exchange(admission: Admission, model: nn.Module, optimizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Give those that join what the source has. optimizer: its state, on the source."""
    is_source = dist.get_rank() == admission.source
    tensors: list[torch.Tensor] = []
    state_text = json.dumps(_apart(optimizer, tensors)) if is_source else ""
    text = (
        torch.frombuffer(bytearray(state_text.encode()), dtype=torch.uint8)
        if state_text
        else torch.empty(0, dtype=torch.uint8)
    )
    size = torch.tensor([text.numel()])
    dist.broadcast(size, admission.source)
    text = text if is_source else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, admission.source)
    listed = json.loads(bytes(text.tolist()).decode())
    if not is_source:
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in _tensors(listed)]
    drawn = torch.get_rng_state()
    tensors = [_from_source(tensor, admission.source) for tensor in tensors]
    for tensor in chain(model.parameters(), model.buffers()):
        value = _from_source(tensor, admission.source)
        if admission.joins:
            tensor.copy_(value)
    drawn = _from_source(drawn, admission.source)
    if admission.joins:
        torch.set_rng_state(drawn)
    state: dict[str, Any] | None = _together(listed, tensors)
    return state


def _from_source(tensor: torch.Tensor, source: int) -> torch.Tensor:
    """The source's values, in memory of their own."""
    sent = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    if sent.numel():
        dist.broadcast(sent.view(-1).view(torch.uint8), source)
    return sent


# --- A state as texts and tensors: nothing is unpickled ----------------------------------------------------------


def _apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)], "at": len(tensors) - 1}
    if isinstance(value, dict):
        return {"dict": [[key, _apart(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_apart(item, tensors) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(
        f"the optimizer's state has a {type(value).__name__}, which cannot be given to another rank", "rejoin",
        "use an optimizer whose state is numbers and tensors",
    )  # fmt: skip


def _tensors(listed: Any) -> Iterator[tuple[str, list[int]]]:
    """In the order in which they were taken out."""
    if isinstance(listed, dict) and "tensor" in listed:
        yield tuple(listed["tensor"])
    elif isinstance(listed, dict):
        for item in next(iter(listed.values())):
            yield from _tensors(item[1] if "dict" in listed else item)


def _together(listed: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(listed, dict):
        return listed
    if "tensor" in listed:
        return tensors[listed["at"]]
    if "dict" in listed:
        return {key: _together(item, tensors) for key, item in listed["dict"]}
    kind, values = next(iter(listed.items()))
    return {"list": list, "tuple": tuple}[kind](_together(item, tensors) for item in values)
