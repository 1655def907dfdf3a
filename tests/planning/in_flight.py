"""How many microbatches a schedule holds at once, counted."""

from __future__ import annotations

from csc.ir.schedule import Schedule


def peak_in_flight(schedule: Schedule) -> list[int]:
    """Per stage, the largest number of microbatches whose saved activations are alive at once.

    They live from F to the last of the stage's B and W of that microbatch. A stage without B or W keeps
    nothing: 0.
    """
    peaks = dict.fromkeys(schedule.placement, 0)
    for actions in schedule.ranks:
        last = {(a.stage, a.microbatch): i for i, a in enumerate(actions) if a.kind in ("B", "W", "BW")}
        alive = dict.fromkeys(peaks, 0)
        for i, action in enumerate(actions):
            item = (action.stage, action.microbatch)
            if action.kind == "F" and item in last:
                alive[action.stage] += 1
                peaks[action.stage] = max(peaks[action.stage], alive[action.stage])
            elif action.kind in ("B", "W", "BW") and last[item] == i:
                alive[action.stage] -= 1
    return list(peaks.values())
