"""Pass `prune` against the truth: tracing with the parameters already frozen gives the same graph, node for node."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from csc.passes.differentiate import joint_of
from csc.passes.prune import specialise
from csc.passes.simplify import shorter
from csc.passes.views import fewer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from csc.analysis.costs import MATMULS
from csc.analysis.operators.execution import is_view
from csc.ir import graph as g
from csc.ir.program import Program, Template
from tests.compiler.conftest import Models
from tests.tiers import long

FROZEN: dict[str, list[list[str]]] = {
    "llava": [[], ["vision_tower"], ["language_model"], ["vision_tower", "language_model"], ["*.bias"], ["*norm*"]],
    "plain": [[], ["vision", "audio"], ["language"], ["*attention*"], ["*.weight"], ["*.0.*", "*norm.bias"]],
    "mixed": [[], ["body"], ["*.weight"], ["*.bias"], ["project"], ["*.norm.*", "*.conv.bias"]],
}

CASES = [
    long(name, freeze) if number >= 3 else (name, freeze)
    for name, sets in FROZEN.items()
    for number, freeze in enumerate(sets)
]


def without_unused_tangents(graph: fx.Graph) -> fx.Graph:
    """A trace takes a gradient for every output, also for one that no gradient flows through; the pass drops those."""
    copied, _ = g.copy_graph(graph)
    for node in g.placeholders(copied):
        if node.meta["role"][0] == "tangent" and not node.users:
            copied.erase_node(node)
    return copied


def same(pruned: fx.Graph, traced: fx.Graph, template: Template) -> None:
    """Equal up to names, in the same order; if not, say which computations differ."""
    if _other_kernel(pruned, traced, template):
        return
    found, expected = rows(pruned), rows(traced)
    if found != expected:
        ours, theirs = Counter(map(repr, found)), Counter(map(repr, expected))
        raise AssertionError(f"only pruned: {list(ours - theirs)[:5]}\nonly traced: {list(theirs - ours)[:5]}")


def rows(graph: fx.Graph) -> tuple:
    return g.canonical(without_unused_tangents(graph), lambda n: n.meta["role"])


# A linear layer on three-dimensional input that is not contiguous: PyTorch multiplies by bmm instead of mm if the
# weight asks for no gradient (should_fold in ATen's LinearAlgebra.cpp). Nothing else that freezing does adds a node.
OTHER_KERNEL = {"vision_projector", "deep_projector", "head"}


def _other_kernel(pruned: fx.Graph, traced: fx.Graph, template: Template) -> bool:
    ours, theirs = ([g.short_op(n) for n in g.calls(graph)] for graph in (pruned, traced))
    if template.name not in OTHER_KERNEL or "bmm" not in theirs or "bmm" in ours:
        return False
    assert [r is None for r in g.outputs(pruned)] == [r is None for r in g.outputs(traced)]
    return True


def traced_frozen(template: Template, program: Program, dx: tuple[bool, ...], dw: tuple[bool, ...]) -> fx.Graph:
    """The joint graph traced with what dx and dw leave out asking for no gradient."""
    frozen = [j for j, wanted in enumerate(dw) if not wanted]
    constant = [i for i, wanted in enumerate(dx) if not wanted]
    layouts = [n.meta["val"].stride() for n in g.placeholders(template.joint) if n.meta["role"][0] == "tangent"]
    graph = fewer(shorter(joint_of(template, program.fake_mode, frozen, constant, layouts))).joint
    assert graph is not None
    return graph


@pytest.mark.slow
@pytest.mark.parametrize(("name", "freeze"), CASES, ids=str)
@pytest.mark.long_cases("plain-[]")
def test_every_variant_is_what_tracing_it_frozen_gives(models: Models, name: str, freeze: list[str]) -> None:
    program = models(name, freeze=freeze).program
    for variant in program.variants.values():
        template = program.templates[variant.template]
        same(variant.pruned, traced_frozen(template, program, variant.dx, variant.dw), template)


def random_needs(data: st.DataObject, template: Template) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """(dx, dw): any subset of the gradients that there are."""

    def some(there: tuple[bool, ...]) -> tuple[bool, ...]:
        return tuple(data.draw(st.booleans()) if exists else False for exists in there)

    return some(template.activation_gradients), some(template.parameter_gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "template"), [long("llava", "llama_decoder_layer"), long("llava", "clip_encoder_layer"), ("mixed", "body")]
)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_subset_of_a_layer(models: Models, name: str, template: str, data: st.DataObject) -> None:
    program = models(name).program
    chosen = program.templates[template]
    dx, dw = random_needs(data, chosen)
    tangents = tuple(True for _ in chosen.outputs)
    same(specialise(chosen, dx, dw, tangents), traced_frozen(chosen, program, dx, dw), chosen)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_subset_of_any_template(models: Models, data: st.DataObject) -> None:
    program = models(data.draw(st.sampled_from(["llava", "plain", "mixed"]))).program
    chosen = program.templates[data.draw(st.sampled_from(sorted(program.templates)))]
    dx, dw = random_needs(data, chosen)
    same(
        specialise(chosen, dx, dw, tuple(True for _ in chosen.outputs)), traced_frozen(chosen, program, dx, dw), chosen
    )


def output_masks(graph: fx.Graph) -> dict[str, list[bool]]:
    """By op, which of its results a backward op with several of them computes."""
    return {g.short_op(n): list(map(bool, mask)) for n in g.calls(graph) if (mask := _mask(n)) is not None}


def _mask(node: fx.Node) -> Any:
    return g.bind(node).get("output_mask") if "aten" in str(node.target) else None


def test_output_masks_follow_what_is_frozen(models: Models) -> None:
    template = models("mixed").program.templates["body"]

    def masks(*trained: str) -> dict[str, list[bool]]:
        dw = tuple(name in trained for name in template.parameters)
        return output_masks(specialise(template, (False,) * len(template.activations), dw, (True,)))

    assert masks("conv.weight", "conv.bias", "norm.weight", "norm.bias") == {
        "convolution_backward": [False, True, True], "native_layer_norm_backward": [True, True, True],
    }  # fmt: skip
    assert masks("conv.bias", "norm.bias") == {
        "convolution_backward": [False, False, True], "native_layer_norm_backward": [True, False, True],
    }  # fmt: skip
    assert masks("norm.weight") == {"native_layer_norm_backward": [False, True, False]}
    assert masks("linear.weight") == {}


def matmuls_by_nature(program: Program) -> tuple[int, int, int]:
    """(forward, input-gradient, weight-gradient) matmuls of a step.

    A matmul is a weight-gradient one if a parameter's gradient is its result, up to views; any other one of the
    backward computes a gradient of an activation.
    """
    forward = inputs = weights = 0
    for region in program.regions:
        graph, template = program.variants[region.variant].pruned, program.templates[region.template]
        results = g.outputs(graph)
        in_forward = g.ancestors(results[: len(template.outputs)])
        found = {node for node in g.calls(graph) if g.op_name(node) in MATMULS}
        of_weights = {_without_views(r) for r in results[len(template.outputs) + len(template.activations) :] if r}
        forward += len(found & in_forward)
        weights += len(found & of_weights)
        inputs += len(found - in_forward - of_weights)
    return forward, inputs, weights


def _without_views(node: fx.Node) -> fx.Node:
    while is_view(node) or g.op_name(node) == "aten::clone":
        (node,) = node.all_input_nodes
    return node


@pytest.mark.parametrize(
    ("freeze", "inputs", "weights"),
    [
        ([], 43, 43),
        (["vision_tower"], 30, 31),
        (["language_model"], 43, 14),
        (["vision_tower", "language_model"], 30, 2),
    ],
    ids=str,
)
def test_matmul_counts_of_capture_md(models: Models, freeze: list[str], inputs: int, weights: int) -> None:
    """reference/capture.md's model has two vision layers in use, as this one has (the third is dead code)."""
    program = models("llava", freeze=freeze).program
    assert matmuls_by_nature(program) == (43, inputs, weights)
    parts = [program.variants[region.variant].matmuls for region in program.regions]
    split = [sum(p[part] for p in parts) for part in range(3)]
    assert (split[0], split[1] + split[2]) == (43, inputs + weights)


def test_frozen_work_is_gone(models: Models) -> None:
    """Projector only: the vision tower has no backward at all, the language model no weight gradient."""
    program = models("llava", freeze=["vision_tower", "language_model"]).program
    for region in program.regions:
        variant = program.variants[region.variant]
        if "vision_tower" in region.module or "embed_tokens" in region.module:
            assert variant.backward_input is None
            assert variant.backward_weight is None
        elif "language_model.layers" in region.module:
            assert variant.backward_input is not None
            assert variant.backward_weight is None
    assert [r.name for r in program.regions if r.needs_dw] == ["model.multi_modal_projector"]
