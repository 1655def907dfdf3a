"""`csc data`: what balance makes of a file of lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from csc.commands.model_options import LENGTHS, BatchSizeOption, MultipleOption, Opening, PackedOption, on_target
from csc.commands.printing import JsonOption, console, print_json, table
from csc.simulation.page import seconds_text

SHOWN = 24  # sizes


@on_target
def data(
    opening: Opening,
    lengths: Annotated[Path, typer.Option("--lengths", help=LENGTHS)],
    batch_size: BatchSizeOption = 128,
    multiple: MultipleOption = 64,
    packed: PackedOption = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="number of random steps to simulate")] = 8,
    json_output: JsonOption = False,
) -> None:
    """Show the lengths of samples, the gain of dividing them by cost (csc.balanced), and the sizes to compile."""
    from csc.balance.sample_costs import of_file
    from csc.reports.data import of_lengths

    with opening as compiled:
        figures = of_lengths(compiled, of_file(lengths), batch_size, multiple, packed, steps)
    if json_output:
        print_json(figures)
        return
    first = next(iter(figures.distribution.values()))
    spread = table("", *first, title=f"{figures.samples} samples")
    for name, values in figures.distribution.items():
        spread.add_row(name, *(f"{value:.4g}" for value in values.values()))
    console.print(spread)
    rows_table = table(
        "samples divided", "a step takes", "x of balanced", title=f"{steps} steps of {batch_size} samples"
    )
    for name, seconds in figures.seconds.items():
        rows_table.add_row(name, seconds_text(seconds), f"{seconds / figures.seconds['balanced']:.3f}")
    console.print(rows_table)
    shown = ", ".join(" x ".join(map(str, size[-2:])) for size in figures.sizes[:SHOWN])
    more = f" and {len(figures.sizes) - SHOWN} more" if len(figures.sizes) > SHOWN else ""
    console.print(f"{len(figures.sizes)} sizes of microbatches (rows x width): {shown}{more}", highlight=False)
    console.print(
        f"{figures.outside} of {figures.microbatches} microbatches had another size; "
        f"costs are off by {figures.error:.1%}",
        highlight=False,
    )
