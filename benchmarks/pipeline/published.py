"""Predicted against published: what others measured, in the same settings.

    python -m benchmarks.pipeline.published        [Row]: measure() -> rows, error(rows) -> geometric mean

Rows are made by benchmarks.pipeline.published_fsdp (torchtitan) and benchmarks.pipeline.published_megatron. No figure
of the model is fitted to what is published.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """published, predicted: in `unit`, of one GPU. parts: seconds of the predicted step by what takes them."""

    name: str
    unit: str
    published: float
    predicted: float
    parts: dict[str, float]

    @property
    def error(self) -> float:
        """predicted / published - 1."""
        return self.predicted / self.published - 1


def measure() -> list[Row]:
    """A minute: a capture and a plan for each row."""
    from benchmarks.pipeline import published_fsdp, published_megatron

    return [*published_fsdp.measure(), *published_megatron.measure()]


def error(rows: Sequence[Row]) -> float | None:
    """By which factor predictions are off on geometric mean, minus 1, whichever way; None of nothing."""
    logs = [abs(math.log(row.predicted / row.published)) for row in rows]
    return math.exp(sum(logs) / len(logs)) - 1 if logs else None


if __name__ == "__main__":
    found = measure()
    print(json.dumps([asdict(row) | {"error": row.error} for row in found], indent=1), error(found))
