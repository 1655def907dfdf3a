"""A rank that starts holds its shard and a constant: measured on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.startup import MIB, measure, prepare


@pytest.mark.long
@pytest.mark.gloo
def test_a_rank_holds_its_shard_and_a_constant(tmp_path: Path) -> None:
    """Of 128 MiB, a second copy, or the other rank's shard, would be far above the limit."""
    size = 128.0
    prepare(tmp_path, size, pp=2)
    found = measure(tmp_path, pp=2)
    assert [(start.rank, start.weights) for start in found] == [(r, w) for w in ("file", "meta") for r in range(2)]
    for start in found:
        assert start.shard == pytest.approx(size * MIB, rel=0.05)
        assert start.shard < start.anon + MIB, "memory of its own"
        assert start.growth < start.shard + 40 * MIB, start
