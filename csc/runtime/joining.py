"""Processes that were started again take the places of those that were lost, between two steps.

Terms
  job       what survives: ranks that were started together, some of them killed since. It says in torchrun's store,
            which outlives ranks, where it can be asked
  joins     of a process: it was not there when the others stopped training. All that were lost come back at once: the
            killed ones, and the spare ones of their replicas, which end (with the code AGAIN) once those are there

A rank that joins has nothing. The *source*, the lowest of those that were left, gives it the weights, torch's generator
and the number of steps; then all build what ranks build at a start, in new groups. The state of the optimizer comes
from whichever rank has it, by the names of parameters and boxes of their entries, as in a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from csc.errors import InputError, RankLost
from csc.runtime import optimizer as optimizers
from csc.runtime.meeting import answering, gathered_texts, store_of_processes
from csc.runtime.optimizer import SteppedParameter, check_whole, fits, joined, restored
from csc.runtime.parameters import OwnParameters
from csc.runtime.specs import Box, overlap, put, sizes
from csc.runtime.stores import ANSWER, Guarded, connected

JOB, ADMITTED, ASKS = "job", "admitted", "joins"
AGAIN = 75  # the exit code of a spare rank that is to be started again; EX_TEMPFAIL of sysexits.h
LOOK = 0.05  # seconds between two looks into a store
Address = tuple[str, int]


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
    return store_of_processes("survive", of_attempt=False)


def announce(jobs: dist.Store | None, first: Address, others: Sequence[Address], refuses: str) -> None:
    """To whoever is started again: the stores of those that train, and of spare ones. refuses: why nobody can join."""
    if jobs is not None:
        with contextlib.suppress(RuntimeError):  # it is gone, as its host is: nobody can join
            jobs.set(JOB, json.dumps([[first, *others], refuses]))


def is_under_way() -> bool:
    """Whether this process was started beside a job that trains. What an earlier job has announced, all of whose
    processes have ended, counts for nothing: torchrun starts all ranks again.
    """
    store = None if dist.is_initialized() else job_store()
    if store is None or not store.check([JOB]):
        return False
    addresses, _ = json.loads(store.get(JOB))
    return any(_answers(*address) for address in addresses)


def _answers(host: str, port: int) -> bool:
    """Whether a process is there: a store would be tried for seconds."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=ANSWER):
        return True
    return False


def all_ask(store: dist.Store, ranks: Sequence[int]) -> bool:
    """Whether these have asked to join."""
    return store.check([f"{ASKS}/{rank}" for rank in ranks])


def ask(rank: int, seconds: float) -> Admission | None:
    """Wait until the job takes this process up. InputError if it takes none; RankLost if it does not in time."""
    jobs = job_store()
    if jobs is None or not jobs.check([JOB]):
        return None
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(RuntimeError):  # the rank that was to be asked has died as well
            admission = _admitted(rank, jobs, end)
            if admission is not None:
                return admission
        time.sleep(LOOK)
    raise RankLost(
        f"a job is under way that does not take up rank {rank} within {seconds:g} s: it may have ended, or lacks other "
        "ranks, too", "rejoin", "start every rank that was lost; or all of them from the last checkpoint",
    )  # fmt: skip


def _admitted(rank: int, jobs: dist.Store, end: float) -> Admission | None:
    """None where the job says another thing meanwhile, or time is up. RuntimeError: nobody is there."""
    said = jobs.get(JOB)
    [[host, port], *_], refuses = json.loads(said)
    if refuses:
        raise InputError(
            f"the job goes on without rank {rank}, and takes up nobody: {refuses}", "rejoin",
            "start all ranks again from the next checkpoint",
        )  # fmt: skip
    who = "the first of the ranks that train"
    of_first = connected(host, port, ANSWER, who)
    store = Guarded(of_first, ANSWER, who)
    store.set(f"{ASKS}/{rank}", "")
    while time.monotonic() < end:
        if store.check([ADMITTED]):
            name, source, steps, calls = json.loads(store.get(ADMITTED))
            return Admission(of_first, name, source, steps, calls, joins=True)
        if jobs.get(JOB) != said:
            return None
        time.sleep(LOOK)
    return None


# --- What those that join are given ------------------------------------------------------------------------------


@torch.no_grad()
def give_weights(admission: Admission, model: nn.Module) -> None:
    """The source's, which has all that was trained, and its generator's state. All ranks call it."""
    for tensor in chain(model.parameters(), model.buffers()):
        value = _from_rank(tensor, admission.source)
        if admission.joins:
            tensor.copy_(value)
    drawn = _from_rank(torch.get_rng_state(), admission.source)
    if admission.joins:
        torch.set_rng_state(drawn)


class Part(NamedTuple):
    """Entries of a tensor of an optimizer's state. box: those of the parameter; None: a tensor of another shape."""

    box: Box | None
    tensor: torch.Tensor


@dataclass(frozen=True)
class OptimizerState:
    """What a rank that joins is given. table: of all parameters, as `optimizer.joined`; parts: by name and key, those
    that it needs.
    """

    table: Mapping[str, Any]
    parts: dict[tuple[str, str], list[Part]] = field(default_factory=dict)

    def with_more(self, other: OptimizerState) -> OptimizerState:
        """This, and what other ranks had of another one."""
        parts = {key: [*self.parts.get(key, ()), *other.parts.get(key, ())] for key in {**self.parts, **other.parts}}
        return OptimizerState(joined([self.table, other.table]), parts)

    def put_in_place(self, optimizer: torch.optim.Optimizer, own: Sequence[SteppedParameter]) -> None:
        """As `put`, to an optimizer of other parameters, which steps these from now on: each in its group."""
        of_name = {stepped.name: stepped.parameter for stepped in own}
        optimizer.state.clear()
        for group, then in zip(optimizer.param_groups, self.table["groups"], strict=True):
            names = [name for name in then["names"] if name in of_name]
            nothing = [parameter for parameter in group["params"] if not parameter.numel()]
            group["params"] = [of_name[name] for name in names] or nothing
            if "param_names" in group:
                group["param_names"] = names
        self.put(optimizer, own)

    def put(self, optimizer: torch.optim.Optimizer, own: Sequence[SteppedParameter]) -> None:
        """Give it to this rank's optimizer. InputError if it is of another kind or has other groups."""
        fits(self.table, optimizer, _unfit)
        optimizers.put(optimizer, restored(self.table, optimizer, own, self._assembled, _unfit))

    def _assembled(self, parameter: SteppedParameter, key: str, _: Any) -> torch.Tensor:
        device, parts = parameter.parameter.device, self.parts.get((parameter.name, key), [])
        dtype = parts[0].tensor.dtype if parts else parameter.parameter.dtype  # without parts of a shard of no entries
        assembled, filled = torch.empty(parameter.parameter.shape, dtype=dtype), 0
        for box, tensor in parts:
            if box is None:
                check_whole(parameter, key, tensor.shape, _unfit)
                return tensor.to(device)
            for here, there in overlap(parameter.box, box):
                assembled[here] = tensor[there]
                filled += assembled[here].numel()
        if filled != assembled.numel():
            raise _unfit(f"{key!r} of {parameter.name!r} is not all there")
        return assembled.to(device)


def _unfit(fault: str) -> InputError:
    return InputError(fault, "rejoin", "make the optimizer as the other ranks have made theirs")


@torch.no_grad()
def bring(own: OwnParameters, members: Sequence[int], into: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy what was trained (after `load`: all that was read) into these tensors, from these ranks, which are left of
    those that have mirrors; what there is of gradients, by name. All of them call it.
    """
    me, gradients = members[dist.get_rank()], dict[str, torch.Tensor]()
    for spec in own.written:
        whole = into[spec.name]
        for box, giver, held in own.given(spec):
            if 0 in sizes(box):
                continue
            source, value = members.index(giver), whole.new_empty(sizes(box))
            gradient = None
            if giver == me:
                assert held is not None
                gradient = held.grad
                value.copy_(held)
            put(whole, box, _from_rank(value, source).to(whole.device))
            if bool(_from_rank(torch.tensor([gradient is not None]), source)):
                part = _from_rank(value if gradient is None else gradient, source).to(whole.device)
                put(gradients.setdefault(spec.name, torch.zeros_like(whole)), box, part)
    return gradients


def give_state(
    listed: Mapping[str, Any] | None, own: Sequence[SteppedParameter], wanted: Sequence[SteppedParameter]
) -> OptimizerState | None:
    """Give each rank the state of what it has begun to step; None: nobody has an optimizer. listed: what this rank
    gives, as `optimizer.listed` says it of `own`; None: nothing. wanted: what it begins to step. All ranks call it.
    """
    rank, given = dist.get_rank(), listed if listed is not None else {"parameters": {}}
    of_name = {parameter.name: parameter for parameter in own if parameter.writes}
    tensors = [
        (name, key, value, of_name[name].box if value.shape == of_name[name].parameter.shape else None)
        for name, entry in given["parameters"].items() for key, value in entry["tensors"].items() if value.numel()
    ]  # fmt: skip
    told = {
        "table": None if listed is None else {**listed, "parameters": {
            name: {**entry, "tensors": {key: [] for key in entry["tensors"]}}
            for name, entry in listed["parameters"].items()
        }},
        "tensors": [[name, key, *_form(value), box] for name, key, value, box in tensors],
        "steps": [[parameter.name, parameter.box] for parameter in wanted],
    }  # fmt: skip
    with answering("a rank", "ranks were taken up again"):
        said = [json.loads(text) for text in gathered_texts(json.dumps(told))]
    tables = [one["table"] for one in said if one["table"] is not None]
    if not tables:
        return None
    state = OptimizerState(joined(tables))
    stepped, boxes = dict[str, list[Box]](), {parameter.name: parameter.box for parameter in wanted}
    for name, box in chain.from_iterable(one["steps"] for one in said):
        stepped.setdefault(name, []).append(_box(box))
    for source, one in enumerate(said):
        for number, (name, key, dtype, shape, box) in enumerate(one["tensors"]):
            part = None if box is None else _box(box)
            if not any(part is None or any(overlap(theirs, part)) for theirs in stepped.get(name, ())):
                continue
            value = tensors[number][2] if source == rank else torch.empty(shape, dtype=getattr(torch, dtype))
            value = _from_rank(value, source)
            if name in boxes and (part is None or any(overlap(boxes[name], part))):
                state.parts.setdefault((name, key), []).append(Part(part, value))
    return state


def _form(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _box(listed: Any) -> Box:
    return tuple(tuple((int(a), int(b)) for a, b in dim) for dim in listed)


def _from_rank(tensor: torch.Tensor, source: int) -> torch.Tensor:
    """A rank's values, in memory of their own."""
    sent = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    if sent.numel():
        with answering("a rank", "ranks were taken up again"):
            dist.broadcast(sent.view(-1).view(torch.uint8), source)
    return sent
