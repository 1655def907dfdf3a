"""An ExportedProgram as one flat functional ATen graph with roles on its placeholders."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind

from csc.analysis.gradient_flow import settle
from csc.capture.dedup import layers
from csc.capture.lower.masked_index import without_selections
from csc.capture.lower.writes import functional, own_memory, source_of
from csc.errors import CscError, InputError
from csc.ir import graph as g
from csc.ir.graph import Writer, add_call, add_traced_call, replace_call, values_of
from csc.ir.program import Checkpoint
from csc.torch_private.exported import OpOverload, is_autocast_region, is_no_grad_region
from csc.torch_private.traces import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    python_kernels,
    pytree,
    without_messages,
)

# --- Smoothed cross entropies over weighted classes, as a sum and what it is divided by ------------------------------
#
# By ATen's definition the mean of `cross_entropy(x, labels, weight=w, label_smoothing=s)` is a sum over tokens divided
# by the sum of `w[label]`. Smoothing gives a token whose class weighs 0 a loss all the same. So where all labels of a
# microbatch weigh 0 there is something to divide and nothing to divide by, though the whole batch has both: as a sum
# and a divisor in the graph they are combined for the batch, as those of a user's own quotient are.


aten = torch.ops.aten
MEAN, SUM = 1, 2  # values of ATen's `reduction` argument


def with_own_divisors(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Writes the mean of a cross entropy whose weights and smoothing need a divisor of its own as a sum and a division.
    Changes a captured graph in place.

    Before    %loss = aten.cross_entropy_loss(%x, %labels, %w, 1, -100, 0.1)
    After     %sum = aten.cross_entropy_loss(%x, %labels, %w, 2, -100, 0.1);  %loss = aten.div(%sum, %divisor)
    """
    writer = Writer(graph, mode)
    for node in g.calls(graph):
        if g.op_name(node) == "aten::cross_entropy_loss" and _has_own_divisor(node):
            with graph.inserting_before(node):
                new = _quotient(writer, node)
            replace_call(node, new)


def _has_own_divisor(node: fx.Node) -> bool:
    bound = g.bind(node)
    weighted = bound.get("weight") is not None and bound["label_smoothing"] and bound["reduction"] == MEAN
    return bool(weighted) and not bound["target"].meta["val"].dtype.is_floating_point


def _quotient(writer: Writer, node: fx.Node) -> fx.Node:
    bound = g.bind(node)
    labels, weight, ignored = bound["target"], bound["weight"], bound["ignore_index"]
    arguments = bound["self"], labels, weight, SUM, ignored, bound["label_smoothing"]
    total = writer.call(node, aten.cross_entropy_loss.default, *arguments)
    counted = writer.call(node, aten.ne.Scalar, labels, ignored)
    classes = writer.call(node, aten.mul.Tensor, labels, counted)  # 0 where there is no label
    weights = writer.call(node, aten.mul.Tensor, writer.call(node, aten.index.Tensor, weight, [classes]), counted)
    return writer.call(node, aten.div.Tensor, total, writer.call(node, aten.sum.default, weights))


# --- `with torch.autocast(...)` inside a forward: the casts that it makes, written into the graph --------------------
#
# Terms
#   region    the calls of one such block, as export keeps them: without casts, with the results that the casts lead to
#   work      what a call does, operation by operation, and the dtypes of operands and results; views and casts left out
#             (values without data let an operation take operands of dtypes that it refuses with data)
#
# There is no table of what autocast does with which operation: each call is run under it, on values without data, and
# what that casts of its operands before it computes anything is tried. If the call then does the same work without
# autocast, the graph gets these casts; if not, it is refused.


CAST = torch.ops.aten._to_copy.default
Work = list[tuple[str, tuple[torch.dtype, ...]]]
SETTLED = "autocast"  # in a node's meta: of a block within, whose casts are its own


def write_casts(body: fx.Graph, device: str, dtype: torch.dtype, cache: bool) -> None:
    """InputError, with the line, for a call whose casts cannot be written so.

    cache: a parameter that several calls read is cast once, and its gradients are added up in the low dtype, as torch
    does it.
    """
    cast_once: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(body.nodes):
        if isinstance(node.target, OpOverload) and not node.meta.get(SETTLED):
            casts = _casts(node, device, dtype)
            with body.inserting_before(node):
                new_nodes = {
                    used: _cast(body, used, to, node, cast_once if cache else {}) for used, to in casts.items()
                }
            for used, new in new_nodes.items():
                node.replace_input_with(used, new)
        node.meta[SETTLED] = True


def _casts(node: fx.Node, device: str, dtype: torch.dtype) -> Mapping[fx.Node, torch.dtype]:
    """What autocast casts of a call's operands."""
    floating = {
        used: val.dtype
        for used in node.all_input_nodes
        if isinstance(val := used.meta.get("val"), torch.Tensor) and val.is_floating_point()
    }
    if not floating:
        return {}
    work = _Work(node)
    with torch.no_grad(), python_kernels(), work, torch.autocast(device, dtype, cache_enabled=False):
        work.gave(node.target(*values_of(node.args), **values_of(node.kwargs)))  # type: ignore[operator]
    # What it casts at first may be the operation's own doing; products may cast behind views of their operands.
    for casts in ({}, work.casts, dict.fromkeys(floating, dtype), dict.fromkeys(floating, torch.float32)):
        needed = {used: to for used, to in casts.items() if floating[used] is not to}
        if _work(node, needed) == work.done:
            return needed
    raise InputError(
        f"the model runs part of itself under torch.autocast, where csc cannot tell what is cast in {g.op_name(node)}",
        source_of(node) or "model",
        "cast the tensors there by hand, or compile with precision='bf16' and leave autocast out",
    )


def _work(node: fx.Node, casts: Mapping[fx.Node, torch.dtype]) -> Work | None:
    """Of the call for operands that are cast so, without autocast; None: it refuses them."""

    def value(used: fx.Node) -> Any:
        return used.meta["val"].to(casts[used]) if used in casts else used.meta["val"]

    watching = _Work(node)
    try:
        with torch.no_grad(), python_kernels(), without_messages():
            args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
            with watching:
                watching.gave(node.target(*args, **kwargs))  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError):
        return None
    return watching.done


class _Work(TorchDispatchMode):
    """done: the work of one call. casts: those of its operands that it begins with."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self._given = {id(used.meta["val"]): used for used in node.all_input_nodes}
        self.casts: dict[fx.Node, torch.dtype] = {}
        self.done: Work = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is CAST:
            if not self.done and id(args[0]) in self._given and kwargs.get("dtype") is not None:
                self.casts[self._given[id(args[0])]] = kwargs["dtype"]
        elif func.namespace != "prim" and not any(value.alias_info for value in func._schema.returns):
            self._add(str(func), (args, kwargs, result))
        return result

    def gave(self, result: Any) -> None:
        """What the call returns belongs to its work."""
        self._add("return", result)

    def _add(self, operation: str, values: Any) -> None:
        dtypes = [tensor.dtype for tensor in pytree.tree_leaves(values) if isinstance(tensor, torch.Tensor)]
        self.done.append((operation, tuple(dtypes)))


def _cast(
    body: fx.Graph,
    used: fx.Node,
    dtype: torch.dtype,
    reader: fx.Node,
    known: dict[tuple[fx.Node, torch.dtype], fx.Node],
) -> fx.Node:
    """The operand in a dtype, where the graph's insertion point is."""
    kept = used.op == "placeholder" and used.meta["val"].requires_grad  # parameters: what torch's cache keeps
    if kept and (used, dtype) in known:
        return known[used, dtype]
    cast = add_traced_call(body, torch.ops.aten.to.dtype, (used, dtype), val=used.meta["val"].to(dtype), like=reader)
    cast.meta[SETTLED] = True
    if kept:
        known[used, dtype] = cast
    return cast


# --- An ExportedProgram as one flat functional ATen graph with roles on its placeholders -----------------------------
#
# Order matters: no-grad regions are inlined as plain ops followed by `aten.detach` *before* decomposition, because
# decomposition drops them and frozen layers would start to receive gradients.


WRAPPER_PREFIX, BATCH = "model.", "batch_"  # of names that export gives to what is of the model, and of the batch
ASSERTIONS = frozenset(
    {
        "aten::_assert_scalar",
        "aten::_assert_tensor_metadata",
        "aten::_assert_async",
        "aten::sym_constrain_range",
        "aten::sym_constrain_range_for_size",
    }
)


def inline_regions(module: fx.GraphModule) -> None:
    """Replace no_grad and autocast blocks (higher-order ops) by their bodies; a no_grad body's results are detached."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if is_no_grad_region(node.target):
            enable_grad, body, *operands = node.args
            _inline(module, node, body, operands, detach=not enable_grad)
        elif is_autocast_region(node.target):
            device, dtype, enabled, cache, body, *operands = node.args
            inner = getattr(module, body.target)
            inline_regions(inner)
            if enabled:
                write_casts(inner.graph, device, dtype, cache)
            else:
                for one in inner.graph.nodes:
                    one.meta[SETTLED] = True
            _inline(module, node, body, operands, detach=False)
    module.recompile()


def _inline(module: fx.GraphModule, node: fx.Node, body: Any, operands: list[Any], detach: bool) -> None:
    inner = getattr(module, body.target)
    inline_regions(inner)
    mapping: dict[fx.Node, Any] = dict(zip(g.placeholders(inner.graph), operands))
    with module.graph.inserting_before(node):
        for source in inner.graph.nodes:
            if source.op in ("placeholder", "output"):
                continue
            if source.op == "get_attr":
                name = f"inlined_{len(list(module.named_children()))}_{source.target}"
                setattr(module, name, getattr(inner, source.target))
                mapping[source] = module.graph.get_attr(name)
                continue
            copied = module.graph.node_copy(source, lambda n: mapping[n])
            mapping[source] = copied
        results = [mapping[r] if isinstance(r, fx.Node) else r for r in g.outputs(inner.graph)]
        if detach:
            for position, result in enumerate(results):
                output = _unchanged(g.outputs(inner.graph)[position])
                if isinstance(output, fx.Node) and output.op == "placeholder":
                    results[position] = mapping[output]
                    continue
                val = result.meta.get("val") if isinstance(result, fx.Node) else None
                if isinstance(val, torch.Tensor) and (val.dtype.is_floating_point or val.dtype.is_complex):
                    detached = add_call(module.graph, torch.ops.aten.detach.default, (result,), val=val, name="detach")
                    detached.meta.update(result.meta)
                    results[position] = detached
    for user in list(node.users):
        replace_call(user, results[int(user.args[1])])  # type: ignore[arg-type]
    module.graph.erase_node(node)
    if not body.users:
        module.graph.erase_node(body)


def _unchanged(node: Any) -> Any:
    """The value that a chain of calls hands on as it is: eager returns the very tensor, whose gradient no_grad does not
    take, and the trace goes on with the last call's node in its place.
    """
    while isinstance(node, fx.Node) and isinstance(node.target, OpOverload) and node.args:
        operand, bound = node.args[0], g.bind(node)
        before, after = (value.meta.get("val") if isinstance(value, fx.Node) else None for value in (operand, node))
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            break
        same = (before.dtype, before.device) == (after.dtype, after.device)
        name = g.op_name(node)
        layout = bound.get("memory_format")
        if name in ("aten::to", "aten::type_as"):
            kept = same and not bound.get("copy") and layout in (None, torch.preserve_format)
        elif name == "aten::contiguous":
            wanted = layout if isinstance(layout, torch.memory_format) else torch.contiguous_format
            kept = before.is_contiguous(memory_format=wanted)
        elif name in ("aten::dropout", "aten::feature_dropout"):
            kept = bound["p"] == 0 or not bound["train"]
        else:
            kept = name in ("aten::positive", "aten::resolve_conj", "aten::resolve_neg")
        if not kept:
            break
        node = operand
    return node


@dataclass(frozen=True)
class Flattened:
    """graph: functional ATen, placeholders with roles, `loss` its one output; constants by name."""

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    checkpoints: tuple[Checkpoint, ...]


def flatten(exported: torch.export.ExportedProgram, model: nn.Module) -> Flattened:
    """The model as one graph.

    Parameters come under the canonical names of `model.named_parameters()`; the several names of a tied one meet in
    one placeholder. Raises CscError if the model writes to a buffer or to its batch.
    """
    inline_regions(exported.graph_module)
    own_memory(exported.graph_module.graph)
    graph, signature = functional(exported)
    for written, where in _writes(graph, signature):
        if _plain(written) in dict(model.named_parameters(remove_duplicate=False)):
            raise CscError(
                "the model changes a parameter while it runs",
                _plain(written),
                "use the changed value where it is needed (weight.clamp(...), not weight.data.clamp_(...)), or change "
                "it after the optimizer's step",
            )
        if not written.startswith(WRAPPER_PREFIX):
            entry = written.removeprefix(BATCH)
            raise CscError(
                f"the model's forward writes to {entry!r}, an entry of its batch, which belongs to the training loop",
                "model",
                "write to a clone of it, or use the new value where it is needed (x = x * 0.5, not x.mul_(0.5))",
            )
        raise CscError(
            f"the model's forward writes to {_plain(written)!r}",
            where or "model",
            "put that module in eval mode (running statistics stay as they are), or give it to csc.opaque (with one "
            "microbatch and dp=1 it then does as in eager PyTorch), or move the update out of forward",
        )
    flat = _Flat(exported, graph, signature, model)
    for node in graph.nodes:
        flat.add(node)
    _apart_from_parameters(flat.constants, model)
    _each_size_once(flat.graph)
    checkpoints = settle(flat.graph)
    without_selections(flat.graph, flat.mode)
    with_own_divisors(flat.graph, flat.mode)
    names = [("parameter", name) for name, _ in model.named_parameters()]
    names += [("constant", name) for name, _ in model.named_buffers()]
    return Flattened(_ordered(flat.graph, names), flat.constants, checkpoints)


def _apart_from_parameters(constants: dict[str, torch.Tensor], model: nn.Module) -> None:
    """CscError if a tensor that is no parameter shares memory with one that trains: it would change with every step."""
    trained = {
        p.untyped_storage().data_ptr(): name
        for name, p in model.named_parameters()
        if p.requires_grad and _has_memory(p)
    }
    for name, tensor in constants.items():
        if _has_memory(tensor) and tensor.untyped_storage().data_ptr() in trained:
            owner = trained[tensor.untyped_storage().data_ptr()]
            raise CscError(
                f"{name!r} shares its memory with the parameter {owner!r}, which the optimizer changes",
                "model",
                "read the parameter itself in forward, with detach() where it must not train; or clone it",
            )


def _has_memory(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta and tensor.numel() > 0


def _each_size_once(graph: fx.Graph) -> None:
    """Let the first node that gives a symbolic size give it to all."""
    first: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and first.setdefault(value.node.expr, node) is not node:
            node.replace_all_uses_with(first[value.node.expr])
    g.erase_dead(graph)


def _writes(graph: fx.Graph, signature: ExportGraphSignature) -> Iterator[tuple[str, str]]:
    """What the graph writes to, and the line; one operation says neither that it writes nor to what."""
    for output, value in zip(signature.output_specs, graph.output_node().args[0], strict=True):  # type: ignore[arg-type]
        if output.kind is not OutputKind.USER_OUTPUT and output.kind is not OutputKind.LOSS_OUTPUT:
            yield str(output.target), source_of(value) if isinstance(value, fx.Node) else ""
    inputs = dict(zip(g.placeholders(graph), signature.input_specs, strict=True))
    for node in graph.nodes:
        if g.op_name(node) == "aten::instance_norm":
            statistics, of_input = node.args[3], node.args[5]
            if statistics in inputs and of_input:
                yield str(inputs[statistics].target), source_of(node)


class _Flat:
    """The flat graph as it grows, node by node of the functional one."""

    def __init__(
        self,
        exported: torch.export.ExportedProgram,
        functional: fx.Graph,
        signature: ExportGraphSignature,
        model: nn.Module,
    ) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.mode: Any = None
        self._mapping: dict[fx.Node, Any] = {}
        self._parameters: dict[str, fx.Node] = {}
        self._own: dict[str, fx.Node] = {}  # parameters and buffers by any name of theirs
        self._canonical = {id(p): name for name, p in model.named_parameters()}
        self._by_any_name = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = dict(model.named_buffers(remove_duplicate=False))
        self._lifted = exported.constants
        self._specs = dict(zip(g.placeholders(functional), signature.input_specs, strict=True))
        assert exported.example_inputs is not None
        self._entries = iter(exported.example_inputs[0][0])  # the batch's keys, in the order of the placeholders
        batch = {node for node, spec in self._specs.items() if spec.kind is InputKind.USER_INPUT}
        self._bodies = layers.bodies(functional, module_of, batch)
        self._whole = False  # all of the model's parameters and buffers have their placeholders

    def add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._mapping[node] = self._placeholder(node)
            return
        if not self._whole:
            self._whole = True
            self._hidden(next(iter(self._mapping)).meta["val"].fake_mode)
        if node.op == "output":
            loss = node.args[0][0]  # type: ignore[index]
            if not isinstance(loss, fx.Node):
                raise InputError(
                    "the loss does not depend on the batch", "model output", "return the loss of the batch"
                )
            self.mode = loss.meta["val"].fake_mode
            self.graph.output((self._mapping[loss],))
        elif node.op != "call_function":
            raise CscError(
                f"the traced graph holds a {node.op} ({node.target})", source_of(node) or "model",
                "control flow operators inside a model are not supported; write the block with tensor operations",
            )  # fmt: skip
        elif layers.is_again(node):
            body = self._bodies[node.args[0]]  # type: ignore[index]
            self._mapping[node] = layers.copied(node, body, self._mapping, self._of_the_other, self._call)
        elif node.target is operator.getitem and isinstance(self._mapping[node.args[0]], list):  # type: ignore[index]
            self._mapping[node] = self._mapping[node.args[0]][node.args[1]]  # type: ignore[index]
        elif g.op_name(node) not in ASSERTIONS and not layers.is_first(node):
            self._mapping[node] = self._call(node, self._mapping.__getitem__)

    def _call(self, node: fx.Node, lookup: Callable[[fx.Node], Any]) -> fx.Node:
        arguments, keywords = fx.map_arg(node.args, lookup), fx.map_arg(node.kwargs, lookup)
        copied = add_call(self.graph, node.target, arguments, keywords, val=node.meta.get("val"), name=node.name)
        copied.meta.update(source=source_of(node), module=module_of(node))
        _with_dense_gradients(copied)
        return copied

    def _placeholder(self, node: fx.Node) -> fx.Node:
        spec = self._specs[node]
        val = node.meta["val"]
        target = next(self._entries) if spec.kind is InputKind.USER_INPUT else _plain(str(spec.target))
        if spec.kind is InputKind.PARAMETER:
            return self._parameter(target, val)
        if spec.kind is InputKind.USER_INPUT:
            return g.add_placeholder(self.graph, _identifier(target), val, ("input", target))
        tensor = self._buffers[target] if spec.kind is InputKind.BUFFER else self._lifted[str(spec.target)]
        self.constants[target] = tensor.detach()
        placed = g.add_placeholder(self.graph, _identifier(target), val, ("constant", target))
        if spec.kind is InputKind.BUFFER:
            self._own[target] = placed
        return placed

    def _parameter(self, target: str, val: Any) -> fx.Node:
        name = self._canonical[id(self._by_any_name[target])]
        if name not in self._parameters:
            self._parameters[name] = g.add_placeholder(self.graph, _identifier(name), val, ("parameter", name))
        self._own[target] = self._own[name] = self._parameters[name]
        return self._parameters[name]

    def _hidden(self, mode: FakeTensorMode) -> None:
        """Placeholders for what was hidden from the trace."""
        for name, parameter in self._by_any_name.items():
            if name not in self._own:
                self._parameter(name, _like(parameter, mode))
        for name, buffer in self._buffers.items():
            if name not in self._own:
                self.constants[name] = buffer.detach()
                self._own[name] = g.add_placeholder(
                    self.graph, _identifier(name), _like(buffer, mode), ("constant", name)
                )

    def _of_the_other(self, node: fx.Node, path: str, other: str) -> Any:
        """What a placeholder of the layer at `path` is for the `other` one; any other placeholder is the same."""
        spec = self._specs[node]
        target = _plain(str(spec.target))
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER) or not target.startswith(f"{path}."):
            return self._mapping[node]
        name = other + target.removeprefix(path)
        if name not in self._own:
            raise layers.CannotRepeat(f"{name} is not in the graph")
        return self._own[name]


def _with_dense_gradients(node: fx.Node) -> None:
    """Let lookups in tables give gradients for whole tables: the same numbers, in a form that can be added and sent."""
    for name in ("sparse", "sparse_grad"):
        if isinstance(node.target, OpOverload) and g.bind(node).get(name):
            places = [argument.name for argument in node.target._schema.arguments]
            if places.index(name) < len(node.args):
                node.update_arg(places.index(name), False)
            else:
                node.update_kwarg(name, False)


def _like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _ordered(graph: fx.Graph, first: list[tuple[str, str]]) -> fx.Graph:
    """A copy that does not show how it was traced: placeholders of these roles come first, in this order, and a call is
    named after its operation and its turn among those left.
    """
    ordered = fx.Graph()
    mapping: dict[fx.Node, Any] = {}
    place = {role: number for number, role in enumerate(first)}
    for node in sorted(g.placeholders(graph), key=lambda node: place.get(node.meta["role"], len(place))):
        mapping[node] = g.add_placeholder(ordered, node.name, node.meta["val"], node.meta["role"])
    for node in graph.nodes:
        if node.op == "output":
            ordered.output(fx.map_arg(node.args[0], mapping.__getitem__))
        elif node.op != "placeholder":
            g.copy_node(ordered, node, mapping, re.sub(r"_\d+$", "", node.name))
    return ordered


def _plain(target: str) -> str:
    return target.removeprefix(WRAPPER_PREFIX)


def _identifier(name: str) -> str:
    cleaned = re.sub(r"\W", "_", name)
    return cleaned if cleaned[:1].isalpha() or cleaned[:1] == "_" else f"_{cleaned}"


def module_of(node: fx.Node) -> str:
    """Path of the innermost module that ran the node, in the user's model; "" for the root or unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if isinstance(path, str)]
    path = re.sub(r"@\d+", "", paths[-1]) if paths else ""
    path = re.sub(r"slice\((\d+|None), [^,]*, (\d+|None)\)\.(\d+)", _in_the_whole_list, path)
    return path.removeprefix("model").removeprefix(".") if path.split(".")[0] == "model" else ""


def _in_the_whole_list(sliced: re.Match[str]) -> str:
    """The index of `layers[2:].0` in `layers`: where modules are shared, the tracer records the slice."""
    start, step, index = sliced.groups()
    return str((0 if start == "None" else int(start)) + int(index) * (1 if step == "None" else int(step)))
