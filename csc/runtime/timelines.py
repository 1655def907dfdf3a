"""Measured timelines: when every action of every rank ran, in the format of the simulator.

Terms: see csc.simulation.timeline. Times of ranks on one machine come from one clock. Clocks of several machines are
set against each other at a barrier; the error is the time that the barrier takes to let everybody go.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from csc.ir.groups import Group
from csc.ir.schedule import Action, parse
from csc.runtime.executor import Timed
from csc.runtime.meeting import gathered_texts
from csc.runtime.specs import Manifest
from csc.simulation.timeline import Event, Timeline, Transfer, to_json

Traces = Mapping[int, Sequence[Timed]]


def gathered(traces: Traces) -> dict[int, list[Timed]]:
    """The traces of all processes, on one clock. Text travels as bytes: nothing is unpickled."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {rank: list(trace) for rank, trace in traces.items()}
    dist.barrier()
    mine = {
        "host": platform.node(),
        "barrier": time.perf_counter(),
        "ranks": {rank: [[str(t.action), t.start, t.end] for t in trace] for rank, trace in traces.items()},
    }
    parts = [json.loads(text) for text in gathered_texts(json.dumps(mine))]
    several = len({part["host"] for part in parts}) > 1
    timelines: dict[int, list[Timed]] = {}
    for part in parts:
        zero = part["barrier"] if several else 0.0
        for rank, rows in part["ranks"].items():
            actions = parse("rank 0: " + " | ".join(action for action, _, _ in rows)).ranks[0]
            timelines[int(rank)] = [
                Timed(action, start - zero, end - zero) for action, (_, start, end) in zip(actions, rows, strict=True)
            ]
    return dict(sorted(timelines.items()))


def timeline(traces: Traces, manifest: Manifest, name: str = "measured") -> Timeline:
    """The timeline of replica 0: traces by rank of the mesh. What memory was in use is not recorded."""
    mesh = manifest.mesh
    rows = [_of_first(traces[rank], mesh.sharers(position))
            for position, rank in enumerate(mesh.group(Group.PIPELINE, 0))]  # fmt: skip
    zero = min((timed.start for row in rows for timed in row), default=0.0)
    ranks = tuple(
        tuple(Event(position, t.action, t.start - zero, t.end - zero) for t in row) for position, row in enumerate(rows)
    )
    return Timeline(name, ranks, _transfers(ranks, manifest), ((),) * mesh.pp, (0.0,) * mesh.pp)


def _of_first(trace: Sequence[Timed], replicas: int) -> list[Timed]:
    """What a rank did for replica 0, in the numbers of its schedule. Where several share the rank, a compute lasts
    until it is done for all of them.
    """
    if replicas == 1:
        return list(trace)
    timeds: list[Timed] = []
    ends: dict[Action, int] = {}  # where the compute of a microbatch stands
    for timed in trace:
        action, place = timed.action, timed.action.microbatch % replicas
        if action.microbatch >= 0:
            action = action._replace(microbatch=action.microbatch // replicas)
        if action in ends:
            timeds[ends[action]] = replace(timeds[ends[action]], end=timed.end)
        elif action.computes or place == 0 or action.microbatch < 0:
            if action.computes:
                ends[action] = len(timeds)
            timeds.append(replace(timed, action=action))
    return timeds


def record(path: Path, steps: Sequence[Traces], manifest: Manifest, name: str) -> float:
    """Write the timeline of the step with the median makespan, of steps that all processes took part in, from the
    process that has rank 0. Returns its makespan, in seconds; of an even number of steps it is the shorter.
    """
    timelines = [timeline(gathered(traces), manifest, name) for traces in steps]
    chosen = sorted(timelines, key=lambda timeline: timeline.makespan)[(len(timelines) - 1) // 2]
    if 0 in steps[0]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(to_json(chosen)))
    return chosen.makespan


def _transfers(ranks: Sequence[Sequence[Event]], manifest: Manifest) -> tuple[Transfer, ...]:
    """A message is on its way from its SEND's end until its RECV's end."""
    sizes = {m.channel: sum(v.numel * v.dtype.itemsize for v in m.values) for m in manifest.messages}
    left = {
        (event.action.channel, event.action.microbatch): event.end
        for events in ranks
        for event in events
        if event.action.kind == "SEND"
    }
    transfers = []
    for events in ranks:
        for event in events:
            action = event.action
            if action.kind == "RECV":
                start = left[action.channel, action.microbatch]
                transfers.append(
                    Transfer(
                        kind=action.message,
                        source=action.source,
                        destination=action.destination,
                        microbatch=action.microbatch,
                        source_rank=manifest.stages[action.source].rank,
                        destination_rank=manifest.stages[action.destination].rank,
                        start=min(start, event.end),
                        end=event.end,
                        size=float(sizes[action.channel]),
                    )
                )
    return tuple(sorted(transfers, key=lambda transfer: transfer.start))
