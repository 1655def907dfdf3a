"""Costs against PyTorch's own counter, real memory and hand counts; their expressions against other sizes."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from csc.analysis.costs import (
    KernelCall,
    Kernels,
    RegionCost,
    basis,
    region_costs,
    seconds,
    value_bytes,
    variant_cost,
    variant_key,
)
from csc.analysis.hardware import hardware
from csc.capture.trace.traced_model import loss_of
from csc.commands import main as cli
from csc.commands.tables import cost_tables
from csc.driver.compiled import CompiledModel
from csc.driver.new_model import compiled_model
from csc.ir.program import Options, Program
from csc.reports.cost_report import CostReport, report
from csc.reports.varied_sizes import Sampler, lengths, sampler
from tests.compiler import running, small
from tests.compiler.conftest import MODELS
from tests.compiler.test_split import packed
from tests.models import hf
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")

CAPTURES: dict[str, Sampler] = {}


def whole_llava() -> nn.Module:
    """LLaVA with every layer in use: eager also runs the last vision layer, whose features LLaVA leaves aside."""
    model = hf.llava()
    model.config.vision_feature_layer = -1
    return model


def half_batch(samples: int) -> dict[str, torch.Tensor]:
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in small.mixed_batch(samples).items()}


OWN = {"llava": (whole_llava, hf.llava_batch), "mixed_bf16": (lambda: small.mixed().bfloat16(), half_batch)}


@cache
def divided(name: str, freeze: tuple[str, ...] = ()) -> tuple[nn.Module, Mapping[str, torch.Tensor], Program]:
    """(model, batch, Program after pass split); one capture for all frozen sets."""
    make, batch = {**MODELS, **OWN}[name]
    if name not in CAPTURES:
        CAPTURES[name] = Sampler(make(), batch(2), Options())
    base = CAPTURES[name]
    return base.model, base.microbatch, replace(base, options=Options(freeze=freeze), programs={}).program()


def costs(program: Program, **options: bool) -> list[RegionCost]:
    return [variant_cost(program.variants[region.variant], **options) for region in program.regions]


# --- FLOPs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [long("llava"), "plain"])
def test_forward_flops_are_those_that_torch_counts(name: str) -> None:
    """Eager, with attention as the two matmuls that it is, which torch counts by itself."""
    model, batch, program = divided(name)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(**batch)
    assert sum(cost.forward.flops for cost in costs(program)) == counter.get_total_flops() > 0


def _flash(query: tuple, key: tuple, value: tuple, *_: object, **__: object) -> int:
    return sdpa_flop_count(query, key, value)


def _flash_backward(gradient: tuple, query: tuple, key: tuple, value: tuple, *_: object, **__: object) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "freeze"),
    [
        ("llava", ()),
        long("llava", ("vision_tower",)),
        ("llava", ("vision_tower", "language_model")),
        ("plain", ()),
        long("plain", ("language",)),
        ("plain", ("vision", "audio")),
    ],
)
@pytest.mark.long_cases("llava-freeze0", "plain-freeze3", "plain-freeze5")
def test_training_flops_are_those_that_torch_counts(name: str, freeze: tuple[str, ...]) -> None:
    """Eager forward and backward with the same frozen set; torch's formula for flash attention, bound to the CPU's."""
    model, batch, program = divided(name, freeze)
    trainable = {p.name for p in program.parameters if p.trainable}
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key in trainable)
    mapping = {FLASH: _flash, FLASH_BACKWARD: _flash_backward}
    try:
        with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
            loss_of(model(**batch)).backward()
    finally:
        model.zero_grad()
        model.requires_grad_(True)
    found = costs(program)
    total = sum(c.forward.flops + c.backward_input.flops + c.backward_weight.flops for c in found)
    assert total == counter.get_total_flops()
    trained = [c.backward_weight.flops for c, region in zip(found, program.regions) if region.needs_dw]
    assert sum(trained) == sum(c.backward_weight.flops for c in found) > 0


class PlainAttention(nn.Module):
    """Softmax attention written out as two matmuls."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.fused = fused

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        if self.fused:
            return self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])
        return self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)


class Attentive(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.attention = PlainAttention(fused)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.attention(self.embed(tokens))).flatten(0, 1), labels.flatten())


ROWS, LENGTH, WIDTH = 2, 6, 16
LINEARS = 2 * ROWS * LENGTH * WIDTH * 4 * WIDTH
PRODUCTS = 2 * 2 * ROWS * LENGTH * LENGTH * WIDTH


@pytest.mark.slow
@pytest.mark.parametrize(("fused", "back"), [(False, 2.0), (True, 2.5)])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_linear_costs_once_and_attention_twice(fused: bool, back: float, frozen: bool) -> None:
    """B of a frozen layer: 1 x its linears and 2 x its attention products (and QK^T again in a fused kernel)."""
    batch = {
        "tokens": torch.ones(ROWS, LENGTH, dtype=torch.int64),
        "labels": torch.ones(ROWS, LENGTH, dtype=torch.int64),
    }
    freeze = ("attention", "head") if frozen else None
    program = Sampler(Attentive(fused), batch, Options(freeze=freeze)).program()
    (found,) = (c for c, region in zip(costs(program), program.regions) if region.name == "attention")
    assert found.forward.flops == LINEARS + PRODUCTS
    assert found.backward_input.flops == LINEARS + back * PRODUCTS
    assert found.backward_weight.flops == (0 if frozen else LINEARS)


def test_seven_linears() -> None:
    """Three encoder layers, a projector, three LLM layers, all equal: B + W in units of one forward."""

    class Seven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
            self.projector = nn.Linear(8, 8, bias=False)
            self.llm = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in (*self.encoder, self.projector, *self.llm):
                x = layer(x)
            return x.pow(2).mean()

    source = Sampler(Seven(), {"x": torch.ones(4, 8)}, Options())
    one = 2 * 4 * 8 * 8
    for freeze, units in ((("encoder", "llm"), 4), ((), 13), (("llm",), 10), (("encoder",), 7)):
        found = costs(replace(source, options=Options(freeze=freeze), programs={}).program())
        assert sum(c.forward.flops for c in found) == 7 * one
        assert sum(c.backward_input.flops + c.backward_weight.flops for c in found) == units * one


# --- bytes ---------------------------------------------------------------------------------------------------------


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of the memory behind tensors."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


CASES = [
    ("llava", ()),
    ("llava", ("vision_tower", "language_model")),
    ("mixed_bf16", ("body",)),
    ("plain", ()),
    ("plain", ("vision", "audio")),
    ("mixed", ("*.bias",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "freeze"), CASES)
def test_saved_and_kept_are_the_memory_that_stays(name: str, freeze: tuple[str, ...]) -> None:
    """Run every region: the distinct storages that F leaves to B and B to W, parameters and tables apart."""
    model, batch, program = divided(name, freeze)
    checked = 0
    for step, cost in zip(running.regions(program, model, batch), costs(program), strict=True):
        variant = program.variants[step.region.variant]
        if variant.backward_input is None:
            assert (cost.saved, cost.stashed, cost.has_b) == (0, 0, False)
            continue
        there = storages([t for role, t in step.values.items() if role[0] in ("parameter", "shared")])
        with torch.no_grad():
            values, saved = running.run(variant.forward, step.values)
            left = {role: t for role, t in step.values.items() if role[0] != "activation"}
            _, kept = running.run(variant.backward_input, left | packed(variant.backward_input, saved))
        held = storages(list(saved))
        assert cost.saved == sum(size for address, size in held.items() if address not in there)
        held = storages(list(kept))
        assert cost.stashed == sum(size for address, size in held.items() if address not in there)
        assert cost.outputs == tuple(v.nbytes for v in values)
        checked += 1
    assert checked > 1


@pytest.mark.slow
def test_values_are_as_large_as_they_are() -> None:
    model, batch, program = divided("plain", ("vision",))
    found = value_bytes(program)
    needed = {v for region in program.regions for v, dx in zip(region.activations, region.dx) if dx}
    for step in running.regions(program, model, batch):
        for i, value in enumerate(step.region.activations):
            size = step.values["activation", str(i)].nbytes
            assert found[value] == (size, size if value in needed else 0)
    assert {v for region in program.regions for v in region.outputs} == found.keys()
    assert found["vision.layers.0"][1] == 0 < found["audio"][1]


def test_state() -> None:
    """AdamW in the parameter's dtype; with a master copy, three float32 numbers for each trained bf16 one."""
    _, _, program = divided("mixed_bf16", ("body.norm",))
    trainable = {p.name: p.trainable for p in program.parameters}
    numel = {p.name: p.numel for p in program.parameters}
    for region, plain, master in zip(program.regions, costs(program), costs(program, master=True)):
        every = sum(numel[p] for p in region.parameters)
        trained = sum(numel[p] for p, dw in zip(region.parameters, region.dw) if dw)
        assert (plain.parameters, plain.gradients, plain.optimizer) == (2 * every, 2 * trained, 4 * trained)
        assert (master.parameters, master.gradients, master.optimizer) == (2 * every, 2 * trained, 12 * trained)
        assert master.state - plain.state == 8 * trained
        assert trained == sum(numel[p] for p in region.parameters if trainable[p])


def test_bytes_moved_of_a_linear_layer() -> None:
    """x (4 x 8), w (8 x 8), y: F reads x and w and writes y; its views move nothing."""
    source = Sampler(nn.Sequential(nn.Linear(8, 8, bias=False), Mean()), {"input": torch.ones(4, 8)}, Options())
    first = costs(source.program())[0]
    assert [call.op for call in first.forward.calls] == ["aten::mm"]
    assert first.forward.bytes == 4 * (32 + 64 + 32)
    assert first.backward_weight.bytes == 4 * (32 + 32 + 64)
    assert first.forward.kernels == first.backward_weight.kernels == 1


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean()


def test_a_lookup_reads_rows_and_not_the_table() -> None:
    _, _, program = divided("mixed")
    body = next(c for c, r in zip(costs(program), program.regions) if r.name == "body")
    (lookup,) = (call for call in body.forward.calls if call.op == "aten::embedding")
    rows = 2 * 6
    assert lookup.bytes == rows * 8 + 2 * rows * small.WIDTH * 4


# --- seconds -------------------------------------------------------------------------------------------------------

calls = st.builds(
    KernelCall,
    st.just("aten::mm"),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(0, 10**15),
    st.integers(0, 10**12),
)
profiles = st.sampled_from(["a40", "a100", "h100", "h200", "cpu"]).map(hardware)


@given(st.lists(calls), st.lists(calls), profiles)
def test_seconds_are_a_roofline(first: list[KernelCall], second: list[KernelCall], profile: object) -> None:
    work, more = Kernels(tuple(first)), Kernels(tuple(second))
    expected = 0.0
    for call in first:
        compute = call.flops / (profile.peak[call.dtype] * profile.matmul_efficiency * profile.share(call.flops))
        expected += max(compute, call.bytes / (profile.bandwidth * profile.bandwidth_efficiency)) + profile.launch
    assert seconds(work, profile) == pytest.approx(expected, rel=1e-9)
    assert seconds(work + more, profile) == pytest.approx(seconds(work, profile) + seconds(more, profile), rel=1e-9)
    assert seconds(work, profile) >= work.bytes / profile.reached_bandwidth * (1 - 1e-9)


@pytest.mark.slow
def test_region_costs_follow_the_regions() -> None:
    _, _, program = divided("llava", ("vision_tower", "language_model"))
    profile = hardware("a100")
    found = region_costs(program, profile)
    assert [(c.name, c.component) for c in found] == [(r.name, r.component) for r in program.regions]
    for cost, region, counted in zip(found, program.regions, costs(program)):
        assert cost.has_b == (region.needs_dx or region.needs_dw)
        assert cost.has_w == region.needs_dw
        assert (cost.saved, cost.stashed, cost.state) == (counted.saved, counted.stashed, counted.state)
        assert cost.forward == seconds(counted.forward, profile) > 0
        assert (cost.backward_input > 0) == region.needs_dx or not counted.backward_input.calls
        assert (cost.backward_weight > 0) == region.needs_dw


@pytest.mark.slow
def test_measured_seconds_go_before_the_model() -> None:
    _, _, program = divided("llava", ("vision_tower", "language_model"))
    layers = [i for i, region in enumerate(program.regions) if ".language_model.layers." in region.name]
    (variant,) = {program.regions[i].variant for i in layers}
    key = variant_key(program.variants[variant])
    profile = hardware("a100")
    measured = replace(profile, measured={key: (1.0, 2.0, 3.0)}, measured_on="a device")
    model, found = region_costs(program, profile), region_costs(program, measured)
    for position, (modelled, cost) in enumerate(zip(model, found)):
        times = (cost.forward, cost.backward_input, cost.backward_weight)
        expected = (modelled.forward, modelled.backward_input, modelled.backward_weight)
        assert times == ((1.0, 2.0, 3.0) if position in layers else expected)
    assert basis(program, profile) == "model of a100"
    others = len(program.variants) - 1
    assert basis(program, measured) == f"measured on a device, model of a100 for {others} of {others + 1} variants"
    every = {variant_key(v): (1.0, 1.0, 1.0) for v in program.variants.values()}
    assert basis(program, replace(measured, measured=every)) == "measured on a device"


def test_a_key_names_what_is_computed() -> None:
    """Equal from run to run; another with other gradients or sizes."""
    divided("mixed")
    base = CAPTURES["mixed"]
    keys = []
    for freeze, copies in (((), 1), ((), 1), (("body",), 1), ((), 2)):
        program = replace(base, options=Options(freeze=freeze), programs={}).program(copies)
        (body,) = (r for r in program.regions if r.name == "body")
        keys.append(variant_key(program.variants[body.variant]))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


# --- expressions ---------------------------------------------------------------------------------------------------


class Speaking(nn.Module):
    """Frames of sound in front of text, one layer of causal attention over both."""

    def __init__(self) -> None:
        super().__init__()
        self.audio_tower = nn.Linear(3, WIDTH)
        self.embed = nn.Embedding(32, WIDTH)
        self.language_model = PlainAttention(fused=True)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, sound: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        speech = self.audio_tower(sound)
        hidden = self.language_model(torch.cat([speech, self.embed(tokens)], dim=1))
        return F.cross_entropy(self.head(hidden[:, speech.shape[1] :]).flatten(0, 1), labels.flatten())


def speaking_batch(samples: int, text: int, audio: int) -> dict[str, torch.Tensor]:
    tokens = torch.arange(text).remainder(32).expand(samples, text).contiguous()
    return {"sound": torch.randn(samples, audio, 3), "tokens": tokens, "labels": tokens.clone()}


@pytest.fixture(scope="module")
def speaking() -> tuple[CompiledModel, CostReport]:
    compiled = compiled_model(Speaking(), Options(), speaking_batch(2, 7, 5))
    return compiled, report(compiled, symbolic=True)


@pytest.mark.slow
def test_what_varies(speaking: tuple[CompiledModel, CostReport]) -> None:
    """The number of mel bins does not: the model fixes it."""
    _, found = speaking
    assert dict(found.sizes) == {"batch": 2, "text": 7, "audio": 5}
    assert found.meanings["text"] == "tokens.shape[1], labels.shape[1]"
    assert found.meanings["audio"] == "sound.shape[1]"


@pytest.mark.slow
def test_expressions_hold_at_the_example(speaking: tuple[CompiledModel, CostReport]) -> None:
    _, found = speaking
    for row in (*found.components, *found.regions):
        assert row.expressions.keys() == row.figures.keys()
        for name, expression in row.expressions.items():
            assert {str(s) for s in expression.free_symbols} <= found.sizes.keys()
            assert at(expression, found.sizes) == row.figures[name]


def at(expression: sympy.Expr, sizes: Mapping[str, int]) -> sympy.Expr:
    return expression.subs({symbol: sizes[str(symbol)] for symbol in expression.free_symbols})


@pytest.mark.slow
def test_expressions_predict_other_sizes(speaking: tuple[CompiledModel, CostReport]) -> None:
    """Of a new capture of another batch, of sizes that no sample had."""
    compiled, found = speaking
    sizes = {"batch": 5, "text": 41, "audio": 12}
    other = report(compiled_model(compiled.model, Options(), speaking_batch(5, 41, 12)))
    for row, there in zip((*found.components, *found.regions), (*other.components, *other.regions), strict=True):
        assert {name: at(e, sizes) for name, e in row.expressions.items()} == there.figures


@pytest.mark.slow
def test_expressions_are_those_of_hand(speaking: tuple[CompiledModel, CostReport]) -> None:
    _, found = speaking
    batch, text, audio = (sympy.Symbol(name, integer=True, positive=True) for name in ("batch", "text", "audio"))
    rows = {row.name: row.expressions for row in found.regions}
    both = text + audio
    linears, products = 2 * batch * both * 4 * WIDTH**2, 2 * 2 * batch * both**2 * WIDTH
    attention = rows["language_model"]
    assert sympy.expand(attention["F flops"] - linears - products) == 0
    assert sympy.expand(attention["B flops"] - linears - products * sympy.Rational(5, 2)) == 0
    assert sympy.expand(attention["W flops"] - linears) == 0
    assert sympy.expand(attention["messages"] - 4 * batch * both * WIDTH) == 0
    assert attention["parameters"] == 4 * (4 * WIDTH**2 + 4 * WIDTH)
    assert rows["audio_tower"]["F flops"] == 2 * 3 * WIDTH * batch * audio


class Aligned(nn.Module):
    """A signal with a sample for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 3), nn.Linear(3, 32)

    def forward(self, signal: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens) + signal.transpose(1, 2)).pow(2).mean()


def aligned_batch(samples: int, length: int) -> dict[str, torch.Tensor]:
    return {"signal": torch.ones(samples, 3, length), "tokens": torch.ones(samples, length, dtype=torch.int64)}


@pytest.mark.slow
def test_lengths_that_grow_together() -> None:
    """Neither the signal nor the text grows alone. One row: expressions from two rows on."""
    compiled = compiled_model(Aligned(), Options(), aligned_batch(1, 6))
    found = report(compiled, symbolic=True)
    assert dict(found.sizes) == {"batch": 1, "text": 6}
    assert found.meanings["text"] == "tokens.shape[1], signal.shape[2]"
    assert found.meanings["batch"] == "rows of a microbatch, two or more"
    other = report(compiled_model(compiled.model, Options(), aligned_batch(4, 9)))
    for row, there in zip(found.regions, other.regions, strict=True):
        assert {name: at(e, {"batch": 4, "text": 9}) for name, e in row.expressions.items()} == there.figures


@pytest.mark.slow
def test_a_text_model_varies_in_text_alone() -> None:
    source = sampler(compiled_model(small.text(1), Options(), small.text_batch(4)))
    (length,) = lengths(source)
    assert (length.name, length.size, length.traced) == ("text", 8, True)
    assert len(source.captures) == 1  # one capture serves every length of text
    grown = source.program(1, {length: 31})
    assert {item.shape for item in grown.inputs} == {(4, 31)}


@pytest.mark.slow
def test_a_tied_parameter_counts_once_in_a_component() -> None:
    model = small.text(2)
    model.lm_head.weight = model.embed_tokens.weight
    found = report(compiled_model(model, Options(), small.text_batch(2)))
    (component,) = found.components
    table = 4 * small.VOCABULARY * small.WIDTH
    assert component.figures["parameters"] == sum(4 * p.numel() for p in model.parameters())
    assert sum(row.figures["parameters"] for row in found.regions) == component.figures["parameters"] + table
    assert component.figures["optimizer"] == 2 * component.figures["gradients"]


# --- the command ---------------------------------------------------------------------------------------------------

TARGET = """
import csc, torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.head(self.encoder(x).relu()).pow(2).mean()

@csc.compile(example={"x": torch.ones(2, 8)}, freeze=["encoder"])
def model():
    return Model()
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """run("cost", "--json"): (exit code, output, errors) of the command on a small model."""
    (tmp_path / "train.py").write_text(TARGET)

    def call(command: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["csc", command, f"{tmp_path}/train.py:model", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield call


def test_csc_cost(run: Run) -> None:
    code, out, _ = run("cost", "--json", "--symbolic", "--hardware", "a100")
    assert code == 0
    found = json.loads(out)
    assert found["sizes"] == {"batch": 2}  # the number of features is fixed
    assert found["seconds"] == "model of a100"
    rows = {row["name"]: row for row in found["regions"]}
    assert rows["head"]["figures"]["F flops"] == 2 * 2 * 16 * 8
    assert rows["head"]["expressions"]["F flops"] == "256*batch"
    assert rows["encoder"]["figures"]["W flops"] == rows["encoder"]["figures"]["optimizer"] == 0
    assert rows["head"]["seconds"]["W"] > 0 == rows["encoder"]["seconds"]["W"]
    assert rows["head"]["figures"]["optimizer"] == 2 * 4 * (16 * 8 + 8)


def test_csc_cost_with_recomputation(run: Run) -> None:
    plain, again = (json.loads(run("cost", "--json", *more)[1]) for more in ((), ("--recompute", "full")))
    assert plain["seconds"] == again["seconds"] == ""
    before, after = ({row["name"]: row for row in found["regions"]}["head"] for found in (plain, again))
    assert after["figures"]["B flops"] == before["figures"]["B flops"] + before["figures"]["F flops"]
    assert after["figures"]["rematerialised"] > 0 == before["figures"]["rematerialised"]
    assert after["seconds"] is None and after["expressions"] == {}


@pytest.mark.slow
def test_csc_cost_as_tables(run: Run, speaking: tuple[CompiledModel, CostReport]) -> None:
    code, out, _ = run("cost", "--hardware", "h100")
    assert code == 0
    for text in ("model of h100", "gradient messages", "batch = 2: rows of a microbatch", "head"):
        assert text in out
    console = Console(width=160, file=io.StringIO())
    for table in cost_tables(speaking[1]):
        console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "96*audio*batch" in shown and "1024*batch*text" in shown
    assert "model of" not in shown  # no hardware was named


def test_csc_cost_with_wrong_hardware(run: Run, tmp_path: Path) -> None:
    code, _, errors = run("cost", "--hardware", "h1000")
    assert code == 2 and "did you mean h100" in errors
    (tmp_path / "mine.toml").write_text("memory = -1")
    code, _, errors = run("cost", "--hardware", tmp_path / "mine.toml")
    assert code == 2 and "mine.toml" in errors and "field" in errors
