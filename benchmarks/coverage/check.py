"""Compiles one model in several ways and compares each with eager PyTorch.

check(name, build, ways, device) -> Row        never raises for what csc refuses: the row holds the reason
compare(name, model, batch, ways) -> (Row, what was compiled for the first of them, or None)
of_meshes(["tp=2"]) -> ways
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

import csc
from benchmarks.coverage.models import Build
from csc.capture.values.hoist import HostCall
from csc.reports.verification import Verification, default_tolerance, verify

WAYS = {"pp=3": "pp=3", "cp=2": "cp=2", "projector": "pp=3"}
ALONE = "projector"  # of a way: with that alone training
WHOLE = "on each tp rank whole: "
PROJECTOR = re.compile(r"projector|merger|connector|modality_projection|image_newline|adapter|aligner")


@dataclass(frozen=True)
class Row:
    """What came of one model.

    nodes: of the captured graph; templates: unique layers of `regions`; seconds: from the model to the program for
    the first way. Of each way: the largest relative difference of a gradient ("bit-equal" if there is none), those left
    out that float32 does not resolve (`csc verify --float64`); "-" if the model has no projector, or the reason that it
    does not compile. divided: of ways with tp, the part of the parameters' entries that ranks divide; whole: why others
    stay so.
    """

    name: str
    nodes: int | None
    regions: int | None
    templates: int | None
    seconds: float | None
    fixed: tuple[str, ...]
    host: tuple[str, ...]
    ways: dict[str, str]
    divided: dict[str, float] = field(default_factory=dict)
    whole: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """Compiled the first way, with all gradients."""
        return fine(next(iter(self.ways.values())))

    def table(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "works": {way: fine(result) for way, result in self.ways.items()}}


def fine(result: str) -> bool:
    """Whether one way's result is a comparison that went well."""
    return result in ("-", "bit-equal") or bool(re.fullmatch(r"[\d.]+e-\d+", result))


def of_meshes(meshes: Sequence[str]) -> dict[str, str]:
    """Each with everything training, and with the projector alone."""
    return {f"{mesh}{alone}": mesh for mesh in meshes for alone in ("", f", {ALONE}")}


def check(name: str, build: Build, ways: Mapping[str, str] = WAYS, device: str = "cpu") -> Row:
    """Build the model, compile it in each way, in some with the projector alone training, and compare gradients.

    ways: meshes, by what they are called. device: where it is compared; weights and data are the same everywhere.
    """
    torch.manual_seed(0)
    model, batch = build()
    return compare(name, model.to(device), {key: tensor.to(device) for key, tensor in batch.items()}, ways)[0]


def compare(
    name: str, model: nn.Module, batch: Mapping[str, Any], ways: Mapping[str, str] = WAYS
) -> tuple[Row, csc.CompiledModel | None]:
    """The same for a model that is there, and what it was compiled to."""
    model.train()
    start = time.perf_counter()
    compiled, reason = _tried(lambda: csc.compile(model, mesh=next(iter(ways.values())), example=batch))
    if compiled is None:
        return Row(name, None, None, None, None, (), (), dict.fromkeys(ways, reason)), None
    seconds = time.perf_counter() - start
    program = compiled.program
    frozen = tuple(name for name, _ in model.named_parameters() if not PROJECTOR.search(name))
    results, divided, whole = {}, {}, set[str]()
    for way, mesh in ways.items():
        if ALONE in way and len(frozen) == len(program.parameters):
            results[way] = "-"
            continue
        chosen = compiled.with_options(mesh=mesh, freeze=frozen if ALONE in way else None)
        result, reason = _tried(lambda chosen=chosen: _compared(chosen))  # type: ignore[misc]
        results[way] = reason if result is None else result
        if "tp=" in mesh and result is not None:
            last = chosen.history()[-1]
            entries = [(p.numel, bool(p.boxes)) for p in last.parameters]
            divided[way] = round(sum(n for n, cut in entries if cut) / sum(n for n, _ in entries), 2)
            whole |= {note.removeprefix(WHOLE) for note in last.notes if note.startswith(WHOLE)}
    row = Row(
        name=name,
        nodes=len(compiled.history()[0].graph.nodes),
        regions=len(program.regions),
        templates=len(program.templates),
        seconds=round(seconds, 1),
        fixed=tuple(sorted(program.guards.values)),
        host=tuple(c.name if isinstance(c, HostCall) else c.prefix for c in compiled.compiler.guards.host.calls),
        ways=results,
        divided=divided,
        whole=tuple(sorted(whole)),
    )
    return row, compiled


def _compared(chosen: csc.CompiledModel) -> str:
    result, worst = compared_gradients(chosen)
    if result.params_missing:
        return f"no gradient for {result.params_missing[0]}"
    return "bit-equal" if result.grad_rel_max == 0 and result.loss_rel == 0 else f"{worst:.1e}"


def compared_gradients(chosen: csc.CompiledModel) -> tuple[Verification, float]:
    """And the largest relative difference of the loss or a gradient; in doubt those left out that float32 does not
    resolve.
    """
    result = verify(chosen)
    tolerance = default_tolerance(chosen.options)
    if not result.good(tolerance):
        result = verify(chosen, float64=True)
    differing = result.differing(tolerance)
    resolved = [value for name, value in result.grad_rel.items() if value <= tolerance or name in differing]
    return result, max([*resolved, result.loss_rel])


def _tried(work: Callable[[], Any]) -> tuple[Any, str]:
    """(what it returns, "") or (None, the reason in one line)."""
    try:
        return work(), ""
    except csc.CscError as error:
        return None, str(error).splitlines()[0]
