"""All schedules by name, and where each of them wants its stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from csc.errors import InputError
from csc.ir.schedule import Schedule
from csc.planning.schedules.auto import auto, check, finish
from csc.planning.schedules.named import ORDERS
from csc.planning.schedules.work import WorkTables, excess, makespan, room
from csc.simulation.pipeline import Pipeline

CHUNKS = {"interleaved-1f1b": 2, "interleaved-zb": 2, "zb-v": 2}


class Planner(Protocol):
    """A schedule of the stages of `pipeline` on the ranks of `placement`."""

    def __call__(
        self,
        pipeline: Pipeline,
        placement: Sequence[int],
        microbatches: int,
        memory: Sequence[float] | float | None = None,
    ) -> Schedule: ...


def _named(
    name: str,
    pipeline: Pipeline,
    placement: Sequence[int],
    microbatches: int,
    memory: Sequence[float] | float | None = None,
) -> Schedule:
    work = WorkTables.of(pipeline, placement, microbatches)
    return finish(name, work, ORDERS[name](work, room(work, memory)), memory)


SCHEDULES: dict[str, Planner] = {**{name: partial(_named, name) for name in ORDERS}, "auto": auto}


def timed(
    name: str,
    pipeline: Pipeline,
    placement: Sequence[int],
    microbatches: int,
    memory: Sequence[float] | float | None = None,
    waiting: bool = False,
) -> float:
    """Seconds of the schedule of this name, any but auto, that SCHEDULES would make: for searches over the stages.
    waiting: InputError, too, if the messages that wait do not fit into the memory beside all else.
    """
    work = WorkTables.of(pipeline, placement, microbatches)
    allowed = room(work, memory)
    orders = ORDERS[name](work, allowed)
    check(name, work, orders, memory)
    if waiting and allowed is not None and excess(work, orders, allowed) is not None:
        raise InputError(
            f"{name} does not fit with the messages that wait",
            "schedule",
            "Allow more memory, or choose auto, which keeps to the limit",
        )
    return makespan(work, orders)


def stages_per_rank(name: str) -> int:
    """How many stages the schedule wants on each rank; the others take any number, and want 1."""
    _check(name)
    return CHUNKS.get(name, 1)


def placement(name: str, ranks: int, chunks: int | None = None) -> list[int]:
    """The rank of each of `ranks` * `chunks` stages: in turns, for zb-v to the last rank and back."""
    chunks = stages_per_rank(name) if chunks is None else chunks
    if chunks < 1 or (name == "zb-v" and chunks != 2):
        raise InputError(
            f"{name} cannot have {chunks} stages on a rank", "schedule", "Ask for 2, or for another schedule"
        )
    turns = [list(range(ranks))] * chunks
    if name == "zb-v":
        turns = [list(range(ranks)), list(reversed(range(ranks)))]
    return [rank for turn in turns for rank in turn]


def _check(name: str) -> None:
    if name not in SCHEDULES:
        raise InputError(f"there is no schedule {name!r}", "schedule", f"Choose one of {', '.join(SCHEDULES)}")
