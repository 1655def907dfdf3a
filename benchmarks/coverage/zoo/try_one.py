"""One architecture: made small, run eagerly, compiled in three ways, compared with eager PyTorch.

python -m benchmarks.coverage.zoo.try_one NAME      prints one JSON object: the row
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import csc
from benchmarks.coverage.zoo.batches import candidates, encoder
from benchmarks.coverage.zoo.names import Architecture, architectures
from benchmarks.coverage.zoo.shrinking import tiny
from benchmarks.judge import PLAIN, asked, judge, loss_of

WAYS: dict[str, dict[str, Any]] = {"pp=2": {"pp": 2}, "cp=2": {"cp": 2}, "frozen": {"pp": 2}}


@dataclass(frozen=True)
class Small:
    """A model that can be made again and again, and its batch: what the judge takes."""

    architecture: Architecture
    config: Any
    entries: dict[str, Any]

    def make(self) -> nn.Module:
        return made(self.architecture, self.config)

    def batch(self, seed: int, samples: int, tokens: int) -> dict[str, Any]:
        """The one batch that there is."""
        return self.entries


def made(architecture: Architecture, config: Any) -> nn.Module:
    """The model in training mode, the same in every call, without dropout."""
    torch.manual_seed(0)
    model = architecture.model_class(config).float().train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def small(name: str) -> Small:
    """A model whose eager step runs. Raises what the first batch that was tried, the fullest, raised."""
    architecture = architectures()[name]
    config = tiny(architecture.config_class)
    config._attn_implementation = "sdpa" if architecture.model_class._supports_sdpa else "eager"
    first: Exception | None = None
    for entries in candidates(made(architecture, config), config):
        try:
            loss = loss_of(made(architecture, config)(**entries))
            loss.backward()
            return Small(architecture, config, entries)
        except Exception as error:
            first = first or error
    raise first or RuntimeError("no batch could be made")


def row(name: str) -> Iterator[dict[str, Any]]:
    """{"name", "task", "eager": reason or "", "entries", "seconds": of the processor, "ways": {way: [kind, reason,
    differences]}}, as far as it is: once before anything is compiled, then with each further way.
    """
    found: dict[str, Any] = {"name": name, "task": architectures()[name].task, "eager": "", "ways": {}}
    try:
        module = small(name)
    except Exception as error:
        place = [
            f"{f.filename.split('site-packages/')[-1]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)
        ]
        yield found | {"eager": f"{type(error).__name__}: {str(error)[:300]} ({place[-1] if place else ''})"}
        return
    found["entries"] = sorted(module.entries)
    yield found
    compiled = traced(module)
    for way, changes in WAYS.items():
        pattern = encoder(module.make()) if way == "frozen" else None
        if way == "frozen" and pattern is None:
            continue
        if compiled is None and found["ways"]:
            result = found["ways"]["pp=2"]  # no way has a trace to begin with
        else:
            outcome = judge(module, changes | {"freeze": (pattern,) if pattern else ()}, compiled)
            if outcome.kind == "eager":
                yield found | {"eager": outcome.reason, "ways": {}}
                return
            reason = re.sub(r"\S*site-packages/", "", outcome.reason)
            result = [outcome.kind, reason[:600], list(map(list, outcome.differences.items()))[:3]]
        found = found | {"ways": found["ways"] | {way: result}, "seconds": round(time.process_time(), 1)}
        yield found


def traced(module: Small) -> csc.CompiledModel | None:
    """The trace that all ways begin with; None if there is none, and the judge will say why."""
    with suppress(Exception):
        return csc.compile(module.make(), example=module.entries, cache=False, **asked({**PLAIN, **WAYS["pp=2"]}))
    return None


def quiet() -> None:
    """No warnings and no log: torch logs what it raises, and here a failure is a row."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)


if __name__ == "__main__":
    quiet()
    print("ROW " + json.dumps(list(row(sys.argv[1]))[-1], indent=1))
