"""Rows of names and figures on a terminal of any width, without a broken name.

Terms
  atom        what a line break never divides: a name, or a figure with its unit (544 KiB) or number (layer x 3)
  optional    a column that a table which is too wide leaves out; the higher its number, the sooner

A table is as wide as the terminal, with edges, or without where that lets every column stay; else without optional
columns, and the line below it says which, and how to see them. Where even the others do not fit, each row is listed:
its name, and under it the other columns by their headings.

    rows = Rows(columns, title, show_lines)       rows.add_row(*cells, end_section)       console.print(rows)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

NAME = "name"  # the heading that a list leaves out
INDENT = 2
PROSE = 20  # characters that a column of sentences has at least, where it is not squeezed
ATOM = re.compile(r"(?:[+-]?\d[\d.,]*\*? (?:B|[KMGTP]iB|s|ms|µs|ns|x)(?!\w)|\S)\S*(?: x \d+\S*)?")


@dataclass(frozen=True)
class Column:
    """optional: 0 stays in every table."""

    heading: str
    optional: int = 0


@dataclass
class Rows:
    """Cells are rich's markup. elsewhere: what shows every column at any width, beside a wider terminal."""

    columns: Sequence[Column]
    title: str | None = None
    show_lines: bool = False
    elsewhere: str = "--json"
    _rows: list[tuple[tuple[str, ...], bool]] = field(default_factory=list)

    @property
    def headings(self) -> tuple[str, ...]:
        """Of the columns, in order."""
        return tuple(column.heading for column in self.columns)

    def add_row(self, *cells: str, end_section: bool = False) -> None:
        """One more, behind which a line is drawn if it ends a section."""
        self._rows.append((cells, end_section))

    def add_section(self) -> None:
        """The last row ends one."""
        if self._rows:
            self._rows[-1] = (self._rows[-1][0], True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width, kept = options.max_width, list(range(len(self.columns)))
        while True:
            for edges in (True, False):
                widths = self._widths(kept, width - _around(len(kept), edges), PROSE)
                if widths is not None:
                    yield from self._table(kept, widths, edges, width)
                    return
            optional = [number for number in kept if self.columns[number].optional]
            if not optional:
                break
            kept.remove(max(optional, key=lambda number: self.columns[number].optional))
        widths = self._widths(kept, width - _around(len(kept), False), 0)
        if widths is not None:
            yield from self._table(kept, widths, False, width)
        else:
            yield from self._listed(width)

    def _widths(self, kept: Sequence[int], width: int, prose: int) -> list[int] | None:
        """Of the columns that are kept; None if their atoms do not fit, or a sentence has less than `prose`."""
        least, most = [], []
        for number in kept:
            heading = self.columns[number].heading
            lines = [line for text in self._cells(number) for line in Text.from_markup(text).plain.splitlines()]
            longest = max(map(len, lines), default=0)
            atoms = [len(atom) for line in lines for atom in ATOM.findall(line)]
            least.append(max([min(longest, prose), *atoms, *map(len, heading.split())], default=0))
            most.append(max(longest, len(heading)))
        spare = width - sum(least)
        if spare < 0:
            return None
        widths = list(least)
        order = sorted(range(len(widths)), key=lambda number: most[number] - least[number])
        for done, number in enumerate(order):
            more = min(most[number] - least[number], spare // (len(order) - done))
            widths[number] += more
            spare -= more
        return widths

    def _cells(self, number: int) -> list[str]:
        return [cells[number] for cells, _ in self._rows if number < len(cells)]

    def _table(
        self, kept: Sequence[int], widths: Sequence[int], edges: bool, width: int
    ) -> Iterator[RenderableType]:  # fmt: skip
        rows = Table(title=self.title, show_lines=self.show_lines)
        if not edges:
            rows.box, rows.padding, rows.show_edge, rows.pad_edge = box.SIMPLE_HEAD, (0, 1, 0, 0), False, False
        for number, wide in zip(kept, widths):
            rows.add_column(self.columns[number].heading, width=wide, overflow="fold")
        for cells, end_section in self._rows:
            rows.add_row(
                *(_broken(cells[number], wide) for number, wide in zip(kept, widths) if number < len(cells)),
                end_section=end_section,
            )
        yield rows
        if len(kept) < len(self.columns):
            yield Padding(self._left_out(kept, width), (0, 0, 1, 0))
        elif not edges:
            yield ""

    def _left_out(self, kept: Sequence[int], width: int) -> Text:
        """Which columns, and how to see them."""
        every = list(range(len(self.columns)))
        wide = width
        while self._widths(every, wide - _around(len(every), False), PROSE) is None:
            wide += 1
        missing = ", ".join(column.heading for number, column in enumerate(self.columns) if number not in kept)
        return Text(f"not shown at {width} columns: {missing}; {wide} columns show all, and so does {self.elsewhere}")

    def _listed(self, width: int) -> Iterator[RenderableType]:
        if self.title:
            yield Text.from_markup(self.title, style="italic")
        first, *others = self.headings
        for cells, _ in self._rows:
            if cells[0]:
                yield Text.from_markup(cells[0] if first == NAME else f"{first} {cells[0]}", overflow="fold")
            named = [f"{heading}: {cell}" if heading else cell for heading, cell in zip(others, cells[1:]) if cell]
            yield Padding(_broken("; ".join(named), width - INDENT), (0, 0, 0, INDENT))
        yield ""


def _around(count: int, edges: bool) -> int:
    """Characters of a table beside those in its columns."""
    return 3 * count + 1 if edges else 2 * (count - 1)


def _broken(cell: str, width: int) -> Text:
    """The cell in lines of this width, broken between atoms; rich breaks an atom that is longer."""
    lines: list[Text] = []
    for line in Text.from_markup(cell).split("\n", allow_blank=True):
        start = end = 0
        for atom in ATOM.finditer(line.plain):
            if atom.end() - start > width and end > start:
                lines.append(line[start:end])
                start = atom.start()
            end = atom.end()
        lines.append(line[start:end])
    return Text("\n").join(lines)
