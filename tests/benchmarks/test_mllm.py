"""The benchmark's models: expanded against captured deeper, meta_init against real, sizes against published ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from csc.passes.differentiate import DifferentiatePass
from csc.passes.loss import LossPass
from csc.passes.pipeline_problem import values
from csc.passes.regions import RegionsPass
from csc.passes.shapes import ShapesPass
from torch import nn
from torch.nn import functional as F

from benchmarks.mllm import configurations as c
from benchmarks.mllm import trace
from benchmarks.mllm.configurations import CONFIGURATIONS, Component, Configuration
from benchmarks.mllm.expand import Stack, expand
from benchmarks.mllm.experts import balanced_experts, register
from benchmarks.mllm.meta_init import meta_init
from benchmarks.mllm.models import batch, build
from benchmarks.mllm.problem import encoder_share, problem, units_of
from benchmarks.mllm.trace import FROZEN, captured, program, pruned
from csc.analysis.costs import region_costs, value_bytes
from csc.analysis.hardware import hardware
from csc.capture.capture import capture
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.program import Options, Program
from tests.tiers import long

DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "sliding_window": 16,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": [28, 28]}
AUDIO = {"d_model": 64, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "max_source_positions": 10}


def shrunk(part: Component, layers: int, sizes: Mapping[str, Any], **changes: Any) -> Component:
    return replace(part, layers=layers, sizes={**part.sizes, **sizes}, **changes)


SMALL = Configuration(
    "small",
    {
        "vision": shrunk(c.INTERN_VIT_6B, 4, VISION, input=(2, 3, 28, 28)),
        "audio": shrunk(c.WHISPER_242M, 3, AUDIO, input=(1, 80, 20)),
        "llm": shrunk(c.GEMMA2_27B, 6, DECODER),
    },
)
SHALLOW = {name: part.shallow for name, part in SMALL.components.items()}
STACKS = {name: Stack(part.layers, part.period) for name, part in SMALL.components.items()}


@pytest.fixture(scope="module")
def shallow() -> Program:
    assert SHALLOW == {"vision": 3, "audio": 3, "llm": 4}
    return captured(SMALL, SHALLOW)


@pytest.fixture(scope="module")
def deep() -> Program:
    return captured(SMALL, {name: part.layers for name, part in SMALL.components.items()})


@pytest.fixture(scope="module")
def grown(shallow: Program) -> Program:
    return expand(shallow, STACKS)


@pytest.mark.long
def test_the_expanded_program_is_that_of_a_deep_capture(shallow: Program, grown: Program, deep: Program) -> None:
    assert len(shallow.regions) + 1 + 2 == len(deep.regions)
    assert grown.regions == deep.regions
    assert grown.parameters == deep.parameters
    assert grown.modules == deep.modules
    for region in grown.regions:
        ours, theirs = grown.templates[region.template], deep.templates[region.template]
        assert g.canonical(ours.joint) == g.canonical(theirs.joint)


@pytest.mark.long
@pytest.mark.parametrize("frozen", [(), ("vision",), ("vision", "audio", "llm"), ("llm",)])
def test_its_costs_are_those_of_a_deep_capture(grown: Program, deep: Program, frozen: tuple[str, ...]) -> None:
    ours, theirs = pruned(grown, frozen), pruned(deep, frozen)
    a40 = hardware("a40")
    assert region_costs(ours, a40) == region_costs(theirs, a40)
    assert value_bytes(ours) == value_bytes(theirs)
    assert values(ours) == values(theirs)


@pytest.mark.long
@pytest.mark.slow
def test_layers_of_both_kinds_take_turns(shallow: Program) -> None:
    whole = expand(shallow, {"llm": Stack(46, period=2)})
    layers = [r for r in whole.regions if r.component == "llm" and r.kind == "layer"]
    assert [r.name for r in layers] == [f"llm.decoder.layers.{i}" for i in range(46)]
    masks = [r.shared[-1] for r in layers]
    assert masks[0] != masks[1]
    assert masks == masks[:2] * 23


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "period"), [(47, 2), (3, 1), (8, 3)])
@pytest.mark.long_cases("47-2")
def test_a_stack_that_cannot_be_made_from_the_capture_is_refused(shallow: Program, layers: int, period: int) -> None:
    with pytest.raises(InputError, match=f"4 layers of llm cannot stand for {layers}"):
        expand(shallow, {"llm": Stack(layers, period)})


class Skipping(nn.Module):
    """Four layers; the head, or every second layer, also reads the output of layer 1."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(8, 2)
        self.inside = inside

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        kept = hidden
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden + kept if self.inside and index == 3 else hidden)
            kept = hidden if index == 1 else kept
        return F.mse_loss(self.head(hidden if self.inside else hidden + kept), y)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_layers_that_are_no_chain_are_refused(inside: bool) -> None:
    program = capture(Skipping(inside), {"x": torch.zeros(2, 6), "y": torch.zeros(2, 2)})
    for one in (ShapesPass(), LossPass(), RegionsPass(), DifferentiatePass()):
        program = one(program, Options())
    component = next(r.component for r in program.regions if r.kind == "layer")
    with pytest.raises(InputError, match="at full depth"):
        expand(program, {component: Stack(9)})


@pytest.mark.long
@pytest.mark.slow
def test_a_capture_without_weights_is_that_with_weights(shallow: Program) -> None:
    heavy = build(SMALL, SHALLOW).to(torch.bfloat16)
    assert sum(p.numel() for p in heavy.parameters()) == sum(p.numel for p in shallow.parameters)
    real = capture(heavy, batch(SMALL))
    for step in (ShapesPass(), LossPass(), RegionsPass(), DifferentiatePass()):
        real = step(real, Options())
    assert real.regions == shallow.regions
    assert real.parameters == shallow.parameters
    for name, template in real.templates.items():
        assert g.canonical(template.joint) == g.canonical(shallow.templates[name].joint)
    frozen = ("vision", "llm")
    a40 = hardware("a40")
    assert region_costs(pruned(real, frozen), a40) == region_costs(pruned(shallow, frozen), a40)


def test_meta_init_leaves_the_default_dtype() -> None:
    with meta_init(torch.float16):
        weight = nn.Linear(10**4, 10**4).weight
        assert (weight.dtype, weight.device.type) == (torch.float16, "meta")
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.slow
def test_a_frozen_set_traces_nothing_again(shallow: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(configuration: Configuration, depths: Mapping[str, int]) -> Program:
        calls.append(depths)
        return shallow

    monkeypatch.setattr(trace, "captured", counted)
    a40, h100 = hardware("a40"), hardware("h100")
    found = {name: problem(SMALL, name, a40, ranks=4, microbatches=24) for name in FROZEN}
    faster = problem(SMALL, "all trainable", h100, ranks=8, microbatches=6)
    assert calls == [SHALLOW]

    units = found["all trainable"].units
    at = units_of(found["all trainable"])
    assert list(at) == ["vision", "vision_projector", "audio", "audio_projector", "llm"]
    assert sorted(sum(at.values(), ())) == list(range(len(units)))
    named = {name: [units[u].name for u in places] for name, places in at.items()}
    assert named["vision"][1:] == [f"vision.tower.encoder.layer.{i}" for i in range(4)]
    assert len(named["llm"]) == 10  # embedding, concatenation, six layers, norm, head
    assert (faster.ranks, faster.microbatches) == (8, 6)
    assert sum(u.work for u in faster.units) < sum(u.work for u in units)
    assert 0 < encoder_share(SMALL) < 1

    trained = {"encoder frozen": {"llm"}, "projector only": set[str]()}
    for name, components in trained.items():
        for unit in found[name].units:
            projector = unit.component.endswith("_projector")
            trains = projector or unit.component in components
            assert unit.has_w == (trains and "merge" not in unit.name)
            assert unit.has_b == (trains or (unit.component == "llm" and "embed" not in unit.name))
            if ".decoder.layers." in unit.name:
                assert unit.backward_input > 1.5 * unit.forward  # F again, then the input's gradient
    for one in found.values():
        for value in one.values:
            assert value.gradient_size == (value.size if any(value.gradient) else 0)


@pytest.mark.parametrize("seed", range(3))
def test_balanced_experts_are_the_chosen_ones_if_the_router_is_balanced(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens, experts, width, inner = 12, 4, 6, 5
    block = nn.Module()
    block.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, width, generator=generator))
    block.down_proj = nn.Parameter(torch.randn(experts, width, inner, generator=generator))
    block.act_fn = F.silu
    first = torch.arange(tokens) % experts
    index = torch.stack([first, (first + 1 + seed % (experts - 1)) % experts], dim=1)
    index = index[torch.randperm(tokens, generator=generator)]
    states, weights = (torch.randn(tokens, size, generator=generator) for size in (width, 2))

    def expert(number: int, row: torch.Tensor) -> torch.Tensor:
        gate, up = (block.gate_up_proj[number] @ row).chunk(2)
        return block.down_proj[number] @ (F.silu(gate) * up)

    wanted = torch.stack(
        [
            sum(w * expert(int(e), row) for e, w in zip(chosen, weight))
            for row, chosen, weight in zip(states, index, weights)
        ]
    )
    torch.testing.assert_close(balanced_experts(block, states, index, weights), wanted)


# Billions of parameters as published, of the language models without a head where theirs is tied; layers as published.
PUBLISHED = [
    (c.LLAMA_8B, 32, True, 8.03),
    (c.LLAMA_70B, 80, True, 70.55),
    (c.INTERNLM2_20B, 48, True, 19.86),
    (c.QWEN2_72B, 80, True, 72.71),
    (c.QWEN2_14B, 48, True, 14.77),
    (c.MISTRAL_7B, 32, True, 7.25),
    (c.PHI3_SMALL, 32, False, 7.39),
    (c.GEMMA2_27B, 46, False, 27.23),
    (c.MIXTRAL_8X7B, 32, True, 46.70),
    (c.PIXTRAL_400M, 24, False, 0.404),
    (c.INTERN_VIT_6B, 45, False, 5.54),
    (c.VIT_22B, 48, False, 21.74),
    (c.SIGLIP_878M, 27, False, 0.428),
    (c.EVACLIP_18B, 48, False, 17.5),
    (c.QWEN2_VISION_675M, 32, False, 0.64),
    (c.WHISPER_242M, 12, False, 0.088),
    (c.WHISPER_307M, 24, False, 0.307),
    (c.WHISPER_1_5B, 32, False, 0.637),
    (c.QWEN2_AUDIO, 32, False, 0.637),
]


@pytest.mark.parametrize(("part", "layers", "head", "billions"), PUBLISHED, ids=[row[0].name for row in PUBLISHED])
def test_components_have_the_published_size(part: Component, layers: int, head: bool, billions: float) -> None:
    register()  # a mixture of experts is built with it
    with meta_init(torch.bfloat16):
        two, three = (sum(p.numel() for p in part.build(depth).parameters()) for depth in (2, 3))
    total = two + (layers - 2) * (three - two) + (part.sizes["vocab_size"] * part.width if head else 0)
    assert total / 1e9 == pytest.approx(billions, rel=0.015)


def test_there_are_nine_configurations() -> None:
    assert list(CONFIGURATIONS) == [f"{kind}-{size}" for kind in ("VLM", "ALM", "VALM") for size in "SML"]
    for name, configuration in CONFIGURATIONS.items():
        parts = list(configuration.components)
        assert parts == ["vision"] * ("V" in name.split("LM")[0]) + ["audio"] * ("A" in name) + ["llm"]
    assert c.VIT_22B.input == (6, 3, 448, 448)
    assert c.SIGLIP_878M.input == (8, 3, 384, 384)
    assert {part.layers for part in (c.LLAMA_70B, c.QWEN2_72B)} == {40}


@pytest.mark.slow
@pytest.mark.parametrize("name", [long("VLM-L"), long("ALM-L"), long("VALM-S")])
def test_a_configuration_of_full_size(name: str) -> None:
    configuration = CONFIGURATIONS[name]
    whole = problem(configuration, "projector only", hardware("a40"), ranks=6, microbatches=24)
    layers = Counter(r.component for r in program(configuration, "projector only").regions if r.kind == "layer")
    assert layers == {part: component.layers for part, component in configuration.components.items()}
    trained = {unit.component for unit in whole.units if unit.has_w}
    assert trained == {f"{part}_projector" for part in configuration.components if part != "llm"}
    share = {"VLM-L": 0.59, "ALM-L": 0.046, "VALM-S": 0.036}
    assert encoder_share(configuration) == pytest.approx(share[name], rel=0.05)
