"""The tables of a terminal: all planners at 128k tokens and 8 ranks, csc against the best rival elsewhere.

show(console, rows)
"""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.table import Table

from benchmarks.context_parallel.measure import BALANCED, CSC, Dispatched, Row
from benchmarks.context_parallel.rivals import RIVALS
from benchmarks.context_parallel.summary import RANKS, TOKENS, geomean, over_best_rival, over_gathered_ptrr, summary


def show(console: Console, rows: list[Row]) -> None:
    """Means over seeds."""
    here = [row for row in rows if (row.case.tokens, row.case.ranks) == (TOKENS, RANKS)]
    console.print(_planners(here))
    console.print(_all(rows))
    for name, value in summary(rows).items():
        console.print(f"{name:<44} {'-' if value is None else f'{value:.4f}'}")


def _mean(plans: list[Dispatched], field: str) -> float:
    return sum(getattr(plan, field) for plan in plans) / len(plans)


def _planners(rows: list[Row]) -> Table:
    table = Table(
        title=f"{TOKENS // 1024}k tokens, {RANKS} ranks: means over seeds, ms of one layer's forward and backward"
    )
    for name in ("mask", "visible", "planner", "tiles", "area", "volume", "exact ms", "all-gather ms", "planner ms"):
        table.add_column(name, justify="left" if name in ("mask", "planner") else "right")
    for mask, group in groupby(rows, key=lambda row: row.case.mask):
        same = list(group)
        share = sum(row.share for row in same) / len(same)
        for name in (CSC, BALANCED, *RIVALS):
            plans = [row.plans[name] for row in same]
            figures = [f"{_mean(plans, field):.3f}" for field in ("tile", "area", "volume")]
            times = [f"{_mean(plans, field) * 1e3:.2f}" for field in ("seconds", "gathered", "planner")]
            first = (mask, f"{share:.3f}") if name == CSC else ("", "")
            table.add_row(*first, name, *figures, *times, end_section=name == "torch PTRR")
    return table


def _all(rows: list[Row]) -> Table:
    table = Table(title="csc at every length and number of ranks: means over seeds")
    against = ("over the bound", "over the best rival", "over PTRR + all-gather")
    for name in ("tokens", "ranks", "mask", "tiles", "volume", "ms", *against, "cheapest", "planner ms"):
        table.add_column(name, justify="right" if name not in ("mask", "cheapest") else "left")
    ordered = sorted(rows, key=lambda row: (row.case.tokens, row.case.ranks))
    for (tokens, ranks, mask), group in groupby(
        ordered, key=lambda row: (row.case.tokens, row.case.ranks, row.case.mask)
    ):
        same = list(group)
        plans = [row.plans[CSC] for row in same]
        table.add_row(
            f"{tokens // 1024}k", str(ranks), mask,
            f"{_mean(plans, 'tile'):.3f}", f"{_mean(plans, 'volume'):.3f}", f"{_mean(plans, 'seconds') * 1e3:.3f}",
            f"{geomean(row.plans[CSC].seconds / row.bound for row in same):.3f}",
            f"{geomean(map(over_best_rival, same)):.3f}", f"{geomean(map(over_gathered_ptrr, same)):.3f}",
            ", ".join(sorted({plan.collective for plan in plans})), f"{max(plan.planner for plan in plans) * 1e3:.1f}",
        )  # fmt: skip
    return table
