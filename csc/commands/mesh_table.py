"""Meshes beside each other, the fastest first, and why others are not among them.

show_meshes(choice, seconds)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from csc.commands.printing import console, table
from csc.commands.rows import Column
from csc.simulation.look import bytes_text, seconds_text

if TYPE_CHECKING:
    from csc.driver.mesh_rows import MeshChoice

MOST = 12  # rows


def show_meshes(choice: MeshChoice, seconds: float) -> None:
    """Print them. seconds: that were allowed."""
    limit = "" if choice.memory is None else f", memory limit {bytes_text(choice.memory)}"
    title = f"{choice.step} samples a step on {choice.devices} devices{limit}"
    split = ("mesh", "microbatches", Column("of", 4), Column("zero", 1), Column("recompute", 2))
    made = table(*split, "step", Column("samples/s", 5), Column("idle", 3), "peak memory", title=title)
    for row in choice.rows[:MOST]:
        peak = bytes_text(row.peak_memory) + ("" if row.fits else ", above the limit")
        mesh = "".join([row.mesh, *(f", context {name}={ranks}" for name, ranks in row.context.items())])
        mesh += ", sequence parallel" * row.sequence_parallel
        made.add_row(
            mesh, str(row.microbatches), str(row.samples), str(row.zero), row.recompute, seconds_text(row.seconds),
            f"{choice.step / row.seconds:.3g}", f"{max(0.0, row.idle):.1%}", peak,
        )  # fmt: skip
    console.print(made)
    if len(choice.rows) > MOST:
        console.print(f"and {len(choice.rows) - MOST} that take longer", highlight=False)
    if choice.slower:
        console.print(f"{choice.slower} were not planned: no plan of theirs can be faster", highlight=False)
    if choice.far:
        console.print(f"{choice.far} were not planned: they are expected to take at least 15% longer", highlight=False)
    if choice.large:
        console.print(f"{choice.large} do not fit, whatever is divided or computed again", highlight=False)
    for mesh, why in choice.refused.items():
        console.print(f"no {escape(mesh)}: {escape(why)}", highlight=False)
    if choice.left:
        least = f", which take {seconds_text(choice.left_seconds)} at least" * bool(choice.left_seconds)
        gain = f": {choice.gap:.0%} less than the best at most" * bool(choice.left_seconds)
        console.print(f"no time within --limit {seconds:g} for {choice.left} more{least}{gain}", highlight=False)
    best = choice.rows[0]
    if best.fits:
        ways = f" --zero {best.zero}" * bool(best.zero) + f" --recompute {best.recompute}" * (best.recompute != "none")
        ways += " --sequence-parallel" * best.sequence_parallel
        ways += "".join(f" --context {name}={ranks}" for name, ranks in best.context.items())
        console.print(f"best: --mesh {best.mesh} --microbatches {best.microbatches}{ways}", highlight=False)
        for other in choice.room:
            needs = f"with {bytes_text(other.peak_memory)} on a device or more"
            text = f"{other.mesh} with {other.how}"
            console.print(f"{needs}: {escape(text)}, {seconds_text(other.seconds)} at least", highlight=False)
    else:
        console.print("none of them fits: use more devices, or a smaller step", highlight=False)
