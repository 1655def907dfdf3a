"""Parts of a search side by side, in processes that are forked from it and so know all that it knows.

    workers_here() -> int                          how many, this process among them
    side_by_side(count, run, patience) -> [result or None]      None: of a process that failed, or was not done in time

A model is not sent anywhere and captured once: what was traced before the fork is there. A worker computes on one
thread, as one that a DataLoader forks does, and says nothing. Where this process holds a GPU, or was forked as a
daemon itself, there is one worker.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext
from typing import TypeVar

import torch

log = logging.getLogger("csc")

MOST = 4  # workers: a search has few divisions worth tracing

T = TypeVar("T")


def workers_here() -> int:
    """As many as this process may run on cores."""
    if sys.platform != "linux" or torch.cuda.is_initialized() or multiprocessing.current_process().daemon:
        return 1
    return min(MOST, len(os.sched_getaffinity(0)))


def side_by_side(count: int, run: Callable[[int], T], patience: Callable[[], float]) -> list[T | None]:
    """run(0) here, run(1) to run(count - 1) in processes of their own, whose results can be pickled. patience: seconds
    that the others have when run(0) is done.
    """
    context = multiprocessing.get_context("fork")
    others = [_start(context, run, number) for number in range(1, count)]
    try:
        return [run(0), *(_answer(here, patience) for _, here in others)]
    finally:
        for process, here in others:
            here.close()
            process.kill()
            process.join()


def _start(
    context: ForkContext, run: Callable[[int], T], number: int
) -> tuple[multiprocessing.process.BaseProcess, Connection]:  # fmt: skip
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, run, number), daemon=True)
    process.start()
    there.close()
    return process, here


def _work(there: Connection, run: Callable[[int], T], number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted search ends without a traceback of each worker
    torch.set_num_threads(1)  # the threads of the process that was forked are not there
    try:
        there.send(run(number))
    except Exception as error:  # whatever it is, the search can do without this worker
        log.debug("a worker of the search failed: %s", error)
    there.close()


def _answer(here: Connection, patience: Callable[[], float]) -> T | None:
    try:
        found: T | None = here.recv() if here.poll(max(0.0, patience())) else None
    except (EOFError, OSError):  # it failed, or was killed
        found = None
    if found is None:
        log.info("a worker of the search found nothing: its part is searched here")
    return found
