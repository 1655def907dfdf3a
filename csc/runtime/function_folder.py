"""Where compiled functions are kept: in a folder that is given, or in one of this process alone.

FunctionFolder.of(kept)         kept: None where nothing is kept; then the folder is removed with the object
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from csc.runtime.workers_ahead import WorkersAhead


@dataclass(frozen=True)
class FunctionFolder:
    """own: what removes it, if it is of this process alone. workers: of this process, which make functions there."""

    path: Path
    own: tempfile.TemporaryDirectory[str] | None = None
    workers: WorkersAhead = field(default_factory=WorkersAhead)

    @classmethod
    def of(cls, kept: Path | None) -> FunctionFolder:
        """The folder, which is there."""
        if kept is not None:
            return cls(kept)
        own = tempfile.TemporaryDirectory(prefix="csc-fused-")
        return cls(Path(own.name), own)
