"""Evaluation by programs that run forward alone, cut as the training programs are.

Terms: the model is *captured in eval mode*, by a compiler of its own: what it does then (no dropout, running
statistics) is another function. Stages and their ranks are those of training, so every rank has what it needs already.

    evaluated(model)                            context: in eval mode, whoever asks for training meanwhile
    options_for(options) -> Options              of the programs
    check_held(trained, made)                   InputError if a rank would evaluate what another one trains
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from csc.errors import InputError
from csc.ir.program import Options
from csc.runtime.specs import Manifest


def _stay(mode: bool = True) -> None:
    """In place of a module's `train`."""


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """The model in eval mode as a whole, in which `model.train()` leaves it; every module as before afterwards."""
    before = {module: module.training for module in model.modules()}
    own: dict[str, Any] = model.__dict__
    replaced = {name: own[name] for name in ("train",) if name in own}
    try:
        model.eval()
        own["train"] = _stay
        yield
    finally:
        del own["train"]
        own.update(replaced)
        for module, mode in before.items():
            module.training = mode


def options_for(options: Options) -> Options:
    """Of programs that evaluate what these train. The stages come from there."""
    return replace(options, forward_only=True, freeze=None, cuts=None, stages=None, placement=None, schedule="auto",
                   chunks=None, recompute=(), features=False)  # fmt: skip


def check_held(trained: Sequence[Manifest], made: Manifest) -> None:
    """made: of a program that evaluates. InputError if it has a parameter on a rank that does not train it."""
    if made.mesh.pp == 1:
        return
    homes = {spec.name: set(spec.ranks) for manifest in reversed(trained) for spec in manifest.parameters}
    kept = {name for manifest in trained if manifest.features is not None for name in manifest.features.parameters}
    for spec in made.parameters:
        if spec.name in kept:
            raise InputError(
                f"evaluation runs the whole model, and with cache_features no rank has {spec.name!r}", "eval_step",
                "evaluate compiled.gather() instead, or compile for pp=1",
            )  # fmt: skip
        if not set(spec.ranks) <= homes.get(spec.name, set()):
            raise InputError(
                f"in eval mode the model uses {spec.name!r} in another stage than in training, where its rank does not "
                "have what was trained",
                "eval_step",
                "evaluate compiled.gather() instead, the eager model with what all ranks have trained",
            )
