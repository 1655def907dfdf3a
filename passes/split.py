"""Pass `split`: F, B and W of each variant as separate graphs; B never waits for W."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from csc.analysis.costs import call_flops, count
from csc.analysis.operators.execution import OF_ALL, is_view
from csc.analysis.operators.table import FACTORIES
from csc.ir import graph as g
from csc.ir.graph import narrow_outputs
from csc.ir.program import Options, Pass, Program, Template, Variant
from csc.torch_private.exported import OpOverload


@dataclass(frozen=True)
class SplitPass(Pass):
    """Divide each pruned graph by what its nodes are for.

    Ensures   F = what the outputs need; B = what the gradients of activations need beyond F; W = the rest. What a part
              needs of an earlier one is in its `saved`: a value, or a view of all of it that the earlier one makes and
              the part has no other use for. Other views of saved values and of parameters are made again, and in B
              also what pass `recompute` did not choose for F to save. W gets that from B.
    Before    (x, w, d_out) -> out, d_x, d_w
    After     F(x, w) -> (out), (saved);  B(saved, w, d_out) -> (d_x), (saved for W);  W(saved for W) -> (d_w)
    """

    requires: ClassVar = ("pruned",)
    establishes: ClassVar = ("split", "unordered")
    breaks: ClassVar = ("pruned",)

    def __call__(self, program: Program, options: Options) -> Program:
        done = {
            name: divided(variant, program.templates[variant.template]) for name, variant in program.variants.items()
        }
        return replace(program, variants=done)


def divided(variant: Variant, template: Template) -> Variant:
    """The variant with its F, B and W."""
    found = parts_of(variant, template)
    values, dx, dw = found.values, found.dx, found.dw
    in_f, in_b, in_w = found.in_f, found.in_b, found.in_w
    parts = _Parts(variant.pruned)
    if not (any(variant.dx) or any(variant.dw)):
        forward = parts.extract(in_f, values, None, _entry_roles(variant.pruned))
        return replace(
            variant,
            forward=forward,
            flops=(count(forward).flops, 0, 0),
            matmuls=(count(forward).matmuls, 0, 0),
        )
    direct = {n for n in g.placeholders(variant.pruned) if n.meta["role"][0] in ("shared", "parameter")}
    tangents = [n for n in g.placeholders(variant.pruned) if n.meta["role"][0] == "tangent"]
    again = frozenset() if variant.saves is None else in_f - {n for n in in_f if n.name in variant.saves}
    later = parts.needs(in_b | in_w, [*dx, *dw], direct | set(tangents), in_f, again=again)
    forward = parts.extract(in_f, values, later, _entry_roles(variant.pruned))
    for_w = parts.needs(in_w, dw, direct, in_b, saved=set(later))
    backward_input = parts.extract(
        in_b, [r for r in dx if r is not None], for_w, [*_saved(later), *_direct(direct), *_tangent(tangents)], again
    )
    backward_weight = None
    if any(variant.dw):
        backward_weight = parts.extract(
            in_w, [r for r in dw if r is not None], None, [*_saved(for_w), *_direct(direct)]
        )
    counts = [count(part) for part in (forward, backward_input, backward_weight)]
    return replace(
        variant,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        flops=(counts[0].flops, counts[1].flops, counts[2].flops),
        matmuls=(counts[0].matmuls, counts[1].matmuls, counts[2].matmuls),
        rematerialised=sum(call_flops(node) for node in _marked(backward_input)),
    )


@dataclass(frozen=True)
class GraphParts:
    """What a pruned graph returns, and which of its nodes belong to F, B and W. None stands where no gradient is."""

    values: tuple[Any, ...]
    dx: tuple[Any, ...]
    dw: tuple[Any, ...]
    in_f: set[fx.Node]
    in_b: set[fx.Node]
    in_w: set[fx.Node]


def parts_of(variant: Variant, template: Template) -> GraphParts:
    """F = what the outputs need, B = what the gradients of activations need beyond F, W = the rest."""
    results = g.outputs(variant.pruned)
    outputs = len(template.outputs)
    activations = outputs + len(template.activations)
    values, dx, dw = results[:outputs], results[outputs:activations], results[activations:]
    in_f = _with_items(g.ancestors(values))
    in_b = _with_items(g.ancestors(dx) - in_f)
    return GraphParts(values, dx, dw, in_f, in_b, g.ancestors(dw) - in_f - in_b)


def _with_items(part: set[fx.Node]) -> set[fx.Node]:
    """With the items of the tuples made in the part: a later part reads items, never a tuple."""
    items = {user for node in part for user in node.users if user.target is operator.getitem}
    return part | items


Role = tuple[fx.Node, tuple[str, str]]


def _entry_roles(graph: fx.Graph) -> list[Role]:
    return [(n, n.meta["role"]) for n in g.placeholders(graph) if n.meta["role"][0] != "tangent"]


def _saved(nodes: Iterable[fx.Node]) -> list[Role]:
    return [(node, ("saved", node.name)) for node in nodes]


def _direct(nodes: set[fx.Node]) -> list[Role]:
    return [(node, node.meta["role"]) for node in sorted(nodes, key=lambda n: n.name)]


def _tangent(nodes: Iterable[fx.Node]) -> list[Role]:
    return [(node, node.meta["role"]) for node in nodes]


class _Parts:
    """Cuts one pruned graph into functions."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.order = {node: position for position, node in enumerate(graph.nodes)}

    def needs(
        self, part: set[fx.Node], results: Sequence[Any], given: set[fx.Node], made: set[fx.Node],
        saved: Set[fx.Node] = frozenset(), again: Set[fx.Node] = frozenset(),
    ) -> list[fx.Node]:  # fmt: skip
        """What the part reads from earlier ones, in graph order; without `given`, what it can cheaply make again, and
        calls that it is to make `again`. made: by the part before; saved: what that one was given.
        """
        inside = {node for node in part if node.op == "call_function"}
        needed: set[fx.Node] = set()
        stack = [used for node in inside for used in node.all_input_nodes]
        stack += [r for r in results if isinstance(r, fx.Node)]
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in seen or node in inside or node in given:
                continue
            seen.add(node)
            if node not in saved and (is_cheap(node) or (node in again and node.op == "call_function")):
                stack.extend(node.all_input_nodes)
            else:
                needed.add(node)
        read = inside | seen
        whole = set(results)
        return sorted({_as_read(node, read, made, whole) for node in needed}, key=self.order.__getitem__)

    def extract(
        self, part: set[fx.Node], results: Any, saved: list[fx.Node] | None, entry: list[Role],
        again: Set[fx.Node] = frozenset(),
    ) -> fx.Graph:  # fmt: skip
        """The function of the part: placeholders `entry` (those it uses; all saved ones), outputs (results, saved).
        Calls of `again` in it are marked in their meta, and those that are emitted in place.
        """
        graph = fx.Graph()
        mapping: dict[fx.Node, Any] = {}
        finals = [*results, *(saved or [])]
        body = self._body(part, finals, {node for node, _ in entry})
        used = {u for node in body for u in node.all_input_nodes} | set(finals)
        for node, role in entry:
            if node in used or role[0] in ("activation", "saved", "tangent"):
                mapping[node] = g.add_placeholder(graph, node.name, node.meta["val"], role)
        for node in body:
            copied = g.copy_node(graph, node, mapping)
            if node in again:
                copied.meta["rematerialised"] = True
            if _may_write_over(node):
                copied.meta["in_place"] = g.METHOD
        outputs: Any = tuple(mapping[r] for r in results)
        if saved is not None:
            outputs = (outputs, tuple(mapping[s] for s in saved))
        graph.output(outputs)
        g.erase_dead(graph)
        narrow_outputs(graph)
        return graph

    def _body(self, part: set[fx.Node], finals: list[fx.Node], entry: set[fx.Node]) -> list[fx.Node]:
        """The calls of the part and the views and constants it makes again, in order."""
        wanted: set[fx.Node] = set()
        stack = [node for node in part if node.op == "call_function"] + [f for f in finals if f not in entry]
        while stack:
            node = stack.pop()
            if node in wanted or node in entry:
                continue
            wanted.add(node)
            stack.extend(node.all_input_nodes)
        return sorted(wanted, key=self.order.__getitem__)


def _as_read(node: fx.Node, readers: set[fx.Node], made: set[fx.Node], results: Set[Any]) -> fx.Node:
    """A value of an earlier part, or the view of it that was made there, if that is all that these read of it. What
    that part was given stays as it is: a compiled function that returns views of its arguments is called the long way.
    """
    while node in made and node.op == "call_function" and node not in results:
        users = [user for user in node.users if user in readers]
        if len(users) != 1 or users[0] not in made or g.op_name(users[0]) not in OF_ALL:
            break
        node = users[0]
    return node


def _marked(graph: fx.Graph) -> Iterator[fx.Node]:
    """The calls of F that B runs again."""
    return (n for n in g.calls(graph) if n.meta.get("rematerialised") and isinstance(n.target, OpOverload))


def _may_write_over(node: fx.Node) -> bool:
    """True for the product that finishes a gradient made by F, if nothing else reads that: two of a large head's weight
    would be the most that a step holds.
    """
    if g.op_name(node) != "aten::mul":
        return False
    target, by = node.args
    if (
        not isinstance(target, fx.Node)
        or target is by
        or target.target is not operator.getitem
        or len(target.users) != 1
    ):
        return False
    before, after = target.meta["val"], node.meta["val"]
    same = before.dtype is after.dtype and before.shape == after.shape and before.stride() == after.stride()
    return same and g.op_name(target.all_input_nodes[0]) in g.HEADS


def is_cheap(node: fx.Node) -> bool:
    """True for what each part makes for itself: views of what it has, and constants. It is cheaper to make again than
    to keep between F and B: views share their base's memory, constants need none.
    """
    return node.op == "call_function" and (is_view(node) or g.op_name(node) in FACTORIES)
