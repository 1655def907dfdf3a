"""Bytes of activations: what must fit, and what a rank holds back so that it can always go on.

Terms: see work.py; saved, stashed and state as in csc.simulation.pipeline.

    least(work) -> for each rank the least bytes, with state, that let it run one microbatch at a time
    room(work, memory) -> for each rank the bytes for activations, or None        InputError: what takes the space
    reserves(work) -> for each rank what `greedy` holds back                      None: nothing
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from csc.errors import InputError
from csc.planning.schedules.work import WorkTables

AT_ONCE = 2  # stages of a rank that gathers make whole


@dataclass(frozen=True)
class Reserve:
    """Bytes by position. saved[stage]: from F until B, for the stages of the rank that have a B. extra: what one
    microbatch takes for a moment on top of all it saves, with B and W fused or not, whichever takes less. most: both
    together, of the microbatch that needs the most.
    """

    stages: tuple[int, ...]
    saved: dict[int, list[float]]
    extra: list[float]
    most: float


def reserve(work: WorkTables, rank: int) -> Reserve:
    """The bytes of one rank by position."""
    own = [s for s, home in enumerate(work.placement) if home == rank]
    stages = work.pipeline.stages
    turning = tuple(s for s in own if stages[s].has_b)
    saved = {s: work.growth[3 * s] if stages[s].has_b else [0.0] * work.microbatches for s in own}
    alike = {features: k for k, features in enumerate(work.features)}  # a position for each kind of microbatches
    extra = {features: _extra(work, own, k) for features, k in alike.items()}
    most = max(sum(saved[s][k] for s in own) + extra[features] for features, k in alike.items())
    return Reserve(turning, saved, [extra[features] for features in work.features], most)


def _extra(work: WorkTables, own: Sequence[int], position: int) -> float:
    """Bytes that B or W of one microbatch takes for a moment, on that of these stages where it is most."""
    most = 0.0
    for s in own:
        stage = work.pipeline.stages[s]
        if stage.has_w:
            apart = work.growth[3 * s + (1 if stage.has_b else 0)][position]
            most = max(most, min(apart, work.moment[s][position]) if stage.has_b else apart)
    return most


def reserves(work: WorkTables) -> list[Reserve | None]:
    """For each rank, what it must hold back; None where bytes never grow after a microbatch's first F on the rank."""
    found: list[Reserve | None] = []
    for rank in range(work.ranks):
        one = reserve(work, rank)
        saving = [s for s in one.saved if max(one.saved[s]) > 0]
        found.append(one if len(saving) > 1 or max(one.extra) > 0 else None)
    return found


def state(work: WorkTables) -> list[float]:
    """For each rank the bytes that are always there, see csc.simulation.pipeline.states, and those of the parameters that
    gathers make whole beside them, two stages at a time (csc.planning.gathers).
    """
    bytes_ = [0.0] * work.ranks
    working = [0.0] * work.ranks
    whole: list[list[float]] = [[] for _ in range(work.ranks)]
    for stage, rank in zip(work.pipeline.stages, work.placement):
        bytes_[rank] += stage.state
        working[rank] = max(working[rank], stage.working)
        whole[rank].append(stage.gathered)
    return [
        fixed + most + sum(sorted(gathered)[-AT_ONCE:])
        for fixed, most, gathered in zip(bytes_, working, whole)
    ]  # fmt: skip


def least(work: WorkTables) -> list[float]:
    """For each rank the least memory limit, state and activations, with which it can run its microbatches in turn."""
    return [fixed + reserve(work, rank).most for rank, fixed in enumerate(state(work))]


def room(work: WorkTables, memory: Sequence[float] | float | None) -> list[float] | None:
    """For each rank the bytes that are left for activations. InputError if one microbatch at a time does not fit."""
    if memory is None:
        return None
    limits = [float(memory)] * work.ranks if isinstance(memory, (int, float)) else list(memory)
    if len(limits) != work.ranks:
        raise InputError(
            f"{len(limits)} memory limits for {work.ranks} ranks", "schedule", "Give one per rank, or one for all"
        )
    if any(math.isnan(limit) for limit in limits):
        raise InputError("a rank cannot work with nan bytes of memory", "schedule", "Give a number, or no limit")
    fixed, wanted = state(work), least(work)
    worst = max(range(work.ranks), key=lambda rank: wanted[rank] / limits[rank] if limits[rank] > 0 else float("inf"))
    if any(want > limit * (1 + 1e-9) for want, limit in zip(wanted, limits)):
        stages = ", ".join(str(s) for s, rank in enumerate(work.placement) if rank == worst)
        same = all(limit == limits[0] for limit in limits)
        raise InputError(
            f"nothing fits in {size(limits[worst])}: rank {worst} (stages {stages}) needs {size(wanted[worst])}, "
            f"{size(fixed[worst])} for parameters, gradients and optimizer state and "
            f"{size(wanted[worst] - fixed[worst])} for the activations of one microbatch at a time",
            "schedule",
            f"Allow {size(max(wanted) if same else wanted[worst])} or more, or give rank {worst} less to do",
        )
    return [limit - taken for limit, taken in zip(limits, fixed)]


def size(bytes_: float) -> str:
    """Bytes in words."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(bytes_) >= factor:
            return f"{bytes_ / factor:.4g} {unit}"
    return f"{bytes_:.4g} bytes"
