"""Files that may not be what csc wrote, read with care: damaged, changed, or something else under the name.

Terms: *fail* makes the error to raise out of a sentence that says what is wrong.

    read_text(file, fail) -> str          a regular file of UTF-8, of at most LONGEST bytes
    read_json(file, fail) -> value        with no key twice, and no deeper than Python reads
    checked_file(file, fail) -> file      nothing that would block whoever opens it: a pipe, a device, a directory
    within(directory, name, fail) -> file of a name that stands in a list: it does not lead out of the directory
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

LONGEST = 2**28  # bytes; the program.json of 1,024 ranks has some 10**7

Fail = Callable[[str], Exception]


def checked_file(file: Path, fail: Fail) -> Path:
    """The path, if a regular file is there."""
    try:
        mode = os.stat(file).st_mode
    except FileNotFoundError:
        raise fail("there is no such file") from None
    except (OSError, ValueError) as error:
        raise fail(f"it cannot be read: {error}") from None
    if not stat.S_ISREG(mode):
        raise fail("it is not a file")
    return file


def read_text(file: Path, fail: Fail) -> str:
    """The text of a file."""
    size = checked_file(file, fail).stat().st_size
    if size > LONGEST:
        raise fail(f"it has {size} bytes, and at most {LONGEST} are read")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise fail(f"it cannot be read as text: {error}") from None


def read_json(file: Path, fail: Fail) -> Any:
    """The value in a JSON file."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(found)
        if len(table) < len(found):
            names = [name for name, _ in found]
            twice = next(name for name in table if names.count(name) > 1)
            raise ValueError(f"key {twice[:60]!r} stands there twice")
        return table

    text = read_text(file, fail)
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except ValueError as error:
        raise fail(f"it is not JSON: {error}") from None
    except RecursionError:
        raise fail("it is not JSON that csc wrote: it is nested too deeply") from None


def within(directory: Path, name: str, fail: Fail) -> Path:
    """A file named in a list. Its own link may lead elsewhere, as in a Hugging Face cache; its folder may not."""
    parts = PurePosixPath(name).parts
    if not parts or "\0" in name or PurePosixPath(name).is_absolute() or ".." in parts:
        raise fail(f"it lists {name!r:.80}, which is no name of a file within it")
    file = directory / name
    if len(parts) > 1 and not file.parent.resolve().is_relative_to(directory.resolve()):
        raise fail(f"it lists {name!r:.80}, which a link leads out of it")
    return file
