"""The ranks of one process as threads that take turns, for programs whose ranks meet in the middle of an action.

Context-parallel attention waits for other ranks within F and B, where an executor cannot step aside. So each rank gets
a thread, and one of them runs at a time: a thread that waits gives the turn away. When all wait, nobody can go on.

    Turns                         .changed() wakes those who wait; .wait(what) gives the turn away
    together(runs, turns) -> {rank: result}
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from csc import devices
from csc.errors import CscError


class _Stopped(Exception):
    """Another rank failed; its error is the one to show."""


@dataclass
class Turns:
    """A lock that whoever runs holds, and what the others wait for."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    running: int = 0
    version: int = 0
    waits: dict[str, str] = field(default_factory=dict)  # of those who wait since the last change, by thread
    failure: BaseException | None = None

    def changed(self) -> None:
        """Something that others may wait for has happened. The caller has the turn."""
        self.version += 1
        self.waits.clear()
        self.condition.notify_all()

    def wait(self, what: str) -> None:
        """Give the turn away until something has changed. CscError if nobody is left who could change anything."""
        self.waits[threading.current_thread().name] = what
        version = self.version
        self._check()
        while self.version == version and self.failure is None:
            self.condition.wait()
        if self.failure is not None:
            raise _Stopped

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.condition.notify_all()

    def leave(self) -> None:
        """A rank is done."""
        self.running -= 1
        self._check()

    def _check(self) -> None:
        if self.running and len(self.waits) == self.running and self.failure is None:
            listed = "; ".join(f"{rank} waits at '{what}'" for rank, what in sorted(self.waits.items()))
            self.fail(CscError(f"no rank can go on: {listed}", "executor", "Check schedule.txt"))


def together(runs: Mapping[int, Generator[str, None, Any]], turns: Turns) -> dict[int, Any]:
    """Run the ranks' generators to their ends, each in a thread. Raises what the first one to fail raised.

    No thread outlives the call, whatever ends it, and the same turns can be taken again.
    """
    results: dict[int, Any] = {}
    turns.running, turns.failure = len(runs), None
    turns.waits.clear()
    place = devices.current()  # each thread has its own

    def drive(rank: int, run: Generator[str, None, Any]) -> None:
        with turns.condition, torch.no_grad():
            try:
                devices.use(place)
                while turns.failure is None:
                    turns.wait(next(run))
            except StopIteration as end:
                results[rank] = end.value
                turns.leave()
            except _Stopped:
                pass
            except BaseException as error:
                turns.fail(error)
            finally:
                run.close()

    threads = [threading.Thread(target=drive, args=item, name=f"rank {item[0]}", daemon=True) for item in runs.items()]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as interruption:  # from the keyboard: the ranks stop where they wait next
        with turns.condition:
            turns.fail(interruption)
        for thread in threads:
            thread.join()
    failure, turns.failure = turns.failure, None  # it holds on to what its frames hold
    if failure is not None:
        raise failure
    return results
