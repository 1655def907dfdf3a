"""Joining the process group that torchrun starts, and leaving it with one sentence.

Terms: torchrun gives every process RANK, WORLD_SIZE and LOCAL_RANK (its number on its node). The *store* is
torchrun's own key-value server; it outlives any rank, and all of them: `torchrun --max-restarts` starts ranks anew
beside the keys of those that ended. So each *attempt* has keys of its own.

    setup_distributed(device="cpu", timeout=600.0) -> Launch      joins the default process group
    join_group(device, timeout, ranks, mesh) -> bool              the same for a mesh, if torchrun started this process
    divided_world(size) -> Team                                   from now on this process is one of so many
    several_processes() -> bool                                   whether this process is one of several ranks
    open_store(timeout) -> Store                                  connects to torchrun's store
    first_to_speak(store) -> bool                                 True for one rank only: the first that asks
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from csc import devices
from csc.errors import InputError, RankLost
from csc.runtime.starting import check_world


@dataclass(frozen=True)
class Launch:
    """This process' place in the group, and its device."""

    rank: int
    world: int
    device: torch.device


def under_torchrun() -> bool:
    """True if the environment is that of a process started by torchrun."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"))


def several_processes() -> bool:
    """True in a process of a group of two or more, or that torchrun started beside others."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1


def open_store(timeout: float = 600.0) -> dist.Store:
    """Connect to the store, to the keys of this attempt. RankLost if it does not answer within `timeout` seconds."""
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    except RuntimeError as error:
        raise _apart(error) from error
    return dist.PrefixStore(f"csc/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def first_to_speak(store: dist.Store) -> bool:
    """When a rank dies, the others fail one by one, each for the one before: only the first knows why."""
    try:
        return store.add("spoken", 1) == 1
    except RuntimeError:  # the store is gone as well: nobody else can say it
        return True


def setup_distributed(device: str = "cpu", timeout: float = 600.0, store: dist.Store | None = None) -> Launch:
    """Join the default process group, unless that was done already.

    device: the program's. timeout: seconds without an answer until a rank counts as lost.
    The device's own backend if every process of this node has one of its own; else gloo, where processes share what
    there are. InputError if torchrun did not start this process or there is no such device; RankLost if a rank does not
    come.
    """
    if not under_torchrun():
        raise InputError(
            "RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR are not all set",
            "setup_distributed",
            "Start with torchrun",
        )
    local = int(os.environ["LOCAL_RANK"])
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    place, backend = devices.placed(device, local, neighbours)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        group_store = dist.PrefixStore("group", store or open_store(timeout))
        wait = timedelta(seconds=timeout)
        try:
            dist.init_process_group(backend, store=group_store, rank=rank, world_size=world, timeout=wait)
        except RuntimeError as error:
            raise _apart(error) from error
    return Launch(rank, world, place)


def join_group(device: str, timeout: float, ranks: int, mesh: str) -> bool:
    """Whether this process is one of several, which are the ranks of the mesh; it joins their group if torchrun started
    it and it has not. InputError if there are more or fewer of them.
    """
    if under_torchrun() and not dist.is_initialized():
        setup_distributed(device, timeout)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:
        check_world(world, ranks, mesh)
    return world > 1


@dataclass(frozen=True)
class Team:
    """Processes that train together, of several that torchrun started. number: which of `teams` it is; rank: of this
    process in it.
    """

    number: int
    teams: int
    rank: int


def divided_world(size: int) -> Team:
    """Divide torchrun's processes into teams of `size` neighbours; each is a world of its own from now on. One process
    alone is a team of any size: it runs all ranks itself.

    InputError if the number of processes is no multiple, or they are in a group already.
    """
    if not several_processes():
        return Team(0, 1, 0)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = "torchrun"
    if dist.is_initialized():
        raise InputError("the processes are in one group already", where, "call csc.search before init_process_group")
    if world % size:
        raise InputError(
            f"{world} processes are no teams of {size}", where, f"start a multiple of {size}, or change trial_mesh"
        )
    number, within = divmod(rank, size)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    os.environ |= {"RANK": str(within), "WORLD_SIZE": str(size), "TORCHELASTIC_RESTART_COUNT": f"{attempt}-{number}"}
    return Team(number, world // size, within)


def _apart(error: RuntimeError) -> RankLost:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return RankLost(
        f"not all ranks came together ({reason})",
        f"rank {os.environ.get('RANK', '?')}",
        "Check that every node was started, and that they reach each other",
    )
