"""One rank of test_copies.py: three clipped steps of AdamW, and what is saved; goes on elsewhere from there.

train({"model": "llava", "mesh": "tp=4,vision_tower.tp=2", ...}, directory)     saves weights, and the run
taken_up(case, directory)            one rank: two more steps from the run of another mesh
go_on(case, directory, mesh, run)                 -> losses of two more steps on another mesh, from there
eager(case, steps) -> (losses, norms, parameters by name)      of plain PyTorch, which shares nothing with csc
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import csc
from tests.compiler.tensor_models import BATCHES, MODELS
from tests.compiler.tensor_worker import said_of_weights

CLIP, STEP = 0.5, {"lr": 1e-3, "eps": 1e-6}  # with a smaller eps AdamW makes steps of rounding


def trains(case: dict[str, Any], name: str) -> bool:
    """Whether a parameter does."""
    only = case.get("only")
    return not any(part in name for part in case.get("frozen", ())) and (only is None or only in name)


def model_of(case: dict[str, Any]) -> torch.nn.Module:
    model = MODELS[case["model"]]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(case, name))
    return model


def compiled_of(case: dict[str, Any], mesh: str) -> csc.CompiledModel:
    batch = BATCHES[case["model"]](case["samples"])
    options = case.get("options", {}) if mesh == case["mesh"] else {}
    return csc.compile(model_of(case), mesh=mesh, example=batch, microbatches=case["microbatches"], **options)


def steps(compiled: csc.CompiledModel, optimizer: torch.optim.Optimizer, batch: Any, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(count):
        found["losses"].append(float(compiled.train_step(batch)))
        found["norms"].append(float(compiled.clip_grad_norm_(CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def train(case: dict[str, Any], directory: Path) -> None:
    compiled = compiled_of(case, case["mesh"])
    batch = BATCHES[case["model"]](case["samples"])
    optimizer = compiled.optimizer(torch.optim.AdamW, **STEP)
    found = steps(compiled, optimizer, batch, 3)
    compiled.save(directory / "weights", optimizer=optimizer)
    csc.CheckpointManager(directory / "run", compiled, optimizer=optimizer).save(3).wait()
    found["held"] = {name: list(p.shape) for name, p in compiled.named_parameters()}
    found["more"] = steps(compiled, optimizer, batch, 2)["losses"]
    (directory / f"result_{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def taken_up(case: dict[str, Any], directory: Path) -> None:
    """What another mesh saved."""
    found = go_on(case, directory, case["mesh"], True)
    (directory / f"taken_up_{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def drawn_apart(case: dict[str, Any], directory: Path) -> None:
    """The second copy of the encoder has other weights; what csc says of it."""
    second = int(os.environ["RANK"]) >= 2
    said_of_weights(case, directory, lambda name: second and "vision_tower" in name and name.endswith("fc1.weight"))


def go_on(case: dict[str, Any], directory: Path, mesh: str, run: bool) -> list[float]:
    """run: from the checkpoint of a training run."""
    compiled = compiled_of(case, mesh)
    optimizer = compiled.optimizer(torch.optim.AdamW, **STEP)
    if run:
        restored = csc.CheckpointManager(directory / "run", compiled, optimizer=optimizer).load()
        assert restored is not None and restored.step == 3
    else:
        compiled.load(directory / "weights", optimizer=optimizer)
    return list(steps(compiled, optimizer, BATCHES[case["model"]](case["samples"]), 2)["losses"])


def eager(case: dict[str, Any], count: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model, batch = model_of(case), BATCHES[case["model"]](case["samples"])
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, **STEP)  # type: ignore[arg-type]
    losses, norms = [], []
    for _ in range(count):
        loss = model(**batch).loss
        loss.backward()
        losses.append(float(loss))
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}
