"""What a stage holds on its rank, and the depth that it follows from.

Terms: see csc.planning.branches. The *depth* of a stage is the number of stages on the longest path from it to the end,
1 for a stage that no other waits for; by it its rank holds microbatches in flight. A *target* is a unit that comes
after units of other chains. A *label* is the depth of a stage that units ahead wait for: for each chain that of the
stage with the front of what was taken of it, then for each target that of the stage that holds it.

    Room(memory, in_flight, scale)                                 what a rank may hold
    need_of(tables, low, high, amounts, room, depth)               -> bytes that each segment holds
    targets(tables)                                                -> the targets of a problem
    depths_of(tables, among, low, high, labels)                    -> the depth of each segment as the next stage
    labels_after(tables, among, low, high, labels, depth)          -> the labels once these segments are stages
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csc.planning.branches import Floats, Ints
from csc.planning.segment_bounds import ChainTables, largest_fused, largest_working

Target = tuple[int, int, Ints]  # its chain and position; by place, how many of the units that it comes after are before


@dataclass(frozen=True)
class Room:
    """memory: bytes of a rank. in_flight[d]: microbatches that a stage of depth d holds, d from 0 (unused), at least 1
    and never falling. scale: of the largest microbatch.

    A stage holds its state, what its microbatches in flight saved, what its largest unit works with, and for a moment
    what B of one of them keeps for W: of all its units, or, with B and W fused, of one unit at a time, if that is less:
    state + scale * (in flight * saved + working + min(max(0, stashed - saved), largest `fused` of a unit)).
    """

    memory: float
    in_flight: tuple[float, ...]
    scale: float = 1.0


def need_of(tables: ChainTables, low: Ints, high: Ints, amounts: Floats, room: Room, depth: Ints) -> Floats:
    """Bytes that the rank of each segment holds at most; see `Room`. amounts: csc.planning.branches.totals of them."""
    _, _, _, state, saved, stashed = amounts.T
    count = np.array(room.in_flight)[depth]
    moment = np.minimum(np.maximum(stashed - saved, 0.0), largest_fused(tables, low, high))
    need: Floats = state + room.scale * (count * saved + moment + largest_working(tables, low, high))
    return need


def targets(tables: ChainTables) -> tuple[Target, ...]:
    """Units that come after units of other chains."""
    found = []
    place = tables.branches.place
    for unit, before in enumerate(tables.branches.before):
        c, position = place[unit]
        sources = [place[other] for other in before if place[other][0] != c]
        if sources:
            count = np.zeros(len(tables.sums), dtype=np.int64)
            for d, there in sources:
                count[tables.start[d] + there + 1] += 1
            found.append((c, position, np.cumsum(count)))
    return tuple(found)


def depths_of(tables: ChainTables, among: tuple[Target, ...], low: Ints, high: Ints, labels: Ints) -> Ints:
    """Depth of each segment as the next stage, given the labels of the state behind it."""
    chains = len(tables.lengths)
    depth: Ints = np.where((high > low) & (high < tables.lengths), labels[:, :chains], 0).max(axis=1)
    for i, (c, position, count) in enumerate(among):
        source = (count[tables.start + high] - count[tables.start + low]).sum(axis=1) > 0
        depth = np.maximum(depth, np.where(source & (position >= high[:, c]), labels[:, chains + i], 0))
    return depth + 1


def labels_after(
    tables: ChainTables, among: tuple[Target, ...], low: Ints, high: Ints, labels: Ints, depth: Ints
) -> Ints:
    """The labels after these segments became stages of these depths; 0 where nothing left depends on them.

    For a target that is not in a stage yet: the label of the front of its chain, which its own cannot be below.
    """
    chains = len(tables.lengths)
    after = labels.copy()
    after[:, :chains] = np.where(high > low, depth[:, None], labels[:, :chains])
    for i, (c, position, count) in enumerate(among):
        now = (position >= low[:, c]) & (position < high[:, c])
        done = position >= high[:, c]
        pending = count[tables.start + low].sum(axis=1) > 0
        label = np.where(now, depth, np.where(done, labels[:, chains + i], after[:, c]))
        after[:, chains + i] = np.where(pending, label, 0)
    after[:, :chains] = np.where(low > 0, after[:, :chains], 0)
    saved = tables.sums[tables.start + low, 4].sum(axis=1) > 0
    return np.where(saved[:, None], after, 0)
