"""Pass `differentiate`: trace forward and backward of each template once, as if everything were trained."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from csc.kernels import own_gradient as _own_gradient  # noqa: F401  registers them
from csc.kernels import scattered_rows as _operators  # noqa: F401  registers them
from torch import fx

from csc.analysis import gradient_flow
from csc.analysis.operators.execution import OWN_LAYOUT, is_view
from csc.ir import graph as g
from csc.ir.graph import Writer, identifier, unique
from csc.ir.program import LOSS, Options, Pass, Program, Region, Template
from csc.ir.strides import overlaps
from csc.torch_private.traces import fx_traceback, make_fx

# --- Views whose input may lie in memory in another way than it did in the trace -------------------------------------
#
# The strides in a trace are those of fake tensors. For elementwise operations whose inputs lie in different orders (a
# transposed gradient and a saved value) some of them are not what the real operation gives: softplus_backward follows
# its first input, its fake one does not. `aten.view` then fails on real tensors; `aten.reshape` is the same view where
# there can be one, and a copy where not.


def with_reshapes(graph: fx.Graph) -> None:
    """Views of what comes from a value that is not contiguous, with no matrix product in between, become reshapes.

    Before    %x = aten.softplus_backward(%transposed, %y);  %z = aten.view(%x, [48, 4])
    After     %x = aten.softplus_backward(%transposed, %y);  %z = aten.reshape(%x, [48, 4])
    """
    uncertain: set[fx.Node] = set()
    for node in g.calls(graph):
        if g.op_name(node) in OWN_LAYOUT or g.op_name(node).startswith("csc::") or _made_contiguous(node):
            continue
        operands = node.all_input_nodes
        if any(operand in uncertain for operand in operands) or (_computed(node) and any(map(_strided, operands))):
            uncertain.add(node)
            if g.op_name(node) == "aten::view":
                node.target = torch.ops.aten.reshape.default


def _made_contiguous(node: fx.Node) -> bool:
    return g.op_name(node) == "aten::clone" and node.kwargs.get("memory_format") is torch.contiguous_format


def _computed(node: fx.Node) -> bool:
    """Whether the result is made from several tensors; what one tensor gives follows that."""
    return not is_view(node) and len(node.all_input_nodes) > 1


def _strided(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_contiguous()


# --- Runs a template's forward under autograd, so that what is traced of it says where it comes from -----------------


class Marking(fx.Interpreter):
    """Every traced node, of the backward too, knows the forward node it comes from."""

    def __init__(self, graph: fx.Graph) -> None:
        self._backwards = gradient_flow.backwards(graph)  # they read what has been computed long before
        super().__init__(torch.nn.Module(), garbage_collect_values=not self._backwards, graph=graph)
        self._later = {node for part in self._backwards.values() for node in part}
        self.seen: set[Any] = set()

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if n in self._later:
            return None
        with tagging(_origin(n, backward=False)):
            arguments, keywords = self.fetch_args_kwargs_from_env(n)
            result = self._own(n, *arguments) if n in self._backwards else _called(n, arguments, keywords)
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        stack = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        while stack:
            function = stack.pop()
            if function not in self.seen:
                self.seen.add(function)
                _tag_backward(function, _origin(n, backward=True))
                stack.extend(parent for parent, _ in function.next_functions if parent is not None)
        return result

    def _own(self, n: fx.Node, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *_: Any) -> Any:
        return list(_Computed.apply(partial(self._backward, n), len(outputs), *outputs, *inputs))

    def _backward(self, n: fx.Node, incoming: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of a function's inputs, for those of its outputs."""
        produced: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            return produced[node] if node in produced else self.env[node]

        for node in self._backwards[n]:
            with tagging(_origin(node, backward=True)):
                if g.op_name(node) == gradient_flow.INCOMING:
                    produced[node] = incoming[node.args[1]].to(node.meta["val"].dtype)  # type: ignore[index]
                else:
                    produced[node] = _called(node, fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value))
        ends: Any = n.args[2]
        return [value(end) for end in ends]


class _Computed(torch.autograd.Function):
    """Values that have been computed, and their inputs' gradients: run(gradients of the values) gives those."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Sequence[torch.Tensor]], Any], count: int, *tensors: torch.Tensor) -> Any:
        ctx.run, ctx.count = run, count
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
        return None, None, *[None] * ctx.count, *ctx.run(incoming)


def _called(n: fx.Node, arguments: Any, keywords: Any) -> Any:
    try:
        return n.target(*arguments, **keywords)  # type: ignore[operator]
    except (RuntimeError, ValueError):
        if g.op_name(n) not in ("aten::view", "aten::_unsafe_view"):
            raise
        # Attention with a mask that trains runs another kernel than at capture, and gradients come in other layouts
        # than values have: copy if needed.
        return torch.ops.aten.reshape.default(*arguments, **keywords)


def _origin(n: fx.Node, backward: bool) -> dict[str, Any]:
    where = {"source": n.meta.get("source", ""), "module": n.meta.get("module", "")}
    return {"name": n.name, **where, "backward": backward}


def _tag_backward(function: Any, origin: dict[str, Any]) -> None:
    open_tags: list[tagging] = []

    def enter(*_: Any) -> None:
        open_tags.append(tagging(origin))
        open_tags[-1].__enter__()

    def leave(*_: Any) -> None:
        open_tags.pop().__exit__()

    function.register_prehook(enter)
    function.register_hook(leave)


class tagging:
    """Within the block, nodes that are traced carry `origin` (fx copies the entry "custom" of the current meta)."""

    def __init__(self, origin: dict[str, Any]) -> None:
        self.meta = {"custom": {"csc": origin}}

    def __enter__(self) -> None:
        self.before = fx_traceback.current_meta
        fx_traceback.current_meta = self.meta

    def __exit__(self, *_: object) -> None:
        fx_traceback.current_meta = self.before


# --- Pass `differentiate`: trace forward and backward of each template once, as if everything were trained -----------


Layout = tuple[int, ...]  # strides
FOUND = ("joint", "activation_gradients", "parameter_gradients")  # by tracing, of a template


@dataclass(frozen=True)
class DifferentiatePass(Pass):
    """Give every template its joint graph.

    Ensures   `joint` returns the outputs, then the gradient of every activation and parameter (None where none flows),
              functional and free of `detach`; it depends on no frozen set, so a change of `freeze` reuses it.
    Before    llama_decoder_layer(hidden_states, mask, w) -> out
    After     joint(hidden_states, mask, w, d_out) -> out, d_hidden_states, d_w
    """

    requires: ClassVar = ("regions", "forward")
    establishes: ClassVar = ("differentiated",)
    breaks: ClassVar = ("forward",)

    def __call__(self, program: Program, options: Options) -> Program:
        layouts: dict[str, Layout] = {}  # of the gradient of each value, as the last region to touch it leaves it
        joints = dict(program.joints.templates) if program.joints is not None else {}
        templates: dict[str, Template] = {}
        names: dict[Any, str] = {}
        final: list[Region] = []
        for region in reversed(program.regions):
            template = program.templates[region.template]
            # A later reader may turn out to give no gradient: `x.type_as(y)` reads of y what it is, none of its values.
            flags = tuple(i in template.threaded and value in layouts for i, value in enumerate(region.activations))
            template = replace(
                template,
                threaded=tuple(i for i, threaded in enumerate(flags) if threaded),
                differentiable=tuple(
                    i for i in template.differentiable if region.outputs[i] == LOSS or region.outputs[i] in layouts
                ),
            )
            arriving = [region.outputs[i] for i in template.differentiable]
            arriving += [region.activations[i] for i in template.threaded]
            incoming = tuple(layouts.get(value) for value in arriving)
            key = (template.name, template.threaded, template.differentiable, incoming)
            if key not in names:
                names[key] = unique(template.name, templates)
                known = _decides(template, incoming)
                if known not in joints:
                    joints[known] = joint_of(template, program.fake_mode, layouts=incoming)
                sums = {name: getattr(joints[known], name) for name in FOUND}
                templates[names[key]] = replace(template, name=names[key], **sums)
            gradients = g.outputs(templates[names[key]].joint)[len(region.outputs) :]  # type: ignore[arg-type]
            for value, gradient in zip(region.activations, gradients):
                if gradient is not None:
                    layouts[value] = tuple(gradient.meta["val"].stride())
            final.append(replace(region, template=names[key], threaded=flags))
        order = dict.fromkeys(region.template for region in final[::-1])
        return replace(
            program, regions=tuple(final[::-1]), templates={name: templates[name] for name in order},
            joints=replace(program.joints, templates=joints) if program.joints is not None else None,
        )  # fmt: skip


def _decides(template: Template, incoming: Sequence[Layout | None]) -> str:
    """All that decides a joint graph: the forward graph in its sizes, with its names and lines, and what gradients are
    asked for and come in.
    """
    described = [(node.name, node.meta.get("source"), node.meta.get("module")) for node in template.graph.nodes]
    forward = g.canonical(template.graph, lambda node: node.meta["role"])
    of = (template.activations, template.outputs, template.differentiable, template.inexact, template.threaded)
    return g.digest(forward, described, of, len(template.parameters), incoming)


def joint_of(
    template: Template,
    fake_mode: Any,
    frozen: Sequence[int] = (),
    constant: Sequence[int] = (),
    layouts: Sequence[Layout | None] = (),
) -> Template:
    """The template with its joint graph traced.

    layouts: strides of the incoming gradients (outputs', then threaded ones), None for those of the value itself. They
    are traced as they come, since a reduction over another layout may round in another order than eager's.

    frozen: positions of parameters, constant: positions of activations that ask for no gradient while tracing. Both are
    empty in the compiler; tests trace with them to check what pass `prune` derives from the full trace.
    """
    sources = g.placeholders(template.graph)
    activations = len(template.activations)
    first_parameter = activations + len(template.shared)
    differentiated = [i for i in template.inexact if i not in constant]
    differentiated += [
        first_parameter + j
        for j in range(len(template.parameters))
        if j not in frozen and g.is_inexact(sources[first_parameter + j])
    ]
    with fake_mode:  # each its own: tracing tells inputs apart by their identity, and values may share a `val`
        values = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for t in (node.meta["val"] for node in sources)
        ]
        tangents = _tangents(template, values, layouts)

    def joint(primals: list[torch.Tensor], seeds_in: list[torch.Tensor]) -> tuple[Any, ...]:
        inputs = [p.detach().requires_grad_(True) if i in differentiated else p.detach() for i, p in enumerate(primals)]
        with torch.enable_grad(), fx_traceback.preserve_node_meta():
            results = Marking(template.graph).run(*inputs)
            roots = [results[i] for i in template.differentiable] + [inputs[i] for i in template.threaded]
            pairs = [(root, seed) for root, seed in zip(roots, seeds_in) if root.requires_grad]
            wanted = [inputs[i] for i in differentiated]
            found: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if pairs and wanted:
                found = torch.autograd.grad(
                    [root for root, _ in pairs], wanted, [seed for _, seed in pairs], allow_unused=True
                )
        by_position = dict(zip(differentiated, found))
        gradients = [by_position.get(i) for i in range(activations)]
        gradients += [by_position.get(i) for i in range(first_parameter, len(inputs))]
        return (*results, *gradients)

    with fake_mode, _without_onednn():
        traced = make_fx(joint, tracing_mode="real")(values, tangents)
    graph = _tidy(_functional(traced.graph, values, tangents, fake_mode), template, sources)
    with_reshapes(graph)
    results = g.outputs(graph)[len(template.outputs) :]
    return replace(
        template,
        joint=graph,
        activation_gradients=tuple(r is not None for r in results[:activations]),
        parameter_gradients=tuple(r is not None for r in results[activations:]),
    )


def _tangents(template: Template, values: Sequence[Any], layouts: Sequence[Layout | None]) -> list[torch.Tensor]:
    """The incoming gradients: of the outputs, then of threaded activations, laid out as they come."""
    finals = g.outputs(template.graph)
    alike = [finals[i].meta["val"] for i in template.differentiable] + [values[i] for i in template.threaded]
    return [
        torch.empty_strided(t.shape, t.stride() if layout is None else layout, dtype=t.dtype, device=t.device)
        for t, layout in zip_longest(alike, layouts)
    ]


@contextmanager
def _without_onednn() -> Iterator[None]:
    """An LSTM in parts: oneDNN's keeps what its backward reads only while autograd records, and F runs without."""
    flags = torch.backends.mkldnn.set_flags
    enabled = flags(_enabled=False, _fp32_precision=None)[0]
    try:
        yield
    finally:
        flags(_enabled=enabled, _fp32_precision=None)


def _functional(graph: fx.Graph, values: list[Any], tangents: list[Any], fake_mode: Any) -> fx.Graph:
    """The graph without in-place ops: some backward formulas (index_put_, in-place adds) trace as such."""
    if not any(g.mutates(node) for node in graph.nodes):
        return graph

    def replay(primals: list[torch.Tensor], seeds: list[torch.Tensor]) -> Any:
        with fx_traceback.preserve_node_meta():
            return _Replaying(torch.nn.Module(), graph=graph).run(*primals, *seeds)

    with fake_mode:
        functional = torch.func.functionalize(replay, remove="mutations")
        return make_fx(functional, tracing_mode="real")(values, tangents).graph


class _Replaying(fx.Interpreter):
    """Runs a traced graph again with each node's tag in place."""

    def run_node(self, n: fx.Node) -> Any:
        with tagging(n.meta.get("custom", {}).get("csc", {})):
            return getattr(self, n.op)(n.target, *self.fetch_args_kwargs_from_env(n))


def _tidy(graph: fx.Graph, template: Template, sources: list[fx.Node]) -> fx.Graph:
    """With names and roles: `detach` and `share` gone (nothing here runs under autograd), t(t(x)) folded."""
    tidy = fx.Graph()
    mapping: dict[fx.Node, Any] = {}
    incoming = g.placeholders(graph)
    for old, source in zip(incoming, sources):
        mapping[old] = g.add_placeholder(tidy, source.name, source.meta["val"], source.meta["role"])
    seeds = [template.outputs[i] for i in template.differentiable]
    seeds += [template.activations[i] for i in template.threaded]
    for old, name in zip(incoming[len(sources) :], seeds):
        mapping[old] = g.add_placeholder(tidy, f"d_{name}", old.meta["val"], ("tangent", name))
    last_of = _last_by_origin(graph)
    for node in g.calls(graph):
        if _is_its_operand(node) or _only_types(node):
            mapping[node] = mapping[node.all_input_nodes[0]]
            continue
        argument = mapping[node.args[0]] if node.args and isinstance(node.args[0], fx.Node) else None
        if g.op_name(node) == "aten::t" and isinstance(argument, fx.Node) and g.op_name(argument) == "aten::t":
            mapping[node] = argument.args[0]
            continue
        copied = g.copy_node(tidy, node, mapping, name=_joint_name(node, last_of))
        origin = node.meta.get("custom", {}).get("csc", {})
        if g.op_name(node) == "aten::masked_scatter_backward":
            copied.target = torch.ops.csc.masked_scatter_backward.default
        copied.meta.update(source=origin.get("source", ""), module=origin.get("module", ""))
    finals = [mapping[r] if isinstance(r, fx.Node) else None for r in g.outputs(graph)]
    wanted = len(template.outputs)
    layouts = [node.meta["val"] for node in g.outputs(template.graph)]
    layouts += [node.meta["val"] for node in sources if node.meta["role"][0] != "shared"]
    for i in range(len(template.activations)):
        final = finals[wanted + i]
        if isinstance(final, fx.Node) and not overlaps(final.meta["val"].shape, final.meta["val"].stride()):
            layouts[wanted + i] = None
    tidy.output(tuple(in_layout(tidy, final, layout) for final, layout in zip(finals, layouts)))
    g.erase_dead(tidy)
    return tidy


def _is_its_operand(node: fx.Node) -> bool:
    """Whether it gives its operand as it is. Autograd keeps a result so: by detach, from torch 2.14 on by alias."""
    return g.op_name(node) in ("aten::detach", "aten::alias", "aten::lift_fresh")


def _only_types(node: fx.Node) -> bool:
    """Whether a call gives its operand as it is: it was there for its gradient, which has been traced."""
    if g.op_name(node) != "csc::share":
        return False
    return bool(node.args[0].meta["val"].stride() == node.meta["val"].stride())  # type: ignore[union-attr]


def _last_by_origin(graph: fx.Graph) -> set[fx.Node]:
    """Of the nodes that one forward op was traced to, the last: it is the op's result and takes its name."""
    last: dict[str, fx.Node] = {}
    for node in g.calls(graph):
        origin = node.meta.get("custom", {}).get("csc", {})
        item = node.args[1] if node.target is operator.getitem else 0
        if origin and not origin["backward"] and not _is_its_operand(node) and item == 0:
            last[origin["name"]] = node
    return set(last.values())


# Names for the tuples that attention returns.
RESULTS = {
    "attention": "results",
    "attention_backward": "gradients",
    "context_attention": "results",
    "context_attention_backward": "gradients",
    "context_gather_backward": "shard",
    "linear_cross_entropy": "results",
    "divided_linear_cross_entropy": "results",
    "all_reduce": "sum",
    "scaled_dot_product_flash_attention_for_cpu": "results",
    "scaled_dot_product_flash_attention_for_cpu_backward": "gradients",
}


# Names for the items of a tuple that are no results of the model's operation.
ITEMS = dict.fromkeys(g.HEADS, ("loss", "d_x", "d_weight", "d_bias"))


def _joint_name(node: fx.Node, last_of: set[fx.Node]) -> str:
    origin = node.meta.get("custom", {}).get("csc", {})
    op = g.short_op(node).strip("_")
    op = RESULTS.get(op, op)
    if not origin:
        return identifier(f"d_{op}")
    if not origin["backward"]:
        items = ITEMS.get(g.op_name(node.all_input_nodes[0]), ()) if node.target is operator.getitem else ()
        if items:
            return identifier(f"{origin['name']}_{items[int(node.args[1])]}")  # type: ignore[arg-type]
        return identifier(origin["name"] if node in last_of else f"{origin['name']}_{op}")
    return identifier(f"d_{origin['name']}" if op == "getitem" else f"d_{origin['name']}_{op}")


def in_layout(graph: fx.Graph, node: fx.Node | None, layout: torch.Tensor | None) -> fx.Node | None:
    """The gradient with the strides of the value it belongs to, so that whoever gets it can rely on them."""
    if node is None or layout is None or node.meta["val"].stride() == layout.stride():
        return node
    order = sorted(range(layout.dim()), key=lambda dim: (-layout.stride()[dim], dim))
    if order == list(range(layout.dim())):
        steps: list[tuple[Any, tuple, dict]] = [
            (torch.ops.aten.clone.default, (), {"memory_format": torch.contiguous_format})
        ]
    else:
        back = [order.index(dim) for dim in range(layout.dim())]
        steps = [
            (torch.ops.aten.permute.default, (order,), {}),
            (torch.ops.aten.clone.default, (), {"memory_format": torch.contiguous_format}),
            (torch.ops.aten.permute.default, (back,), {}),
        ]
    writer = Writer(graph, node.meta["val"].fake_mode)
    for target, arguments, keywords in steps:
        node = writer.call(None, target, node, *arguments, **keywords)
    return node
