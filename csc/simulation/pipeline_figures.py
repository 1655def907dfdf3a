"""Whether the numbers of a pipeline are numbers that can be simulated.

check_pipeline(pipeline)        InputError: the first that is not, whose it is, and what to do
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from csc.errors import InputError
from csc.simulation.pipeline import Network, Pipeline, RankNodes, StageWork

FIGURES = tuple(field.name for field in fields(StageWork) if field.name not in ("has_b", "has_w"))


def check_pipeline(pipeline: Pipeline) -> None:
    """Times and sizes are finite and at least 0, and every link carries something. What loads take of a feature may be
    below 0, as long as it is a number.
    """
    for what, number in _figures(pipeline):
        if not 0 <= number < math.inf:
            raise InputError(f"{what} is {number!r}", "pipeline", "Times and sizes are finite and at least 0")
    loads = pipeline.loads
    rates = [] if loads is None else [*loads.features, *loads.messages.values()]
    if not all(math.isfinite(number) for row in rates for number in row):
        raise InputError("a feature of a microbatch is no finite number", "pipeline", "Look at the measured costs")


def _figures(pipeline: Pipeline) -> Iterator[tuple[str, float]]:
    for number, stage in enumerate(pipeline.stages):
        for name in FIGURES:
            yield f"the {name.replace('_', ' ')} of stage {number}", getattr(stage, name)
    for (kind, source, destination), size in pipeline.messages.items():
        yield f"the size of message {kind} {source}>{destination}", size
    ends: tuple[Network | RankNodes, ...] = (pipeline.network, *pipeline.network.places)
    for end in ends:
        for where, link in (("within", end.within), ("between", end.between)):
            yield f"the latency {where} nodes", link.latency
            yield f"the seconds for a byte {where} nodes", 1 / link.bandwidth if link.bandwidth else math.inf
