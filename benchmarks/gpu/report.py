"""The report of what ran on a GPU, as Markdown.

report(pieces, found, device, count) -> text
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping, Sequence

import torch

from benchmarks.gpu.pieces import PYTHON, Piece
from benchmarks.gpu.running import Outcome


def report(pieces: Sequence[Piece], found: Mapping[str, Outcome], device: str, count: int) -> str:
    """A table of all pieces, then the end of what each wrote."""
    dates = sorted({one.date for one in found.values()})
    when = " to ".join(dict.fromkeys(dates[:1] + dates[-1:]))
    lines = [
        f"# On a GPU: {device}, {count} of them", "",
        f"torch {torch.__version__}, Python {platform.python_version()}, {when}, `make gpu`.", "",
        "| piece | shows | outcome | seconds |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for piece in pieces:
        one = found.get(piece.name)
        verdict = "not run" if one is None else one.verdict
        if piece.devices > count:
            verdict = f"takes {piece.devices} GPUs"
        lines.append(f"| {piece.name} | {piece.shows} | {verdict} | {'' if one is None else f'{one.seconds:.0f}'} |")
    for piece in pieces:
        if piece.name in found:
            command = shlex.join("python" if word == PYTHON else word for word in piece.command)
            lines += ["", f"## {piece.name}", "", f"`{command}`", "", "```", found[piece.name].tail.strip(), "```"]
    return "\n".join(lines) + "\n"
