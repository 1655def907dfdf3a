"""One case in a process of its own: python -m benchmarks.step_time.measure CASE (a JSON object) [--warm RIVAL]

Prints one JSON object, by rival: rounds_ms (of each step), cpu_ms (their median), over_eager (median of pairs), first_s
(wall seconds from the model to the end of its first step), peak_mb (of a step, above what was held before it),
difference (the largest relative difference of loss and gradients to eager). --warm: first_s alone, of one rival.
--rounds: at least; more until --seconds are over.

Times are CPU seconds of this process with one thread: other work on the machine then changes little. Rivals take turns,
so that what does change meets all of them.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import csc
from benchmarks.step_time.cases import Case
from benchmarks.step_time.models import build
from csc.commands.tables import peak_memory

EAGER, COMPILE, CSC, FUSED = "eager", "torch.compile", "csc", "csc fused"
WHOLE = "csc, whole logits"  # of cases in which csc would not make them whole
TORCH_CHUNKS = "torch's LinearCrossEntropyLoss"  # of the case that is a head, from torch 2.13 on
OF_HEAD = (WHOLE, TORCH_CHUNKS) if hasattr(nn, "LinearCrossEntropyLoss") else (WHOLE,)
RIVALS = (EAGER, COMPILE, CSC, FUSED, *OF_HEAD)
Step = Callable[[], torch.Tensor]


def step_of(name: str, model: nn.Module, batch: Mapping[str, torch.Tensor], case: Case) -> Step:
    """A function that makes a step: loss, and gradients in `.grad`."""
    if name in (CSC, FUSED, WHOLE):
        options: dict[str, Any] = {"fuse": name == FUSED, "loss_chunk": 0 if name == WHOLE else None}
        compiled = csc.compile(model, example=dict(batch), mesh={"pp": case.pp}, check=False, **options)
        return lambda: compiled.train_step(dict(batch))
    if name == TORCH_CHUNKS:
        model.chunked = True  # type: ignore[assignment]
    forward: Any = torch.compile(model, dynamic=False) if name == COMPILE else model

    def step() -> torch.Tensor:
        loss: torch.Tensor = forward(**batch).loss
        loss.backward()
        return loss.detach()

    return step


def measure(case: Case, names: tuple[str, ...], least: int, enough: float) -> dict[str, dict[str, Any]]:
    """All rivals of a case, in `least` rounds and more until `enough` seconds are over; see the module."""
    model, batch = build(case)
    models = {name: copy.deepcopy(model) for name in names}
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    results = {}
    for name in names:
        start = time.perf_counter()
        steps[name] = step_of(name, models[name], batch, case)
        loss = steps[name]()
        found[name] = {"first_s": time.perf_counter() - start}
        results[name] = result(models[name], loss)
        steps[name]()  # what runs in the second step for the first time
        models[name].zero_grad()
    for name in names:
        found[name]["peak_mb"] = _peak(steps[name], models[name])
        found[name]["difference"] = difference(results[names[0]], results[name])
    rounds: list[dict[str, float]] = []
    begun = time.perf_counter()
    while len(rounds) < least or time.perf_counter() - begun < enough:
        rounds.append({name: 1e3 * _seconds(steps[name], models[name]) for name in turn(names, len(rounds))})
    for name in names:
        found[name]["rounds_ms"] = [row[name] for row in rounds]
        found[name]["cpu_ms"] = median(found[name]["rounds_ms"])
        found[name]["over_eager"] = median(row[name] / row[names[0]] for row in rounds)
    return found


def warm(case: Case, name: str) -> dict[str, dict[str, float]]:
    """Seconds to the end of the first step, of one rival, with what an earlier process has left on disk."""
    model, batch = build(case)
    start = time.perf_counter()
    step_of(name, model, batch, case)()
    return {name: {"warm_s": time.perf_counter() - start}}


def turn(names: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Each rival runs behind each other one about as often."""
    return names[number % len(names) :] + names[: number % len(names)]


def _seconds(step: Step, model: nn.Module) -> float:
    start = time.process_time()
    step()
    spent = time.process_time() - start
    model.zero_grad()
    return spent


def _peak(step: Step, model: nn.Module) -> float:
    """MB that the process grows by in a step, gradients included. Linux counts, once its mark has been taken back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    step()
    grown = peak_memory() - before
    model.zero_grad()
    return grown / 2**20


def result(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"": loss.clone()}


def difference(reference: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> float:
    """The largest relative one; infinite where a gradient is missing or too many."""
    if reference.keys() != own.keys():
        return float("inf")
    floor = 1e-4 * max(float(value.norm()) for value in reference.values())
    return max(float((own[name] - value).norm()) / max(float(value.norm()), floor) for name, value in reference.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--warm", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    case = Case(**json.loads(arguments.case))
    if arguments.warm:
        found = warm(case, arguments.rivals[0])
    else:
        found = measure(case, tuple(arguments.rivals), arguments.rounds, arguments.seconds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
