"""Small operations on fx graphs that every pass needs: roles, copies, dead code, canonical form.

Terms
  role       what a placeholder stands for, (kind, name): kind is input, constant, parameter, activation, shared (a
             table made from the batch), tangent (an incoming gradient) or saved
  canonical  a graph as nested tuples that do not depend on node names
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from csc.torch_private.exported import OpOverload

# in_place: that the result of a call takes the place of its first operand, and how it is written then: as a METHOD, or
# the name of the argument that is written to, which is that of the overload, too.
KEPT_META = ("val", "source", "module", "role", "hint", "backward_of", "in_place", "rematerialised")
METHOD = "_"

SEEDED = frozenset({"csc::dropout", "csc::uniform", "csc::normal"})  # see csc.kernels.dropout
# A head and its loss in one call, whole and of ranks that divide the words: see csc.kernels.head_sweep.
HEADS = frozenset({"csc::linear_cross_entropy", "csc::divided_linear_cross_entropy"})


def op_name(node: fx.Node) -> str:
    """`aten::mm` for a call of torch.ops.aten.mm.default; the function's own name for operators such as getitem."""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name
    return getattr(target, "__name__", str(target))


def short_op(node: fx.Node) -> str:
    """`mm` for torch.ops.aten.mm.default."""
    return op_name(node).split("::")[-1]


def mutates(node: fx.Node) -> bool:
    """True for an operation that writes to an argument."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def bind(node: fx.Node, given: tuple[Any, Any] | None = None) -> dict[str, Any]:
    """The arguments of an ATen call by schema name, defaults filled in; `given`: (args, kwargs) in place of its own."""
    assert isinstance(node.target, OpOverload)
    args, kwargs = given or (node.args, node.kwargs)
    bound: dict[str, Any] = {}
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(args) and not argument.kwarg_only:
            bound[argument.name] = args[index]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def outputs(graph: fx.Graph) -> tuple[Any, ...]:
    """What the graph returns, always as a tuple."""
    result = graph.output_node().args[0]
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def tensor_value(node: fx.Node) -> torch.Tensor | None:
    """The node's fake tensor, or None if it makes something else."""
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def is_float(node: fx.Node) -> bool:
    val = tensor_value(node)
    return val is not None and val.dtype.is_floating_point


def is_inexact(node: fx.Node) -> bool:
    """Whether gradients may flow through the node's value: a tensor of floating-point or complex numbers."""
    val = tensor_value(node)
    return val is not None and (val.dtype.is_floating_point or val.dtype.is_complex)


def reads_parameters(nodes: Iterable[Any]) -> bool:
    """Whether any of the nodes depends on a parameter."""
    return any(node.meta.get("role", ("",))[0] == "parameter" for node in ancestors(nodes))


def line(node: fx.Node) -> str:
    """Where an error about a node points: the line that made it, else its module, else "model"."""
    return node.meta.get("source") or node.meta.get("module") or "model"


def place(node: fx.Node) -> str:
    """`language_model.layers.0.self_attn, modeling_llama.py:182`, as far as both are known."""
    return ", ".join(filter(None, (node.meta.get("module"), node.meta.get("source")))) or "model"


def merge_equal(graph: fx.Graph, candidates: set[fx.Node]) -> set[fx.Node]:
    """Merge candidates that compute the same (in place; all must be free of effects). Returns those left."""
    seen: dict[str, fx.Node] = {}
    left: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node not in candidates:
            continue
        key = repr((str(node.target), node.args, node.kwargs))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node
            left.add(node)
    return left


def copy_meta(source: fx.Node, target: fx.Node) -> None:
    for key in KEPT_META:
        if key in source.meta:
            target.meta[key] = source.meta[key]


def add_placeholder(graph: fx.Graph, name: str, val: Any, role: tuple[str, str]) -> fx.Node:
    node = graph.create_node("placeholder", name, name=name)  # graph.placeholder would change it to lower case
    node.meta["val"] = val
    node.meta["role"] = role
    return node


def copy_node(graph: fx.Graph, node: fx.Node, mapping: dict[fx.Node, Any], name: str | None = None) -> fx.Node:
    """Append a copy of a call to `graph`, its arguments looked up in `mapping`, and enter it there."""
    arguments = fx.map_arg(node.args, lambda n: mapping[n])
    keywords = fx.map_arg(node.kwargs, lambda n: mapping[n])
    copied = graph.create_node(node.op, node.target, arguments, keywords, name=name or node.name, type_expr=node.type)
    copy_meta(node, copied)
    mapping[node] = copied
    return copied


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy with the same names, and the map from old nodes to new ones."""
    copied = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            copied.output(fx.map_arg(node.args[0], lambda n: mapping[n]))
        elif node.op == "placeholder":
            new = copied.create_node("placeholder", node.target, name=node.name, type_expr=node.type)
            copy_meta(node, new)
            mapping[node] = new
        else:
            copy_node(copied, node, mapping)
    return copied, mapping


def ancestors(roots: Iterable[Any], until: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Every node that the given ones depend on, themselves included; not what those of `until` depend on."""
    seen: set[fx.Node] = set()
    stack = [root for root in roots if isinstance(root, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node not in until:
                stack.extend(node.all_input_nodes)
    return seen


def erase_dead(graph: fx.Graph) -> int:
    """Remove calls whose results nobody uses (the graph is functional, so any such call is dead). Returns how many."""
    erased = 0
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
            erased += 1
    return erased


def type_text(val: Any) -> str:
    """`f32[2, 16]` for a tensor, its type's name for anything else."""
    if isinstance(val, torch.Tensor):
        return type_text_of(val.dtype, val.shape)
    if isinstance(val, (tuple, list)):
        return "(" + ", ".join(type_text(item) for item in val) + ")"
    return type(val).__name__


def type_text_of(dtype: torch.dtype, shape: Iterable[Any]) -> str:
    """`f32[2, 16]`."""
    return f"{DTYPE_TEXT.get(dtype, str(dtype).removeprefix('torch.'))}[{', '.join(map(str, shape))}]"


DTYPE_TEXT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128", torch.complex32: "c32",
}  # fmt: skip


def _value_key(val: Any) -> Any:
    if isinstance(val, torch.Tensor):
        return (type_text(val), tuple(map(str, val.stride())), str(val.device))
    if isinstance(val, (tuple, list)):
        return tuple(_value_key(item) for item in val)
    return type_text(val)


def canonical(graph: fx.Graph, role: Callable[[fx.Node], Any] = lambda node: node.meta.get("role", ("",))[0]) -> tuple:
    """The graph up to names: per node its op, its arguments by position, its type. Placeholders keep `role(node)`."""
    index: dict[fx.Node, int] = {}

    def key(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return ("%", index[argument])
        if isinstance(argument, (tuple, list)):
            return tuple(key(item) for item in argument)
        if isinstance(argument, dict):
            return tuple((name, key(item)) for name, item in sorted(argument.items()))
        return repr(argument)

    rows: list[tuple[Any, ...]] = []
    for position, node in enumerate(graph.nodes):
        index[node] = position
        if node.op == "placeholder":
            rows.append(("placeholder", role(node), _value_key(node.meta.get("val"))))
        else:
            val = _value_key(node.meta.get("val")) if node.op != "output" else None
            rows.append((str(node.target), key(node.args), key(node.kwargs), val))
    return tuple(rows)


def digest(*parts: Any) -> str:
    """A stable hash of nested tuples of plain values."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def topological_error(graph: fx.Graph) -> str | None:
    """Why the graph is not in topological order or has an unknown producer; None if it is sound."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                return f"%{node.name} uses %{used.name} before it is made"
        seen.add(node)
    return None


def subgraph_nodes(graph: fx.Graph, wanted: set[fx.Node]) -> Iterator[fx.Node]:
    """The wanted nodes in the graph's order."""
    return (node for node in graph.nodes if node in wanted)
