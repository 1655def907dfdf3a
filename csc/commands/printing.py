"""Where commands print: rows of names and figures on a terminal of any width, and progress."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

# --- Rows of names and figures on a terminal of any width, without a broken name -------------------------------------
#
# Terms
#   atom        what a line break never divides: a name, or a figure with its unit (544 KiB) or number (layer x 3)
#   optional    a column that a table which is too wide leaves out; the higher its number, the sooner
#
# A table is as wide as the terminal, with edges, or without where that lets every column stay; else without optional
# columns, and the line below it says which, and how to see them. Where even the others do not fit, each row is listed:
# its name, and under it the other columns by their headings.
#
#     rows = Rows(columns, title, show_lines)       rows.add_row(*cells, end_section)       console.print(rows)


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
        first, *rest = self.headings
        for cells, _ in self._rows:
            if cells[0]:
                yield Text.from_markup(cells[0] if first == NAME else f"{first} {cells[0]}", overflow="fold")
            named = [f"{heading}: {cell}" if heading else cell for heading, cell in zip(rest, cells[1:]) if cell]
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


# --- Where commands print, and the options that many of them have ----------------------------------------------------
#
# Terms: tables are as wide as the terminal, or as the environment says (COLUMNS); without both they have 160 columns.
# Names are what options take, so none is cut: see csc.commands.printing.


WIDE = 160
COMMENT, HELD = "# ", "\N{NO-BREAK SPACE}"  # a source location stays with its mark
CONTINUED = 4  # columns further in than the line that goes on


def width() -> int | None:
    """None: rich looks it up, in COLUMNS or at the terminal."""
    return None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else WIDE


console = Console(width=width())

DebugOption = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]


def table(
    *columns: str | Column, title: str | None = None, show_lines: bool = False, elsewhere: str = "--json"
) -> Rows:
    """A table in which no name is cut or broken; a heading alone is a column that stays at every width. elsewhere: what
    shows all columns.
    """
    headed = [column if isinstance(column, Column) else Column(column) for column in columns]
    return Rows(headed, title, show_lines, elsewhere)


def print_text(text: str) -> None:
    """A listing. On a terminal a line that is too long goes on in the next one, further in; files and pipes get it
    as it is.
    """
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    for line in text.splitlines():
        for part in _in_width(line, console.width):
            sys.stdout.write(part + "\n")


def _in_width(line: str, most: int) -> list[str]:
    """Broken between words; a diff's mark stands before each part."""
    if len(line) <= most:
        return [line]
    mark = line[0] if line[0] in "+-" else ""
    body = line[len(mark) :].replace(COMMENT, COMMENT.replace(" ", HELD))
    inner = " " * (len(body) - len(body.lstrip()) + CONTINUED)
    parts = textwrap.wrap(
        body, most - len(mark), subsequent_indent=inner, break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False,
    )  # fmt: skip
    return [mark + part.replace(HELD, " ") for part in parts]


def print_json(content: Any) -> None:
    """One object, and nothing else: what is a dataclass in it is one, too. Numbers that JSON has not (infinities, NaN)
    are null.
    """
    sys.stdout.write(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if is_dataclass(value):
        return {own.name: _finite(getattr(value, own.name)) for own in fields(value)}
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- What a command is doing, while it does it: a line that changes on a terminal, else a line every few seconds -----


EVERY = 5.0  # seconds between two lines in a log; a command that is done sooner prints none


@contextmanager
def shown(errors: Console, every: float = EVERY) -> Iterator[Callable[[str], None]]:
    """Yields what is to be called with the name of each step."""
    if errors.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=errors, transient=True) as progress:
            task = progress.add_task("loading")
            yield lambda name: progress.update(task, description=escape(name))
        return
    now, done, began = ["loading"], threading.Event(), time.monotonic()

    def speak() -> None:
        while not done.wait(every):
            errors.print(f"csc: {now[0]}, {time.monotonic() - began:.0f} s", highlight=False, markup=False)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield lambda name: now.__setitem__(0, name)
    finally:
        done.set()
        speaker.join()
