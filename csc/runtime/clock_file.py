"""The clocks of a step as a file: what `csc energy -o` writes and `csc.run --clocks` reads.

    clocks_document(name, schedule, clocks, seconds, joules, sources) -> dict, ready for `json.dump`
    read_clocks(path, schedule) -> per rank {action: MHz}

In the file a rank is the list of its computes in their order, each with its clock in MHz: [["F 0 0", 1410], ...].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from csc.errors import InputError
from csc.ir.schedule import Action, Schedule

FORMAT = "csc clocks"
VERSION = 1
REMEDY = "write it with `csc energy TARGET -o clocks.json`, for the plan that is run"


def clocks_document(
    name: str, schedule: Schedule, clocks: Sequence[Sequence[int]], seconds: float, joules: float,
    sources: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """clocks: MHz by rank, of every compute in its order. seconds, joules: of the step with them."""
    computes = ([action for action in actions if action.computes] for actions in schedule.ranks)
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "schedule": schedule.name,
        "seconds": seconds,
        "joules": joules,
        "sources": list(sources),
        "ranks": [[[str(a), clock] for a, clock in zip(actions, own)] for actions, own in zip(computes, clocks)],
    }


def read_clocks(path: Path, schedule: Schedule) -> list[dict[Action, int]]:
    """By rank the clock of each compute. InputError, with the place, for a file that is none, or of another plan."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"these are no clocks: {error}", str(path), REMEDY) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise InputError("these are no clocks", str(path), REMEDY)
    rows = data.get("ranks")
    if not isinstance(rows, list) or len(rows) != len(schedule.ranks):
        count = len(rows) if isinstance(rows, list) else 0
        raise InputError(f"it is for {count} pipeline ranks, the program has {len(schedule.ranks)}", str(path), REMEDY)
    found = []
    for rank, (actions, listed) in enumerate(zip(schedule.ranks, rows)):
        computes = [action for action in actions if action.computes]
        own: dict[Action, int] = {}
        if not isinstance(listed, list) or len(listed) != len(computes):
            raise InputError(f"rank {rank} has other actions than the program", str(path), REMEDY)
        for action, row in zip(computes, listed):
            good = isinstance(row, list) and len(row) == 2 and type(row[1]) is int and row[1] > 0
            if not good or row[0] != str(action):
                raise InputError(f"rank {rank} has {row!r} where the program runs '{action}'", str(path), REMEDY)
            own[action] = row[1]
        found.append(own)
    return found
