"""Meshes beside each other, the fastest first, and why others are not among them.

show_meshes(choice, seconds)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from csc.commands.printing import console, table
from csc.commands.rows import Column
from csc.simulation.page import bytes_text, seconds_text

if TYPE_CHECKING:
    from csc.driver.mesh_candidates import MeshChoice

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
        console.print(f"{_meshes(choice.slower)} not planned: no plan for them can be faster", highlight=False)
    if choice.far:
        console.print(f"{_meshes(choice.far)} not planned: expected to take at least 15% longer", highlight=False)
    if choice.large:
        console.print(
            f"{_meshes(choice.large)} too large: they do not fit even with all sharding and recomputation",
            highlight=False,
        )
    for mesh, why in choice.refused.items():
        console.print(f"no {escape(mesh)}: {escape(why)}", highlight=False)
    if choice.left:
        least = f", which take at least {seconds_text(choice.left_seconds)}" * bool(choice.left_seconds)
        gain = f" (at most {choice.gap:.0%} less than the best)" * bool(choice.left_seconds)
        console.print(f"--limit {seconds:g} left no time for {choice.left} more{least}{gain}", highlight=False)
    best = choice.rows[0]
    if best.fits:
        ways = f" --zero {best.zero}" * bool(best.zero) + f" --recompute {best.recompute}" * (best.recompute != "none")
        ways += " --sequence-parallel" * best.sequence_parallel
        ways += "".join(f" --context {name}={ranks}" for name, ranks in best.context.items())
        console.print(f"best: --mesh {best.mesh} --microbatches {best.microbatches}{ways}", highlight=False)
        for other in choice.room:
            needs = f"with at least {bytes_text(other.peak_memory)} on a device"
            text = f"{other.mesh} with {other.how}"
            console.print(f"{needs}: {escape(text)}, at least {seconds_text(other.seconds)}", highlight=False)
    else:
        console.print("none of them fits: use more devices, or a smaller step", highlight=False)


def _meshes(number: int) -> str:
    return f"{number} mesh was" if number == 1 else f"{number} meshes were"
