"""One writer at a time in a directory, of whatever thread or process; one that ends, however it ends, lets go of it.

with alone_in(directory, wait=True): ...         InputError, without wait, if another one is in it
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from csc.errors import InputError


@contextlib.contextmanager
def alone_in(directory: Path, wait: bool) -> Iterator[None]:
    """The directory is there. On a file system without locks nobody is kept out."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            _lock(opened, directory, wait)
        yield
    finally:
        with contextlib.suppress(OSError):  # closing is not enough: processes that were forked meanwhile have it, too
            fcntl.flock(opened, fcntl.LOCK_UN)
        os.close(opened)


def _lock(opened: int, directory: Path, wait: bool) -> None:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            "another process is writing there", str(directory), "wait until it is done, or write to another directory"
        ) from None
