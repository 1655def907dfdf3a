"""What pass `context` does to the calls that run on shards: each again, on a rank's own tokens.

Terms
  shard    the slots of one rank, as many on every rank; slots without a token hold token 0
  place    the tokens [start, stop) of the sequence that a value has. A slice of a sequence is kept as the shard of the
           whole, computed everywhere and looked at in its place alone; a concatenation picks by place.
  local    a call that runs on shards; what enters it from elsewhere is dispatched, padded to the whole where its place
           is a part; what leaves it to other calls is gathered: see csc.passes.shard_edges

    Spreading(program, component, dims, sizes, local, ranks, edge, labels, ignored, last, leaving)
    .graph() -> the rewritten forward graph              .context(attention) -> Context, once the graph is made
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from csc.kernels.context import ATTENTION
from csc.passes.shard_edges import ShardEdge, remedy
from csc.passes.shard_views import Views, moved
from csc.passes.spread_masks import SpreadMasks, TokenSizes
from csc.passes.token_sums import TokenSums
from torch import fx

from csc.analysis.operators.table import COPIES, LABELS, NEW, SIZED_VIEWS
from csc.analysis.tokens import TOKENS, Place, SortedRows, TokenOrder, mixes, positions
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import Evaluation, Writer, identifier
from csc.ir.groups import OF_RANKS
from csc.ir.program import Context, Program

aten = torch.ops.aten
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
        self.labels = {one: none for node, none in labels for one in moved(node)}
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
        for what, val in {"tokens": tokens, "real": real, "plan": plan}.items():
            name = what if self.last else f"{identifier(self.component)}_{what}"
            self.own[what] = g.add_placeholder(self.new, name, val, ("context", f"{self.component}.{what}"))
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

    def _routed(self, node: fx.Node, place: Place, found: SortedRows | str) -> None:
        """A call on tokens that are sorted by expert: the same on a rank's own, of which there are fewer."""
        if isinstance(found, str) and found != TOKENS:
            raise self.mixed(node, found)
        if not self.order.keep(node, place, found):
            raise self.mixed(node, OTHER_ORDER)
        self.places[node] = place
        if g.op_name(node) in SIZED_VIEWS:
            self.mapping[node] = self._reshaped(node, self.given(node.args[0], place), place)
            return
        numbers = positions(node)
        given = {used: self.given(used, place) for used in node.all_input_nodes if used is not numbers}
        if numbers is not None:
            length = g.bind(node)["self"].meta["val"].shape[0] // (place[1] - place[0]) * self.sizes.shard
            given[numbers] = self.call(numbers, aten.arange.default, length, **numbers.kwargs)
        arguments, keywords = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        self.mapping[node] = self.call(node, node.target, *arguments, **keywords)

    def _dropout(self, node: fx.Node, place: Place) -> None:
        """Each token's part of the mask that the whole sequence would have."""
        x, p, seed, index = node.args
        dims = self.dims(node)
        if place != (0, self.sizes.tokens) or [node.meta["val"].shape[dim] for dim in dims] != [self.sizes.tokens]:
            raise self.mixed(node, "drops out tokens joined with something else, or a part of the sequence")
        given, seed = self.given(x, place), self.mapping[seed]  # type: ignore[index]
        self.mapping[node] = self.call(
            node, node.target, given, p, seed, index, self.own["tokens"], dims[0], self.sizes.tokens
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
        lengths = [one.meta["val"].shape[dim] for one in bound["tensors"]]
        starts = [
            self.places[one][0] - sum(lengths[:i]) for i, one in enumerate(bound["tensors"]) if one in self.places
        ]
        if len(set(starts)) > 1 or any(
            self.places[one][1] - self.places[one][0] != size for one, size in zip(bound["tensors"], lengths)
            if one in self.places
        ):  # fmt: skip
            raise self.mixed(node, "moves tokens to other places in the sequence")
        edge = first = starts[0] if starts else 0
        result: fx.Node | None = None
        for one, length in zip(bound["tensors"], lengths):
            entering = one not in self.places
            shard = self._dispatch(one, (edge, edge + length), dim) if entering else self.mapping[one]
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
        q, k, v = (self.given(one, place) for one in (query, key, value))
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
        of_queries = [self._queries(one, place) if isinstance(one, fx.Node) else None for one in (ranges, admits)]
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
        whole = self.wholes[node]
        if place != (0, self.sizes.tokens):
            behind = node.meta["val"].dim() - 1 - dims[0]
            pads = [0, 0] * behind + [place[0], self.sizes.tokens - place[1]]
            whole = self.call(node, aten.constant_pad_nd.default, whole, pads, fill)
        like = self.reader if node.op == "placeholder" else node  # a parameter is of the module that reads it
        taken = self.edge.own(partial(self.call, like), node, whole, self.own, dims[0], self.sizes.shard)
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
        what = f"{g.op_name(node)} {why}, and with {self.over} the tokens are on different ranks{notes}"
        return InputError(what, where, f"{self.without}, or move this operation in front of the first layer")
