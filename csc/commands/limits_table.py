"""What limits a step, as a table of idle time by cause and a few sentences.

show_limits(limits)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table

from csc.commands.printing import console, table
from csc.simulation.idle import CAUSES
from csc.simulation.page import unit

if TYPE_CHECKING:
    from csc.reports.forecast import Limits

MOST = 3  # ranks of the longest path that are named
LEAST = 1e-3  # of the step: a shorter idle time of the busiest rank is not named
MEANING = {  # of an idle rank
    "ramp": "it has not started yet, or is done",
    "message": "its next input is being sent",
    "gather": "its stage's parameters are being gathered",
    "imbalance": "the busiest rank has more work",
    "memory": "it has work that is ready but would not fit in memory",
    "order": "it has work that is ready but comes later in the schedule",
    "way": "it has no work that is ready: other ranks have its microbatches",
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
        meanings = Table.grid("cause", "meaning", padding=(0, 2, 0, 0))
        for cause in causes:
            meanings.add_row(cause, MEANING[cause])
        console.print("why a rank is idle:")
        console.print(Padding(meanings, (0, 0, 0, 2)))
    for line in sentences(limits):
        console.print(line, highlight=False)


def sentences(limits: Limits) -> list[str]:
    """The step as the work of its busiest rank and its idle time by cause; what the longest path goes through."""
    size, name = unit(limits.makespan)
    rank = limits.busiest
    own = limits.idle[rank]
    parts = [f"{cause} {_number(own[cause] / size)}" for cause in CAUSES if own[cause] > LEAST * limits.makespan]
    idle = f"is idle for the rest ({', '.join(parts)})" if parts else "is hardly idle"
    found = [f"rank {rank} is the busiest: it works for {_number(limits.work[rank] / size)} {name} and {idle}"]
    ranked = sorted(limits.path.work.items(), key=lambda item: -item[1])
    shares = [(f"rank {r}", seconds) for r, seconds in ranked[:MOST]]
    shares.append(("other ranks", sum(seconds for _, seconds in ranked[MOST:])))
    shares += [("messages", limits.path.messages), ("gathers", limits.path.gathers)]
    named = [f"{one} {seconds / limits.makespan:.1%}" for one, seconds in shares if seconds > LEAST * limits.makespan]
    return [*found, f"the longest path through the step spends its time on {', '.join(named)}"] if named else found


def _number(value: float) -> str:
    """Three digits or more; nothing for 0."""
    return "" if value < 5e-4 else f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
