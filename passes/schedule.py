"""Pass `schedule`: for every stage the order of its F, B, W, sends and receives."""

from __future__ import annotations

from dataclasses import replace

from csc.errors import InputError
from csc.ir.program import Options, Program
from csc.planning.schedules import gpipe, one_f_one_b

SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def schedule(program: Program, options: Options) -> Program:
    """Lay out one step of `options.microbatches` microbatches.

    Requires  pass `partition`.
    Ensures   every F, B and W exactly once per microbatch, no deadlock; stages without B or W have no slot for them.
    Before    stages and messages
    After     stage 0: F 0 0 | SEND F 0>1 0 | F 0 1 | ...;  stage 1: RECV F 0>1 0 | F 1 0 | B 1 0 | SEND B 1>0 0 | ...
    """
    if options.schedule not in SCHEDULES:
        raise InputError(
            f"there is no schedule {options.schedule!r}",
            "schedule",
            f"choose one of {', '.join(sorted(SCHEDULES))}",
        )
    channels = [(m.kind, m.source, m.destination) for m in program.messages]
    has_b = [stage.has_b for stage in program.stages]
    has_w = [stage.has_w for stage in program.stages]
    build = SCHEDULES[options.schedule]
    return replace(program, schedule=build(len(program.stages), options.microbatches, channels, has_b, has_w))
