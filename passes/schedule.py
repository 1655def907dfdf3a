"""Pass `schedule`: for every rank the order of its F, B, W, sends and receives."""

from __future__ import annotations

from dataclasses import replace

from csc.ir.program import Options, Program
from csc.ir.schedule import verify


def schedule(program: Program, options: Options) -> Program:
    """Lay out one step of `options.microbatches` microbatches.

    Requires  pass `partition`.
    Ensures   every F, B and W exactly once per microbatch, no deadlock; stages without B or W have no slot for them;
              with zero=3 what computes with parameters that ranks divide stands between their GATHER and FREE.
    Before    stages, messages and the plan
    After     rank 0: F 0 0 | SEND F 0>1 0 | F 0 1 | ...;  rank 1: RECV F 0>1 0 | F 1 0 | B 1 0 | SEND B 1>0 0 | ...
    """
    assert program.plan is not None
    channels = [(m.kind, m.source, m.destination) for m in program.messages]
    has_b, has_w = [stage.has_b for stage in program.stages], [stage.has_w for stage in program.stages]
    divided = [stage.divided for stage in program.stages]
    verify(program.plan.schedule, channels, has_b, has_w, options.microbatches, divided)
    return replace(program, schedule=program.plan.schedule)
