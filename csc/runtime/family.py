"""Programs of one model for microbatches of different sizes, run together in one step.

Terms: the *members* of a family have the mesh, the stages, the schedule and the parameters in common. They differ in
the sizes of what they read, compute and send.

    check_member(first, other)        ProgramError if they cannot be run together
"""

from __future__ import annotations

from typing import Any

from csc.errors import ProgramError
from csc.runtime.program import LoadedProgram


def check_member(first: LoadedProgram, other: LoadedProgram) -> None:
    """ProgramError, naming what differs, unless a step may hold microbatches of both."""
    ours, theirs = _common(first), _common(other)
    differing = [what for what in ours if ours[what] != theirs[what]]
    if differing:
        raise ProgramError(
            f"it cannot run in one step with {first.directory}: {' and '.join(differing)} differ",
            str(other.directory),
            "Compile both from one CompiledModel, which cuts them the same way",
        )


def _common(program: LoadedProgram) -> dict[str, Any]:
    manifest = program.manifest
    return {
        "meshes": manifest.mesh,
        "microbatches": manifest.microbatches,
        "stages": [(s.stage, s.rank, s.backward_input, s.backward_weight) for s in manifest.stages],
        "messages": {m.channel: [value.name for value in m.values] for m in manifest.messages},
        "parameters": [
            (p.name, p.shape, p.dtype, p.trainable, p.stages, p.weight, p.gradient) for p in manifest.parameters
        ],
        # A step of one microbatch alone has none to combine.
        "losses": manifest.loss if manifest.microbatches * manifest.mesh.dp > 1 else manifest.loss.stage,
        "schedules": str(program.schedule),
    }
