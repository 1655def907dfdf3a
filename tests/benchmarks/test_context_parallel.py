"""The benchmark of dispatch: masks and counts against their definitions, rivals against theirs, and the summary."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.context_parallel.areas import classes, visible
from benchmarks.context_parallel.cases import BLOCK, DEFAULT, HARDWARE, SPARSE, Case, Shape, cases, rates, tiles
from benchmarks.context_parallel.masks import MASKS, NOISED, TEXT, Rules, build, dense
from benchmarks.context_parallel.measure import BALANCED, CSC, SLACK, Row, run
from benchmarks.context_parallel.report import show
from benchmarks.context_parallel.rivals import RIVALS
from benchmarks.context_parallel.summary import document, geomean, over_best_rival, summary
from csc.planning.dispatch import planner

SHARES = {  # visible pairs at 128k tokens, as the reference has them, and how far a seed may be off
    "causal": (0.500, 0.001), "prefix_lm": (0.570, 0.001), "encoder_prepended": (0.531, 0.001),
    "interleaved_modality": (0.424, 0.07), "interleaved_span": (0.176, 0.04), "interleaved_prefix": (0.503, 0.003),
    "packed": (0.015, 0.006), "audio_visual": (0.502, 0.001), "long_tail": (0.090, 0.07), "giant": (0.127, 0.001),
    "generation": (0.188, 0.02),
}  # fmt: skip


def by_hand(seen: np.ndarray, block: int) -> np.ndarray:
    """Visible pairs of every tile of a dense mask."""
    starts_q, starts_k = (np.arange(0, size, block) for size in seen.shape)
    return np.add.reduceat(np.add.reduceat(seen.astype(np.int64), starts_q, axis=0), starts_k, axis=1)


def test_there_are_the_eleven_masks() -> None:
    assert list(MASKS) == list(SHARES)


@pytest.mark.parametrize("tokens", [700, 1024])
@pytest.mark.parametrize("mask", MASKS)
def test_counts_equal_the_dense_mask(mask: str, tokens: int) -> None:
    rules = build(mask, tokens, 5)
    seen = dense(rules)
    counts = visible(rules, 64)
    assert np.array_equal(counts, by_hand(seen, 64))
    found = classes(counts, tokens, tokens, 64)
    ones = by_hand(np.ones_like(seen), 64)
    assert np.array_equal(found == 2, counts == ones) and np.array_equal(found == 0, counts == 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 70), st.integers(1, 20))
def test_counts_of_any_rules_equal_the_dense_mask(seed: int, rules: int, tokens: int, block: int) -> None:
    rng = np.random.default_rng(seed)
    lo, hi = (rng.integers(0, tokens + 1, (rules, tokens)).astype(np.int32) for _ in range(2))
    some = Rules(lo, hi, rng.integers(0, 8, (rules, tokens)), rng.integers(0, 8, tokens))
    assert np.array_equal(visible(some, block), by_hand(dense(some), block))


@pytest.mark.parametrize("mask", MASKS)
def test_shares_are_those_of_the_reference(mask: str) -> None:
    share = np.mean([visible(build(mask, 131072, seed), 512).sum() / 131072**2 for seed in (0, 1, 2)])
    wanted, off = SHARES[mask]
    assert abs(share - wanted) <= off


def test_masks_are_deterministic_and_their_seeds_differ() -> None:
    for mask in ("packed", "generation"):
        one, same, other = (build(mask, 4096, seed) for seed in (1, 1, 2))
        assert np.array_equal(one.hi, same.hi) and not np.array_equal(one.hi, other.hi)


@pytest.mark.slow
def test_what_the_masks_say() -> None:
    generation = build("generation", 2048, 0)
    seen, noised = dense(generation), generation.kinds == NOISED
    later = np.tri(2048, dtype=bool)
    text = generation.kinds == TEXT
    assert text.any() and noised.any()
    assert not seen[np.ix_(text, noised)].any()  # generated spans are unseen later
    assert np.array_equal(seen[np.ix_(text, text)], later[np.ix_(text, text)])
    packed = dense(build("packed", 2048, 0))
    assert seen.any(axis=1).all() and packed.diagonal().all()
    giant = build("giant", 8192, 0)
    assert np.bincount(giant.lo[0]).max() == 4096
    modality = build("interleaved_modality", 2048, 0)
    images = modality.kinds == 2
    assert images.any()
    assert dense(modality)[np.ix_(images, images)].all()


@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("name", RIVALS)
def test_rivals_dispatch_every_block(name: str, ranks: int) -> None:
    found = RIVALS[name](tiles("generation", 8192, 0).classes, ranks)
    counts = np.bincount(found, minlength=ranks)
    assert counts.sum() == 64 and len(counts) == ranks
    assert name == "uncapped LPT" or (counts == 64 // ranks).all()


def test_rivals_are_what_their_names_say() -> None:
    tiles_ = np.tri(8, dtype=np.int8)
    assert RIVALS["contiguous"](tiles_, 2).tolist() == [0] * 4 + [1] * 4
    assert RIVALS["zigzag"](tiles_, 2).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    loads = np.arange(1.0, 9)
    assert np.bincount(RIVALS["uncapped LPT"](tiles_, 3), weights=loads).max() == 13
    assert np.bincount(RIVALS["equal-count LPT"](tiles_, 2), weights=loads).tolist() == [18, 18]


def test_ptrr_is_torchs_and_the_planner_starts_from_it() -> None:
    """The closed form among the planner's starts deals blocks as torch's balancer does."""
    for mask in ("causal", "packed", "generation"):
        counted = tiles(mask, 8192, 1).classes
        mine = planner.round_robin(np.count_nonzero(counted, axis=1).astype(float), 8)
        assert np.array_equal(mine, RIVALS["torch PTRR"](counted, 8))


def test_rates_of_the_model() -> None:
    found = rates(HARDWARE[DEFAULT], Shape(), 1.25)
    assert found.tile_seconds == pytest.approx(4 * 128 * 128 * 32 * 128 / 430e12)
    assert found.block_seconds == pytest.approx(2 * 8 * 128 * 2 * 128 / 50e9)
    assert found.partial == 1.25


def test_cases() -> None:
    assert len(cases(quick=False)) == 11 * 3 * 5 * 3
    assert len(cases(quick=True)) == 11 * 2 * 2
    assert {case.tokens // BLOCK % case.ranks for case in cases(quick=False)} == {0}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    chosen = [Case(mask, tokens, 8, 0) for tokens in (8192, 131072) for mask in ("causal", "packed", "giant")]
    return run(chosen, HARDWARE[DEFAULT], 1.0, lambda what, done, all_: None)


def test_rows_of_the_benchmark(rows: list[Row]) -> None:
    for row in rows:
        assert set(row.plans) == {CSC, BALANCED, *RIVALS}
        assert row.bound <= row.plans[CSC].seconds * (1 + 1e-12)
        assert over_best_rival(row) >= 1.0
        assert all(plan.tile >= 1 and plan.area >= 1 and 0 <= plan.volume <= 1 for plan in row.plans.values())
        assert all(plan.gathered >= plan.seconds for plan in row.plans.values())
        assert (row.share < SPARSE) == (row.case.mask != "causal")
    for row in rows[3:]:
        assert row.plans[BALANCED].tile <= 1 + SLACK + 0.002
        assert row.plans[CSC].volume < row.plans["torch PTRR"].volume


def test_summary(rows: list[Row]) -> None:
    found = summary(rows)
    assert found["tile_imbalance_max"] == max(row.plans[CSC].tile for row in rows[3:])
    assert found["kv_volume_packed"] == rows[4].plans[CSC].volume
    assert found["kv_volume_long_tail"] is None and found["kv_volume_generation"] is None
    assert found["worst_speedup_over_any_rival"] == min(map(over_best_rival, rows))
    ratios = [row.plans["torch PTRR"].gathered / row.plans[CSC].seconds for row in rows[4:]]
    assert found["modelled_speedup_over_ptrr_sparse_geomean"] == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
    slower = replace(rows[0], plans=rows[0].plans | {"zigzag": replace(rows[0].plans["zigzag"], seconds=1e-9)})
    worst = summary([*rows, slower])["worst_speedup_over_any_rival"]
    assert worst == pytest.approx(1e-9 / rows[0].plans[CSC].seconds)
    assert geomean([]) is None and geomean([2.0, 8.0]) == pytest.approx(4)


def test_tables_and_json(rows: list[Row]) -> None:
    out = io.StringIO()
    show(Console(file=out, width=160), rows)
    text = out.getvalue()
    assert "torch PTRR" in text and "worst_speedup_over_any_rival" in text and "packed" in text
    found = json.loads(json.dumps(document(rows, DEFAULT, 1.0)))
    assert found["model"]["link"] == 50e9 and len(found["rows"]) == len(rows)
    assert found["rows"][0]["plans"][CSC]["origin"]


def test_the_command_says_what_it_takes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.context_parallel", "--help"], capture_output=True, text=True, check=True
    )
    assert "--quick" in done.stdout and "h100-nvlink" in done.stdout
