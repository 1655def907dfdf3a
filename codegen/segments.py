"""A stage's regions as a reader would write them down: single calls, and loops over equal layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from csc.codegen.index import ProgramNames
from csc.codegen.python import quoted

from csc.ir.program import Region, Stage


@dataclass(frozen=True)
class Segment:
    """One region, or a loop over several of one variant.

    carried: the activation that each turn hands to the next (its position); -1 for a single region.
    """

    regions: tuple[Region, ...]
    carried: int = -1

    @property
    def loops(self) -> bool:
        return len(self.regions) > 1

    @property
    def first(self) -> Region:
        return self.regions[0]

    @property
    def last(self) -> Region:
        return self.regions[-1]


def segments(index: ProgramNames, stage: Stage) -> list[Segment]:
    """The stage's regions in order; neighbours join a loop if only the carried activation and the parameters differ."""
    runs: list[list[Region]] = []
    carries: list[int] = []
    for name in stage.regions:
        region = index.regions[name]
        if runs:
            carried = _carried(runs[-1], carries[-1], region, index.readers)
            if index.seeds.intersection(region.shared) and not _named_like_module(region, runs[-1][-1]):
                carried = None
            if carried is not None:
                runs[-1].append(region)
                carries[-1] = carried
                continue
        runs.append([region])
        carries.append(-1)
    return [Segment(tuple(run), carried) for run, carried in zip(runs, carries, strict=True)]


def _named_like_module(*regions: Region) -> bool:
    """True if a loop over modules also names the regions, as their seeds ask for."""
    return all(region.name == region.module for region in regions)


def _carried(run: Sequence[Region], carried: int, region: Region, readers: Mapping[str, int]) -> int | None:
    """The position of the activation that joins `region` to the run; None if it does not fit."""
    before = run[-1]
    if region.variant != before.variant or region.kind != "layer" or region.shared != before.shared:
        return None
    if len(before.outputs) != 1 or readers.get(before.outputs[0]) != 1 or before.outputs[0] not in region.activations:
        return None
    position = region.activations.index(before.outputs[0])
    if len(run) > 1 and position != carried:
        return None
    others = [i for i in range(len(region.activations)) if i != position]
    if any(region.activations[i] != before.activations[i] for i in others):
        return None
    if _pattern(region.module)[0] != _pattern(before.module)[0] or _locals(region) != _locals(before):
        return None
    return position


def _pattern(module: str) -> tuple[str, int]:
    """("model.layers.", 3) for model.layers.3; a path without a number gives itself and -1."""
    found = re.fullmatch(r"(.*\.)?(\d+)", module)
    return (found[1] or "", int(found[2])) if found else (module, -1)


def _locals(region: Region) -> tuple[str, ...]:
    return tuple(name.removeprefix(f"{region.module}.") for name in region.parameters)


def prefixes_source(modules: Sequence[str]) -> str:
    """A list of parameter prefixes: `[f"model.layers.{i}." for i in range(2, 9)]`, or written out."""
    patterns = [_pattern(module) for module in modules]
    numbers = [number for _, number in patterns]
    if len({prefix for prefix, _ in patterns}) == 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        prefix = patterns[0][0]
        if re.fullmatch(r"[\w.]*", prefix, flags=re.ASCII):
            return f'[f"{prefix}{{i}}." for i in range({numbers[0]}, {numbers[-1] + 1})]'
    return "[" + ", ".join(quoted(f"{module}.") for module in modules) + "]"
