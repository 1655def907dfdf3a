"""How the ranks of a program are started, join the process group, and leave it with one sentence."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from csc import devices
from csc.errors import CscError, InputError, RankLost, is_of_libraries

# --- How the ranks of a program are started, and what is said when one of them ends with an error --------------------
#
# Terms: torchrun's *agent* starts the processes of one node. It reads the reason of a failure from a file that it
# names in each process' environment (TORCHELASTIC_ERROR_FILE) and prints it last, under "Root Cause".


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
DEBUG = "CSC_DEBUG"  # 1: whole tracebacks, with what is csc's own
PATIENCE = 60.0  # seconds; an agent stops the processes of its node within one, those of other nodes within a few


def command(ranks: int, per_node: int, script: str) -> str:
    """What starts `ranks` processes, at most `per_node` on a node: for several nodes with `on each of N nodes: `."""
    here = max(n for n in range(1, min(ranks, per_node) + 1) if ranks % n == 0)
    if here == ranks:
        return f"torchrun --nproc-per-node {ranks} {script}"
    nodes = ranks // here
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"on each of {nodes} nodes: torchrun --nnodes {nodes} --nproc-per-node {here} {meeting} {script}"


def check_world(world: int, ranks: int, mesh: str) -> None:
    """InputError if so many processes are not the ranks of the mesh. The first process raises it; the others leave the
    word to it for a while, in which the agent that sees it fail stops them.
    """
    if world == ranks:
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    started = f" ({world // here} nodes x {here})" if here < world else ""
    error = InputError(
        f"{world} processes were started{started} and the mesh has {ranks} ranks ({mesh})", "mesh",
        f"start {ranks}: the number of nodes times --nproc-per-node; or change the mesh",
    )  # fmt: skip
    if os.environ.get("RANK", "0") != "0":
        with _quiet_when_stopped():
            time.sleep(PATIENCE)
    tell_agent(error)
    raise error


@contextmanager
def _quiet_when_stopped() -> Iterator[None]:
    """For a process that waits to be stopped, as another has said why: torchrun then lists it as no failure."""
    if threading.current_thread() is not threading.main_thread():  # where Python takes no signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tell_agent(error: BaseException) -> None:
    """Leave the sentence where torchrun's agent looks for the reason of a failure. Nothing without such a place."""
    place = os.environ.get(ERROR_FILE)
    if not place:
        return
    message = {"py_callstack": str(error), "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):  # the sentence stands on stderr as well
        Path(place).write_text(json.dumps({"message": {"message": str(error), "extraInfo": message}}))


@cache
def speak_in_short() -> None:
    """An error of csc that nobody catches is printed with the lines of the user's code alone, and torchrun is told the
    sentence. Whole tracebacks with CSC_DEBUG=1; other errors as before.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> Any:
        if isinstance(error, CscError):
            tell_agent(error)
            own_frames = _own_frames(frames)
            if own_frames is not None and os.environ.get(DEBUG) != "1":
                error.__cause__, error.__suppress_context__, frames = None, True, own_frames
                error.__traceback__ = own_frames
        return before(kind, error, frames)

    sys.excepthook = hook


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of csc, torch and Python's own files."""
    kept = []
    while frames is not None:
        file, module = frames.tb_frame.f_code.co_filename, str(frames.tb_frame.f_globals.get("__name__"))
        is_made = file.startswith("<frozen") or (file == "<string>" and module != "__main__")  # by a library, of text
        if not is_of_libraries(file) and not is_made:
            kept.append(frames)
        frames = frames.tb_next
    own: TracebackType | None = None
    for frame in reversed(kept):
        own = TracebackType(own, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return own


# --- Joining the process group that torchrun starts, and leaving it with one sentence --------------------------------
#
# Terms: torchrun gives every process RANK, WORLD_SIZE and LOCAL_RANK (its number on its node). The *store* is
# torchrun's own key-value server; it outlives any rank, and all of them: `torchrun --max-restarts` starts ranks anew
# beside the keys of those that ended. So each *attempt* has keys of its own.


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
