"""Rivals on one mesh for all components, with stages and schedules as they are made without csc.

Terms
  settings   a layout (csc.planning.meshes) with a level of ZeRO and a choice of recomputation
  even       layers in equal numbers on all stages, or stages of equal forward time, blind to what is frozen; under
             1F1B, and under interleaved 1F1B with two stages on a rank

    best_uniform(priced, ..)      the fastest of all settings on even stages that fits: brute force
    megatron(priced, ..)          tp as large as a node allows, pp the least that fits, dp the rest; equal layers
    cornstarch(priced, ..)        tp=2, at most 6 stages, stages of encoders beside those of the LLM: the best template;
                                  everything computed again (arXiv 2503.11367)
    least_seconds_of(priced, ..)  what no setting beats under any schedule, stages and memory

A rival that fits nowhere is priced as it is, and marked. Settings whose work alone takes longer than the best so far
are not priced, which changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from csc.passes.pipeline_problem import problem
from csc.passes.step_end import least_behind, seconds_behind

from benchmarks.pipeline.baselines import Split, balanced, equal_layers, templates
from csc.driver.mesh_candidates import DividedModel
from csc.driver.options import changed
from csc.errors import CscError
from csc.ir.groups import Group
from csc.ir.program import Options, Program
from csc.planning.gathers import with_gathers
from csc.planning.meshes import MeshLayout, least_memory, least_seconds
from csc.planning.problem import Problem, pipeline
from csc.planning.schedules import SCHEDULES, placement
from csc.simulation.pipeline import peaks
from csc.simulation.simulate import simulate

SCHEDULED = (("1f1b", 1), ("interleaved-1f1b", 2))
CORNSTARCH_TP, CORNSTARCH_STAGES = 2, 6


@dataclass(frozen=True)
class MeshRival:
    """seconds: of a step, its end included; None: it cannot be made. peak_memory: of the fullest rank."""

    name: str
    seconds: float | None
    peak_memory: float = 0.0
    fits: bool = False
    what: str = ""


class Settings:
    """What is asked of a divided model again and again, kept."""

    def __init__(self, model: DividedModel) -> None:
        self.model = model
        self._programs: dict[Any, Program | None] = {}
        self._work: dict[Any, Problem] = {}

    def of(self, layout: MeshLayout, zero: int, recompute: str) -> tuple[Program, Options, Problem] | None:
        """None where csc cannot divide the model so."""
        several = len(layout.mesh.group(Group.DATA, 0)) > 1
        options = changed(
            self.model.options, mesh=layout.mesh, microbatches=layout.microbatches, zero=zero if several else 0,
            recompute=recompute,
        )  # fmt: skip
        program = self._program(layout, recompute, options)
        return None if program is None else (program, options, problem(program, options))

    def work(self, layout: MeshLayout, recompute: str) -> Problem | None:
        """Its seconds alone, which are those of all layouts with the same graphs."""
        key = (layout.mesh.tp, layout.mesh.cp, recompute)
        if key not in self._work:
            found = self.of(layout, 1, recompute)
            if found is None:
                return None
            self._work[key] = found[2]
        return replace(self._work[key], ranks=layout.mesh.pp, microbatches=layout.microbatches, memory=None)

    def _program(self, layout: MeshLayout, recompute: str, options: Options) -> Program | None:
        key = (layout.mesh.tp, layout.mesh.cp, recompute)
        if key not in self._programs:
            try:
                self._programs[key] = self.model.divided(options, layout.samples)
            except CscError:
                self._programs[key] = None
        return self._programs[key]


def run_as(
    program: Program, options: Options, whole: Problem, stages: Split, name: str, chunks: int
) -> tuple[float, float]:
    """(seconds of a step, bytes of the fullest rank) of these stages under a schedule by name."""
    home = placement(name, whole.ranks, chunks)
    numbers = pipeline(whole, stages, home)
    schedule = with_gathers(numbers, SCHEDULES[name](numbers, home, whole.microbatches), whole.limits)
    timeline = simulate(numbers, schedule)
    return timeline.makespan + seconds_behind(program, options, stages, home), max(peaks(numbers, schedule, timeline))


def layers_of(program: Program) -> list[bool]:
    return [region.kind == "layer" for region in program.regions]


def _even(program: Program, whole: Problem, equal: bool) -> Iterator[tuple[str, int, Split]]:
    for name, chunks in SCHEDULED:
        count = whole.ranks * chunks
        if chunks > 1 and (whole.ranks == 1 or count > len(whole.units) or whole.microbatches % whole.ranks):
            continue
        splits: list[Callable[[], Split]] = [lambda count=count: equal_layers(whole, layers_of(program), count)]  # type: ignore[misc]
        if not equal:
            splits.append(lambda count=count: balanced(whole, count))  # type: ignore[misc]
        for split in splits:
            try:
                yield name, chunks, split()
            except ValueError:  # more stages than layers
                continue


def best_uniform(settings: Settings, layouts: Sequence[MeshLayout], memory: float) -> MeshRival:
    """Over all layouts: those first whose work alone takes the least, until no other can be faster."""
    found: list[tuple[float, int, MeshLayout, int, str]] = []
    for layout in layouts:
        for zero, recompute in ((1, "none"), (1, "full"), (3, "none"), (3, "full")):
            work = settings.work(layout, recompute)
            if work is not None:
                found.append((least_seconds(work), len(found), layout, zero, recompute))
    best = MeshRival("best uniform", None)
    for least, _, layout, zero, recompute in sorted(found, key=lambda each: each[:2]):
        if best.seconds is not None and least >= best.seconds:
            break
        setting = settings.of(layout, zero, recompute)
        if setting is None or least_memory(setting[2]) > memory:
            continue
        if best.seconds is not None and least_seconds(setting[2]) >= best.seconds:
            continue
        for one in _priced(setting, layout, recompute, False):
            if one.fits and (best.seconds is None or (one.seconds or 0.0) < best.seconds):
                best = replace(one, name=best.name)
    return best


def least_seconds_of(settings: Settings, layouts: Sequence[MeshLayout]) -> float:
    """Work divided as well as any stages divide it, messages for nothing, nothing computed again; and behind it what
    some rank at least has to add up and step.
    """
    found = math.inf
    for layout in layouts:
        work = settings.work(layout, "none")
        if work is None or (seconds := least_seconds(work)) >= found:
            continue
        for zero in (1, 3):
            setting = settings.of(layout, zero, "none")
            if setting is not None:
                found = min(found, seconds + least_behind(*setting[:2]))
    return found


def _priced(found: Any, layout: MeshLayout, recompute: str, equal: bool) -> Iterator[MeshRival]:
    program, options, whole = found
    for name, chunks, stages in _even(program, whole, equal):
        seconds, held = run_as(program, options, whole, stages, name, chunks)
        text = f"{layout.mesh}, zero={options.zero}, recompute={recompute}, {name}"
        yield MeshRival("", seconds, held, held <= whole.memory, text)


def megatron(settings: Settings, layouts: Sequence[MeshLayout]) -> MeshRival:
    """ZeRO-1 is its distributed optimizer. The largest tp by which everything divides."""
    plain = [layout for layout in layouts if layout.mesh.cp == 1]
    last = MeshRival("Megatron", None)
    tps = sorted({layout.mesh.tp for layout in plain}, reverse=True)
    for tp in tps:
        own = sorted((layout for layout in plain if layout.mesh.tp == tp), key=lambda layout: layout.mesh.pp)
        if settings.of(own[0], 1, "none") is None:
            continue
        for layout in own:
            for recompute in ("none", "full"):
                found = settings.of(layout, 1, recompute)
                priced = list(_priced(found, layout, recompute, True)) if found is not None else []
                fitting = [one for one in priced if one.fits]
                if fitting:
                    return replace(min(fitting, key=lambda one: one.seconds or 0.0), name=last.name)
                last = replace(priced[-1], name=last.name) if priced else last
        break
    return last


def cornstarch(settings: Settings, layouts: Sequence[MeshLayout]) -> MeshRival:
    """Of the layouts with its tp the longest pipelines that it has; of templates the fastest, if any fits of those."""
    own = [one for one in layouts if (one.mesh.tp, one.mesh.cp) == (CORNSTARCH_TP, 1)]
    own = [one for one in own if one.mesh.pp <= CORNSTARCH_STAGES]
    found: list[MeshRival] = []
    if own:
        layout = max(own, key=lambda one: one.mesh.pp)
        setting = settings.of(layout, 1, "full")
        if setting is not None:
            program, options, whole = setting
            for ratio, stages in templates(whole, layers_of(program)):
                seconds, held = run_as(program, options, whole, stages, "1f1b", 1)
                fits = whole.memory is None or held <= whole.memory
                found.append(MeshRival("Cornstarch", seconds, held, fits, f"{layout.mesh}, stages {ratio}"))
    if not found:
        return MeshRival("Cornstarch", None)
    return min(found, key=lambda one: (not one.fits, one.seconds))


def contiguous_split(units: Sequence[int], weights: Sequence[float], stages: int) -> Split:
    """The units in order, in stages whose weights are as even as they can be."""
    from csc.planning.partition import balance

    starts = balance([round(1e9 * weight) for weight in weights], stages)
    return tuple(tuple(units[a:b]) for a, b in pairwise([*starts, len(units)]))
