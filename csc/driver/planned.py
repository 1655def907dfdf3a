"""The memory that the plan expects, beside what was measured.

planned_memory(program, ranks) -> bytes    of the ranks that this process runs; None without a plan
beside(metrics) -> str                     one sentence for the log
"""

from __future__ import annotations

from collections.abc import Mapping

from csc.runtime.loaded_program import LoadedProgram
from csc.simulation.page import bytes_text
from csc.simulation.pipeline import from_json as read_pipeline
from csc.simulation.pipeline import peaks as peaks_of_run
from csc.simulation.simulate import simulate


def planned_memory(program: LoadedProgram, ranks: tuple[int, ...]) -> float | None:
    """All that these ranks hold, each at its fullest, as the plan accounts for it."""
    figures = program.manifest.plan.get("pipeline")
    if not figures:
        return None
    pipeline = read_pipeline(figures)
    peaks = peaks_of_run(pipeline, program.schedule, simulate(pipeline, program.schedule))
    return sum(peaks[program.manifest.mesh.coordinates(rank).pp] for rank in ranks)


def beside(metrics: Mapping[str, float]) -> str:
    """What was planned and what was measured, of a device whose measure is of tensors alone: on a CPU it is of the
    whole process, with Python and its libraries, which no plan holds.
    """
    measured, planned = bytes_text(metrics["peak_memory"]), bytes_text(metrics["planned_memory"])
    return f"memory of this process' ranks: {planned} planned; {measured} measured"
