"""Models of the benchmark in numbers: what a tile, a token and a pair of tokens cost every unit.

Terms
  tile       448 x 448 pixels, of which the language model sees 256 positions
  tokens     positions of a sample in the language model, those of its tiles among them; text: the others
  squares    the sum of the samples' squared tokens: samples packed in one row see themselves alone
  seen       tiles as the language model pays for them, apart from the encoder, which may have them earlier (Entrain)

    MODELS                                              name -> Configuration
    FEATURES                                            what a sample has
    rates_of(name, frozen, hardware) -> (SizeRates, Problem)    from traces of one sample at several sizes
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from csc.passes.differentiate import DifferentiatePass
from csc.passes.loss import LossPass
from csc.passes.pipeline_problem import network, values
from csc.passes.regions import RegionsPass
from csc.passes.shapes import ShapesPass
from transformers import InternVLVisionConfig, InternVLVisionModel

from benchmarks.mllm.configurations import (
    CLASS_TOKEN,
    CONFIGURATIONS,
    LLAMA_8B,
    Component,
    Configuration,
    tiles_of,
    vision_sizes,
)
from benchmarks.mllm.expand import Stack, expand
from benchmarks.mllm.meta_init import meta_init
from benchmarks.mllm.models import batch, build
from benchmarks.mllm.problem import checkpointed
from benchmarks.mllm.trace import FROZEN, pruned, run
from csc.analysis.costs import region_costs, value_bytes
from csc.analysis.hardware import hardware
from csc.capture.capture import capture, with_sizes_of
from csc.ir.program import Options, Program
from csc.planning.problem import UNIT, Problem, SizeRates, fitted

TILE = 256
FEATURES = ("tiles", "seen", "text", "squares")
SIZES = ((1, 256), (2, 512), (4, 1024), (4, 4096), (8, 1024), (8, 6144), (16, 4096), (24, 2048))  # tiles, text tokens

INTERN_VIT_300M = Component(
    "intern_vit-300m", InternVLVisionModel, InternVLVisionConfig, 24,
    vision_sizes(1024, 4096, 16, [448, 448], [14, 14]), input=tiles_of(448), dropped=CLASS_TOKEN, merged=4,
)  # fmt: skip
MODELS = {
    "VLM-S": Configuration("VLM-S", {"vision": INTERN_VIT_300M, "llm": LLAMA_8B}),
    "VLM-M": CONFIGURATIONS["VLM-M"],
    "VLM-L": CONFIGURATIONS["VLM-L"],
    "VALM-L": CONFIGURATIONS["VALM-L"],
}


@cache
def _captured(name: str) -> Program:
    configuration = MODELS[name]
    with meta_init(torch.bfloat16):
        model = build(configuration, {part: one.shallow for part, one in configuration.components.items()})
    return capture(model, batch(configuration))


@cache
def _traced(name: str, tiles: int, text: int) -> Program:
    configuration = MODELS[name]
    given = batch(configuration)
    given["pixel_values"] = given["pixel_values"][:1].expand(tiles, -1, -1, -1)
    for entry in ("input_ids", "labels"):
        given[entry] = given[entry][:, :1].expand(-1, text)
    shallow = run(
        with_sizes_of(_captured(name), given), (ShapesPass(), LossPass(), RegionsPass(), DifferentiatePass()), Options()
    )
    parts = configuration.components
    return expand(shallow, {part: Stack(one.layers, one.period) for part, one in parts.items()})


def _problem(program: Program, device: str) -> Problem:
    profile, sizes = hardware(device), value_bytes(program)
    units = tuple(
        checkpointed(cost, sum(sizes[value][0] for value in region.activations), program.variants[region.variant])
        for cost, region in zip(region_costs(program, profile), program.regions, strict=True)
    )
    return Problem(units, values(program), 2, 2, None, network(profile))


@cache
def rates_of(name: str, frozen: str, device: str) -> tuple[SizeRates, Problem]:
    """The rates of (1, *FEATURES), and a problem of the model whose numbers are to be replaced."""
    configuration = MODELS[name]
    components = tuple(part for part in FROZEN[frozen] if part in configuration.components)
    problems, features = [], []
    for tiles, text in SIZES:
        problems.append(_problem(pruned(_traced(name, tiles, text), components), device))
        features.append(features_of(tiles, tiles * TILE + text))
    return _apart(fitted(problems, features)), problems[0]


def _apart(rates: SizeRates) -> SizeRates:
    """A tile's rates in two: those of the encoder and what it hands on, and those of the language model."""
    one, tiles, *others = rates.units
    encoding = [unit.component.startswith("vision") for unit in tiles]
    nothing = [replace(unit, **dict.fromkeys(UNIT, 0.0)) for unit in tiles]
    encoder = tuple(unit if own else no for unit, no, own in zip(tiles, nothing, encoding))
    model = tuple(no if own else unit for unit, no, own in zip(tiles, nothing, encoding))
    given, sent, *rest = rates.values
    made = tuple(v if encoding[v.maker] else replace(v, size=0.0, gradient_size=0.0) for v in sent)
    read = tuple(replace(v, size=0.0, gradient_size=0.0) if encoding[v.maker] else v for v in sent)
    return replace(rates, units=(one, encoder, model, *others), values=(given, made, read, *rest))


def features_of(tiles: int, tokens: int) -> tuple[float, float, float, float]:
    """Of a microbatch of one sample, tiles once."""
    return (1.0, float(tiles), float(tokens - tiles * TILE), float(tokens) ** 2)
