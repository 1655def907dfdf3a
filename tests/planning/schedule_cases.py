"""Pipelines for the tests of schedules: uniform chains, and random ones of every kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from csc.ir.schedule import Message
from csc.simulation.pipeline import Link, Network, Pipeline, StageWork
from tests.simulation.random_loads import loads


def chain(stages: int, stage: StageWork) -> Pipeline:
    """Equal stages in a row, messages that take no time."""
    messages: dict[Message, float] = {}
    for s in range(stages - 1):
        messages["F", s, s + 1] = messages["B", s + 1, s] = 0.0
    return Pipeline((stage,) * stages, messages)


@dataclass(frozen=True)
class Case:
    pipeline: Pipeline
    placement: tuple[int, ...]
    microbatches: int


TIMES = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.3, 2.0, 3.7])
SIZES = st.sampled_from([0.0, 1.0, 1.5, 4.0])


@st.composite
def pipelines(draw: st.DrawFn, most_stages: int = 6) -> Pipeline:
    """A random DAG of unequal stages, some frozen, with the gradient messages it needs and a few between readers."""
    count = draw(st.integers(1, most_stages))
    edges = {(a, b) for b in range(count) for a in range(b) if draw(st.booleans())}
    for a in range(count - 1):  # every stage but the last (the loss) is of use to a later one
        if not any(pair[0] == a for pair in edges):
            edges.add((a, draw(st.integers(a + 1, count - 1))))
    trained = [draw(st.booleans()) for _ in range(count)]
    turns = list(trained)  # a gradient flows to a stage if it or one before it is trained
    for s in range(count):
        turns[s] = turns[s] or any(turns[a] for a, b in edges if b == s)
    messages: dict[Message, float] = {("F", a, b): draw(SIZES) for a, b in sorted(edges)}
    for a, b in sorted(edges):
        if turns[a]:
            messages["B", b, a] = draw(SIZES)
    for a in range(count):  # readers of one value pass its gradient on from the last to the first
        for b in range(a + 1, count):
            if turns[a] and turns[b] and ("B", b, a) not in messages and draw(st.integers(0, 5)) == 0:
                messages["B", b, a] = draw(SIZES)
    stages = []
    for s in range(count):
        # A trained stage that sends no gradient on may come without a B.
        has_b = turns[s] and (any(m[0] == "B" and s in m[1:] for m in messages) or draw(st.booleans()))
        has_b = has_b or (turns[s] and not trained[s])
        stages.append(
            StageWork(
                forward=draw(TIMES),
                backward_input=draw(TIMES) if has_b else 0.0,
                backward_weight=draw(TIMES) if trained[s] else 0.0,
                has_b=has_b,
                has_w=trained[s],
                saved=draw(SIZES) if turns[s] else 0.0,
                stashed=draw(SIZES) if trained[s] else 0.0,
                fused=draw(SIZES) if trained[s] and has_b else 0.0,
                state=draw(SIZES),
            )
        )
    network = Network(
        Link(draw(st.sampled_from([0.0, 0.1])), 10.0),
        Link(0.5, draw(st.sampled_from([2.0, 5.0]))),
        draw(st.sampled_from([None, 1, 2])),
    )
    return Pipeline(tuple(stages), messages, network)


@st.composite
def cases(draw: st.DrawFn, most_stages: int = 6, most_microbatches: int = 7) -> Case:
    """A random pipeline on ranks that run one stage or several, microbatches of one size or of several."""
    pipeline = draw(pipelines(most_stages))
    count = len(pipeline.stages)
    microbatches = draw(st.integers(1, most_microbatches))
    homes = (
        draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count))
        if draw(st.booleans())
        else range(count)
    )
    number = {home: rank for rank, home in enumerate(sorted(set(homes)))}
    if draw(st.booleans()):
        pipeline = replace(pipeline, loads=draw(loads(pipeline, microbatches)))
    return Case(pipeline, tuple(number[home] for home in homes), microbatches)
