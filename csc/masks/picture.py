"""A mask as a picture: its tiles, the visible pairs inside, what tokens are, and the rank that computes each."""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch

from csc.errors import InputError, installing
from csc.kernels.mask import Mask, counts
from csc.masks.combine import begins

# --- A mask as a picture ---------------------------------------------------------------------------------------------
#
# It shows tiles, the visible pairs inside, what tokens are, and the rank that computes each tile.
#
# Terms
#   cell      the picture's unit: a tile, or an eighth (fourth, half) of one where tiles are few enough to look inside
#   visible   a cell of which at least half is visible; hidden: the rest of a tile that is computed; empty: a skipped
#             tile
#   runs      what tokens are along an axis: (start, end, type)
#
# A picture has at most 1,024 x 1,024 cells. Batch row 0 is drawn.


MOST_CELLS = 1024
EMPTY = 0  # codes of cells: 0, then 1 + 2 rank (hidden) and 2 + 2 rank (visible)
Runs = list[tuple[int, int, int]]


@dataclass(frozen=True)
class Picture:
    """What is drawn.

    cells: uint8 [rows, columns], codes. cell: tokens of a cell's side. tiles: full, partial, empty.
    loads: non-empty tiles of each rank, none without ranks. runs: of the queries and of the keys.
    starts: where documents start, of the queries and of the keys.
    """

    title: str
    queries: int
    keys: int
    block: int
    cell: float
    cells: torch.Tensor
    visible: int
    tiles: tuple[int, int, int]
    loads: tuple[int, ...]
    runs: tuple[Runs, Runs]
    starts: tuple[list[int], list[int]]

    @property
    def share(self) -> float:
        return self.visible / (self.queries * self.keys)

    @property
    def imbalance(self) -> float:
        """Tiles of the heaviest rank over the mean."""
        return max(self.loads) * len(self.loads) / max(sum(self.loads), 1)


def picture(
    title: str,
    mask: Mask,
    block: int = 128,
    owner: torch.Tensor | None = None,
    ranks: int | None = None,
    types: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> Picture:
    """The picture of a mask's row 0. owner: the rank of every block of queries, of `ranks` ranks. types, documents:
    int64 [T], of queries that are their own keys. InputError for more than 1,024 tiles a side.
    """
    tiles = counts(mask, block, block)[0]
    if max(tiles.shape) > MOST_CELLS:
        least = -(-max(mask.queries, mask.keys) // MOST_CELLS)
        raise InputError(
            f"{tiles.shape[0]} x {tiles.shape[1]} tiles are too many for a picture", title,
            f"Take blocks of {1 << (least - 1).bit_length()} tokens or more",
        )  # fmt: skip
    heights = (mask.queries - torch.arange(len(tiles)) * block).clamp(max=block)
    widths = (mask.keys - torch.arange(tiles.shape[1]) * block).clamp(max=block)
    full = tiles == heights[:, None] * widths
    visited = tiles > 0
    parts = next((n for n in (8, 4, 2) if max(tiles.shape) * n <= MOST_CELLS // 2 and block % n == 0), 1)
    rank = torch.zeros(len(tiles), dtype=torch.int64) if owner is None else owner.long()
    if parts == 1:
        seen = full
    else:
        cell = block // parts
        area = (
            (mask.queries - torch.arange(len(tiles) * parts) * cell).clamp(0, cell)[:, None]
            * (mask.keys - torch.arange(tiles.shape[1] * parts) * cell).clamp(0, cell)
        )  # fmt: skip
        fine = counts(mask, cell, cell)[0]
        seen = torch.zeros_like(area, dtype=torch.bool)
        seen[: fine.shape[0], : fine.shape[1]] = fine * 2 >= area[: fine.shape[0], : fine.shape[1]]
    code = 1 + 2 * rank.repeat_interleave(parts)[:, None] + seen.long()
    grown = visited.repeat_interleave(parts, 0).repeat_interleave(parts, 1)
    rows, columns = -(-mask.queries * parts // block), -(-mask.keys * parts // block)
    loads = torch.zeros(0 if owner is None else ranks or int(rank.max()) + 1, dtype=torch.int64)
    if owner is not None:
        loads.index_add_(0, rank, visited.sum(1))
    along = types[None] if types is not None else torch.zeros(1, mask.queries, dtype=torch.int64)
    other = along if mask.keys == mask.queries else torch.zeros(1, mask.keys, dtype=torch.int64)
    opened = [] if documents is None else begins(documents[None])[0].nonzero().flatten().tolist()[1:]
    return Picture(
        title, mask.queries, mask.keys, block, block / parts,
        torch.where(grown, code, EMPTY)[:rows, :columns].to(torch.int16),
        int(tiles.sum()), (int(full.sum()), int((visited & ~full).sum()), int((~visited).sum())), tuple(loads.tolist()),
        (_runs(along), _runs(other)), (opened, opened if mask.keys == mask.queries else []),
    )  # fmt: skip


def _runs(types: torch.Tensor) -> Runs:
    start = begins(types)[0].nonzero().flatten().tolist()
    return [(a, b, int(types[0, a])) for a, b in zip(start, [*start[1:], types.shape[1]])]


def ticks(tokens: int) -> tuple[int, Callable[[int], str]]:
    """The step of an axis with 4 to 8 marks, and what is written at one: 0, 8k, 16k (k = 1,024), or plain below 8k."""
    if tokens >= 8192:
        step = 1024
        while tokens / step > 8:
            step *= 2
        return step, lambda tokens: f"{tokens // 1024}k" if tokens else "0"
    step = 1
    for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000):
        step = factor
        if tokens / factor <= 8:
            break
    return step, lambda tokens: f"{tokens:,}"


# --- Colours and words of mask pictures ------------------------------------------------------------------------------
#
# Terms: a *type* is what a token is (csc.masks.gallery): -1 padding, 0 text, 1 image, 2 audio, 3 noised, others.
#
# Ranks: the eight hues that Okabe and Ito (2008) chose to be told apart with any kind of colour vision, brightened
# where they are dark, then hues evenly around the circle. Types are dark or grey, which no rank is.


ONE = "#2f6db5"  # without ranks
ANY = "#6b7580"  # of no rank, in a legend
RANKS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7fb8", "#b8a800")
HIDDEN = 0.30  # opacity of what is computed and hidden
TYPE_COLOURS = {-1: "#ffffff", 0: "#c3cbd4", 1: "#3a4a63", 2: "#94705f", 3: "#b3265e"}
TYPE_NAMES = {-1: "padding", 0: "text", 1: "image", 2: "audio", 3: "noised image"}
OTHERS = ("#2f8f83", "#6b7a1f", "#7c5cbf", "#a3602a")


def rank_colour(rank: int, ranks: int) -> str:
    """The colour of a rank's tiles; `ranks` 0 or 1: there is one colour."""
    if ranks <= 1:
        return ONE
    if ranks <= len(RANKS):
        return RANKS[rank]
    shade = (0.42, 0.58)[rank % 2]  # neighbours differ in brightness too
    red, green, blue = colorsys.hls_to_rgb(rank / ranks, shade, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def type_colour(kind: int) -> str:
    return TYPE_COLOURS.get(kind) or OTHERS[kind % len(OTHERS)]


def headline(picture: Picture) -> str:
    """Size, visible share and tiles in one line."""
    size = f"{picture.queries:,} tokens"
    if picture.queries != picture.keys:
        size = f"{picture.queries:,} queries, {picture.keys:,} keys"
    return f"{size}; {picture.share:.1%} of all pairs visible; tiles of {picture.block} x {picture.block}"


# --- A mask's picture as an SVG or PNG file, through matplotlib (the extra `plot`) -----------------------------------
#
# The *strips* beside the axes show what tokens are, with a notch where a document starts.


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
        for start in starts if len(starts) < 100 else ():
            line(start, color="white", linewidth=1.0)
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
        axis.set_ticks(places, [label(place) for place in places])
    axes.xaxis.tick_top()
    axes.tick_params(length=3, pad=13, labelsize=8.5, labelcolor=SOFT, color="#8d96a0")
    axes.tick_params(axis="both", length=0)
    axes.set_ylabel("queries", fontsize=9, fontweight="bold", color=INK, labelpad=4)
    place: Any = {"xy": (0, 1), "xycoords": "axes fraction", "xytext": (-12, 14), "textcoords": "offset points"}
    axes.annotate("keys", **place, fontsize=9, fontweight="bold", color=INK, ha="right")
    for spine in axes.spines.values():
        spine.set_color("#c8ced5")
    if max(picture.queries, picture.keys) / picture.block <= 64:
        for edge in range(picture.block, picture.keys, picture.block):
            axes.axvline(edge, color="white", linewidth=0.35)
        for edge in range(picture.block, picture.queries, picture.block):
            axes.axhline(edge, color="white", linewidth=0.35)


def _legend(figure: Any, picture: Picture, x: float, y: float, width: float, height: float) -> None:
    """Lines of a mark, a name and a number; inches from the left and the top."""
    from matplotlib.patches import Rectangle

    def text(x: float, y: float, words: str, **look: Any) -> None:
        look = {"fontsize": 8.5, "color": INK, **look}
        figure.text(x / width, 1 - y / height, words, **look)

    def box(x: float, y: float, wide: float, high: float, colour: Any) -> None:
        place = (x / width, 1 - y / height)
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
        text(x + 0.2, y, TYPE_NAMES.get(kind, f"type {kind}"))
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
