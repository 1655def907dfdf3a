"""What program.json says, as frozen dataclasses.

Terms: a *value* is a tensor that a message carries between two stages; its *stride* is dense, possibly
permuted. A parameter's *holders* are the pipeline ranks that hold it; the first is its *owner*. All sizes are
those of ONE microbatch.

csc.runtime.read_manifest makes them of program.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from csc.ir.groups import SUMMED, WHOLE, Group, Placement, group_over
from csc.ir.mesh import Mesh
from csc.ir.schedule import Message

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
class LossSpec:
    """The stage that computes the loss, and how microbatches' losses combine: tokens, sum, mean or terms.

    rows: with mean, the input whose rows are counted; "": every microbatch counts the same. added, least: with tokens,
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
    """Random numbers of a region: its index-th. p: the probability of dropout; None: it draws something else."""

    region: str
    index: int
    p: float | None


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

    def stages_of(self, rank: int) -> tuple[StageSpec, ...]:
        """The stages that a position on the pp axis runs, in order."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    @property
    def divided(self) -> list[bool]:
        """Of which stages data-parallel ranks divide the parameters, so that GATHER makes them whole."""
        if self.zero < 3:
            return [False] * len(self.stages)
        having, mesh = {stage for one in self.parameters if one.shape for stage in one.stages}, self.mesh
        return [mesh.extent(stage.rank)[0] * mesh.cp > 1 and stage.stage in having for stage in self.stages]

    @cached_property
    def flops(self) -> float:
        """What the ranks of a replica spend on a microbatch, as the plan counts it; asked in every step."""
        of_stages = zip(self.stages, self.plan.get("flops") or ())
        return float(sum(len(self.mesh.group(Group.LAYER, 0, [stage.rank])) * sum(own) for stage, own in of_stages))

    @property
    def loss_rank(self) -> int:
        """The position on the pp axis that computes the loss."""
        return self.stages[self.loss.stage].rank
