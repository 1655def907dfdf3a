"""The published schedules as orders, for any stages: heterogeneous, frozen, a DAG, one on a rank or several.

Terms: see work.py. *Depth* of a stage: stages on the longest path from it to the end, itself included. *Warm-up*: the
forwards that a stage runs before its first backward. Orders are made in a world in which every stage takes 1 for F, B
and W, so they depend on how the stages hang together and not on what they cost. Where B and W are not apart by design
(zb-*), they are fused: the gradient leaves after W, and what W needs is held of one region at a time.

Bubbles and memory on a chain of p equal ranks with F = B = W: see tests/planning/test_schedules.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from csc.errors import InputError
from csc.planning.schedules.greedy import joined
from csc.planning.schedules.work import WorkTables, reserve, start_times
from csc.simulation.pipeline import Network, Pipeline

Orders = list[list[int]]


def gpipe(work: WorkTables, room: Sequence[float] | None = None) -> Orders:
    """All forwards, then all backwards (Huang et al. 2019): every microbatch's activations are alive at the turn."""
    lanes = set(work.lanes)
    count = work.microbatches
    orders = [
        [3 * s for s in stages_here for _ in range(count)]
        + [
            lane
            for s in reversed(stages_here)
            for _ in range(count)
            for lane in (3 * s + 1, 3 * s + 2)
            if lane in lanes
        ]
        for stages_here in _stages_of(work)
    ]
    return [joined(work, order) for order in orders]


def one_f_one_b(work: WorkTables, room: Sequence[float] | None = None) -> Orders:
    """A warm-up of `depth` forwards, then one backward and one forward in turn (PipeDream-flush, Narayanan et al.
    2021).

    With B and W in one piece the bubble is (p - 1) (F + B + W); were they apart, gradients would leave before W:
    (p - 1) (F + B).
    """
    return [joined(work, order) for order in _in_turn(work, depths(work), [0] * len(work.pipeline.stages))]


def eager(
    work: WorkTables, room: Sequence[float] | None = None, times: float = 2.0, late: bool = False
) -> Orders:  # fmt: skip
    """1F1B with a warm-up of up to so many times the depth, as much as the room allows; below the depth if it must be.

    times: 2 covers messages as long as computes; where they are now and then held up, more is faster
    (csc.planning.schedules.robust). late: B and W apart, and W's behind as in zb_h1, so that every rank holds as many
    microbatches as the first.
    """
    depth = depths(work)
    # Beyond all microbatches a longer warm-up changes nothing.
    most_ahead = [max(1, math.floor(min(times * d, max(2 * d, work.microbatches + d)) + 1e-9)) for d in depth]
    ahead = [1] * len(depth)
    for rank, stages_here in enumerate(_stages_of(work)):
        held = reserve(work, rank)
        most = [max(held.saved[s]) for s in stages_here]
        # Try the largest share of the warm-ups first; one microbatch at a time always fits.
        for share in sorted(
            {n / most_ahead[s] for s in stages_here for n in range(1, most_ahead[s] + 1)}, reverse=True
        ):
            counts = [max(1, math.floor(share * most_ahead[s] + 1e-9)) for s in stages_here]
            bytes_ = sum(min(n, work.microbatches) * size for n, size in zip(counts, most)) + max(held.extra)
            if room is None or bytes_ <= room[rank] * (1 + 1e-9):
                break
        for s, n in zip(stages_here, counts):
            ahead[s] = n
    # A stage that runs as far ahead as the one before it would wait for forwards with its gradients at hand.
    for _, source, destination in sorted(work.pipeline.messages, key=lambda channel: max(channel[1:])):
        early, after = sorted((source, destination))
        if work.pipeline.stages[early].has_b:
            ahead[after] = max(1, min(ahead[after], ahead[early] - 1))
    if late:
        return _in_turn(work, ahead, [max(ahead) - n for n in ahead])
    return [joined(work, order) for order in _in_turn(work, ahead, [0] * len(depth))]


def zb_h1(work: WorkTables, room: Sequence[float] | None = None) -> Orders:
    """1F1B whose W's lag behind, so that every rank holds as many microbatches as the first (Qi et al. 2023)."""
    depth = depths(work)
    return _in_turn(work, depth, [max(depth) - d for d in depth])


def zb_h2(work: WorkTables, room: Sequence[float] | None = None) -> Orders:
    """As zb_h1 with a warm-up of 2 depth - 1, which fills the wait for the first gradient (Qi et al. 2023)."""
    depth = depths(work)
    return _in_turn(work, [2 * d - 1 for d in depth], [2 * (max(depth) - d) for d in depth])


def interleaved(work: WorkTables, room: Sequence[float] | None = None) -> Orders:
    """1F1B over v stages a rank: groups of p microbatches go through a rank's first stage, then its second, and so on
    (Narayanan et al. 2021). As zb_v, the published order without what a DAG or frozen stages leave out.
    """
    _expect_turns("interleaved-1f1b", work)
    return [joined(work, order) for order in _in_groups(work, lead=2, lag=0)]


def interleaved_zb(work: WorkTables, room: Sequence[float] | None = None) -> Orders:
    """Interleaved 1F1B with B and W apart, half the lead of a rank over the next, and W's that lag behind, so that
    every rank holds as much as the first (Qi et al. 2023). With one stage on each rank of a chain it is zb_h1.
    """
    _expect_turns("interleaved-zb", work)
    return _in_groups(work, lead=1, lag=1)


def _in_groups(work: WorkTables, lead: int, lag: int) -> Orders:
    """lead: forwards that a rank is ahead of the next; lag: W's that it is behind the one before."""
    p = work.ranks
    count = -(-work.microbatches // p) * p
    chunks = len(work.placement) // p
    return _by_rank(
        work,
        [
            _fitting(work, _in_groups_rank(index, p, chunks, count, lead * (p - index - 1), lag * index))
            for index in range(p)
        ],
    )


def _in_groups_rank(rank: int, p: int, chunks: int, count: int, lead: int, lag: int) -> list[int]:
    """The order of the rank at one place of a turn for a multiple of p microbatches: lead + (v - 1) p forwards, then in
    turn; W k after B k + lag, the rest at the end.
    """
    forwards = [3 * (chunk * p + rank) for _ in range(count // p) for chunk in range(chunks) for _ in range(p)]
    backwards = [lane + 1 for _ in range(count // p) for lane in reversed(forwards[: chunks * p])]
    ahead = min(lead + (chunks - 1) * p, len(forwards))
    order = forwards[:ahead]
    for i, lane in enumerate(backwards):
        order += [*forwards[ahead + i : ahead + i + 1], lane]
        order += [backwards[i - lag] + 1] * (i >= lag)
    return order + [lane + 1 for lane in backwards[max(0, len(backwards) - lag) :]]


def zb_v(work: WorkTables, room: Sequence[float] | None = None) -> Orders:
    """Two stages a rank in the shape of a V, no bubble for F = B = W with 1F1B's memory (Qi et al. 2024).

    The published order belongs to a chain in which every stage has B and W. A DAG has fewer dependencies than the chain
    of its stages, and frozen stages leave actions out: what is left is still free of deadlock.
    """
    p = work.ranks
    first = list(work.placement[:p])
    _expect("zb-v", work, [*first, *reversed(first)])
    count = max(2 * p - 1, work.microbatches)
    return _by_rank(work, [_fitting(work, _zb_v_rank(index, p, count)) for index in range(p)])


def _zb_v_rank(rank: int, p: int, count: int) -> list[int]:
    """The order of one rank for at least 2 p - 1 microbatches: warm-up in three steps, steady turns of six, the end."""
    down, up = 3 * rank, 3 * (2 * p - 1 - rank)
    order = [down] * (2 * (p - rank) - 1) + [up, down] * rank + [up, up + 1, up + 2] * (p - rank)
    downs = order.count(down)
    for turn in range(count - order.count(up)):
        order += [down] * (downs + turn < count) + [down + 1, down + 2, up, up + 1, up + 2]
    order += [down + 1, up + 1] * rank + [down + 1, down + 2] * (p - rank)
    for lane in (up + 2, down + 2):
        order += [lane] * (count - order.count(lane))
    return order


def _by_rank(work: WorkTables, lists: Sequence[list[int]]) -> Orders:
    """The orders of the places of a turn as those of the ranks that stand there."""
    place = {rank: index for index, rank in enumerate(work.placement[: work.ranks])}
    return [lists[place[rank]] for rank in range(work.ranks)]


def _expect_turns(name: str, work: WorkTables) -> None:
    p, stages = work.ranks, len(work.placement)
    _expect(name, work, list(work.placement[:p]) * (stages // p) if stages % p == 0 else None)


def _expect(name: str, work: WorkTables, wanted: Sequence[int] | None) -> None:
    """InputError unless the stages stand as wanted, in each turn all ranks, in whatever order."""
    if list(work.placement) != wanted or len(set(work.placement[: work.ranks])) != work.ranks:
        raise InputError(
            f"{name} does not run {len(work.placement)} stages on the ranks {list(work.placement)}",
            "schedule",
            f"Place them as csc.planning.schedules.placement({name!r}, ranks) says, or choose auto",
        )


def _fitting(work: WorkTables, order: Sequence[int]) -> list[int]:
    """The order without lanes and microbatches that the work does not have."""
    lanes, count = set(work.lanes), [0] * (3 * len(work.pipeline.stages))
    kept = []
    for lane in order:
        count[lane] += 1
        if lane in lanes and count[lane] <= work.microbatches:
            kept.append(lane)
    return kept


ORDERS: dict[str, Callable[[WorkTables, Sequence[float] | None], Orders]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager,
    "interleaved-1f1b": interleaved,
    "interleaved-zb": interleaved_zb,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
}


def depths(work: WorkTables) -> list[int]:
    """For each stage the number of stages on the longest path from it to the end, along all messages."""
    after: list[set[int]] = [set() for _ in work.pipeline.stages]
    for _, source, destination in work.pipeline.messages:
        after[min(source, destination)].add(max(source, destination))
    depth = [1] * len(after)
    for s in reversed(range(len(after))):
        depth[s] = 1 + max((depth[t] for t in after[s]), default=0)
    return depth


def _in_turn(work: WorkTables, ahead: Sequence[int], delay: Sequence[int]) -> Orders:
    """Per stage: `ahead` forwards, then a backward and a forward in turn; W k after B k + delay, the rest at the end.

    Free of deadlock on any DAG if `ahead` never grows along it: put F k of stage s at time k + e s and B k at
    k + ahead[s] - 1/2 - e s for a small e. Every dependency leads to a later time, and so does the order of each stage.
    A rank with several stages merges their orders by the start times that they have on ranks of their own: again every
    dependency leads to a later time.
    """
    m = work.microbatches
    lists = []
    for s, stage in enumerate(work.pipeline.stages):
        f, b, w = 3 * s, 3 * s + 1, 3 * s + 2
        if not (stage.has_b or stage.has_w):
            lists.append([f] * m)
            continue
        order = [f] * min(ahead[s], m)
        for i in range(m):
            order += [b] * stage.has_b
            order += [w] * (stage.has_w and i >= delay[s])
            order += [f] * (i + ahead[s] < m)
        lists.append(order + [w] * (m * stage.has_w - order.count(w)))
    if len(work.placement) == work.ranks:
        alone = [0] * work.ranks
        for s, rank in enumerate(work.placement):
            alone[rank] = s
        return [lists[s] for s in alone]
    starts = start_times(replace(_even(work), placement=tuple(range(len(lists)))), lists)
    assert starts is not None
    return [
        [
            lane
            for _, lane in sorted(
                (start, lane) for s in stages_here for lane in set(lists[s]) for start in starts[lane]
            )
        ]
        for stages_here in _stages_of(work)
    ]


def _stages_of(work: WorkTables) -> list[list[int]]:
    stages_of: list[list[int]] = [[] for _ in range(work.ranks)]
    for s, rank in enumerate(work.placement):
        stages_of[rank].append(s)
    return stages_of


def _even(work: WorkTables) -> WorkTables:
    """The same stages in a world where each takes 3 for a microbatch, 1 for B, 1 for W and F the rest, and messages
    take nothing. So a stage without B runs at the pace of the others, not far ahead of those that share its rank.
    """
    stages = tuple(
        replace(
            stage,
            forward=1.0 + (not stage.has_b) + (not stage.has_w),
            backward_input=1.0,
            backward_weight=1.0,
        )
        for stage in work.pipeline.stages
    )
    pipeline = Pipeline(stages, dict.fromkeys(work.pipeline.messages, 0.0), Network())
    return WorkTables(pipeline, work.placement, work.microbatches, work.sequence)
