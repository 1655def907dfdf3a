"""What is kept of a program whose functions were compiled: what each is called with, and what has become of it.

kept = KeptProgram(folder, key)
kept.forms() -> [Form] | None             that its functions are called with; None: nothing is known
kept.keep(rows, forms)                    nothing where that cannot be written
rows_of(folder, fingerprint) -> rows      of the latest start that compiled it
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from csc.runtime.compiled_function import write_whole
from csc.runtime.flat_tensors import Layout
from csc.runtime.inductor import FusedRow

log = logging.getLogger("csc")

PREFIX = 32  # of a fingerprint, in a key


@dataclass(frozen=True)
class CalledForm:
    """name: of a function, as rows have it. structure, layouts: of its arguments."""

    name: str
    structure: Any
    layouts: list[Layout]


@dataclass(frozen=True)
class KeptProgram:
    """key: of the program and all that its functions' keys depend on; it begins with the program's fingerprint."""

    folder: Path
    key: str

    @property
    def _file(self) -> Path:
        return self.folder / "functions" / f"{self.key}.program"

    def forms(self) -> list[CalledForm] | None:
        """Never an error of what is kept."""
        try:
            return [CalledForm(**one) for one in json.loads(self._file.read_text())["forms"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, rows: Sequence[FusedRow], forms: Sequence[CalledForm]) -> None:
        """That none could be written is no error of a step; where nothing was compiled there is no folder for them."""
        if not rows:
            return
        told = {"rows": [asdict(row) for row in rows], "forms": [asdict(form) for form in forms]}
        try:
            write_whole(self._file, json.dumps(told))
        except OSError as error:
            log.info("fuse: what was compiled is not told to later starts: %s", error)


def rows_of(folder: Path, fingerprint: str) -> list[FusedRow]:
    """Of the functions of a program that has made a step on this machine, as the latest start to compile them told."""
    files = sorted(folder.glob(f"functions/{fingerprint[:PREFIX]}-*.program"), key=lambda one: one.stat().st_mtime)
    for file in reversed(files):
        try:
            return [FusedRow(**row) for row in json.loads(file.read_text())["rows"]]
        except (OSError, ValueError, KeyError, TypeError):  # damaged, or gone
            continue
    return []
