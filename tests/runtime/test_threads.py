"""Ranks as threads that take turns: results, errors, deadlocks, and nobody left behind."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest
import torch

from csc.errors import CscError
from csc.runtime.transport import Turns, together

Run = Generator[str, None, object]


@pytest.fixture(autouse=True)
def nobody_is_left_behind() -> object:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def pass_on(rank: int, ranks: int, turns: Turns, box: list[int], rounds: int = 3) -> Run:
    """A token goes round; each rank waits for it inside an action (turns.wait) or beside one (yield)."""
    for step in range(rank, ranks * rounds, ranks):
        while len(box) < step:
            if rank % 2:
                turns.wait(f"token {step}")
            else:
                yield f"token {step}"
        box.append(step)
        turns.changed()
    return step


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_results_of_ranks_that_wait_for_each_other(ranks: int) -> None:
    turns, box = Turns(), list[int]()
    for _ in range(2):  # turns can be taken again
        box.clear()
        found = together({rank: pass_on(rank, ranks, turns, box) for rank in range(ranks)}, turns)
        assert box == list(range(3 * ranks)) and sorted(found) == list(range(ranks))


def test_one_runs_at_a_time_without_gradients() -> None:
    turns, inside = Turns(), list[int]()

    def run(rank: int) -> Run:
        yield from ()
        assert not torch.is_grad_enabled()
        for _ in range(100):
            inside.append(rank)
            assert inside == [rank]
            torch.ones(2) + 1
            inside.remove(rank)
        return None

    together({rank: run(rank) for rank in range(4)}, turns)


def test_the_error_of_one_rank_is_what_is_raised() -> None:
    turns, begun, closed = Turns(), list[int](), list[int]()

    def run(rank: int) -> Run:
        begun.append(rank)
        try:
            if rank == 2:
                raise ZeroDivisionError("the cause")
            while True:
                turns.wait("what never comes")
                yield "nor this"
        finally:
            closed.append(rank)

    with pytest.raises(ZeroDivisionError, match="the cause"):
        together({rank: run(rank) for rank in range(4)}, turns)
    assert 2 in begun and sorted(closed) == sorted(begun)


def test_turns_can_be_taken_again_after_a_failure() -> None:
    turns = Turns()

    def failing(rank: int) -> Run:
        yield from ()
        if rank == 0:
            turns.wait("rank 1")
            raise ZeroDivisionError
        turns.changed()
        turns.wait("rank 0")
        return None

    with pytest.raises(ZeroDivisionError):
        together({rank: failing(rank) for rank in range(2)}, turns)
    box = list[int]()
    assert together({rank: pass_on(1 - rank, 2, turns, box) for rank in range(2)}, turns) == {0: 5, 1: 4}


def test_a_deadlock_names_who_waits_for_what() -> None:
    turns = Turns()

    def run(rank: int) -> Run:
        yield from ()
        if rank < 2:
            turns.changed()
            while True:
                turns.wait(f"keys of rank {1 - rank}")
        return None

    for _ in range(2):
        with pytest.raises(CscError) as caught:
            together({rank: run(rank) for rank in range(3)}, turns)
        assert "rank 0 waits at 'keys of rank 1'; rank 1 waits at 'keys of rank 0'" in str(caught.value)
        assert "rank 2" not in str(caught.value)


def test_a_rank_that_ends_last_leaves_the_others_to_be_named() -> None:
    turns = Turns()

    def run(rank: int) -> Run:
        if rank == 0:
            yield "a message that nobody sends"
        return None

    with pytest.raises(CscError, match="rank 0 waits at 'a message that nobody sends'"):
        together({rank: run(rank) for rank in range(2)}, turns)
