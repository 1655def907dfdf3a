"""Jitter: csc's fixed orders against ranks that take what is ready, and RRFP's configurations (arXiv 2605.18750).

    readiness_cells(quick) -> [ReadinessCell]   mean step of csc's order and of readiness, at equal memory
    slowdowns(quick) -> [SlowdownCell]          by how much J0 to J3 lengthen a step
    cells(quick) -> [RrfpCell]                  its 20 configurations: csc's plan over 1F1B, beside its own figures

A stage takes 20 ms for each of F, B and W, and a message 30 % of all three (10 % in some cells): 1F1B then takes 1.6 of
its step without messages, where RRFP's table 3 measured 2.05. In 1F1B as RRFP measures it messages *block*: a rank
sends in its own time. Memory counts microbatches that a rank holds, 1x is what 1F1B's first rank holds.

RRFP's delays cannot all have been of computes: those of J3 add .45 of a compute to each on average, and its 1F1B lost
18.1 %, its own order 11.4 %. So slowdowns are given for delays of messages alone, and of both.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from benchmarks.faults.oobleck import DATA
from benchmarks.faults.readiness import readiness
from csc.ir.schedule import Schedule
from csc.planning.schedules import SCHEDULES
from csc.planning.schedules.robust import mean_makespan, robust
from csc.simulation.pipeline import Link, Network, Pipeline, StageWork, peak_memory
from csc.simulation.simulate import LEVELS, Delays, Jitter, compute_seconds, level, makespan

SECONDS = 0.020  # of F, of B, of W
SHARE = 0.3  # of F + B + W: a message
JUDGED = 100  # first seed that plans are judged by; they were chosen by others
DRAWS = 4
NAMES = ("1f1b", "zb-h1", "zb-h2")


@cache
def pipeline(ranks: int, share: float = SHARE, last: float = 1.0) -> Pipeline:
    """Equal stages in a chain; the last one takes `last` of what the others do. Messages queue for no bandwidth."""
    stages = tuple(
        StageWork(*(SECONDS * (last if s == ranks - 1 else 1.0),) * 3, saved=1.0, stashed=0.5) for s in range(ranks)
    )
    channels = {("F", s, s + 1): 0.0 for s in range(ranks - 1)} | {("B", s + 1, s): 0.0 for s in range(ranks - 1)}
    return Pipeline(stages, channels, Network(Link(3 * SECONDS * share)))


def blocking(numbers: Pipeline, schedule: Schedule, jitter: Jitter) -> float:
    """Seconds of a schedule whose ranks send in their own time, with the delays of messages."""
    latency = numbers.network.within.latency
    sends = {(kind, source): target for kind, source, target in numbers.messages}
    seconds = compute_seconds(numbers, schedule)
    for rank, (actions, lasting) in enumerate(zip(schedule.ranks, seconds)):
        own = Delays(jitter, rank, lasting[0])
        wires: dict[int, Delays] = {}
        for i, action in enumerate(action for action in actions if action.computes):
            target = sends.get(("F" if action.kind == "F" else "B", action.stage))
            added = own.of(lasting[i]) if jitter.computes else 0.0
            if target is not None:
                wire = wires.setdefault(target, Delays(jitter, f"{rank}>{target}", latency))
                added += latency + (wire.of(latency) if jitter.messages else 0.0)
            lasting[i] += added
    return makespan(replace(numbers, network=Network()), schedule, seconds=seconds)


def mean_blocking(numbers: Pipeline, microbatches: int, jitter: Jitter, draws: int = DRAWS) -> float:
    """Of 1F1B."""
    schedule = SCHEDULES["1f1b"](numbers, range(len(numbers.stages)), microbatches)
    seeds = range(jitter.seed, jitter.seed + draws)
    return sum(blocking(numbers, schedule, replace(jitter, seed=seed)) for seed in seeds) / draws


# 1. At equal memory


@dataclass(frozen=True)
class ReadinessCell:
    """memory: times 1F1B's. readiness: mean seconds with B and W in one piece; apart: with W on its own."""

    ranks: int
    microbatches: int
    share: float
    last: float
    level: str
    memory: float
    schedule: str
    csc: float
    readiness: float
    apart: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"over_readiness": self.readiness / self.csc, "over_apart": self.apart / self.csc}


def readiness_cells(quick: bool = False, draws: int = 8) -> list[ReadinessCell]:
    """Plans are made with other draws than they are judged by."""
    found = []
    shapes = ((8, 32, 0.3, 1.0),) if quick else ((8, 96, 0.3, 0.84), (8, 96, 0.1, 1.0), (4, 32, 0.3, 1.0))
    for ranks, microbatches, share, last in shapes:
        numbers = pipeline(ranks, share, last)
        for name in ("J0", "J3"):
            for memory in (1.0, 2.0, 4.0):
                room = memory * ranks
                order = robust(numbers, range(ranks), microbatches, room, level(name), draws)
                judged = level(name, JUDGED)
                csc = mean_makespan(numbers, order, judged, draws)
                each = [
                    sum(
                        readiness(numbers, microbatches, [room] * ranks, replace(judged, seed=JUDGED + i), fused)
                        for i in range(draws)
                    )
                    / draws
                    for fused in (True, False)
                ]
                found.append(
                    ReadinessCell(ranks, microbatches, share, last, name, memory, order.name, csc, each[0], each[1])
                )  # fmt: skip
    return found


# 2. From J0 to J3


@dataclass(frozen=True)
class SlowdownCell:
    """slowdown: the mean step at a level over that at J0, less 1. memory: times 1F1B's, of what the order holds."""

    delays: str
    level: str
    order: str
    memory: float
    slowdown: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def slowdowns(quick: bool = False) -> list[SlowdownCell]:
    """8 ranks and 96 microbatches (quick: 32), as in RRFP's table 6; csc at four times 1F1B's memory."""
    ranks, microbatches = 8, 32 if quick else 96
    numbers = pipeline(ranks)
    found = []
    for delays, computes in (("messages", False), ("computes and messages", True)):
        levels = {name: replace(jitter, computes=computes) for name, jitter in LEVELS.items()}
        order = robust(numbers, range(ranks), microbatches, 4.0 * ranks, levels["J3"], DRAWS)
        held = max(peak_memory(numbers, order)) / ranks
        calm = mean_makespan(numbers, order, levels["J0"])
        calm_1f1b = mean_blocking(numbers, microbatches, levels["J0"], 1)
        for name in ("J1", "J2", "J3"):
            judged = replace(levels[name], seed=JUDGED)
            csc = mean_makespan(numbers, order, judged, DRAWS) / calm - 1
            other = mean_blocking(numbers, microbatches, judged) / calm_1f1b - 1
            found.append(SlowdownCell(delays, name, order.name, held, csc))
            found.append(SlowdownCell(delays, name, "1f1b, blocking", 1.0, other))
    return found


# 3. Its configurations


@dataclass(frozen=True)
class RrfpCell:
    """Speed-ups over 1F1B with blocking messages. csc: by times 1F1B's memory that it may take; held: what it takes.
    rrfp, rrfp_w: published, of RRFP and with W on its own; their memory is not.
    """

    model: str
    mesh: str
    ranks: int
    microbatches: int
    level: str
    csc: dict[str, float]
    held: dict[str, float]
    schedules: dict[str, str]
    rrfp: float
    rrfp_w: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def cells(quick: bool = False) -> Iterator[RrfpCell]:
    """A microbatch is one sample; replicas share a batch. quick: those of GPT3-Large."""
    with (DATA / "rrfp.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if quick and (row["model"] != "GPT3-Large" or "PP16" in row["mesh"]):
            continue
        sizes = {axis: int(size) for axis, size in re.findall(r"(TP|PP|DP)(\d+)", row["mesh"])}
        ranks, microbatches = sizes["PP"], int(row["batch"]) // sizes.get("DP", 1)
        published = [float(row["1f1b"]) / float(row[name]) for name in ("rrfp", "rrfp_w")]
        for name in ("J0", "J3"):
            csc, held, schedules = _speedups(ranks, microbatches, name)
            yield RrfpCell(
                row["model"], row["mesh"], ranks, microbatches, name, csc, held, schedules, published[0], published[1]
            )  # fmt: skip


@cache
def _speedups(
    ranks: int, microbatches: int, name: str
) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:  # fmt: skip
    numbers = pipeline(ranks)
    judged = level(name, JUDGED)
    base = mean_blocking(numbers, microbatches, judged, 1 if name == "J0" else DRAWS)
    first = min(ranks, microbatches)
    csc, held, schedules = {}, {}, {}
    for times in (1.0, 2.0, 4.0):
        order = robust(numbers, range(ranks), microbatches, times * first, level(name), 2, NAMES)
        csc[f"{times:g}x"] = base / mean_makespan(numbers, order, judged, DRAWS)
        held[f"{times:g}x"] = max(peak_memory(numbers, order)) / first
        schedules[f"{times:g}x"] = order.name
    return csc, held, schedules
