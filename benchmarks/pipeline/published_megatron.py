"""Megatron-LM's weak scaling on A100s (Narayanan et al. 2021, arXiv 2104.04473, table 1): the row without tp.

    measure() -> [Row]            TFLOP/s of one GPU, by the paper's formula, in which the forward counts twice

GPT of 1.7B (24 layers of 2,304, 51,200 words), 2,048 tokens, 512 samples on 32 A100 of 80 GB, full recomputation, plain
attention with fused kernels around it. The paper does not say how many samples a microbatch has; 4 are taken.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import csc
from benchmarks.pipeline.published import Row
from csc.analysis.hardware import hardware

TOKENS, SAMPLES, STEP_SAMPLES, GPUS, PUBLISHED = 2048, 4, 512, 32, 137.0
HIDDEN, LAYERS, HEADS, WORDS = 2304, 24, 24, 51200
ADAM = 32  # bytes for a parameter: gradient, float32 copy and two moments are read, the latter and itself written


def measure() -> list[Row]:
    """Some ten seconds."""
    profile = hardware("a100")
    config = GPT2Config(
        n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, vocab_size=WORDS, n_positions=TOKENS, use_cache=False,
        attn_implementation="eager",
    )  # fmt: skip
    with csc.meta_init():
        model = GPT2LMHeadModel(config).to(torch.bfloat16)
    parameters = sum(one.numel() for one in model.parameters())
    ids = torch.arange(TOKENS).remainder(50_000)[None].expand(SAMPLES, -1)
    compiled = csc.compile(
        model, hardware="a100", recompute="full", fuse=True, check=False, example={"input_ids": ids, "labels": ids}
    )
    plan = compiled.program.plan
    assert plan is not None
    parts = {
        "csc's plan": STEP_SAMPLES // GPUS // SAMPLES * plan.makespan,
        "gradients summed": 2 * (1 - 1 / GPUS) * 2 * parameters / profile.between.bandwidth,
        "optimizer": ADAM * parameters / profile.reached_bandwidth,
    }
    width = 1 + TOKENS / (6 * HIDDEN) + WORDS / (16 * LAYERS * HIDDEN)
    flops = 96 * STEP_SAMPLES * TOKENS * LAYERS * HIDDEN**2 * width
    predicted = flops / sum(parts.values()) / GPUS / 1e12
    return [Row(f"GPT 1.7B, Megatron-LM on {GPUS} A100", "TFLOP/s", PUBLISHED, predicted, parts)]
