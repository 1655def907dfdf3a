"""Pass `overlap`: B and W of a variant as one graph, BW, in which sums between ranks run beside products of W."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from csc.kernels.collectives import APART
from torch import fx

from csc.analysis.operators.execution import is_view
from csc.ir import graph as g
from csc.ir.graph import Writer
from csc.ir.groups import Group
from csc.ir.program import Options, Pass, Program, Variant


@dataclass(frozen=True)
class OverlapPass(Pass):
    """Begin each exchange of B as soon as it can, run what of W is ready, and wait for it only then.

    Ensures   a variant whose B (or W) meets other ranks while something of W is ready has `backward`: the calls of B
              and W, each once, an exchange as two where others run between them. Order apart nothing changes.
    Before    B: d_x = all_reduce(part);  W: d_w = mm(d, x)
    After     BW: ticket = start_all_reduce(part);  d_w = mm(d, x);  d_x = finish_all_reduce(part, ticket)
    """

    requires: ClassVar = ("split", "unordered")
    establishes: ClassVar = ("overlap",)
    breaks: ClassVar = ("unordered",)

    def __call__(self, program: Program, options: Options) -> Program:
        if options.mesh.sizes(Group.TENSOR) == (1,):
            return program
        done = {
            name: replace(variant, backward=_of(variant, program.fake_mode))
            for name, variant in program.variants.items()
        }
        return replace(program, variants=done)


def _of(variant: Variant, fake_mode: Any) -> fx.Graph | None:
    """None where nothing would run beside an exchange."""
    first, second = variant.backward_input, variant.backward_weight
    if (
        first is None
        or second is None
        or not any(n.target in APART for graph in (first, second) for n in g.calls(graph))
    ):
        return None
    joined = _Joined(first, second)
    order = _beside(joined.calls, joined.urgent)
    if all(isinstance(step, fx.Node) for step in order):
        return None
    return joined.written(order, fake_mode)


class _Joined:
    """The calls of B, then those of W, with what W takes of B in place of what it is given.

    calls: of both, none twice: what both make for themselves has one name, as it was one call before pass `split`.
    urgent: those that B's gradients or an exchange wait for.
    """

    def __init__(self, first: fx.Graph, second: fx.Graph) -> None:
        self.graph, mapping = g.copy_graph(first)
        self.gradients, stashed = ([mapping[node] for node in some] for some in g.outputs(first))
        self.graph.erase_node(self.graph.output_node())
        own_nodes = {node.name: node for node in self.graph.nodes}
        stashed_nodes = iter(stashed)
        into: dict[fx.Node, Any] = {}
        last = g.placeholders(self.graph)[-1] if g.placeholders(self.graph) else None
        for node in second.nodes:
            if node.op == "output":
                continue
            if node.op == "placeholder" and node.meta["role"][0] == "saved":
                into[node] = next(stashed_nodes)
            elif node.name in own_nodes:
                into[node] = own_nodes[node.name]
            elif node.op == "placeholder":
                with self.graph.inserting_after(last) if last is not None else self.graph.inserting_before():
                    last = into[node] = g.add_placeholder(self.graph, node.name, node.meta["val"], node.meta["role"])
            else:
                g.copy_node(self.graph, node, into)
        self.weights = [into[node] for node in g.outputs(second)]
        self.calls = g.calls(self.graph)
        meets = [node for node in self.calls if node.target in APART]
        self.urgent = g.ancestors([*self.gradients, *meets]) & set(self.calls)

    def written(self, order: Sequence[fx.Node | _Begun], fake_mode: Any) -> fx.Graph:
        """The graph with its calls in this order."""
        graph = fx.Graph()
        writer = Writer(graph, fake_mode)
        mapping: dict[fx.Node, Any] = {}
        for node in g.placeholders(self.graph):
            mapping[node] = g.add_placeholder(graph, node.name, node.meta["val"], node.meta["role"])
        tickets: dict[fx.Node, fx.Node] = {}
        for step in order:
            if isinstance(step, fx.Node) and step not in tickets:
                g.copy_node(graph, step, mapping)
                continue
            node = step if isinstance(step, fx.Node) else step.node
            (first, *rest), (start, finish) = fx.map_arg(node.args, lambda n: mapping[n]), APART[node.target]
            if isinstance(step, _Begun):
                tickets[node] = writer.named(f"{node.name}_started", node, start, first, *rest)
            else:
                mapping[node] = writer.named(node.name, node, finish, first, tickets[node], *rest)
                mapping[node].meta["val"] = node.meta["val"]
        graph.output(
            (
                tuple(mapping[gradient] for gradient in self.gradients),
                tuple(mapping[gradient] for gradient in self.weights),
            )
        )
        g.erase_dead(graph)
        return graph


@dataclass(frozen=True)
class _Begun:
    """Where an exchange begins that is waited for later."""

    node: fx.Node


@dataclass
class _Order:
    """An order of calls as it is made. waiting: exchanges that were begun; left: calls that nothing urgent reads."""

    left: list[fx.Node]
    found: list[fx.Node | _Begun] = field(default_factory=list)
    done: set[fx.Node] = field(default_factory=set)
    waiting: list[fx.Node] = field(default_factory=list)

    def do(self, node: fx.Node) -> None:
        self.found.append(node)
        self.done.add(node)

    def wait(self) -> None:
        """Run what is ready, then finish what was begun, in that order."""
        later = []
        for node in self.left:
            if self.ready(node):
                self.do(node)
            else:
                later.append(node)
        self.left = later
        for node in self.waiting:
            self.do(node)
        self.waiting = []

    def ready(self, node: fx.Node) -> bool:
        return all(used.op == "placeholder" or used in self.done for used in node.all_input_nodes)


def _beside(calls: Iterable[fx.Node], urgent: set[fx.Node]) -> list[fx.Node | _Begun]:
    """Urgent calls in their order, an exchange begun where it stands; the others while one is waited for, or last."""
    order = _Order([node for node in calls if node not in urgent])
    for node in calls:
        if node not in urgent:
            continue
        if not order.ready(node):
            order.wait()
        if node.target in APART:
            order.found.append(_Begun(node))
            order.waiting.append(node)
        else:
            order.do(node)
    order.wait()
    for node in order.left:
        order.do(node)
    return _joined_again(order.found)


def _joined_again(steps: Sequence[fx.Node | _Begun]) -> list[fx.Node | _Begun]:
    """Without the beginnings of exchanges beside which nothing but views is made."""
    steps_joined: list[fx.Node | _Begun] = []
    for i, step in enumerate(steps):
        if isinstance(step, _Begun):
            end = steps.index(step.node, i)
            between = [step for step in steps[i + 1 : end] if isinstance(step, fx.Node) and step.target not in APART]
            if all(is_view(step) for step in between):
                continue
        steps_joined.append(step)
    return steps_joined
