"""Recomputation: the same bits for less memory; what F keeps, what it costs, and what cannot be asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from csc.passes.recompute import saves_of
from torch import nn

import csc
from csc.analysis.costs import variant_cost, variant_key
from csc.analysis.operators.execution import maker
from csc.driver.compiled import CompiledModel
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.program import Program
from csc.reports.cost_report import report
from csc.reports.verification import verify
from tests.compiler import running, test_opaque
from tests.compiler.conftest import Models
from tests.compiler.test_costs import storages
from tests.compiler.test_split import packed
from tests.models import hf
from tests.tiers import long

pytestmark = pytest.mark.slow


def step(compiled: CompiledModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and every gradient of one step."""
    compiled.model.zero_grad()
    loss = compiled.train_step(compiled.example)
    found = {name: p.grad for name, p in compiled.model.named_parameters() if p.grad is not None}
    compiled.model.zero_grad()
    return loss, found


def same(one: CompiledModel, other: CompiledModel) -> None:
    """Loss and gradients are there and equal bit for bit."""
    (loss, found), (expected_loss, expected) = step(other), step(one)
    assert torch.equal(loss, expected_loss)
    assert found.keys() == expected.keys() != set()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def saved(program: Program) -> int:
    return sum(variant_cost(program.variants[region.variant]).saved for region in program.regions)


def recomputed(program: Program) -> set[str]:
    return {r.name for r in program.regions if program.variants[r.variant].saves is not None}


@pytest.mark.parametrize("choice", ["full", long("selective")])
@pytest.mark.parametrize(
    ("mesh", "schedule", "freeze"),
    [
        ("pp=1", "auto", None),
        ("pp=2", "1f1b", ["vision_tower"]),
        ("pp=3", "zb-h1", ["vision_tower", "language_model"]),
        ("pp=2", "interleaved-zb", None),
    ],
)
def test_llava_bit_for_bit(models: Models, choice: str, mesh: str, schedule: str, freeze: Any) -> None:
    options: dict[str, Any] = {"mesh": mesh, "schedule": schedule, "freeze": freeze, "microbatches": 2}
    same(models("llava", **options), models("llava", **options, recompute=choice))


@pytest.mark.parametrize("freeze", [None, long(["vision"])])
def test_skips_and_threaded_gradients_bit_for_bit(models: Models, freeze: Any) -> None:
    plain = models("plain", mesh="pp=3", freeze=freeze)
    same(plain, plain.with_options(recompute="full"))
    assert verify(plain.with_options(recompute="full")).grad_rel_max == 0


@pytest.mark.long
def test_vision_audio_and_text_bit_for_bit() -> None:
    valm = csc.compile(hf.valm(), mesh="pp=3", example=hf.valm_batch(4), microbatches=2, freeze=["audio_tower"])
    for schedule in ("zb-h1", "gpipe"):
        scheduled = valm.with_options(schedule=schedule)
        same(scheduled, scheduled.with_options(recompute="full"))


def test_what_f_keeps_is_what_the_costs_say(models: Models) -> None:
    """Run every region: the memory that F leaves, and what B makes of it for W, are those of the estimate."""
    compiled = models("llava", freeze=["vision_tower"], recompute="full")
    measured = 0
    for run in running.regions(compiled.program, compiled.model, compiled.example):
        variant = compiled.program.variants[run.region.variant]
        if variant.backward_input is None:
            continue
        cost = variant_cost(variant)
        there = storages([t for role, t in run.values.items() if role[0] in ("parameter", "shared")])
        with torch.no_grad():
            _, kept = running.run(variant.forward, run.values)
            left = {role: t for role, t in run.values.items() if role[0] != "activation"}
            _, for_w = running.run(variant.backward_input, left | packed(variant.backward_input, kept))
        assert cost.saved == _bytes(kept, there)
        assert cost.stashed == _bytes(for_w, there)
        measured += _bytes(kept, there)
    assert measured == saved(compiled.program)
    assert measured * 8 < saved(models("llava", freeze=["vision_tower"]).program)


def _bytes(tensors: Iterable[torch.Tensor], there: dict[int, int]) -> int:
    return sum(size for address, size in storages(list(tensors)).items() if address not in there)


def test_full_keeps_what_enters_and_b_runs_f_again(models: Models) -> None:
    plain, again = (models("llava", freeze=["vision_tower"], recompute=choice).program for choice in ("none", "full"))
    assert recomputed(plain) == set()
    assert recomputed(again) == {r.name for r in plain.regions if r.needs_dx or r.needs_dw}
    for before, after in zip(plain.regions, again.regions):
        one, two = plain.variants[before.variant], again.variants[after.variant]
        if two.saves is None:
            assert variant_key(one) == variant_key(two)
            continue
        _, kept = g.outputs(two.forward)
        assert {maker(node).meta["role"][0] for node in kept} <= {"activation"}
        assert two.flops == (one.flops[0], one.flops[1] + two.rematerialised, one.flops[2])
        assert two.rematerialised <= one.flops[0]
        assert variant_cost(two).rematerialised <= variant_cost(one).saved + variant_cost(one).stashed
    layer = again.variants[again.region("model.language_model.layers.1").variant]
    assert 0 < layer.flops[0] - layer.rematerialised < layer.flops[0] / 3  # the last matmul is what B does not need


def test_selective_runs_no_matmul_again(models: Models) -> None:
    plain, again = (models("llava", recompute=choice).program for choice in ("none", "selective"))
    assert all(variant.rematerialised == 0 for variant in again.variants.values())
    assert sum(map(sum, (v.flops for v in plain.variants.values()))) == sum(
        map(sum, (v.flops for v in again.variants.values()))
    )
    assert saved(again) < 0.7 * saved(plain)


def test_choices_by_region(models: Models) -> None:
    """Components, regions and globs; later entries go before earlier ones; names say what to keep."""
    layer = "model.language_model.layers."
    choices = {"language_model": "full", f"{layer}1": "none", f"{layer}[23]": ["post_attention_layernorm"]}
    plain = models("llava", mesh="pp=2", freeze=["vision_tower"])
    compiled = plain.with_options(recompute=choices)
    program = compiled.program
    assert f"{layer}0" in recomputed(program) and f"{layer}1" not in recomputed(program)
    assert not any("vision" in name for name in recomputed(program))
    _, kept = g.outputs(program.variants[program.region(f"{layer}2").variant].forward)
    assert "post_attention_layernorm" in {maker(node).name for node in kept}
    assert program.region(f"{layer}2").variant == program.region(f"{layer}3").variant
    same(plain, compiled)
    repeated = plain.with_options(recompute=saves_of(program)).program
    assert [program.variants[r.variant].saves for r in program.regions] == [
        repeated.variants[r.variant].saves for r in repeated.regions
    ]


def test_auto_fits_the_memory(models: Models) -> None:
    cuts = ["model.language_model.layers.2"]
    plain = models("llava", mesh="pp=2", freeze=["vision_tower"], microbatches=2, schedule="gpipe", cuts=cuts)
    peak = max(plain.program.plan.peak_memory)
    tight = int(0.9 * peak)
    with pytest.raises(InputError, match="more memory"):
        _ = plain.with_options(memory=tight).program
    compiled = plain.with_options(memory=tight, recompute="auto")
    assert max(compiled.program.plan.peak_memory) <= tight
    assert recomputed(compiled.program) and saved(compiled.program) < saved(plain.program)
    same(plain, compiled)
    roomy = plain.with_options(memory=int(2 * peak), recompute="auto").program
    assert recomputed(roomy) == set()
    rows = {row.name: row.figures for row in report(compiled).regions}
    assert sum(row["saved"] for row in rows.values()) == saved(compiled.program)


def test_auto_needs_a_limit_that_something_fits(models: Models) -> None:
    with pytest.raises(InputError, match="what a rank may hold"):
        _ = models("llava", recompute="auto").program
    with pytest.raises(InputError, match="fits"):
        _ = models("llava", recompute="auto", memory=1000).program


def test_choices_that_cannot_be(models: Models) -> None:
    for choice, says in (("ful", "one of none"), ({"vision_towr": "full"}, "vision_tower"), ({"*": 3}, "map names")):
        with pytest.raises(InputError, match=says):
            _ = models("llava", recompute=choice).program
    with pytest.raises(InputError, match="makes no value 'act'"):
        _ = models("llava", recompute={"model.language_model.layers.0": ["act"]}).program


class Noisy(nn.Module):
    """Dropout between two linears, in a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def test_dropout_is_not_drawn_again() -> None:
    torch.manual_seed(0)
    plain = csc.compile(Noisy(), example={"x": torch.randn(4, 8)})
    found = []
    for compiled in (plain, plain.with_options(recompute="full")):
        torch.manual_seed(1)
        found.append(step(compiled))
    assert recomputed(compiled.program) != set()
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_an_opaque_module_runs_once() -> None:
    """Its draws come from torch's generator: what it returned is kept."""
    plain = csc.compile(test_opaque.model(0.5), example=test_opaque.batch(), mesh="pp=2")
    found = []
    for compiled in (plain, plain.with_options(recompute="full")):
        torch.manual_seed(1)
        found.append(step(compiled))
    assert recomputed(compiled.program) != set()
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_the_layer_file_shows_it(models: Models, tmp_path: Any) -> None:
    compiled = models("llava", mesh="pp=2", freeze=["vision_tower"], recompute="full")
    text = (compiled.write(tmp_path / "program") / "layers/llama_decoder_layer_recomputed.py").read_text()
    backward = text.split("def backward_input")[1].split("def backward_weight")[0]
    assert "Saves    hidden_states\n" in text and "calls of F are rematerialised in B" in text
    order = [backward.index(mark) for mark in ("# F rematerialised", "act_fn = aten.silu", "# B:", "d_mlp_mul_mul")]
    assert order == sorted(order)
    assert "saved = (hidden_states,)" in text
