"""What ranks tell each other of functions that are compiled, before any of them runs one.

Terms: a program is *settled* once all ranks of a step know which of its functions run compiled, and which as they are.
A function that one rank could not have compiled, for arguments of a form, runs as it is on all ranks.

    FusedWord(program, positions, ...)                  of one program, by one process
    told(meeting, make) -> [FusedWord]                  of all ranks; `make` gives those of this one

All ranks call `told` in the same step: what they said before it tells them to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from csc.runtime.meeting import Meeting
from csc.runtime.words import NOTHING

FUNCTIONS = "compiled functions"  # the operation


@dataclass(frozen=True)
class FusedWord:
    """program: its number in the order in which all ranks take them. positions: those of its ranks here on the pp axis.
    built: with what its functions are compiled. everything: why none is to run compiled; "": each for itself. refused:
    why a function is not to, by its name and form. notes: what the functions are called with could not be told ahead,
    and is noted in this step.
    """

    program: int
    positions: Sequence[int]
    built: str = ""
    everything: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    notes: bool = False


def told(meeting: Meeting, make: Callable[[], Sequence[FusedWord]]) -> list[FusedWord]:
    """By rank. What `make` raises is raised, and StepFailed on the other ranks."""
    own = meeting.hold(FUNCTIONS, lambda: (NOTHING, json.dumps([asdict(one) for one in make()])))
    return [FusedWord(**one) for text in meeting.texts(FUNCTIONS, own) for one in json.loads(text)]
