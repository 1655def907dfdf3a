"""What a plan expects of its step: the ranks as a table, the makespan and its lower bound as sentences.

show_forecast(forecast)        bound_text(forecast), step_text(forecast) -> str
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from csc.commands.printing import console, table
from csc.commands.rows import Column
from csc.simulation.page import bytes_text, seconds_text

if TYPE_CHECKING:
    from csc.reports.forecast import Forecast


def show_forecast(found: Forecast) -> None:
    """A row for each rank."""
    device = ["device"] if found.devices else []
    optional = [Column("peak memory", 2), Column("of it activations", 3)]
    columns: tuple[str | Column, ...] = (
        "rank",
        *(Column(name, 4) for name in device),
        "holds",
        "busy",
        Column("bubble", 1),
        *optional,
    )
    shares = table(*columns, title=f"{found.schedule}, {found.layout}")
    for rank in found.as_dict()["ranks"]:
        shares.add_row(
            str(rank["rank"]), *(escape(rank[name]) for name in device), escape(rank["holds"]),
            seconds_text(rank["busy"]), f"{rank['bubble_share']:.1%}",
            bytes_text(rank["peak_memory"]), bytes_text(rank["peak_activations"]),
        )  # fmt: skip
    console.print(shares)


def step_text(found: Forecast) -> str:
    """The makespan, what follows it if it can be seen, and where the seconds come from."""
    most = max(found.ends, key=lambda end: end.seconds)
    parts = [f"{seconds_text(most.reduce)} to add gradients"] if most.reduce else []
    parts += [f"{seconds_text(most.optimizer)} for AdamW"] if most.optimizer else []
    makespan, step = seconds_text(found.plan.makespan), seconds_text(found.step)
    behind = f", {step} with {' and '.join(parts)}" if step != makespan else ""
    return f"makespan {makespan}{behind}; costs: {found.costs}"


def bound_text(found: Forecast) -> str:
    """The lower bound, what it holds for, how far the plan is above it, and what sets it."""
    kind = "any number of stages" if found.shared else "one stage"
    least = f"lower bound {seconds_text(found.bound)}: no plan with {kind} on a rank takes less"
    return f"{least}, and this one takes {max(0.0, found.gap):.1%} more; what sets the bound: {found.limits.term}"
