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
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from csc import cores, devices

log = logging.getLogger("csc")

MOST = 4  # workers: a search has few divisions worth tracing

T = TypeVar("T")


def workers_here() -> int:
    """As many as this process may keep cores busy."""
    if sys.platform != "linux" or devices.current() is not None or multiprocessing.current_process().daemon:
        return 1
    return min(MOST, cores.here())


def side_by_side(count: int, run: Callable[[int], T], patience: Callable[[], float]) -> list[T | None]:
    """run(0) here, run(1) to run(count - 1) in processes of their own, whose results can be pickled. patience: seconds
    that the others have when run(0) is done.
    """
    if count == 1:  # also where there is no fork
        return [run(0)]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(1, count)]
    others = [
        context.Process(target=_work, args=(there, run, number), daemon=True)
        for number, (_, there) in enumerate(pipes, 1)
    ]
    for process, (_, there) in zip(others, pipes):
        with suppress(OSError):  # there is no memory for another, or there may be no more
            process.start()
        there.close()
    try:
        return [run(0), *(_answer(here, patience) for here, _ in pipes)]
    finally:
        for process, (here, _) in zip(others, pipes):
            here.close()
            if process.pid is not None:
                process.kill()
                process.join()


def _work(there: Connection, run: Callable[[int], T], number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted search ends without a traceback of each worker
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the threads of the process that was forked are not there
    with suppress(Exception):  # whatever it is, the search can do without this worker
        there.send(run(number))
    there.close()


def _answer(here: Connection, patience: Callable[[], float]) -> T | None:
    try:
        found: T | None = here.recv() if here.poll(max(0.0, patience())) else None
    except (EOFError, OSError):  # it failed, or was killed
        found = None
    if found is None:
        log.info("a worker of the search found nothing: its part is searched here")
    return found
