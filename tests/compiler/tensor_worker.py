"""One rank of test_tensor.py: three steps of AdamW with clipping, saved, and what the rank holds in files.

main({"model": "llama", "mesh": "tp=2", ...}, directory)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import csc
from tests.compiler.tensor_models import BATCHES, MODELS


def other_weights(case: dict[str, Any], directory: Path) -> None:
    """The models of the ranks were drawn apart; what csc says of it."""
    rank = int(os.environ["RANK"])
    said_of_weights(case, directory, lambda name: rank if name.endswith("up_proj.weight") else 0)


def said_of_weights(case: dict[str, Any], directory: Path, more: Callable[[str], int]) -> None:
    """What csc says in a rank's first step with its weights so much larger, by name."""
    model, batch = MODELS[case["model"]](), BATCHES[case["model"]](case["samples"])
    said = "nothing"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(more(name))
    try:
        csc.compile(model, mesh=case["mesh"], example=batch).train_step(batch)
    except csc.CscError as error:
        said = str(error)
    (directory / f"said_{os.environ['RANK']}.txt").write_text(said)
    dist.destroy_process_group()


def main(case: dict[str, Any], directory: Path) -> None:
    model, batch = MODELS[case["model"]](), BATCHES[case["model"]](case["samples"])
    compiled = csc.compile(
        model,
        mesh=case["mesh"],
        example=batch,
        freeze=case.get("freeze"),
        microbatches=case["microbatches"],
        loss_chunk=case.get("loss_chunk"),
        sequence_parallel=case.get("sequence_parallel"),
    )
    trained = steps(compiled, batch)
    rank = dist.get_rank()
    own = dict(compiled.named_parameters())
    save_file({name: p.detach().contiguous() for name, p in own.items()}, directory / f"own_{rank}.safetensors")
    compiled.save(directory / "weights")
    later = float(compiled.train_step(batch))
    compiled.load(directory / "weights")
    again = float(compiled.train_step(batch))
    others = same_parameters(compiled, batch, own)
    whole = dict(compiled.gather().named_parameters())
    save_file({name: p.detach().contiguous() for name, p in whole.items()}, directory / f"whole_{rank}.safetensors")
    compiled.train_step(batch)  # what was gathered is what is trained
    written = refused_write(compiled, batch)
    (directory / f"result_{rank}.json").write_text(
        json.dumps({**trained, "later": later, "again": again, "others": others, "written": written})
    )
    dist.destroy_process_group()


def same_parameters(compiled: csc.CompiledModel, batch: Any, own: dict[str, torch.nn.Parameter]) -> list[float]:
    """Losses of programs for another number of microbatches, for evaluation, and for another frozen set, all of which
    have the parameters that the optimizer knows.
    """
    compiled.zero_grad()
    found = [float(compiled.train_step(batch, microbatches=4)), float(compiled.eval_step(batch))]
    assert all(own[name] is p for name, p in compiled.named_parameters())
    assert any(p.grad is not None for p in own.values())
    later = compiled.with_options(freeze=[next(iter(compiled.model.state_dict()))])
    found.append(float(later.train_step(batch)))
    assert all(own[name] is p for name, p in later.named_parameters())
    return found


def refused_write(compiled: csc.CompiledModel, batch: Any) -> str:
    """What a step says once the model's own weights, of which this process trains shards, were written to."""
    for parameter in compiled.model.parameters():
        parameter.data.mul_(2.0)  # which no version counts
    try:
        compiled.train_step(batch)
    except csc.CscError as error:
        return str(error)
    return "nothing"


def steps(compiled: csc.CompiledModel, batch: Any) -> dict[str, list[float]]:
    """Losses, and norms before clipping, of three steps."""
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3, eps=1e-6)  # with less it makes steps of rounding
    for _ in range(3):
        found["losses"].append(float(compiled.train_step(batch)))
        found["norms"].append(float(compiled.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return found
