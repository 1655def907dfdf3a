"""Schedules written out for the tests, and random pipelines with random valid schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from csc.ir.schedule import Action, Message, Schedule, fused, with_messages
from csc.simulation.pipeline import Link, Network, Pipeline, StageWork
from tests.simulation.random_loads import loads


def chain(stages: int, size: float = 0.0, has_b: tuple[bool, ...] | None = None) -> dict[Message, float]:
    """The messages of a chain; gradients go only between stages that have B."""
    messages: dict[Message, float] = {("F", s, s + 1): size for s in range(stages - 1)}
    for s in range(stages - 1):
        if has_b is None or (has_b[s] and has_b[s + 1]):
            messages["B", s + 1, s] = size
    return messages


def backward(stage: int, mb: int, spec: StageWork) -> list[Action]:
    return [Action("B", stage, mb)] * spec.has_b + [Action("W", stage, mb)] * spec.has_w


def gpipe(pipeline: Pipeline, microbatches: int) -> Schedule:
    orders = [
        [Action("F", s, mb) for mb in range(microbatches)]
        + [action for mb in range(microbatches) for action in backward(s, mb, spec)]
        for s, spec in enumerate(pipeline.stages)
    ]
    return with_messages("gpipe", orders, pipeline.messages)


def one_f_one_b(pipeline: Pipeline, microbatches: int) -> Schedule:
    """Stage s is p - s forwards ahead; a stage without backward runs its forwards without a limit."""
    orders = []
    for s, spec in enumerate(pipeline.stages):
        ahead = min(len(pipeline.stages) - s, microbatches) if spec.has_b or spec.has_w else microbatches
        order = [Action("F", s, mb) for mb in range(ahead)]
        for mb in range(microbatches):
            order += backward(s, mb, spec)
            if mb + ahead < microbatches:
                order.append(Action("F", s, mb + ahead))
        orders.append(order)
    return with_messages("1f1b", orders, pipeline.messages)


def interleaved(pipeline: Pipeline, microbatches: int, ranks: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021): stage s on rank s % ranks; microbatches a multiple of ranks."""
    chunks = len(pipeline.stages) // ranks
    total = microbatches * chunks

    def forward(rank: int, step: int) -> Action:
        group, inside = divmod(step, ranks * chunks)
        chunk, mb = divmod(inside, ranks)
        return Action("F", chunk * ranks + rank, group * ranks + mb)

    def back(rank: int, step: int) -> list[Action]:
        group, inside = divmod(step, ranks * chunks)
        chunk, mb = divmod(inside, ranks)
        stage = (chunks - 1 - chunk) * ranks + rank
        return backward(stage, group * ranks + mb, pipeline.stages[stage])

    orders = []
    for rank in range(ranks):
        ahead = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
        order = [forward(rank, step) for step in range(ahead)]
        for step in range(total):
            if step + ahead < total:
                order.append(forward(rank, step + ahead))
            order += back(rank, step)
        orders.append(order)
    return with_messages("interleaved", orders, pipeline.messages)


@st.composite
def runs(draw: Any) -> tuple[Pipeline, Schedule, int]:
    """A pipeline over a random DAG of stages, a valid schedule in random order, and its number of microbatches."""
    count = draw(st.integers(1, 5))
    microbatches = draw(st.integers(1, 4))
    times = st.integers(0, 12).map(float)
    sizes = st.integers(0, 20).map(float)
    stages = []
    for _ in range(count):
        has_b, has_w = draw(st.booleans()), draw(st.booleans())
        stages.append(
            StageWork(
                draw(times),
                draw(times) if has_b else 0.0,
                draw(times) if has_w else 0.0,
                has_b,
                has_w,
                saved=draw(sizes),
                stashed=draw(sizes),
                fused=draw(sizes),
                state=draw(sizes),
            )
        )
    messages: dict[Message, float] = {}
    for a in range(count):
        for b in range(a + 1, count):
            if draw(st.booleans()):
                messages["F", a, b] = draw(sizes)
                if stages[a].has_b and stages[b].has_b:
                    messages["B", b, a] = draw(sizes)
    links = st.builds(Link, st.integers(0, 5).map(float), st.sampled_from([1.0, 2.0, 4.0, float("inf")]))
    network = Network(draw(links), draw(links), draw(st.sampled_from([None, 1, 2])))
    pipeline = Pipeline(tuple(stages), messages, network)
    pipeline = replace(pipeline, loads=draw(st.none() | loads(pipeline, microbatches)))

    homes = draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count))
    ranks = sorted(set(homes))
    orders: list[list[Action]] = [[] for _ in ranks]
    left = {
        Action(kind, s, mb)
        for s, spec in enumerate(stages)
        for kind, there in (("F", True), ("B", spec.has_b), ("W", spec.has_w))
        if there
        for mb in range(microbatches)
    }
    random = draw(st.randoms(use_true_random=False))
    while left:
        able = [action for action in left if not left.intersection(needs(action, pipeline))]
        action = random.choice(sorted(able, key=str))
        left.remove(action)
        orders[ranks.index(homes[action.stage])].append(action)
    if draw(st.booleans()):
        orders = [fused(order) for order in orders]
    return pipeline, with_messages("random", orders, messages), microbatches


def needs(action: Action, pipeline: Pipeline) -> list[Action]:
    """What must have run before this compute, on whatever rank."""
    stage, mb = action.stage, action.microbatch
    found = [Action(kind, a, mb) for kind, a, b in pipeline.messages if (kind, b) == (action.kind, stage)]
    if action.kind != "F":
        found.append(Action("F", stage, mb))
    if action.kind == "W" and pipeline.stages[stage].has_b:
        found.append(Action("B", stage, mb))
    return found
