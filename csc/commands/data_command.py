"""`csc data`: what balance makes of a file of lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from csc.commands.model_options import LENGTHS, BatchSizeOption, MultipleOption, Opening, PackedOption, on_target
from csc.commands.printing import DebugOption, JsonOption, console, print_json, table
from csc.simulation.page import seconds_text

SHOWN = 24  # sizes


@on_target
def data(
    opening: Opening,
    lengths: Annotated[Path, typer.Option("--lengths", help=LENGTHS)],
    batch_size: BatchSizeOption = 128,
    multiple: MultipleOption = 64,
    packed: PackedOption = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="random steps that are simulated")] = 8,
    page: Annotated[Path | None, typer.Option("--page", help="also write an HTML page of it")] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """How long samples are, what dividing them by their costs gains (csc.balanced), and which sizes are compiled."""
    from csc.balance.sample_costs import of_file
    from csc.reports.data import of_lengths
    from csc.reports.data import page as page_of

    with opening as compiled:
        found = of_lengths(compiled, of_file(lengths), batch_size, multiple, packed, steps)
        title = f"{compiled.program.name}: lengths of {lengths.name}"
    if page is not None:
        page.write_text(page_of(found, title), encoding="utf-8")
    if json_output:
        print_json(found.as_dict())
        return
    first = next(iter(found.distribution.values()))
    spread = table("", *first, title=f"{found.samples} samples")
    for name, values in found.distribution.items():
        spread.add_row(name, *(f"{value:.4g}" for value in values.values()))
    console.print(spread)
    ways = table("samples divided", "a step takes", "x of balanced", title=f"{steps} steps of {batch_size} samples")
    for way, seconds in found.seconds.items():
        ways.add_row(way, seconds_text(seconds), f"{seconds / found.seconds['balanced']:.3f}")
    console.print(ways)
    shown = ", ".join(" x ".join(map(str, size[-2:])) for size in found.sizes[:SHOWN])
    more = f" and {len(found.sizes) - SHOWN} more" if len(found.sizes) > SHOWN else ""
    console.print(f"{len(found.sizes)} sizes of microbatches (rows x width): {shown}{more}", highlight=False)
    console.print(
        f"{found.outside} of {found.microbatches} microbatches had another size; costs are off by {found.error:.1%}",
        highlight=False,
    )
