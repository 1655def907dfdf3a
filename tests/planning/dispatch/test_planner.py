"""The dispatch planner against brute force over all dispatches, and what must hold for any of its plans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.planning.dispatch import LayerMask, Rates, Workload, evaluate, plan
from csc.planning.dispatch.planner import by_load, contiguous, round_robin, zigzag
from tests.counting import calls
from tests.planning.dispatch.workloads import (
    BLOCK,
    assignments,
    causal_tiles,
    document_tiles,
    random_workload,
    seconds_by_hand,
)

SMALL = [(6, 2), (7, 3), (8, 2), (6, 3), (8, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("n", "ranks"), SMALL)
def test_near_the_optimum_and_never_below_the_bound(n: int, ranks: int, seed: int) -> None:
    rng = np.random.default_rng([seed, n, ranks])
    workload = random_workload(rng, n, ranks, masks=1 + seed % 2, short=seed % 3 == 0, cross=seed % 5 == 4)
    optimum = min(evaluate(workload, ranks_of_blocks).seconds for ranks_of_blocks in assignments(n, ranks))
    found = plan(workload)
    assert found.lower_bound <= optimum * (1 + 1e-12)
    assert optimum * (1 - 1e-12) <= found.seconds <= optimum * 1.35


def test_the_optimum_is_found_mostly() -> None:
    ratios = []
    for seed in range(30):
        workload = random_workload(np.random.default_rng([seed, 99]), 8, 2)
        best = min(evaluate(workload, given).seconds for given in assignments(8, 2))
        ratios.append(plan(workload).seconds / best if best else 1.0)
    assert np.mean(np.array(ratios) < 1 + 1e-9) >= 0.7
    assert np.mean(ratios) <= 1.03


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 9), st.integers(1, 3), st.booleans(), st.booleans())
def test_what_holds_for_every_plan(seed: int, n: int, ranks: int, masks: int, short: bool, cross: bool) -> None:
    ranks = min(ranks, n)
    workload = random_workload(np.random.default_rng(seed), n, ranks, masks, short, cross)
    found = plan(workload)
    counts = np.bincount(found.ranks_of_blocks, minlength=ranks)
    assert counts.sum() == n and counts.max() - counts.min() <= 1
    assert sorted(np.concatenate(found.blocks).tolist()) == list(range(n))
    assert all((np.diff(mine) > 0).all() for mine in found.blocks)
    for mask, measured in zip(workload.masks, found.measured):
        for rank, mine in enumerate(found.blocks):
            assert np.array_equal(measured.needed[rank], (mask.tiles[mine] != 0).any(axis=0))
    assert found.seconds == pytest.approx(seconds_by_hand(workload, found.ranks_of_blocks))
    assert found.seconds >= found.lower_bound * (1 - 1e-12)
    assert np.array_equal(plan(workload).ranks_of_blocks, found.ranks_of_blocks)
    loads = np.sum(
        [mask.layers * prepared.loads for mask, prepared in zip(workload.masks, found.prepared.masks)], axis=0
    )
    for rival in (contiguous(n, ranks), zigzag(n, ranks), by_load(loads, ranks), round_robin(loads, ranks)):
        assert found.seconds <= evaluate(workload, rival).seconds


def test_slack_gives_up_time_for_volume_and_no_more_than_that() -> None:
    workload = _documents(256, 8)
    strict, loose = plan(workload), plan(workload, slack=0.02)
    assert strict.seconds <= loose.seconds <= strict.seconds * 1.02
    assert loose.volume_over_all_gather <= strict.volume_over_all_gather
    with pytest.raises(InputError, match="slack"):
        plan(workload, slack=-0.1)


def test_causal_is_balanced_to_the_tile() -> None:
    workload = Workload((LayerMask(causal_tiles(256)),), 256 * BLOCK, BLOCK, 8, Rates(1.0, 0.0))
    found = plan(workload)
    assert found.imbalance == 1.0
    assert found.seconds == found.lower_bound
    assert found.volume_over_all_gather <= 0.76  # zigzag's; longest-first needs all of it


def _documents(n: int, ranks: int) -> Workload:
    lengths = np.random.default_rng(3).integers(2, 60, n)
    starts = [0, *[int(s) for s in np.cumsum(lengths) if s < n]]
    return Workload((LayerMask(document_tiles(n, starts)),), n * BLOCK, BLOCK, ranks, Rates(1.0, 0.6))


def test_documents_stay_together() -> None:
    workload = _documents(256, 8)
    found = plan(workload)
    assert found.seconds <= found.lower_bound * 1.05
    scattered = evaluate(workload, round_robin(found.prepared.masks[0].loads, 8))
    assert found.volume_over_all_gather < scattered.volume_over_all_gather / 2
    assert found.seconds < scattered.seconds


def test_full_and_sliding_layers_are_weighed_by_their_number() -> None:
    n = 64
    sliding = np.where(np.abs(np.subtract.outer(np.arange(n), np.arange(n))) <= 2, causal_tiles(n), 0).astype(np.int8)
    masks = (LayerMask(causal_tiles(n), 4.0), LayerMask(sliding, 20.0))
    both = Workload(masks, n * BLOCK, BLOCK, 4, Rates(1.0, 0.5))
    found = plan(both)
    assert len(found.measured) == 2
    alone = [Workload((mask,), n * BLOCK, BLOCK, 4, Rates(1.0, 0.5)) for mask in masks]
    assert found.seconds == pytest.approx(sum(evaluate(w, found.ranks_of_blocks).seconds for w in alone))
    best_of_full_alone = evaluate(both, plan(alone[0]).ranks_of_blocks).seconds
    assert found.seconds <= best_of_full_alone
    assert found.seconds >= found.lower_bound


def test_a_plan_at_128k_is_little_work() -> None:
    """7,000 calls when this was written, in 20 ms (docs/measurements.md): not one for each pair of blocks."""
    n = 1024
    lengths = np.random.default_rng(0).lognormal(3, 1, 200).astype(int) + 1
    tiles = document_tiles(n, [0, *[int(s) for s in np.cumsum(lengths) if s < n]])
    workload = Workload((LayerMask(tiles),), n * 128, 128, 8, Rates(6.24e-7, 1.05e-5))
    assert calls(lambda: plan(workload)) < 20 * n


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 9}, "8 blocks of 16 tokens cannot be dispatched to 9 ranks"),
        ({"masks": ()}, "no mask"),
        ({"tokens": 100}, r"its tiles are int8 \(8, 8\), and these tokens need int8 \(7, 7\)"),
        ({"masks": (LayerMask(np.full((8, 8), 3, np.int8)),)}, "neither empty"),
        ({"masks": (LayerMask(np.ones((8, 8), np.int64)),)}, "tiles are int64"),
        ({"masks": (LayerMask(np.ones((8, 8), np.int8), owners=np.zeros(8, int)),)}, "`owners` and `key_tokens`"),
        ({"masks": (LayerMask(np.ones((8, 2), np.int8), 1.0, np.array([0, 2]), 32),)}, "does not name a rank"),
        ({"masks": (LayerMask(np.ones((8, 8), np.int8), -1.0),)}, "negative"),
        ({"rates": Rates(1.0, float("nan"))}, "not a number"),
    ],
)
def test_what_does_not_fit_is_said(change: dict, message: str) -> None:
    right = {
        "masks": (LayerMask(causal_tiles(8)),), "tokens": 128, "block": 16, "ranks": 2, "rates": Rates(1.0, 1.0),
    }  # fmt: skip
    plan(Workload(**right))
    with pytest.raises(InputError, match=message):
        Workload(**{**right, **change})


@pytest.mark.parametrize("wrong", [[0, 1], [0, 1, 0, 1, 0, 1, 0, 2], [0, 1, 0, 1, 0, 1, 0, -1]])
def test_a_dispatch_that_is_none_cannot_be_evaluated(wrong: list[int]) -> None:
    workload = Workload((LayerMask(causal_tiles(8)),), 128, 16, 2, Rates(1.0, 1.0))
    with pytest.raises(InputError, match="8 blocks need a rank below 2"):
        evaluate(workload, np.array(wrong))
