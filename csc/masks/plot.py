"""A mask's picture as an SVG or PNG file, through matplotlib (the extra `plot`).

    plot(picture, path, form) -> None       form: "svg" or "png" (150 dots an inch)

The *strips* beside the axes show what tokens are, with a notch where a document starts.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch

from csc.errors import InputError, installing
from csc.masks.colours import ANY, HIDDEN, headline, rank_colour, type_colour, type_name
from csc.masks.picture import Picture, ticks

FIELD = "#f3f5f7"
FITS = "max-width: 100%; height: auto"  # a picture shrinks with its window
INK, SOFT = "#1b1f24", "#5b6570"


def plot(picture: Picture, path: Path, form: Literal["svg", "png"]) -> None:
    """Write the file. InputError where matplotlib is missing or the file cannot be written."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "a picture needs matplotlib, which is not installed", str(path), installing("matplotlib")
        ) from error
    longest = max(picture.queries, picture.keys)
    high, wide = (max(6.4 * size / longest, 1.0) for size in (picture.queries, picture.keys))
    width, height = wide + 3.3, max(high + 1.2, 4.4)
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    left, top = 0.75, 1.0
    axes = figure.add_axes((left / width, 1 - (top + high) / height, wide / width, high / height))
    extent = (0, picture.cells.shape[1] * picture.cell, picture.cells.shape[0] * picture.cell, 0)
    axes.imshow(_pixels(picture), extent=extent, interpolation="nearest", aspect="auto")
    axes.set_xlim(0, picture.keys)
    axes.set_ylim(picture.queries, 0)
    _axes(axes, picture)
    strip, gap = 0.09, 0.05
    beside = figure.add_axes(
        ((left - gap - strip) / width, 1 - (top + high) / height, strip / width, high / height), sharey=axes
    )
    above = figure.add_axes((left / width, 1 - (top - gap) / height, wide / width, strip / height), sharex=axes)
    for axis, runs, starts in zip((beside, above), picture.runs, picture.starts):
        span, line = (axis.axhspan, axis.axhline) if axis is beside else (axis.axvspan, axis.axvline)
        for start, end, kind in runs:
            span(start, end, color=type_colour(kind), linewidth=0)
        for at in starts if len(starts) < 100 else ():
            line(at, color="white", linewidth=1.0)
        axis.set_axis_off()
    figure.text(0.2 / width, 1 - 0.3 / height, picture.title, fontsize=12, fontweight="bold", color=INK)
    figure.text(0.2 / width, 1 - 0.52 / height, headline(picture), fontsize=8.5, color=SOFT)
    _legend(figure, picture, left + wide + 0.3, top, width, height)
    drawn = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "csc"}):  # text stays text; every run, the same file
        figure.savefig(drawn, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    content = drawn.getvalue()
    if form == "svg":
        content = content.replace(b"<svg ", f'<svg role="img" style="{FITS}" '.encode(), 1)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InputError(f"it cannot be written: {error.strerror}", str(path)) from error


def _rgb(colour: str, opacity: float = 1.0) -> list[float]:
    """The colour on the field of empty tiles."""
    return [
        opacity * int(colour[i : i + 2], 16) / 255 + (1 - opacity) * int(FIELD[i : i + 2], 16) / 255 for i in (1, 3, 5)
    ]


def _pixels(picture: Picture) -> Any:
    ranks = max(len(picture.loads), 1)
    table = [_rgb(FIELD)]
    for rank in range(ranks):
        colour = rank_colour(rank, len(picture.loads))
        table += [_rgb(colour, HIDDEN), _rgb(colour)]
    return torch.tensor(table)[picture.cells.long()].numpy()


def _axes(axes: Any, picture: Picture) -> None:
    for axis, tokens in ((axes.xaxis, picture.keys), (axes.yaxis, picture.queries)):
        step, label = ticks(tokens)
        places = list(range(0, tokens + 1, step))
        axis.set_ticks(places, [label(at) for at in places])
    axes.xaxis.tick_top()
    axes.tick_params(length=3, pad=13, labelsize=8.5, labelcolor=SOFT, color="#8d96a0")
    axes.tick_params(axis="both", length=0)
    axes.set_ylabel("queries", fontsize=9, fontweight="bold", color=INK, labelpad=4)
    place: Any = {"xy": (0, 1), "xycoords": "axes fraction", "xytext": (-12, 14), "textcoords": "offset points"}
    axes.annotate("keys", **place, fontsize=9, fontweight="bold", color=INK, ha="right")
    for spine in axes.spines.values():
        spine.set_color("#c8ced5")
    if max(picture.queries, picture.keys) / picture.block <= 64:
        for at in range(picture.block, picture.keys, picture.block):
            axes.axvline(at, color="white", linewidth=0.35)
        for at in range(picture.block, picture.queries, picture.block):
            axes.axhline(at, color="white", linewidth=0.35)


def _legend(figure: Any, picture: Picture, x: float, y: float, width: float, height: float) -> None:
    """Lines of a mark, a name and a number; inches from the left and the top."""
    from matplotlib.patches import Rectangle

    def text(at: float, y: float, words: str, **look: Any) -> None:
        look = {"fontsize": 8.5, "color": INK, **look}
        figure.text(at / width, 1 - y / height, words, **look)

    def box(at: float, y: float, wide: float, high: float, colour: Any) -> None:
        place = (at / width, 1 - y / height)
        figure.add_artist(Rectangle(place, wide / width, high / height, facecolor=colour, transform=figure.transFigure))

    right, row = x + 2.0, 0.2
    colour = ANY if picture.loads else rank_colour(0, 0)
    total = max(sum(picture.tiles), 1)
    y += 0.1
    text(x, y, "tiles", fontweight="bold")
    for name, number, look in zip(
        ("full", "partial", "empty"), picture.tiles, (_rgb(colour), _rgb(colour, HIDDEN), _rgb(FIELD))
    ):
        y += row
        box(x, y, 0.12, 0.12, look)
        text(x + 0.2, y, name)
        text(right, y, f"{number:,} ({number / total:.0%})", ha="right", color=SOFT)
    kinds: dict[int, int] = {}
    for start, end, kind in picture.runs[0]:
        kinds[kind] = kinds.get(kind, 0) + end - start
    y += row + 0.12
    text(x, y, "tokens", fontweight="bold")
    for kind in sorted(kinds):
        y += row
        box(x, y, 0.12, 0.12, type_colour(kind))
        text(x + 0.2, y, type_name(kind))
        text(right, y, f"{kinds[kind] / picture.queries:.0%}", ha="right", color=SOFT)
    if picture.starts[0]:
        y += row
        text(x, y, f"{len(picture.starts[0]) + 1:,} documents", color=SOFT)
    if not picture.loads:
        return
    y += row + 0.12
    text(x, y, "tiles by rank", fontweight="bold")
    row = min(row, max((height - y - 0.5) / len(picture.loads), 0.05))
    for rank, load in enumerate(picture.loads):
        y += row
        long = 1.1 * load / max(max(picture.loads), 1)
        box(x + 0.25, y, long, min(0.12, row * 0.9), rank_colour(rank, len(picture.loads)))
        if row >= 0.12 or rank % 4 == 0:
            text(x + 0.17, y, str(rank), ha="right", color=SOFT)
            text(right, y, f"{load:,}", ha="right", color=SOFT)
    text(x, y + 0.24, f"heaviest rank: {picture.imbalance:.2f} × mean", color=SOFT)
