"""What the rows say together.

summary(rows, emulated, real, new) -> {name: number}       document(rows, emulated, real, new) -> one JSON object
show(console, rows, emulated, real, new)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import geometric_mean
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.balance.emulated_cells import Emulated
from benchmarks.balance.real import RealStep, figures
from benchmarks.balance.rivals import RIVALS
from benchmarks.balance.simulated import OURS, Row


def summary(
    rows: Sequence[Row],
    emulated: Sequence[Emulated] = (),
    real: Sequence[RealStep] = (),
    new: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, float]:
    """over_equal_max: csc's step over that of equal microbatches, the worst cell under 1F1B; over_equal_many_geomean:
    where there are at least eight microbatches a rank; over_bound_geomean: over what no assignment is below; speedups
    of csc over random, over the best rival of each cell, and over any rival in any cell; decision_seconds_max: CPU.
    paced_error_max: of measured over predicted seconds, where ranks were emulated; real_...: where they computed.
    new: sizes of programs that steps 11 to 20 met first, by set; new_programs_after_10_steps: of the set with the most.
    """
    others = figures(real) | ({"new_programs_after_10_steps": max(new.values())} if new else {})
    if not rows:
        return others
    plain = [row for row in rows if row.cell.schedule == "1f1b"]
    many = [row for row in plain if row.cell.shape[1] >= 8 * row.cell.shape[0]]
    return {
        "cells": len(rows),
        "over_equal_max": max(row.seconds[OURS] / row.equal for row in plain or rows),
        "over_equal_many_geomean": _mean(row.seconds[OURS] / row.equal for row in many),
        "over_bound_geomean": _mean(row.seconds[OURS] / row.bound for row in rows),
        "speedup_over_random_geomean": _mean(row.seconds["random"] / row.seconds[OURS] for row in rows),
        "speedup_over_best_rival_geomean": _mean(best(row) / row.seconds[OURS] for row in rows),
        "worst_speedup_over_any_rival": min(best(row) / row.seconds[OURS] for row in rows),
        "decision_seconds_max": max(row.decision for row in rows),
        **({"paced_error_max": max(abs(one.error) for one in emulated)} if emulated else {}),
        **others,
        **{f"activations_over_equal_max_{name}": max(row.taken[name] for row in rows) for name in (OURS, *RIVALS)},
    }


def best(row: Row) -> float:
    """Seconds of the best rival."""
    return min(row.seconds[name] for name in RIVALS)


def _mean(ratios: Iterable[float]) -> float:
    found = list(ratios)
    return geometric_mean(found) if found else float("nan")


def document(
    rows: Sequence[Row],
    emulated: Sequence[Emulated] = (),
    real: Sequence[RealStep] = (),
    new: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """All rows and the summary."""
    each = [
        {"cell": row.cell.name, "seconds": row.seconds, "bound": row.bound, "equal": row.equal,
         "decision": row.decision, "activations_over_equal": row.taken}
        for row in rows
    ]  # fmt: skip
    return {
        "summary": summary(rows, emulated, real, new), "rows": each, "emulated": [asdict(one) for one in emulated],
        "real": [asdict(one) for one in real], "new_sizes": dict(new),
    }  # fmt: skip


def show(
    console: Console,
    rows: Sequence[Row],
    emulated: Sequence[Emulated] = (),
    real: Sequence[RealStep] = (),
    new: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """One line for each model, frozen set and lengths: the mean over shapes of a step over its bound."""
    columns = ("equal", *RIVALS, OURS)
    table = Table(title="step over its bound, mean of shapes")
    for name in ("cell", *columns):
        table.add_column(name, justify="left" if name == "cell" else "right", overflow="fold")
    parts: dict[str, list[Row]] = {}
    for row in rows:
        limit = "" if row.cell.memory is None else f" at {row.cell.memory:g}x"
        own = f"{row.cell.model}, {row.cell.frozen}, {row.cell.lengths}, {row.cell.schedule}{limit}"
        parts.setdefault(own, []).append(row)
    for name, own in parts.items():
        ratios: list[Callable[[Row], float]] = [lambda row: row.equal / row.bound]
        ratios += [lambda row, way=way: row.seconds[way] / row.bound for way in columns[1:]]  # type: ignore[misc]
        table.add_row(name, *(f"{_mean(map(ratio, own)):.3f}" for ratio in ratios))
    console.print(table)
    for one in emulated:
        seconds = f"{one.measured:.3f} s measured, {one.predicted:.3f} s predicted"
        console.print(f"emulated, {one.cell}, {one.way}: {seconds} ({one.error:+.1%})", highlight=False)
    for step in real:
        seconds = (
            f"{step.measured:.3f} s measured, {step.undisturbed:.3f} s undisturbed, {step.predicted:.3f} s predicted"
        )
        console.print(
            f"real, {step.lengths}, step {step.step}, {step.way}: {seconds} ({step.error:+.1%})", highlight=False
        )
    for name, value in summary(rows, emulated, real, new).items():
        console.print(f"{name:36} {value:.4g}")
