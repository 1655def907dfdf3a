"""How the ranks of a program are started, and what is said when one of them ends with an error.

Terms: torchrun's *agent* starts the processes of one node. It reads the reason of a failure from a file that it names
in each process' environment (TORCHELASTIC_ERROR_FILE) and prints it last, under "Root Cause".

    command(ranks, per_node, script) -> "torchrun --nproc-per-node 3 train.py"
    check_world(world, ranks, mesh)               InputError, on one rank: the others wait for the agent to stop them
    tell_agent(error)                             writes the file
    speak_in_short()                              an error of csc that ends a script is its lines and a sentence
"""

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
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from csc.errors import CscError, InputError, is_of_libraries

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
DEBUG = "CSC_DEBUG"  # 1: whole tracebacks, with what is csc's own
PATIENCE = 10.0  # seconds; an agent stops the processes of its node within one, those of other nodes within a few


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
    said = {"py_callstack": str(error), "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):  # the sentence stands on stderr as well
        Path(place).write_text(json.dumps({"message": {"message": str(error), "extraInfo": said}}))


@cache
def speak_in_short() -> None:
    """An error of csc that nobody catches is printed with the lines of the user's code alone, and torchrun is told the
    sentence. Whole tracebacks with CSC_DEBUG=1; other errors as before.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> Any:
        if isinstance(error, CscError):
            tell_agent(error)
            own = _own_frames(frames)
            if own is not None and os.environ.get(DEBUG) != "1":
                error.__cause__, error.__suppress_context__, frames = None, True, own
                error.__traceback__ = own
        return before(kind, error, frames)

    sys.excepthook = hook


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of csc, torch and Python's own files."""
    kept = []
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if not is_of_libraries(file) and not file.startswith("<frozen"):
            kept.append(frames)
        frames = frames.tb_next
    own: TracebackType | None = None
    for one in reversed(kept):
        own = TracebackType(own, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return own
