"""A pipeline whose ranks take at run time whatever is ready, as RRFP's do (arXiv 2605.18750): a reference to judge by.

    readiness(pipeline, microbatches, room, jitter, fused) -> seconds, one stage on a rank

B goes first, then F, then W; room: bytes of activations on each rank. The k-th compute of a rank and the k-th message
from one rank to another are held up as those of a fixed order are (csc.simulation.simulate). Ranks decide for
themselves
and for nothing: what agreement and messages without an order would cost is left out, in its favour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

from csc.simulation.pipeline import Pipeline
from csc.simulation.simulate import Delays, Jitter


def readiness(
    pipeline: Pipeline, microbatches: int, room: Sequence[float], jitter: Jitter, fused: bool = False
) -> float:  # fmt: skip
    """Seconds of a step. inf if a rank may start nothing with its room. fused: W right behind its B, in one compute."""
    stages, count = pipeline.stages, len(pipeline.stages)
    kinds = [[kind for kind, has in (("F", True), ("B", s.has_b), ("W", s.has_w and not fused)) if has] for s in stages]
    waits: dict[tuple[str, int], int] = {}
    feeds: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for s, stage in enumerate(stages):
        for kind in kinds[s]:
            waits[kind, s] = 0
        for before, after in zip(kinds[s], kinds[s][1:]):
            feeds.setdefault((before, s), []).append((after, s))
            waits[after, s] += 1
        assert stage.has_b or not stage.has_w or not fused
    for kind, a, b in pipeline.messages:
        feeds.setdefault((kind, a), []).append((kind, b))
        waits[kind, b] += 1
    left = {lane: [needed] * microbatches for lane, needed in waits.items()}
    came = {lane: [0.0] * microbatches for lane in waits}
    head = dict.fromkeys(waits, 0)
    computes = [Delays(jitter, s, stage.forward) for s, stage in enumerate(stages)]
    wires: dict[tuple[int, int], Delays] = {}
    free: dict[tuple[int, int], float] = {}
    busy, held = [0.0] * count, [0.0] * count
    heap = [(0.0, s) for s in range(count)]
    todo = sum(microbatches for _ in waits)
    end = 0.0
    grows = [
        {"F": s.saved, "B": -s.saved if fused else (s.stashed if s.has_w else 0.0) - s.saved, "W": -s.stashed}
        if s.has_b
        else {"F": s.saved if s.has_w else 0.0, "B": 0.0, "W": -s.saved}
        for s in stages
    ]  # fmt: skip
    reserve = [max(0.0, each["B"]) for each in grows]
    while heap:
        now, s = heappop(heap)
        if now < busy[s]:
            continue
        for kind in ("B", "F", "W"):
            lane = (kind, s)
            if lane not in head or head[lane] == microbatches:
                continue
            mb = head[lane]
            if left[lane][mb] or came[lane][mb] > now:
                continue
            if kind == "F" and held[s] + grows[s]["F"] + reserve[s] > room[s] * (1 + 1e-9):
                continue
            if kind == "B" and held[s] + grows[s]["B"] > room[s] * (1 + 1e-9):
                continue
            break
        else:
            continue
        cost = stages[s].seconds("BW" if fused and kind == "B" and stages[s].has_w else kind)
        busy[s] = now + cost + computes[s].of(cost)
        end = max(end, busy[s])
        held[s] += grows[s][kind]
        head[lane] += 1
        todo -= 1
        heappush(heap, (busy[s], s))
        for fed in feeds.get(lane, ()):
            at, to = busy[s], fed[1]
            if to != s:
                link = pipeline.network.link(s, to)
                takes = pipeline.messages[kind, s, to] / link.bandwidth
                wire = wires.setdefault((s, to), Delays(jitter, f"{s}>{to}", link.latency + takes))
                at = max(at, free.get((s, to), 0.0)) + takes + wire.of(link.latency + takes)
                free[s, to] = at
                at += link.latency
            came[fed][mb] = max(came[fed][mb], at)
            left[fed][mb] -= 1
            if not left[fed][mb]:
                heappush(heap, (came[fed][mb], to))
    return math.inf if todo else end
