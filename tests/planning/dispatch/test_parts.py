"""Bits, starts, bisection, bounds and the state of the search, each against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.planning.dispatch import LayerMask, Rates, Workload, evaluate, workload
from csc.planning.dispatch.planner import (
    Bisector,
    MaskState,
    by_load,
    by_reach,
    contiguous,
    improve,
    round_robin,
    zigzag,
)
from csc.planning.dispatch.workload import load_bound, measure, prepare, seconds
from tests.planning.dispatch.workloads import BLOCK, assignments, causal_tiles, random_workload


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 200))
def test_bits_are_sets(seed: int, n: int, keys: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.random((n, keys)) < rng.random()
    columns = workload.pack(rows)
    assert np.array_equal(workload.unpack(columns, keys), rows)
    assert np.array_equal(workload.size(columns), rows.sum(axis=1))
    assert np.array_equal(workload._ones_by_table(columns).sum(axis=0), rows.sum(axis=1))
    length = int(rng.integers(1, n + 1))
    unions = np.array([rows[np.arange(i, i + length) % n].any(axis=0) for i in range(n)])
    assert np.array_equal(workload.unpack(workload.windows(columns, length), keys), unions)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 10**6))
def test_starts_give_equal_counts(n: int, ranks: int, seed: int) -> None:
    ranks = min(ranks, n)
    loads = np.random.default_rng(seed).integers(0, 20, n).astype(float)
    for given_ranks in (contiguous(n, ranks), zigzag(n, ranks), by_load(loads, ranks), round_robin(loads, ranks)):
        counts = np.bincount(given_ranks, minlength=ranks)
        assert len(given_ranks) == n and counts.max() - counts.min() <= 1


def test_starts_are_what_their_names_say() -> None:
    assert contiguous(6, 3).tolist() == [0, 0, 1, 1, 2, 2]
    assert zigzag(8, 2).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert round_robin(np.array([1.0, 4, 3, 2]), 2).tolist() == [0, 0, 1, 1]
    assert by_load(np.array([5.0, 5, 4, 3, 3, 2]), 2).tolist() == [0, 1, 0, 1, 1, 0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 60), st.integers(2, 9))
def test_bisection_gives_equal_counts_and_loads_within_its_proof(seed: int, n: int, ranks: int) -> None:
    ranks = min(ranks, n)
    prepared = prepare(random_workload(np.random.default_rng(seed), n, ranks))
    loads = prepared.masks[0].loads
    for order in (np.arange(n), by_reach(prepared)):
        found = Bisector(prepared, order).cut(0.0)
        assert sorted(np.bincount(found, minlength=ranks)) == sorted(prepared.workload.quotas)
        if n % ranks == 0:  # each cut is off by one block's load at most, and each side has a rank or more
            heaviest = np.bincount(found, weights=loads, minlength=ranks).max()
            assert heaviest <= loads.mean() * n / ranks + np.ceil(np.log2(ranks)) * loads.max() + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_no_dispatch_beats_the_load_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, ranks = int(rng.integers(4, 9)), int(rng.integers(2, 4))
    loads = rng.integers(0, 30, n) * rng.choice([1.0, 0.25])
    best = min(np.bincount(given_ranks, weights=loads).max() for given_ranks in assignments(n, ranks))
    assert load_bound(loads, ranks) <= best + 1e-9


def test_the_load_bound_knows_heavy_blocks() -> None:
    assert load_bound(np.array([10.0, 1, 1, 1]), 2) == 11  # a rank has the heavy block and one more
    assert load_bound(np.array([6.0, 6, 6, 0, 0, 0]), 2) == 12  # two of three heavy blocks share a rank
    assert load_bound(np.array([3.0, 2, 2, 2]), 2) == 5  # whole tiles: half of 9 is not to be had


def test_volumes_of_a_mask_by_hand() -> None:
    """Two ranks, four causal blocks in turns: rank 0 has 0 and 2, rank 1 has 1 and 3."""
    workload = Workload((LayerMask(causal_tiles(4)),), 4 * BLOCK, BLOCK, 2, Rates(1.0, 1.0))
    found = evaluate(workload, np.array([0, 1, 0, 1]))
    (measured,) = found.measured
    assert measured.loads.tolist() == [4, 6]
    assert measured.received.tolist() == [1, 2] and measured.sent.tolist() == [2, 1]
    assert found.volume_over_all_gather == 3 / 4
    assert found.seconds == 6 + 15


def test_keys_that_live_elsewhere() -> None:
    """Cross-attention: rank 1 holds all keys, so rank 0 receives what it needs and rank 1 nothing."""
    tiles = np.array([[2, 0], [0, 2], [2, 2], [0, 0]], np.int8)
    mask = LayerMask(tiles, owners=np.array([1, 1]), key_tokens=BLOCK + BLOCK // 2)
    workload = Workload((mask,), 4 * BLOCK, BLOCK, 2, Rates(1.0, 1.0))
    (measured,) = evaluate(workload, np.array([0, 0, 1, 1])).measured
    assert measured.received.tolist() == [1.5, 0] and measured.sent.tolist() == [0, 1.5]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 40), st.integers(2, 6), st.booleans(), st.booleans())
def test_the_state_of_the_search_follows_its_swaps(seed: int, n: int, ranks: int, short: bool, cross: bool) -> None:
    rng = np.random.default_rng(seed)
    ranks = min(ranks, n)
    workload = random_workload(rng, n, ranks, short=short, cross=cross)
    prepared, now = prepare(workload), contiguous(n, ranks)
    state = MaskState(prepared, 0, now)
    state.hidden = False  # keep volumes too where they would not matter
    for _ in range(8):
        a, b = rng.permutation(ranks)[:2]
        i, j = rng.choice(np.flatnonzero(now == a)), rng.choice(np.flatnonzero(now == b))
        now[i], now[j] = b, a
        state.swap(a, b, i, j)
    state.refresh(now)
    (measured,) = measure(prepared, now)
    assert np.allclose(state.load, measured.loads)
    assert np.allclose(state.received, measured.received) and np.allclose(state.sent, measured.sent)
    assert state.seconds() == pytest.approx(seconds(prepared, [measured]))


def test_valued_swaps_are_near_what_they_do() -> None:
    """Where the two blocks have no key in common, loads and received keys are exact."""
    n, ranks = 24, 3
    tiles = np.eye(n, dtype=np.int8)
    tiles[np.arange(n), (np.arange(n) * 7 + 3) % n] = 2
    prepared = prepare(Workload((LayerMask(tiles),), n * BLOCK, BLOCK, ranks, Rates(1.0, 100.0)))
    now = contiguous(n, ranks)
    state = MaskState(prepared, 0, now)
    mine, theirs = np.flatnonzero(now == 0), np.flatnonzero(now != 0)
    pairs = state.pairs(0, mine, theirs, now[theirs])
    before = sum(state.received)
    same = total = 0
    for x, i in enumerate(mine):
        for y, j in enumerate(theirs):
            if set(np.flatnonzero(prepared.masks[0].reach[i])) & set(np.flatnonzero(prepared.masks[0].reach[j])):
                continue
            after = now.copy()
            after[i], after[j] = now[j], 0
            (measured,) = measure(prepared, after)
            total += 1
            same += pairs.added[x, y] == measured.received[[0, now[j]]].sum() - state.received[[0, now[j]]].sum()
    assert total > 50 and same == total and before > 0


def test_improving_never_makes_worse_and_keeps_counts() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        workload = random_workload(rng, 60, 5, masks=2, short=True)
        prepared = prepare(workload)
        start = rng.permutation(contiguous(60, 5))
        improved = improve(prepared, start, 0.0, 30)
        assert sorted(improved.ranks_of_blocks) == sorted(start)
        assert improved.seconds == pytest.approx(seconds(prepared, measure(prepared, improved.ranks_of_blocks)))
        assert improved.seconds <= seconds(prepared, measure(prepared, start)) * (1 + 1e-12)
        assert improved.steps <= improved.tried <= 30


def test_collectives() -> None:
    """Of 8 blocks on 2 ranks an all-gather brings 4; heads move (4 + 4) / 4 of K and V for a quarter of the tokens."""
    workload = Workload((LayerMask(causal_tiles(8)),), 8 * BLOCK, BLOCK, 2, Rates(0.0, 1.0), heads=4, kv_heads=4)
    found = evaluate(workload, contiguous(8, 2))
    assert found.collectives == {"all-gather": 4 + 8, "exact": 4 + 8, "heads": 4 + 8}
    assert found.collective == "exact"  # as quick as the others, and the first rank receives nothing
    grouped = Workload(workload.masks, 8 * BLOCK, BLOCK, 2, Rates(0.0, 1.0), heads=4, kv_heads=1)
    assert evaluate(grouped, contiguous(8, 2)).collectives["heads"] == (4 + 2) * 2 + 2 * (4 + 2) * 2
    for heads, kv_heads in ((3, 3), (0, 0), (4, 3)):
        other = Workload(workload.masks, 8 * BLOCK, BLOCK, 2, Rates(0.0, 1.0), heads=heads, kv_heads=kv_heads)
        assert "heads" not in evaluate(other, contiguous(8, 2)).collectives
