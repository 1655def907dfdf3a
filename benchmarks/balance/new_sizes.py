"""How many programs a run still meets after its first steps: sizes of microbatches that no earlier step had.

new_sizes(names) -> {set: count}        of steps EARLY + 1 to STEPS of VLM-S, packed rows of multiples of 64 positions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.balance.lengths import SETS
from benchmarks.balance.models import TILE
from benchmarks.balance.simulated import Cell, prepared
from csc.balance.loader import Decider
from csc.balance.sample_costs import Costs, Lengths
from csc.simulation.pipeline import FIGURES, Loads, StageWork

EARLY, STEPS, SEED = 10, 20, 5
SHAPE = (4, 32, 1, 128)


def new_sizes(names: Sequence[str] = tuple(SETS)) -> dict[str, int]:
    """By set. Steps keep to the sizes that csc.balanced would know beforehand, whose programs are made ahead."""
    return {name: _new_sizes(name) for name in names}


def _new_sizes(name: str) -> int:
    found = SETS[name]()
    lengths = Lengths(found[:, 1], found[:, :1], ("tiles",))
    free = Decider(lengths, _costs(name, found), True, 1, SHAPE[1], 64)
    decider, random = free.with_shapes(SHAPE[3]).with_sizes(SHAPE[3]), np.random.default_rng(SEED)
    seen, new = set(decider.sizes), 0
    for number in range(STEPS):
        own = set(decider.decide(random.choice(len(found), SHAPE[3], replace=False).tolist()).sizes[0])
        new += len(own - seen) if number >= EARLY else 0
        seen |= own
    return new


def _costs(name: str, found: np.ndarray) -> Costs:
    """VLM-S by what csc.balanced counts: tiles, positions, pairs; the benchmark has tiles as the encoder and as
    the language model pay for them, text, and squares.
    """
    _, step, _ = prepared(Cell("VLM-S", "encoder frozen", name, SHAPE), np.ones((SHAPE[1], 4)))
    loads = step.pipeline.loads
    assert loads is not None
    stages = tuple(_by_positions(rates) for rates in loads.stages)
    messages = {
        channel: (one, tiles + seen - TILE * text, 0.0, text, squares)
        for channel, (one, tiles, seen, text, squares) in loads.messages.items()
    }
    pipeline = replace(step.pipeline, loads=Loads((), stages, messages))
    return Costs(pipeline, step.placement, step.orders, None, 0.0)


def _by_positions(rates: Sequence[StageWork]) -> tuple[StageWork, ...]:
    one, tiles, seen, text, squares = rates
    figures = {
        name: getattr(tiles, name) + getattr(seen, name) - TILE * getattr(text, name) for name in FIGURES
    }  # fmt: skip
    return one, replace(tiles, **figures), replace(one, **dict.fromkeys(FIGURES, 0.0)), text, squares
