"""What a search has done so far, on disk: a file of JSON lines that only grows.

Terms
  head     the first line: what the search is of; a search of something else refuses the file
  record   a line: {"kind": ..., ...}
  torn     a line that a killed process began: no beginning of a JSON object is one, so it is passed over, and what is
           added begins a line of its own

Several processes of one file system add to one file: a line is one write at its end.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from csc.errors import InputError

HEAD, LOCK, RUNNING = "search", "lock", "running"


class Ledger:
    """The file is made with its head if it is not there. InputError if its head is another, with what differs."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"it cannot be made ({error})", str(path.parent), "name another directory") from None
        wanted = json.loads(json.dumps(head))
        heads = self.records(HEAD)
        if not heads:
            self.add({"kind": HEAD, **head})
            heads = self.records(HEAD)
        own = {name: value for name, value in heads[0].items() if name != "kind"}
        for name in sorted({*own, *wanted}):
            if own.get(name) != wanted.get(name):
                raise InputError(
                    f"it is of a search with {name} {own.get(name)!r}, and this one has {wanted.get(name)!r}",
                    str(path),
                    "give the search that differs a directory of its own",
                )

    def add(self, record: Mapping[str, Any]) -> None:
        """One line, on the disk when this returns. The newline before it ends what a killed process began."""
        line = ("\n" + json.dumps(dict(record), allow_nan=False) + "\n").encode()
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)

    def records(self, kind: str) -> list[dict[str, Any]]:
        """In the order in which they were added."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        return [record for line in lines if (record := _read(line)) is not None and record["kind"] == kind]


def _read(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """No other process is behind the same file meanwhile. One that is killed is not, either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def sole(directory: Path) -> Iterator[None]:
    """The search of the directory, which is made. InputError if it cannot be, and if another search runs there: both
    would write the same checkpoints. Its processes share the directory; the first one of them holds the lock, which
    ends with the process.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened = (directory / RUNNING).open("w")
    except OSError as error:
        raise InputError(f"it cannot be used ({error})", str(directory), "name another directory") from None
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                "another search runs in it", str(directory), "wait for its end, or name another directory"
            ) from None
        yield
