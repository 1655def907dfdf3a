"""python -m benchmarks.tables: writes docs/measurements.md out of docs/measurements/*.json, a table each.

A file has `title`, `about` (what a row is), `runs` (date, machine and command of each, and which rows are its),
`columns` (names, or pairs of a name and the format of its numbers), `rows`, and `notes` below the table. A cell is a
text, a number, null, or a list of these. A new measurement replaces the row that it repeats: the page shows what holds
now, git the rest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "measurements"
PAGE = DOCS / "measurements.md"
TABLES = (
    "gradients", "tensor", "step", "products", "gpu", "attention", "plans", "meshes", "dispatch", "runs", "faults",
)  # fmt: skip
HEAD = """# Measurements

What csc gives beside eager PyTorch, and the time and memory that steps, plans and programs take. Each table says when,
where and by which command it was measured. *CPU* machines have two cores, 24 GiB and, unless a row says otherwise,
torch 2.13.0. A number without a unit is a ratio. `/` separates the values of one cell, in the order of the list in its
row or column.

`python -m benchmarks.tables` writes this page from the files in `docs/measurements/`: edit those. Tables about one
subject stand on its page: [balanced batches](balance.md#measured), [features encoded ahead](features.md#encoded-ahead),
[energy](energy.md#measured), [losses of ranks and jitter](survive-figures.md), [models](models.md#what-was-tried),
[random models](fuzzing.md), [published figures](published.md).
"""

Cell: TypeAlias = "str | int | float | list[Cell] | None"


@dataclass(frozen=True)
class Table:
    """One table of the page.

    columns: (name, format of its numbers). runs: each with `date`, `machine`, `command` and perhaps `rows`, a text that
    says which rows are its; none where each row has a date and a command.
    """

    title: str
    about: str
    runs: tuple[dict[str, str], ...]
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: row {row[0]!r} has {len(row)} cells, for {len(self.columns)} columns.")
        if not self.runs and not {"date", "command"} <= dict(self.columns).keys():
            raise ValueError(f"{self.title}: nothing says when and by which command it was measured.")
        for run in self.runs:
            if missing := {"date", "machine", "command"} - run.keys():
                raise ValueError(f"{self.title}: a run lacks {', '.join(sorted(missing))}.")


def read(name: str) -> Table:
    """The table in docs/measurements/NAME.json.

    Raises:
        ValueError: a row has more or fewer cells than there are columns, or a run lacks its date, machine or command.
    """
    fields: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    columns = tuple((column, "") if isinstance(column, str) else tuple(column) for column in fields.pop("columns"))
    return Table(columns=columns, **{key: _frozen(value) for key, value in fields.items()})


def markdown(table: Table) -> str:
    """Its section: title, what a row is, the runs, the table, the notes."""
    names = [name for name, _ in table.columns]
    lines = [f"## {table.title}", "", table.about, ""]
    lines += [*(f"- {_run(run)}" for run in table.runs), ""] if table.runs else []
    lines += [_row(names), _row(["---"] * len(names))]
    lines += [_row([_cell(value, column[1]) for value, column in zip(row, table.columns)]) for row in table.rows]
    lines += [""] if table.notes else []
    return "\n".join([*lines, *(f"- {note}" for note in table.notes)]) + "\n"


def page() -> str:
    """The text of docs/measurements.md."""
    return "\n".join([HEAD, *(markdown(read(name)) for name in TABLES)])


def _run(run: dict[str, str]) -> str:
    rows = f"{run['rows']}: " if "rows" in run else ""
    return f"{rows}`{run['command']}`, {run['machine']}, {run['date']}."


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Cell | tuple[Cell, ...], form: str) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return " / ".join(_cell(item, form) for item in value)
    return value if isinstance(value, str) else format(value, form)


def _frozen(value: Any) -> Any:
    return (
        tuple(tuple(item) if isinstance(item, list) else item for item in value) if isinstance(value, list) else value
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE}: {len(TABLES)} tables")
