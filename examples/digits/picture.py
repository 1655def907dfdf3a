"""Held-out images with what the model answered before and after training, as one SVG that any browser shows.

answers_picture(images, rows, digits, moments) -> str
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from data import GRID, IMAGE_SIZE, PIXEL_MEAN, PIXEL_STD, ROWS, VOCABULARY
from torch import Tensor

PIXEL, GAP, LINE, TOP = 5, 24, 20, 64
SIDE = IMAGE_SIZE * PIXEL
SHADES = 8  # of grey; a path for each
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1f24; } .title { font-weight: 600; font-size: 16px; }
.right { fill: #1a7f37; font-weight: 600; } .wrong { fill: #b42318; } .soft { fill: #59636e; }
"""


def words(tokens: Tensor) -> str:
    """What the model wrote, up to its <eos>: "3 7 1"."""
    names = {index: word for word, index in VOCABULARY.items()}
    written: list[str] = []
    for token in tokens.tolist():
        if names[token] in ("<eos>", "<pad>"):
            break
        written.append(names[token])
    return " ".join(written)


def answers_picture(images: Tensor, rows: Tensor, digits: Tensor, moments: Mapping[str, Tensor]) -> str:
    """The SVG's text.

    Args:
        images: [B, 3, 30, 30], as the model sees them.
        rows: [B], the row that each is asked for; it is framed.
        digits: [B, 9], what the cells show.
        moments: by the word for the moment ("before"), the tokens that the model answered, [B, 4].
    """
    width = GAP + len(images) * (SIDE + GAP)
    height = TOP + SIDE + LINE * (2 + len(moments)) + GAP
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" style="max-width:{width}px">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text class="title" x="{GAP}" y="28">Held-out handwriting: "read the ... row:"</text>',
        f'<text class="soft" x="{GAP}" y="48">framed: the row that is asked for</text>',
    ]
    truths = digits.view(-1, GRID, GRID)
    for index in range(len(images)):
        row, left = int(rows[index]), GAP + index * (SIDE + GAP)
        truth = " ".join(map(str, truths[index, row].tolist()))
        drawn += _scan(images[index, 0], left)
        third = SIDE // GRID
        drawn.append(
            f'<rect x="{left}" y="{TOP + row * third}" width="{SIDE}" height="{third}" fill="none" '
            'stroke="#0969da" stroke-width="3"/>'
        )
        lines = [("soft", f"{ROWS[row]} row: {truth}")]
        for moment, answers in moments.items():
            written = words(answers[index])
            lines.append(("right" if written == truth else "wrong", f"{moment}: {written or 'nothing'}"))
        drawn += _lines(lines, left)
    return "\n".join([*drawn, "</svg>", ""])


def _scan(pixels: Tensor, left: int) -> list[str]:
    """An image as squares of ink: one path for each shade of grey."""
    ink = ((pixels * PIXEL_STD + PIXEL_MEAN).clamp(0, 1) * SHADES).round().int()
    drawn = [f'<rect x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="#f3f4f6"/>']
    for shade in range(1, SHADES + 1):
        places = (ink == shade).nonzero().tolist()
        if places:
            squares = "".join(f"M{left + x * PIXEL} {TOP + y * PIXEL}h{PIXEL}v{PIXEL}h-{PIXEL}z" for y, x in places)
            drawn.append(f'<path fill="#1b1f24" fill-opacity="{shade / SHADES:.2f}" d="{squares}"/>')
    return drawn


def _lines(lines: Sequence[tuple[str, str]], left: int) -> list[str]:
    first = TOP + SIDE + LINE
    return [
        f'<text class="{kind}" x="{left}" y="{first + number * LINE}">{html.escape(text)}</text>'
        for number, (kind, text) in enumerate(lines)
    ]
