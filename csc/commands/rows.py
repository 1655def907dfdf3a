"""Rows of names and figures on a terminal of any width, without a broken name.

Terms: a *word* is what stands between two spaces: names and figures are words. A table is as wide as the terminal, with
edges, or without where that lets every word stay whole; where none does, each row is listed: its name, and under it the
other columns by their headings.

    rows = Rows(columns, title, show_lines)       rows.add_row(*cells, end_section)       console.print(rows)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

NAME = "name"  # the heading that a list leaves out
INDENT = 2


@dataclass
class Rows:
    """Cells are rich's markup."""

    columns: Sequence[str]
    title: str | None = None
    show_lines: bool = False
    _rows: list[tuple[tuple[str, ...], bool]] = field(default_factory=list)

    def add_row(self, *cells: str, end_section: bool = False) -> None:
        """One more, behind which a line is drawn if it ends a section."""
        self._rows.append((cells, end_section))

    def add_section(self) -> None:
        """The last row ends one."""
        if self._rows:
            self._rows[-1] = (self._rows[-1][0], True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for edges in (True, False):
            widths = self._widths(options.max_width, 3 * len(self.columns) + 1 if edges else 2 * len(self.columns) + 1)
            if widths is not None:
                yield self._table(widths, edges)
                return
        yield from self._listed()

    def _widths(self, width: int, around: int) -> list[int] | None:
        """Of the columns, in a table that has `around` characters besides; None if words do not fit."""
        lines = [
            [line for text in (heading, *cells) for line in Text.from_markup(text).plain.splitlines()]
            for heading, cells in zip(self.columns, self._by_column())
        ]
        least = [max((len(word) for line in column for word in line.split()), default=0) for column in lines]
        most = [max(map(len, column), default=0) for column in lines]
        spare = width - around - sum(least)
        if spare < 0:
            return None
        widths = list(least)
        order = sorted(range(len(widths)), key=lambda number: most[number] - least[number])
        for done, number in enumerate(order):
            more = min(most[number] - least[number], spare // (len(order) - done))
            widths[number] += more
            spare -= more
        return widths

    def _by_column(self) -> list[list[str]]:
        return [
            [cells[number] for cells, _ in self._rows if number < len(cells)] for number in range(len(self.columns))
        ]

    def _table(self, widths: Sequence[int], edges: bool) -> Table:
        made = Table(title=self.title, show_lines=self.show_lines)
        if not edges:
            made.box, made.padding = box.SIMPLE_HEAD, (0, 1, 0, 0)
        for heading, width in zip(self.columns, widths):
            made.add_column(heading, width=width, overflow="fold")
        for cells, end_section in self._rows:
            made.add_row(*cells, end_section=end_section)
        return made

    def _listed(self) -> Iterator[RenderableType]:
        if self.title:
            yield Text.from_markup(self.title, style="italic")
        for cells, _ in self._rows:
            if cells[0]:
                name = cells[0] if self.columns[0] == NAME else f"{self.columns[0]} {cells[0]}"
                yield Text.from_markup(name, overflow="fold")
            others = [f"{one}: {cell}" if one else cell for one, cell in zip(self.columns[1:], cells[1:]) if cell]
            yield Padding(Text.from_markup("; ".join(others)), (0, 0, 0, INDENT))
        yield ""
