"""What the runtime itself takes of a rank's time, measured on emulated ranks that send each other small messages.

Terms
  action     what an F, B or W takes besides its kernels: finding what it needs, handing on what it made
  handling   what a message takes at each of its ends: a SEND, or a RECV that waits for nothing with its posting

    calibration(ranks, size, wait) -> Emulated     several stages on each rank, which wait where others compute
    taken(program, traces) -> HostTime       of what `csc.runtime.emulated.run` gave, the first step left out

A rank sleeps before each action as it does in an emulated run: code that has not run for milliseconds is slower than a
loop. With messages of a megabyte an end takes .15 ms after waits of 2 ms, .25 to .3 after 12. Medians count, as what
else the machine does only ever adds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from csc.planning.schedules import SCHEDULES
from csc.runtime.emulated import Emulated, emulated
from csc.runtime.executor import Timed
from csc.simulation.pipeline import Pipeline, StageWork

CHUNKS, MICROBATCHES, STEPS = 4, 16, 3
WAIT, SIZE = 2e-3, 65536.0  # by default; a message's bytes are copied to the socket by its sender


class HostTime(NamedTuple):
    """Seconds; see the module's terms."""

    action: float
    handling: float


def calibration(ranks: int, size: float = SIZE, wait: float = WAIT) -> Emulated:
    """Interleaved 1F1B, stages in turns around the ranks. size: bytes of a message; wait: seconds of each action."""
    count = ranks * CHUNKS
    channels = [("F", s, s + 1) for s in range(count - 1)] + [("B", s + 1, s) for s in range(count - 1)]
    numbers = Pipeline((StageWork(wait, wait, wait),) * count, dict.fromkeys(channels, size))
    home = tuple(s % ranks for s in range(count))
    return emulated(numbers, SCHEDULES["interleaved-1f1b"](numbers, home, MICROBATCHES))


def taken(program: Emulated, steps: Sequence[Sequence[Timed]]) -> HostTime:
    """steps: what one rank did, step by step. A RECV that had to wait is no measure of its own work; of all of them the
    lower quarter had not. Receives are posted ahead of the action during which they come.
    """
    spent: dict[str, list[float]] = {"compute": [], "SEND": [], "RECV": []}
    ahead: dict[bool, list[float]] = {True: [], False: []}
    for trace in steps[1:]:
        for event in trace:
            kind, seconds = event.action.kind, event.end - event.start
            if event.action.computes:
                spent["compute"].append(seconds - program.pipeline.stages[event.action.stage].seconds(kind))
            elif kind in spent:
                spent[kind].append(seconds)
        for one, other in pairwise(trace):
            ahead[other.action.computes].append(other.start - one.end)
    between = statistics.median(ahead[False])
    action = max(0.0, statistics.median(spent["compute"])) + between
    if not spent["SEND"]:
        return HostTime(action, 0.0)
    posting = max(0.0, statistics.median(ahead[True]) - between) * len(spent["compute"]) / len(spent["RECV"])
    receive = statistics.quantiles(spent["RECV"], n=4)[0] + posting
    return HostTime(action, (statistics.median(spent["SEND"]) + receive) / 2 + between)
