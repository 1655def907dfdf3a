"""Memory of a rank as its actions go by. It depends on their order alone, so peaks need no simulation.

Terms: see csc.simulation.pipeline. A microbatch's `saved` bytes come at F's start and go at B's end, which leaves
`stashed`; those go at W's end. BW takes `fused` while it runs and leaves nothing. A stage with W but no B holds `saved`
until W's end; one with neither holds nothing. From GATHER until FREE there are `gathered` bytes.

    changes(stages) -> {kind: [(bytes at the start, bytes at the end) for each stage]}
    peak_memory(pipeline, schedule) -> [bytes for each rank]
    states(pipeline, schedule) -> [bytes for each rank]
"""

from __future__ import annotations

from collections.abc import Sequence

from csc.ir.schedule import PARTS, WHOLE, Schedule
from csc.simulation.pipeline import Pipeline, StageWork

Change = tuple[float, float]


def changes(stages: Sequence[StageWork]) -> dict[str, list[Change]]:
    """By how much each action of each stage changes the bytes alive of its rank, at its start and at its end."""
    per_stage = [_changes(stage) for stage in stages]
    return {kind: [change[i] for change in per_stage] for i, kind in enumerate(PARTS)}


def _changes(stage: StageWork) -> tuple[Change, ...]:
    """Those of F, B, W and BW."""
    nothing = (0.0, 0.0)
    if stage.has_b:
        stashed = stage.stashed if stage.has_w else 0.0
        both = (stage.fused, -stage.fused - stage.saved)
        return (stage.saved, 0.0), (0.0, stashed - stage.saved), (0.0, -stashed), both
    if stage.has_w:
        return (stage.saved, 0.0), nothing, (0.0, -stage.saved), nothing
    return nothing, nothing, nothing, nothing


def states(pipeline: Pipeline, schedule: Schedule) -> list[float]:
    """Per rank, what is there for the whole step: the state of its stages, and room for what one of them works with."""
    total = [0.0] * len(schedule.ranks)
    working = [0.0] * len(schedule.ranks)
    for stage, rank in schedule.placement.items():
        total[rank] += pipeline.stages[stage].state
        working[rank] = max(working[rank], pipeline.stages[stage].working)
    return [state + most for state, most in zip(total, working)]


def peak_memory(pipeline: Pipeline, schedule: Schedule) -> list[float]:
    """Per rank, the most bytes alive at once, state included. O(actions)."""
    alike = changes(pipeline.stages)
    loads = pipeline.loads
    each = [] if loads is None else [changes(pipeline.stages_of(m)) for m in range(len(loads.features))]
    peaks = states(pipeline, schedule)
    for rank, actions in enumerate(schedule.ranks):
        now = peak = peaks[rank]
        for action in actions:
            if action.kind in WHOLE:
                now += pipeline.stages[action.stage].gathered * (1 if action.kind == "GATHER" else -1)
                peak = max(peak, now)
            elif action.kind in alike:
                before, after = (each[action.microbatch] if each else alike)[action.kind][action.stage]
                now += before
                peak = max(peak, now)
                now += after
                peak = max(peak, now)
        peaks[rank] = peak
    return peaks
