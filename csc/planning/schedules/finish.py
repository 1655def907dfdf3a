"""From orders to a schedule: check the memory, add the messages.

check(name, work, orders, memory)                   InputError: the rank that does not fit
finish(name, work, orders, memory) -> Schedule      InputError as check
"""

from __future__ import annotations

from collections.abc import Sequence

from csc.errors import InputError
from csc.ir.schedule import Schedule, with_messages
from csc.planning.schedules.activations import room, size, state
from csc.planning.schedules.timing import peaks
from csc.planning.schedules.work import WorkTables, actions


def check(name: str, work: WorkTables, orders: Sequence[Sequence[int]], memory: Sequence[float] | float | None) -> None:
    """InputError if a rank's state and activations do not fit into its memory."""
    allowed = room(work, memory)
    if allowed is None:
        return
    for rank, (peak, limit) in enumerate(zip(peaks(work, orders), allowed)):
        if peak > limit * (1 + 1e-9):
            fixed = state(work)[rank]
            raise InputError(
                f"{name} does not fit in {size(limit + fixed)}: rank {rank} needs {size(peak + fixed)}, "
                f"{size(fixed)} of it for parameters, gradients and optimizer state",
                "schedule",
                "Allow more memory, or choose auto, which keeps to the limit",
            )


def finish(
    name: str, work: WorkTables, orders: Sequence[Sequence[int]], memory: Sequence[float] | float | None
) -> Schedule:
    """The schedule of these orders. InputError if a rank's state and activations do not fit into its memory."""
    check(name, work, orders, memory)
    return with_messages(name, actions(work, orders), work.pipeline.messages)
