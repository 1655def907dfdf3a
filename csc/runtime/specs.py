"""What program.json says, as frozen dataclasses.

Terms: a *value* is a tensor that a message carries between two stages; its *stride* is dense, possibly
permuted. A parameter's *holders* are the pipeline ranks that hold it; the first is its *owner*. All sizes are
those of ONE microbatch.

    manifest(table, where) -> Manifest        ProgramError for any field that is missing or wrong
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from csc.errors import CscError, ProgramError
from csc.ir.groups import SUMMED, WHOLE, Group, Placement
from csc.ir.mesh import Mesh
from csc.ir.schedule import Message
from csc.ir.strides import overlaps

FORMAT = 4
LOSS_WEIGHTS = ("tokens", "sum", "mean")


@dataclass(frozen=True)
class InputSpec:
    """One tensor of a microbatch. whole: it has no sample dimension and is the same in every microbatch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: bool = False


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter; `stages` use it, `ranks` (positions on the pp axis) hold it, the owner first.

    dtype: in which it is stored and its gradients are added up; compute: in which the stages take it,
    None: the same. weight, gradient: how it lies on the ranks of each of these positions, and how its gradient does
    before REDUCE; the weight is whole on each.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    compute: torch.dtype | None = None
    weight: Placement = WHOLE
    gradient: Placement = SUMMED

    @property
    def owner(self) -> int:
        return self.ranks[0]

    @property
    def equal(self) -> Group:
        """The group, with those of its other positions, that holds the same values."""
        assert self.weight.equal is not None
        return self.weight.equal


@dataclass(frozen=True)
class ConstantSpec:
    """A tensor of constants.safetensors and the stages that read it."""

    name: str
    stages: tuple[int, ...]


@dataclass(frozen=True)
class ValueSpec:
    """Layout of one value of a message, as the receiver gets it. Elements do not overlap. A dense value travels as its
    memory is, another (a slice of a larger tensor) as a contiguous copy.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class MessageSpec:
    """What one SEND moves. Kind F: the values themselves; kind B: gradients of the named values."""

    kind: str
    source: int
    destination: int
    values: tuple[ValueSpec, ...]

    @property
    def channel(self) -> Message:
        return (self.kind, self.source, self.destination)


@dataclass(frozen=True)
class StageSpec:
    """Which rank (position on the pp axis) runs a stage, which inputs it reads and which of F, B and W it has."""

    stage: int
    rank: int
    regions: tuple[str, ...]
    inputs: tuple[str, ...]
    forward: bool
    backward_input: bool
    backward_weight: bool
    contexts: tuple[str, ...] = ()  # components of which it asks the plan of a microbatch where their tokens are


@dataclass(frozen=True)
class LossSpec:
    """The stage that computes the loss, and how microbatches' losses combine: tokens, sum or mean.

    rows: with mean, the input whose rows are counted; "": every microbatch counts the same. added, least: with tokens,
    the loss is divided by max(count + added, least).
    """

    stage: int
    weight: str
    rows: str = ""
    added: float = 0.0
    least: float = 0.0


@dataclass(frozen=True)
class ContextMaskSpec:
    """One of the masks of spread tokens: how many layers have it."""

    layers: int


@dataclass(frozen=True)
class ContextSpec:
    """How the sequence of a component, `tokens` long, is spread over `ranks` in blocks; `share` slots a rank, padding
    included. Consecutive ranks of the cp axis share a sequence, so many of them; the next ones share it again.

    inputs: the batch's entries that its masks are made of.
    tile_seconds: attention of one block of queries to one of keys; block_seconds: sending one block's K and V.
    """

    component: str
    ranks: int
    tokens: int
    block: int
    share: int
    tile_seconds: float
    block_seconds: float
    masks: tuple[ContextMaskSpec, ...]
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """program.json, checked field by field."""

    name: str
    fingerprint: str
    mesh: Mesh
    device: str
    microbatches: int
    inputs: tuple[InputSpec, ...]
    fixed: Mapping[str, list]  # batch entries, by name, that the program takes with these values only
    parameters: tuple[ParameterSpec, ...]
    constants: tuple[ConstantSpec, ...]
    messages: tuple[MessageSpec, ...]
    stages: tuple[StageSpec, ...]
    loss: LossSpec
    contexts: tuple[ContextSpec, ...]
    random: bool  # its microbatches take a seed
    frozen: tuple[str, ...]
    plan: Mapping[str, Any]
    files: Mapping[str, str]  # hashes of what may be edited
    tensors: Mapping[str, str]  # and of what may not

    def stages_of(self, rank: int) -> tuple[StageSpec, ...]:
        """The stages that a position on the pp axis runs, in order."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    @property
    def loss_rank(self) -> int:
        """The position on the pp axis that computes the loss."""
        return self.stages[self.loss.stage].rank


class _Table:
    """A JSON object with its place in the file, so that every complaint can name both."""

    def __init__(self, table: Any, where: str) -> None:
        if not isinstance(table, dict):
            raise ProgramError(f"this should be an object, not {type(table).__name__}", where, _REMEDY)
        self.table, self.where = table, where

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        value = self.table.get(key, default)
        if value is ...:
            raise ProgramError(f"field {key!r} is missing", self.where, _REMEDY)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise ProgramError(f"field {key!r} should be {names}, it is {_short(value)}", self.where, _REMEDY)
        if isinstance(value, int) and abs(value) >= LARGEST:
            raise ProgramError(f"field {key!r} is {_short(value)}, which nothing is", self.where, _REMEDY)
        return value

    def rows(self, key: str) -> list[_Table]:
        return [_Table(row, f"{self.where}, {key}[{i}]") for i, row in enumerate(self.get(key, list))]

    def sizes(self, key: str) -> tuple[int, ...]:
        sizes = self.get(key, list)
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < LARGEST for n in sizes):
            raise ProgramError(f"field {key!r} should list sizes, it is {_short(sizes)}", self.where, _REMEDY)
        if len(sizes) > DIMENSIONS or (key == "shape" and math.prod(sizes) >= LARGEST):
            raise ProgramError(f"field {key!r} is {_short(sizes)}: no tensor is that large", self.where, _REMEDY)
        return tuple(sizes)

    def names(self, key: str, default: Any = ...) -> tuple[str, ...]:
        names = self.get(key, list, default)
        if not all(isinstance(name, str) for name in names):
            raise ProgramError(f"field {key!r} should list names, it is {_short(names)}", self.where, _REMEDY)
        return tuple(names)

    def hashes(self, key: str, default: Any = ...) -> dict[str, str]:
        table: dict[str, str] = self.get(key, dict, default)
        if not all(isinstance(value, str) for value in table.values()):
            raise ProgramError(f"field {key!r} should hold the hash of each file", self.where, _REMEDY)
        return table

    def number(self, key: str) -> float:
        value = self.get(key, (int, float))
        if isinstance(value, bool) or not 0 <= value < LARGEST:
            raise ProgramError(f"field {key!r} should be a number, it is {_short(value)}", self.where, _REMEDY)
        return float(value)

    def stages(self, key: str, count: int) -> tuple[int, ...]:
        stages = self.sizes(key)
        if not stages or max(stages) >= count or len(set(stages)) != len(stages):
            raise ProgramError(
                f"field {key!r} is {list(stages)}: different stages in 0..{count - 1}", self.where, _REMEDY
            )
        return stages

    def dtype(self, key: str = "dtype") -> torch.dtype:
        dtype = getattr(torch, self.get(key, str), None)
        if not isinstance(dtype, torch.dtype):
            raise ProgramError(f"{self.table[key]!r} is not a torch dtype", self.where, _REMEDY)
        return dtype


LARGEST = 2**53
DIMENSIONS = 64  # torch has no tensors of more


def _short(value: Any) -> str:
    """A value as an error shows it: one may be nested deeply, or have many digits."""
    if isinstance(value, int) and abs(value) >= LARGEST:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list) and all(isinstance(one, (int, str)) for one in value[:8]):
        return f"[{', '.join(_short(one) for one in value[:8])}{', ...' if len(value) > 8 else ''}]"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, dict)) else f"{value!r:.60}"


_REMEDY = "Compile the program again, or mend program.json"


def manifest(table: Any, where: str) -> Manifest:
    """Check and convert the parsed JSON. `where` names the file in errors."""
    top = _Table(table, where)
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
    if mesh.pp > len(stages) or mesh.size > len(files):
        what = f"mesh {mesh} has {_short(mesh.size)} ranks, and it lists {len(stages)} stages and {len(files)} files"
        raise ProgramError(what, where, _REMEDY)
    if [s.stage for s in stages] != list(range(len(stages))):
        raise ProgramError(f"it lists stages {[s.stage for s in stages]}, not in order from 0", where, _REMEDY)
    idle = set(range(mesh.pp)) - {s.rank for s in stages}
    if idle:
        raise ProgramError(f"rank {min(idle)} has no stage, the mesh has pp={mesh.pp}", where, _REMEDY)
    loss = _Table(top.get("loss", dict), f"{where}, loss")
    weight = loss.get("weight", str)
    if weight not in LOSS_WEIGHTS:
        raise ProgramError(f"loss weight {weight!r} is none of {', '.join(LOSS_WEIGHTS)}", where, _REMEDY)
    microbatches = top.get("microbatches", int)
    if microbatches < 1:
        raise ProgramError(f"it has {microbatches} microbatches", where, _REMEDY)
    inputs = tuple(
        InputSpec(r.get("name", str), r.sizes("shape"), r.dtype(), r.get("whole", bool, False))
        for r in top.rows("inputs")
    )
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
            raise ProgramError(f"stage {stage.stage} reads {min(unknown)!r}, which is no input", where, _REMEDY)
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
        loss=LossSpec(
            _end(loss, "stage", len(stages)),
            weight,
            loss.get("rows", str, ""),
            _finite(loss, "added"),
            _finite(loss, "least"),
        ),
        contexts=_contexts(top, mesh, stages),
        random=top.get("random", bool, False),
        frozen=top.names("frozen", []),
        plan=top.get("plan", dict, {}),
        files=files,
        tensors=top.hashes("tensors", {}),
    )


def _once(what: str, names: Sequence[Any], where: str) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ProgramError(f"it lists {twice!r} twice among its {what}", where, _REMEDY)


def _device(top: _Table) -> str:
    device = top.get("device", str)
    try:
        torch.device(device)
    except RuntimeError:
        raise ProgramError(f"field 'device' is {_short(device)}, which is none", top.where, _REMEDY) from None
    return str(device)


def _contexts(top: _Table, mesh: Mesh, stages: tuple[StageSpec, ...]) -> tuple[ContextSpec, ...]:
    found = tuple(_context(row, mesh) for row in top.rows("context")) if mesh.cp > 1 else ()
    names = [one.component for one in found]
    if len(set(names)) < len(names):
        raise ProgramError(f"field 'context' lists {', '.join(names)}: a component twice", top.where, _REMEDY)
    for stage in stages:
        unknown = set(stage.contexts) - set(names)
        if unknown:
            what = f"stage {stage.stage} asks for the tokens of {min(unknown)!r}, which 'context' does not list"
            raise ProgramError(what, top.where, _REMEDY)
    return found


def _context(row: _Table, mesh: Mesh) -> ContextSpec:
    ranks, sizes = row.get("ranks", int), {name: row.get(name, int) for name in ("tokens", "block", "share")}
    if ranks < 1 or mesh.cp % ranks:
        raise ProgramError(f"{ranks} ranks do not divide cp={mesh.cp}", row.where, _REMEDY)
    if min(sizes.values()) < 1 or sizes["share"] * ranks < sizes["tokens"]:
        raise ProgramError(f"{sizes} cannot hold a sequence on {ranks} ranks of cp={mesh.cp}", row.where, _REMEDY)
    masks = tuple(ContextMaskSpec(mask.get("layers", int)) for mask in row.rows("masks"))
    tile, block = row.number("tile_seconds"), row.number("block_seconds")
    return ContextSpec(
        row.get("component", str), ranks, **sizes, tile_seconds=tile, block_seconds=block, masks=masks,
        inputs=row.names("inputs"),
    )  # fmt: skip


def _finite(row: _Table, key: str) -> float:
    value = float(row.get(key, (int, float), 0.0))
    if not math.isfinite(value):
        raise ProgramError(f"field {key!r} is {value}", row.where, _REMEDY)
    return value


def _parameter(row: _Table, stages: tuple[StageSpec, ...], mesh: Mesh) -> ParameterSpec:
    users, trainable = row.stages("stages", len(stages)), row.get("trainable", bool)
    return ParameterSpec(
        row.get("name", str),
        row.sizes("shape"),
        row.dtype(),
        trainable,
        users,
        tuple(dict.fromkeys(stages[stage].rank for stage in users)),
        row.dtype("compute") if "compute" in row.table else None,
        _placement(row, "weight", ("equal",), mesh),
        _placement(row, "gradient", ("equal", "parts"), mesh) if trainable else WHOLE,
    )


def _placement(row: _Table, key: str, known: tuple[str, ...], mesh: Mesh) -> Placement:
    """How a parameter or its gradient lies on the ranks of a position. ProgramError if it is none of `known` over an
    axis: then ranks with one parameter would train it apart.
    """
    try:
        found = Placement.of(row.get(key, dict))
    except CscError as error:
        raise ProgramError(error.what, f"{row.where}, {key}", error.remedy) from None
    for axis in Group.POSITION.along:
        over = found.over(axis)
        if (over or getattr(mesh, axis) > 1) and over not in known:
            said = f"{over} over {axis}" if over else f"nothing over {axis}, whose size is {getattr(mesh, axis)}"
            what = f"field {key!r} says {said}: this runtime knows {' and '.join(known)}"
            raise ProgramError(what, row.where, _REMEDY)
    return found


def _stage(row: _Table, ranks: int) -> StageSpec:
    return StageSpec(
        row.get("stage", int),
        _end(row, "rank", ranks),
        row.names("regions", []),
        row.names("inputs"),
        row.get("forward", bool),
        row.get("backward_input", bool),
        row.get("backward_weight", bool),
        row.names("context", []),
    )


def _end(row: _Table, key: str, count: int) -> int:
    found = row.get(key, int)
    if not 0 <= found < count:
        raise ProgramError(f"{key} is {found}, there are 0..{count - 1}", row.where, _REMEDY)
    return found


def _message(row: _Table, count: int) -> MessageSpec:
    kind = row.get("kind", str)
    if kind not in ("F", "B"):
        raise ProgramError(f"message kind {kind!r} is neither F nor B", row.where, _REMEDY)
    values = []
    for value in row.rows("values"):
        spec = ValueSpec(value.get("name", str), value.sizes("shape"), value.sizes("stride"), value.dtype())
        if overlaps(spec.shape, spec.stride):
            raise ProgramError(
                f"value {spec.name!r} of shape {list(spec.shape)} has stride {list(spec.stride)}: elements overlap",
                value.where,
                "Send a contiguous copy",
            )
        values.append(spec)
    return MessageSpec(kind, _end(row, "source", count), _end(row, "destination", count), tuple(values))
