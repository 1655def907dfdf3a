"""One training step, compiled against eager PyTorch, in one process and on the same microbatches.

    python -m benchmarks.step_time [--rounds 9] [--json]

The model is a LLaVA of the demo's size (CLIP 4 layers, Llama 4 layers, width 128), 48 samples in 4 microbatches, for
four frozen sets. Eager and compiled take turns; the medians and the median of the ratios are reported. This is the cost
of the emitted program and its runtime, without pipeline parallelism: a ratio of 1 means that they cost what autograd
costs.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import csc

MICROBATCHES, SAMPLES, LENGTH, IMAGE_TOKEN = 4, 48, 24, 20
FROZEN = {
    "nothing": [],
    "vision_tower": ["vision_tower"],
    "language_model": ["language_model"],
    "both": ["vision_tower", "language_model"],
}


def build() -> LlavaForConditionalGeneration:
    """The model, float32, random weights."""
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**size, image_size=30, patch_size=10)
    text = LlamaConfig(**size, num_key_value_heads=4, vocab_size=24)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN)
    )


def make_batch() -> dict[str, torch.Tensor]:
    """Nine image tokens, then text; the last four tokens of each sample are padding."""
    ids = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH) % 19
    ids[:, 1:10] = IMAGE_TOKEN
    mask = torch.ones_like(ids)
    mask[:, -4:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :10] = -100
    pixels = torch.randn(SAMPLES, 3, 30, 30, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "labels": labels}


def compare(freeze: list[str], rounds: int) -> dict[str, float]:
    """Median seconds of a step, eager and compiled, and the median of their ratios."""
    model, batch = build(), make_batch()
    compiled = csc.compile(model, example=batch, freeze=freeze, microbatches=MICROBATCHES)
    trainable = {p.name for p in compiled.program.parameters if p.trainable}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
    parts = [{k: v.chunk(MICROBATCHES)[i] for k, v in batch.items()} for i in range(MICROBATCHES)]

    def eager_step() -> None:
        for part in parts:
            (model(**part, use_cache=False).loss / MICROBATCHES).backward()
        model.zero_grad()

    def compiled_step() -> None:
        compiled.train_step(batch)
        compiled.zero_grad()

    eager_step()
    compiled_step()
    pairs = [(_seconds(eager_step), _seconds(compiled_step)) for _ in range(rounds)]
    return {
        "eager_ms": 1e3 * median(e for e, _ in pairs),
        "csc_ms": 1e3 * median(c for _, c in pairs),
        "ratio": median(c / e for e, c in pairs),
    }


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = {name: compare(frozen, arguments.rounds) for name, frozen in FROZEN.items()}
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "machine": platform.machine(), "frozen": rows}, indent=1))
        return
    table = Table("frozen", "eager ms", "csc ms", "csc / eager", title="one training step in one process")
    for name, row in rows.items():
        table.add_row(name, f"{row['eager_ms']:.1f}", f"{row['csc_ms']:.1f}", f"{row['ratio']:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
