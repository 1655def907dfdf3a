"""A directory that is made whole or not at all.

Terms: it is made in a *stage*, a hidden folder within it; what is done is moved up, in the order in which it was
written. What a stage that was cut off has left is no content, and the next one removes it.

with staged(out) as stage: ...                   InputError if something is in `out`, or another process is at it
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from csc.checkpoints.turns import alone_in
from csc.errors import InputError
from csc.runtime.weights import flushed, make_directory

STAGE = ".converting"


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Path]:
    """The stage. Whatever is raised meanwhile leaves `out` as it was."""
    if out.exists() and (not out.is_dir() or any(one.name != STAGE for one in out.iterdir())):
        raise InputError("something is there already", str(out), "convert to a directory that is not there yet")
    was_there, stage = out.exists(), out / STAGE
    make_directory(stage)
    with alone_in(stage, wait=False):
        _empty(stage)
        try:
            yield stage
            for made in sorted(stage.iterdir(), key=lambda one: (one.stat().st_mtime_ns, one.name)):
                os.rename(made, out / made.name)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            if not was_there:
                with contextlib.suppress(OSError):
                    out.rmdir()  # which it is not if something was made
    flushed(out)


def _empty(stage: Path) -> None:
    for left in list(stage.iterdir()):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()
