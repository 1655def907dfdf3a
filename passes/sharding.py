"""What pass `context` does to the calls that run on shards: each again, on a rank's own tokens."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from csc.kernels.collectives import SHARE
from csc.kernels.context import ATTENTION, GATHER, OWN, WHOLE
from csc.passes.loss import counted_labels
from csc.passes.tensor import group_number
from torch import fx

from csc.analysis.gradient_flow import carrying_calls
from csc.analysis.operators.execution import is_view
from csc.analysis.operators.table import COPIES, ELEMENTS, LABELS, NEW, SIZED_VIEWS, is_linear
from csc.analysis.tokens import TOKENS, Place, SortedRows, TokenOrder, mixes, positions
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import Evaluation, Writer, identifier, unique
from csc.ir.groups import OF_RANKS
from csc.ir.program import Context, ContextMask, Program
from csc.torch_private.traces import FakeTensorMode

# --- Views of values on shards, and of what shards are taken from ----------------------------------------------------


class Views:
    """mode: of the values."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, bool] = {}

    def fit(self, val: torch.Tensor, shape: Sequence[int]) -> bool:
        """Returns whether a value of this layout can be viewed in a shape without a copy."""
        key = (tuple(val.shape), val.stride(), *shape)
        if key not in self._known:
            try:
                with self._mode:
                    val.view(shape)
                self._known[key] = True
            except (RuntimeError, ValueError):
                self._known[key] = False
        return self._known[key]


def moved(node: fx.Node) -> set[fx.Node]:
    """Returns a value, with all that it is a mere view or copy of."""
    moved_nodes: set[fx.Node] = set()
    here: Any = node
    while isinstance(here, fx.Node):
        moved_nodes.add(here)
        moves = here.op == "call_function" and (is_view(here) or g.op_name(here) in SIZED_VIEWS | COPIES)
        here = here.args[0] if moves else None
    return moved_nodes


# --- What a program says of tokens that are spread -------------------------------------------------------------------
#
# It says their sizes, and what the masks of their attention are made of.
#
# Terms: *shard*: the slots of one rank, as many on every rank. *block*: tokens that stay together.


@dataclass(frozen=True)
class TokenSizes:
    """tokens of the whole sequence; block: tokens that stay together; shard: slots of one rank."""

    tokens: int
    block: int
    shard: int


@dataclass(frozen=True)
class _MaskParts:
    """The nodes that a packed mask was made of; all None if every query sees every key."""

    ranges: fx.Node | None
    admits: fx.Node | None
    kinds: fx.Node | None
    layers: int


class SpreadMasks:
    """Of one component. axis: of the ranks that share its tokens."""

    def __init__(self, axis: str) -> None:
        self._axis = axis
        self._parts: dict[fx.Node | None, _MaskParts] = {}

    def number(self, packed: fx.Node | None) -> int:
        """Which mask a layer has: it counts as one more that reads it."""
        if packed not in self._parts:
            fields: Any = packed.args[:3] if packed is not None else (None, None, None)
            self._parts[packed] = _MaskParts(fields[0], fields[1], fields[2], 0)
        self._parts[packed] = replace(self._parts[packed], layers=self._parts[packed].layers + 1)
        return list(self._parts).index(packed)

    def context(
        self, program: Program, component: str, ranks: int, sizes: TokenSizes, attention: fx.Node,
        mixed: Callable[[fx.Node, str], InputError],
    ) -> Context:  # fmt: skip
        """How the component's tokens are spread; its layers' attention is like the given one of the program's graph.
        mixed: the error for a call that combines tokens.
        """
        q, k = (argument.meta["val"] for argument in attention.args[:2])  # type: ignore[union-attr]
        samples, heads, _, width = q.shape
        parts = self._parts.values()
        return Context(
            component=component,
            ranks=ranks,
            tokens=sizes.tokens,
            block=sizes.block,
            shard=sizes.shard,
            graph=self._graph(program, mixed),
            masks=tuple(ContextMask(p.ranges is not None, p.kinds is not None, p.layers) for p in parts),
            tile_flops=4 * samples * heads * width * sizes.block**2,
            block_bytes=2 * samples * k.shape[1] * width * sizes.block * k.element_size(),
            axis=self._axis,
        )

    def _graph(self, program: Program, mixed: Callable[[fx.Node, str], InputError]) -> fx.Graph:
        """From the batch to ranges, admits and kinds of each mask, for the whole sequence."""
        parts = [node for p in self._parts.values() for node in (p.ranges, p.admits, p.kinds) if node is not None]
        needed = g.ancestors(parts)
        for node in g.placeholders(program.graph):
            if node in needed and node.meta["role"][0] == "parameter":
                reader = next(user for user in node.users if user in needed)
                raise mixed(reader, f"decides with {node.meta['role'][1]} what attention sees")
        return g.extract(program.graph, parts)


# --- Losses over spread tokens: each rank sums over its own, so that what it has is a part of the whole loss ---------
#
# Terms
#   part     a value that the ranks have terms of a sum of; whatever is made of it must be linear
#   equal    a value that all of them have alike: where it is added to a part, each adds its share of it


aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # values of ATen's `reduction` argument
NOT_LINEAR = "does more than add up or scale what was summed over tokens"
JOINED = "sums tokens that do not stand in their order"


@dataclass
class TokenSums:
    """The sums over tokens of one graph. `parts` are the calls of the old graph that have become parts."""

    spread: Spreading
    parts: set[fx.Node] = field(default_factory=set)

    def made(self, node: fx.Node, place: Place | None) -> fx.Node | None:
        """Returns what a call becomes that sums over tokens, or reads a part; None for any other call. Raises
        InputError for what is not linear in a part.
        """
        name = g.op_name(node)
        if any(used in self.parts for used in node.all_input_nodes):
            summed = self._linear(node, name)
        elif place is None:
            return None
        elif name in LABELS and not node.meta["val"].dim():
            summed = self._loss(node, place)
        elif name in ELEMENTS and not node.meta["val"].dim():
            summed = self._of_elements(node, place)
        elif name in ("aten::sum", "aten::mean") and self._reduces(node):
            bound = g.bind(node)
            shard = self.spread.given(bound["self"], place)
            summed = self._sum(node, place, bound["self"], shard, name == "aten::mean")
        else:
            return None
        self.parts.add(node)
        return summed

    def _loss(self, node: fx.Node, place: Place) -> fx.Node:
        """Over labels: those of slots without a token are ignored. A mean is a sum over the labels of all ranks."""
        bound = g.bind(node)
        target, weight, ignored = bound["target"], bound.get("weight"), int(bound["ignore_index"])
        if target.meta["val"].dtype is not torch.int64:
            raise self.spread.mixed(node, "is a loss over probabilities")
        if target in self.spread.local:  # in slots without a token it would be some label
            raise self.spread.mixed(node, "is a loss over labels that the model computes")
        logits, labels = (self.spread.given(operand, place) for operand in (bound["self"], target))
        classes = self.spread.mapping[weight] if isinstance(weight, fx.Node) else None
        rest = [bound["label_smoothing"]] if "label_smoothing" in bound else []
        summed = (logits, labels, classes, SUM, ignored, *rest)
        if bound["reduction"] != MEAN:
            return self.spread.named(node.name, node, node.target, *summed)
        total = self.spread.named(f"{node.name}_sum", node, node.target, *summed)

        def call(target: Any, *arguments: Any) -> fx.Node:
            return self.spread.call(node, target, *arguments)

        count = counted_labels(call, self.spread.mapping[target], ignored, classes)
        return self.spread.named(node.name, node, aten.div.Tensor, total, count)

    def _reduces(self, node: fx.Node) -> bool:
        """Whether a sum or mean runs over tokens."""
        bound = g.bind(node)
        dims, rank = bound.get("dim"), bound["self"].meta["val"].dim()
        along = range(rank) if dims is None or dims == [] else [dim % rank for dim in dims]
        return any(dim in along for dim in self.spread.dims(bound["self"]))

    def _of_elements(self, node: fx.Node, place: Place) -> fx.Node:
        """A loss entry by entry, of operands that are as large as each other."""
        bound = g.bind(node)
        value = next(operand for operand in node.all_input_nodes if self.spread.dims(operand))
        if any(operand.meta["val"].shape != value.meta["val"].shape for operand in node.all_input_nodes):
            raise self.spread.mixed(node, "broadcasts its operands")
        arguments = {
            name: fx.map_arg(argument, lambda used: self.spread.given(used, place)) for name, argument in bound.items()
        }
        losses = self.spread.call(node, node.target, **{**arguments, "reduction": NONE})
        return self._sum(node, place, value, losses, bound["reduction"] == MEAN)

    def _sum(self, node: fx.Node, place: Place, value: fx.Node, shard: fx.Node, mean: bool) -> fx.Node:
        """Slots without a token, or with one outside the place, count nothing. value: of the old graph, with the sizes
        of what is summed; shard: what is.
        """
        bound, entries, call = g.bind(node), self.spread.own, self.spread.call
        dims, shape, length = self.spread.dims(value), value.meta["val"].shape, place[1] - place[0]
        step = self.spread.order.step(value, place)
        if len(dims) != 1 or step is None or shape[dims[0]] % (length * step):
            raise self.spread.mixed(node, JOINED)
        counted = entries["real"]
        for test, edge in ((aten.ge.Scalar, place[0]), (aten.lt.Scalar, place[1])):
            counted = call(node, aten.logical_and.default, counted, call(node, test, entries["tokens"], edge))
        none = call(node, aten.logical_not.default, counted)
        several = shape[dims[0]] // length
        if several > 1:  # samples, and neighbours that belong to one token
            none = call(node, aten.view.default, none, [1, -1, 1])
            none = call(node, aten.expand.default, none, [several // step, -1, step])
            none = call(node, aten.reshape.default, none, [-1])
        none = call(node, aten.view.default, none, [-1 if d == dims[0] else 1 for d in range(len(shape))])
        kept = call(node, aten.masked_fill.Scalar, shard, none, 0)
        dtype = {"dtype": bound["dtype"]} if bound.get("dtype") is not None else {}
        along, keepdim = bound.get("dim") or [], bound.get("keepdim", False)
        every = not along
        target, rest = (aten.sum.default, ()) if every else (aten.sum.dim_IntList, (along, keepdim))
        total = call(node, target, kept, *rest, **dtype)
        if not mean:
            return total
        sizes = shape if every else [shape[dim] for dim in along]
        return call(node, aten.div.Tensor, total, math.prod(sizes))

    def _linear(self, node: fx.Node, name: str) -> fx.Node:
        """A call that reads a part, or several."""
        bound = g.bind(node)
        if name in ("aten::add", "aten::sub", "aten::rsub"):
            terms = [self._term(node, bound[which]) for which in ("self", "other")]
            return self.spread.call(
                node, node.target, *terms, **({"alpha": bound["alpha"]} if bound["alpha"] != 1 else {})
            )
        if name == "aten::stack":
            terms = [self._term(node, tensor) for tensor in bound["tensors"]]
            return self.spread.call(node, node.target, terms, bound["dim"])
        if name in ("aten::mul", "aten::div"):
            left, other = bound["self"], bound["other"]
            scaled = (left in self.parts) + (other in self.parts)
            if scaled > 1 or (name == "aten::div" and other in self.parts) or bound.get("rounding_mode") is not None:
                raise self.spread.mixed(node, NOT_LINEAR)
        elif (
            not (is_linear(node) or name in ("aten::sum", "aten::mean", "aten::_to_copy"))
            or len(node.all_input_nodes) > 1
        ):
            raise self.spread.mixed(node, NOT_LINEAR)
        if any(self.spread.dims(used) for used in node.all_input_nodes):
            raise self.spread.mixed(node, NOT_LINEAR)
        arguments, keywords = fx.map_arg((node.args, node.kwargs), self.spread.mapping.__getitem__)
        return self.spread.call(node, node.target, *arguments, **keywords)

    def _term(self, node: fx.Node, value: Any) -> Any:
        """A part, or a rank's share of what is equal."""
        if value in self.parts:
            return self.spread.mapping[value]
        if not isinstance(value, fx.Node):
            return value / self.spread.ranks
        if self.spread.dims(value):
            raise self.spread.mixed(node, NOT_LINEAR)
        return self.spread.call(node, aten.div.Tensor, self.spread.mapping[value], self.spread.ranks)


# --- What enters and leaves calls that run on a rank's own tokens, by what the ranks have in common otherwise --------
#
# Terms
#   parts    context-parallel ranks: each has its part of every gradient, whatever it belongs to, and REDUCE adds them
#            up
#   equal    tensor-parallel ranks: what others compute is the same on all of them, gradients included


def remedy(axis: str, component: str) -> str:
    """For a component that cannot be on shards."""
    if axis == "cp":
        return f"leave {component} out of `context`: every rank then computes it whole"
    return f"leave {component} out of the mesh, so that its layers are divided as those of other components are"


SELECT = torch.ops.aten.index_select.default
Write = Callable[..., fx.Node]  # call(target, *arguments)


class ShardEdge(Protocol):
    """What enters and leaves calls that run on shards over one axis."""

    axis: str

    # The parameters whose gradients are parts over the axis.
    @property
    def parts(self) -> Collection[str]: ...

    # Adds the placeholders that the calls below need.
    def start(self, graph: fx.Graph) -> None: ...

    # Returns a shard as others read it.
    def whole(self, call: Write, shard: fx.Node, plan: fx.Node, dim: int, tokens: int) -> fx.Node: ...

    # Returns a rank's shard of what others made. used: it in the old graph.
    def own(
        self, call: Write, used: fx.Node, whole: fx.Node, own: Mapping[str, fx.Node], dim: int, slots: int
    ) -> fx.Node: ...

    # Returns a value without tokens, as calls on shards read it.
    def read(self, call: Write, used: fx.Node, whole: fx.Node) -> fx.Node: ...


class PartsEdge:
    axis = "cp"
    parts: frozenset[str] = frozenset()

    def start(self, graph: fx.Graph) -> None:
        """Nothing."""

    def whole(self, call: Write, shard: fx.Node, plan: fx.Node, dim: int, tokens: int) -> fx.Node:
        return call(GATHER, shard, plan, dim, tokens)

    def own(
        self, call: Write, used: fx.Node, whole: fx.Node, own: Mapping[str, fx.Node], dim: int, slots: int
    ) -> fx.Node:
        return call(SELECT, whole, dim, own["tokens"])

    def read(self, call: Write, used: fx.Node, whole: fx.Node) -> fx.Node:
        return whole


class EqualEdge:
    """axis: tp, or one of what it is made of. local: the calls that run on shards. parts: of the parameters that lead
    to these alone.
    """

    def __init__(
        self, graph: fx.Graph, local: Collection[fx.Node], dims: Callable[[fx.Node], Any], mode: FakeTensorMode,
        axis: str,
    ) -> None:  # fmt: skip
        self.axis = axis
        self._names, self._mode = {node.name for node in graph.nodes}, mode
        self._carrying = carrying_calls(graph)
        self._inside = _inside(graph, local, self._carrying, dims)
        self.parts = {node.meta["role"][1] for node in self._inside if node.op == "placeholder"}

    def start(self, graph: fx.Graph) -> None:
        """The number of the group."""
        with self._mode:
            number = torch.empty((), dtype=torch.int64)
        name, role = group_number(self.axis)
        self.group = g.add_placeholder(graph, unique(name, self._names), number, role)

    def whole(self, call: Write, shard: fx.Node, plan: fx.Node, dim: int, tokens: int) -> fx.Node:
        return call(WHOLE, shard, plan, dim, tokens)

    def own(
        self, call: Write, used: fx.Node, whole: fx.Node, own: Mapping[str, fx.Node], dim: int, slots: int
    ) -> fx.Node:
        if used in self._carrying:
            return call(OWN, whole, own["plan"], dim, slots, True)
        return call(SELECT, whole, dim, own["tokens"])

    def read(self, call: Write, used: fx.Node, whole: fx.Node) -> fx.Node:
        return call(SHARE, whole, self.group) if used in self._carrying and used not in self._inside else whole


def _inside(
    graph: fx.Graph, local: Collection[fx.Node], carried: Collection[fx.Node], dims: Callable[[fx.Node], Any]
) -> set[fx.Node]:
    """The values without tokens that lead to calls on shards alone, made of nothing else that carries a gradient."""
    inside: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in carried and node not in local and not dims(node):
            inside |= {node} if all(user in local or user in inside for user in node.users) else set()
    while True:
        torn = {
            node for node in inside
            if any(used in carried and used not in inside for used in node.all_input_nodes)
            or any(user not in local and user not in inside for user in node.users)
        }  # fmt: skip
        if not torn:
            return inside
        inside -= torn


# --- What pass `context` does to the calls that run on shards: each again, on a rank's own tokens --------------------
#
# Terms
#   shard    the slots of one rank, as many on every rank; slots without a token hold token 0
#   place    the tokens [start, stop) of the sequence that a value has. A slice of a sequence is kept as the shard of
#            the whole, computed everywhere and looked at in its place alone; a concatenation picks by place.
#   local    a call that runs on shards; what enters it from elsewhere is dispatched, padded to the whole where its
#            place is a part; what leaves it to other calls is gathered: see csc.passes.sharding


OTHER_ORDER = "combines tokens with others, since its operands have them in another order"


class Spreading:
    """Copies a graph; local calls meet shards in place of whole sequences."""

    def __init__(
        self, program: Program, component: str, dims: Callable[[fx.Node], tuple[int, ...]], sizes: TokenSizes,
        local: Collection[fx.Node], ranks: int, edge: ShardEdge, labels: Sequence[tuple[fx.Node, int]] = (),
        last: bool = False, leaving: Collection[fx.Node] = (), sums: bool = False,
    ) -> None:  # fmt: skip
        """labels: each with the number that says none, for slots without a token. last: everything behind the local
        calls is local, and what the plan says needs no component in its name. leaving: gathered where they are made.
        sums: the loss is summed over tokens, else a mean over the labels.
        """
        self.program, self.component, self.dims, self.sizes, self.ranks = program, component, dims, sizes, ranks
        self.local, self.last, self.leaving = local, last, leaving
        self.edge, self.over = edge, f"{edge.axis}={ranks}"
        self.without = "leave cp at 1" if last else remedy(edge.axis, component)
        self.labels = {label: none for node, none in labels for label in moved(node)}
        self.sums = TokenSums(self) if sums else None
        self.views = Views(program.fake_mode)
        self.new = fx.Graph()
        self.writer = Writer(self.new, Evaluation(program.fake_mode))
        self.mapping: dict[fx.Node, Any] = {}  # of local values: shards
        self.wholes: dict[fx.Node, Any] = {}  # what other calls see
        self.places: dict[fx.Node, Place] = {}  # of local values that have tokens
        self.order = TokenOrder(dims)
        self.dispatched: dict[Any, fx.Node] = {}
        self.read: dict[fx.Node, fx.Node] = {}
        self.masks = SpreadMasks(edge.axis)

    def graph(self) -> fx.Graph:
        """The forward graph with local calls on shards. InputError for a call that mixes tokens."""
        for node in g.placeholders(self.program.graph):
            self.mapping[node] = g.add_placeholder(self.new, node.name, node.meta["val"], node.meta["role"])
        self.wholes |= self.mapping
        self._placeholders()
        for node in g.calls(self.program.graph):
            if node in self.local:
                self.reader = node
                self._local_call(node)
                self.wholes |= {node: self._gathered(node, node)} if node in self.leaving else {}
                continue
            for used in node.all_input_nodes:
                if used not in self.wholes:
                    self.wholes[used] = self._gathered(used, node)
            self.mapping[node] = g.copy_node(self.new, node, self.wholes)
        (loss,) = g.outputs(self.program.graph)
        if self.sums is not None and loss not in self.sums.parts:
            raise self.mixed(loss, "gives a loss that is no sum over the tokens")
        self.new.output((self.mapping[loss],))
        g.erase_dead(self.new)
        for placeholder in g.placeholders(self.new):
            if placeholder.meta["role"][0] in OF_RANKS and not placeholder.users:
                self.new.erase_node(placeholder)
        return self.new

    def context(self, attention: fx.Node) -> Context:
        """How the component's tokens are spread; its layers' attention is like the given one of the old graph."""
        return self.masks.context(self.program, self.component, self.ranks, self.sizes, attention, self.mixed)

    def _placeholders(self) -> None:
        """What the runtime tells a rank for each microbatch: its tokens, which slots hold one, the plan itself."""
        (loss,) = g.outputs(self.program.graph)
        with self.program.fake_mode:
            tokens = torch.empty(self.sizes.shard, dtype=torch.int64, device=loss.meta["val"].device)
            real = torch.empty_like(tokens, dtype=torch.bool)
            plan = torch.empty((), dtype=torch.int64, device=tokens.device)  # its number
        self.own = {}
        for kind, val in {"tokens": tokens, "real": real, "plan": plan}.items():
            name = kind if self.last else f"{identifier(self.component)}_{kind}"
            self.own[kind] = g.add_placeholder(self.new, name, val, ("context", f"{self.component}.{kind}"))
        self.edge.start(self.new)

    def _gathered(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """A local value as others see it: whole. It becomes so with the first of these, so that equal layers stay equal
        and shards are what travels between stages, or where it is made.
        """
        shard: fx.Node = self.mapping[node]
        if node not in self.places:
            return shard
        dims, val = self.dims(node), node.meta["val"]
        if len(dims) != 1 or self.places[node] != (0, self.sizes.tokens) or val.shape[dims[0]] != self.sizes.tokens:
            raise self.mixed(node, "leaves as a part of the sequence, or with its tokens joined to something else")
        return self.edge.whole(partial(self.call, reader), shard, self.own["plan"], dims[0], self.sizes.tokens)

    # local calls

    def _local_call(self, node: fx.Node) -> None:
        name = g.op_name(node)
        if name == "csc::attention":
            self._attention(node)
            return
        place = self._common_place(node)
        summed = self.sums.made(node, place) if self.sums is not None else None
        if summed is not None:
            self.mapping[node] = summed
            return
        if place is None:
            if name in g.SEEDED and self.dims(node):
                raise self.mixed(node, "draws a random number for every token")
            g.copy_node(self.new, node, self.mapping)
            return
        routed = self.order.follow(node)
        if routed is not None:
            self._routed(node, place, routed)
            return
        if self.order.mixed(node, place):
            raise self.mixed(node, OTHER_ORDER)
        if name == "csc::dropout":
            self._dropout(node, place)
            return
        if name in SIZED_VIEWS:
            self.mapping[node] = self._reshaped(node, self.given(node.args[0], place), place)
            self.places[node] = place
            return
        if name in NEW:
            self.mapping[node] = self.call(
                node, node.target, self.given(node.args[0], place), self._shape(node, place), *node.args[2:],
                **node.kwargs,
            )  # fmt: skip
            self.places[node] = place
            return
        if name == "aten::slice" and self._along_tokens(node):
            self.mapping[node], self.places[node] = self.mapping[node.args[0]], self._cut(node, place)  # type: ignore[index]
            return
        if name == "aten::cat" and self._along_tokens(node):
            self._joined(node)
            return
        if not (name in LABELS and not node.meta["val"].dim()):
            why = mixes(node, self.dims)
            if why is not None:
                raise self.mixed(node, why)
            self.places[node] = place
        arguments = fx.map_arg(node.args, lambda n: self.given(n, place))
        self.mapping[node] = self.call(
            node, node.target, *arguments, **fx.map_arg(node.kwargs, lambda n: self.given(n, place))
        )

    def _routed(self, node: fx.Node, place: Place, routed: SortedRows | str) -> None:
        """A call on tokens that are sorted by expert: the same on a rank's own, of which there are fewer."""
        if isinstance(routed, str) and routed != TOKENS:
            raise self.mixed(node, routed)
        if not self.order.keep(node, place, routed):
            raise self.mixed(node, OTHER_ORDER)
        self.places[node] = place
        if g.op_name(node) in SIZED_VIEWS:
            self.mapping[node] = self._reshaped(node, self.given(node.args[0], place), place)
            return
        numbers = positions(node)
        operands = {used: self.given(used, place) for used in node.all_input_nodes if used is not numbers}
        if numbers is not None:
            length = g.bind(node)["self"].meta["val"].shape[0] // (place[1] - place[0]) * self.sizes.shard
            operands[numbers] = self.call(numbers, aten.arange.default, length, **numbers.kwargs)
        arguments, keywords = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        self.mapping[node] = self.call(node, node.target, *arguments, **keywords)

    def _dropout(self, node: fx.Node, place: Place) -> None:
        """Each token's part of the mask that the whole sequence would have."""
        x, p, seed, index = node.args
        dims = self.dims(node)
        if place != (0, self.sizes.tokens) or [node.meta["val"].shape[dim] for dim in dims] != [self.sizes.tokens]:
            raise self.mixed(node, "drops out tokens joined with something else, or a part of the sequence")
        x_here, seed = self.given(x, place), self.mapping[seed]  # type: ignore[index]
        self.mapping[node] = self.call(
            node, node.target, x_here, p, seed, index, self.own["tokens"], dims[0], self.sizes.tokens
        )
        self.places[node] = place

    def _common_place(self, node: fx.Node) -> Place | None:
        """Where in the sequence the tokens of a call's operands are; None if it has none."""
        if g.op_name(node) == "aten::cat" and self._along_tokens(node):
            return (0, self.sizes.tokens)
        places = {self.places[used] for used in node.all_input_nodes if used in self.places}
        if len(places) > 1:
            raise self.mixed(node, "combines tokens of different places in the sequence")
        if places:
            return places.pop()
        entering = [used for used in node.all_input_nodes if self.dims(used)]
        return (0, self.sizes.tokens) if entering else None

    def given(self, node: Any, place: Place) -> Any:
        """An operand on shards: a local value, a dispatched one, or one without tokens as it is."""
        if node in self.local:
            return self.mapping[node]
        if self.dims(node):
            return self._dispatch(node, place)
        if node not in self.read:
            self.read[node] = self.edge.read(partial(self.call, node), node, self.mapping[node])
        return self.read[node]

    def _reshaped(self, node: fx.Node, operand: fx.Node, place: Place) -> fx.Node:
        """A reshape in the sizes of shards. It may join tokens with samples or heads, never cut between tokens."""
        shape = self._shape(node, place)
        if not self.dims(node) and self.dims(node.args[0]):  # type: ignore[arg-type]
            raise self.mixed(node, "joins tokens")
        if self.order.step(node.args[0], place) is not None and self.order.step(node, place) is None:
            raise self.mixed(node, "gives tokens the places of others")
        target = aten.expand.default if g.op_name(node) == "aten::expand" else aten.reshape.default
        if g.op_name(node) == "aten::view" and self.views.fit(operand.meta["val"], shape):
            target = aten.view.default
        return self.call(node, target, operand, shape)

    def _shape(self, node: fx.Node, place: Place) -> list[int]:
        """A value's sizes on shards."""
        length = place[1] - place[0]
        shape = list(node.meta["val"].shape)
        for dim in self.dims(node):
            if shape[dim] % length:
                raise self.mixed(node, "joins or cuts neighbouring tokens")
            shape[dim] = shape[dim] // length * self.sizes.shard
        return shape

    def _along_tokens(self, node: fx.Node) -> bool:
        dim = g.bind(node)["dim"] % node.meta["val"].dim()
        return any(dim in self.dims(used) for used in (node, *node.all_input_nodes))

    def _cut(self, node: fx.Node, place: Place) -> Place:
        bound, length = g.bind(node), place[1] - place[0]
        if node.args[0].meta["val"].shape[bound["dim"]] != length or bound["step"] != 1:  # type: ignore[union-attr]
            raise self.mixed(node, "takes some of the tokens in steps")
        start, stop, _ = slice(bound["start"], bound["end"]).indices(length)
        return place[0] + start, place[0] + max(start, stop)

    def _joined(self, node: fx.Node) -> None:
        """A concatenation of consecutive places: every token from the operand in whose place it is."""
        bound = g.bind(node)
        dim = bound["dim"] % node.meta["val"].dim()
        lengths = [tensor.meta["val"].shape[dim] for tensor in bound["tensors"]]
        starts = [
            self.places[tensor][0] - sum(lengths[:i])
            for i, tensor in enumerate(bound["tensors"])
            if tensor in self.places
        ]
        if len(set(starts)) > 1 or any(
            self.places[tensor][1] - self.places[tensor][0] != size for tensor, size in zip(bound["tensors"], lengths)
            if tensor in self.places
        ):  # fmt: skip
            raise self.mixed(node, "moves tokens to other places in the sequence")
        edge = first = starts[0] if starts else 0
        result: fx.Node | None = None
        for tensor, length in zip(bound["tensors"], lengths):
            entering = tensor not in self.places
            shard = self._dispatch(tensor, (edge, edge + length), dim) if entering else self.mapping[tensor]
            if result is None:
                result = shard
            else:
                shape = [-1 if d == dim else 1 for d in range(node.meta["val"].dim())]
                behind = self.call(node, aten.ge.Scalar, self.own["tokens"], edge)
                behind = self.call(node, aten.view.default, behind, shape)
                result = self.call(node, aten.where.self, behind, shard, result)
            edge += length
        if first < 0 or edge > self.sizes.tokens:
            raise self.mixed(node, "puts something in front of the first token or behind the last one")
        self.mapping[node], self.places[node] = result, (first, edge)

    def _attention(self, node: fx.Node) -> None:
        query, key, value, packed, *_, scale, softcap = node.args
        place = self._common_place(node)
        if place is None:
            g.copy_node(self.new, node, self.mapping)
            return
        if place != (0, self.sizes.tokens):
            raise self.mixed(node, "attends within a part of the sequence")
        if self.dims(key) and not self.dims(query):  # type: ignore[arg-type]
            raise self.mixed(node, "lets queries that are not of the sequence see its tokens")
        q, k, v = (self.given(operand, place) for operand in (query, key, value))
        if self.dims(key):  # type: ignore[arg-type]
            number = self.masks.number(packed if isinstance(packed, fx.Node) else None)
            last: tuple[Any, ...] = (self.own["plan"], number, self.sizes.tokens, scale, softcap)
            self.mapping[node] = self.call(node, ATTENTION, q, k, v, *last)
        else:
            mask = self._packed_again(packed, place) if isinstance(packed, fx.Node) else None
            self.mapping[node] = self.call(node, node.target, q, k, v, mask, *node.args[4:])
        self.places[node] = place

    def _packed_again(self, packed: fx.Node, place: Place) -> fx.Node:
        """The mask of a rank's queries over keys that are not spread (cross-attention)."""
        ranges, admits, kinds, *sizes = packed.args
        of_queries = [self._queries(table, place) if isinstance(table, fx.Node) else None for table in (ranges, admits)]
        return self.call(packed, packed.target, *of_queries, fx.map_arg(kinds, self.mapping.__getitem__), *sizes)

    def _queries(self, node: fx.Node, place: Place) -> fx.Node:
        """Ranges or admits, whose dimension of queries comes behind samples and rules."""
        return self.mapping[node] if node in self.local else self._dispatch(node, place, 2)

    # values that enter

    def _dispatch(self, node: fx.Node, place: Place, dim: int | None = None) -> fx.Node:
        """A rank's shard of a value, taken once however many read it. Labels are ignored in slots without a token, so
        that all gradients of such slots are zero.
        """
        key = (node, place)
        if key not in self.dispatched:
            self.dispatched[key] = self._taken(node, place, dim)
        return self.dispatched[key]

    def _taken(self, node: fx.Node, place: Place, dim: int | None) -> fx.Node:
        length = place[1] - place[0]
        dims = self.dims(node) if dim is None else (dim,)
        if len(dims) != 1 or node.meta["val"].shape[dims[0]] != length:
            moved = node.args[0] if node.op == "call_function" and node.args else None
            if g.op_name(node) in SIZED_VIEWS | COPIES and isinstance(moved, fx.Node):
                operand = self._dispatch(moved, place)
                if g.op_name(node) in SIZED_VIEWS:
                    return self._reshaped(node, operand, place)
                return self.call(node, node.target, operand, *node.args[1:], **node.kwargs)
            raise InputError(
                f"{g.op_name(node)} gives a value of shape {list(node.meta['val'].shape)} whose tokens csc cannot "
                f"spread over {self.over}", node.meta.get("source") or node.name, self.without,
            )  # fmt: skip
        fill = self.labels.get(node, 0)
        padded = self.wholes[node]
        if place != (0, self.sizes.tokens):
            behind = node.meta["val"].dim() - 1 - dims[0]
            pads = [0, 0] * behind + [place[0], self.sizes.tokens - place[1]]
            padded = self.call(node, aten.constant_pad_nd.default, padded, pads, fill)
        like = self.reader if node.op == "placeholder" else node  # a parameter is of the module that reads it
        taken = self.edge.own(partial(self.call, like), node, padded, self.own, dims[0], self.sizes.shard)
        if node in self.labels:
            shape = [-1 if d == dims[0] else 1 for d in range(node.meta["val"].dim())]
            real = self.call(node, aten.view.default, self.own["real"], shape)
            none = self.call(node, aten.full_like.default, taken, fill)
            taken = self.call(node, aten.where.self, real, taken, none)
            taken.meta["hint"] = "labels"
        return taken

    # nodes

    def call(self, like: fx.Node, target: Any, /, *arguments: Any, **keywords: Any) -> fx.Node:
        """A call in the place of `like`, and named after it."""
        name = "" if target is operator.getitem else target._schema.name.split("::")[1].strip("_")
        kept = like.name if target is like.target else f"{like.name}_{name}"
        return self.named(kept, like, target, *arguments, **keywords)

    def named(self, kept: str, like: fx.Node, target: Any, /, *arguments: Any, **keywords: Any) -> fx.Node:
        """As `call`, under a name of one's own."""
        try:
            node = self.writer.named(kept, like, target, *arguments, **keywords)
        except Exception as error:  # whatever the operation raises on these sizes
            raise self.mixed(like, f"cannot run on a shard of the tokens: {error}") from error
        if "hint" in like.meta:
            node.meta["hint"] = like.meta["hint"]
        return node

    def mixed(self, node: fx.Node, why: str) -> InputError:
        where = g.place(node)
        notes = "".join(f" ({note})" for note in self.program.notes if note.startswith(where.split(",")[0]))
        fault = f"{g.op_name(node)} {why}, and with {self.over} the tokens are on different ranks{notes}"
        return InputError(fault, where, f"{self.without}, or move this operation in front of the first layer")
