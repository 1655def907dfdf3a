"""The schedules of torch.distributed.pipelining in numbers, on a chain of stages.

Terms
  chunk    a stage of a rank that runs two
  fused    a backward that makes both gradients in one go: the input's gradient leaves when the weights' are done too

    TORCH                               name -> TorchSchedule
    placement(name, ranks)              the rank of each stage
    modelled(name, pipeline, ranks, microbatches) -> Schedule for csc.simulation
    chain(pipeline)                     whether each stage feeds the next one only: torch knows nothing else
    without_gradients(name, pipeline)   stages whose weights get no gradient

The orders are those of the classes themselves: they compute them from stages of which only numbers matter. A frozen
stage does nothing where they have its B or W. What is left out favours torch: it waits for its sends, and posts a
receive only right before it needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch.distributed import pipelining

from csc.ir.schedule import Action, Schedule, with_messages
from csc.planning.schedules import SCHEDULES
from csc.simulation.pipeline import Pipeline


@dataclass(frozen=True)
class TorchSchedule:
    """cls: in torch.distributed.pipelining; chunks: stages on a rank; turned: the second half runs from the last rank
    to the first; splits: it runs W on its own.
    """

    cls: str
    chunks: int = 1
    turned: bool = False
    splits: bool = False


TORCH: Mapping[str, TorchSchedule] = {
    "torch GPipe": TorchSchedule("ScheduleGPipe"),
    "torch 1F1B": TorchSchedule("Schedule1F1B"),
    "torch interleaved 1F1B": TorchSchedule("ScheduleInterleaved1F1B", chunks=2),
    "torch interleaved ZB": TorchSchedule("ScheduleInterleavedZeroBubble", chunks=2, splits=True),
    "torch ZB-V": TorchSchedule("ScheduleZBVZeroBubble", chunks=2, turned=True, splits=True),
}
SAME_ORDER = {"torch GPipe": "gpipe", "torch 1F1B": "1f1b"}  # what csc calls the same order


def placement(name: str, ranks: int) -> tuple[int, ...]:
    """The rank of each stage."""
    kind = TORCH[name]
    turn = tuple(range(ranks))
    if kind.turned:
        return turn + turn[::-1]
    return turn * kind.chunks


def chain(pipeline: Pipeline) -> bool:
    """True if each stage sends activations to the next one, gradients to the one before, and nothing else."""
    return all(destination - source == (1 if kind == "F" else -1) for kind, source, destination in pipeline.messages)


def without_gradients(name: str, pipeline: Pipeline) -> list[int]:
    """Stages behind a frozen prefix whose weights get no gradient. The schedules that split the backward look for the
    weights' gradients from the stage's inputs on, and there is nothing to find if no input needs one. The first stage
    is exempt: its whole backward runs as W.
    """
    if not TORCH[name].splits:
        return []
    return [
        s
        for s, stage in enumerate(pipeline.stages)
        if s > 0 and stage.has_w and not any(kind == "B" and source == s for kind, source, _ in pipeline.messages)
    ]


def modelled(name: str, pipeline: Pipeline, ranks: int, microbatches: int) -> Schedule:
    """The schedule as the simulator knows it. The pipeline is a chain of as many stages as the schedule has.

    ValueError, with torch's reason, for numbers that the schedule does not take.
    """
    kind = TORCH[name]
    where = placement(name, ranks)
    if name in SAME_ORDER:
        return replace(SCHEDULES[SAME_ORDER[name]](pipeline, where, microbatches), name=name)
    stages = [_Numbers(s, len(where), 0, ranks) for s in range(len(where)) if where[s] == 0]
    order = getattr(pipelining.schedules, kind.cls)(stages, microbatches).pipeline_order
    orders = [[a for action in order[rank] for a in _actions(action, pipeline)] for rank in range(ranks)]
    return with_messages(name, orders, pipeline.messages)


class _Numbers(SimpleNamespace):
    """What a schedule's constructor reads of a stage."""

    def __init__(self, index: int, stages: int, rank: int, ranks: int) -> None:
        super().__init__(
            stage_index=index,
            num_stages=stages,
            group_rank=rank,
            group_size=ranks,
            is_first=index == 0,
            is_last=index == stages - 1,
            submod=None,
            has_backward=True,
        )


def _actions(action: Any, pipeline: Pipeline) -> list[Action]:
    """torch's action as csc's: F; I is B; W; B is BW. Nothing for idle slots, reductions and frozen stages."""
    if action is None:
        return []
    s, mb, kind = action.stage_index, action.microbatch_index, action.computation_type.value
    stage = pipeline.stages[s]
    if kind == "F":
        return [Action("F", s, mb)]
    if kind == "B" and stage.has_b and stage.has_w:
        return [Action("BW", s, mb)]
    found = [Action("B", s, mb)] if kind in ("I", "B") and stage.has_b else []
    if kind in ("W", "B") and stage.has_w:
        found.append(Action("W", s, mb))
    return found
