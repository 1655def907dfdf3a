"""Whether what lies in the cache is the user's own: the emitted Python files of an entry are run.

refused(folder) -> "" | why it is not used                  refused_within(entry) -> "" | why, with the file's name
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

OPEN = stat.S_IWGRP | stat.S_IWOTH


def refused(folder: Path) -> str:
    """Of the cache's folder, which may be reached by links of the user's own; "" if it is his, or not there."""
    try:
        found = os.stat(folder)
        link = os.lstat(folder)
    except OSError:
        return ""
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no folder"
    return _owner(link, str(folder)) or _why(found, str(folder))


def refused_within(entry: Path) -> str:
    """Of an entry: of all that is in it, links to other places and what is no plain file included."""
    for path in _all(entry):
        try:
            found = os.lstat(path)
        except OSError:  # it has just been removed
            continue
        name = os.path.relpath(path, entry.parent)
        if not stat.S_ISDIR(found.st_mode) and (path == str(entry) or not stat.S_ISREG(found.st_mode)):
            return f"{name} is {'a symbolic link' if stat.S_ISLNK(found.st_mode) else 'no plain file'}"
        if why := _why(found, name):
            return why
    return ""


def _all(entry: Path) -> Iterator[str]:
    yield str(entry)
    for folder, folders, files in os.walk(entry):
        for name in (*folders, *files):
            yield os.path.join(folder, name)


def _why(found: os.stat_result, name: str) -> str:
    if found.st_mode & OPEN:
        return f"others may write to {name} (chmod -R go-w)"
    return _owner(found, name)


def _owner(found: os.stat_result, name: str) -> str:
    return f"{name} belongs to another user" if found.st_uid != os.geteuid() else ""
