"""Each invariant of csc/ir/verifier.py, broken on purpose: the verifier says which one and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from csc.passes.pipeline import OWN
from torch import fx

import csc
from csc.ir import graph as g
from csc.ir.program import LOSS, Program, Template, Variant
from csc.ir.verifier import VerificationError, verify
from tests.compiler.conftest import Models

LAYER = "layers.1"


@pytest.fixture
def program(models: Models) -> Program:
    """A text model in two stages; its embedding and its first layer are frozen."""
    program = models("text", mesh="pp=2", microbatches=2, freeze=["embed_tokens", "layers.0"]).program
    verify(program)
    return program


@pytest.fixture
def trained(models: Models) -> Program:
    """The same model, everything trained."""
    return models("text", mesh="pp=2").program


def refused(program: Program, *parts: str) -> None:
    with pytest.raises(VerificationError) as caught:
        verify(program, after="sabotage")
    message = str(caught.value)
    assert "after pass sabotage" in message
    for part in parts:
        assert part in message


def with_region(program: Program, name: str, **changes: Any) -> Program:
    return replace(program, regions=tuple(replace(r, **changes) if r.name == name else r for r in program.regions))


def with_template(program: Program, name: str, **changes: Any) -> Program:
    return replace(program, templates={**program.templates, name: replace(program.templates[name], **changes)})


def with_variant(program: Program, name: str, **changes: Any) -> Program:
    return replace(program, variants={**program.variants, name: replace(program.variants[name], **changes)})


def edited(graph: fx.Graph, edit: Callable[[fx.Graph, list[fx.Node]], None]) -> fx.Graph:
    """A copy with the edit made; the original stays as it is."""
    copied, _ = g.copy_graph(graph)
    if "names" in graph.output_node().meta:
        copied.output_node().meta["names"] = graph.output_node().meta["names"]
    edit(copied, g.calls(copied))
    return copied


def template_of(program: Program, name: str = LAYER) -> Template:
    return program.templates[program.region(name).template]


def variant_of(program: Program, name: str = LAYER) -> Variant:
    return program.variants[program.region(name).variant]


def outputs_without(graph: fx.Graph, position: int) -> fx.Graph:
    def drop(copied: fx.Graph, _: list[fx.Node]) -> None:
        results = list(g.outputs(copied))
        results[position] = None
        copied.output_node().args = (tuple(results),)

    return edited(graph, drop)


# --- 1: graphs ---------------------------------------------------------------------------------------------------


def test_1_order(program: Program) -> None:
    def swap(graph: fx.Graph, calls: list[fx.Node]) -> None:
        user = next(n for n in calls if any(u in calls for u in n.all_input_nodes))
        g.placeholders(graph)[-1].append(user)

    broken = replace(program, graph=edited(program.graph, swap))
    refused(broken, "invariant 1: graph:", "before it is made")


def test_1_types(program: Program) -> None:
    name = template_of(program).name
    joint = edited(template_of(program).joint, lambda _, calls: calls[3].meta.pop("val"))
    refused(with_template(program, name, joint=joint), f"invariant 1: {name}, joint:", "has no type")


def test_1_roles(program: Program) -> None:
    shared = edited(program.shared, lambda graph, _: g.placeholders(graph)[0].meta.pop("role"))
    refused(replace(program, shared=shared), "invariant 1: shared:", "has no role")


def test_1_functional(program: Program) -> None:
    def write(graph: fx.Graph, calls: list[fx.Node]) -> None:
        target = next(n for n in calls if n.target is torch.ops.aten.add.Tensor)
        target.target = torch.ops.aten.add_.Tensor

    name = template_of(program).name
    broken = with_template(program, name, graph=edited(template_of(program).graph, write))
    refused(broken, f"invariant 1: {name}:", "writes to its argument", "add_")


def test_1_calls_only(program: Program) -> None:
    def attribute(graph: fx.Graph, calls: list[fx.Node]) -> None:
        with graph.inserting_before(calls[0]):
            graph.get_attr("hidden").meta["val"] = calls[0].meta["val"]

    name = variant_of(program).name
    broken = with_variant(program, name, forward=edited(variant_of(program).forward, attribute))
    refused(broken, f"invariant 1: {name}, F:", "is a get_attr")


def test_1_unique_names(program: Program) -> None:
    def rename(graph: fx.Graph, calls: list[fx.Node]) -> None:
        calls[1].name = calls[0].name

    refused(replace(program, graph=edited(program.graph, rename)), "invariant 1: graph: two values are called")


def test_1_one_producer(program: Program) -> None:
    broken = with_region(program, LAYER, outputs=program.region("layers.0").outputs)
    refused(broken, "invariant 1: layers.0 has two producers")


def test_1_region_order(program: Program) -> None:
    broken = replace(program, regions=program.regions[::-1])
    refused(broken, "invariant 1:", "before it is made")


# --- 3: nothing is computed for what is frozen -------------------------------------------------------------------


def test_3_frozen_parameter_with_a_gradient(program: Program) -> None:
    parameter = program.region(LAYER).parameters[0]
    frozen = tuple(replace(p, trainable=p.trainable and p.name != parameter) for p in program.parameters)
    refused(replace(program, parameters=frozen), f"invariant 3: {LAYER}: frozen {parameter} has a gradient")


def test_3_nothing_trainable_above(program: Program) -> None:
    region = program.region(LAYER)
    refused(
        with_region(program, LAYER, dx=(True,)), f"invariant 3: {LAYER}: {region.activations[0]} has nothing trainable"
    )


def test_3_gradient_computed_for_nothing(trained: Program) -> None:
    region = trained.region(LAYER)
    broken = with_region(trained, LAYER, dw=(False, *region.dw[1:]))
    refused(broken, f"invariant 3: {LAYER}: gradient of {region.parameters[0]} is computed for nothing")


def test_3_backward_without_a_need(program: Program) -> None:
    frozen = program.region("layers.0")
    donor = variant_of(program, "layers.2").backward_input
    refused(
        with_variant(program, frozen.variant, backward_input=donor), "invariant 3: layers.0 needs no gradient and has a"
    )


def test_3_weight_part_of_a_frozen_region(models: Models) -> None:
    program = models("text", mesh="pp=2", freeze=["layers.2"]).program
    assert program.region("layers.2").needs_dx
    donor = variant_of(program, LAYER).backward_weight
    broken = with_variant(program, program.region("layers.2").variant, backward_weight=donor)
    refused(broken, "invariant 3: layers.2 is frozen and has a W")


def test_3_message_of_a_gradient_that_nobody_needs(models: Models) -> None:
    program = models("text", mesh="pp=3", freeze=["embed_tokens", "layers"]).program
    value = program.messages[0].values[0]
    extra = replace(program.messages[0], kind="B", source=1, destination=0)
    refused(
        replace(program, messages=(*program.messages, extra)), f"invariant 3: a message carries the gradient of {value}"
    )


# --- 4: every trainable parameter gets its gradient --------------------------------------------------------------


def test_4_trainable_parameter_without_a_gradient(trained: Program) -> None:
    region, variant = trained.region("norm"), variant_of(trained, "norm")
    position = len(template_of(trained, "norm").outputs) + len(region.activations)
    pruned = outputs_without(variant.pruned, position)
    broken = with_variant(with_region(trained, "norm", dw=(False,)), variant.name, pruned=pruned)
    refused(broken, f"invariant 4: norm: trainable {region.parameters[0]} gets no gradient")


def test_4_gradient_missing_from_the_graph(trained: Program) -> None:
    variant = variant_of(trained)
    broken = with_variant(
        trained, variant.name, pruned=outputs_without(variant.pruned, len(g.outputs(variant.pruned)) - 1)
    )
    region = next(r for r in reversed(trained.regions) if r.variant == variant.name)
    refused(broken, f"invariant 4: {region.name}: gradient of {region.parameters[-1]} is missing")


def test_4_gradient_that_does_not_travel(trained: Program) -> None:
    """Dropped from the messages, and so from any schedule made from them: the schedule alone would look sound."""
    (value,) = next(message for message in trained.messages if message.kind == "B").values
    kept = tuple(message for message in trained.messages if message.kind == "F")
    broken = replace(trained, messages=kept, schedule=None)
    refused(broken, f"invariant 4: no message brings the gradient of {value} from stage 1 to stage 0")


# --- 5: the schedule ---------------------------------------------------------------------------------------------


def test_5_incomplete(trained: Program) -> None:
    first, second = trained.schedule.ranks
    without = tuple(action for action in first if action.kind != "BW")
    refused(replace(trained, schedule=replace(trained.schedule, ranks=(without, second))), "invariant 5:", "B 0 0")
    halved = tuple(action._replace(kind="B") if action.kind == "BW" else action for action in first)
    refused(replace(trained, schedule=replace(trained.schedule, ranks=(halved, second))), "invariant 5:", "W 0 0")


def test_5_deadlock(trained: Program) -> None:
    """Stage 0 waits for a gradient before it sends what the gradient is of."""
    first, second = trained.schedule.ranks
    receive = next(action for action in first if action.kind == "RECV")
    waiting = (receive, *(action for action in first if action is not receive))
    broken = replace(trained, schedule=replace(trained.schedule, ranks=(waiting, second)))
    refused(broken, "invariant 5:", "deadlock")


# --- 7: every name refers to something ---------------------------------------------------------------------------


def test_7_template(program: Program) -> None:
    refused(with_region(program, LAYER, template="gone"), f"invariant 7: region {LAYER} has no template")


def test_7_parameter(program: Program) -> None:
    names = ("gone", *program.region(LAYER).parameters[1:])
    refused(with_region(program, LAYER, parameters=names), f"invariant 7: {LAYER} uses unknown parameter gone")


def test_7_table(program: Program) -> None:
    names = ("gone", *program.region(LAYER).shared[1:])
    refused(with_region(program, LAYER, shared=names), f"invariant 7: {LAYER} reads unknown table gone")


def test_7_fit(program: Program) -> None:
    region = program.region(LAYER)
    broken = with_region(program, LAYER, parameters=region.parameters[:-1])
    refused(broken, f"invariant 7: {LAYER} does not fit its template {region.template}")


def test_7_loss(program: Program) -> None:
    last = program.regions[-1]
    renamed = tuple("result" if value == LOSS else value for value in last.outputs)
    refused(with_region(program, last.name, outputs=renamed), "invariant 7: no region makes the loss")


def test_7_stages(program: Program) -> None:
    first = program.stages[0]
    broken = replace(program, stages=(replace(first, regions=first.regions[1:]), *program.stages[1:]))
    refused(broken, "invariant 7: the stages do not hold every region once")
    turned = replace(program, stages=(replace(first, regions=first.regions[::-1]), *program.stages[1:]))
    refused(turned, "invariant 7: stage 0 does not run its regions in order")


def test_7_direction(program: Program) -> None:
    lost = next(message for message in program.messages if message.kind == "F")
    back = replace(lost, source=lost.destination, destination=lost.source)
    refused(replace(program, messages=(*program.messages, back)), "invariant 7: message F 1>0 leads the wrong way")


def test_7_message(program: Program) -> None:
    lost = next(message for message in program.messages if message.kind == "F")
    (value,) = lost.values
    broken = replace(program, messages=tuple(message for message in program.messages if message is not lost))
    refused(broken, f"invariant 7: no message brings {value} from stage 0 to stage 1")


# --- and nothing else --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llava", {"mesh": "pp=3", "freeze": ["vision_tower", "language_model"], "microbatches": 2}),
        ("llava", {"mesh": "pp=4", "freeze": ["*.bias"]}),
        ("plain", {"mesh": "pp=4,dp=2", "schedule": "gpipe"}),
        ("plain", {"mesh": "pp=2", "freeze": ["vision", "audio"]}),
        ("mixed", {"freeze": ["body"]}),
        ("text", {"mesh": "pp=6", "microbatches": 3}),
    ],
    ids=str,
)
@pytest.mark.long_cases("llava-{'mesh': 'pp=3', 'freeze': ['vision_tower', 'language_model'], 'microbatches': 2}")
def test_what_every_pass_leaves_is_sound(models: Models, name: str, options: dict[str, Any]) -> None:
    history = models(name, **options).history()
    assert len(history) == 1 + len(OWN)
    for program in history:
        verify(program)
        assert len({region.name for region in program.regions}) == len(program.regions)


def test_a_broken_pass_is_named(models: Models) -> None:
    """The runner verifies behind every pass: one that loses a region does not get away with it."""
    from csc.passes.runner import after, run

    @dataclass(frozen=True)
    class LoseTheLoss(csc.Pass):
        def __call__(self, program: Program, options: Any) -> Program:
            return replace(program, regions=program.regions[:-1])

    compiled = models("text")
    with pytest.raises(VerificationError, match=r"after pass lose_the_loss: invariant 7: no region makes the loss"):
        run([after(compiled.history(), "differentiate")], [LoseTheLoss()], compiled.options)


def test_sizes_of_shards(models: Models) -> None:
    """Invariant 6: what a rank holds of a parameter is what its regions take, and values have one size everywhere."""
    program = models("text", mesh="tp=2").program
    verify(program)
    name = "layers.1.down.weight"
    assert [p.boxes for p in program.parameters if p.name == name] == [
        (((((0, 16),), ((0, 16),))), ((((0, 16),), ((16, 32),)))),
    ]
    whole = tuple(replace(p, boxes=()) if p.name == name else p for p in program.parameters)
    refused(replace(program, parameters=whole), "invariant 6", "layers.1", "takes layers.1.down.weight as [16, 16]")

    def shorten(graph: fx.Graph, calls: list[fx.Node]) -> None:
        first = g.placeholders(graph)[0]
        with program.fake_mode:
            first.meta["val"] = torch.empty(2, 3, 16)

    template = template_of(program)
    broken = with_template(program, template.name, graph=edited(template.graph, shorten))
    refused(broken, "invariant 6", "layers.0 takes embed_tokens as [2, 3, 16]")
