"""Lengths of samples: two public sets, their mixture, and a synthetic heavy tail.

    SETS: name -> function -> [sample][tiles, tokens]
    drawn(lengths, count, seed) -> [sample][feature]       of benchmarks.balance.models.FEATURES

What the public sets are and where they come from: data/NOTICE.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.balance.models import TILE

Floats = npt.NDArray[np.float64]
FOLDER = Path(__file__).parent / "data"
FILES = {"AI2D": "ai2d_train_12k.npz", "ChartQA": "chartqa_train_18k.npz"}
TAIL = 20_000


def _of_file(name: str) -> Floats:
    with np.load(FOLDER / FILES[name], allow_pickle=False) as found:
        return np.stack([found["tiles"], found["tokens"]], axis=1).astype(np.float64)


def _mixture() -> Floats:
    """Both, equally likely."""
    one, other = (_of_file(name) for name in FILES)
    least = min(len(one), len(other))
    generator = np.random.default_rng(0)
    return np.concatenate([generator.permutation(part)[:least] for part in (one, other)])


def _tail() -> Floats:
    """Tiles lognormal(ln 1.6, 1), text lognormal(ln 260, .75). At most 13 tiles: twelve and a small whole image, as
    InternVL's processor makes them.
    """
    generator = np.random.default_rng(1)
    tiles = np.clip(np.rint(generator.lognormal(np.log(1.6), 1.0, TAIL)), 1, 13)
    text = np.clip(np.rint(generator.lognormal(np.log(260), 0.75, TAIL)), 16, 4096)
    return np.stack([tiles, tiles * TILE + text], axis=1)


SETS: dict[str, Callable[[], Floats]] = {
    "AI2D": lambda: _of_file("AI2D"),
    "ChartQA": lambda: _of_file("ChartQA"),
    "mixture": _mixture,
    "tail": _tail,
}


def drawn(lengths: Floats, count: int, seed: int) -> Floats:
    """A step's samples."""
    chosen = lengths[np.random.default_rng(seed).choice(len(lengths), count, replace=False)]
    tiles, tokens = chosen.T
    return np.stack([tiles, tiles, tokens - tiles * TILE, tokens**2], axis=1)
