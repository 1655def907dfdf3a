"""Functions compiled in several processes at once: this one, and workers beside it (csc.runtime.compile_worker)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from csc import cores
from csc.installation import own_process
from csc.runtime.compiled_function import BeingMadeError, FunctionOrder, TorchState
from csc.temporary import TemporaryFolder

# --- Functions compiled in several processes at once -----------------------------------------------------------------
#
# The processes are this one, and workers beside it (csc.runtime.compile_worker).
#
# Workers are new processes, not forks: a fork of a process with threads of OpenMP, autograd or a device may hang, and
# Python's own pools would run the user's script a second time. They take orders as text, leave what they make in the
# folder, and end when this process does, however it ends. What a worker dies of is left to `here`.


log = logging.getLogger("csc")

MOST = 7  # workers of a process
WORTH = 3  # functions below which a worker, which takes seconds to begin, would come too late


class WorkerGoneError(Exception):
    """A worker has ended in the middle of an order, or did not begin."""


class CompileWorker:
    """One process. OSError if it cannot be started. ahead: the folder of what it is going to make, if that comes later:
    it gets ready meanwhile.
    """

    def __init__(self, ahead: Path | None = None) -> None:
        self._process = subprocess.Popen(
            own_process("csc.runtime.compile_worker"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,  # Ctrl-C is for this process, which then closes the worker's input
        )  # fmt: skip
        folder = None if ahead is None else str(ahead)
        self._say(json.dumps({"path": sys.path, "torch": asdict(TorchState.now()), "ahead": folder}))

    @property
    def is_there(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def make(self, order: FunctionOrder) -> str:
        """Why it could not be made; "" if it was. WorkerGoneError."""
        self._say(order.line())
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer.endswith("\n"):  # nothing, or what it had written when it was killed
            raise WorkerGoneError(f"a process that compiles ended with code {self._process.wait()}")
        return str(json.loads(answer)["error"])

    def close(self) -> None:
        """Stop it, and what it has started, wherever it is."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what it was told last has not gone out
                pipe.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise WorkerGoneError("a process that compiles has ended") from None


def worker_count() -> int:
    """Cores of this process' share of the machine, without its own."""
    return min(cores.here() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1, MOST)


def make_side_by_side(
    orders: Sequence[FunctionOrder], here: Callable[[FunctionOrder, bool], object], workers: int,
    started: Callable[[], CompileWorker] | None = None,
) -> None:  # fmt: skip
    """here(order, wait): makes one in this process; without wait it raises BeingMadeError where another process does.
    The longest come first. started: gives workers; None: new ones.
    """
    left = deque(sorted(orders, key=lambda order: -len(order.layouts)))
    beside: list[CompileWorker] = []
    feeders = [
        threading.Thread(target=_feed, args=(left, beside, started or CompileWorker), name="csc-compile", daemon=True)
        for _ in range(min(workers, len(left) - WORTH + 1))
    ]
    for feeder in feeders:
        feeder.start()
    try:
        later = _take(left, here)
        for feeder in feeders:
            feeder.join()
        for order in [*later, *_take(left, here)]:
            here(order, True)
    finally:
        for worker in list(beside):  # where this process is interrupted
            worker.close()


def _take(left: deque[FunctionOrder], here: Callable[[FunctionOrder, bool], object]) -> list[FunctionOrder]:
    """Make what is left here; the rest is being made elsewhere."""
    busy = []
    while left:
        try:
            order = left.popleft()
        except IndexError:
            break
        try:
            here(order, False)
        except BeingMadeError:
            busy.append(order)
    return busy


def _feed(
    left: deque[FunctionOrder], beside: list[CompileWorker], started: Callable[[], CompileWorker]
) -> None:  # fmt: skip
    order = None
    try:
        worker = started()
    except (OSError, WorkerGoneError) as error:
        log.info("fuse: no process that compiles beside this one could be started: %s", error)
        return
    beside.append(worker)
    try:
        while left:
            order = left.popleft()
            why = worker.make(order)
            if why:
                log.debug("fuse: %s was not compiled beside this process: %s", order.name, why)
            order = None
    except IndexError:  # another one has taken the last
        pass
    except WorkerGoneError as error:
        log.info("fuse: %s; what it was at is compiled in this one", error)
        if order is not None:
            left.append(order)
    finally:
        if worker in beside:
            beside.remove(worker)
        worker.close()


# --- Workers that are started before it is known what they are to make -----------------------------------------------
#
# Whatever a worker makes it first imports torch and Inductor, which takes as long as capturing a model, and the first
# one asks what the C++ compiler builds for. While a model is captured other cores have nothing to do. Workers that
# nobody takes end with this object, or by themselves (csc.runtime.compile_worker).


class WorkersAhead:
    """Of this process."""

    def __init__(self) -> None:
        self._workers: list[CompileWorker] = []
        weakref.finalize(self, _close, self._workers)

    def start(self, count: int, folder: Path) -> None:
        """Starts workers until there are so many. folder: in which they are going to make functions."""
        try:
            while len(self._workers) < count:
                self._workers.append(CompileWorker(ahead=folder))
        except (OSError, WorkerGoneError) as error:  # it is tried again where they are needed
            log.info("fuse: no process that compiles could be started ahead: %s", error)

    def take(self) -> CompileWorker:
        """Returns one of the workers that were started, or a new one. Raises OSError or WorkerGoneError if a new one
        cannot be started.
        """
        with contextlib.suppress(IndexError):  # several threads take them
            while True:
                worker = self._workers.pop(0)
                if worker.is_there:
                    return worker
                worker.close()
        return CompileWorker()


def _close(workers: list[CompileWorker]) -> None:
    for worker in workers:
        worker.close()


# --- Where compiled functions are kept: in a folder that is given, or in one of this process alone -------------------


@dataclass(frozen=True)
class FunctionFolder:
    """own: what removes it, if it is of this process alone. workers: of this process, which make functions there."""

    path: Path
    own: TemporaryFolder | None = None
    workers: WorkersAhead = field(default_factory=WorkersAhead)

    @classmethod
    def of(cls, kept: Path | None) -> FunctionFolder:
        """The folder, which is there."""
        if kept is not None:
            return cls(kept)
        own = TemporaryFolder()
        return cls(Path(own.name), own)
