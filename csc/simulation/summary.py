"""What a table says about runs: one row each, as text.

COLUMNS      rows(timelines, bound, limit) -> [[text for each column]]
"""

from __future__ import annotations

from collections.abc import Sequence

from csc.simulation.look import NOT_RECORDED, bytes_text, seconds_text
from csc.simulation.timeline import Timeline

COLUMNS = (
    "run",
    "ranks",
    "makespan",
    "against the first",
    "over the bound",
    "bubble",
    "peak memory",
    "peak activations",
)


def rows(timelines: Sequence[Timeline], bound: float | None = None, limit: float | None = None) -> list[list[str]]:
    """A row per timeline, by COLUMNS. bound: lower bound of the makespan in seconds; limit: bytes of a rank."""
    return [_row(timeline, timelines[0], bound, limit) for timeline in timelines]


def _row(timeline: Timeline, first: Timeline, bound: float | None, limit: float | None) -> list[str]:
    shares = timeline.bubble_share or (0.0,)
    worst = max(range(len(shares)), key=lambda rank: shares[rank])
    return [
        timeline.name,
        str(len(timeline.ranks)),
        seconds_text(timeline.makespan),
        f"{timeline.makespan / first.makespan:.3f} ×" if timeline is not first and first.makespan > 0 else "",
        f"{timeline.makespan / bound:.3f} ×" if bound else "",
        f"mean {sum(shares) / len(shares):.1%}, worst {shares[worst]:.1%} (rank {worst})",
        _peak(timeline.peak_memory, limit) if timeline.records_memory else NOT_RECORDED,
        _peak(timeline.peak_activations, None) if timeline.records_memory else NOT_RECORDED,
    ]


def _peak(sizes: Sequence[float], limit: float | None) -> str:
    if not sizes:
        return ""
    rank = max(range(len(sizes)), key=lambda r: sizes[r])
    over = ", over the limit" if limit is not None and sizes[rank] > limit else ""
    return f"{bytes_text(sizes[rank])} (rank {rank}){over}"
