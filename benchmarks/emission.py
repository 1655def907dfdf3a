"""What it takes to write the program of a large mesh, and to load it on one of its ranks.

python -m benchmarks.emission [--json] [--layers 80] [--microbatches 64] [--mesh dp=16,pp=16,cp=4 --mesh dp=16,pp=64]

The model is a Llama of tiny width and real depth: what is written depends on layers, stages and ranks, not on sizes.
Seconds are of one thread, after compilation, into a directory that is not there yet.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import csc
from csc.driver.compiled import CompiledModel
from csc.driver.new_model import compiled_model
from csc.ir.mesh import Mesh
from csc.runtime.loaded_program import load

LENGTH = 512  # tokens: four blocks for each of cp=4


def build(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=64))


def batch(samples: int) -> dict[str, torch.Tensor]:
    ids = (torch.arange(samples)[:, None] + torch.arange(LENGTH)) % 64
    return {"input_ids": ids, "labels": ids}


def measure(compiled: CompiledModel) -> dict[str, object]:
    """Seconds, and the size of what is written."""
    mesh = compiled.options.mesh
    rank = mesh.size * 3 // 5
    with tempfile.TemporaryDirectory(prefix="csc-emission-") as home:
        whole, alone = Path(home) / "whole", Path(home) / "alone"
        found = {
            "mesh": str(mesh),
            "ranks": mesh.size,
            "stages": len(compiled.program.stages),
            "regions": len(compiled.program.regions),
            "write": _seconds(lambda: compiled.write(whole)),
            "write_one": _seconds(lambda: compiled.write(alone, ranks=[rank])),
            "load_one": _seconds(lambda: load(alone, [rank])),
            "load_all": _seconds(lambda: load(whole)),
        }
        files = {path.name: path.read_text() for path in whole.glob("*.py")}
        own = [len(text.splitlines()) for name, text in files.items() if name.startswith("rank_")]
        layers = [path.read_text() for path in (whole / "layers").glob("*.py")]
        return found | {
            "files": sum(path.is_file() for path in whole.rglob("*")),
            "bytes": sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()),
            "rank_lines": max(own),
            "layers_lines": sum(len(text.splitlines()) for text in layers),
        }


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="What it takes to write the program of a large mesh.")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--mesh", action="append", help="axis sizes; repeat it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    first: CompiledModel | None = None
    for text in given.mesh or ["dp=16,pp=16,cp=4", "dp=16,pp=64"]:
        mesh = Mesh.parse(text)
        options = {"mesh": mesh, "microbatches": given.microbatches, "schedule": "1f1b"}
        example = batch(given.microbatches * mesh.dp)
        if first is None:
            first = csc.compile(build(given.layers), example=example, **options)
            compiled = first
        else:
            compiled = compiled_model(first.model, first.with_options(**options).options, example, None, first.compiler)
        compiled.history()
        found = measure(compiled)
        print(json.dumps(found) if given.json else "  ".join(f"{n} {_shown(v)}" for n, v in found.items()))


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
