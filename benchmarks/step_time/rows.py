"""What a case came to, by rival; ratios of two rivals; rows on disk, so that a run that was cut off goes on.

Terms
  process   a case is measured in one or several, one after the other: what is chance in one of them (where its memory
            lies) is the same for all of its steps
  pair      steps of two rivals in the same round

    row.ratio(name, other) -> Ratio, or None if one of both is not there
    kept(file) -> {case: Row}        keep(file, row)        None: no file
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.step_time.cases import Case


@dataclass(frozen=True)
class Timed:
    """rounds_ms: CPU time of each step, by process. first_s: wall seconds from the model to the end of its first step,
    in the first process, on empty caches; warm_s: in one that has what it kept. peak_mb: of a step, the median of
    processes. difference: the largest relative one of loss and gradients to eager.
    """

    rounds_ms: tuple[tuple[float, ...], ...]
    first_s: float
    peak_mb: float
    difference: float
    warm_s: float | None = None

    @property
    def cpu_ms(self) -> float:
        return median(median(process) for process in self.rounds_ms)


@dataclass(frozen=True)
class Ratio:
    """middle: the median over processes of the median of pairs. low, high: of those medians the least and the most."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    case: Case
    rivals: Mapping[str, Timed]

    def ratio(self, name: str, other: str) -> Ratio | None:
        """The time of `name` over that of `other`."""
        if name not in self.rivals or other not in self.rivals:
            return None
        both = zip(self.rivals[name].rounds_ms, self.rivals[other].rounds_ms, strict=True)
        medians = [median(own / its for own, its in zip(*process, strict=True)) for process in both]
        return Ratio(median(medians), min(medians), max(medians))


def kept(file: Path | None) -> dict[Case, Row]:
    """A line that was cut off is none."""
    if file is None or not file.exists():
        return {}
    rows = [_row(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {row.case: row for row in rows}


def keep(file: Path | None, row: Row) -> None:
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(row)) + "\n")


def _row(line: str) -> Row:
    found = json.loads(line)
    rivals = {
        name: Timed(**{**one, "rounds_ms": tuple(map(tuple, one["rounds_ms"]))})
        for name, one in found["rivals"].items()
    }
    return Row(Case(**found["case"]), rivals)
