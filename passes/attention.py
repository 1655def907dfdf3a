"""Pass `attention`: every attention of the graph becomes one operator that knows its mask as data."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from csc.kernels import attention as kernels
from csc.passes.context import component_of
from torch import fx

from csc.analysis import visibility
from csc.analysis.operators.table import COPIES, RESHAPES, SDPA, STOPS
from csc.analysis.visibility import OWN_PLACE, ZERO, Clause, KeyBound, Predicate, SameGroup, Unrecognised
from csc.ir import graph as g
from csc.ir.graph import Writer, replace_call
from csc.ir.program import Options, Pass, Program, Variant

# --- Attentions that a model writes out: two products with a softmax between them ------------------------------------
#
# scores = q @ k.T * scale;  scores = tanh(scores / cap) * cap;  softmax(scores + mask, -1) @ v


TRANSPOSED = ((2, 3), (3, 2), (-1, -2), (-2, -1))


def written_out(node: fx.Node) -> dict[str, Any] | None:
    """The operands by their names in the operator's schema. key: as it was, before it was transposed; where nothing
    transposed it, `transposed_key` is there in its place.
    """
    if not _is_product(node):
        return None
    weights: Any
    value: Any
    mask: Any
    weights, value = node.args
    while g.op_name(weights) in COPIES - STOPS:
        weights = weights.args[0]
    if g.op_name(weights) not in ("aten::softmax", "aten::_softmax") or weights.args[1] not in (-1, 3):
        return None
    scores, mask = weights.args[0], None
    if g.op_name(scores) == "aten::add" and not scores.kwargs:
        left, right = scores.args
        if _number(left) is None and _number(right) is None:
            scores, mask = (left, right) if _cap(left)[1] or _scaled(left) is not None else (right, left)
    capped, cap = _cap(scores)
    scaled = _scaled(capped)
    if scaled is None:
        return None
    product, scale = scaled
    query, key = product.args
    if (
        query.meta["val"].shape[:2] != key.meta["val"].shape[:2]
        or value.meta["val"].shape[:2] != key.meta["val"].shape[:2]
    ):
        return None
    operands = {"query": query, "value": value, "attn_mask": mask, "scale": scale, "softcap": cap}
    operands |= {"dropout_p": 0.0, "is_causal": False}
    if g.op_name(key) == "aten::transpose" and tuple(key.args[1:]) in TRANSPOSED:
        return operands | {"key": key.args[0]}
    return operands | {"transposed_key": key}


def _is_product(node: Any) -> bool:
    if not isinstance(node, fx.Node) or g.op_name(node) != "aten::matmul":
        return False
    return all(isinstance(operand, fx.Node) and operand.meta["val"].dim() == 4 for operand in node.args)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _times(node: Any) -> tuple[Any, float] | None:
    """What is multiplied by a number, or divided by it."""
    name = g.op_name(node) if isinstance(node, fx.Node) else ""
    if name not in ("aten::mul", "aten::div") or len(node.args) != 2 or node.kwargs:
        return None
    number = _number(node.args[1])
    if not number:
        return None
    return node.args[0], number if name == "aten::mul" else 1 / number


def _scaled(node: Any) -> tuple[Any, float] | None:
    """A product of queries and keys, and the number that it is multiplied by."""
    if _is_product(node):
        return node, 1.0
    factors = _times(node)
    return (factors[0], factors[1]) if factors is not None and _is_product(factors[0]) else None


def _cap(node: Any) -> tuple[Any, float]:
    """What `tanh(x / cap) * cap` holds down, and cap; 0 if nothing is."""
    outer = _times(node)
    if outer is None or g.op_name(outer[0]) != "aten::tanh":
        return node, 0.0
    inner = _times(outer[0].args[0])
    if inner is None or abs(inner[1] * outer[1] - 1) > 1e-12:
        return node, 0.0
    return inner[0], outer[1]


# --- Pass `attention`: every attention of the graph becomes one operator that knows its mask as data -----------------


aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionPass(Pass):
    """Replace SDPA by csc::attention, and what computes its mask by ranges of keys and kinds of tokens.

    Ensures   each SDPA whose mask can be read off the graph is a csc::attention over its own key heads (repeated heads
              peeled off), with one packed mask for all layers that share it; dense masks are dead and gone. The others
              stay as they are, and `notes` says which and why.
    Before    %mask = and(le(%slot, %place), %padding); %o = scaled_dot_product_attention(%q, repeat(%k), .., %mask)
    After     %mask = csc.pack_mask(stack(0, %place + 1), 1, %padding, ..); %o, %lse = csc.attention(%q, %k, .., %mask)
    """

    requires: ClassVar = ("captured", "sized")
    establishes: ClassVar = ("attention",)

    def __call__(self, program: Program, options: Options) -> Program:
        graph, _ = g.copy_graph(program.graph)
        writer = Writer(graph, program.fake_mode)
        masks: Masks = {}
        notes = []
        mesh = options.mesh
        shared = {component for component, tp in mesh.own("tp").items() if tp < mesh.extent_of(component).width}
        for node in g.calls(graph):
            spread = mesh.cp > 1 or component_of(program, node) in shared
            arguments = _given(node, writer, spread)
            if arguments is None:
                continue
            try:
                _rewrite(node, arguments, writer, masks, spread)
            except Unrecognised as reason:
                where = g.place(node)
                notes.append(f"{where}: keeps PyTorch's attention, its mask holds {reason}")
        g.erase_dead(graph)
        return replace(program, graph=graph, notes=(*program.notes, *notes))


@dataclass(frozen=True)
class _Packed:
    """A mask in the graph: the packed tensor (None: everything is seen) and its form."""

    node: fx.Node | None
    rules: int = 0
    kinds: bool = False
    block_q: int = 0
    block_k: int = 0


Masks = dict[Any, _Packed]  # by what they are made of: those that are written already


def _given(node: fx.Node, writer: Writer, spread: bool) -> dict[str, Any] | None:
    """The operands of an attention; None for any other call. spread: also of one that the model writes out, since only
    csc::attention runs on shares of tokens.
    """
    if g.op_name(node) == SDPA:
        return g.bind(node) | {"softcap": 0.0}
    arguments = written_out(node) if spread else None
    if arguments is not None and "transposed_key" in arguments:
        with writer.graph.inserting_before(node):
            key = arguments.pop("transposed_key")
            arguments["key"] = writer.named(f"{node.name}_keys", node, aten.transpose.int, key, 2, 3)
    return arguments


def _rewrite(node: fx.Node, arguments: dict[str, Any], writer: Writer, masks: Masks, spread: bool) -> None:
    """spread: values of narrower heads than keys are filled up, for shares as above."""
    query, mask = arguments["query"], arguments["attn_mask"]
    if arguments["dropout_p"]:
        raise Unrecognised("dropout of attention weights")
    q = query.meta["val"]
    key, value = _heads(arguments["key"]), _heads(arguments["value"])
    if key.meta["val"].shape != value.meta["val"].shape:
        key, value = arguments["key"], arguments["value"]
    width = value.meta["val"].shape[-1]
    if spread and q.dim() == value.meta["val"].dim() == 4 and width < q.shape[3]:
        with writer.graph.inserting_before(node):
            wide = [0, q.shape[3] - width]
            value = writer.named(f"{node.name}_wide", node, aten.constant_pad_nd.default, value, wide, 0)
    k, v = key.meta["val"], value.meta["val"]
    if q.dim() != 4 or k.shape != v.shape or q.shape[3] != k.shape[3] or q.shape[0] != k.shape[0]:
        raise Unrecognised(f"heads of other forms than [B, H, T, D]: {list(q.shape)}, {list(k.shape)}, {list(v.shape)}")
    scale = arguments["scale"] if arguments["scale"] is not None else q.shape[3] ** -0.5
    with writer.graph.inserting_before(node):
        packed = _mask(node, mask, bool(arguments["is_causal"]), q, k, writer, masks, spread)
        name = g.op_name(node).split("::")[1].replace("scaled_dot_product_", "")
        pair = writer.named(
            name, node, torch.ops.csc.attention.default, query, key, value, packed.node, packed.rules, packed.kinds,
            packed.block_q, packed.block_k, scale, arguments["softcap"],
        )  # fmt: skip
        out = writer.named(f"{name}_out", node, operator.getitem, pair, 0)
        if width < v.shape[3]:
            out = writer.named(f"{name}_narrow", node, aten.slice.Tensor, out, 3, 0, width)
    replace_call(node, out)


def _heads(node: fx.Node) -> fx.Node:
    """What was repeated to give every query head a key head: `reshape(expand(unsqueeze(x)))`, `repeat_interleave`."""
    if g.op_name(node) == "aten::repeat_interleave" and node.args[2:] == (1,):
        return node.args[0]  # type: ignore[return-value]
    inner = node
    for names in (RESHAPES, {"aten::clone"}):
        if inner.op == "call_function" and g.op_name(inner) in names:
            inner = inner.args[0]  # type: ignore[assignment]
    if inner is node or inner.op != "call_function" or g.op_name(inner) != "aten::expand":
        return node
    repeated = inner.args[0]
    if not isinstance(repeated, fx.Node) or g.op_name(repeated) != "aten::unsqueeze" or repeated.args[1] != 2:
        return node
    source: fx.Node = repeated.args[0]  # type: ignore[assignment]
    batch, heads, times, *rest = inner.meta["val"].shape
    if list(node.meta["val"].shape) != [batch, heads * times, *rest] or source.meta["val"].dim() != 4:
        return node
    return source


def _mask(
    node: fx.Node,
    mask: fx.Node | None,
    causal: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    writer: Writer,
    masks: Masks,
    spread: bool,
) -> _Packed:
    """The packed mask of an SDPA, written before it or found among those that are there already. spread: also of one
    that holds only for batches in which every query sees a key, which each batch is then asked.
    """
    sizes = (int(q.shape[2]), int(k.shape[2]))
    blocks = kernels.blocks(q.device, q.shape[3], q.dtype)
    key = (mask, causal, spread, sizes, blocks)
    if key not in masks:
        if mask is not None and mask.meta["val"].dim() > 2 and mask.meta["val"].shape[-3] != 1:
            raise Unrecognised("another mask for every head")
        clauses, asked = (visibility.EVERYTHING, False) if mask is None else visibility.clauses(mask, spread)
        if causal:
            clauses = tuple(clause | {KeyBound(False, OWN_PLACE, 1)} for clause in clauses)
        if not clauses:
            raise Unrecognised("nothing that is ever seen")
        if clauses == visibility.EVERYTHING:
            masks[key] = _Packed(None)
        else:
            masks[key] = _Rules(writer, mask or node, *sizes).packed(clauses, asked, *blocks)
    return masks[key]


class _Rules:
    """Writes clauses as the tensors of a csc.kernels.mask.Mask."""

    def __init__(self, writer: Writer, like: fx.Node, queries: int, keys: int) -> None:
        self.writer = writer
        self.like = like
        self.queries = queries
        self.keys = keys
        self.device = like.meta["val"].device

    def call(self, name: str, target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
        return self.writer.named(name, self.like, target, *arguments, **keywords)

    def packed(self, clauses: Sequence[Clause], asked: bool, block_q: int, block_k: int) -> _Packed:
        """asked: whether each batch is refused in which a query sees no key."""
        kinds = self.kinds(clauses)
        rows = [self.range(clause) for clause in clauses]
        batch = max(n.meta["val"].shape[0] for n in (*rows, *([] if kinds is None else [kinds[1]])))
        rows = [self.widened(row, batch, self.queries, 2) for row in rows]
        stacked = self.call("rules", aten.stack.default, rows, 1)
        ranges = self.call("ranges", aten._to_copy.default, stacked, dtype=torch.int32)
        admits = kind_of_key = None
        if kinds is not None:
            bits, kind_of_key = kinds
            kind_of_key = self.widened(kind_of_key, batch, self.keys)
            listed = [
                self.call(
                    "admitted", aten.full.default, [batch, self.queries], bit, dtype=torch.int64, device=self.device
                )
                for bit in bits
            ]
            admits = self.call("admits", aten.stack.default, listed, 1)
        if asked:
            ranges = self.call("seeing", torch.ops.csc.seeing_ranges.default, ranges, admits, kind_of_key, self.keys)
        mask = self.call(
            "mask", torch.ops.csc.pack_mask.default, ranges, admits, kind_of_key, self.keys, block_q, block_k
        )
        mask.meta["hint"] = "visibility"
        return _Packed(mask, len(rows), kinds is not None, block_q, block_k)

    def widened(self, node: fx.Node, *sizes: int) -> fx.Node:
        if list(node.meta["val"].shape) == list(sizes):
            return node
        return self.call("for_all", aten.expand.default, node, list(sizes))

    def flat(self, node: fx.Node, tokens: int) -> fx.Node:
        """[.., tokens, 1] or [.., 1, tokens] as [B or 1, tokens]."""
        val = node.meta["val"]
        batch = max(1, val.numel() // val.shape[-1 if val.shape[-1] != 1 else -2] if val.numel() else 1)
        if val.numel() == 1:  # one answer for all tokens
            node = self.call("one", aten.view.default, node, [1, 1])
            return self.call("for_all", aten.expand.default, node, [1, tokens])
        if list(val.shape) == [batch, tokens]:
            return node
        return self.call("flat", aten.reshape.default, node, [batch, tokens])

    def range(self, clause: Clause) -> fx.Node:
        """int64 [B or 1, Tq, 2]: the keys between the clause's bounds, none for queries it does not concern."""
        ordered = sorted(clause, key=_order)
        bounds = [condition for condition in ordered if isinstance(condition, KeyBound)]
        lows = [self.value(b) for b in bounds if b.lower]
        highs = [self.value(b) for b in bounds if not b.lower]
        for group in (condition for condition in ordered if isinstance(condition, SameGroup)):
            low, high = self.group(group, ordered)
            lows.append(low)
            highs.append(high)
        low = self.extreme("lo", aten.maximum.default, lows, 0)
        high = self.extreme("hi", aten.minimum.default, highs, self.keys)
        for predicate in (c for c in ordered if isinstance(c, Predicate) and c.of == "queries"):
            concerned = self.truth(predicate, self.queries)
            zero = self.call("none", aten.zeros_like.default, high)
            high = self.call("hi", aten.where.self, concerned, high, zero)
        low, high = self._same(low, high)
        return self.call("range", aten.stack.default, [low, high], -1)

    def _same(self, low: fx.Node, high: fx.Node) -> tuple[fx.Node, fx.Node]:
        batch = max(low.meta["val"].shape[0], high.meta["val"].shape[0])
        return self.widened(low, batch, self.queries), self.widened(high, batch, self.queries)

    def extreme(self, name: str, choose: Any, values: list[fx.Node], limit: int) -> fx.Node:
        """The tightest of the bounds, within 0 and Tk."""
        if not values:
            return self.call(name, aten.full.default, [1, self.queries], limit, dtype=torch.int64, device=self.device)
        tightest = values[0]
        for value in values[1:]:
            tightest = self.call(name, choose, tightest, value)
        return self.call(name, aten.clamp.default, tightest, 0, self.keys)

    def value(self, bound: KeyBound) -> fx.Node:
        """int64 [B or 1, Tq] of a bound."""
        if bound.value == ZERO:
            shape = [1, self.queries]
            return self.call("bound", aten.full.default, shape, bound.shift, dtype=torch.int64, device=self.device)
        if bound.value == OWN_PLACE:
            place = self.call("place", aten.arange.default, self.queries, dtype=torch.int64, device=self.device)
            node = self.call("place", aten.unsqueeze.default, place, 0)
        else:
            assert isinstance(bound.value, fx.Node)
            node = self.flat(bound.value, self.queries)
            if node.meta["val"].dtype != torch.int64:
                node = self.call("bound", aten._to_copy.default, node, dtype=torch.int64)
        return self.call("bound", aten.add.Tensor, node, bound.shift) if bound.shift else node

    def truth(self, predicate: Predicate, tokens: int) -> fx.Node:
        """bool [B or 1, tokens]."""
        node = self.flat(predicate.node, tokens)
        return self.call("not", aten.logical_not.default, node) if predicate.negated else node

    def all_of(self, predicates: Sequence[Predicate], tokens: int) -> fx.Node | None:
        joined: fx.Node | None = None
        for predicate in predicates:
            truth = self.truth(predicate, tokens)
            joined = truth if joined is None else self.call("both", aten.logical_and.default, joined, truth)
        return joined

    def group(self, group: SameGroup, ordered: Sequence[Any]) -> tuple[fx.Node, fx.Node]:
        """(lo, hi) of the keys of each query's group, which has to be contiguous among the keys that count."""
        queries, keys = self.flat(group.queries, self.queries), self.flat(group.keys, self.keys)
        counts = [
            self.all_of([c for c in ordered if isinstance(c, Predicate) and c.of == side], tokens)
            for side, tokens in (("queries", self.queries), ("keys", self.keys))
        ]
        batch = max(n.meta["val"].shape[0] for n in (queries, keys, *(n for n in counts if n is not None)))
        sides = [self.widened(queries, batch, self.queries), self.widened(keys, batch, self.keys)]
        for count, tokens in zip(counts, (self.queries, self.keys)):
            if count is None:
                sides.append(
                    self.call("all", aten.full.default, [batch, tokens], True, dtype=torch.bool, device=self.device)
                )
            else:
                sides.append(self.widened(count, batch, tokens))
        runs = self.call("group", torch.ops.csc.group_ranges.default, *sides)
        low = self.call("group_lo", aten.select.int, runs, 2, 0)
        high = self.call("group_hi", aten.select.int, runs, 2, 1)
        return low, high

    def kinds(self, clauses: Sequence[Clause]) -> tuple[list[int], fx.Node] | None:
        """(what each clause admits, int64 [B or 1, Tk] what each key is); None if no clause asks what a key is."""
        wanted = [
            tuple(sorted((c for c in clause if isinstance(c, Predicate) and c.of == "keys"), key=_order))
            for clause in clauses
        ]
        if not any(wanted):
            return None
        bits = {clause: 1 << place for place, clause in enumerate(dict.fromkeys(wanted))}
        total: fx.Node | None = None
        for clause, bit in bits.items():
            truth = self.all_of(clause, self.keys)
            if truth is None:
                shape = [1, self.keys]
                kind = self.call("kind", aten.full.default, shape, bit, dtype=torch.int64, device=self.device)
            else:
                kind = self.call("kind", aten._to_copy.default, truth, dtype=torch.int64)
                kind = kind if bit == 1 else self.call("kind", aten.mul.Tensor, kind, bit)
            total = kind if total is None else self.call("kinds", aten.bitwise_or.Tensor, total, kind)
        assert total is not None
        return [bits[clause] for clause in wanted], total


def _order(condition: Any) -> tuple[str, ...]:
    """A clause is a set; the text of the program must not depend on the order in which it is walked."""
    return (type(condition).__name__, *(str(value) for value in vars(condition).values()))


# --- Pass `attention_order`: who chooses the order in which attention adds -------------------------------------------


NAMES = frozenset({"csc::attention", "csc::attention_backward"})


@dataclass(frozen=True)
class AttentionOrderPass(Pass):
    """Let the CPU's attention add in the order that takes least time, where bits may differ.

    Ensures   without `fuse` nothing changes. Else attention on CPUs is `reordered` in F, B and W: causal queries go in
              blocks that leave out the keys that none of them sees, where eager PyTorch has one call of its kernel, and
              the kernel adds the gradients of query heads that share a key head, which eager PyTorch repeats.
    Before    %dq, %dk, %dv = csc.attention_backward(%d_out, %q[2, 8, 64, 32], %k[2, 2, 64, 32], ..)
    After     %dq, %dk, %dv = csc.attention_backward(%d_out, %q[2, 8, 64, 32], %k[2, 2, 64, 32], .., reordered=True)
    """

    requires: ClassVar = ("split", "unordered")
    establishes: ClassVar = ("attention_order",)

    def __call__(self, program: Program, options: Options) -> Program:
        if not options.fuse:
            return program
        return replace(program, variants={name: _reordered(graph) for name, graph in program.variants.items()})


def _reordered(variant: Variant) -> Variant:
    return replace(
        variant, forward=_of_graph(variant.forward), backward_input=_of_graph(variant.backward_input),
        backward_weight=_of_graph(variant.backward_weight),
    )  # fmt: skip


def _of_graph(graph: fx.Graph | None) -> fx.Graph | None:
    """The same one where no order is to choose."""
    if graph is None or not any(map(_has_order, g.calls(graph))):
        return graph
    copy, _ = g.copy_graph(graph)
    for node in filter(_has_order, g.calls(copy)):
        node.kwargs = {**node.kwargs, "reordered": True}
    return copy


def _has_order(node: fx.Node) -> bool:
    """On a CPU, under a mask or over key heads that query heads share."""
    if g.op_name(node) not in NAMES:
        return False
    bound = g.bind(node)
    q, k = bound["q"].meta["val"], bound["k"].meta["val"]
    return q.device.type == "cpu" and (bound["mask"] is not None or k.shape[1] < q.shape[1])
