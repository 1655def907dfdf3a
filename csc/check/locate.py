"""Where a program and eager PyTorch part: the first region whose values differ, else the last whose gradients do.

Terms: the *plain* program is that of one microbatch on one rank, from the same capture. What differs there differs in
the capture or in a region's backward; what does not, in how microbatches and ranks are put together.

    locate(compiler, microbatch, options, tolerance) -> PartingPlace
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from csc.capture.batch import device_of
from csc.capture.trace.export import training, without_kv_cache
from csc.check.compiling import Compiles
from csc.check.eager import EagerStep, eager_step
from csc.check.judge import judge
from csc.check.numbers import WithoutChance
from csc.check.one_step import step_of
from csc.check.undisturbed import undisturbed
from csc.ir import graph as g
from csc.ir.groups import LOSS_WEIGHTS
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program, Region, compute_dtypes
from csc.runtime.loaded_program import load
from csc.runtime.trainer import Trainer
from csc.runtime.transport import InProcess
from csc.torch_private.traces import pytree

NUMBERS = torch.tensor(-1)  # the seed of a microbatch that leaves nothing to chance


@dataclass(frozen=True)
class PartingPlace:
    """what: a clause that says what parts; where: the region and the line of the user's code; whole: one microbatch on
    one rank is right, and the difference comes from putting them together.
    """

    what: str
    where: str
    whole: bool = False


def locate(compiler: Compiles, microbatch: Mapping[str, Any], options: Options, tolerance: float) -> PartingPlace:
    """microbatch: one, as the user gives it; options: those of the program that differs."""
    plain = replace(
        options, mesh=Mesh(), microbatches=1, context=(), cuts=None, stages=None, placement=None, chunks=None,
        schedule="auto", memory=None, features=False,
    )  # fmt: skip
    program = compiler.finished(microbatch, plain)
    place = _values_part(program, compiler.model, compiler.complete(microbatch), microbatch, tolerance)
    if place is not None:
        return place
    trainable = {p.name for p in program.parameters if p.trainable}
    right = eager_step(compiler.model, microbatch, trainable)
    complete = compiler.complete(microbatch)
    with tempfile.TemporaryDirectory(prefix="csc-check-") as folder:
        compiler.emit(program, plain, Path(folder) / "program", complete)
        loaded = load(Path(folder) / "program")
        trainer = Trainer(loaded, dict(compiler.model.named_parameters()), InProcess(loaded))
        found = step_of(trainer, [complete])
    return _gradients_part(program, right, found, tolerance)


def _gradients_part(program: Program, right: EagerStep, found: EagerStep, tolerance: float) -> PartingPlace:
    result = judge(right, found.loss, found.gradients, [tolerance], lambda: dict.fromkeys(["", *right.gradients], 0.0))
    apart = {*result.wrong, *result.missing, *result.unexpected}
    if result.loss_wrong:
        return PartingPlace(
            "each region's graph has the values of its module, and the program that was written has others", ""
        )
    for region in reversed(program.regions):
        own = sorted(apart & set(region.parameters))
        if own:
            return PartingPlace(f"its values are right, and the gradient of {own[0]!r} is not", _line(program, region))
    if apart:
        return PartingPlace(f"no region holds {min(apart)!r}, whose gradient is not right", "")
    return PartingPlace("each microbatch alone is right on one rank", "", whole=True)


@torch.no_grad()
def _values_part(
    program: Program, model: nn.Module, complete: Mapping[str, Any], microbatch: Mapping[str, Any], tolerance: float
) -> PartingPlace | None:
    """The first region whose output is none of those of its module in eager PyTorch."""
    device = device_of(model)
    modules = {region.module for region in program.regions}
    with undisturbed(model), training(model), without_kv_cache(model), _watched(model, modules) as seen:
        given = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in microbatch.items() if v is not None}
        with WithoutChance():
            model(**given)
    for region, outputs in _run(program, model, {n: t for n, t in complete.items() if isinstance(t, torch.Tensor)}):
        for found in outputs:
            alike = [value for value in seen.get(region.module, ()) if value.shape == found.shape]
            if alike and not any(_close(value, found, tolerance) for value in alike):
                return PartingPlace("its values are not those of the module", _line(program, region))
    return None


def _close(right: torch.Tensor, found: torch.Tensor, tolerance: float) -> bool:
    wide = torch.complex128 if right.is_complex() else torch.float64
    one, other = right.to(wide), found.to(wide)
    scale = float(torch.linalg.vector_norm(one))
    return float(torch.linalg.vector_norm(other - one)) <= 10 * tolerance * max(scale, 1e-12)


@contextmanager
def _watched(model: nn.Module, paths: set[str]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Inside, what these modules return is kept."""
    seen: dict[str, list[torch.Tensor]] = {}
    hooks = []
    for path, module in model.named_modules():
        if path in paths:

            def keep(_: nn.Module, __: Any, result: Any, path: str = path) -> None:
                tensors = [leaf.detach().clone() for leaf in pytree.tree_leaves(result) if torch.is_tensor(leaf)]
                seen.setdefault(path, []).extend(tensors)

            hooks.append(module.register_forward_hook(keep))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _run(
    program: Program, model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Region, list[torch.Tensor]]]:
    """Every region with its outputs, in order of execution."""
    device = device_of(model)
    dtypes = compute_dtypes(program)
    weights = {name: p.detach().to(dtypes.get(name, p.dtype)) for name, p in model.named_parameters()}
    tables: dict[str, torch.Tensor] = {}
    if program.shared is not None:
        entries = {("input", n): t.to(device) for n, t in batch.items()}
        entries |= {("constant", n): t.to(device) for n, t in program.constants.items()}
        entries["random", "seed"] = NUMBERS
        entries[LOSS_WEIGHTS] = torch.ones(len(program.combination.divisors), dtype=torch.float64, device=device)
        tables = dict(zip(program.shared.output_node().meta["names"], _results(program.shared, entries)))
    made: dict[str, torch.Tensor] = {}
    for region in program.regions:
        template = program.templates[region.template]
        values = {("activation", str(i)): made[value] for i, value in enumerate(region.activations)}
        values |= {("shared", own): tables[table] for own, table in zip(template.shared, region.shared)}
        values |= {("parameter", own): weights[name] for own, name in zip(template.parameters, region.parameters)}
        outputs = list(_results(template.graph, values))
        made.update(zip(region.outputs, outputs))
        yield region, outputs


def _results(graph: fx.Graph, values: Mapping[Any, torch.Tensor]) -> Any:
    inputs = [values[node.meta["role"]] for node in g.placeholders(graph)]
    return fx.Interpreter(nn.Module(), graph=graph).run(*inputs)


def _line(program: Program, region: Region) -> str:
    lines = [node.meta.get("source") for node in g.calls(program.templates[region.template].graph)]
    found = next((line for line in reversed(lines) if line), "")
    return f"region {region.name} ({found})" if found else f"region {region.name}"
