"""Microbatches that differ, for the property tests of simulator and schedulers; and what they take, counted apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from csc.ir.schedule import Message
from csc.simulation.pipeline import FIGURES, Loads, Pipeline, StageWork

COUNTS = st.sampled_from([0.5, 1.0, 2.0])


def _share(stage: StageWork, share: float) -> StageWork:
    figures: dict[str, Any] = {name: share * getattr(stage, name) for name in FIGURES}
    return replace(stage, **figures)


@st.composite
def loads(draw: st.DrawFn, pipeline: Pipeline, microbatches: int) -> Loads:
    """Of multiples of one microbatch, or of two features that stages and messages weigh differently."""
    if draw(st.booleans()):
        factors = [draw(COUNTS) for _ in range(microbatches)]
        return Loads.scaled(pipeline.stages, pipeline.messages, factors)
    features = tuple((draw(COUNTS), draw(COUNTS)) for _ in range(microbatches))
    stages = []
    for stage in pipeline.stages:
        shares = [draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in range(2)]
        stages.append(tuple(_share(stage, share) for share in shares))
    messages = {
        channel: (size * draw(COUNTS), size * draw(st.sampled_from([0.0, 1.0])))
        for channel, size in sorted(pipeline.messages.items())
    }
    return Loads(features, tuple(stages), messages)


def taken(pipeline: Pipeline, figure: str, stage: int, microbatch: int) -> float:
    """A figure of a stage for one microbatch, feature by feature."""
    if pipeline.loads is None:
        return float(getattr(pipeline.stages[stage], figure))
    total = 0.0
    for feature, count in enumerate(pipeline.loads.features[microbatch]):
        total += count * getattr(pipeline.loads.stages[stage][feature], figure)
    return total


def taken_for(pipeline: Pipeline, kind: str, stage: int, microbatch: int) -> float:
    """Seconds of F, B, W or BW."""
    figures = {"F": ["forward"], "B": ["backward_input"], "W": ["backward_weight"]}
    return sum(taken(pipeline, figure, stage, microbatch) for part in kind for figure in figures[part])


def sent(pipeline: Pipeline, channel: Message, microbatch: int) -> float:
    """Bytes of a message of one microbatch."""
    if pipeline.loads is None:
        return pipeline.messages[channel]
    return sum(
        count * rate for count, rate in zip(pipeline.loads.features[microbatch], pipeline.loads.messages[channel])
    )
