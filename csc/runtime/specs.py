"""What program.json says, as frozen dataclasses, and how it is read: checked field by field."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from typing import Any

import torch

from csc.errors import CscError, ProgramError
from csc.ir.groups import SUMMED, WHOLE, Group, Placement, group_over, places
from csc.ir.mesh import Mesh
from csc.ir.schedule import Message
from csc.ir.strides import overlaps

# --- How much a step is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCounts:
    """flops: what the ranks spend on them, in all."""

    tokens: float = 0.0
    samples: float = 0.0
    flops: float = 0.0


# --- What program.json says, as frozen dataclasses -------------------------------------------------------------------
#
# Terms: a *value* is a tensor that a message carries between two stages; its *stride* is dense, possibly permuted. A
# parameter's *holders* are the pipeline ranks that hold it; the first is its *owner*. All sizes are those of ONE
# microbatch.
#
# csc.runtime.specs makes them of program.json.


Box = tuple[tuple[tuple[int, int], ...], ...]  # of a tensor, for each dimension stretches from start to stop


@dataclass(frozen=True)
class InputSpec:
    """One tensor of a microbatch. whole: it has no sample dimension and is the same in every microbatch. table: the
    parameter whose rows its numbers are, and how many there are. classes: how many a label is one of, the number that
    stands for none, and the place on the last dimension from which on labels are read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: bool = False
    table: tuple[str, int] | None = None
    classes: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter; `stages` use it, `ranks` (positions on the pp axis) hold it, the owner first.

    dtype: in which it is stored and its gradients are added up; compute: in which the stages take it,
    None: the same. weight, gradient: how it lies on the ranks of each of these positions, and how its gradient does
    before REDUCE; the weight is whole on each, or a shard: then boxes are what each tensor-parallel rank holds.
    reached: whether a stage computes a gradient of it; none does where the model uses it under no_grad alone.
    repeated: a W may give several gradients of it.
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
    boxes: tuple[Box, ...] = ()
    reached: bool = True
    repeated: bool = False

    @property
    def owner(self) -> int:
        return self.ranks[0]

    @property
    def local(self) -> ParameterSpec:
        """As one rank has it."""
        if not self.boxes:
            return self
        return replace(self, shape=tuple(sum(stop - start for start, stop in dim) for dim in self.boxes[0]))

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
    weighs: bool = False  # whether it adds terms of the loss, which it counts to know what they weigh


@dataclass(frozen=True)
class DivisorSpec:
    """What terms of the loss are divided by: n + added, or `least` if that is more, no limit with 0; in a microbatch
    where that is 0, for_zero. counts: what n is, so that programs whose losses have other terms are told apart.
    """

    counts: str
    added: float = 0.0
    least: float = 0.0
    for_zero: float = 0.0


@dataclass(frozen=True)
class BatchValueSpec:
    """What a loss over the whole batch reads of microbatches: see csc.ir.program.BatchValue. dims: of its shape."""

    name: str
    dims: int
    dtype: torch.dtype
    kind: str
    dim: int
    groups: int
    samples: int


@dataclass(frozen=True)
class BatchLossSpec:
    """What of the loss batch_loss.py computes once a step: of these values of all microbatches, and of sizes, each that
    of a microbatch and whether they add up. factor: of its result in the loss.
    """

    values: tuple[BatchValueSpec, ...]
    sizes: tuple[tuple[int, bool], ...]
    parameters: tuple[str, ...]
    constants: tuple[str, ...]
    factor: float


@dataclass(frozen=True)
class LossSpec:
    """The stage that computes the loss, and how microbatches' losses combine: tokens, sum, mean or terms.

    rows: with mean, the input whose rows are counted, along its dimension `along`; "": every microbatch counts the
    same. added, least: with tokens,
    the loss is divided by the count as terms are. divisors: with terms, those of its terms. summed: ranks that share
    tokens have parts of a microbatch's loss, and count alike.
    """

    stage: int
    weight: str
    rows: str = ""
    added: float = 0.0
    least: float = 0.0
    divisors: tuple[DivisorSpec, ...] = ()
    summed: bool = False
    along: int = 0
    over_batch: BatchLossSpec | None = None

    @property
    def for_any_size(self) -> LossSpec:
        """Without what is another number in microbatches of other sizes."""
        if self.over_batch is None:
            return self
        values = tuple(replace(value, samples=min(value.samples, 1)) for value in self.over_batch.values)
        return replace(self, over_batch=replace(self.over_batch, values=values, sizes=()))


@dataclass(frozen=True)
class FeatureSpec:
    """What makes the features that come with the batch: features.py, of these inputs, constants and parameters, each
    with the dtype that it is computed with. entries: the batch's names of its values.
    """

    entries: tuple[str, ...]
    values: tuple[ValueSpec, ...]
    inputs: tuple[str, ...]
    constants: tuple[str, ...]
    parameters: Mapping[str, torch.dtype]


@dataclass(frozen=True)
class ContextMaskSpec:
    """One of the masks of spread tokens: how many layers have it."""

    layers: int


@dataclass(frozen=True)
class ContextSpec:
    """How the sequence of a component, `tokens` long, is spread over `ranks` in blocks; `shard` slots a rank, padding
    included. Consecutive ranks of an axis share a sequence, so many of them; the next ones share it again.

    inputs: the batch's entries that its masks are made of. axis: cp, tp, or the copies within tp.
    tile_seconds: attention of one block of queries to one of keys; block_seconds: sending one block's K and V.
    """

    component: str
    ranks: int
    tokens: int
    block: int
    shard: int
    tile_seconds: float
    block_seconds: float
    masks: tuple[ContextMaskSpec, ...]
    inputs: tuple[str, ...] = ()
    axis: str = "cp"

    @property
    def group(self) -> Group:
        """Of the ranks along the axis."""
        return group_over(self.axis)


@dataclass(frozen=True)
class DrawSpec:
    """Random numbers of a region: its index-th. p: the probability of dropout; None: it draws something else. samples:
    of the microbatch, if it draws for each of them by itself; else 0. once: for all samples of a step.
    """

    region: str
    index: int
    p: float | None
    samples: int
    once: bool = False


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
    draws: tuple[DrawSpec, ...]  # what a microbatch draws, in the order of the model's code; then it takes a seed
    zero: int  # what ranks of `Group.DATA` divide: see csc.ir.program.Options
    frozen: tuple[str, ...]
    plan: Mapping[str, Any]
    files: Mapping[str, str]  # hashes of what may be edited
    tensors: Mapping[str, str]  # and of what may not
    features: FeatureSpec | None = None  # what of the model no step runs

    @property
    def random(self) -> bool:
        """Its microbatches take a seed."""
        return bool(self.draws)

    @property
    def samples_drawn(self) -> int:
        """How many samples of a microbatch numbers are drawn for, sample by sample; 0: for none."""
        return max((draw.samples for draw in self.draws), default=0)

    def stages_of(self, rank: int) -> tuple[StageSpec, ...]:
        """The stages that a position on the pp axis runs, in order."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    @property
    def divided(self) -> list[bool]:
        """Of which stages data-parallel ranks divide the parameters, so that GATHER makes them whole."""
        if self.zero < 3:
            return [False] * len(self.stages)
        having, mesh = (
            {stage for parameter in self.parameters if parameter.shape for stage in parameter.stages},
            self.mesh,
        )
        return [mesh.extent(stage.rank).replicas * mesh.cp > 1 and stage.stage in having for stage in self.stages]

    @cached_property
    def flops(self) -> float:
        """What the ranks of a replica spend on a microbatch, as the plan counts it; asked in every step."""
        of_stages = zip(self.stages, self.plan.get("flops") or ())
        return float(
            sum(
                len(self.mesh.group(Group.LAYER, 0, [stage.rank])) * sum(flops_of_stage)
                for stage, flops_of_stage in of_stages
            )
        )

    @property
    def loss_rank(self) -> int:
        """The position on the pp axis that computes the loss."""
        return self.stages[self.loss.stage].rank


# --- What of a parameter each tensor-parallel rank holds, and how it is taken out and put back -----------------------
#
# Terms: a *box* lists for each dimension the stretches, from start to stop, that a rank holds; its entries lie in the
# rank's tensor as they do in the whole. Boxes of those that divide a tensor have no entry in common, and together all;
# where these are fewer than all ranks, the next so many have the same boxes again.


def read(value: Any, shape: Sequence[int], ranks: int, divisions: Sequence[int]) -> tuple[Box, ...]:
    """As many as there are ranks, all in the same sizes; they divide one dimension, all of them or each so many of
    `divisions`.
    """
    try:
        boxes = tuple(
            tuple(tuple((int(start), int(stop)) for start, stop in dim) for dim in box) for box in value
        )  # fmt: skip
    except (TypeError, ValueError):
        raise ValueError("lists no boxes") from None
    if len(boxes) != ranks or any(len(box) != len(shape) for box in boxes):
        raise ValueError(f"should list {ranks} boxes in {len(shape)} dimensions")
    if len({sizes(box) for box in boxes}) > 1:
        raise ValueError("has boxes of different sizes")
    apart = next((boxes[:size] for size in divisions if boxes[:size] * (ranks // size) == boxes), boxes)
    for dim, size in enumerate(shape):
        held = [box[dim] for box in apart]
        stretches = sorted(stretch for box in held for stretch in box) if len(set(held)) > 1 else held[0]
        if [0, *(stop for _, stop in stretches)] != [*(start for start, _ in stretches), size]:
            raise ValueError(f"has boxes that are not together all of dimension {dim}")
    if sum(len({box[dim] for box in apart}) > 1 for dim in range(len(shape))) != 1:
        raise ValueError("has boxes that differ in more than one dimension, or in none")
    return boxes


def sizes(box: Box) -> tuple[int, ...]:
    """Along each dimension."""
    return tuple(sum(stop - start for start, stop in dim) for dim in box)


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """Contiguous, with memory of its own."""
    shard = whole.new_empty(sizes(box))
    for outer, here in _places(box):
        shard[here] = whole[outer]
    return shard


def put(whole: torch.Tensor, box: Box, shard: torch.Tensor) -> None:
    """Write a shard to its box."""
    for outer, here in _places(box):
        whole[outer] = shard[here]


def whole_box(shape: Sequence[int]) -> Box:
    """One stretch for each dimension."""
    return tuple(((0, size),) for size in shape)


def part_in_box(box: Box, dimension: int, start: int, stop: int) -> Box:
    """What the entries from start to stop of a dimension of a box' shard are in the whole."""
    kept, start_in_box = [], 0
    for low, high in box[dimension]:
        first, last = max(start - start_in_box, 0), min(stop - start_in_box, high - low)
        if first < last:
            kept.append((low + first, low + last))
        start_in_box += high - low
    return (*box[:dimension], tuple(kept), *box[dimension + 1 :])


def overlap(one: Box, other: Box) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Each block of entries that two boxes have in common, in the shard of either."""
    common = [list(_common(ours, theirs)) for ours, theirs in zip(one, other, strict=True)]
    for block in product(*common):
        yield tuple(here for here, _ in block), tuple(theirs for _, theirs in block)


def _common(ours: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, slice]]:
    start_here = 0
    for low, high in ours:
        start_there = 0
        for start, stop in theirs:
            first, last = max(low, start), min(high, stop)
            if first < last:
                here = start_here + first - low
                yield slice(here, here + last - first), slice(start_there + first - start, start_there + last - start)
            start_there += stop - start
        start_here += high - low


def _places(box: Box) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Each stretch of a box: where it is in the whole, and where in the shard."""
    of_dim = []
    for dim in box:
        starts = accumulate((stop - start for start, stop in dim), initial=0)
        of_dim.append([(slice(a, b), slice(start, start + b - a)) for (a, b), start in zip(dim, starts)])
    for pairs in product(*of_dim):
        yield tuple(outer for outer, _ in pairs), tuple(here for _, here in pairs)


# --- A JSON object read field by field -------------------------------------------------------------------------------
#
# Every complaint names the field, what it should be, and its place in the file.


LARGEST = 2**53
DIMENSIONS = 64  # torch has no tensors of more
REMEDY = "Compile the program again, or mend program.json"


class Fields:
    """A JSON object with its place in the file, so that every complaint can name both."""

    def __init__(self, table: Any, where: str) -> None:
        if not isinstance(table, dict):
            raise ProgramError(f"this should be an object, not {type(table).__name__}", where, REMEDY)
        self.table, self.where = table, where

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """Of this kind; with a default, it may be missing."""
        value = self.table.get(key, default)
        if value is ...:
            raise ProgramError(f"field {key!r} is missing", self.where, REMEDY)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise ProgramError(f"field {key!r} should be {names}, it is {short(value)}", self.where, REMEDY)
        if isinstance(value, int) and abs(value) >= LARGEST:
            raise ProgramError(f"field {key!r} is {short(value)}, which nothing is", self.where, REMEDY)
        return value

    def rows(self, key: str, default: Any = ...) -> list[Fields]:
        """Of a list of objects."""
        return [Fields(row, f"{self.where}, {key}[{i}]") for i, row in enumerate(self.get(key, list, default))]

    def sizes(self, key: str) -> tuple[int, ...]:
        """Whole numbers from 0 on."""
        sizes = self.get(key, list)
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < LARGEST for n in sizes):
            raise ProgramError(f"field {key!r} should list sizes, it is {short(sizes)}", self.where, REMEDY)
        if len(sizes) > DIMENSIONS or (key == "shape" and math.prod(sizes) >= LARGEST):
            raise ProgramError(f"field {key!r} is {short(sizes)}: no tensor is that large", self.where, REMEDY)
        return tuple(sizes)

    def names(self, key: str, default: Any = ...) -> tuple[str, ...]:
        """Texts."""
        names = self.get(key, list, default)
        if not all(isinstance(name, str) for name in names):
            raise ProgramError(f"field {key!r} should list names, it is {short(names)}", self.where, REMEDY)
        return tuple(names)

    def hashes(self, key: str, default: Any = ...) -> dict[str, str]:
        """Texts by file."""
        table: dict[str, str] = self.get(key, dict, default)
        if not all(isinstance(value, str) for value in table.values()):
            raise ProgramError(f"field {key!r} should hold the hash of each file", self.where, REMEDY)
        return table

    def limit(self, key: str) -> tuple[str, int] | None:
        """The parameter whose rows an input's numbers are, and how many there are; None where the key is absent."""
        value = self.get(key, dict, {})
        table = Fields(value, f"{self.where}, {key}")
        return (table.get("name", str), table.get("rows", int)) if value else None

    def classes(self, key: str) -> tuple[int, int, int] | None:
        """Of labels: how many classes, the number that stands for none, the first place that is read; None where the
        key is absent.
        """
        value = self.get(key, dict, {})
        fields = Fields(value, f"{self.where}, {key}")
        return (fields.get("count", int), fields.get("ignored", int), fields.get("first", int)) if value else None

    def number(self, key: str) -> float:
        """From 0 on."""
        value = self.get(key, (int, float))
        if isinstance(value, bool) or not 0 <= value < LARGEST:
            raise ProgramError(f"field {key!r} should be a number, it is {short(value)}", self.where, REMEDY)
        return float(value)

    def stages(self, key: str, count: int) -> tuple[int, ...]:
        """Different ones of so many, at least one."""
        stages = self.sizes(key)
        if not stages or max(stages) >= count or len(set(stages)) != len(stages):
            raise ProgramError(
                f"field {key!r} is {list(stages)}: different stages in 0..{count - 1}", self.where, REMEDY
            )
        return stages

    def dtype(self, key: str = "dtype") -> torch.dtype:
        """Of torch."""
        dtype = getattr(torch, self.get(key, str), None)
        if not isinstance(dtype, torch.dtype):
            raise ProgramError(f"{self.table[key]!r} is not a torch dtype", self.where, REMEDY)
        return dtype


def short(value: Any) -> str:
    """A value as an error shows it: one may be nested deeply, or have many digits."""
    if isinstance(value, int) and abs(value) >= LARGEST:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list) and all(isinstance(item, (int, str)) for item in value[:8]):
        return f"[{', '.join(short(item) for item in value[:8])}{', ...' if len(value) > 8 else ''}]"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, dict)) else f"{value!r:.60}"


# --- program.json, checked field by field, as a Manifest -------------------------------------------------------------


FORMAT = 6
ZERO = 3  # the highest level of what data-parallel ranks divide
LOSS_WEIGHTS = ("tokens", "sum", "mean", "terms")
BATCH_VALUES = ("rows", "sum", "mean")


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
    _once("inputs", [item.name for item in inputs], where)
    _once("parameters", [parameter.name for parameter in parameters], where)
    _once("constants", [constant.name for constant in constants], where)
    _once("messages", [message.channel for message in messages], where)
    known = {item.name for item in inputs} | top.get("fixed", dict, {}).keys()
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
        loss=_loss(top, len(stages), inputs),
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
    entry, table, classes = row.get("whole", bool, False), row.limit("table"), row.classes("classes")
    return InputSpec(row.get("name", str), row.sizes("shape"), row.dtype(), entry, table, classes)


def _draw(row: Fields) -> DrawSpec:
    p = row.get("p", (int, float, type(None)))
    if p is not None and not 0 <= p <= 1:
        raise ProgramError(f"field 'p' is {p}, which no probability is", row.where, REMEDY)
    samples, once = row.get("samples", int, 0), row.get("once", bool, False)
    return DrawSpec(row.get("region", str), row.get("index", int), p, samples, once)


def _zero(top: Fields) -> int:
    level = int(top.get("zero", int, 0))
    if not 0 <= level <= ZERO:
        raise ProgramError(f"field 'zero' is {level}: this runtime knows 0 to {ZERO}", top.where, REMEDY)
    return level


def _check_stages(stages: Sequence[StageSpec], mesh: Mesh, files: int, where: str) -> None:
    """Each rank of the mesh has a file and a stage, and stages are in order."""
    if mesh.pp > len(stages) or mesh.size > files:
        fault = f"mesh {mesh} has {short(mesh.size)} ranks, and it lists {len(stages)} stages and {files} files"
        raise ProgramError(fault, where, REMEDY)
    if [s.stage for s in stages] != list(range(len(stages))):
        raise ProgramError(f"it lists stages {[s.stage for s in stages]}, not in order from 0", where, REMEDY)
    idle = set(range(mesh.pp)) - {s.rank for s in stages}
    if idle:
        raise ProgramError(f"rank {min(idle)} has no stage, the mesh has pp={mesh.pp}", where, REMEDY)


def _loss(top: Fields, stages: int, inputs: Sequence[InputSpec]) -> LossSpec:
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
    rows, along = loss.get("rows", str, ""), loss.get("along", int, 0)
    if along not in range(next((len(entry.shape) for entry in inputs if entry.name == rows and entry.shape), 1)):
        raise ProgramError(f"its loss counts rows along dimension {along} of {rows!r}", top.where, REMEDY)
    return LossSpec(
        stage,
        weight,
        rows,
        _finite(loss, "added"),
        _finite(loss, "least"),
        divisors,
        loss.get("summed", bool, False),
        along,
        _over_batch(loss),
    )


def _over_batch(loss: Fields) -> BatchLossSpec | None:
    table = loss.get("over_batch", dict, {})
    if not table:
        return None
    row = Fields(table, f"{loss.where}, over_batch")
    values = tuple(map(_batch_value, row.rows("values")))
    sizes = tuple((one.get("size", int), one.get("adds", bool)) for one in row.rows("sizes"))
    return BatchLossSpec(values, sizes, row.names("parameters"), row.names("constants"), _finite(row, "factor"))


def _batch_value(row: Fields) -> BatchValueSpec:
    kind, dims, dim, groups = (
        row.get("kind", str), row.get("dims", int), row.get("dim", int, 0), row.get("groups", int, 1),
    )  # fmt: skip
    if kind not in BATCH_VALUES or groups < 1 or (kind == "rows" and not 0 <= dim < dims):
        raise ProgramError(f"a value of kind {kind!r} along dimension {dim} of {dims} is none", row.where, REMEDY)
    return BatchValueSpec(row.get("name", str), dims, row.dtype(), kind, dim, groups, row.get("samples", int, 0))


def _features(top: Fields) -> FeatureSpec | None:
    table = top.get("features", dict, {})
    if not table:
        return None
    row = Fields(table, f"{top.where}, features")
    values, named = row.rows("values"), row.get("parameters", dict)
    dtypes = Fields(named, f"{row.where}, parameters")
    return FeatureSpec(
        tuple(entry.get("entry", str) for entry in values),
        tuple(_value(entry) for entry in values),
        row.names("inputs"),
        row.names("constants"),
        {name: dtypes.dtype(name) for name in named},
    )


def _once(kind: str, names: Sequence[Any], where: str) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ProgramError(f"it lists {twice!r} twice among its {kind}", where, REMEDY)


def _device(top: Fields) -> str:
    device = top.get("device", str)
    try:
        torch.device(device)
    except RuntimeError:
        raise ProgramError(f"field 'device' is {short(device)}, which is none", top.where, REMEDY) from None
    return str(device)


def _contexts(top: Fields, mesh: Mesh, stages: tuple[StageSpec, ...]) -> tuple[ContextSpec, ...]:
    rows = top.rows("context") if mesh.cp > 1 else top.rows("context", [])
    contexts = tuple(_context(row, mesh) for row in rows)
    names = [context.component for context in contexts]
    if len(set(names)) < len(names):
        raise ProgramError(f"field 'context' lists {', '.join(names)}: a component twice", top.where, REMEDY)
    for stage in stages:
        unknown = set(stage.contexts) - set(names)
        if unknown:
            fault = f"stage {stage.stage} asks for the tokens of {min(unknown)!r}, which 'context' does not list"
            raise ProgramError(fault, top.where, REMEDY)
    return contexts


def _context(row: Fields, mesh: Mesh) -> ContextSpec:
    ranks, sizes = row.get("ranks", int), {name: row.get(name, int) for name in ("tokens", "block", "shard")}
    axis, component = row.get("axis", str, "cp"), row.get("component", str)
    try:
        group = group_over(axis)
    except ValueError:
        raise ProgramError(f"tokens cannot be spread over {axis!r}", row.where, REMEDY) from None
    (size,) = (mesh.extent_of(component).width,) if axis == "tp" else mesh.sizes(group)
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
        fault = f"field 'weight' has groups of {weight.size}, and {len(set(divided))} ranks divide it"
        raise ProgramError(fault, row.where, REMEDY)
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
        return read(row.get("boxes", list), row.sizes("shape"), ranks, mesh.divisions)
    except ValueError as error:
        raise ProgramError(f"field 'boxes' {error}", row.where, REMEDY) from None


def _placement(row: Fields, key: str, known: tuple[str, ...], divided: tuple[str, ...], mesh: Mesh) -> Placement:
    """How a parameter or its gradient lies on the ranks of a position. ProgramError if it is none of `known` over an
    axis, or no shard over one along which boxes differ: then ranks with one parameter would train it apart.
    """
    try:
        placement = Placement.of(row.get(key, dict))
    except CscError as error:
        raise ProgramError(error.what, f"{row.where}, {key}", error.remedy) from None
    if placement.size and placement.size not in mesh.divisions:
        raise ProgramError(
            f"field {key!r} has groups of {placement.size}, and the mesh none of these", row.where, REMEDY
        )
    (most,) = mesh.sizes(Group.TENSOR)
    for axis in places(Group.POSITION.along):
        within = {"copies": most // (placement.size or most), "division": placement.size or most}
        over, size = placement.over(axis), within[axis] if axis in within else getattr(mesh, axis)
        named = "tp" if axis in within and not mesh.divisions else axis
        expected = ("shard",) if axis in divided else known
        if (over or size > 1) and over not in expected:
            statement = f"{over} over {named}" if over else f"nothing over {named}, whose size is {size}"
            fault = f"field {key!r} says {statement}: this runtime knows {' and '.join(known)}"
            raise ProgramError(fault, row.where, REMEDY)
    return placement


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
    number = row.get(key, int)
    if not 0 <= number < count:
        raise ProgramError(f"{key} is {number}, there are 0..{count - 1}", row.where, REMEDY)
    return number


def _message(row: Fields, count: int) -> MessageSpec:
    kind = row.get("kind", str)
    if kind not in ("F", "B"):
        raise ProgramError(f"message kind {kind!r} is neither F nor B", row.where, REMEDY)
    values = tuple(map(_value, row.rows("values")))
    return MessageSpec(kind, _end(row, "source", count), _end(row, "destination", count), values)


def _value(row: Fields) -> ValueSpec:
    spec = ValueSpec(row.get("name", str), row.sizes("shape"), row.sizes("stride"), row.dtype())
    if overlaps(spec.shape, spec.stride):
        raise ProgramError(
            f"value {spec.name!r} of shape {list(spec.shape)} has stride {list(spec.stride)}: elements overlap",
            row.where,
            "Send a contiguous copy",
        )
    return spec
