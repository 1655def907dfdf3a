"""F, B and W: run one after the other they are the joint graph; none does the work of another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from csc.analysis.operators.execution import is_view
from csc.ir import graph as g
from csc.ir.program import Program, Variant
from tests.compiler import running
from tests.compiler.conftest import Models

CASES = [
    ("llava", []),
    ("llava", ["vision_tower"]),
    ("llava", ["language_model"]),
    ("llava", ["vision_tower", "language_model"]),
    ("llava", ["*.bias", "*norm*"]),
    ("plain", []),
    ("plain", ["vision", "audio"]),
    ("plain", ["language"]),
    ("plain", ["*.weight"]),
    ("mixed", []),
    ("mixed", ["body"]),
    ("text", ["embed_tokens", "*.0.*"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "freeze"), CASES, ids=str)
def test_the_parts_compute_what_the_joint_graph_does(models: Models, name: str, freeze: list[str]) -> None:
    compiled = models(name, freeze=freeze)
    program, checked = compiled.program, 0
    for step in running.regions(program, compiled.model, compiled.example):
        template, variant = program.templates[step.region.template], program.variants[step.region.variant]
        count = len(template.outputs)
        with torch.no_grad():
            expected = running.run(variant.pruned, step.values)
            joint = running.run(template.joint, step.values)
            values, dx, dw = run_parts(variant, step)
        assert all(map(torch.equal, values, expected[:count]))
        gradients = [gradient for gradient in expected[count:] if gradient is not None]
        assert len(gradients) == len(dx) + len(dw)
        assert all(map(torch.equal, [*dx, *dw], gradients))
        # What is left is what the whole joint graph gives, if every gradient comes in.
        if all(here == (i in template.differentiable) for i, here in enumerate(variant.tangents)):
            for wanted, found, whole in zip((*variant.dx, *variant.dw), expected[count:], joint[count:]):
                assert not wanted or torch.equal(found, whole)
        checked += len(gradients)
    assert checked == sum(sum(r.dx) + sum(r.dw) for r in program.regions) > 0


def run_parts(variant: Variant, step: running.Run) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """(outputs, gradients of activations, gradients of parameters) by F, then B, then W."""
    assert variant.forward is not None
    if variant.backward_input is None:
        return list(running.run(variant.forward, step.values)), [], []
    values, saved = running.run(variant.forward, step.values)
    later = {role: v for role, v in step.values.items() if role[0] != "activation"}
    dx, kept = running.run(variant.backward_input, later | packed(variant.backward_input, saved))
    if variant.backward_weight is None:
        return list(values), list(dx), []
    last = {role: v for role, v in later.items() if role[0] != "tangent"}
    dw = running.run(variant.backward_weight, last | packed(variant.backward_weight, kept))
    return list(values), list(dx), list(dw)


def packed(graph: fx.Graph, values: list[torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
    """What an earlier part saved, for the placeholders that take it: all of it, in order."""
    roles = [n.meta["role"] for n in g.placeholders(graph) if n.meta["role"][0] == "saved"]
    return dict(zip(roles, values, strict=True))


def variants(models: Models) -> Iterator[tuple[Program, Variant]]:
    for name, freeze in CASES:
        program = models(name, freeze=freeze).program
        yield from ((program, variant) for variant in program.variants.values())


def roles(graph: fx.Graph) -> set[str]:
    return {node.meta["role"][0] for node in g.placeholders(graph)}


def test_b_holds_nothing_that_only_a_parameter_gradient_needs(models: Models) -> None:
    checked = 0
    for _, variant in variants(models):
        if variant.backward_input is not None:
            dx, _ = g.outputs(variant.backward_input)
            useful = g.ancestors(dx)
            for node in g.calls(variant.backward_input):
                item = len(node.args) == 2 and node.target.__name__ == "getitem" and node.args[0] in useful
                assert node in useful or item, f"{variant.name}: B computes %{node.name} for W alone"
                checked += 1
    assert checked > 100


def test_b_never_waits_for_w(models: Models) -> None:
    """B reads what F saved, parameters, tables and gradients; W reads what B kept, and no gradient that comes in."""
    checked = 0
    for _, variant in variants(models):
        if variant.backward_input is not None:
            assert roles(variant.backward_input) <= {"saved", "parameter", "shared", "tangent"}
            saved = {n.name for n in g.outputs(variant.forward)[1]}
            read = {n.meta["role"][1] for n in g.placeholders(variant.backward_input) if n.meta["role"][0] == "saved"}
            assert read == saved
        if variant.backward_weight is not None:
            assert roles(variant.backward_weight) <= {"saved", "parameter", "shared"}
            kept = {n.name for n in g.outputs(variant.backward_input)[1]}
            read = {n.meta["role"][1] for n in g.placeholders(variant.backward_weight)}
            assert kept <= read
            checked += 1
    assert checked > 20


def test_no_work_is_done_twice(models: Models) -> None:
    """F, B and W share no call but the views and constants that are cheaper to make again."""
    for _, variant in variants(models):
        parts = [p for p in (variant.forward, variant.backward_input, variant.backward_weight) if p is not None]
        names = [{n.name for n in g.calls(p) if not cheap(n)} for p in parts]
        assert sum(map(len, names)) == len(set().union(*names)), variant.name
        whole = {n.name for n in g.calls(variant.pruned) if not cheap(n)}
        assert set().union(*names) == whole, variant.name


def cheap(node: fx.Node) -> bool:
    return is_view(node) or g.short_op(node) in ("scalar_tensor", "full", "zeros", "ones", "arange", "getitem")


def base(node: fx.Node) -> fx.Node:
    """What it is a view of; of a call with several results, each is a value."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def test_a_view_is_saved_instead_of_its_value_or_not_at_all(models: Models) -> None:
    """It has all entries of what it views, and is what the part before has computed for itself."""
    checked, seen = 0, 0
    for _, variant in variants(models):
        by_name = {node.name: node for node in variant.pruned.nodes}
        for part in (variant.forward, variant.backward_input):
            if part is not None and variant.backward_input is not None:
                saved = g.outputs(part)[1] if part is not variant.backward_input or variant.backward_weight else ()
                makers = [base(by_name[node.name]) for node in saved]
                assert len(set(makers)) == len(makers), f"{variant.name} saves a value and a view of it"
                for node, made in zip(saved, makers, strict=True):
                    sizes = [
                        one.meta["val"].numel() for one in (node, made) if isinstance(one.meta["val"], torch.Tensor)
                    ]
                    assert len(set(sizes)) == 1, f"{variant.name} saves %{node.name}, a part of %{made.name}"
                    seen += is_view(by_name[node.name])
                    checked += 1
    assert checked > 50 and seen > 10


def test_saved_values_share_no_memory_with_parameters_or_each_other(models: Models) -> None:
    """On real tensors: what is kept between F and B is kept once."""
    compiled = models("llava")
    program = compiled.program
    with torch.no_grad():
        for step in running.regions(program, compiled.model, compiled.example):
            variant = program.variants[step.region.variant]
            _, saved = running.run(variant.forward, step.values)
            own = [t.untyped_storage().data_ptr() for role, t in step.values.items() if role[0] == "parameter"]
            kept = [t.untyped_storage().data_ptr() for t in saved]
            assert not set(own) & set(kept)
            assert len(kept) == len(set(kept)), variant.name


def test_a_frozen_region_without_anything_trainable_above_has_no_backward(models: Models) -> None:
    program = models("llava", freeze=["vision_tower"]).program
    for region in program.regions:
        variant = program.variants[region.variant]
        assert (variant.backward_input is not None) == (region.needs_dx or region.needs_dw)
        assert (variant.backward_weight is not None) == region.needs_dw
