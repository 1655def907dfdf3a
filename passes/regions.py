"""Pass `regions`: cut the forward graph into regions and find the templates they share."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from csc.analysis import cutting, gradient_flow
from csc.analysis.operators.execution import VIEWS, is_random
from csc.ir import graph as g
from csc.ir.graph import add_call, extract, identifier, template_name, unique, value_name
from csc.ir.groups import OF_RANKS
from csc.ir.program import LOSS, Options, Pass, Program, Region, Template
from csc.ir.strides import dense


@dataclass(frozen=True)
class RegionsPass(Pass):
    """Cut the graph by the module tree; equal regions meet in one template.

    Ensures   every call is in `shared` or in exactly one region; regions stand in order of execution, but those that
              read no other (embeddings) right before their first reader; a value that crosses regions is dense in
              memory; templates differ in ops, wiring, shapes or local parameter names.
    Before    one graph:  embedding, conv2d, ..., cross_entropy_loss
    After     shared: mask, cos, sin;  regions: embed_tokens, layers.0 (llama_decoder_layer), layers.1 (same), lm_head
    """

    requires: ClassVar = ("captured", "sized", "seeded", "weighed")
    establishes: ClassVar = ("regions", "forward")
    breaks: ClassVar = ("captured",)

    def __call__(self, program: Program, options: Options) -> Program:
        graph, _ = g.copy_graph(program.graph)
        result, *counted = g.outputs(graph)
        shared = g.merge_equal(graph, cutting.shared_nodes(graph))
        runs = cutting.cut(graph, program.modules, shared)
        builder = _Builder(
            program, graph, shared, gradient_flow.carrying_calls(graph), gradient_flow.live(graph.nodes, [result])
        )
        for run in runs:
            builder.plan(run)
        built = _sources_late([builder.build(index) for index in range(len(runs))], builder.templates)
        thread = _threads(built, builder.templates)
        final: list[Region] = []
        templates: dict[str, Template] = {}
        names: dict[str, str] = {}
        for region, threaded in zip(built, thread):
            template = replace(
                builder.templates[region.name], threaded=tuple(i for i, flag in enumerate(threaded) if flag)
            )
            key = g.digest(g.canonical(template.graph, _placeholder_role), template.differentiable, template.inexact,
                           template.threaded, template.parameters)  # fmt: skip
            if key not in names:
                names[key] = unique(template.name, templates)
                templates[names[key]] = replace(template, name=names[key])
            final.append(replace(region, template=names[key], threaded=threaded))
        tokens = builder.table(counted[0]) if counted else ""
        return replace(
            program, regions=tuple(final), templates=templates, shared=builder.shared_graph(), loss_tokens=tokens
        )


def _sources_late(built: list[Region], templates: dict[str, Template]) -> list[Region]:
    """Regions that read no other move to their first reader: the embedding of the text joins the LLM that reads it,
    though the model runs it before its encoders. Random ones stay: what they draw depends on their turn.
    """
    waiting = {
        value: region
        for region in built
        if not region.activations and not any(is_random(node) for node in g.calls(templates[region.name].graph))
        for value in region.outputs
    }
    moving = {region.name for region in waiting.values()}
    ordered: dict[str, Region] = {}
    for region in built:
        if region.name in moving and LOSS not in region.outputs:
            continue
        for value in region.activations:
            if value in waiting:
                ordered.setdefault(waiting[value].name, waiting[value])
        ordered[region.name] = region
    return [*ordered.values(), *(region for region in built if region.name not in ordered)]


def _placeholder_role(node: fx.Node) -> Any:
    kind, name = node.meta["role"]
    return (kind, name) if kind == "parameter" else kind


def _threads(built: list[Region], templates: dict[str, Template]) -> list[tuple[bool, ...]]:
    """Per region and activation: does a later region add to the same value's gradient?

    The gradient of a value visits its readers from the last to the first, each adding its own share to what it is
    given: the order in which autograd accumulates, so the sum has the same bits.
    """
    read_later: set[str] = set()
    flags: list[tuple[bool, ...]] = []
    for region in reversed(built):
        inexact = set(templates[region.name].inexact)
        flags.append(tuple(i in inexact and v in read_later for i, v in enumerate(region.activations)))
        read_later.update(v for i, v in enumerate(region.activations) if i in inexact)
    return flags[::-1]


class _Builder:
    """Turns runs into regions and their graphs; keeps the names of the values between them."""

    def __init__(
        self,
        program: Program,
        graph: fx.Graph,
        shared: set[fx.Node],
        carrying: set[fx.Node],
        live: set[fx.Node],
    ) -> None:
        self.program = program
        self.graph = graph
        self.shared = shared
        self.carrying = carrying
        self.live = live
        self.runs: list[cutting.Run] = []
        self.names: list[str] = []
        self.templates: dict[str, Template] = {}
        self.home: dict[fx.Node, int] = {}
        self.value_of: dict[fx.Node, str] = {}
        self.tables: dict[fx.Node, str] = {}
        self.table_names: set[str] = set()
        self.loss = g.outputs(graph)[0]

    def plan(self, run: cutting.Run) -> None:
        """Name a run and note which nodes it holds."""
        name = self._region_name(run)
        count = sum(other == name or other.startswith(f"{name}#") for other in self.names)
        self.runs.append(run)
        self.names.append(f"{name}#{count + 1}" if count else name)
        for node in run.nodes:
            self.home[node] = len(self.runs) - 1

    def _region_name(self, run: cutting.Run) -> str:
        if run.role in ("layer", "part") and run.module:
            return run.module
        inside = set(run.nodes)
        inputs = {u for n in run.nodes for u in n.all_input_nodes if u in self.home and u not in inside}
        last = "merge" if len(inputs) > 1 else g.short_op(run.nodes[-1])
        if self.loss in inside:
            last = "loss"
        return f"{run.module}.{last}" if run.module else last

    def build(self, index: int) -> Region:
        """The region of a planned run; its template (still its own) goes to `templates` under the region's name."""
        run, name = self.runs[index], self.names[index]
        info = self.program.modules[run.module]
        inside = set(run.nodes)
        used = list(dict.fromkeys(u for node in run.nodes for u in node.all_input_nodes if u not in inside))
        activations = [u for u in used if u in self.home]
        parameters = [u for u in used if u.op == "placeholder" and u.meta["role"][0] == "parameter"]
        tables = [u for u in used if u not in self.home and u not in parameters]
        results = [n for n in run.nodes if n is self.loss or any(self.home.get(user) != index for user in n.users)]
        results = [n for n in results if not isinstance(n.meta["val"], (tuple, list))]
        for position, node in enumerate(results):
            label = name if len(results) == 1 and name != LOSS else f"{name}:{position}"
            self.value_of[node] = LOSS if node is self.loss else label

        graph = fx.Graph()
        mapping: dict[fx.Node, Any] = {}
        prefix = f"{run.module}." if run.role in ("layer", "part") and run.module else ""
        local = [p.meta["role"][1].removeprefix(prefix) for p in parameters]
        for position, node in enumerate(activations):
            hint = info.first_argument if position == 0 and prefix else self._result_name(node)
            val = self._dense(node.meta["val"])
            mapping[node] = g.add_placeholder(graph, identifier(hint), val, ("activation", str(position)))
        for node in tables:
            table = self.table(node)
            mapping[node] = g.add_placeholder(graph, table, node.meta["val"], ("shared", table))
        for node, short in zip(parameters, local):
            mapping[node] = g.add_placeholder(graph, identifier(short), node.meta["val"], ("parameter", short))
        for node in run.nodes:
            g.copy_node(graph, node, mapping, name=value_name(node, run.module))
        finals = [self._densify(graph, mapping[node]) for node in results]
        graph.output(tuple(finals))
        differentiable = [i for i, n in enumerate(results) if n in self.carrying and n in self.live and g.is_inexact(n)]
        reached = gradient_flow.live(run.nodes, [results[i] for i in differentiable])
        self.templates[name] = Template(
            name=template_name(info.kind, run.module) if prefix else identifier(name.split(".")[-1]),
            graph=graph,
            activations=tuple(mapping[n].name for n in activations),
            shared=tuple(mapping[n].name for n in tables),
            parameters=tuple(local),
            outputs=tuple(n.name for n in finals),
            differentiable=tuple(differentiable),
            inexact=tuple(
                i for i, n in enumerate(activations) if n in self.carrying and n in reached and g.is_inexact(n)
            ),
            threaded=(),
        )
        return Region(
            name=name,
            module=run.module,
            component=info.component,
            kind=run.role,
            template="",
            activations=tuple(self.value_of[n] for n in activations),
            shared=tuple(self.table(n) for n in tables),
            parameters=tuple(p.meta["role"][1] for p in parameters),
            outputs=tuple(self.value_of[n] for n in results),
        )

    def _result_name(self, node: fx.Node) -> str:
        """What a value is called by those who read it: the module that it is the result of, or what made it."""
        label = self.value_of[node]
        last = label.rpartition(".")[2]
        return value_name(node, self.runs[self.home[node]].module) if ":" in label or last.isdigit() else last

    def _dense(self, val: torch.Tensor) -> torch.Tensor:
        """The value as its readers get it: itself if it fills its memory without gaps or overlaps, else contiguous."""
        if dense(val.shape, val.stride()):
            return val
        with self.program.fake_mode:
            return val.clone(memory_format=torch.contiguous_format)

    def _densify(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        if dense(node.meta["val"].shape, node.meta["val"].stride()):
            return node
        layout = {"memory_format": torch.contiguous_format}
        return add_call(
            graph, torch.ops.aten.clone.default, (node,), layout, val=self._dense(node.meta["val"]), like=node
        )

    def table(self, node: fx.Node) -> str:
        """The name of a shared value; batch inputs and constants keep theirs as far as identifiers allow."""
        if node not in self.tables:
            self.tables[node] = unique(table_name(node), self.table_names)
            self.table_names.add(self.tables[node])
        return self.tables[node]

    def shared_graph(self) -> fx.Graph:
        """The shared nodes that regions read. One output per table, in order of `tables`."""
        graph = extract(
            self.graph, list(self.tables), lambda node: self.tables.get(node) or identifier(g.short_op(node))
        )
        graph.output_node().meta["names"] = tuple(self.tables.values())
        return graph


# An op that only reshapes, casts or scales by a literal keeps the name of what it is applied to.
CARRIES_NAME = VIEWS | {
    "aten::_to_copy",
    "aten::clone",
    "aten::pad",
    "aten::lift_fresh_copy",
    "aten::constant_pad_nd",
    "aten::index_select",
}


def table_name(node: fx.Node) -> str:
    """A name for a value made from the batch alone: `cos`, `labels`, `attention_mask`, `mask`."""
    val = g.tensor_value(node)
    if val is not None and str(val.dtype) == "torch.bool":
        return "mask"
    while node.op == "call_function":
        if node.target is operator.getitem or g.op_name(node) in CARRIES_NAME or _scales_by_literal(node):
            if not isinstance(node.args[0], fx.Node):
                break
            node = node.args[0]
        else:
            break
    if node.op == "placeholder" and node.meta["role"][0] in OF_RANKS:
        return identifier(node.name)
    if node.op == "placeholder":
        return identifier(node.meta["role"][1].split(".")[-1])
    return identifier(node.meta.get("hint") or g.short_op(node))


def _scales_by_literal(node: fx.Node) -> bool:
    return g.op_name(node) in ("aten::mul", "aten::add") and len(node.all_input_nodes) == 1
