"""Runs pieces, keeps what each gave, and takes up where an earlier run ended.

Outcome       of one piece, as JSON in DIR/NAME.json
outcomes(directory, device) -> {name: Outcome}     those that are there, of this device and these versions
run(piece, directory, device, given_up) -> Outcome
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event

import torch

from benchmarks.gpu.pieces import Piece
from csc import cores

LOOK = 0.3  # seconds from one look whether a piece is given up to the next
TAIL = 6000  # characters of what a piece wrote
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """code: what the command ended with; None: it was stopped after its minutes. tail: the end of what it wrote."""

    name: str
    device: str
    torch: str
    date: str
    code: int | None
    seconds: float
    tail: str

    @property
    def is_good(self) -> bool:
        return self.code == 0

    @property
    def verdict(self) -> str:
        return "good" if self.is_good else "stopped" if self.code is None else f"exit {self.code}"


def outcomes(directory: Path, device: str) -> dict[str, Outcome]:
    """By name. What cannot be read, or is of another device or another torch, counts as not run."""
    found = {}
    for file in sorted(directory.glob("*.json")):
        with suppress(ValueError, TypeError):
            outcome = Outcome(**json.loads(file.read_text()))
            if (outcome.device, outcome.torch) == (device, torch.__version__):
                found[outcome.name] = outcome
    return found


def run(piece: Piece, directory: Path, device: str, given_up: Event) -> Outcome:
    """Run a piece with its children, end them all after its minutes or once it is given up, and keep the outcome."""
    start = time.perf_counter()
    own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "140"}
    environment = cores.environment(cores.here()) | dict(piece.environment) | own
    process = subprocess.Popen(
        piece.command, cwd=ROOT, env=environment, text=True, errors="replace", start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    code: int | None
    while True:
        try:
            written, _ = process.communicate(timeout=LOOK)
            code = process.returncode
            break
        except subprocess.TimeoutExpired:
            if given_up.is_set() or time.perf_counter() - start > piece.minutes * 60:
                os.killpg(process.pid, signal.SIGKILL)
                written, code = process.communicate()[0], None
                break
    spent = round(time.perf_counter() - start, 1)
    date = time.strftime("%Y-%m-%d")
    outcome = Outcome(piece.name, device, torch.__version__, date, code, spent, written[-TAIL:])
    directory.mkdir(parents=True, exist_ok=True)
    place = directory / f"{re.sub(r'[^A-Za-z0-9]+', '_', piece.name)}.json"
    part = place.with_suffix(".part")
    part.write_text(json.dumps(asdict(outcome), indent=1))
    part.replace(place)
    return outcome
