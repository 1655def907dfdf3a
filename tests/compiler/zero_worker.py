"""One rank of test_zero.py: three steps of AdamW with clipping, saved, loaded, and what the rank holds in files.

main({"model": "llama", "mesh": "dp=2", "zero": 1, ...}, directory)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import csc
from csc.runtime import gradients
from tests.compiler.zero_models import BATCHES, MODELS


def compiled_of(case: dict[str, Any], **changes: Any) -> csc.CompiledModel:
    case = case | changes
    options = {
        name: case[name]
        for name in ("freeze", "precision", "recompute", "stages", "chunks", "schedule")
        if name in case
    }
    return csc.compile(
        MODELS[case["model"]](), mesh=case["mesh"], example=BATCHES[case["model"]](case["samples"]),
        microbatches=case["microbatches"], zero=case["zero"], **options,
    )  # fmt: skip


def groups(compiled: csc.CompiledModel) -> list[dict[str, Any]]:
    """Weight decay for matrices alone: shards have the dimensions of what they are shards of."""
    named = list(compiled.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(compiled: csc.CompiledModel) -> torch.optim.Optimizer:
    return compiled.optimizer(torch.optim.AdamW, groups(compiled), lr=1e-3, eps=1e-6)


def steps(
    compiled: csc.CompiledModel, batch: Any, optimizer: torch.optim.Optimizer, clip: float | None = 0.5, count: int = 3
) -> dict[str, list[float]]:
    """Losses, and norms before clipping; clip: None for none."""
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    for _ in range(count):
        found["losses"].append(float(compiled.train_step(batch)))
        found["norms"].append(float(compiled.clip_grad_norm_(float("inf") if clip is None else clip)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def tensors(of: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: one.detach().contiguous().clone() for name, one in of}


def main(case: dict[str, Any], directory: Path) -> None:
    batch = BATCHES[case["model"]](case["samples"])
    compiled = compiled_of(case)
    optimizer = adamw(compiled)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    result: dict[str, Any] = steps(compiled, batch, optimizer, case.get("clip", 0.5))
    schedule.step()
    rank = dist.get_rank()
    save_file(tensors(compiled.named_parameters()), directory / f"own_{rank}.safetensors")
    result["state"] = sum(
        value.numel() for state in optimizer.state.values() for value in state.values() if value.dim()
    )
    result["held"] = sum(one.numel() for one in compiled.state_dict().values())
    compiled.save(directory / "weights", optimizer=optimizer)
    result["evaluated"] = float(compiled.eval_step(batch))
    later = steps(compiled, batch, optimizer)
    result["later"] = later["losses"]
    compiled.load(directory / "weights", optimizer=optimizer)
    result["again"] = steps(compiled, batch, optimizer)["losses"]
    compiled.load(directory / "weights", optimizer=optimizer)
    save_file(tensors(compiled.gather().named_parameters()), directory / f"whole_{rank}.safetensors")
    result["refused"] = refusals(compiled, batch)
    (directory / f"result_{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def refusals(compiled: csc.CompiledModel, batch: Any) -> list[str]:
    """What csc says of optimizers that would train something else."""
    found = []
    for attempt in (
        lambda: compiled.optimizer(torch.optim.Adafactor),
        lambda: compiled.optimizer(torch.optim.SGD, list(compiled.model.parameters()), lr=0.1),
        lambda: unproven(compiled, batch),
        lambda: adamw(compiled).step(),  # must not pass for the writer
    ):
        try:
            attempt()
            found.append("nothing")
        except csc.CscError as error:
            found.append(str(error))
    return found


def unproven(compiled: csc.CompiledModel, batch: Any) -> None:
    """A step of an optimizer that csc has not seen."""
    compiled.train_step(batch)
    torch.optim.SGD(compiled.parameters(), lr=0.1).step()
    compiled.train_step(batch)


def resume(case: dict[str, Any], directory: Path) -> None:
    """Three more steps from what another mesh has saved."""
    batch = BATCHES[case["model"]](case["samples"])
    compiled = compiled_of(case)
    optimizer = adamw(compiled)
    compiled.load(directory / "weights", optimizer=optimizer)
    losses = steps(compiled, batch, optimizer)["losses"]
    (directory / f"resumed_{dist.get_rank()}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def from_files(case: dict[str, Any], directory: Path) -> None:
    """A model without values, given those of files: at first of other ones on the second rank."""
    batch, result = BATCHES[case["model"]](case["samples"]), {}
    with csc.meta_init():
        compiled = compiled_of(case)
    for what, attempt in (
        ("empty", lambda: compiled.train_step(batch)),
        ("refused", lambda: compiled.load(directory / ("right", "wrong")[dist.get_rank()])),
    ):
        try:
            attempt()
        except csc.CscError as error:
            result[what] = str(error)
    compiled.load(directory / "right")
    result["losses"] = steps(compiled, batch, adamw(compiled))["losses"]
    compiled.save(directory / "saved")
    result["later"] = float(compiled.train_step(batch))
    (directory / f"read_{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def phases(zero: int, directory: Path) -> None:
    """Gradients of two batches added up; a step that fails on one rank; other options with the same optimizer; a batch
    of each process; optimizers with a closure and a fused one.
    """
    case = {"model": "odd", "mesh": "dp=2", "samples": 8, "microbatches": 2, "zero": zero}
    compiled, batch = compiled_of(case), BATCHES["odd"](8)
    optimizer = compiled.optimizer(torch.optim.AdamW, list(compiled.named_parameters()), lr=1e-2, fused=True)
    first = compiled.train_step(batch)
    once = {name: p.grad.clone() for name, p in compiled.named_parameters()}
    compiled.train_step(batch)
    for name, p in compiled.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name])
    failing(compiled, batch)
    for name, p in compiled.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name])
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in compiled.parameters())
    second = compiled.train_step(batch)
    assert second < first
    compiled.gather()
    digest = torch.stack([p.detach().double().sum() for p in compiled.model.parameters()]).sum()
    others = [torch.empty_like(digest) for _ in range(2)]
    dist.all_gather(others, digest)
    assert torch.equal(*others), "ranks compute with the same parameters"
    own = dict(compiled.named_parameters())
    later = compiled.with_options(freeze=["embed"])
    optimizer.zero_grad()
    third = later.train_step({name: one[dist.get_rank() * 4 :][:4] for name, one in batch.items()}, local=True)
    torch.testing.assert_close(third, second)
    assert all(own[name] is p for name, p in later.named_parameters())
    assert own["embed.weight"].grad is None
    optimizer.step(lambda: later.train_step(batch))
    assert later.train_step(batch) < third
    state = optimizer.state_dict()
    fewer = {
        **state,
        "state": {n: {k: v[:0] if v.dim() else v for k, v in s.items()} for n, s in state["state"].items()},
    }
    optimizer.load_state_dict(state)
    try:
        optimizer.load_state_dict(fewer)
    except csc.InputError as error:
        assert "it is the state of another rank or mesh" in str(error)
    else:
        assert all(not p.numel() for p in own.values())
    whole = later.with_options(zero=0)
    whole.train_step(batch)
    try:
        optimizer.step()
    except csc.InputError as error:
        assert "make a new one with compiled.optimizer" in str(error)
    else:
        raise AssertionError("an optimizer of shards stepped while whole parameters train")
    assert all(p is whole.model.get_parameter(name) for name, p in whole.named_parameters())
    (directory / f"done_{dist.get_rank()}").touch()
    dist.destroy_process_group()


def failing(compiled: csc.CompiledModel, batch: Any) -> None:
    """A step in whose middle rank 1 fails, while rank 0 waits for its gradients."""
    before = gradients.Scattered.add

    def fails(*arguments: Any) -> None:
        raise ArithmeticError("here")

    if dist.get_rank():
        gradients.Scattered.add = fails  # type: ignore[method-assign]
    try:
        compiled.train_step(batch)
    except (ArithmeticError, csc.errors.StepFailed) as error:
        assert "here" in str(error)
    else:
        raise AssertionError("nothing was raised")
    finally:
        gradients.Scattered.add = before  # type: ignore[method-assign]
