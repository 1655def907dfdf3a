"""Folders of a process in the machine's temporary directory. What killed processes left of theirs is removed with the
next one that is made.

Terms: a folder is *held* by a lock on a file beside it, which the kernel lets go of with the last process that has it;
so folders of processes that live are never removed, whatever machine or container they run in.

    with TemporaryFolder() as path: ...
    folder = TemporaryFolder()      .name      .cleanup(), or with the object
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

PREFIX, LOCK = "csc-held-", "lock"


class TemporaryFolder:
    """As tempfile.TemporaryDirectory. name: its path, of an empty folder."""

    def __init__(self) -> None:
        remove_left(Path(tempfile.gettempdir()))
        self._folder, lock = _held()
        self.name = os.path.join(self._folder.name, "files")
        os.mkdir(self.name)
        self._free = weakref.finalize(self, os.close, lock)

    def cleanup(self) -> None:
        """Remove it."""
        self._folder.cleanup()
        self._free()

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *raised: object) -> None:
        self.cleanup()


def _held() -> tuple[tempfile.TemporaryDirectory[str], int]:
    while True:
        folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        path = os.path.join(folder.name, LOCK)
        lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            return folder, lock
        os.close(lock)  # it was taken for one that was left, before it was held


def remove_left(directory: Path) -> None:
    """Remove the folders in it that nobody holds, and that this user may remove."""
    for folder in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
