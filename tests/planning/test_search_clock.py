"""Whether what comes next in a search would end within its time."""

from __future__ import annotations

import pytest

from csc.driver.search_clock import PLAN, TRACE, SearchClock


class Time:
    """That passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_would_end_too_late_is_told_by_what_the_last_of_its_kind_took() -> None:
    time = Time()
    clock = SearchClock(10.0, time)
    assert clock.left == 10.0 and clock.ends(PLAN) and not clock.over(0.1)
    with clock.of(PLAN):
        time.now += 4.0
    assert clock.left == 6.0 and clock.ends(PLAN) and clock.over(0.3) and not clock.over(0.5)
    time.now += 2.5
    assert not clock.ends(PLAN) and clock.ends(PLAN, 2.0), "3.5 of 10 seconds are left, or 13.5 of 20"
    assert clock.ends(TRACE), "none was made"
    time.now += 4.0
    assert clock.left == -0.5 and not clock.ends(TRACE) and clock.over(1.0)


def test_what_took_long_is_forgotten_by_and_by_and_what_failed_counts() -> None:
    time = Time()
    clock = SearchClock(100.0, time)
    with pytest.raises(ValueError, match="does not fit"), clock.of(PLAN):
        time.now += 40.0
        raise ValueError("does not fit")
    time.now += 25.0
    assert clock.left == 35.0 and not clock.ends(PLAN)
    with clock.of(PLAN):
        time.now += 1.0
    assert clock.ends(PLAN), "half of the 40 seconds"
