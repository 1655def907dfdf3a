"""Small operations on fx graphs that every pass needs: roles, copies, dead code, canonical form, names."""

from __future__ import annotations

import hashlib
import keyword
import operator
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from csc.torch_private.exported import OpOverload
from csc.torch_private.traces import FakeTensorMode, pytree

# --- Small operations on fx graphs that every pass needs: roles, copies, dead code, canonical form -------------------
#
# Terms
#   role       what a placeholder stands for, (kind, name): kind is input, constant, parameter, activation, shared (a
#              table made from the batch), tangent (an incoming gradient) or saved
#   canonical  a graph as nested tuples that do not depend on node names


# in_place: that the result of a call takes the place of its first operand, and how it is written then: as a METHOD, or
# the name of the argument that is written to, which is that of the overload, too.
KEPT_META = ("val", "source", "module", "role", "hint", "backward_of", "in_place", "rematerialised")
METHOD = "_"

SEEDED = frozenset({"csc::dropout", "csc::uniform", "csc::normal"})  # see csc.kernels.dropout
# A head and its loss in one call, whole and of ranks that divide the words: see csc.kernels.linear_cross_entropy.
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


# --- Types of the values in a graph: its operations run on fake tensors, each kind once ------------------------------
#
# The eighty equal layers of a model ask eighty times for the shape of the same product; PyTorch takes milliseconds
# where a look at the operands is enough.


class Evaluation:
    """Runs operations on fake tensors. Operands of the same shapes, strides, dtypes, devices and values as in an
    earlier call give the result of the earlier call, the same tensor: it stands for a type, not for a value.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._results: dict[Any, Any] = {}
        self._types: dict[int, tuple[torch.Tensor, Any]] = {}  # by id, with the tensor, so that it stays that tensor's

    def __call__(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Whatever the operation raises is raised here."""
        key = (target, self._key(args), self._key(kwargs))
        try:
            return self._results[key]
        except TypeError:  # an operand that cannot be compared
            return self._run(target, args, kwargs)
        except KeyError:
            pass
        result = self._run(target, args, kwargs)
        if not any(getattr(leaf, "constant", None) is not None for leaf in pytree.tree_leaves(result)):
            self._results[key] = result  # else it stands for a value too
        return result

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        with self._mode:
            return target(*args, **kwargs)

    def _key(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._types:
                layout = (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device)
                self._types[id(value)] = (value, layout)
            return self._types[id(value)][1]
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *map(self._key, value))
        if isinstance(value, dict):
            return tuple((name, self._key(item)) for name, item in value.items())
        return (type(value), value)  # 1, 1.0 and True are equal, and not the same operand


# --- Changing graphs: calls that are added with their values, parts that are taken out -------------------------------
#
# Terms
#   value        what a call gives, as types: fake tensors, numbers (`meta["val"]`)
#   provenance   the line and the module of the user's model that a call stands for (`meta["source"]`, `meta["module"]`)


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
    wanted, part = ancestors(results, until=given), fx.Graph()
    mapping: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node in wanted and node in given:
            mapping[node] = add_placeholder(part, node.name, node.meta["val"], ("activation", node.name))
        elif node in wanted:
            copy_node(part, node, mapping, name=node.name if node.op == "placeholder" else name(node))
    part.output(fx.map_arg(tuple(results), mapping.__getitem__))
    return part


def with_tables(shared: fx.Graph, tables: Iterable[str], given: Iterable[tuple[str, Any, tuple[str, str]]]) -> fx.Graph:
    """The graph of the tables that stages share with more of these names. given: of each the name, the value and the
    role of the placeholder that it is.
    """
    graph, mapping = copy_graph(shared)
    results, first = [mapping[node] for node in outputs(shared)], next(iter(graph.nodes))
    with graph.inserting_before(first):
        results += [add_placeholder(graph, *placeholder) for placeholder in given]
    output = graph.output_node()
    output.args = (tuple(results),)
    output.meta["names"] = (*shared.output_node().meta["names"], *tables)
    return graph


def narrow_outputs(graph: fx.Graph) -> bool:
    """Operations with an output mask (backward of layer norm and convolution, a loss with its gradients) compute only
    what is still used. Returns whether anything changed.
    """
    changed = False
    for node in calls(graph):
        if not isinstance(node.target, OpOverload):
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        if "output_mask" not in names:
            continue
        used = {user.args[1] for user in node.users if user.target is operator.getitem}
        mask = bind(node)["output_mask"]
        narrowed = [bool(flag) and i in used for i, flag in enumerate(mask)]
        if narrowed != [bool(flag) for flag in mask]:
            position = names.index("output_mask")
            node.args = (*node.args[:position], narrowed, *node.args[position + 1 :])
            val = node.meta["val"]
            node.meta["val"] = type(val)(v if keep else None for v, keep in zip(val, narrowed))
            changed = True
    return changed


# --- Names that a reader knows from the model: of values inside a region, of templates -------------------------------


# An op that is what its module is about takes the module's name alone.
MAIN_OPS = frozenset({"linear", "conv1d", "conv2d", "conv3d", "embedding", "layer_norm", "rms_norm", "group_norm"})
SHORTER = {
    "scaled_dot_product_attention": "attention", "context_attention": "attention", "cross_entropy_loss": "loss",
    "linear_cross_entropy": "head", "divided_linear_cross_entropy": "head",
    "context_gather": "whole",
}  # fmt: skip
# What emitted files call by these names themselves: their modules, arguments, local variables and functions.
RESERVED = frozenset(
    {"torch", "aten", "layers", "tables", "under", "layer", "w", "STAGE"}
    | {"batch", "received", "sent", "weights", "constants", "saved", "kept", "gradients"}
    | {"forward", "backward_input", "backward_weight", "backward", "loss_tokens"}
    | {"float", "range", "reversed", "zip"}
)


def identifier(text: str) -> str:
    """A Python identifier that resembles `text`: no keyword, none of RESERVED. Foreign text becomes code only so."""
    cleaned = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or "value"
    if cleaned[0].isdigit():
        cleaned = f"_{cleaned}"
    meant = keyword.iskeyword(cleaned) or keyword.issoftkeyword(cleaned) or cleaned in RESERVED
    return f"{cleaned}_" if meant else cleaned


def unique(wanted: str, taken: Container[str]) -> str:
    """`wanted`, or `wanted_1`, `wanted_2`, ... : the first that is not taken."""
    name, count = wanted, 0
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    return name


def snake(class_name: str) -> str:
    """`llama_decoder_layer` for LlamaDecoderLayer, `clip_encoder_layer` for CLIPEncoderLayer."""
    spaced = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", class_name)
    return identifier(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", spaced).lower())


def value_name(node: fx.Node, module: str) -> str:
    """A name for the result of a call inside the region of `module`: `q_proj`, `self_attn_view`, `act_fn`."""
    op = _said(node)
    module_name = node.meta.get("module", "")
    relative = module_name.removeprefix(module).removeprefix(".") if module_name.startswith(module) else module_name
    words = [word for word in relative.split(".") if word and not word.isdigit()]
    last = words[-1] if words else ""
    if op in MAIN_OPS and module_name:
        return identifier(last or module_name.split(".")[-1])
    if last and _leaves_module(node, module_name):
        return identifier(last)
    return identifier(f"{last}_{op}" if last else op)


def _said(node: fx.Node) -> str:
    """What a call is called; the first item of a loss with its gradients is the loss."""
    maker = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    if isinstance(maker, fx.Node) and op_name(maker) in HEADS:
        return "loss"
    return SHORTER.get(short_op(node), short_op(node))


def _leaves_module(node: fx.Node, module: str) -> bool:
    """True if the node's result is used outside the module that ran it: it is the module's output."""
    users = [user for user in node.users if user.op == "call_function"]
    return bool(users) and all(not _within(user.meta.get("module", ""), module) for user in users)


def _within(path: str, module: str) -> bool:
    return path == module or path.startswith(module + ".")


def template_name(kind: str, path: str) -> str:
    """The class in snake case, or for PyTorch's own classes (Linear, Embedding) the attribute's name: `lm_head`."""
    last = path.split(".")[-1]
    generic = hasattr(nn, kind) and not last.isdigit()
    return identifier(last) if generic else snake(kind)
