"""torchtitan's Llama 3.1 8B on H100s (benchmarks/llama3_h100_202412_torchtitan.md in its repository, tables 1 and 3).

    measure() -> [Row]            tokens per second of one GPU

8,192 tokens, two samples a GPU, FSDP on 8 and 128 GPUs, eager and with torch.compile, bfloat16, selective activation
checkpointing, December 2024. Their H100 has 96 GB of HBM2e at 2.4 TB/s and a limit of 500 W: matmul and attention
efficiencies are those of the h100 profile, times the cube root of 500 W / 700 W, as power grows about as the cube of
the clock.

The plan is csc's, with zero=3 on one pipeline rank. What torchtitan and FSDP run beside that is added, each from what
their sources say that it reads and writes (`beside`), at the bandwidth that copies reach.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import csc
from benchmarks.pipeline.published import Row
from csc.analysis.hardware import Hardware, hardware, toml_text

TOKENS, SAMPLES = 8192, 2
PUBLISHED = ((8, False, 5762.0), (8, True, 6667.0), (128, False, 5605.0), (128, True, 6514.0))
HIDDEN, INNER, HEADS, KEYS, LAYERS, WORDS = 4096, 14336, 32, 8, 32, 128256
AGAIN = (HIDDEN * KEYS * (HIDDEN // HEADS), HIDDEN * HIDDEN, HIDDEN * INNER)  # weights of k, o and up in each layer
POWER = (500 / 700) ** (1 / 3)

# Bytes for a parameter of the whole model, on every GPU. FSDP2 copies a layer's parameters out of the buffer that was
# gathered (2 read, 2 written), before F and again before B, and its gradients into the buffer that is reduced, in
# float32 (2 read, 4 written): split_with_sizes_copy and chunk_cat of torch/distributed/fsdp/_fully_shard.
COPIES = 2 * (2 + 2) + (2 + 4)
# Bytes for a parameter of the shard. AdamW: itself, gradient and two moments read, all but the gradient written; before
# it clipping reads every gradient for the norm, reads it again and writes it; FSDP casts each, twice a step.
STEP, CLIP, CAST = 28, 12, 2 * (4 + 2)
# Bytes for an entry of q and k: torchtitan turns them in complex float32 (cast 2 + 4, product 4 + 4, cast 4 + 2), in F,
# once more for B and again in B. Inductor makes no code for complex numbers, so that compiled these stay three kernels,
# where csc's costs have the rotation of the HF model in one with its neighbours (2 + 2); eager, that takes as many.
ROTATION, FUSED_ROTATION = 3 * 20, 3 * 4
# Bytes for an entry of k and v as attention reads them, in F, once more for B and again in B: torchtitan writes them
# for every head (a quarter of them is read), where csc's kernels read those of a group. B adds those of a group up.
REPEATED = 3 * (2 + 2 * KEYS / HEADS)
# An all-gather of NCCL holds 24 of the 132 processors of an H100 (forums.developer.nvidia.com/t/337991): while it runs,
# the rest take 132 / 108 as long. On average over such runs Lee et al. (arXiv 2507.03114) measured 1.19.
HELD = 24 / (132 - 24)
GATHERED, REDUCED = 2 * 2, 4  # bytes for a parameter: bfloat16 before F and before B; gradients in float32


def device() -> Hardware:
    """The H100 of these figures."""
    base = hardware("h100")
    forward, backward = base.attention or (base.matmul_efficiency,) * 2
    return replace(
        base,
        name="h100-96gb-500w",
        memory=96e9,
        bandwidth=2.4e12,
        matmul_efficiency=base.matmul_efficiency * POWER,
        attention=(forward * POWER, backward * POWER),
    )


def beside(profile: Hardware, parameters: int, ranks: int, fuse: bool) -> dict[str, float]:
    """Seconds of a step that csc's plan has not."""
    moved = profile.reached_bandwidth
    wire = profile.within if ranks <= profile.ranks_per_node else profile.between
    tokens, head = SAMPLES * TOKENS, HIDDEN // HEADS
    turned = ROTATION - FUSED_ROTATION if fuse else 0
    return {
        "recomputed matmuls": 2 * tokens * LAYERS * sum(AGAIN) / profile.rate("bfloat16"),
        "FSDP's copies": COPIES * parameters / moved,
        "optimizer, clipping, casts": (STEP + CLIP + CAST) * parameters / ranks / moved,
        "rotation in complex numbers": turned * tokens * LAYERS * head * (HEADS + KEYS) / moved,
        "keys and values for every head": REPEATED * tokens * LAYERS * 2 * HIDDEN / moved,
        "processors held by NCCL": HELD * (GATHERED + REDUCED) * parameters * (1 - 1 / ranks) / wire.bandwidth,
    }


def measure() -> list[Row]:
    """A few seconds for each row."""
    profile = device()
    ids = torch.arange(TOKENS).remainder(100_000)[None]
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KEYS, vocab_size=WORDS, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    with csc.meta_init():
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    parameters = sum(one.numel() for one in model.parameters())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "device.toml")
        path.write_text(toml_text(profile))
        for ranks, fuse, published in PUBLISHED:
            samples = ids.expand(SAMPLES * ranks, -1)
            compiled = csc.compile(
                model, mesh={"dp": ranks}, zero=3, hardware=path, recompute="selective", fuse=fuse, check=False,
                example={"input_ids": samples, "labels": samples},
            )  # fmt: skip
            plan = compiled.program.plan
            assert plan is not None
            parts = {"csc's plan": plan.makespan, **beside(profile, parameters, ranks, fuse)}
            name = f"Llama 3.1 8B, FSDP on {ranks} GPUs, {'torch.compile' if fuse else 'eager'}"
            rows.append(Row(name, "tokens/s", published, SAMPLES * TOKENS / sum(parts.values()), parts))
    return rows
