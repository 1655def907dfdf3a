"""Changing graphs: calls that are added with their values, parts that are taken out.

Terms
  value        what a call gives, as types: fake tensors, numbers (`meta["val"]`)
  provenance   the line and the module of the user's model that a call stands for (`meta["source"]`, `meta["module"]`)

    values_of(arguments)                        the arguments of a call with values in place of nodes
    add_call(graph, target, args, val=, like=)  one call whose value is known
    add_traced_call(graph, target, args, ..)    the same in a graph as export traced it
    Writer(graph, mode).call(like, target, ..)  calls whose values are computed
    replace_call(node, new)                     let `new` stand for a call
    extract(graph, outputs) -> fx.Graph         what makes these values, alone
    narrow_outputs(graph) -> bool               operations make no results that nothing reads
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import fx

from csc.ir import graph as g
from csc.ir.fake_evaluation import Evaluation
from csc.torch_private.exported import OpOverload
from csc.torch_private.traces import FakeTensorMode


def values_of(arguments: Any) -> Any:
    """Nested tuples, lists and dicts of arguments, each node in them replaced by its value."""
    return fx.map_arg(arguments, lambda node: node.meta["val"])


def provenance(node: fx.Node | None) -> dict[str, str]:
    """The line and the module of a node as entries of its meta; empty texts if none are known."""
    meta: Mapping[str, Any] = {} if node is None else node.meta
    return {"source": meta.get("source", ""), "module": meta.get("module", "")}


def add_call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, *,
    val: Any, like: fx.Node | None = None, name: str | None = None,
) -> fx.Node:  # fmt: skip
    """A call of this value with the provenance of `like`, where the graph's insertion point is."""
    node = graph.create_node("call_function", target, args, kwargs, name=name)
    node.meta.update(val=val, **provenance(like))
    return node


def add_traced_call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *,
    val: Any, like: fx.Node,
) -> fx.Node:  # fmt: skip
    """A call of this value beside one that export traced, with all that it noted of that one."""
    node = graph.create_node("call_function", target, args, kwargs)
    node.meta.update(like.meta, val=val)
    return node


class Writer:
    """Adds calls to a graph where its insertion point is, with their values in one mode; mode: it, or an Evaluation in
    it that several graphs share.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode | Evaluation) -> None:
        self.graph = graph
        self._value_of = mode if isinstance(mode, Evaluation) else Evaluation(mode)

    def call(self, like: fx.Node | None, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """A call with the provenance of `like`, named after its operation. Raises whatever the operation raises."""
        return self.named(None, like, target, *args, **kwargs)

    def named(self, name: str | None, like: fx.Node | None, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """As `call`, under a name of one's own."""
        val = self._value_of(target, *values_of((args, kwargs)))
        return add_call(self.graph, target, args, kwargs, val=val, like=like, name=name)

    def evaluate(self, node: fx.Node) -> None:
        """Give a call the value that it has for its arguments."""
        node.meta["val"] = self._value_of(node.target, *values_of((node.args, node.kwargs)))


def replace_call(node: fx.Node, new: Any) -> None:
    """Let all that reads a call read `new` instead, and remove it."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def extract(
    graph: fx.Graph,
    results: Sequence[fx.Node | None],
    name: Callable[[fx.Node], str] = lambda node: node.name,
    given: Collection[fx.Node] = (),
) -> fx.Graph:
    """The calls and placeholders that the results depend on, in the graph's order, and the results as its outputs
    (None stays None). `name` names the calls; placeholders keep their names. given: calls that become placeholders,
    activations under their names; what is needed for them alone is left out.
    """
    wanted, part = g.ancestors(results, until=given), fx.Graph()
    mapping: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node in wanted and node in given:
            mapping[node] = g.add_placeholder(part, node.name, node.meta["val"], ("activation", node.name))
        elif node in wanted:
            g.copy_node(part, node, mapping, name=node.name if node.op == "placeholder" else name(node))
    part.output(fx.map_arg(tuple(results), mapping.__getitem__))
    return part


def narrow_outputs(graph: fx.Graph) -> bool:
    """Operations with an output mask (backward of layer norm and convolution, a loss with its gradients) compute only
    what is still used. Returns whether anything changed.
    """
    changed = False
    for node in g.calls(graph):
        if not isinstance(node.target, OpOverload):
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        if "output_mask" not in names:
            continue
        used = {user.args[1] for user in node.users if user.target is operator.getitem}
        mask = g.bind(node)["output_mask"]
        narrowed = [bool(flag) and i in used for i, flag in enumerate(mask)]
        if narrowed != [bool(flag) for flag in mask]:
            position = names.index("output_mask")
            node.args = (*node.args[:position], narrowed, *node.args[position + 1 :])
            val = node.meta["val"]
            node.meta["val"] = type(val)(v if keep else None for v, keep in zip(val, narrowed))
            changed = True
    return changed
