"""What limits a step, as a table of idle time by cause and a few sentences.

show_limits(limits)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from csc.commands.printing import console, table
from csc.simulation.idle import CAUSES
from csc.simulation.look import unit

if TYPE_CHECKING:
    from csc.reports.limits import Limits

MOST = 3  # ranks of the longest path that are named
LEAST = 1e-3  # of the step: a shorter idle time of the busiest rank is not named
MEANING = {
    "ramp": "before a rank's first action and after its last",
    "message": "what it waits for is on its way",
    "gather": "its stage's parameters are on their way",
    "imbalance": "it has less work than the busiest",
    "memory": "work that is at hand would not fit",
    "order": "work that is at hand comes later in its list",
    "way": "nothing is at hand, microbatches are with other ranks",
}


def show_limits(limits: Limits) -> None:
    """Print them. Causes of which no rank has anything have no column."""
    size, name = unit(limits.makespan)
    causes = [cause for cause in CAUSES if limits.causes[cause] > 1e-6 * limits.makespan]
    rows = table("rank", "work", "idle", *causes, title=f"work and idle time by cause, in {name}")
    for rank, (work, one) in enumerate(zip(limits.work, limits.idle)):
        figures = (work, limits.makespan - work, *(one[cause] for cause in causes))
        rows.add_row(str(rank), *(_number(seconds / size) for seconds in figures))
    console.print(rows)
    if causes:
        console.print("; ".join(f"{cause}: {MEANING[cause]}" for cause in causes), highlight=False)
    for line in sentences(limits):
        console.print(line, highlight=False)


def sentences(limits: Limits) -> list[str]:
    """The step as the work of its busiest rank and its idle time by cause; what the longest path goes through."""
    size, name = unit(limits.makespan)
    rank = limits.busiest
    own = limits.idle[rank]
    parts = [f"{_number(own[cause] / size)} {name} {cause}" for cause in CAUSES if own[cause] > LEAST * limits.makespan]
    waiting = f" and its idle time: {', '.join(parts)}" if parts else " which is hardly idle"
    found = [f"the step is {_number(limits.work[rank] / size)} {name} of work of rank {rank}, the busiest,{waiting}"]
    ranked = sorted(limits.path.work.items(), key=lambda item: -item[1])
    shares = [(f"rank {r}", seconds) for r, seconds in ranked[:MOST]]
    shares.append(("other ranks", sum(seconds for _, seconds in ranked[MOST:])))
    shares += [("messages", limits.path.messages), ("gathers", limits.path.gathers)]
    named = [f"{one} {seconds / limits.makespan:.1%}" for one, seconds in shares if seconds > LEAST * limits.makespan]
    return [*found, f"the longest path through the step goes through {', '.join(named)}"] if named else found


def _number(value: float) -> str:
    """Three digits or more; nothing for 0."""
    return "" if value < 5e-4 else f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
