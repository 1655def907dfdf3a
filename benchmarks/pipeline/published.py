"""Predicted against published: tokens per second of a GPU, in the same settings.

    python -m benchmarks.pipeline.published        [Row]: measure() -> rows, error(rows) -> geometric mean

Published are torchtitan's figures of December 2024 (benchmarks/llama3_h100_202412_torchtitan.md in its repository,
tables 1 and 3): Llama 3.1 8B, 8,192 tokens, two samples a GPU, FSDP on 8 and 128 GPUs, eager and with torch.compile,
bfloat16, selective activation checkpointing. Their H100 has 96 GB of HBM2e at 2.4 TB/s and a limit of 500 W.

What is predicted: csc's plan with zero=3 on one pipeline rank, by its costs for such a device, with what torchtitan's
selective checkpointing runs again (every second matmul), and AdamW's step. Nothing is fitted to the published figures:
matmul and attention efficiencies are those of the h100 profile, times the cube root of 500 W / 700 W, as power grows
about as the cube of the clock.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import csc
from csc.analysis.hardware import Hardware, hardware, toml_text

TOKENS, SAMPLES = 8192, 2
PUBLISHED = ((8, False, 5762.0), (8, True, 6667.0), (128, False, 5605.0), (128, True, 6514.0))
HIDDEN, INNER, HEADS, KEYS, LAYERS, WORDS = 4096, 14336, 32, 8, 32, 128256
AGAIN = (HIDDEN * KEYS * (HIDDEN // HEADS), HIDDEN * HIDDEN, HIDDEN * INNER)  # weights of k, o and up in each layer
POWER = (500 / 700) ** (1 / 3)
STEP = 28  # bytes that AdamW reads and writes for a parameter in float32: itself, gradient, two moments


@dataclass(frozen=True)
class Row:
    """Tokens per second of one GPU."""

    name: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """predicted / published - 1."""
        return self.predicted / self.published - 1


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


def measure() -> list[Row]:
    """A few seconds for each row: one capture, a plan for each."""
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
            again = 2 * SAMPLES * TOKENS * LAYERS * sum(AGAIN) / profile.rate("bfloat16")
            step = STEP * parameters / ranks / profile.reached_bandwidth
            seconds = plan.makespan + again + step
            name = f"Llama 3.1 8B, FSDP on {ranks} GPUs, {'torch.compile' if fuse else 'eager'}"
            rows.append(Row(name, published, SAMPLES * TOKENS / seconds))
    return rows


def error(rows: Sequence[Row]) -> float | None:
    """By which factor predictions are off on geometric mean, minus 1, whichever way; None of nothing."""
    logs = [abs(math.log(row.predicted / row.published)) for row in rows]
    return math.exp(sum(logs) / len(logs)) - 1 if logs else None


if __name__ == "__main__":
    found = measure()
    print(json.dumps([asdict(row) | {"error": row.error} for row in found], indent=1), error(found))
