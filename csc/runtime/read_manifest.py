"""program.json, checked field by field, as a Manifest (csc.runtime.specs).

manifest(table, where) -> Manifest        ProgramError for any field that is missing or wrong
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from csc.errors import CscError, ProgramError
from csc.ir.groups import WHOLE, Group, Placement, group_over, places
from csc.ir.mesh import Mesh
from csc.ir.strides import overlaps
from csc.runtime import boxes
from csc.runtime.fields import REMEDY, Fields, short
from csc.runtime.specs import (
    Box,
    ConstantSpec,
    ContextMaskSpec,
    ContextSpec,
    DivisorSpec,
    DrawSpec,
    FeatureSpec,
    InputSpec,
    LossSpec,
    Manifest,
    MessageSpec,
    ParameterSpec,
    StageSpec,
    ValueSpec,
)

FORMAT = 6
ZERO = 3  # the highest level of what data-parallel ranks divide
LOSS_WEIGHTS = ("tokens", "sum", "mean", "terms")


def manifest(table: Any, where: str) -> Manifest:
    """Check and convert the parsed JSON. `where` names the file in errors."""
    top = Fields(table, where)
    version = top.get("format", int)
    if version != FORMAT:
        raise ProgramError(
            f"its format is version {version}, this csc reads version {FORMAT}", where, "Compile it again"
        )
    try:
        mesh = Mesh.of(top.get("mesh", dict))
    except CscError as error:
        raise ProgramError(error.what, f"{where}, mesh", error.remedy) from None
    stages = tuple(_stage(row, mesh.pp) for row in top.rows("stages"))
    files = top.hashes("files")
    _check_stages(stages, mesh, len(files), where)
    microbatches = top.get("microbatches", int)
    if microbatches < 1:
        raise ProgramError(f"it has {microbatches} microbatches", where, REMEDY)
    inputs = tuple(map(_input, top.rows("inputs")))
    parameters = tuple(_parameter(row, stages, mesh) for row in top.rows("parameters"))
    constants = tuple(ConstantSpec(r.get("name", str), r.stages("stages", len(stages))) for r in top.rows("constants"))
    messages = tuple(_message(row, len(stages)) for row in top.rows("messages"))
    _once("inputs", [one.name for one in inputs], where)
    _once("parameters", [one.name for one in parameters], where)
    _once("constants", [one.name for one in constants], where)
    _once("messages", [one.channel for one in messages], where)
    known = {one.name for one in inputs} | top.get("fixed", dict, {}).keys()
    for stage in stages:
        unknown = set(stage.inputs) - known
        if unknown:
            raise ProgramError(f"stage {stage.stage} reads {min(unknown)!r}, which is no input", where, REMEDY)
    return Manifest(
        name=top.get("name", str),
        fingerprint=top.get("fingerprint", str),
        mesh=mesh,
        device=_device(top),
        microbatches=microbatches,
        inputs=inputs,
        fixed=top.get("fixed", dict, {}),
        parameters=parameters,
        constants=constants,
        messages=messages,
        stages=stages,
        loss=_loss(top, len(stages)),
        features=_features(top),
        contexts=_contexts(top, mesh, stages),
        draws=tuple(_draw(row) for row in top.rows("random", [])),
        zero=_zero(top),
        frozen=top.names("frozen", []),
        plan=top.get("plan", dict, {}),
        files=files,
        tensors=top.hashes("tensors", {}),
    )


def _input(row: Fields) -> InputSpec:
    whole, table, classes = row.get("whole", bool, False), row.limit("table"), row.classes("classes")
    return InputSpec(row.get("name", str), row.sizes("shape"), row.dtype(), whole, table, classes)


def _draw(row: Fields) -> DrawSpec:
    p = row.get("p", (int, float, type(None)))
    if p is not None and not 0 <= p <= 1:
        raise ProgramError(f"field 'p' is {p}, which no probability is", row.where, REMEDY)
    return DrawSpec(row.get("region", str), row.get("index", int), p)


def _zero(top: Fields) -> int:
    level = int(top.get("zero", int, 0))
    if not 0 <= level <= ZERO:
        raise ProgramError(f"field 'zero' is {level}: this runtime knows 0 to {ZERO}", top.where, REMEDY)
    return level


def _check_stages(stages: Sequence[StageSpec], mesh: Mesh, files: int, where: str) -> None:
    """Each rank of the mesh has a file and a stage, and stages are in order."""
    if mesh.pp > len(stages) or mesh.size > files:
        what = f"mesh {mesh} has {short(mesh.size)} ranks, and it lists {len(stages)} stages and {files} files"
        raise ProgramError(what, where, REMEDY)
    if [s.stage for s in stages] != list(range(len(stages))):
        raise ProgramError(f"it lists stages {[s.stage for s in stages]}, not in order from 0", where, REMEDY)
    idle = set(range(mesh.pp)) - {s.rank for s in stages}
    if idle:
        raise ProgramError(f"rank {min(idle)} has no stage, the mesh has pp={mesh.pp}", where, REMEDY)


def _loss(top: Fields, stages: int) -> LossSpec:
    loss = Fields(top.get("loss", dict), f"{top.where}, loss")
    weight = loss.get("weight", str)
    if weight not in LOSS_WEIGHTS:
        raise ProgramError(f"loss weight {weight!r} is none of {', '.join(LOSS_WEIGHTS)}", top.where, REMEDY)
    stage = _end(loss, "stage", stages)
    divisors = tuple(
        DivisorSpec(row.get("counts", str), *(_finite(row, name) for name in ("added", "least", "for_zero")))
        for row in loss.rows("divisors", [])
    )
    if (weight == "terms") != bool(divisors):
        raise ProgramError(f"its loss is weighted by {weight} and has {len(divisors)} divisors", top.where, REMEDY)
    return LossSpec(
        stage,
        weight,
        loss.get("rows", str, ""),
        _finite(loss, "added"),
        _finite(loss, "least"),
        divisors,
        loss.get("summed", bool, False),
    )


def _features(top: Fields) -> FeatureSpec | None:
    table = top.get("features", dict, {})
    if not table:
        return None
    row = Fields(table, f"{top.where}, features")
    values, named = row.rows("values"), row.get("parameters", dict)
    dtypes = Fields(named, f"{row.where}, parameters")
    return FeatureSpec(
        tuple(one.get("entry", str) for one in values),
        tuple(_value(one) for one in values),
        row.names("inputs"),
        row.names("constants"),
        {name: dtypes.dtype(name) for name in named},
    )


def _once(what: str, names: Sequence[Any], where: str) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ProgramError(f"it lists {twice!r} twice among its {what}", where, REMEDY)


def _device(top: Fields) -> str:
    device = top.get("device", str)
    try:
        torch.device(device)
    except RuntimeError:
        raise ProgramError(f"field 'device' is {short(device)}, which is none", top.where, REMEDY) from None
    return str(device)


def _contexts(top: Fields, mesh: Mesh, stages: tuple[StageSpec, ...]) -> tuple[ContextSpec, ...]:
    rows = top.rows("context") if mesh.cp > 1 else top.rows("context", [])
    found = tuple(_context(row, mesh) for row in rows)
    names = [one.component for one in found]
    if len(set(names)) < len(names):
        raise ProgramError(f"field 'context' lists {', '.join(names)}: a component twice", top.where, REMEDY)
    for stage in stages:
        unknown = set(stage.contexts) - set(names)
        if unknown:
            what = f"stage {stage.stage} asks for the tokens of {min(unknown)!r}, which 'context' does not list"
            raise ProgramError(what, top.where, REMEDY)
    return found


def _context(row: Fields, mesh: Mesh) -> ContextSpec:
    ranks, sizes = row.get("ranks", int), {name: row.get(name, int) for name in ("tokens", "block", "shard")}
    axis, component = row.get("axis", str, "cp"), row.get("component", str)
    try:
        group = group_over(axis)
    except ValueError:
        raise ProgramError(f"tokens cannot be spread over {axis!r}", row.where, REMEDY) from None
    (size,) = (mesh.tp_ranks(component),) if axis == "tp" else mesh.sizes(group)
    along = f"{axis}={size}"
    if ranks < 1 or size % ranks:
        raise ProgramError(f"{ranks} ranks do not divide {along}", row.where, REMEDY)
    if min(sizes.values()) < 1 or sizes["shard"] * ranks < sizes["tokens"]:
        raise ProgramError(f"{sizes} cannot hold a sequence on {ranks} ranks of {along}", row.where, REMEDY)
    masks = tuple(ContextMaskSpec(mask.get("layers", int)) for mask in row.rows("masks"))
    tile, block = row.number("tile_seconds"), row.number("block_seconds")
    return ContextSpec(
        component, ranks, **sizes, tile_seconds=tile, block_seconds=block, masks=masks,
        inputs=row.names("inputs"), axis=axis,
    )  # fmt: skip


def _finite(row: Fields, key: str) -> float:
    value = float(row.get(key, (int, float), 0.0))
    if not math.isfinite(value):
        raise ProgramError(f"field {key!r} is {value}", row.where, REMEDY)
    return value


def _parameter(row: Fields, stages: tuple[StageSpec, ...], mesh: Mesh) -> ParameterSpec:
    users, trainable = row.stages("stages", len(stages)), row.get("trainable", bool)
    ranks = max([mesh.tp, *(mesh.width(stages[stage].rank) for stage in users)])
    divided = _boxes(row, mesh, ranks)
    over = () if not divided else places(["tp"]) if len(set(divided)) == len(divided) else ("division",)
    weight = _placement(row, "weight", ("equal",), over, mesh)
    if over == ("division",) and weight.size != len(set(divided)):
        what = f"field 'weight' has groups of {weight.size}, and {len(set(divided))} ranks divide it"
        raise ProgramError(what, row.where, REMEDY)
    return ParameterSpec(
        row.get("name", str),
        row.sizes("shape"),
        row.dtype(),
        trainable,
        users,
        tuple(dict.fromkeys(stages[stage].rank for stage in users)),
        row.dtype("compute") if "compute" in row.table else None,
        weight,
        _placement(row, "gradient", ("equal", "parts"), over, mesh) if trainable else WHOLE,
        divided,
        row.get("reached", bool, True),
        row.get("repeated", bool, False),
    )


def _boxes(row: Fields, mesh: Mesh, ranks: int) -> tuple[Box, ...]:
    """Of a parameter that tensor-parallel ranks divide."""
    if "boxes" not in row.table:
        return ()
    try:
        return boxes.read(row.get("boxes", list), row.sizes("shape"), ranks, mesh.divisions)
    except ValueError as error:
        raise ProgramError(f"field 'boxes' {error}", row.where, REMEDY) from None


def _placement(row: Fields, key: str, known: tuple[str, ...], divided: tuple[str, ...], mesh: Mesh) -> Placement:
    """How a parameter or its gradient lies on the ranks of a position. ProgramError if it is none of `known` over an
    axis, or no shard over one along which boxes differ: then ranks with one parameter would train it apart.
    """
    try:
        found = Placement.of(row.get(key, dict))
    except CscError as error:
        raise ProgramError(error.what, f"{row.where}, {key}", error.remedy) from None
    if found.size and found.size not in mesh.divisions:
        raise ProgramError(f"field {key!r} has groups of {found.size}, and the mesh none of these", row.where, REMEDY)
    (most,) = mesh.sizes(Group.TENSOR)
    for axis in places(Group.POSITION.along):
        within = {"copies": most // (found.size or most), "division": found.size or most}
        over, size = found.over(axis), within[axis] if axis in within else getattr(mesh, axis)
        named = "tp" if axis in within and not mesh.divisions else axis
        expected = ("shard",) if axis in divided else known
        if (over or size > 1) and over not in expected:
            said = f"{over} over {named}" if over else f"nothing over {named}, whose size is {size}"
            what = f"field {key!r} says {said}: this runtime knows {' and '.join(known)}"
            raise ProgramError(what, row.where, REMEDY)
    return found


def _stage(row: Fields, ranks: int) -> StageSpec:
    return StageSpec(
        row.get("stage", int),
        _end(row, "rank", ranks),
        row.names("regions", []),
        row.names("inputs"),
        row.get("forward", bool),
        row.get("backward_input", bool),
        row.get("backward_weight", bool),
        row.names("context", []),
        row.get("weighs", bool, False),
    )


def _end(row: Fields, key: str, count: int) -> int:
    found = row.get(key, int)
    if not 0 <= found < count:
        raise ProgramError(f"{key} is {found}, there are 0..{count - 1}", row.where, REMEDY)
    return found


def _message(row: Fields, count: int) -> MessageSpec:
    kind = row.get("kind", str)
    if kind not in ("F", "B"):
        raise ProgramError(f"message kind {kind!r} is neither F nor B", row.where, REMEDY)
    values = tuple(map(_value, row.rows("values")))
    return MessageSpec(kind, _end(row, "source", count), _end(row, "destination", count), values)


def _value(row: Fields) -> ValueSpec:
    found = ValueSpec(row.get("name", str), row.sizes("shape"), row.sizes("stride"), row.dtype())
    if overlaps(found.shape, found.stride):
        raise ProgramError(
            f"value {found.name!r} of shape {list(found.shape)} has stride {list(found.stride)}: elements overlap",
            row.where,
            "Send a contiguous copy",
        )
    return found
