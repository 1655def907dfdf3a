"""The Program: one training step of one model, from whole-model graph to stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import fx

from csc.ir.capture_guards import CaptureGuards, Joints
from csc.ir.graph import snake
from csc.ir.groups import (
    ALL_SUMMED,
    SHARD,
    SHARD_SUMMED,
    SUMMED,
    WHOLE,
    Placement,
    copies_summed,
    held,
    held_equal,
    held_summed,
)
from csc.ir.mesh import Mesh
from csc.ir.schedule import Schedule

# --- How the losses of microbatches make that of the whole batch -----------------------------------------------------


@dataclass(frozen=True)
class Divisor:
    """What a loss, or a term of it, is divided by: n + added, or `least` if that is more; no limit with 0. n is the
    number of rows of the batch entry `rows`; or of the labels that the call `counted` of the captured graph is a mean
    over; or, with `value`, what that call gives: where it is 0, what is divided by it need not be.
    """

    rows: str = ""
    counted: str = ""
    added: float = 0.0
    least: float = 0.0
    value: bool = False

    @property
    def can_be_zero(self) -> bool:
        """Whether a microbatch may have nothing of it, other than rows, and would divide by 0."""
        return bool(self.counted) and self.least <= 0 and self.added <= 0

    @property
    def for_zero(self) -> int:
        """What a microbatch divides by where this is 0: -1 instead of a value, for no count of a batch is -1, and so
        no weight is 1 then, as that of a batch alone; a mean over no label is 0 whatever it is.
        """
        return -int(self.can_be_zero and self.value)

    def renamed(self, names: Mapping[str, str]) -> Divisor:
        """With another name for the call that is counted."""
        return replace(self, counted=names.get(self.counted, ""))


@dataclass(frozen=True)
class Term:
    """The operand of the call of the captured graph that adds it to the others, or stacks them. One that is the same
    for every batch is a mean over whatever its divisor counts.
    """

    call: str
    operand: int
    divisor: Divisor


@dataclass(frozen=True)
class Combination:
    """What the graph shows (csc.analysis.samples.combining).

    weight: "tokens", "mean", "sum" or "terms"; "" if it could not be proven, and `problem` (a phrase with an operation
    as its subject) and `where` say why. rows: the batch entry whose rows count, with "mean"; counted, added, least: see
    Divisor, with "tokens". terms: those that do not weigh alike; what is added to them is a sum over samples. whole:
    batch entries without a sample dimension, which every microbatch has whole. summed: ranks that share the tokens of a
    microbatch have parts of its loss, and count alike; else each has a loss over its own labels. ends: where a problem
    is, name and place of the call that the loss ends in, if what it divides by can be counted; "": it cannot.
    """

    weight: str = ""
    rows: str = ""
    counted: str = ""
    added: float = 0.0
    least: float = 0.0
    terms: tuple[Term, ...] = ()
    whole: tuple[str, ...] = ()
    summed: bool = False
    problem: str = ""
    where: str = ""
    ends: str = ""

    def renamed(self, names: Mapping[str, str]) -> Combination:
        """With other names for the calls of the captured graph."""
        terms = tuple(replace(term, call=names[term.call], divisor=term.divisor.renamed(names)) for term in self.terms)
        return replace(self, counted=names.get(self.counted, ""), terms=terms)

    @property
    def divisors(self) -> tuple[Divisor, ...]:
        """Of the terms, each once."""
        return tuple(dict.fromkeys(term.divisor for term in self.terms))


# --- The Program: one training step of one model, from whole-model graph to stages -----------------------------------
#
# Terms
#   value      a tensor that flows between regions, named after the region that makes it
#   region     the smallest unit that is cut, differentiated and costed: a layer, an embedding, a projector, a head
#   template   a region up to parameter names; equal layers share one
#   variant    a template specialised to what a frozen set leaves to do: its F, B and W graphs
#   shared     the graph of what depends on the batch and on constants alone (masks); a stage computes what it uses
#
# A Program is immutable; a pass returns a new one (`dataclasses.replace`). Its fx graphs are never changed in place.
# An fx node's `meta`: "val" (a fake tensor), "source" (file:line of the user's code, or empty), "module" (that ran
# it).


LOSS = "loss"
Choice = str | tuple[str, ...]  # what F of a region keeps: none, selective, elementwise, full or auto, or these values


@dataclass(frozen=True)
class Input:
    """One tensor of the batch. dynamic: dimensions captured symbolically; table, classes: csc.analysis.batch_limits;
    samples: the dimension along which samples lie.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dynamic: tuple[int, ...] = ()
    table: tuple[str, int] | None = None
    classes: tuple[int, int, int] | None = None
    samples: int = 0

    @property
    def begins(self) -> bool:
        """Whether its name says that it holds where packed sequences begin, counted from the microbatch's first row."""
        return speaks_of_beginnings(self.name)


TOKENS = ("input_ids", "labels", "decoder_input_ids", "attention_mask")  # entries that have a row for each sample
# What collators and encoders call where packed sequences begin.
BEGINNINGS = ("cu_seqlens", "cu_seq_lens", "cu_window_seqlens")


def speaks_of_beginnings(name: str) -> bool:
    """Whether a batch entry of this name holds where packed sequences begin."""
    return any(word in name for word in BEGINNINGS)


Box = tuple[tuple[tuple[int, int], ...], ...]  # of a tensor, for each dimension stretches from start to stop


@dataclass(frozen=True)
class Parameter:
    """A parameter under the model's own name; `aliases` are the other names of a tied one.

    boxes: what each tensor-parallel rank holds of it; empty: all have it whole. parts: its gradients on these ranks are
    parts of a sum. copied: those of ranks that hold the same of it are, beside as many that divide its component
    (csc.ir.groups.Group.copies); 0: they are not.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    aliases: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()
    parts: bool = False
    copied: int = 0

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Checkpoint:
    """A reentrant checkpoint: eager mode gives the parameters `inside` no gradient where none of those `before` trains.

    anyway: its inputs ask for a gradient (requires_grad_) whatever trains. where: the line of what it runs.
    """

    before: tuple[str, ...]
    inside: tuple[str, ...]
    anyway: bool
    where: str


@dataclass(frozen=True)
class ModuleInfo:
    """What the module tree says about one path: its class, component and the name of its forward's first argument."""

    path: str
    kind: str
    component: str
    first_argument: str
    role: str  # "layer": one of a list of equals; "part": any other cut unit; "container": holds cut units


@dataclass(frozen=True)
class DividedAxis:
    """`size` entries over `ranks`, in these parameters. groups: of key heads, the query heads that read each."""

    name: str
    size: int
    ranks: int
    parameters: tuple[str, ...]
    groups: int = 1


@dataclass(frozen=True)
class Template:
    """A region's forward graph with placeholders in the order activations, shared, parameters; `joint` adds gradients.

    joint: placeholders = activations, shared, parameters, then one tangent for each of `differentiable` and for each of
    `threaded`; outputs = forward outputs, then gradients of activations, then of parameters (None where there is none).
    """

    name: str
    graph: fx.Graph
    activations: tuple[str, ...]
    shared: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    differentiable: tuple[int, ...]  # outputs that a gradient comes back to
    inexact: tuple[int, ...]  # activations a gradient is asked for (floating point, on a path to the loss)
    threaded: tuple[int, ...]  # activations whose gradient already holds the share of later regions
    joint: fx.Graph | None = None
    activation_gradients: tuple[bool, ...] = ()
    parameter_gradients: tuple[bool, ...] = ()
    divided: tuple[DividedAxis, ...] = ()  # its graphs are those of one tensor-parallel rank


@dataclass(frozen=True)
class Region:
    """A region of the model. All tuples of names are in the order of its template's placeholders and outputs. needs_dx,
    needs_dw: some activation's, some own parameter's gradient has to be computed (after pass `prune`).
    """

    name: str
    module: str
    component: str
    kind: str
    template: str
    activations: tuple[str, ...]
    shared: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    threaded: tuple[bool, ...] = ()  # per activation
    dx: tuple[bool, ...] = ()  # per activation: its gradient is needed
    dw: tuple[bool, ...] = ()  # per parameter: its gradient is needed
    variant: str = ""

    @property
    def needs_dx(self) -> bool:
        return any(self.dx)

    @property
    def needs_dw(self) -> bool:
        return any(self.dw)


@dataclass(frozen=True)
class Variant:
    """F, B and W of a template for one frozen set.

    forward(activations, shared, parameters) -> outputs, saved
    backward_input(saved, shared, parameters, gradients in) -> gradients of activations, saved for W
    backward_weight(saved for W, shared, parameters) -> gradients of parameters; backward: both (pass `overlap`)
    `backward_input` is None if nothing is to be computed, `backward_weight` if no parameter trains.
    """

    name: str
    template: str
    dx: tuple[bool, ...]
    dw: tuple[bool, ...]
    tangents: tuple[bool, ...]  # per output: its gradient comes in
    pruned: fx.Graph
    saves: tuple[str, ...] | None = None  # values that F may keep for B, which makes the rest again; None: all it reads
    forward: fx.Graph | None = None
    backward_input: fx.Graph | None = None
    backward_weight: fx.Graph | None = None
    backward: fx.Graph | None = None
    flops: tuple[int, int, int] = (0, 0, 0)
    matmuls: tuple[int, int, int] = (0, 0, 0)
    rematerialised: int = 0  # FLOPs of B that are F's, run again


@dataclass(frozen=True)
class Stage:
    """A set of regions, in order of execution, that `rank` (a position on the pp axis) runs as one F, one B, one W. A
    rank runs one stage or several. Stages form a DAG: values go from lower to higher indices only.
    """

    index: int
    rank: int
    regions: tuple[str, ...]
    inputs: tuple[str, ...]
    constants: tuple[str, ...]
    parameters: tuple[str, ...]
    shared: tuple[str, ...]
    has_b: bool
    has_w: bool
    contexts: tuple[str, ...] = ()  # components of whose tokens it has a shard, or hands shards out
    divided: bool = False  # data-parallel ranks hold shards of its parameters, which GATHER makes whole


@dataclass(frozen=True)
class Features:
    """What no step runs: regions above which nothing trains, whose values come with the batch (pass `features`).

    templates, variants: of the regions; a variant has an F alone, under a name of its own. values: what the step reads
    of them. entries: the batch's names of these. stage: of these regions; its index and rank are none's.
    """

    regions: tuple[Region, ...]
    templates: Mapping[str, Template]
    variants: Mapping[str, Variant]
    values: tuple[str, ...]
    entries: tuple[str, ...]
    stage: Stage


@dataclass(frozen=True)
class BatchValue:
    """Of a microbatch, for a loss over the whole batch.

    kind: how those of microbatches make that of the batch: "rows" one behind the other along `dim`; "sum"; "mean" over
    samples, of which the microbatch has so many. groups: along `dim` the rows of all samples stand so many times one
    behind the other (two views of each); of the whole batch, those of all microbatches in each.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    dim: int = 0
    groups: int = 1
    samples: int = 0


@dataclass(frozen=True)
class BatchSize:
    """A size that a loss over the whole batch asks for: that of a microbatch. adds: of all it is the sum of theirs."""

    size: int
    adds: bool


@dataclass(frozen=True)
class BatchLoss:
    """What is computed once a step, over values of all microbatches (pass `loss`).

    graph: placeholders are "value" and "size", each with its place, parameters and constants; it has the sizes of the
    capture. factor: of its result in the loss. meets: where samples meet first.
    """

    graph: fx.Graph
    values: tuple[BatchValue, ...]
    parameters: tuple[str, ...]
    constants: tuple[str, ...]
    sizes: tuple[BatchSize, ...]
    factor: float
    meets: str


@dataclass(frozen=True)
class Message:
    """Values (kind F) or their gradients (kind B) that go from one stage to another for every microbatch."""

    kind: str
    source: int
    destination: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What the planner decided and expects, in seconds of a step and bytes of a rank. costs: where seconds come from.
    layout: how components share ranks. pipeline: for the simulator, as JSON. bound: no plan of one stage a rank takes
    less; None: several share one. shared_bound: no plan does. peak_flops: FLOP/s of a device in the computed dtype,
    0: unknown. ahead: by rank, how many of its computes come before it encodes which microbatches of the next step.
    """

    schedule: Schedule
    costs: str
    layout: str
    pipeline: Mapping[str, Any]
    makespan: float
    bound: float | None
    shared_bound: float
    peak_memory: tuple[float, ...]
    peak_flops: float = 0.0
    ahead: tuple[Mapping[int, tuple[int, ...]], ...] | None = None


@dataclass(frozen=True)
class Record:
    """Provenance of one step, of the capture or a pass: what ran, how long, what it left."""

    name: str
    seconds: float
    summary: str


@dataclass(frozen=True)
class Options:
    """What the user asked for; every pass reads the part that concerns it.

    freeze: component names or glob patterns over parameter names; None keeps `requires_grad` as the model has it.
    cuts: names of the regions that open a stage, in order of execution.
    stages: for each stage the names or glob patterns of its regions; neither this nor cuts: csc plans the stages.
    placement, chunks: the pipeline rank of each stage, stages a rank runs; None: as the schedule wants it.
    schedule: a name of csc.planning.schedules, the path of a schedule file, or a schedule as it is.
    hardware: a profile's name or file, or one for each pipeline rank; None: the one of the capture's device.
    memory: bytes that one rank may hold, or for each pipeline rank; None: what the hardware has.
    precision: "model", as the parameters are, or "bf16", in which float32 ones are computed with (pass `precision`).
    keep_fp32: modules that compute in float32 with precision="bf16".
    loss_chunk: tokens whose logits are there at once (pass `head`); 0: those of all; None: as that pass decides.
    recompute: pairs of a pattern over regions and a choice of pass `recompute`; later pairs go before earlier ones.
    context: (component, ranks) that share the component's tokens; else 1 for encoders, mesh.cp for the language model.
    fuse, cuda_graphs: functions are compiled by Inductor, stages are recorded, where they run; plans count on both.
    part: stages and schedule are those of a program that does more, beside which this one runs what it has of them.
    forward_only: no parameter trains: the program has F alone, and saves nothing.
    zero: what data-parallel ranks divide: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too.
    sequence_parallel: with tp, ranks share out tokens between the products that they divide (pass `sequence`).
    features: what a frozen encoder makes comes with the batch (pass `features`).
    replicate: operators (`mine::route`) that all tp ranks make of whole operands (pass `tensor`).
    over_batch: a loss whose samples meet is computed over values of the whole batch (pass `loss`).
    passes: those that run, without what other options say of them; None: csc's own (csc.passes.pipeline).
    """

    mesh: Mesh = field(default_factory=Mesh)
    freeze: tuple[str, ...] | None = None
    cuts: tuple[str, ...] | None = None
    stages: tuple[tuple[str, ...], ...] | None = None
    placement: tuple[int, ...] | None = None
    schedule: str | Schedule = "auto"
    chunks: int | None = None
    hardware: str | tuple[str, ...] | None = None
    memory: int | tuple[int, ...] | None = None
    microbatches: int = 1
    loss_weight: str = "auto"
    precision: str = "model"
    keep_fp32: tuple[str, ...] = ()
    loss_chunk: int | None = None
    recompute: tuple[tuple[str, Choice], ...] = ()
    context: tuple[tuple[str, int], ...] = ()
    fuse: bool = False
    cuda_graphs: bool = False
    part: bool = False
    forward_only: bool = False
    zero: int = 0
    sequence_parallel: bool = False
    features: bool = False
    replicate: tuple[str, ...] = ()
    over_batch: bool = False
    passes: tuple[Pass, ...] | None = None


@dataclass(frozen=True)
class ContextMask:
    """Which tensors a mask of spread tokens is given by, and how many layers have it."""

    ranges: bool
    kinds: bool
    layers: int


@dataclass(frozen=True)
class Context:
    """How the sequence of a component is spread over `ranks` of those along an axis (see csc.ir.groups.group_over); the
    next share it again.

    tokens: of the whole sequence; block: those that stay together; shard: slots of each rank, padding included.
    graph: from the batch to what the masks are made of: ranges, admits, kinds of each as far as it has them.
    tile_flops, tile_seconds: attention of one block to another; block_bytes, block_seconds: one block's keys and values
    and how long they are on their way (seconds are filled in by pass `partition`).
    """

    component: str
    ranks: int
    tokens: int
    block: int
    shard: int
    graph: fx.Graph
    masks: tuple[ContextMask, ...]
    tile_flops: int
    block_bytes: int
    axis: str = "cp"
    tile_seconds: float = 0.0
    block_seconds: float = 0.0


CAPTURED = ("captured", "unweighed")  # facts that hold of what capture makes


@dataclass(frozen=True)
class Program:
    """The program of one training step. Passes fill the fields below `graph`, in the order of the fields."""

    name: str
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    constants: Mapping[str, torch.Tensor]
    modules: Mapping[str, ModuleInfo]
    device: str
    graph: fx.Graph
    fake_mode: Any  # the FakeTensorMode that the `val`s of all graphs live in
    guards: CaptureGuards | None = None  # what the capture assumed of its batch, without its calls
    made: tuple[str, ...] = ()  # batch entries that the model's own code makes of a microbatch before the step
    # Those of them that look at all samples of the microbatch at once, and the lines that ask for them.
    statistics: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, str] = field(default_factory=dict)  # entries whose values Python reads, and where
    sizes: tuple[str, ...] = ()  # entries that describe others (grids, lengths), and those made of such alone
    checkpoints: tuple[Checkpoint, ...] = ()
    symbolic: fx.Graph | None = None  # the graph as captured, for other sizes
    contexts: tuple[Context, ...] = ()  # of spread components, those of cp last
    shared: fx.Graph | None = None
    loss_weight: str = ""
    combination: Combination = field(default_factory=Combination)  # how the graph says that losses combine
    loss_tokens: str = ""  # the shared value that counts a microbatch's labels, if loss_weight is "tokens"
    batch_loss: BatchLoss | None = None  # what of the loss is computed over the whole batch
    templates: Mapping[str, Template] = field(default_factory=dict)
    joints: Joints | None = None  # of other sizes, before pass `differentiate`; after it with those of this one
    regions: tuple[Region, ...] = ()
    variants: Mapping[str, Variant] = field(default_factory=dict)
    features: Features | None = None
    stages: tuple[Stage, ...] = ()
    messages: tuple[Message, ...] = ()
    plan: Plan | None = None
    schedule: Schedule | None = None
    notes: tuple[str, ...] = ()  # what a user should know of this program: sentences
    history: tuple[Record, ...] = ()
    facts: tuple[str, ...] = CAPTURED  # what holds of it, as passes say (csc.passes.pipeline.FACTS)

    def region(self, name: str) -> Region:
        """The region of that name; KeyError if there is none."""
        return next(region for region in self.regions if region.name == name)


def loss_stage(program: Program) -> int:
    """The stage that computes the loss, after pass `partition`."""
    region = next(region.name for region in program.regions if LOSS in region.outputs)
    return next(stage.index for stage in program.stages if region in stage.regions)


@dataclass(frozen=True)
class Pass:
    """A step of the compilation, as a value: it takes a Program and returns a new one.

    A pass is a frozen dataclass of this class. Its fields are its options: None, booleans, numbers, strings, and tuples
    of these, so that a line can hold them (csc.passes.line). See docs/writing-a-pass.md.

    Attributes:
        name: What the line and `csc dump --after` call the pass. By default it is made of the class's name: `SplitPass`
            is `split`.
        requires: Facts that must hold of the Program that the pass takes: keys of csc.passes.pipeline.FACTS, or names
            of your own.
        establishes: Facts that hold of the Program that it returns, and did not hold before.
        breaks: Facts that no longer hold.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    establishes: ClassVar[tuple[str, ...]] = ()
    breaks: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = snake(cls.__name__.removesuffix("Pass") or cls.__name__)

    def __call__(self, program: Program, options: Options) -> Program:
        """The Program that this step makes of another one, which stays as it is.

        Args:
            program: What the passes before this one have made.
            options: What the program is compiled with: the mesh, the microbatches and so on.

        Returns:
            A new Program (`dataclasses.replace(program, ...)`), or the same where there is nothing to do.
        """
        raise NotImplementedError

    def over(self, options: Options) -> Options:
        """The options of the compilation, with this pass's fields in place of those of the same names."""
        known = {field.name for field in fields(options)}
        return replace(
            options, **{field.name: getattr(self, field.name) for field in fields(self) if field.name in known}
        )


def compute_dtypes(program: Program) -> dict[str, torch.dtype]:
    """The dtype in which the graph has each parameter that it reads; Parameter.dtype is the one it is stored in."""
    placed = (node for node in program.graph.nodes if node.op == "placeholder")
    return {node.meta["role"][1]: node.meta["val"].dtype for node in placed if node.meta["role"][0] == "parameter"}


# --- How a parameter of a Program lies on the ranks of a position, and its gradient before REDUCE adds it up ---------
#
# Terms: see csc.ir.groups.


def weight_placement(parameter: Parameter) -> Placement:
    """Whole, or in boxes."""
    if not parameter.boxes:
        return WHOLE
    size = _division(parameter)
    return held(size) if size else SHARD


def gradient_placement(parameter: Parameter) -> Placement:
    """Its parts are over the group that REDUCE adds over."""
    size = _division(parameter)
    if size:
        return held_summed(size) if parameter.copied else held_equal(size)
    if parameter.boxes:
        return SHARD_SUMMED
    if parameter.parts:
        return ALL_SUMMED
    return copies_summed(parameter.copied) if parameter.copied else SUMMED


def _division(parameter: Parameter) -> int:
    """How many boxes several tensor-parallel ranks have; 0: none is held twice."""
    different = len(set(parameter.boxes))
    return different if different < len(parameter.boxes) else 0
