"""Workers that are started before it is known what they are to make.

    ahead = WorkersAhead()
    ahead.start(count, folder)          once there are so many, nothing more
    ahead.take() -> CompileWorker       one of them, or a new one. OSError, WorkerGoneError if it cannot be started

Whatever a worker makes it first imports torch and Inductor, which takes as long as capturing a model, and the first one
asks what the C++ compiler builds for. While a model is captured other cores have nothing to do. Workers that nobody
takes end with this object, or by themselves (csc.runtime.compile_worker).
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from pathlib import Path

from csc.runtime.side_by_side import CompileWorker, WorkerGoneError

log = logging.getLogger("csc")


class WorkersAhead:
    """Of this process."""

    def __init__(self) -> None:
        self._workers: list[CompileWorker] = []
        weakref.finalize(self, _close, self._workers)

    def start(self, count: int, folder: Path) -> None:
        """folder: in which they are going to make functions."""
        try:
            while len(self._workers) < count:
                self._workers.append(CompileWorker(ahead=folder))
        except (OSError, WorkerGoneError) as error:  # it is tried again where they are needed
            log.info("fuse: no process that compiles could be started ahead: %s", error)

    def take(self) -> CompileWorker:
        """See the module."""
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
