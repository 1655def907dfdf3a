"""Every model in every sharded mesh with every frozen set: gradients, and weights after three clipped steps of AdamW.

parity(name, build) -> Parity          all ranks in this process; what eager PyTorch does is written out here
markdown(found) -> a table as that of docs/measurements.md, with the reasons of what is refused

The difference of a weight counts against its module's: a key's bias under softmax has no gradient but rounding, of
which AdamW makes whole steps.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import torch
from torch import nn

import csc
from benchmarks.coverage.check import PROJECTOR, compared_gradients
from benchmarks.coverage.models import Batch, Build
from csc.reports.verification import default_tolerance

MESHES: tuple[tuple[str, int], ...] = (
    ("tp=2", 0), ("tp=4", 0), ("tp=2,pp=2", 0), ("tp=2,cp=2", 0), ("tp=2,dp=2", 1), ("tp=2,dp=2", 2), ("tp=2,dp=2", 3),
)  # fmt: skip
SETS = ("everything", "projector", "LoRA", "encoder frozen")
ENCODER = re.compile(r"(^|\.)(vision_tower|visual|vision_model|audio_tower|audio_model)\.")
ADAPTED = r".*(q_proj|v_proj|o_proj|gate_proj|down_proj|linear_fc1|fc1|c_attn)"
RATE, CLIP, STEPS = 1e-3, 0.5, 3


@dataclass(frozen=True)
class Cell:
    """One mesh and frozen set. gradient, weight: the largest relative differences; reason: why it does not compile, or
    what is wrong, else empty.
    """

    mesh: str
    trained: str
    gradient: float = 0.0
    weight: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Parity:
    """All cells of one model."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class _Trained:
    """By eager PyTorch."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def parity(name: str, build: Build) -> Parity:
    """Of one model of the coverage table."""
    return Parity(name, tuple(cell for trained in SETS for cell in _cells(trained, build)))


def _cells(trained: str, build: Build) -> Iterator[Cell]:
    torch.manual_seed(0)
    model, batch = build()
    model.train()
    if trained == "LoRA":
        model = _adapted(model)
    frozen = [name for name, _ in model.named_parameters() if _is_frozen(trained, name)]
    if trained in ("projector", "encoder frozen") and len(frozen) in (0, len(list(model.parameters()))):
        return  # it has none
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    right = _by_eager(deepcopy(model), batch, frozen)
    compiled = csc.compile(model, mesh="tp=2", example=batch, freeze=frozen or None, check=False)
    for mesh, zero in MESHES:
        label = f"{mesh}, zero={zero}" if zero else mesh
        several = "dp=" in mesh  # whose losses csc may want to compare, where it cannot prove how they combine
        try:
            yield _cell(compiled.with_options(mesh=mesh, zero=zero, check=several), label, trained, batch, right)
        except csc.CscError as error:
            yield Cell(label, trained, reason=str(error).splitlines()[0])
        model.load_state_dict(start)
        model.zero_grad()


def _cell(compiled: csc.CompiledModel, mesh: str, trained: str, batch: Batch, right: _Trained) -> Cell:
    tolerance = default_tolerance(compiled.options)
    result, worst = compared_gradients(compiled)
    if not result.good(tolerance):
        reason = f"loss {result.loss_rel:.1e}, {result.params_missing[:1]}, {result.differing(tolerance)}"
        return Cell(mesh, trained, result.grad_rel_max, reason=f"gradients differ: {reason}"[:300])
    optimizer = compiled.optimizer(torch.optim.AdamW, lr=RATE, eps=1e-6)
    for loss, norm in zip(right.losses, right.norms):
        its = float(compiled.train_step(batch)), float(compiled.clip_grad_norm_(CLIP))
        for one, other in zip(its, (loss, norm)):
            if not abs(one - other) <= 10 * tolerance * abs(other):  # not of numbers that are none either
                return Cell(mesh, trained, worst, reason=f"loss and norm {its}, eager's {loss, norm}")
        optimizer.step()
        optimizer.zero_grad()
    weight, whose = _furthest(compiled.state_dict(), right.weights)
    reason = f"{whose} after {STEPS} steps: {weight:.1e}" if not weight <= 10 * tolerance else ""
    return Cell(mesh, trained, worst, weight, reason)


def _by_eager(model: nn.Module, batch: Batch, frozen: Sequence[str]) -> _Trained:
    left_out = set(frozen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in left_out)
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=RATE, eps=1e-6)
    losses, norms = [], []
    for _ in range(STEPS):
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        losses.append(float(loss))
        norms.append(float(nn.utils.clip_grad_norm_(own, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return _Trained(losses, norms, dict(model.state_dict()))


def _furthest(found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of a weight over its module's weights, and whose it is."""
    if found.keys() != right.keys():
        return inf, str(found.keys() ^ right.keys())
    size: defaultdict[str, float] = defaultdict(float)
    for name, value in right.items():
        size[name.rpartition(".")[0]] += float(value.double().square().sum())
    apart = {
        name: float((found[name].double() - value.double()).norm()) / max(size[name.rpartition(".")[0]] ** 0.5, 1e-30)
        for name, value in right.items()
    }
    worst = max(apart, key=lambda name: inf if isnan(apart[name]) else apart[name])
    return apart[worst], worst


def _is_frozen(trained: str, name: str) -> bool:
    if trained == "projector":
        return not PROJECTOR.search(name)
    return trained == "encoder frozen" and bool(ENCODER.search(name)) and not PROJECTOR.search(name)


def _adapted(model: nn.Module) -> nn.Module:
    """With adapters that are not zero: else every gradient of lora_A would be."""
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules=ADAPTED))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted.train()


def markdown(found: Sequence[Parity]) -> str:
    """A row for each model: the worst gradient and weight of all meshes, and how many meshes were right."""
    lines = [f"| model | {' | '.join(SETS)} |", f"|{' --- |' * (1 + len(SETS))}"]
    for one in found:
        lines.append(f"| {one.name} | {' | '.join(_of_set(one, trained) for trained in SETS)} |")
    reasons = [f"- **{one.name}**, {c.trained}, {c.mesh}: {c.reason}" for one in found for c in one.cells if c.reason]
    return "\n".join([*lines, "", *reasons]).rstrip()


def _of_set(one: Parity, trained: str) -> str:
    cells = [cell for cell in one.cells if cell.trained == trained]
    right = [cell for cell in cells if not cell.reason]
    if not right:
        return "no" if cells else "-"
    worst = f"{max(c.gradient for c in right):.1e}, {max(c.weight for c in right):.1e}"
    return worst if len(right) == len(cells) else f"{worst} ({len(right)} of {len(cells)})"


def summary(found: Sequence[Parity]) -> dict[str, Any]:
    """Counts over all models and cells."""
    cells = [cell for one in found for cell in one.cells]
    right = [cell for cell in cells if not cell.reason]
    return {
        "models": len(found), "cells": len(cells), "right": len(right),
        "gradient_max": max((cell.gradient for cell in right), default=0.0),
        "weight_max": max((cell.weight for cell in right), default=0.0),
    }  # fmt: skip
