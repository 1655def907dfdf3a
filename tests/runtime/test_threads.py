"""Ranks of one process take turns, also on threads: results, order, errors, deadlocks, and nobody left behind."""

from __future__ import annotations

import _thread
import contextvars
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from csc.errors import CscError
from csc.runtime.transport import Work, WorkOnThread, take_turns, until
from csc.torch_private.process_state import ThreadState

NEVER = bool  # what is never ready
Ranks = dict[int, WorkOnThread]


@pytest.fixture(autouse=True)
def nobody_is_left_behind() -> object:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def on_threads(work: Callable[[int, Ranks], Work[Any]], count: int) -> dict[int, Any]:
    """Results of so many ranks, each with a thread; they wait in a call by `ranks[rank].wait`."""
    ranks: Ranks = {}
    state = ThreadState()
    ranks.update({rank: WorkOnThread(rank, work(rank, ranks), state) for rank in range(count)})
    return take_turns(ranks)


def simple(work: Callable[[int, Ranks], Any], count: int) -> dict[int, Any]:
    """The same of functions that wait in calls alone."""

    def run(rank: int, ranks: Ranks) -> Work[Any]:
        yield from ()
        return work(rank, ranks)

    return on_threads(run, count)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_results_of_ranks_that_wait_for_each_other(ranks: int) -> None:
    """A token goes round; each rank waits for it in a call or beside one."""
    for _ in range(2):
        box = list[int]()

        def pass_on(rank: int, others: Ranks, box: list[int] = box) -> Work[int]:
            for step in range(rank, ranks * 3, ranks):
                ready = lambda: len(box) >= step  # noqa: B023, E731
                if rank % 2:
                    others[rank].wait(ready, f"token {step}")
                else:
                    yield from until(ready, f"token {step}")
                box.append(step)
            return step

        assert on_threads(pass_on, ranks) == {rank: 2 * ranks + rank for rank in range(ranks)}
        assert box == list(range(3 * ranks))


@pytest.mark.parametrize("threads", [False, True])
def test_ranks_go_on_in_one_order(threads: bool) -> None:
    """Each as far as it gets; whoever cannot go on is not asked again before it can."""
    told, asked = list[str](), list[int]()

    def work(rank: int) -> Work[None]:
        told.append(f"{rank} begins")
        yield from until(lambda: asked.append(rank) or len(told) > 3 - rank, "others")  # type: ignore[func-returns-value]
        told.append(f"{rank} ends")

    works = {rank: work(rank) for rank in range(3)}
    state = ThreadState()
    take_turns({rank: WorkOnThread(rank, works[rank], state) for rank in works} if threads else works)
    assert told == ["0 begins", "1 begins", "2 begins", "2 ends", "0 ends", "1 ends"]


def test_one_runs_at_a_time() -> None:
    inside, order = list[int](), list[int]()

    def run(rank: int, ranks: Ranks) -> None:
        for turn in range(20):
            inside.append(rank)
            order.append(rank)
            assert inside == [rank]
            torch.ones(2) + 1
            inside.remove(rank)
            least = turn - (rank == 0)
            ranks[rank].wait(lambda least=least: order.count((rank - 1) % 4) > least, "the one before")  # type: ignore[misc]

    simple(run, 4)
    assert len(order) == 80


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_thread_has_what_torch_has_on_in_the_callers() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    told = list[Any]()

    def run(rank: int, ranks: Ranks) -> None:
        x = torch.ones(2, 2, requires_grad=True)
        told.append((
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (x @ x).dtype, torch.ones(1).device.type,
            variable.get(), x.add(1).requires_grad,
        ))  # fmt: skip

    variable.set("set")
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            run(0, {})
            simple(run, 2)
    with torch.inference_mode():
        run(0, {})
        simple(run, 2)
    with torch.device("meta"):
        run(0, {})
        simple(run, 2)
    torch.set_default_device("meta")
    try:
        run(0, {})
        simple(run, 2)
    finally:
        torch.set_default_device(None)
    for first in range(0, len(told), 3):
        assert told[first] == told[first + 1] == told[first + 2]
    assert len(set(told)) == 4

    packed = list[torch.Size]()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t)  # type: ignore[func-returns-value]
    with Calls() as calls, Operators() as operators, hooks:
        simple(lambda rank, ranks: torch.ones(3, requires_grad=True).exp(), 2)
    assert calls.count >= 4 and operators.names.count("aten.exp.default") == 2 and len(packed) == 2


def test_random_numbers_go_on_through_all_ranks() -> None:
    torch.manual_seed(0)
    drawn = simple(lambda rank, ranks: torch.rand(2), 3)
    torch.manual_seed(0)
    assert torch.equal(torch.cat([drawn[rank] for rank in range(3)]), torch.rand(6))


@pytest.mark.parametrize("threads", [False, True])
def test_the_error_of_one_rank_is_what_is_raised(threads: bool) -> None:
    begun, closed = list[int](), list[int]()

    def run(rank: int, ranks: Ranks) -> Work[None]:
        begun.append(rank)
        try:
            if rank == 2:
                raise ZeroDivisionError("the cause")
            if threads and rank == 1:
                ranks[rank].wait(NEVER, "what never comes")
            yield from until(NEVER, "nor this")
        finally:
            closed.append(rank)

    with pytest.raises(ZeroDivisionError, match="the cause"):
        if threads:
            on_threads(run, 4)
        else:
            take_turns({rank: run(rank, {}) for rank in range(4)})
    assert begun == [0, 1, 2] and sorted(closed) == begun


def test_a_deadlock_names_who_waits_for_what() -> None:
    def run(rank: int, ranks: Ranks) -> None:
        if rank < 2:
            ranks[rank].wait(NEVER, f"keys of rank {1 - rank}")

    for _ in range(2):
        with pytest.raises(CscError) as caught:
            simple(run, 3)
        assert "no rank can go on: rank 0 waits at 'keys of rank 1'; rank 1 waits at 'keys of rank 0'" in str(
            caught.value
        )
        assert "rank 2" not in str(caught.value)


def test_a_rank_that_ends_last_leaves_the_others_to_be_named() -> None:
    def run(rank: int, ranks: Ranks) -> Work[None]:
        if rank == 0:
            yield from until(NEVER, "a message that nobody sends")

    with pytest.raises(CscError, match="rank 0 waits at 'a message that nobody sends'"):
        on_threads(run, 2)


@pytest.mark.parametrize("threads", [False, True])
def test_an_interrupt_ends_all_ranks(threads: bool) -> None:
    """Where ranks share the caller's thread at once, on threads at the next wait of the one that runs."""
    ended = list[int]()

    def run(rank: int, ranks: Ranks) -> Work[None]:
        try:
            if rank == 1:
                _thread.interrupt_main()
                for _ in range(20):
                    time.sleep(0.01)
            yield from until(NEVER, "what never comes")
        finally:
            ended.append(rank)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background without
    try:
        with pytest.raises(KeyboardInterrupt):
            if threads:
                on_threads(run, 3)
            else:
                take_turns({rank: run(rank, {}) for rank in range(3)})
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == [0, 1]
