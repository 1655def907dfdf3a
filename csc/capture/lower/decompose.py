"""A traced graph in which nothing writes to a tensor and every operation says whether it makes a view.

    functional(exported) -> (graph, signature)      placeholders in the order of the signature's inputs

`x.to(dtype)`, `x.reshape(shape)` and their like give a view or a copy, as their arguments are: each is taken apart into
the operations that it is here, and so are a few that are made of others which csc has rules for, but have none
themselves. All others stay as they are. Where a model writes in place, views are made again behind the write
(csc.capture.lower.writes); only what has no form there is left to torch, which traces the whole graph again, twice.
"""

from __future__ import annotations

import math
import operator
import warnings
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature

from csc.capture.lower.writes import without_writes
from csc.errors import ProgramError
from csc.ir import graph as g
from csc.torch_private.exported import OpOverload, is_taken_apart, parts_of
from csc.torch_private.traces import make_fx, python_kernels

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
            mapping[node] = _copied(graph, node, mapping)
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
    made = node.args[0] if node.target is torch.ops.aten.detach_.default else None
    return isinstance(made, fx.Node) and made.target is torch.ops.aten.lift_fresh_copy.default and len(made.users) == 1


def _copied(graph: fx.Graph, node: fx.Node, mapping: dict[fx.Node, Any]) -> fx.Node:
    copied = graph.node_copy(node, mapping.__getitem__)
    if node.target is torch.ops.aten.view.default:  # its strides as they are now that all is known about the sizes
        arguments, _ = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        with torch.no_grad(), python_kernels():
            copied.meta["val"] = node.target(*arguments)
    return copied


def _taken_apart(graph: fx.Graph, node: fx.Node, mapping: dict[fx.Node, Any]) -> Any:
    """What a node gives, by operations that are not made of others."""
    given = node.all_input_nodes
    evaluate: Any = _OTHER_OPERATIONS.get(node.target, node.target)

    def run(*values: Any) -> Any:
        by_node = dict(zip(given, values))
        arguments, keywords = fx.map_arg((node.args, node.kwargs), by_node.__getitem__)
        return evaluate(*arguments, **keywords)

    values = [one.meta["val"] for one in given]
    with torch.no_grad(), python_kernels():
        traced = make_fx(run, tracing_mode="real")(*values).graph
        if any(map(g.mutates, traced.nodes)):  # what it has made itself
            written = fx.GraphModule({}, traced)
            traced = make_fx(torch.func.functionalize(written), tracing_mode="real")(*values).graph
    inner = dict(zip(g.placeholders(traced), map(mapping.__getitem__, given)))
    for one in g.calls(traced):
        inner[one] = graph.node_copy(one, inner.__getitem__)
        inner[one].meta = {**node.meta, "val": one.meta["val"]}
    return fx.map_arg(traced.output_node().args[0], inner.__getitem__)


def _written(written: torch.Tensor, values: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
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
    torch.ops.aten.copy.default: _written,
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
