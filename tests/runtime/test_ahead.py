"""Batches prepared ahead: in order, by one thread that ends with the loop, errors where they belong."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from csc.runtime.batches import ahead
from tests.launching import PATIENCE


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("csc-ahead")]


@pytest.mark.parametrize("depth", [1, 3])
def test_order_and_distance(depth: int) -> None:
    """While the caller has a batch, at most `depth` more have been prepared, and they will be without being asked."""
    prepared = threading.Semaphore(0)
    order: list[int] = []

    def prepare(batch: int) -> None:
        order.append(batch)
        prepared.release()

    for place, fetched in enumerate(ahead(range(7), prepare, depth)):
        assert (fetched.batch, fetched.position) == (place, None)
        for _ in range(depth + 1 if place == 0 else 1):
            assert place + depth >= 7 or prepared.acquire(timeout=PATIENCE)
        assert order == list(range(min(7, place + depth + 1)))
    assert order == list(range(7)) and not running()


@pytest.mark.parametrize("where", ["loader", "prepare"])
def test_an_error_is_raised_in_place_of_its_batch(where: str) -> None:
    def loader() -> Iterator[int]:
        for batch in range(5):
            if where == "loader" and batch == 3:
                raise OSError("no more")
            yield batch

    def prepare(batch: int) -> None:
        if where == "prepare" and batch == 3:
            raise OSError("no more")

    seen = []
    with pytest.raises(OSError, match="no more"):
        for fetched in ahead(loader(), prepare, 2):
            seen.append((fetched.batch, fetched.following()))
    assert seen == [(0, 1), (1, 2), (2, None)] and not running()


def test_the_thread_ends_when_the_loop_is_left() -> None:
    batches = ahead(range(100), lambda batch: None, 1)
    for fetched in batches:
        assert running()
        if fetched.batch == 2:
            break
    batches.close()  # type: ignore[attr-defined]
    assert not running()


def test_nothing_to_do() -> None:
    assert list(ahead([], lambda batch: None, 1)) == [] and not running()
