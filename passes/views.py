"""Pass `views`: each view is made once, of what it is a view of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from csc.analysis.operators.execution import VIEWS, strides_as
from csc.analysis.operators.table import RESHAPES
from csc.ir import graph as g
from csc.ir.graph import add_call
from csc.ir.program import Options, Pass, Program, Template

aten = torch.ops.aten


@dataclass(frozen=True)
class ViewsPass(Pass):
    """Leave out views that change nothing, are made twice, or are made for another view alone.

    Ensures   the same outputs and layouts; no call views what a `view` gives, no two calls are the same view of a
              value, which is named after that. `_unsafe_view`, which differs from `view` for autograd alone, is one.
    Before    %a = _unsafe_view(%mm, [2, 256, 512]); %b = view(%a, [2, 256, -1, 64]); %c = view(%b, [512, 512])
    After     %b = view(%mm, [2, 256, -1, 64])    and for each reader of %c: %mm
    """

    requires: ClassVar = ("differentiated",)
    establishes: ClassVar = ("views",)

    def __call__(self, program: Program, options: Options) -> Program:
        return replace(program, templates={name: fewer(template) for name, template in program.templates.items()})


def fewer(template: Template) -> Template:
    """A template with a joint graph that does the same with fewer views."""
    assert template.joint is not None
    graph, mapping, node_of_view = fx.Graph(), dict[fx.Node, Any](), dict[str, fx.Node]()
    kept = set(template.joint.output_node().all_input_nodes)  # a result is a tensor of its own
    shared = _shared(template.joint) - kept
    for node in template.joint.nodes:
        if node.op == "placeholder":
            mapping[node] = g.add_placeholder(graph, node.name, node.meta["val"], node.meta["role"])
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], mapping.__getitem__))
        elif g.op_name(node) not in VIEWS:
            g.copy_node(graph, node, mapping)
        else:
            view = _view(node, mapping)
            same = None if node in kept else view.same or node_of_view.get(view.told)
            mapping[node] = view.written(graph, node, node in shared) if same is None else same
            node_of_view.setdefault(view.told, mapping[node])
    g.erase_dead(graph)
    return replace(template, joint=graph)


@dataclass(frozen=True)
class _View:
    """A call for the new graph. same: a value that is what it would give."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    same: fx.Node | None = None

    @property
    def told(self) -> str:
        """In words; equal ones have the same."""
        return repr((str(self.target), self.args, self.kwargs))

    def written(self, graph: fx.Graph, like: fx.Node, shared: bool) -> fx.Node:
        """The call, under the name of an old one; one that stands for several is named after what it views."""
        name = f"{self.args[0].name}_view" if shared else like.name
        return add_call(graph, self.target, self.args, self.kwargs, val=like.meta["val"], like=like, name=name)


def _view(node: fx.Node, mapping: Mapping[fx.Node, fx.Node]) -> _View:
    """What a view is in the new graph: a `view` of what its operand is one of, where that can be."""
    args, kwargs = (fx.map_arg(nested, mapping.__getitem__) for nested in (node.args, node.kwargs))
    assert isinstance(args, tuple) and isinstance(kwargs, dict)
    if g.op_name(node) not in RESHAPES:
        return _View(node.target, args, kwargs)
    val, operand = node.meta["val"], args[0]
    assert isinstance(operand, fx.Node)
    bases = [*(operand.all_input_nodes if g.op_name(operand) in RESHAPES else []), operand]
    for base in bases:
        if strides_as(base.meta["val"], val.shape) == val.stride():
            same = base if base.meta["val"].shape == val.shape else None
            return _View(aten.view.default, (base, list(val.shape)), {}, same)
    return _View(node.target, args, kwargs)


def _shared(graph: fx.Graph) -> set[fx.Node]:
    """Views that are made more than once, in the same sizes of the same value."""
    equal = defaultdict[Any, list[fx.Node]](list)
    for node in g.calls(graph):
        if g.op_name(node) in RESHAPES:
            equal[node.args[0], node.meta["val"].shape].append(node)
    return {node for nodes in equal.values() if len(nodes) > 1 for node in nodes}
