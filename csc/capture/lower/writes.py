"""Writes into tensors that a model has made itself, as operations that give new ones."""

from __future__ import annotations

import math
import operator
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature

from csc.analysis.operators.execution import is_random
from csc.errors import InputError, ProgramError
from csc.ir import graph as g
from csc.ir.graph import add_traced_call, values_of
from csc.torch_private.exported import OpOverload, is_taken_apart, parts_of
from csc.torch_private.traces import make_fx, python_kernels

# --- Where in the user's code a traced call comes from ---------------------------------------------------------------


def source_of(node: fx.Node) -> str:
    """`modeling_llama.py:182` of the innermost line in the recorded stack; "" if none was recorded."""
    frames = re.findall(r'File "([^"\n]+)", line (\d+)', node.meta.get("stack_trace") or "")
    outside = [(f, n) for f, n in frames if "/torch/nn/" not in f and "/torch/_" not in f and "/torch/utils/" not in f]
    if not outside:
        return ""
    file, line = outside[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}"


# --- Writes into tensors that a model has made itself, as operations that give new ones ------------------------------
#
# Terms
#   memory      a tensor and its views; its *root* is the tensor that was made
#   stale       a view that was made before something was written to its memory
#
# A write to a view gives a new view, and from it, view by view, a new root. What is read afterwards is read off the
# new root; views that are stale are then made again. Torch's own functionalisation does that by running the whole
# graph, twice: for a scan over tokens, which writes in each turn of a loop, that is most of a capture.


aten = torch.ops.aten


class _LeftToTorch(Exception):
    """A write that has no form here."""


def without_writes(graph: fx.Graph) -> fx.Graph | None:
    """The same graph, functional. Every operation of it says by its schema what it writes to and of what it gives a
    view. Writes to what comes from outside, through views of which no operation is the reverse, and of random numbers
    are left to torch.
    """
    builder = _Made()
    try:
        for node in graph.nodes:
            builder.add(node)
    except _LeftToTorch:
        return None
    return builder.graph


class _Made:
    """The functional graph as it grows. By nodes of the graph with writes: what stands for them now, of what they are
    views, and how often their memory had been written to when what stands for them was made.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._now: dict[fx.Node, fx.Node] = {}
        self._same: dict[fx.Node, fx.Node] = {}  # what a write returns: that to which it wrote
        self._parent: dict[fx.Node, fx.Node] = {}
        self._made_at: dict[fx.Node, int] = {}
        self._writes: dict[fx.Node, int] = {}  # by root

    def add(self, node: fx.Node) -> None:
        if g.mutates(node):
            self._write(node)
            return
        viewed = _viewed(node)
        if viewed is not None:
            self._parent[node] = self._one(viewed)
        self._now[node] = self.graph.node_copy(node, self._current)
        self._made_at[node] = self._writes.get(self._root(node), 0)

    def _one(self, node: fx.Node) -> fx.Node:
        return self._same.get(node, node)

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self._parent:
            node = self._parent[node]
        return node

    def _current(self, node: fx.Node) -> fx.Node:
        """What holds the values that a node has now."""
        node = self._one(node)
        writes = self._writes.get(self._root(node), 0)
        if self._made_at[node] != writes:
            again = self.graph.node_copy(node, self._current)
            again.meta["val"] = _value(again.target, again.args, again.kwargs)
            self._now[node], self._made_at[node] = again, writes
        return self._now[node]

    def _write(self, node: fx.Node) -> None:
        operation = _counterpart(node)
        target = self._one(node.args[0])  # type: ignore[arg-type]
        root = self._root(target)
        if root.op != "call_function" or is_random(node):
            raise _LeftToTorch
        arguments, keywords = fx.map_arg(node.args, self._current), fx.map_arg(node.kwargs, self._current)
        written = self._call(node, operation, *arguments, **keywords)
        if not _alike(written.meta["val"], self._current(target).meta["val"]):
            raise _LeftToTorch
        new = [(target, written)]
        while target in self._parent:
            parent = self._parent[target]
            written = self._put(node, target, self._current(parent), written)
            target = parent
            new.append((target, written))
        self._writes[root] = self._writes.get(root, 0) + 1
        for one, value in new:
            self._now[one], self._made_at[one] = value, self._writes[root]
        self._same[node] = self._one(node.args[0])  # type: ignore[arg-type]

    def _put(self, write: fx.Node, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
        """A tensor with `part` in place of the view of it."""
        if not isinstance(view.target, OpOverload):  # one of several views
            raise _LeftToTorch
        name, arguments = g.op_name(view), view.args[1:]
        rest, keywords = fx.map_arg(arguments, self._current), fx.map_arg(view.kwargs, self._current)
        if name in SCATTERS:
            return self._call(write, SCATTERS[name], whole, part, *rest, **keywords)
        if name in ("aten::transpose", "aten::t"):
            return self._call(write, view.target, part, *rest)
        if name == "aten::unsqueeze":
            return self._call(write, aten.squeeze.dim, part, *rest)
        if name == "aten::alias":
            return part
        size = list(whole.meta["val"].shape)
        if name == "aten::view" and all(type(one) is int for one in size) and _is_dense(whole) and _is_dense(part):
            return self._call(write, aten.view.default, part, size)
        raise _LeftToTorch

    def _call(self, like: fx.Node, operation: OpOverload, *arguments: Any, **keywords: Any) -> fx.Node:
        val = _value(operation, arguments, keywords)
        return add_traced_call(self.graph, operation, arguments, keywords, val=val, like=like)


SCATTERS: dict[str, OpOverload] = {
    "aten::select": aten.select_scatter.default,
    "aten::slice": aten.slice_scatter.default,
    "aten::diagonal": aten.diagonal_scatter.default,
}


def _viewed(node: fx.Node) -> fx.Node | None:
    """The operand of which the result is a view; of one of several results, all of them, if they are views."""
    if node.target is operator.getitem:
        several: Any = node.args[0]
        return several if _viewed(several) is not None else None
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    bound = g.bind(node)
    operands = [
        bound.get(argument.name) for argument in node.target._schema.arguments if argument.alias_info is not None
    ]
    return next((argument for argument in operands if isinstance(argument, fx.Node)), None)


def _counterpart(node: fx.Node) -> OpOverload:
    """The operation that gives what another one writes to its first argument, and to that alone."""
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    name = schema.name.removeprefix("aten::")
    packet: Any = getattr(aten, name.removesuffix("_"), None)
    if not name.endswith("_") or name.startswith("_") or not written[0] or any(written[1:]) or packet is None:
        raise _LeftToTorch
    overload = node.target._overloadname
    functional: OpOverload | None = getattr(packet, overload, None) if overload in packet.overloads() else None
    if functional is None or functional._schema.is_mutable or not isinstance(node.args[0], fx.Node):
        raise _LeftToTorch
    names = [argument.name for argument in functional._schema.arguments]
    views = any(argument.alias_info is not None for argument in functional._schema.arguments)  # x.t_() is no write
    if views or names != [argument.name for argument in schema.arguments] or len(functional._schema.returns) != 1:
        raise _LeftToTorch
    return functional


def _value(operation: Any, arguments: Any, keywords: Any) -> Any:
    """The type that an operation gives."""
    given, named = values_of((arguments, keywords))
    try:
        with torch.no_grad(), python_kernels():
            return operation(*given, **named)
    except Exception as error:
        raise _LeftToTorch from error


def _alike(left: Any, other: Any) -> bool:
    """Whether a tensor is as another one that it takes the place of."""
    return bool(left.dtype == other.dtype and left.device == other.device and tuple(left.shape) == tuple(other.shape))


def _is_dense(node: fx.Node) -> bool:
    """Whether it lies in memory row by row."""
    return bool(node.meta["val"].is_contiguous())


# --- Writes into detached tensors ------------------------------------------------------------------------------------
#
# Eager's gradient flows from what is written, although not to where it came from.
#
# Terms
#   memory    tensors that are views of each other are one memory; a graph node stands for one of them
#   detached  reached through `detach()`: in eager PyTorch a write there makes the tensor require a gradient, and the
#             memory behind it holds the written values too
#
# Where writes become functional (torch's functionalisation), `detach` counts as a view: after a write the view is made
# anew, which would cut off the gradient of what was written. A copy is no view. It is the same to the model as long as
# nobody reads the memory by its other names afterwards.


DETACH = "aten::detach"
NO_TENSORS = frozenset({"placeholder", "get_attr"})


def own_memory(graph: fx.Graph) -> None:
    """InputError, with the line, if the memory of a tensor that is detached and written to is read by another name
    afterwards. Writes to parameters, buffers and batch entries stay what they are.
    """
    views = _Views(graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    first: dict[fx.Node, fx.Node] = {}  # write of each detach
    for node in graph.nodes:
        cut = views.detached(_written(node))
        if cut is not None and views.memory(cut).op not in NO_TENSORS:
            first.setdefault(cut, node)
    for cut, write in first.items():
        for view in views.of(cut):
            after = [reader for reader in view.users if places[reader] > places[write] and _reads(reader, views)]
            if after and not views.passes(view, cut):
                raise InputError(
                    "the model writes to a detached tensor, and reads the memory that it shares by another name "
                    "afterwards",
                    source_of(after[0]) or source_of(write) or "model",
                    "write to a copy: x.detach().clone()",
                )
    for cut in first:
        _copied(graph, cut)


def _reads(node: fx.Node, views: _Views) -> bool:
    """A view alone reads nothing."""
    return node not in views.parent or g.mutates(node)


class _Views:
    """Which tensor each view is one of. parent: of views and of the results of writes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.parent: dict[fx.Node, fx.Node] = {}
        self._same: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            of = _detached_from(node, self.parent)
            if of is not None:
                self.parent[node] = of
            self._same.setdefault(self.memory(node), []).append(node)

    def memory(self, node: fx.Node) -> fx.Node:
        """The first node of its memory."""
        *_, root = self._way(node)
        return root

    def of(self, node: fx.Node) -> list[fx.Node]:
        """All nodes of its memory, in order."""
        return self._same[self.memory(node)]

    def detached(self, node: Any) -> fx.Node | None:
        """The first detach() on the way from a view back to its memory; None if there is none."""
        return next(
            (step for step in self._way(node) if step.op == "call_function" and g.op_name(step) == DETACH), None
        )

    def passes(self, node: fx.Node, cut: fx.Node) -> bool:
        """Whether a detach() is on the way back."""
        return any(step is cut for step in self._way(node))

    def _way(self, node: Any) -> Iterator[fx.Node]:
        while isinstance(node, fx.Node):
            yield node
            node = self.parent.get(node)


def _detached_from(node: fx.Node, parent: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """The operand that the result may be a view of, or is itself."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return node.args[0] if node.args[0] in parent else None  # type: ignore[return-value]
    if not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema
    if not schema.returns or schema.returns[0].alias_info is None:
        return None
    bound = g.bind(node)
    operands = [bound.get(argument.name) for argument in schema.arguments if argument.alias_info is not None]
    source = next((operand for operand in operands if isinstance(operand, fx.Node)), None)
    return None if source is None or _is_copy(node, source) else source


def _is_copy(node: fx.Node, operand: fx.Node) -> bool:
    """Of a call that gives its operand as it is where it can, such as `to`."""
    before, after = (operand.meta.get("val") for operand in (operand, node))
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype is not after.dtype or before.device != after.device


def _written(node: fx.Node) -> Any:
    """What a call writes to; None if it writes to nothing."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    for argument in node.target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            return g.bind(node).get(argument.name)
    return None


def _copied(graph: fx.Graph, cut: fx.Node) -> None:
    with graph.inserting_after(cut):
        copy = add_traced_call(graph, torch.ops.aten.clone.default, (cut,), val=cut.meta["val"], like=cut)
    cut.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


# --- A traced graph in which nothing writes to a tensor and every operation says whether it makes a view -------------
#
# `x.to(dtype)`, `x.reshape(shape)` and their like give a view or a copy, as their arguments are: each is taken apart
# into the operations that it is here, and so are a few that are made of others which csc has rules for, but have none
# themselves. All others stay as they are. Where a model writes in place, views are made again behind the write;
# only what has no form there is left to torch, which traces the whole graph again, twice.


NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


def functional(exported: torch.export.ExportedProgram) -> tuple[fx.Graph, ExportGraphSignature]:
    """The graph of an exported program whose regions are inlined. It writes to what its signature has as outputs beside
    the loss.
    """
    graph = _rewritten(exported.graph) if all(map(_is_plain, exported.graph.nodes)) else None
    if graph is not None and any(map(g.mutates, graph.nodes)):
        graph = without_writes(graph)
        graph = None if graph is None else _rewritten(graph)
    if graph is None or any(map(g.mutates, graph.nodes)):  # running statistics: only their parts say that they write
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its own pytree classes
            exported = exported.run_decompositions(_OTHER_OPERATIONS | _MADE_OF_OTHERS)
        graph = exported.graph
    return graph, exported.graph_signature


def _rewritten(exported: fx.Graph) -> fx.Graph:
    graph = fx.Graph()
    mapping: dict[fx.Node, Any] = {}
    for node in exported.nodes:
        if node.target is operator.getitem and isinstance(mapping[node.args[0]], (list, tuple)):
            mapping[node] = mapping[node.args[0]][node.args[1]]
        elif _is_of_others(node.target) and not g.mutates(node):
            mapping[node] = _taken_apart(graph, node, mapping)
        elif _is_own_constant(node):
            mapping[node] = mapping[node.args[0]]
        else:
            mapping[node] = _copied_call(graph, node, mapping)
    return graph


def _is_plain(node: fx.Node) -> bool:
    """Whether it is a value, or an operation on values, and none that runs other functions."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    known = isinstance(node.target, OpOverload) or node.target is operator.getitem
    return known or isinstance(node.meta.get("val"), NUMBERS)


def _is_of_others(operation: Any) -> bool:
    """Whether an operation is taken apart."""
    if not isinstance(operation, OpOverload):
        return False
    return operation in _OTHER_OPERATIONS or operation in _MADE_OF_OTHERS or is_taken_apart(operation)


def _is_own_constant(node: fx.Node) -> bool:
    """Whether it is `torch.tensor([1, 2])` in forward: torch detaches its copy of the constant in place."""
    lifted = node.args[0] if node.target is torch.ops.aten.detach_.default else None
    return (
        isinstance(lifted, fx.Node)
        and lifted.target is torch.ops.aten.lift_fresh_copy.default
        and len(lifted.users) == 1
    )


def _copied_call(graph: fx.Graph, node: fx.Node, mapping: dict[fx.Node, Any]) -> fx.Node:
    copied = graph.node_copy(node, mapping.__getitem__)
    if node.target is torch.ops.aten.view.default:  # its strides as they are now that all is known about the sizes
        arguments, _ = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
        with torch.no_grad(), python_kernels():
            copied.meta["val"] = node.target(*arguments)
    return copied


def _taken_apart(graph: fx.Graph, node: fx.Node, mapping: dict[fx.Node, Any]) -> Any:
    """What a node gives, by operations that are not made of others."""
    operands = node.all_input_nodes
    evaluate: Any = _OTHER_OPERATIONS.get(node.target, node.target)

    def run(*values: Any) -> Any:
        by_node = dict(zip(operands, values))
        arguments, keywords = fx.map_arg((node.args, node.kwargs), by_node.__getitem__)
        return evaluate(*arguments, **keywords)

    values = [operand.meta["val"] for operand in operands]
    with torch.no_grad(), python_kernels():
        traced = make_fx(run, tracing_mode="real")(*values).graph
        if any(map(g.mutates, traced.nodes)):  # what it has made itself
            written = fx.GraphModule({}, traced)
            traced = make_fx(torch.func.functionalize(written), tracing_mode="real")(*values).graph
    inner = dict(zip(g.placeholders(traced), map(mapping.__getitem__, operands)))
    for call in g.calls(traced):
        inner[call] = graph.node_copy(call, inner.__getitem__)
        inner[call].meta = {**node.meta, "val": call.meta["val"]}
    return fx.map_arg(traced.output_node().args[0], inner.__getitem__)


def _copied_values(written: torch.Tensor, values: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What `written` holds after `values` were copied to it, in operations that have a derivative."""
    return values.to(written.dtype).expand(written.shape).clone()


def _strided(
    written: torch.Tensor, values: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None
) -> torch.Tensor:
    """What `written` holds after `values` were written to elements of it that `as_strided` names (`fill_diagonal_`).
    The derivative of torch's own as_strided_scatter gives `written` the gradient of just those elements.
    """
    if not written.is_contiguous():
        raise ProgramError(
            "the model writes through as_strided to a tensor that does not lie in memory row by row",
            "capture",
            "write to x.contiguous(), or by an index",
        )
    numbers = torch.arange(written.numel(), device=written.device).as_strided(size, stride, storage_offset or 0)
    return written.reshape(-1).scatter(0, numbers.reshape(-1), values.reshape(-1)).view(written.shape)


# Numbers of other distributions are made of those that a program draws by place.


def _uniform(like: torch.Tensor, low: float = 0.0, high: float = 1.0, generator: Any = None) -> torch.Tensor:
    return torch.rand_like(like) * (high - low) + low


def _normal(like: torch.Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> torch.Tensor:
    return torch.randn_like(like) * std + mean


def _exponential(like: torch.Tensor, rate: float = 1.0, generator: Any = None) -> torch.Tensor:
    """Never 0, as torch's: Gumbel noise is its logarithm."""
    return (-torch.log1p(-torch.rand_like(like))).clamp(min=torch.finfo(like.dtype).eps / 2) / rate


def _cauchy(like: torch.Tensor, median: float = 0.0, sigma: float = 1.0, generator: Any = None) -> torch.Tensor:
    return torch.tan((torch.rand_like(like) - 0.5) * math.pi) * sigma + median


def _log_normal(like: torch.Tensor, mean: float = 1.0, std: float = 2.0, generator: Any = None) -> torch.Tensor:
    return _normal(like, mean, std).exp()


_OTHER_OPERATIONS: dict[Any, Any] = {
    torch.ops.aten.uniform.default: _uniform,
    torch.ops.aten.normal_functional.default: _normal,
    torch.ops.aten.exponential.default: _exponential,
    torch.ops.aten.cauchy.default: _cauchy,
    torch.ops.aten.log_normal.default: _log_normal,
    torch.ops.aten.copy.default: _copied_values,
    torch.ops.aten.concat.default: torch.cat,
    torch.ops.aten.as_strided_scatter.default: _strided,
}
# Torch's derivatives of these are those of what they call: nothing but the graph changes.
_MADE_OF_OTHERS = {
    operation: parts_of(operation)
    for packet in operator.attrgetter(
        "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell", "log_sigmoid", "tensordot", "inner", "tile",
        "hstack", "vstack", "dstack", "column_stack", "trapezoid", "nanmean", "max_pool1d_with_indices",
        "adaptive_max_pool1d", "linalg_vecdot", "logdet",
    )(torch.ops.aten)  # not its __getattr__, which makes another packet in place of one that is known already
    for operation in (getattr(packet, name) for name in packet.overloads())
    if not operation._schema.is_mutable
}  # fmt: skip
