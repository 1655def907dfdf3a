"""Costs of a model by hand: the first rank pays for units, the others for positions and pairs."""

from __future__ import annotations

from dataclasses import replace

from csc.balance.sample_costs import Costs
from csc.planning.schedules import SCHEDULES
from csc.planning.schedules.work import orders_of
from csc.simulation.pipeline import Link, Loads, Network, Pipeline, StageWork

NOTHING = StageWork(0.0)


def costs(ranks: int, microbatches: int, room: float | None = None) -> Costs:
    """Of features (1, units, their squares, positions, pairs). room: bytes of each rank."""
    one = StageWork(1e-4, 1e-4, 1e-4)
    unit = StageWork(3e-3, saved=1e6)
    position = StageWork(2e-6, 2e-6, 2e-6, saved=4e3, stashed=4e3)
    pair = StageWork(2e-10, 4e-10)
    encoder = (replace(one, backward_input=0.0, backward_weight=0.0), unit, NOTHING, NOTHING, NOTHING)
    rates = (encoder, *((one, NOTHING, NOTHING, position, pair),) * (ranks - 1))
    stages = tuple(StageWork(1e-2, 1e-2 * (s > 0), 1e-2 * (s > 0), s > 0, s > 0, saved=1e7) for s in range(ranks))
    messages = {("F", s, s + 1): 1e6 for s in range(ranks - 1)} | {("B", s + 1, s): 1e6 for s in range(1, ranks - 1)}
    loads = Loads((), rates, dict.fromkeys(messages, (0.0, 0.0, 0.0, 8e3, 0.0)))
    pipeline = Pipeline(stages, messages, Network(Link(1e-5, 5e10)), loads)
    schedule = SCHEDULES["1f1b"](replace(pipeline, loads=None), range(ranks), microbatches)
    limits = None if room is None else (room,) * ranks
    return Costs(pipeline, tuple(range(ranks)), tuple(map(tuple, orders_of(schedule))), limits, 0.0)
