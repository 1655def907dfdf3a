"""Orders that keep to a rank's memory, with the messages that wait.

Terms: see work.py and csc.planning.schedules.waiting. How many bytes of messages wait follows from the times of the
whole step, so an order is made first and counted then; where it exceeds a rank's room, it is made again with so much
less on that rank alone.

    Fitted(orders, seconds, room)              room: what the orders were made under; None: no limit
    fitted(work, make, room, below)            -> Fitted, or None; make(room) -> (orders, seconds) or None
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from csc.planning.schedules.activations import reserve
from csc.planning.schedules.waiting import excess
from csc.planning.schedules.work import WorkTables

Orders = list[list[int]]
Made = tuple[Orders, float]
TRIES = 5
FURTHER = 1.2  # times what is too much, as less room changes what waits


class Fitted(NamedTuple):
    """Orders of all ranks, and the seconds of the step."""

    orders: Orders
    seconds: float
    room: list[float] | None


def fitted(
    work: WorkTables,
    make: Callable[[Sequence[float]], Made | None],
    room: Sequence[float],
    below: float = math.inf,
) -> Fitted | None:
    """What `make` gives under the room, or under less of it; None if that does not fit, or takes `below` seconds."""
    left = list(room)
    for _ in range(TRIES):
        made = make(left)
        if made is None or made[1] >= below:
            return None
        over = excess(work, made[0], room)
        if over is None:
            return Fitted(*made, left)
        left = [have - FURTHER * more for have, more in zip(left, over)]
        if any(more and reserve(work, rank).most > left[rank] for rank, more in enumerate(over)):
            return None
    return None
