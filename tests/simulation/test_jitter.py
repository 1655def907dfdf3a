"""Jitter: the same seed gives the same run; hits are as often and as long as the model says."""

from __future__ import annotations

import pytest

from csc.errors import InputError
from csc.simulation.pipeline import Link, Network, Pipeline, StageWork
from csc.simulation.simulate import J3, LEVELS, Jitter, disturbed, level, makespan, simulate

from .orders import chain, one_f_one_b

PIPELINE = Pipeline((StageWork(0.010, 0.010, 0.010),) * 4, chain(4))
SCHEDULE = one_f_one_b(PIPELINE, 12)


def test_same_seed_same_run() -> None:
    first = simulate(PIPELINE, SCHEDULE, J3)
    assert first == simulate(PIPELINE, SCHEDULE, J3)
    assert makespan(PIPELINE, SCHEDULE, J3) == first.makespan
    other = simulate(PIPELINE, SCHEDULE, Jitter(J3.probability, J3.burst, J3.alpha, seed=1))
    assert other != first
    assert min(first.makespan, other.makespan) > makespan(PIPELINE, SCHEDULE)


def test_without_hits_it_is_the_plain_run() -> None:
    assert simulate(PIPELINE, SCHEDULE, Jitter(0.0, 1.0, 1.0)) == simulate(PIPELINE, SCHEDULE)
    assert simulate(PIPELINE, SCHEDULE, Jitter(1.0, 1.0, 0.0)) == simulate(PIPELINE, SCHEDULE)


def test_how_often_and_how_long() -> None:
    """Computes of 2 s and bursts of 0.5 s: e is 2 throughout, so a hit adds between alpha and 3 alpha."""
    delays = [longer - 2.0 for longer in disturbed(Jitter(0.3, 0.5, 1.5), [[2.0] * 5000])[0]]
    hits = [delay for delay in delays if delay > 0]
    assert 0.27 < len(hits) / len(delays) < 0.33
    assert 1.5 <= min(hits) < 1.6 and 4.4 < max(hits) < 4.5
    assert sum(hits) / len(hits) == pytest.approx(3.0, abs=0.1)
    short = [longer - 0.1 for longer in disturbed(Jitter(1.0, 0.5, 1.5), [[0.1] * 1000])[0]]
    assert min(short) >= 0.375 and max(short) < 1.125  # the burst is longer than e, so it decides


def test_the_running_mean_follows_the_costs() -> None:
    """After one compute of 1 s and one of 11 s, e = 0.9 + 1.1 = 2."""
    delay = disturbed(Jitter(1.0, 0.0, 1.0), [[1.0, 11.0]])[0][1] - 11.0
    assert 1.0 <= delay < 3.0
    alone = disturbed(Jitter(1.0, 0.0, 1.0), [[11.0, 11.0]])[0][1] - 11.0
    assert alone == pytest.approx(delay * 11.0 / 2.0)


def test_ranks_are_held_up_independently() -> None:
    jitter = Jitter(0.5, 1.0, 1.0, seed=3)
    first, second = disturbed(jitter, [[1.0] * 50, [1.0] * 50])
    assert first != second
    assert disturbed(jitter, [[1.0] * 7, [1.0] * 50])[1] == second
    assert disturbed(jitter, [[], [1.0] * 50])[1] == second


def test_messages_are_held_up_too() -> None:
    """Of messages alone: computes last as long as modelled, arrivals are late, and those of a pair stay in order."""
    linked = Pipeline(PIPELINE.stages, PIPELINE.messages, Network(Link(0.002, 1e3)))
    only = Jitter(0.5, 0.015, 1.5, computes=False)
    run, calm = simulate(linked, SCHEDULE, only), simulate(linked, SCHEDULE)
    assert [event.seconds for events in run.ranks for event in events] == pytest.approx(
        [event.seconds for events in calm.ranks for event in events]
    )
    late = [t.end - t.start - 0.002 - t.size / 1e3 for t in run.transfers]
    assert 0.3 < sum(delay > 1e-9 for delay in late) / len(late) < 0.7 and min(late) > -1e-9
    for pair in {(t.source_rank, t.destination_rank) for t in run.transfers}:
        ends = [t.end for t in run.transfers if (t.source_rank, t.destination_rank) == pair]
        assert ends == sorted(ends)
    assert run.makespan > calm.makespan
    assert simulate(linked, SCHEDULE, Jitter(0.5, 0.015, 1.5, messages=False)).transfers != run.transfers


def test_levels_rise() -> None:
    spans = [makespan(PIPELINE, SCHEDULE, level(name, seed=2)) for name in LEVELS]
    assert spans == sorted(spans) and spans[0] == makespan(PIPELINE, SCHEDULE) and level("J3") == J3
    with pytest.raises(InputError, match=r"no level of jitter 'J4'\. Choose one of J0, J1, J2, J3"):
        level("J4")


@pytest.mark.parametrize(
    ("values", "part"),
    [((1.5, 1.0, 1.0), "probability is 1.5"), ((0.5, -1.0, 1.0), "burst is -1.0"), ((0.5, 1.0, float("nan")), "alpha")],
)
def test_refuses(values: tuple[float, float, float], part: str) -> None:
    with pytest.raises(InputError, match=part):
        Jitter(*values)
