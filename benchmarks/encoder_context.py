"""What spreading an encoder over two context-parallel ranks saves each: a step with `context` against one without.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.encoder_context [--rounds 9] [--json]

A LLaVA that is nearly all encoder (CLIP of width 512, 6 layers, 577 tokens; Llama of 2 layers, width 64), one sample,
mesh cp=2. The two programs take turns; CPU seconds of a step of the first rank (exchanges and packing count, waiting
for the other rank does not, nor what else the machine does) and wall seconds, medians over rounds; the ratio is the
median of the rounds' ratios. Without `context` both ranks compute the whole encoder. With the encoder frozen a step is
its F, and little more.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import csc

IMAGE_TOKEN, PATCHES, TEXT = 20, 576, 64
FROZEN = {"all trained": [], "encoder frozen": ["vision_tower"]}


def build() -> LlavaForConditionalGeneration:
    """The model, float32, random weights."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=7,
        num_attention_heads=8,
        image_size=336,
        patch_size=14,
    )  # the seventh layer is not used
    text = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=24,
    )  # fmt: skip
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN)
    )


def make_batch() -> dict[str, torch.Tensor]:
    """One image, then text."""
    ids = torch.arange(PATCHES + TEXT)[None] % 19
    ids[:, 1 : 1 + PATCHES] = IMAGE_TOKEN
    labels = ids.clone()
    labels[:, : 1 + PATCHES] = -100
    pixels = torch.randn(1, 3, 336, 336, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "labels": labels}


def seconds(compiled: csc.CompiledModel, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """CPU and wall seconds of one step."""
    compiled.zero_grad()
    cpu, wall = time.process_time(), time.perf_counter()
    compiled.train_step(batch)
    return time.process_time() - cpu, time.perf_counter() - wall


def compare(freeze: list[str], rounds: int) -> dict[str, float]:
    """Median seconds of a step without and with `context`, and the medians of their ratios."""
    batch = make_batch()
    whole = csc.compile(build(), example=batch, mesh="cp=2", freeze=freeze)
    spread = whole.with_options(context={"vision_tower": 2})
    for program in (whole, spread):
        seconds(program, batch)
    pairs = [(seconds(whole, batch), seconds(spread, batch)) for _ in range(rounds)]
    found = {}
    for place, kind in enumerate(("cpu", "wall")):
        found[f"{kind}_whole"] = median(one[place] for one, _ in pairs)
        found[f"{kind}_spread"] = median(other[place] for _, other in pairs)
        found[f"{kind}_ratio"] = median(other[place] / one[place] for one, other in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: compare(freeze, arguments.rounds) for name, freeze in FROZEN.items()}
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "machine": platform.machine(), "seconds": rows}, indent=1))
        return
    columns = [f"{kind}_{what}" for kind in ("cpu", "wall") for what in ("whole", "spread", "ratio")]
    table = Table(
        "", *(column.replace("_", "\n") for column in columns), title="an encoder over two context-parallel ranks"
    )
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:.3f}" for column in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
