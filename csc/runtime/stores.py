"""Stores of other processes, which may be killed or stopped meanwhile: nobody waits for them for good.

torch's TCPStore waits without an end for the answer of a process that is stopped.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")

LOOK = 0.005  # seconds between two looks into a store
TRIED = 10.0  # seconds in which a process that is there takes a connection
ASKED = 0.05  # seconds between two questions whether there is still something to wait for
ANSWER = 5.0  # seconds in which a process that is there answers, where nothing is lost if it does not


def _never() -> None:
    """What is asked while nobody can die."""


def answered(call: Callable[[], Result], seconds: float, who: str, stop: Callable[[], None] = _never) -> Result:
    """What a call returns that another process answers. RuntimeError if it does not in time. stop: asked meanwhile,
    raises once there is nothing to wait for.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="csc-store", daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive() and (left := end - time.monotonic()) > 0:
        thread.join(min(left, ASKED) if stop is not _never else left)
        stop()
    if errors:
        raise errors[0]
    if not results:
        raise RuntimeError(f"timed out: {who} has not answered for {seconds:g} s, and is stopped or cut off")
    return results[0]


def connected(host: str, port: int, seconds: float, who: str, stop: Callable[[], None] = _never) -> dist.Store:
    """The store of a process. RuntimeError: it has ended, or is stopped. stop: asked meanwhile, raises.

    torch would try for all of the time to reach a process that has ended, and a thread that still tries when this
    process ends aborts it. So it is asked first whether anybody listens, and torch tries for a short time only.
    """
    end = time.monotonic() + seconds
    while True:
        stop()
        try:
            socket.create_connection((host, port), timeout=seconds).close()
        except ConnectionRefusedError as error:
            raise RuntimeError(f"connection refused: {who} has ended") from error
        except OSError as error:
            raise RuntimeError(f"timed out: {who} cannot be reached ({error})") from error
        wait, left = timedelta(seconds=min(seconds, TRIED)), max(LOOK, end - time.monotonic())
        call = partial(dist.TCPStore, host, port, wait_for_workers=False, timeout=wait)
        try:
            store = answered(call, left, who, stop)
        except RuntimeError:
            if time.monotonic() > end:
                raise
            continue
        store.set_timeout(timedelta(seconds=seconds))
        return store


class Guarded(dist.Store):
    """A store in which nobody waits for the dead. It has to be held: torch holds what is below Python alone. seconds:
    for which `who`, whose it is, is waited for. stop: asked meanwhile, raises.
    """

    def __init__(self, store: dist.Store, seconds: float, who: str, stop: Callable[[], None] = _never) -> None:
        super().__init__()
        self._store, self._seconds, self._who, self._stop = store, seconds, who, stop

    def _answered(self, call: Callable[[], Result]) -> Result:
        return answered(call, self._seconds, self._who)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until they are there."""
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self.check(list(keys)):
            self._stop()
            if end is not None and time.monotonic() > end:
                raise RuntimeError(f"timed out: nobody has written {', '.join(keys)}")
            time.sleep(LOOK)

    def get(self, key: str) -> bytes:
        """Once it is there."""
        self.wait([key])
        return self._answered(lambda: self._store.get(key))

    def set(self, key: str, value: Any) -> None:
        """As the store."""
        self._answered(lambda: self._store.set(key, value))

    def add(self, key: str, number: int) -> int:
        """As the store."""
        return self._answered(lambda: self._store.add(key, number))

    def check(self, keys: list[str]) -> bool:
        """As the store."""
        return self._answered(lambda: self._store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As the store."""
        return self._answered(lambda: self._store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """As the store."""
        return self._answered(lambda: self._store.delete_key(key))

    def num_keys(self) -> int:
        """As the store."""
        return self._answered(self._store.num_keys)
