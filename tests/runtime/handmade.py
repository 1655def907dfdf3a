"""A program directory written by hand, and the same model for eager autograd.

    ids -> embed E -> h --(skip)------------------------------+
                      h @ w0 -> tanh -> a (sent transposed) --+--> z = x + h + a * scale -> logits = z E^T ->
                      loss
                                        a @ w1 + b1 + b1 -> x-+

Stage 0 holds E and w0, stage 1 holds w1 and b1 (used twice), stage 2 holds E again (tied). `a` goes to two
stages, with strides that are not contiguous, so its gradient comes from two stages. Frozen: "none"; "prefix"
(E and w0: stage 0 has no B and no W); "middle" (w1 and b1: stage 1 has B and no W). `placement` says which rank
runs which stage: (0, 1, 2) by default, (0, 0, 0) for one rank that runs all, (0, 1, 0) for a V.

    write(directory, ...) -> directory      weights(dtype) -> {name: tensor}      batch(...)
    eager(weights, batch) -> loss, gradients
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from csc.planning.schedules import SCHEDULES
from csc.simulation.pipeline import Pipeline, StageWork

VOCABULARY, WIDTH, ROWS, LENGTH = 11, 6, 2, 5
FROZEN = {"none": (), "prefix": ("embed", "w0"), "middle": ("w1", "b1"), "all": ("embed", "w0", "w1", "b1")}
SHAPES = {"embed": [VOCABULARY, WIDTH], "w0": [WIDTH, WIDTH], "w1": [WIDTH, WIDTH], "b1": [WIDTH]}
HOLDERS = {"embed": [0, 2], "w0": [0], "w1": [1], "b1": [1]}

STAGE_0 = """
import torch

def forward(batch, received, weights, constants):
    ids = batch["ids"]
    h = weights["embed"][ids]
    a = torch.tanh(h @ weights["w0"])
    return {"h": h, "a": a.transpose(1, 2)}, (ids, h, a)

def backward_input(saved, received, weights, constants):
    ids, h, a = saved
    da = received["a"].transpose(1, 2) * (1 - a * a)
    dh = received["h"] + da @ weights["w0"].T
    return {}, (ids, h, da, dh)

def backward_weight(saved, weights, constants):
    ids, h, da, dh = saved
    yield "w0", h.flatten(0, 1).T @ da.flatten(0, 1)
    yield "embed", torch.zeros_like(weights["embed"]).index_add_(0, ids.flatten(), dh.flatten(0, 1))
"""

STAGE_1 = """
import torch

def forward(batch, received, weights, constants):
    a = received["a"]
    assert a.stride()[1:] == (1, a.shape[1]), a.stride()
    a = a.transpose(1, 2)
    return {"x": a @ weights["w1"] + weights["b1"] + weights["b1"]}, (a,)

def backward_input(saved, received, weights, constants):
    (a,) = saved
    dx = received["x"]
    sent = {"a": (dx @ weights["w1"].T).transpose(1, 2)} if SENDS else {}
    return sent, (a, dx)

def backward_weight(saved, weights, constants):
    a, dx = saved
    yield "w1", a.flatten(0, 1).T @ dx.flatten(0, 1)
    yield "b1", dx.sum((0, 1))
    yield "b1", dx.sum((0, 1))
"""

STAGE_2 = """
import torch

def loss_tokens(batch, constants):
    return (batch["labels"] != -100).sum()

def forward(batch, received, weights, constants):
    a = received["a"].transpose(1, 2)
    z = received["x"] + received["h"] + a * constants["scale"]
    logits = z @ weights["embed"].T
    labels = batch["labels"]
    logp = logits.log_softmax(-1)
    keep = labels != -100
    safe = labels.where(keep, 0)
    total = -(logp.gather(-1, safe.unsqueeze(-1)).squeeze(-1) * keep).sum()
    count = keep.sum()
    return {"loss": total / count if MEAN else total}, (z, logp, keep, safe, count)

def backward_input(saved, received, weights, constants):
    z, logp, keep, safe, count = saved
    share = received["loss"] / count.clamp(min=1) if MEAN else received["loss"]
    d = logp.exp()
    d.scatter_add_(-1, safe.unsqueeze(-1), -torch.ones_like(d[..., :1]))
    d = d * (keep.unsqueeze(-1) * share)
    dz = d @ weights["embed"]
    sent = {"x": dz, "h": dz, "a": (dz * constants["scale"]).transpose(1, 2)}
    return sent, (z, d)

def backward_weight(saved, weights, constants):
    z, d = saved
    yield "embed", d.flatten(0, 1).T @ z.flatten(0, 1)
"""


BACKWARD = """
def backward(saved, received, weights, constants):
    sent, stashed = backward_input(saved, received, weights, constants)
    yield from backward_weight(stashed, weights, constants)
    return sent
"""


def rank_text(stages: list[int], names: dict[int, list[str]]) -> str:
    """rank_R.py: the functions of its stages, with the stage at the end of the name if there are several."""
    lines = [f'"""Stages {stages}."""']
    for stage in stages:
        renamed = [f"{name} as {name}_{stage}" if len(stages) > 1 else name for name in names[stage]]
        lines.append(f"from .layers.stage_{stage} import {', '.join(renamed)}")
    return "\n".join([*lines, "", f"STAGES = {tuple(stages)!r}", ""])


def write(
    directory: Path,
    *,
    placement: tuple[int, int, int] = (0, 1, 2),
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    microbatches: int = 4,
    frozen: str = "none",
    schedule: str = "1f1b",
    text: str = "",
    weight: str = "tokens",
    dtype: str = "float32",
    device: str = "cpu",
    with_weights: bool = True,
) -> Path:
    """Write the program directory and return it. `directory` must not exist."""
    pp = max(placement) + 1
    (directory / "layers").mkdir(parents=True)
    fixed = FROZEN[frozen]
    has_w = [any(n not in fixed for n, held in HOLDERS.items() if s in held) for s in range(3)]
    has_b = [has_w[0], has_w[0] or has_w[1], any(has_w)]
    files = {
        "__init__.py": "",
        "layers/__init__.py": "",
        "layers/stage_0.py": STAGE_0 + BACKWARD,
        "layers/stage_1.py": f"SENDS = {has_b[0]}\n" + STAGE_1 + BACKWARD,
        "layers/stage_2.py": f"MEAN = {weight != 'sum'}\n" + STAGE_2 + BACKWARD,
    }
    names = {
        stage: ["forward"]
        + ["backward_input"] * has_b[stage]
        + ["backward_weight"] * has_w[stage]
        + ["backward"] * (has_b[stage] and has_w[stage])
        for stage in range(3)
    }
    names[2].append("loss_tokens")
    for rank in range(pp * dp * cp * tp):
        files[f"rank_{rank}.py"] = rank_text([s for s in range(3) if placement[s] == rank // (cp * tp) % pp], names)

    flat, turned = [ROWS, LENGTH, WIDTH], [ROWS, WIDTH, LENGTH]
    h, x = ({"name": n, "shape": flat, "stride": [LENGTH * WIDTH, WIDTH, 1], "dtype": dtype} for n in "hx")
    a = {"name": "a", "shape": turned, "stride": [LENGTH * WIDTH, 1, WIDTH], "dtype": dtype}
    edges = {(0, 1): [a], (0, 2): [h, a], (1, 2): [x]}
    messages: list[dict[str, Any]] = [
        {"kind": "F", "source": s, "destination": d, "values": values} for (s, d), values in edges.items()
    ]
    messages += [
        {"kind": "B", "source": d, "destination": s, "values": values} for (s, d), values in edges.items() if has_b[s]
    ]
    channels = [(m["kind"], m["source"], m["destination"]) for m in messages]
    costs = tuple(StageWork(1.0, float(b), float(w), has_b=b, has_w=w) for b, w in zip(has_b, has_w))
    pipeline = Pipeline(costs, dict.fromkeys(channels, 0.0))
    files["schedule.txt"] = text or str(SCHEDULES[schedule](pipeline, placement, microbatches))

    for name, content in files.items():
        (directory / name).write_text(content)
    inputs = {0: ["ids"], 1: [], 2: ["labels"]}
    table = {
        "format": 6,
        "csc": "0.1.0",
        "torch": torch.__version__,
        "name": "Handmade",
        "mesh": {"dp": dp, "pp": pp, "cp": cp, "tp": tp},
        "device": device,
        "microbatches": microbatches,
        "inputs": [{"name": n, "shape": [ROWS, LENGTH], "dtype": "int64"} for n in ("ids", "labels")],
        "parameters": [
            {
                "name": name,
                "shape": shape,
                "dtype": dtype,
                "trainable": name not in fixed,
                "stages": HOLDERS[name],
                "weight": {"equal": "position"},
                **({} if name in fixed else {"gradient": {"parts": "data", "equal": "tensor"}}),
            }
            for name, shape in SHAPES.items()
        ],
        "constants": [{"name": "scale", "stages": [2]}],
        "messages": messages,
        "stages": [
            {
                "stage": s,
                "rank": placement[s],
                "regions": [f"stage_{s}"],
                "inputs": inputs[s],
                "forward": True,
                "backward_input": has_b[s],
                "backward_weight": has_w[s],
            }
            for s in range(3)
        ],
        **({"context": []} if cp > 1 else {}),
        "loss": {"stage": 2, "weight": weight},
        "frozen": list(fixed),
        "plan": {},
        "files": {name: hashlib.sha256(content.encode()).hexdigest() for name, content in files.items()},
    }
    (directory / "program.json").write_text(json.dumps(sealed(table), indent=1))
    kind = getattr(torch, dtype)
    save_file({"scale": scale(kind)}, directory / "constants.safetensors")
    save_file(batch(1), directory / "example.safetensors")
    if with_weights:
        save_file(weights(kind), directory / "weights.safetensors")
    return directory


def sealed(table: dict[str, Any]) -> dict[str, Any]:
    """program.json's content with the fingerprint that it should have."""
    rest = {key: value for key, value in table.items() if key not in ("fingerprint", "timings")}
    return {**table, "fingerprint": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def scale(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, WIDTH, dtype=dtype)


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=generator).to(dtype) * 0.5 for n, s in SHAPES.items()}


def batch(pieces: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Global batch of `pieces` microbatches whose numbers of counted labels differ."""
    generator = torch.Generator().manual_seed(seed)
    size = (pieces * ROWS, LENGTH)
    ids = torch.randint(VOCABULARY, size, generator=generator)
    labels = torch.randint(VOCABULARY, size, generator=generator)
    labels[torch.rand(size, generator=generator) < 0.4] = -100
    labels[::ROWS, 0] = 1  # at least one in every microbatch
    return {"ids": ids, "labels": labels}


def eager(
    weights: dict[str, torch.Tensor], batch: dict[str, torch.Tensor], reduction: str = "mean"
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole batch in one process by autograd."""
    p = {n: w.detach().clone().requires_grad_() for n, w in weights.items()}
    h = p["embed"][batch["ids"]]
    a = torch.tanh(h @ p["w0"])
    z = a @ p["w1"] + p["b1"] + p["b1"] + h + a * scale(h.dtype)
    logits = z @ p["embed"].T
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction=reduction)
    loss.backward()
    return loss.detach(), {n: w.grad for n, w in p.items() if w.grad is not None}
