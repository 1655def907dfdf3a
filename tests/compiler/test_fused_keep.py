"""What F keeps for B where Inductor compiles both: nothing that B's kernels make on the way."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from csc.passes.attention import NAMES

from csc.analysis.costs import call_of, fusible, variant_key, works_of
from csc.cache.keys import program_key
from csc.driver.mesh_choice import choose
from csc.ir import graph as g
from csc.reports.cost_report import report
from csc.reports.verification import verify
from tests.compiler.conftest import Models
from tests.compiler.test_fuse import made as dropping
from tests.compiler.test_fuse import step as stepped
from tests.compiler.test_recompute import recomputed, same, saved
from tests.exactness import FLOAT32

RELATIVE = 1e-5  # of a gradient, in float32, to eager's
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def test_fused_functions_keep_less_where_nothing_is_said(models: Models) -> None:
    plain = models("llava")
    fused = plain.with_options(fuse=True)
    assert recomputed(plain.program) == set()
    assert len(recomputed(fused.program)) >= 8 and saved(fused.program) < 0.6 * saved(plain.program)
    assert recomputed(fused.with_options(recompute="none").program) == set(), "what is said holds"
    layer = "model.language_model.layers.1"
    assert recomputed(plain.program) == recomputed(fused.with_options(recompute={"*": "none"}).program)
    one_kept = fused.with_options(recompute={layer: "none"}).program
    assert recomputed(one_kept) == recomputed(fused.program) - {layer}
    keys = {program_key("trace", one.options, {}) for one in (plain, fused)}
    assert len(keys) == 2, "a program that was planned and divided without fusing is another one"


def test_b_repeats_what_its_kernels_make_on_the_way(models: Models) -> None:
    """No product, no look-up, and no reduction whose small result can be kept."""
    program = models("llava", fuse=True).program
    again = [
        node
        for variant in program.variants.values() if variant.backward_input is not None
        for node in g.calls(variant.backward_input) if node.meta.get("rematerialised") and call_of(node) is not None
    ]  # fmt: skip
    names = {g.op_name(node) for node in again}
    assert {"aten::silu", "aten::gelu"} <= names and all(map(fusible, again))
    assert "aten::mean" not in names, "one number a token, over all that is read"
    assert all(variant.rematerialised == 0 for variant in program.variants.values())


def test_attention_adds_in_an_order_of_its_own_where_bits_may_differ(models: Models) -> None:
    plain = models("llava")
    for one, fused in ((plain, False), (plain.with_options(fuse=True), True), (plain, False)):
        calls = [
            g.bind(node)
            for variant in one.program.variants.values()
            for graph in (variant.forward, variant.backward_input) if graph is not None
            for node in g.calls(graph) if g.op_name(node) in NAMES
        ]  # fmt: skip
        masked = [call["mask"] is not None for call in calls]
        assert set(masked) == {True, False}, "the language model's and the encoder's"
        assert [call["reordered"] for call in calls] == [fused and one for one in masked]


@pytest.mark.long
def test_the_choice_by_name_keeps_the_bits_of_plain_functions(models: Models) -> None:
    plain = models("llava", freeze=["vision_tower"])
    same(plain, plain.with_options(recompute="elementwise"))


@pytest.mark.long
def test_auto_starts_from_what_fusing_keeps(models: Models) -> None:
    fused = models("llava", mesh="pp=2", fuse=True, schedule="gpipe", microbatches=2)
    peak = max(fused.program.plan.peak_memory)
    roomy = fused.with_options(recompute="auto", memory=int(1.1 * peak)).program
    assert saved(roomy) == saved(fused.program)
    tight = fused.with_options(recompute="auto", memory=int(0.93 * peak)).program
    assert max(tight.plan.peak_memory) <= 0.93 * peak and saved(tight) < saved(fused.program)


@pytest.mark.long
def test_costs_and_the_choice_of_a_mesh_are_of_fused_functions(models: Models) -> None:
    fused = models("llava", fuse=True)
    program = fused.program
    variant = program.variants[program.region("model.language_model.layers.1").variant]
    plain, together = works_of(variant), works_of(variant, fuse=True)
    for one, other in zip(plain, together):
        assert one.flops == other.flops
        assert other.kernels < one.kernels and other.bytes < one.bytes
    assert variant_key(variant) != variant_key(variant, fuse=True)
    assert sum(row.figures["saved"] for row in report(fused).regions) == saved(program)
    best = choose(fused, 2, None, 5.0, lambda layout: None).rows[0]
    assert best.recompute == "none" and best.fits


# --- with Inductor: minutes --------------------------------------------------------------------------------------


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llava", {"mesh": "pp=2", "microbatches": 2}),
        ("llava", {"mesh": "dp=2,pp=2", "freeze": ["vision_tower"]}),
        ("llava", {"mesh": "cp=2"}),
        ("llava", {"mesh": "pp=2", "recompute": {"language_model": "full"}, "schedule": "zb-h1"}),
        ("llava", {"loss_chunk": 8}),
        ("llava_tied", {"mesh": "pp=2"}),
        ("llava_lora", {"mesh": "pp=2"}),
        ("whisper", {"freeze": ["audio_tower"]}),
        ("plain", {"mesh": "pp=3"}),
    ],
)
def test_gradients_are_eagers(models: Models, name: str, options: dict[str, Any]) -> None:
    compiled = models(name, fuse=True, **options)
    assert recomputed(compiled.program)
    found = verify(compiled)
    assert not found.params_missing and not found.params_unexpected and found.params_checked
    assert found.loss_rel <= RELATIVE and found.grad_rel_max <= RELATIVE


@pytest.mark.long
@needs_compiler
def test_dropout_has_the_masks_of_plain_functions() -> None:
    """B repeats a norm and an activation around a dropout, whose mask comes from the seed."""
    expected, found = stepped(dropping()), stepped(dropping(fuse=True))
    assert recomputed(dropping(fuse=True).program)
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= FLOAT32 * float(value.norm()), name
