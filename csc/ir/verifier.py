"""What always holds of a Program, checked after every pass. The numbers are those of the design's list.

1 graphs are functional, typed, in topological order, with one producer a value and unique names
3 nothing is computed for a frozen parameter; no gradient of an activation with nothing trainable upstream of it
4 every trainable parameter that the trace gives a gradient to gets it, from every region that uses it
5 a schedule is complete and free of deadlock
6 regions take parameters in the sizes of the boxes that ranks hold, and values in the sizes that others give them;
  sums between ranks are there once (csc.analysis.placements)
7 every name refers to something
(2, equal numbers, is what tests and `csc verify` check; the rest of 6 is about context parallelism.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import fx

from csc.errors import CscError
from csc.ir import graph as g
from csc.ir.program import LOSS, Parameter, Program, Region
from csc.ir.schedule import verify as verify_schedule


class VerificationError(CscError):
    """A pass left a Program that breaks an invariant: a bug of that pass."""


def verify(program: Program, after: str = "", sound: set[tuple[fx.Graph, int]] | None = None) -> None:
    """Raise VerificationError naming the invariant, the place and the pass, unless every invariant holds.

    sound: graphs, with their numbers of nodes, that were found in order before and are not looked at again; grows.
    """
    for problem in _problems(program, set() if sound is None else sound):
        raise VerificationError(
            problem, f"after pass {after}" if after else program.name, "report it: a pass of csc is wrong"
        )


def _problems(program: Program, sound: set[tuple[fx.Graph, int]]) -> Iterator[str]:
    for place, graph in _graphs(program):
        if (graph, len(graph.nodes)) not in sound:
            yield from (f"invariant 1: {place}: {problem}" for problem in _graph_problems(graph))
            sound.add((graph, len(graph.nodes)))
    yield from _name_problems(program)
    yield from _shard_problems(program)
    if program.variants:
        yield from _gradient_problems(program)
    if program.stages:
        yield from _stage_problems(program)
    if program.schedule is not None:
        channels = [(m.kind, m.source, m.destination) for m in program.messages]
        has_b, has_w = [s.has_b for s in program.stages], [s.has_w for s in program.stages]
        try:
            divided = [s.divided for s in program.stages]
            verify_schedule(program.schedule, channels, has_b, has_w, program.schedule.microbatches, divided)
        except CscError as error:
            yield f"invariant 5: {error}"


def _graphs(program: Program) -> Iterator[tuple[str, fx.Graph]]:
    yield "graph", program.graph
    if program.shared is not None:
        yield "shared", program.shared
    for template in program.templates.values():
        yield template.name, template.graph
        if template.joint is not None:
            yield f"{template.name}, joint", template.joint
    for variant in program.variants.values():
        yield f"{variant.name}, pruned", variant.pruned
        parts = (variant.forward, variant.backward_input, variant.backward_weight, variant.backward)
        for letter, part in zip(("F", "B", "W", "BW"), parts):
            if part is not None:
                yield f"{variant.name}, {letter}", part


def _graph_problems(graph: fx.Graph) -> Iterator[str]:
    disorder = g.topological_error(graph)
    if disorder:
        yield disorder
    names: set[str] = set()
    for node in graph.nodes:
        if node.name in names:
            yield f"two values are called %{node.name}"
        names.add(node.name)
        if node.op == "output":
            continue
        if "val" not in node.meta:
            yield f"%{node.name} has no type"
        if node.op == "placeholder" and "role" not in node.meta:
            yield f"%{node.name} has no role"
        if node.op not in ("placeholder", "call_function"):
            yield f"%{node.name} is a {node.op}"
        if g.mutates(node):
            yield f"%{node.name} writes to its argument ({node.target})"


def _name_problems(program: Program) -> Iterator[str]:
    parameters = {p.name for p in program.parameters}
    tables = set(program.shared.output_node().meta["names"]) if program.shared is not None else set()
    produced: set[str] = set()
    for region in program.regions:
        template = program.templates.get(region.template)
        if template is None:
            yield f"invariant 7: region {region.name} has no template"
            continue
        yield from (
            f"invariant 7: {region.name} uses unknown parameter {p}" for p in region.parameters if p not in parameters
        )
        yield from (f"invariant 7: {region.name} reads unknown table {t}" for t in region.shared if t not in tables)
        yield from (
            f"invariant 1: {region.name} reads {v} before it is made" for v in region.activations if v not in produced
        )
        yield from (f"invariant 1: {value} has two producers" for value in region.outputs if value in produced)
        produced.update(region.outputs)
        lengths = (len(region.activations), len(region.shared), len(region.parameters), len(region.outputs))
        expected_lengths = (
            len(template.activations),
            len(template.shared),
            len(template.parameters),
            len(template.outputs),
        )
        if lengths != expected_lengths:
            yield f"invariant 7: {region.name} does not fit its template {template.name}"
    if program.regions and LOSS not in produced:
        yield "invariant 7: no region makes the loss"


def _shard_problems(program: Program) -> Iterator[str]:
    held = {p.name: _local(p) for p in program.parameters}
    shapes: dict[str, tuple[int, ...]] = {}
    for region in program.regions:
        template = program.templates.get(region.template)
        if template is None:
            continue
        names_left = {"activation": list(region.activations), "parameter": list(region.parameters)}
        known = {"activation": shapes, "parameter": held}
        for node in g.placeholders(template.graph):
            kind, shape = node.meta["role"][0], tuple(node.meta["val"].shape)
            name = names_left[kind].pop(0) if names_left.get(kind) else ""
            if name in known.get(kind, {}) and known[kind][name] != shape:
                yield f"invariant 6: {region.name} takes {name} as {list(shape)}, which is {list(known[kind][name])}"
        values = (node.meta["val"] for node in g.outputs(template.graph))
        shapes.update((name, tuple(val.shape)) for name, val in zip(region.outputs, values))


def _local(parameter: Parameter) -> tuple[int, ...]:
    """The sizes in which each rank holds it."""
    if not parameter.boxes:
        return parameter.shape
    sizes = {tuple(sum(stop - start for start, stop in dim) for dim in box) for box in parameter.boxes}
    return sizes.pop() if len(sizes) == 1 else parameter.shape


def _gradient_problems(program: Program) -> Iterator[str]:
    trainable = {p.name for p in program.parameters if p.trainable}
    needy = {LOSS}
    above: set[str] = set()
    for region in program.regions:
        trains = any(name in trainable for name in region.parameters)
        if trains or any(value in above for value in region.activations):
            above.update(region.outputs)
    for region in reversed(program.regions):
        variant, template = program.variants[region.variant], program.templates[region.template]
        yield from _region_problems(region, trainable, above)
        gradients = g.outputs(variant.pruned)[len(template.outputs) :]
        for wanted, gradient, name in zip(
            (*region.dx, *region.dw), gradients, (*region.activations, *region.parameters)
        ):
            if wanted != (gradient is not None):
                yield (
                    f"invariant {3 if gradient is not None else 4}: {region.name}: gradient of {name} is "
                    + ("computed for nothing" if gradient is not None else "missing")
                )
        reached = any(value in needy for i, value in enumerate(region.outputs) if i in template.differentiable)
        for name, wanted, exists in zip(region.parameters, region.dw, template.parameter_gradients):
            if name in trainable and exists and reached and not wanted:
                yield f"invariant 4: {region.name}: trainable {name} gets no gradient"
        needy.update(value for value, needed in zip(region.activations, region.dx) if needed)
        parts = [part for part in (variant.backward_input, variant.backward_weight) if part is not None]
        if variant.forward is not None and parts and not (region.needs_dx or region.needs_dw):
            yield f"invariant 3: {region.name} needs no gradient and has a backward"
        if variant.backward_weight is not None and not region.needs_dw:
            yield f"invariant 3: {region.name} is frozen and has a W"


def _region_problems(region: Region, trainable: set[str], above: set[str]) -> Iterator[str]:
    for name, wanted in zip(region.parameters, region.dw):
        if wanted and name not in trainable:
            yield f"invariant 3: {region.name}: frozen {name} has a gradient"
    for value, wanted in zip(region.activations, region.dx):
        if wanted and value not in above:
            yield f"invariant 3: {region.name}: {value} has nothing trainable upstream of it and gets a gradient"


def _stage_problems(program: Program) -> Iterator[str]:
    placed = [name for stage in program.stages for name in stage.regions]
    position = {region.name: i for i, region in enumerate(program.regions)}
    if sorted(placed) != sorted(position):
        yield "invariant 7: the stages do not hold every region once"
        return
    for stage in program.stages:
        places = [position[name] for name in stage.regions]
        if places != sorted(places):
            yield f"invariant 7: stage {stage.index} does not run its regions in order"
    for m in program.messages:
        if (m.source < m.destination) != (m.kind == "F"):
            yield f"invariant 7: message {m.kind} {m.source}>{m.destination} leads the wrong way"
    home = {name: stage.index for stage in program.stages for name in stage.regions}
    sent = {(m.kind, m.source, m.destination, value) for m in program.messages for value in m.values}
    maker = {value: home[region.name] for region in program.regions for value in region.outputs}
    wanted: set[str] = set()  # values whose gradient is asked for
    for region in program.regions:
        for i, value in enumerate(region.activations):
            here = home[region.name]
            if maker[value] != here and ("F", maker[value], here, value) not in sent:
                yield f"invariant 7: no message brings {value} from stage {maker[value]} to stage {here}"
            if region.dx and region.dx[i]:
                wanted.add(value)
    reading: dict[str, list[int]] = {value: [] for value in wanted}
    for region in reversed(program.regions):
        for value in dict.fromkeys(value for value, needed in zip(region.activations, region.dx) if needed):
            reading[value].append(home[region.name])
    for value, readers in sorted(reading.items()):
        for source, destination in pairwise([*readers, maker[value]]):
            if source != destination and ("B", source, destination, value) not in sent:
                yield (
                    f"invariant 4: no message brings the gradient of {value} from stage {source} to stage {destination}"
                )
    for message in program.messages:
        for value in message.values:
            if message.kind == "B" and value not in wanted:
                yield f"invariant 3: a message carries the gradient of {value}, which nobody needs"
