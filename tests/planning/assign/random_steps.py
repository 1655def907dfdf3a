"""Random steps: samples of a few features on a chain of stages that pay for other ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from csc.ir.schedule import Message, Schedule
from csc.planning.assign.step import SampleCosts
from csc.planning.schedules import SCHEDULES
from csc.planning.schedules.work import orders_of
from csc.simulation.pipeline import Link, Loads, Network, Pipeline, StageWork

RATES = st.sampled_from([0.0, 0.25, 1.0, 2.0])


@st.composite
def steps(draw: st.DrawFn, most_samples: int = 12, most: int = 4) -> tuple[SampleCosts, Schedule]:
    """With the schedule that its orders are of."""
    ranks, microbatches, replicas = draw(st.integers(1, 3)), draw(st.integers(1, most)), draw(st.integers(1, 2))
    count = draw(st.integers(replicas * microbatches, max(most_samples, replicas * microbatches)))
    number = st.sampled_from([0.0, 1.0, 2.0, 5.0, 9.0])
    samples = np.array([[draw(number), draw(number)] for _ in range(count)])
    stages, messages = [], {}
    for s in range(ranks):
        rates = tuple(
            StageWork(draw(RATES), draw(RATES), draw(RATES), saved=draw(RATES), stashed=draw(RATES)) for _ in range(3)
        )
        stages.append((replace(rates[0], forward=rates[0].forward + 0.5), *rates[1:]))
        if s:
            for channel in (("F", s - 1, s), ("B", s, s - 1)):
                messages[channel] = (0.0, draw(RATES), 0.0)
    pipeline = of_rates(tuple(stages), messages)
    schedule = SCHEDULES["1f1b"](replace(pipeline, loads=None), range(ranks), microbatches)
    orders = tuple(map(tuple, orders_of(schedule)))
    multiple = draw(st.sampled_from([(1.0, 1.0), (1.0, 4.0)]))
    return SampleCosts(samples, pipeline, tuple(range(ranks)), orders, replicas, microbatches, multiple), schedule


def of_rates(stages: tuple[tuple[StageWork, ...], ...], messages: dict[Message, tuple[float, ...]]) -> Pipeline:
    """A pipeline whose mean microbatch has one of each feature."""
    return Pipeline(
        tuple(StageWork(1.0, 1.0, 1.0) for _ in stages),
        dict.fromkeys(messages, 1.0),
        Network(Link(0.25, 4.0)),
        Loads((), stages, messages),
    )
