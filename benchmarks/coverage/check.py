"""Compiles one model in several ways and compares each with eager PyTorch.

check(name, build) -> Row        never raises for what csc refuses: the row holds the reason
compare(name, model, batch) -> (Row, what was compiled for pp=3, or None)
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import csc
from benchmarks.coverage.models import Build
from csc.reports.verification import default_tolerance, verify

WAYS = {"pp=3": "pp=3", "cp=2": "cp=2", "projector": "pp=3"}
PROJECTOR = re.compile(r"projector|merger|connector|modality_projection|image_newline|adapter|aligner")


@dataclass(frozen=True)
class Row:
    """What came of one model.

    nodes: of the captured graph; templates: unique layers of `regions`; seconds: from the model to the program for
    pp=3. Of each way: the largest relative difference of a gradient ("bit-equal" if there is none), those left out that
    float32 does not resolve (`csc verify --float64`); "-" if the model has no projector, or the reason that it does not
    compile.
    """

    name: str
    nodes: int | None
    regions: int | None
    templates: int | None
    seconds: float | None
    fixed: tuple[str, ...]
    host: tuple[str, ...]
    ways: dict[str, str]

    @property
    def works(self) -> bool:
        """Compiled for pp=3, with all gradients."""
        return fine(self.ways["pp=3"])

    def table(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "works": {way: fine(result) for way, result in self.ways.items()}}


def fine(result: str) -> bool:
    """Whether one way's result is a comparison that went well."""
    return result in ("-", "bit-equal") or bool(re.fullmatch(r"[\d.]+e-\d+", result))


def check(name: str, build: Build) -> Row:
    """Build the model, compile it for pp=3, for cp=2 and with the projector alone training, and compare gradients."""
    torch.manual_seed(0)
    return compare(name, *build())[0]


def compare(name: str, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Row, csc.CompiledModel | None]:
    """The same for a model that is there, and what it was compiled to."""
    model.train()
    start = time.perf_counter()
    compiled, reason = _tried(lambda: csc.compile(model, mesh=WAYS["pp=3"], example=batch))
    if compiled is None:
        return Row(name, None, None, None, None, (), (), dict.fromkeys(WAYS, reason)), None
    seconds = time.perf_counter() - start
    program = compiled.program
    frozen = tuple(name for name, _ in model.named_parameters() if not PROJECTOR.search(name))
    ways = {}
    for way, mesh in WAYS.items():
        if way == "projector" and len(frozen) == len(program.parameters):
            ways[way] = "-"
            continue
        freeze = frozen if way == "projector" else None
        result, reason = _tried(lambda mesh=mesh, freeze=freeze: _compared(compiled, mesh, freeze))  # type: ignore[misc]
        ways[way] = reason if result is None else result
    row = Row(
        name=name,
        nodes=len(compiled.history()[0].graph.nodes),
        regions=len(program.regions),
        templates=len(program.templates),
        seconds=round(seconds, 1),
        fixed=tuple(sorted(program.guards.values)),
        host=tuple(call.name for call in compiled.compiler.guards.host.calls),
        ways=ways,
    )
    return row, compiled


def _compared(compiled: csc.CompiledModel, mesh: str, freeze: tuple[str, ...] | None) -> str:
    chosen = compiled.with_options(mesh=mesh, freeze=freeze)
    result = verify(chosen)
    tolerance = default_tolerance(chosen.options)
    if result.grad_rel_max > tolerance:
        result = verify(chosen, float64=True)
    if result.params_missing:
        return f"no gradient for {result.params_missing[0]}"
    if result.grad_rel_max == 0 and result.loss_rel == 0:
        return "bit-equal"
    differing = result.differing(tolerance)
    resolved = [value for name, value in result.grad_rel.items() if value <= tolerance or name in differing]
    return f"{max([*resolved, result.loss_rel]):.1e}"


def _tried(work: Callable[[], Any]) -> tuple[Any, str]:
    """(what it returns, "") or (None, the reason in one line)."""
    try:
        return work(), ""
    except csc.CscError as error:
        return None, str(error).splitlines()[0]
