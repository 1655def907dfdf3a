"""A Program, and what else is kept of a model, as text and tensors, and back: nothing in it is code or a pickle.

Terms
  tree       plain JSON: numbers, strings, booleans, None, and lists whose first entry says what they are
  stored     what a Program is kept as: its graphs node by node, the dataclasses around them, its tensors apart
  captured   a Program as it was captured: its sizes are symbols of the trace. It is kept without the types of what its
             operations make, which pass `shapes` works out again, and can be lowered, not shown
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from csc.ir import graph as g
from csc.ir.capture_guards import (
    CaptureGuards,
    Decision,
    Expression,
    FlagsAsked,
    QueryStep,
    SizeGuards,
    Unstorable,
    expression_from_tree,
    expression_to_tree,
)
from csc.ir.program import (
    Checkpoint,
    Combination,
    Context,
    ContextMask,
    DividedAxis,
    Divisor,
    Input,
    ModuleInfo,
    Parameter,
    Program,
    Record,
    Region,
    Template,
    Term,
)
from csc.torch_private.exported import OpOverload
from csc.torch_private.traces import FakeTensorMode

FORMAT = 4
OF_PROGRAMS = (Checkpoint, Combination, Context, ContextMask, DividedAxis, Divisor, Input, ModuleInfo, Parameter,
               Record, Region, Template, Term)  # fmt: skip
OF_GUARDS = (CaptureGuards, Decision, Expression, FlagsAsked, QueryStep, SizeGuards)
META = (*g.KEPT_META, "names")
OPAQUE = "csc::opaque"  # their calls are entries of a table of this process (csc.kernels.opaque)
LEFT_OUT = ("constants", "fake_mode", "guards", "symbolic", "joints")
NAMED = (torch.dtype, torch.layout, torch.memory_format)

Tree = Any


def to_tree(program: Program, captured: bool = False) -> tuple[Tree, dict[str, torch.Tensor]]:
    """The Program, and its constants. Before any pass of planning: later fields must be empty."""
    writer = _Writer(OF_PROGRAMS, captured=captured)
    fields = {
        field.name: writer.tree(getattr(program, field.name))
        for field in dataclasses.fields(Program)
        if field.name not in LEFT_OUT
    }
    constants = dict(program.constants)
    strides = {name: list(tensor.stride()) for name, tensor in constants.items()}
    assumed = record_to_tree(program.guards, OF_GUARDS)
    return {
        "format": FORMAT, "graphs": writer.graphs, "fields": fields, "strides": strides, "guards": assumed,
    }, constants  # fmt: skip


def from_tree(tree: Tree, tensors: Mapping[str, torch.Tensor]) -> Program:
    """The inverse of `to_tree`. ValueError, KeyError, TypeError, AttributeError or RuntimeError for a tree that is not
    one.
    """
    if tree["format"] != FORMAT:
        raise ValueError(f"a Program of format {tree['format']}")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    reader = _TreeReader(OF_PROGRAMS, [graph_from_tree(graph, mode) for graph in tree["graphs"]])
    constants = {name: _laid(tensors[name], stride) for name, stride in tree["strides"].items()}
    fields: dict[str, Any] = {name: reader.value(value) for name, value in tree["fields"].items()}
    assumed = record_from_tree(tree["guards"], OF_GUARDS)
    return Program(**fields, constants=constants, fake_mode=mode, guards=assumed)


def record_to_tree(record: Any, classes: Collection[type]) -> Tree:
    """Plain JSON of dataclasses of these classes, alone or in tuples, lists and mappings. Tensors stand there with what
    they hold. Unstorable for anything else, and for sizes that have no form in text.
    """
    writer = _Writer(classes, holds=True)
    value = writer.tree(record)
    return {"value": value, "graphs": writer.graphs}


def record_from_tree(tree: Tree, classes: Collection[type]) -> Any:
    """The inverse, of what JSON has made of it; raises what `from_tree` does."""
    mode = FakeTensorMode()
    return _TreeReader(classes, [graph_from_tree(graph, mode) for graph in tree["graphs"]]).value(tree["value"])


def _laid(tensor: torch.Tensor, stride: list[int]) -> torch.Tensor:
    """The tensor, which was stored contiguous, with these strides."""
    if list(tensor.stride()) == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


class _Writer:
    """Values as trees; graphs are listed once each. holds: tensors are written with what they hold."""

    def __init__(
        self, classes: Collection[type] = (), nodes: Mapping[fx.Node, int] | None = None, captured: bool = False,
        holds: bool = False,
    ) -> None:  # fmt: skip
        self._classes, self._captured, self._holds = classes, captured, holds
        self.graphs: list[Tree] = []
        self._index: dict[int, int] = {}
        self._nodes = nodes if nodes is not None else {}

    def tree(self, value: Any) -> Tree:
        if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
            return value
        if isinstance(value, fx.Node):
            return ["%", self._nodes[value]]
        if isinstance(value, fx.Graph):
            if id(value) not in self._index:
                self._index[id(value)] = len(self.graphs)
                self.graphs.append(graph_to_tree(value, self._captured))
            return ["graph", self._index[id(value)]]
        if isinstance(value, NAMED):
            return ["torch", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, torch.Tensor) and self._holds:
            return ["values", str(value.dtype).removeprefix("torch."), value.tolist()]
        if isinstance(value, torch.Tensor):
            sizes = [list(value.shape), list(value.stride())]
            if not all(type(size) is int for size in (*sizes[0], *sizes[1])):
                raise Unstorable(f"a tensor with sizes {sizes[0]}")
            return ["tensor", *sizes, str(value.dtype).removeprefix("torch."), str(value.device)]
        if isinstance(value, torch.Size):
            return ["size", *value]
        if type(value) in self._classes:
            fields = [field.name for field in dataclasses.fields(value) if field.init]
            return ["@", type(value).__name__, *(self.tree(getattr(value, name)) for name in fields)]
        if isinstance(value, slice):
            return ["slice", *map(self.tree, (value.start, value.stop, value.step))]
        if isinstance(value, sympy.Basic):
            return ["size of", expression_to_tree(value)]
        if isinstance(value, frozenset):
            return ["set", *sorted(value)]
        if type(value) is complex:
            return ["complex", value.real, value.imag]
        if type(value) is tuple:
            return ["(", *map(self.tree, value)]
        if isinstance(value, list):  # fx makes lists of its own
            return ["[", *map(self.tree, value)]
        if isinstance(value, Mapping):
            return ["{", *([self.tree(key), self.tree(item)] for key, item in value.items())]
        raise Unstorable(f"a {type(value).__name__}")


class _TreeReader:
    """Trees as values."""

    def __init__(
        self, classes: Collection[type] = (), graphs: Sequence[fx.Graph] = (), nodes: Sequence[fx.Node] = (),
        mode: FakeTensorMode | None = None,
    ) -> None:  # fmt: skip
        self._classes = {record.__name__: record for record in classes}
        self._graphs, self._nodes, self._mode = graphs, nodes, mode

    def value(self, tree: Tree) -> Any:
        if not isinstance(tree, list):
            return tree
        kind, *rest = tree
        if kind == "%":
            return self._nodes[rest[0]]
        if kind == "(":
            return tuple(map(self.value, rest))
        if kind == "[":
            return list(map(self.value, rest))
        if kind == "{":
            return {self.value(key): self.value(item) for key, item in rest}
        if kind == "graph":
            return self._graphs[rest[0]]
        if kind == "tensor":
            shape, stride, dtype, device = rest
            assert self._mode is not None
            with self._mode:
                return torch.empty_strided(shape, stride, dtype=_named(dtype), device=device)
        if kind == "torch":
            return _named(rest[0])
        if kind == "device":
            return torch.device(rest[0])
        if kind == "size":
            return torch.Size(rest)
        if kind == "@":
            name, *values = rest
            return self._classes[name](*map(self.value, values))
        if kind == "values":
            dtype, values = rest
            return torch.tensor(values, dtype=_named(dtype))
        if kind == "size of":
            return expression_from_tree(rest[0])
        if kind == "set":
            return frozenset(rest)
        if kind == "slice":
            return slice(*map(self.value, rest))
        if kind == "complex":
            return complex(*rest)
        raise ValueError(f"a tree of kind {kind!r}")


def _named(name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, NAMED):
        raise ValueError(f"torch.{name} is no dtype")
    return value


def bound(program: Program) -> str:
    """A reason such as `an opaque module`, or nothing."""
    opaque = any(g.op_name(node).startswith(OPAQUE) for node in g.calls(program.graph))
    return "an opaque module, which exists only in this process" if opaque else ""


def graph_to_tree(graph: fx.Graph, captured: bool = False) -> Tree:
    """The nodes in order: [op, name, target, args, kwargs, meta]. Unstorable for an operator of neither torch.ops nor
    Python's own.
    """
    meta_of = _placeholder_meta if captured else dict
    index: dict[fx.Node, int] = {}
    writer = _Writer(nodes=index)
    rows = []
    for position, node in enumerate(graph.nodes):
        known = meta_of(node.meta)
        meta = {key: writer.tree(known[key]) for key in META if key in known}
        args = [writer.tree(argument) for argument in node.args]
        kwargs = {name: writer.tree(argument) for name, argument in node.kwargs.items()}
        rows.append([node.op, node.name, _target(node), args, kwargs, meta])
        index[node] = position
    return rows


def _placeholder_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Without the type of an operation's result; a batch entry's has no sizes, but for those that are numbers."""
    kept = {key: value for key, value in meta.items() if key != "val"}
    if "role" in meta:
        val = meta["val"]
        sized = all(isinstance(size, int) for size in val.shape)
        kept["val"] = val if sized else torch.empty([0] * val.dim(), dtype=val.dtype, device=val.device)
    return kept


def graph_from_tree(tree: Tree, mode: FakeTensorMode) -> fx.Graph:
    """The inverse; what the nodes make are fake tensors of `mode`. ValueError if it would not be the same graph."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    reader = _TreeReader(nodes=nodes, mode=mode)
    for op, name, target, args, kwargs, meta in tree:
        function = _function(target) if op == "call_function" else target
        arguments = tuple(reader.value(argument) for argument in args)
        keywords = {key: reader.value(argument) for key, argument in kwargs.items()}
        node = graph.create_node(op, function, arguments, keywords, name=name)
        if node.name != name:
            raise ValueError(f"a node called {name!r}")
        node.meta.update({key: reader.value(item) for key, item in meta.items()})
        nodes.append(node)
    return graph


def _target(node: fx.Node) -> str:
    target = node.target
    if node.op in ("placeholder", "output"):
        return str(target)
    if g.op_name(node).startswith(OPAQUE):
        raise Unstorable("an opaque module, which exists only in this process")
    if node.op == "call_function" and isinstance(target, OpOverload):
        return f"{target.namespace}::{target.name().split('::')[1].split('.')[0]}::{target._overloadname}"
    name = getattr(target, "__name__", "")
    if node.op == "call_function" and getattr(operator, name, None) is target:
        return name
    raise Unstorable(f"a {node.op} of {target}")


def _function(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    if not rest:
        return getattr(operator, name)
    operation, _, overload = rest.partition("::")
    found = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
    if not isinstance(found, OpOverload):
        raise ValueError(f"no operator is called {name!r}")
    return found
