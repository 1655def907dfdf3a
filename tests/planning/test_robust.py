"""Orders for jitter: the least mean of what is tried, within the memory; of what is about as fast the least memory."""

from __future__ import annotations

import pytest

from csc.errors import InputError
from csc.planning.schedules import SCHEDULES
from csc.planning.schedules.robust import ALIKE, mean_makespan, robust
from csc.simulation.pipeline import Link, Network, Pipeline, StageWork, peak_memory
from csc.simulation.simulate import level

RANKS, COUNT = 4, 16
PIPELINE = Pipeline(
    (StageWork(0.02, 0.02, 0.02, saved=1.0, stashed=0.5, state=3.0),) * RANKS,
    {("F", s, s + 1): 1.0 for s in range(RANKS - 1)} | {("B", s + 1, s): 1.0 for s in range(RANKS - 1)},
    Network(Link(0.01, 1e3)),
)


@pytest.mark.parametrize("memory", [7.0, 11.0, None])
def test_no_named_schedule_that_fits_is_faster_on_average(memory: float | None) -> None:
    jitter = level("J3")
    found = robust(PIPELINE, range(RANKS), COUNT, memory, jitter, draws=4)
    mean = mean_makespan(PIPELINE, found, jitter, 4)
    assert memory is None or max(peak_memory(PIPELINE, found)) <= memory
    for name in ("1f1b", "eager-1f1b", "zb-h1", "zb-h2", "gpipe"):
        try:
            other = SCHEDULES[name](PIPELINE, range(RANKS), COUNT, memory)
        except InputError:
            continue
        assert mean <= mean_makespan(PIPELINE, other, jitter, 4) * ALIKE


def test_jitter_calls_for_a_deeper_warm_up_and_calm_for_less_memory() -> None:
    busy = robust(PIPELINE, range(RANKS), COUNT, None, level("J3"), draws=4)
    calm = robust(PIPELINE, range(RANKS), COUNT, None, level("J0"))
    held = [max(peak_memory(PIPELINE, each)) for each in (busy, calm)]
    eager = SCHEDULES["eager-1f1b"](PIPELINE, range(RANKS), COUNT)
    assert held[0] > max(peak_memory(PIPELINE, eager)) >= held[1]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="nothing fits in"):
        robust(PIPELINE, range(RANKS), COUNT, 3.5, level("J3"))
    with pytest.raises(InputError, match="a mean of 0 draws"):
        mean_makespan(PIPELINE, SCHEDULES["1f1b"](PIPELINE, range(RANKS), COUNT), level("J3"), 0)
