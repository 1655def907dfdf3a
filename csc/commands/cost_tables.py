"""`csc cost` and `csc profile` on a terminal: rich tables of csc.reports.cost_report and csc.reports.profiling.

Regions of one template variant cost the same; they share a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from csc.commands.printing import table as folding
from csc.commands.rows import Column, Rows
from csc.simulation.page import bytes_text, seconds_text

if TYPE_CHECKING:
    from csc.analysis.hardware import Wire
    from csc.reports.cost_report import CostReport, CostRow
    from csc.reports.profiling import Profile

HELD = (
    Column("saved"), Column("stashed", 5), Column("rematerialised", 7), Column("parameters"), Column("gradients", 2),
    Column("optimizer", 1), Column("messages", 4), Column("gradient messages", 6),
)  # fmt: skip


def cost_tables(report: CostReport) -> Iterator[Rows]:
    """Work and bytes of the components and of the regions; expressions if there are any."""
    for title, rows in (("components", report.components), ("regions", report.regions)):
        yield _work_table(f"{title}: work of one microbatch", rows, report.basis)
        yield _bytes_table(f"{title}: bytes", rows)
        if rows and rows[0].expressions:
            yield _expression_table(f"{title}: expressions", rows)


def _work_table(title: str, rows: Sequence[CostRow], basis: str) -> Rows:
    table = _table("", "MFLOPs", "moved", "kernels", *([f"seconds ({basis})"] if basis else []), title=title)
    for name, row in _distinct(rows):
        parts = [part for part in "FBW" if row.figures[f"{part} kernels"]] or ["F"]
        for part in parts:
            cells = [
                name if part == parts[0] else "",
                part,
                f"{row.figures[f'{part} flops'] / 1e6:,.3f}",
                bytes_text(row.figures[f"{part} bytes"]),
                str(row.figures[f"{part} kernels"]),
            ]
            if row.seconds is not None:
                cells.append(seconds_text(row.seconds["FBW".index(part)]))
            table.add_row(*cells, end_section=part == parts[-1])
    return table


def _bytes_table(title: str, rows: Sequence[CostRow]) -> Rows:
    table = _table(*HELD, title=title)
    for name, row in _distinct(rows):
        table.add_row(name, *(bytes_text(row.figures[column.heading]) for column in HELD))
    return table


def _expression_table(title: str, rows: Sequence[CostRow]) -> Rows:
    """One figure a line; those that are always 0 are left out."""
    table = _table("figure", "expression", title=title)
    for name, row in _distinct(rows):
        lines = [(figure, str(e)) for figure, e in row.expressions.items() if e != 0]
        for position, (figure, text) in enumerate(lines):
            table.add_row("" if position else name, figure, text, end_section=position == len(lines) - 1)
    return table


def _table(*columns: str | Column, title: str) -> Rows:
    return folding("name", *columns, title=title)


def _distinct(rows: Sequence[CostRow]) -> Iterator[tuple[str, CostRow]]:
    """(name, row) of the first row of each variant, its name with the number of the others."""
    members: dict[str, list[CostRow]] = {}
    for row in rows:
        members.setdefault(row.template if row.name != row.component else row.name, []).append(row)
    for found in members.values():
        others = f" and {len(found) - 1} more {found[0].template}" if len(found) > 1 else ""
        yield escape(f"{found[0].name}{others}"), found[0]


def profile_table(found: Profile) -> Rows:
    """Measured against modelled seconds, a variant a row."""
    seconds = ("measured F/B/W", "modelled F/B/W")
    table = folding("template", Column("regions", 1), *seconds, "error", title=found.hardware.measured_on)
    for row in found.rows:
        table.add_row(
            escape(row.variant), str(row.regions), " / ".join(map(seconds_text, row.measured)),
            " / ".join(map(seconds_text, row.modelled)), f"{row.error:+.1%}",
        )  # fmt: skip
    return table


def wire_text(wire: Wire) -> str:
    """Its latency and bandwidth."""
    return f"{seconds_text(wire.latency)} and {bytes_text(wire.bandwidth)}/s"


def profile_summary(found: Profile) -> str:
    """What was fitted, and how near the model comes."""
    fitted = found.hardware
    return (
        f"fitted: matmuls {fitted.matmul_efficiency:.1%} of the peak, memory {bytes_text(fitted.reached_bandwidth)}/s, "
        f"{seconds_text(fitted.launch)} a kernel\n"
        f"a message {wire_text(fitted.within)}, a collective {wire_text(fitted.collective or fitted.within)}, "
        f"an action {seconds_text(fitted.action)} beside its kernels, a message "
        f"{seconds_text(fitted.handling)} of each of its two ranks\n"
        f"model against measured: {found.error:+.1%} of a microbatch, {found.mean_error:.1%} on average over all parts"
    )
