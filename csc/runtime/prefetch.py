"""Batches that are prepared by a thread of their own while the one before is trained on.

    ahead(batches, prepare, depth) -> iterator over the batches, each prepared

While the caller works on a batch, up to `depth` more are fetched and prepared, in order, by one thread. What raises
there, the loader or `prepare`, is raised here in place of that batch. The thread ends with the iterator: at the last
batch, at an error, or when the loop is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Batch = TypeVar("Batch")


def ahead(batches: Iterable[Batch], prepare: Callable[[Batch], None], depth: int) -> Iterator[Batch]:
    """The batches in order; `prepare` has returned for each."""
    source = iter(batches)

    def fetch() -> tuple[Batch] | None:
        for batch in source:
            prepare(batch)
            return (batch,)
        return None

    with ThreadPoolExecutor(1, "csc-ahead") as thread:
        coming = deque(thread.submit(fetch) for _ in range(depth))
        try:
            while (fetched := coming.popleft().result()) is not None:
                coming.append(thread.submit(fetch))
                yield fetched[0]
        finally:
            thread.shutdown(wait=True, cancel_futures=True)
