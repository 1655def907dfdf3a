"""Programs of one model for microbatches of different sizes, run together in one step.

Terms: the *members* of one set have the mesh, the stages, the order of work and the parameters in common. They differ
in the sizes of what they read, compute and send. A *part* is for microbatches without some entries (images): its stages
may have nothing to do, and lack a B, a W, messages and parameters that the first member has.

    check_member(first, other)        ProgramError if they cannot be run together
    is_part(first, other)             of manifests
"""

from __future__ import annotations

from typing import Any

from csc.errors import ProgramError
from csc.ir.schedule import Message, part
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.specs import Manifest


def check_member(first: LoadedProgram, other: LoadedProgram) -> None:
    """ProgramError, naming what differs, unless a step may hold microbatches of both."""
    ours, theirs = _common(first), _common(other)
    if is_part(first.manifest, other.manifest):
        differing = _beyond(first, other)
    else:
        differing = [what for what in ours if ours[what] != theirs[what]]
    if differing:
        raise ProgramError(
            f"it cannot run in one step with {first.directory}: {' and '.join(differing)} differ",
            str(other.directory),
            "Compile both from one CompiledModel, which cuts them the same way",
        )


def is_part(first: Manifest, other: Manifest) -> bool:
    """Whether a program lacks entries of the batch that the first one reads."""
    return not {one.name for one in other.inputs} >= {one.name for one in first.inputs}


def _beyond(first: LoadedProgram, other: LoadedProgram) -> list[str]:
    """In what a part has more than the first program, or something else."""
    ours, theirs = _common(first), _common(other)
    alike = [what for what in ("meshes", "zero", "microbatches", "losses") if ours[what] != theirs[what]]
    first_stages = {stage[0]: stage for stage in ours["stages"]}
    stages = all(
        rank == first_stages[stage][1] and has_b <= first_stages[stage][2] and has_w <= first_stages[stage][3]
        for stage, rank, has_b, has_w in theirs["stages"]
    )
    known = {name: (rest, set(stages)) for name, *rest, stages in ours["parameters"]}
    parameters = all(
        name in known and known[name][0] == rest and known[name][1] >= set(stages)
        for name, *rest, stages in theirs["parameters"]
    )
    schedule = part(
        first.schedule,
        theirs["messages"],
        [stage.backward_input for stage in other.manifest.stages],
        [stage.backward_weight for stage in other.manifest.stages],
        other.manifest.divided,
    )
    place = {stage: rank for stage, rank, *_ in theirs["stages"]}

    def stays(channel: Message) -> bool:
        return bool(place[channel[1]] == place[channel[2]])

    good = {
        "stages": stages and len(first_stages) == len(theirs["stages"]),
        "messages": {channel for channel in theirs["messages"] if not stays(channel)} <= ours["messages"].keys(),
        "parameters": parameters,
        "schedules": str(schedule) == str(other.schedule),
    }
    return alike + [what for what, fine in good.items() if not fine]


def _common(program: LoadedProgram) -> dict[str, Any]:
    manifest = program.manifest
    return {
        "meshes": manifest.mesh,
        "zero": manifest.zero,
        "microbatches": manifest.microbatches,
        "stages": [(s.stage, s.rank, s.backward_input, s.backward_weight) for s in manifest.stages],
        "messages": {m.channel: [value.name for value in m.values] for m in manifest.messages},
        "parameters": [
            (p.name, p.shape, p.dtype, p.trainable, p.weight, p.gradient, p.boxes, p.stages)
            for p in manifest.parameters
        ],
        # A step of one microbatch alone has none to combine.
        "losses": (
            (manifest.loss, [s.weighs for s in manifest.stages])
            if manifest.microbatches * manifest.mesh.dp > 1
            else manifest.loss.stage
        ),
        "schedules": str(program.schedule),
    }
