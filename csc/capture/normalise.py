"""An ExportedProgram as one flat functional ATen graph with roles on its placeholders.

Order matters: no-grad regions are inlined as plain ops followed by `aten.detach` *before* decomposition, because
decomposition drops them and frozen layers would start to receive gradients.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from csc.capture.selection import without_selections
from csc.errors import CscError, InputError
from csc.ir import graph as g
from csc.torch_private import is_autocast_region, is_no_grad_region

WRAPPER_PREFIX = "model."
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
            _device, _dtype, enabled, _cache, body, *operands = node.args
            if enabled:
                raise InputError(
                    "the model runs part of itself under torch.autocast",
                    source_of(node) or "model",
                    "cast the parameters instead (model.to(torch.bfloat16)), or disable autocast inside forward",
                )
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
                val = result.meta.get("val") if isinstance(result, fx.Node) else None
                if isinstance(val, torch.Tensor) and val.dtype.is_floating_point:
                    detached = module.graph.call_function(torch.ops.aten.detach.default, (result,))
                    detached.meta.update(result.meta)
                    results[position] = detached
    for user in list(node.users):
        user.replace_all_uses_with(results[int(user.args[1])])  # type: ignore[arg-type]
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def flatten(exported: torch.export.ExportedProgram, model: nn.Module) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    """(graph, constants by name): functional ATen, placeholders with roles, `loss` its one output.

    Parameters come under the canonical names of `model.named_parameters()`; the several names of a tied one meet in
    one placeholder. Raises CscError if the model writes to a buffer.
    """
    inline_regions(exported.graph_module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its own pytree classes
        functional = exported.run_decompositions({})
    canonical = {id(p): name for name, p in model.named_parameters()}
    by_any_name = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))

    for spec in functional.graph_signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT and spec.kind is not OutputKind.LOSS_OUTPUT:
            raise CscError(
                f"the model's forward writes to {_plain(str(spec.target))!r} ({spec.kind.name.lower()})",
                "model",
                "put that module in eval mode (running statistics stay as they are) or move the update out of forward",
            )

    graph = fx.Graph()
    mapping: dict[fx.Node, Any] = {}
    constants: dict[str, torch.Tensor] = {}
    parameter_nodes: dict[str, fx.Node] = {}
    specs = {spec.arg.name: spec for spec in functional.graph_signature.input_specs if hasattr(spec.arg, "name")}
    assert exported.example_inputs is not None
    entries = iter(exported.example_inputs[0][0])  # the batch's keys, in the order of the placeholders
    for node in functional.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            target = _plain(str(spec.target))
            if spec.kind is InputKind.PARAMETER:
                name = canonical[id(by_any_name[target])]
                if name not in parameter_nodes:
                    parameter_nodes[name] = g.add_placeholder(
                        graph, _identifier(name), node.meta["val"], ("parameter", name)
                    )
                mapping[node] = parameter_nodes[name]
            elif spec.kind is InputKind.USER_INPUT:
                name = next(entries)
                mapping[node] = g.add_placeholder(graph, _identifier(name), node.meta["val"], ("input", name))
            else:
                tensor = buffers[target] if spec.kind is InputKind.BUFFER else functional.constants[str(spec.target)]
                constants[target] = tensor.detach()
                mapping[node] = g.add_placeholder(graph, _identifier(target), node.meta["val"], ("constant", target))
        elif node.op == "output":
            loss = node.args[0][0]
            if not isinstance(loss, fx.Node):
                raise InputError(
                    "the loss does not depend on the batch", "model output", "return the loss of the batch"
                )
            graph.output((mapping[loss],))
        elif node.op == "call_function":
            if g.op_name(node) in ASSERTIONS:
                continue
            copied = graph.create_node(
                node.op, node.target, fx.map_arg(node.args, mapping.__getitem__),
                fx.map_arg(node.kwargs, mapping.__getitem__), name=node.name,
            )  # fmt: skip
            copied.meta.update(val=node.meta.get("val"), source=source_of(node), module=module_of(node))
            mapping[node] = copied
        else:
            raise CscError(
                f"the traced graph holds a {node.op} ({node.target})", source_of(node) or "model",
                "control flow operators inside a model are not supported; write the block with tensor operations",
            )  # fmt: skip
    g.erase_dead(graph)
    without_selections(graph, loss.meta["val"].fake_mode)
    return graph, constants


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


def source_of(node: fx.Node) -> str:
    """`modeling_llama.py:182` of the innermost line in the recorded stack; "" if none was recorded."""
    found = re.findall(r'File "([^"\n]+)", line (\d+)', node.meta.get("stack_trace") or "")
    outside = [(f, n) for f, n in found if "/torch/nn/" not in f and "/torch/_" not in f and "/torch/utils/" not in f]
    if not outside:
        return ""
    file, line = outside[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}"
