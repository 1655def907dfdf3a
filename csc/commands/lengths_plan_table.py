"""The tables of `csc plan --lengths`."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from csc.commands.printing import console, table
from csc.commands.rows import Column
from csc.simulation.page import bytes_text, seconds_text


def show_lengths_plan(found: Any, batch_size: int, batches: int) -> None:
    """Print it."""
    title = f"{batches} random steps of {batch_size} samples, by what they take"
    optional = (Column("with mean microbatches", 2), Column("peak memory", 1))
    made = table("mesh", "microbatches", "step", "+-", *optional, title=title)
    for way in found.ways:
        if way.mean is not None:
            tried = ["", ""] if way.step is None else [seconds_text(way.step), seconds_text(way.spread or 0.0)]
            made.add_row(way.mesh, str(way.microbatches), *tried, seconds_text(way.mean), bytes_text(way.peak or 0.0))
    console.print(made)
    for way in found.ways:
        if way.why:
            console.print(f"{way.mesh}, microbatches={way.microbatches}: {escape(way.why)}", highlight=False)
    _show_chosen(found, batch_size)


def _show_chosen(found: Any, batch_size: int) -> None:
    """The stages, and what the choice is worth."""
    first = found.ways[0]
    console.print(
        f"chosen: {first.mesh}, microbatches={first.microbatches}, {escape(found.schedule)}, the best of "
        f"{found.partitions} partitions: {escape(first.layout)}",
        highlight=False,
    )
    for number, (regions, rank) in enumerate(zip(found.stages, found.placement)):
        console.print(
            f"stage {number}, rank {rank}: {escape(regions[0])} ... {escape(regions[-1])} ({len(regions)} regions)",
            highlight=False,
        )
    console.print(
        f"a step takes {seconds_text(found.static)}; with a plan for each batch {seconds_text(found.replanned)}: the "
        f"one plan loses {found.loss:.2%}",
        highlight=False,
    )
    shares = ", ".join(f"{count} of 59 at {size}" for size, count in found.alike.items())
    console.print(f"batches that choose these stages, by batch size: {shares}", highlight=False)
    if found.enough is None:
        console.print("the choice depends on the batch at all of these sizes", highlight=False)
    elif found.enough <= batch_size:
        console.print(f"the choice is stable from {found.enough} samples on", highlight=False)
    else:
        console.print(
            f"the choice is stable from {found.enough} samples on: steps of {batch_size} choose otherwise at times",
            highlight=False,
        )
    console.print(f"costs of samples are off by {found.error:.1%}", highlight=False)
