"""From the program's seconds to measured clocks: rounded down, with what is left of the step given back.

Terms: see csc.planning.energy.clock_program. *Picks* are the choice of each block. The *slack* of a compute is how much
longer it may take with the step as it is.

Where the program mixes two clocks in all computes of a moment, ranks that round alike at the same moments do not wait
for each other; so computes are rounded up one moment after the other, and not where most is gained. Which end of the
step to begin at depends on the step: each way is made, filled and compared.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from csc.planning.energy.clock_program import ClockBlock, Relaxed
from csc.planning.energy.step_graph import Waits

SLIGHT = 1e-10  # of the seconds, that count as none
CORNER = 1e-7  # of the seconds: a compute that is so near a corner of its hull is there
Picks = list[int]
Order = Callable[[int], Any]  # of a compute, what it is sorted by


def seconds_of(blocks: Sequence[ClockBlock], picks: Sequence[int], computes: int) -> list[float]:
    """Of each compute."""
    seconds = [0.0] * computes
    for block, pick in zip(blocks, picks):
        for compute, setting in zip(block.computes, block.choices[pick]):
            seconds[compute] = setting.seconds
    return seconds


def rounded(blocks: Sequence[ClockBlock], seconds: Sequence[float]) -> Picks:
    """The choice of least worth at which no compute of a block takes longer than so many seconds."""
    picks = []
    for block in blocks:
        limits = [seconds[compute] * (1 + SLIGHT) for compute in block.computes]
        fitting = [
            k
            for k, choice in enumerate(block.choices)
            if all(setting.seconds <= limit for setting, limit in zip(choice, limits))
        ]
        picks.append(min(fitting or [0], key=block.worth))
    return picks


def assigned(waits: Waits, blocks: Sequence[ClockBlock], answer: Relaxed) -> Picks:
    """The picks of the least worth found that take no longer than the program's step."""
    down = rounded(blocks, answer.seconds)
    starts = waits.starts(answer.seconds)
    keys: list[Order] = [
        lambda compute: starts[compute],
        lambda compute: -starts[compute],
        lambda compute: compute,
        lambda compute: -float(answer.prices[compute]),
        lambda compute: abs(starts[compute] - answer.step / 2),
        lambda compute: (-waits.computes[compute].microbatch, starts[compute]),
        lambda compute: (-waits.rank_of[compute], compute),
        lambda compute: (waits.rank_of[compute], -starts[compute]),
    ]
    candidates = [down, *(raised(waits, blocks, answer, key) for key in keys)]
    full = [filled(waits, blocks, picks, answer.step) for picks in candidates]
    return min(full, key=lambda picks: sum(block.worth(pick) for block, pick in zip(blocks, picks)))


def raised(waits: Waits, blocks: Sequence[ClockBlock], answer: Relaxed, key: Order) -> Picks:
    """Each lone compute at the corner of its hull below the program's seconds, or, in the order of `key`, at the one
    above where the step stays as short. Other blocks are rounded down.
    """
    picks = rounded(blocks, answer.seconds)
    upper: dict[int, int] = {}
    for number, block in enumerate(blocks):
        if len(block.computes) == 1:
            corners = block.options.corners
            seconds = answer.seconds[block.computes[0]]
            below = sum(block.seconds(k) <= seconds * (1 + SLIGHT) for k in corners)
            picks[number] = corners[max(below - 1, 0)]
            if 0 < below < len(corners) and block.seconds(corners[below - 1]) < seconds * (1 - CORNER):
                upper[number] = corners[below]
    slack = _Slack(waits, seconds_of(blocks, picks, len(waits.computes)), answer.step)
    for number in sorted(upper, key=lambda number: key(blocks[number].computes[0])):
        (compute,), seconds = blocks[number].computes, blocks[number].seconds(upper[number])
        if slack.of(compute) + slack.seconds[compute] - seconds >= SLIGHT * answer.step:
            picks[number] = upper[number]
            slack.lengthen(compute, seconds)
    return picks


class _Slack:
    """Earliest and latest starts, kept as computes take longer."""

    def __init__(self, waits: Waits, seconds: list[float], limit: float) -> None:
        self.waits, self.seconds, self.limit = waits, seconds, limit
        self.computes = len(seconds)
        self.place = [0] * waits.nodes
        for place, node in enumerate(waits.order):
            self.place[node] = place
        self.start = waits.starts(seconds)
        self.latest = waits.latest(seconds, limit)

    def of(self, compute: int) -> float:
        return self.latest[compute] - self.start[compute]

    def lengthen(self, compute: int, seconds: float) -> None:
        """The compute takes so many seconds now, more than before."""
        self.latest[compute] -= seconds - self.seconds[compute]
        self.seconds[compute] = seconds
        start, latest, place, order = self.start, self.latest, self.place, self.waits.order
        ahead = [place[compute]]
        pending = {compute}
        while ahead:
            node = order[heapq.heappop(ahead)]
            pending.discard(node)
            end = start[node] + (self.seconds[node] if node < self.computes else 0.0)
            for after, delay in self.waits.after[node]:
                if end + delay > start[after]:
                    start[after] = end + delay
                    if after not in pending:
                        pending.add(after)
                        heapq.heappush(ahead, place[after])
        behind = [-place[compute]]
        pending = {compute}
        while behind:
            node = order[-heapq.heappop(behind)]
            pending.discard(node)
            for before, delay in self.waits.before[node]:
                duration = self.seconds[before] if before < self.computes else 0.0
                if latest[node] - delay - duration < latest[before]:
                    latest[before] = latest[node] - delay - duration
                    if before not in pending:
                        pending.add(before)
                        heapq.heappush(behind, -place[before])


def filled(waits: Waits, blocks: Sequence[ClockBlock], picks: Sequence[int], limit: float) -> Picks:
    """Slower choices where they fit, those first that save most joules for a second; until none fits."""
    picks_made = list(picks)
    slack = _Slack(waits, seconds_of(blocks, picks_made, len(waits.computes)), limit)
    spare = SLIGHT * limit

    def better(number: int) -> tuple[float, int, int] | None:
        block, pick = blocks[number], picks_made[number]
        best = None
        alone = len(block.computes) == 1
        room = slack.of(block.computes[0]) - spare if alone else 0.0
        for k in range(pick + 1, len(block.choices)):
            gain, more = block.worth(pick) - block.worth(k), block.seconds(k) - block.seconds(pick)
            if gain <= 0 or (best is not None and gain / max(more, 1e-15) <= -best[0]):
                continue
            if more <= room if alone else _fits(slack, block, k, spare):
                best = (-gain / max(more, 1e-15), number, k)
        return best

    queue = [option for number in range(len(blocks)) if (option := better(number)) is not None]
    heapq.heapify(queue)
    while queue:
        option = heapq.heappop(queue)
        now = better(option[1])
        if now is None:
            continue
        if queue and now > queue[0]:
            heapq.heappush(queue, now)
            continue
        _, number, pick = now
        picks_made[number] = pick
        for compute, setting in zip(blocks[number].computes, blocks[number].choices[pick]):
            if setting.seconds > slack.seconds[compute]:
                slack.lengthen(compute, setting.seconds)
        if (again := better(number)) is not None:
            heapq.heappush(queue, again)
    return picks_made


def _fits(slack: _Slack, block: ClockBlock, choice: int, spare: float) -> bool:
    """Whether all computes of a block may take as long as with a choice, one after the other on a rank."""
    more = 0.0
    for compute, setting in zip(block.computes, block.choices[choice]):
        longer = setting.seconds - slack.seconds[compute]
        more += max(longer, 0.0)
        if more and slack.of(compute) - spare < more:
            return False
    return True
