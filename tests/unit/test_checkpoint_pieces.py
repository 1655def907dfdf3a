"""Who writes what of a checkpoint: every entry once, by a rank that holds it, in shares that are alike."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from csc.checkpoints.writing import boxes_written
from csc.ir.groups import SHARD, WHOLE
from csc.ir.mesh import Mesh
from csc.runtime.parameters import DataShards
from csc.runtime.specs import ParameterSpec, put, sizes

SHAPES = [(8, 6), (3,), (1, 5), (), (0, 4), (40, 2), (7, 7)]


def specs(mesh: Mesh) -> list[ParameterSpec]:
    """Some divided by tensor-parallel ranks, in two stretches of a dimension each; some frozen."""
    found = []
    for number, shape in enumerate(SHAPES * 3):
        boxes: Any = ()
        if shape[:1] == (8,) and mesh.tp == 2:
            boxes = tuple((((2 * t, 2 * t + 2), (4 + 2 * t, 6 + 2 * t)), ((0, 6),)) for t in range(2))
        ranks = (number % mesh.pp,)
        weight = SHARD if boxes else WHOLE
        trained = number % 3 > 0
        found.append(
            ParameterSpec(f"p{number}", shape, torch.float32, trained, ranks, ranks, weight=weight, boxes=boxes)
        )
    return found


@pytest.mark.parametrize(("zero", "failures"), [(0, 0), (1, 0), (3, 0), (1, 1)])
@pytest.mark.parametrize("mesh", ["dp=4", "pp=2,tp=2", "dp=3,pp=2", "dp=2,cp=2,tp=2", "dp=2,pp=2,order=pp-dp"])
def test_every_entry_once(mesh: str, zero: int, failures: int) -> None:
    if failures >= Mesh.of(mesh).dp:
        pytest.skip("no replica would be left")
    made = Mesh.of(mesh)
    manifest = SimpleNamespace(mesh=made, parameters=specs(made), zero=zero)
    times = {spec.name: torch.zeros(spec.shape) for spec in manifest.parameters}
    written = {spec.name: 0 for spec in manifest.parameters}
    load = [0] * made.size
    for rank in range(made.size):
        trainer: Any = SimpleNamespace(
            program=SimpleNamespace(manifest=manifest),
            transport=SimpleNamespace(ranks=[rank]),
            own=SimpleNamespace(data=DataShards(made, rank, failures=failures) if zero else None),
        )
        for spec, box in boxes_written(trainer):
            assert made.coordinates(rank).pp == spec.owner
            more = torch.zeros(spec.shape)
            put(more, box, torch.ones(sizes(box)))
            times[spec.name] += more
            written[spec.name] += 1
            load[rank] += math.prod(sizes(box))
    assert all(bool((count == 1).all()) for count in times.values()) and min(written.values()) >= 1
    of_position = [[load[r] for r in range(made.size) if made.coordinates(r).pp == p] for p in range(made.pp)]
    assert all(max(loads) - min(loads) < 120 for loads in of_position)
