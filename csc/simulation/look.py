"""How runs look in pictures and figures: colours of actions, seconds and bytes as text.

Terms: the *level* of a stage is its place among the stages of its rank; later chunks are drawn lighter. The colours
of F, B, W, BW and REDUCE are those of Okabe and Ito (2008), which readers with any kind of colour vision tell apart;
they also differ in brightness.

    colour(kind, level) -> (fill, ink)      levels(timeline) -> {stage: level}      top_of(timelines, limit) -> bytes
    seconds_text(0.0123) -> "12.3 ms"       bytes_text(3 * 2**30) -> "3.00 GiB"
"""

from __future__ import annotations

from collections.abc import Sequence

from csc.simulation.timeline import Timeline

BASE = {
    "F": "#0072b2",
    "B": "#e69f00",
    "W": "#009e73",
    "BW": "#f0e442",
    "REDUCE": "#cc79a7",
    "GATHER": "#56b4e9",
    "FREE": "#9aa1a9",
    "SEND": "#6b747e",
    "RECV": "#9aa1a9",
}
MEANING = {
    "F": "forward",
    "B": "input gradients",
    "W": "weight gradients",
    "BW": "both, region by region",
    "REDUCE": "gradient sum over ranks",
    "GATHER": "starting to make parameters whole",
    "FREE": "dropping whole parameters",
    "SEND": "waiting in a send",
    "RECV": "waiting in a receive",
}
TINTS = (0.0, 0.35, 0.55, 0.7)  # share of white at each level
LIMIT = "#d55e00"
MEMORY = "#8a7fb8"
NUMBER = "number in a bar: its microbatch"
GAP = "no bar: the rank is idle"
NOT_RECORDED = "not recorded"  # of what a measured run does not know


def colour(kind: str, level: int = 0) -> tuple[str, str]:
    """Fill of a box and the ink that can be read on it, black or white."""
    share = TINTS[min(level, len(TINTS) - 1)]
    parts = [int(BASE[kind][i : i + 2], 16) for i in (1, 3, 5)]
    parts = [round(part + (255 - part) * share) for part in parts]
    linear = [(part / 255 / 12.92) if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in parts]
    brightness = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]  # WCAG 2 relative luminance
    return "#" + "".join(f"{part:02x}" for part in parts), "#ffffff" if brightness < 0.18 else "#000000"


def levels(timeline: Timeline) -> dict[int, int]:
    """The level of each stage: its place among the stages of its rank."""
    found: dict[int, int] = {}
    for events in timeline.ranks:
        stages = sorted({event.action.stage for event in events if event.action.computes})
        found.update((stage, level) for level, stage in enumerate(stages))
    return found


def top_of(timelines: Sequence[Timeline], limit: float | None) -> float:
    """Bytes at the top of a memory lane: the limit, where what is used is not lost below it, else the largest peak."""
    peak = max((size for one in timelines for size in one.peak_memory), default=0.0) or 1.0
    return max(peak, limit) if limit is not None and limit <= 4 * peak else peak


def unit(span: float) -> tuple[float, str]:
    """The unit in which times up to `span` seconds read well, and its seconds."""
    for size, name in ((1.0, "s"), (1e-3, "ms")):
        if span >= 2 * size:
            return size, name
    return 1e-6, "µs"


def seconds_text(seconds: float) -> str:
    """Three digits or more, in s, ms or µs."""
    size, name = unit(seconds)
    return f"{_digits(seconds / size)} {name}"


def bytes_text(size: float) -> str:
    """Three digits or more, in B, KiB, MiB, GiB or TiB."""
    for name in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if name == "B" else f"{_digits(size)} {name}"
        size /= 1024
    return f"{_digits(size)} TiB"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
