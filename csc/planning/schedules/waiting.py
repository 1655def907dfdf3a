"""Bytes with the messages that wait, of orders that a search tries: csc.simulation.pipeline without the timeline.

Terms: see work.py and csc.simulation.pipeline. A *span* is the time for which a rank holds a message, and its bytes.

    peaks(work, orders, starts) -> for each rank the most bytes of activations and messages; starts: of start_times
    excess(work, orders, room, starts) -> for each rank the bytes above its room, inf for a deadlock; or None
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from csc.ir.schedule import Message
from csc.planning.schedules.timing import start_times
from csc.planning.schedules.work import WorkTables

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def excess(
    work: WorkTables,
    orders: Sequence[Sequence[int]],
    room: Sequence[float],
    starts: Sequence[Sequence[float]] | None = None,
) -> list[float] | None:
    """What does not fit."""
    starts = start_times(work, orders) if starts is None else starts
    if starts is None:
        return [math.inf] * work.ranks
    over = [peak - most * (1 + 1e-9) for peak, most in zip(peaks(work, orders, starts), room)]
    return [max(0.0, more) for more in over] if max(over) > 0 else None


@dataclass(frozen=True)
class _RankActions:
    """The actions of all ranks in one row, rank after rank: their begin and end, and by how many bytes the rank grows
    at each. place[lane, position]: where in the row; first[rank]: where the rank begins.
    """

    begin: Floats
    end: Floats
    before: Floats
    after: Floats
    place: Ints
    first: Ints


def peaks(
    work: WorkTables, orders: Sequence[Sequence[int]], starts: Sequence[Sequence[float]]
) -> list[float]:  # fmt: skip
    """As csc.simulation.pipeline.peaks, without what is there for the whole step."""
    run = _run(work, orders, np.array(starts))
    ranks = np.repeat(np.arange(len(orders)), np.diff([*run.first, len(run.begin)]))
    rows = [(ranks, run.begin, run.before), (ranks, run.end, run.after)]
    for home, begin, end, size in _spans(work, run):
        held = (end > begin) & (size > 0)
        rows += [(home[held], begin[held], size[held]), (home[held], end[held], -size[held])]
    where, when, change = (np.concatenate(column) for column in zip(*rows))
    sorted_ = np.lexsort((change > 0, when, where))  # at one time what ends goes first
    grown, where = np.cumsum(change[sorted_]), where[sorted_]
    edges = np.searchsorted(where, np.arange(len(orders)))
    base = np.concatenate([[0.0], grown])[edges]
    found: list[float] = np.maximum(np.maximum.reduceat(grown, edges) - base, 0.0).tolist()
    return found


def _run(work: WorkTables, orders: Sequence[Sequence[int]], starts: Floats) -> _RankActions:
    entries = np.concatenate([np.array(order, dtype=np.int64) for order in orders])
    lanes = np.array(work.lane_of)[entries]
    fused = entries != lanes
    # Fused actions are those of two lanes. Every lane has an action for each position, in order.
    twice = np.repeat(np.arange(len(entries)), 1 + fused)
    of_lane = lanes[twice] + np.concatenate([[False], twice[1:] == twice[:-1]])
    by_lane = np.argsort(of_lane, kind="stable")
    place = np.zeros((work.size, work.microbatches), dtype=np.int64)
    place[of_lane[by_lane[:: work.microbatches]]] = twice[by_lane].reshape(-1, work.microbatches)
    position = np.zeros(len(entries), dtype=np.int64)
    for lane in work.lanes:
        position[place[lane]] = np.arange(work.microbatches)
    begin = starts[lanes, position]
    grown = np.array(work.growth)[entries, position]
    moment = np.where(fused, np.array(work.moment)[lanes // 3, position], 0.0)
    forward = lanes % 3 == 0
    return _RankActions(
        begin,
        begin + np.array(work.seconds)[entries, position],
        np.where(forward, grown, moment),
        np.where(forward, 0.0, grown - moment),
        place,
        np.cumsum([0, *(len(order) for order in orders[:-1])]),
    )


def _spans(work: WorkTables, run: _RankActions) -> list[tuple[Ints, Floats, Floats, Floats]]:
    """(rank, from, until, bytes) of the messages of all channels, at both their ends."""
    network, home = work.pipeline.network, work.placement
    channels = sorted(work.pipeline.messages)
    if not channels:
        return []
    size = np.array([[work.pipeline.size(channel, mb) for mb in work.sequence] for channel in channels])
    kinds = np.array(["FBW".index(kind) for kind, *_ in channels])
    source, target = (np.array([channel[i] for channel in channels]) for i in (1, 2))
    a, b = np.array(home)[source], np.array(home)[target]
    made, needed = run.place[3 * source + kinds], run.place[3 * target + kinds]
    links = [network.link(int(one), int(other)) for one, other in zip(a, b)]
    travel = np.array([[link.latency] for link in links]) + size / np.array([[link.bandwidth] for link in links])
    taken = _received(needed, made, [*zip(kinds.tolist(), a.tolist(), b.tolist())])
    ahead = taken - 1
    posted = np.where(ahead >= run.first[b][:, None], run.begin[ahead], 0.0)
    begin, until = run.end[made], run.begin[needed]
    moved = np.maximum(posted, begin) + travel
    if network.answered:
        moved = np.array([_answers(work, run, channel) for channel in channels])
    same = (a == b)[:, None]
    wide = size.shape
    return [
        (np.broadcast_to(b[:, None], wide), np.where(same, begin, posted), until, size),
        (np.broadcast_to(a[:, None], wide), begin, np.where(same, begin, moved), size),
    ]


def _received(needed: Ints, made: Ints, wires: Sequence[tuple[int, int, int]]) -> Ints:
    """[channel, position]: the place of the action ahead of which a message is received: the first that needs it or a
    later one of its wire.
    """
    found = needed.copy()
    rows: dict[tuple[int, int, int], list[int]] = {}
    for row, wire in enumerate(wires):
        rows.setdefault(wire, []).append(row)
    for listed in rows.values():
        sent = np.argsort(made[listed], axis=None, kind="stable")
        earliest = np.minimum.accumulate(needed[listed].ravel()[sent][::-1])[::-1]
        taken = np.empty_like(earliest)
        taken[sent] = earliest
        found[listed] = taken.reshape(len(listed), -1)
    return found


def _answers(work: WorkTables, run: _RankActions, channel: Message) -> Floats:
    """When the sender has the answer to its message of each position."""
    kind, source, target = channel
    if kind == "F" and ("B", target, source) in work.pipeline.messages:
        return run.begin[run.place[3 * source + 1]]
    return np.full(work.microbatches, run.end.max())
