"""Batches that are prepared by a thread of their own while the one before is trained on.

    ahead(batches, prepare, depth) -> iterator over Fetched batches, each prepared

While the caller works on a batch, up to `depth` more are fetched and prepared, in order, by one thread. What raises
there, the loader or `prepare`, is raised here in place of that batch. The thread ends with the iterator: at the last
batch, at an error, or when the loop is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Fetched(Generic[Batch]):
    """position: where the loader stood when it had given this batch and no other; None if it does not say. coming: the
    one after it, None for the last.
    """

    batch: Batch
    position: Any
    coming: Future[tuple[Batch, Any] | None]

    def following(self) -> Batch | None:
        """The batch after this one, once it is fetched; None if there is none, or an error, which comes in its turn."""
        found = self.coming.result() if self.coming.exception() is None else None
        return found[0] if found is not None else None


def ahead(batches: Iterable[Batch], prepare: Callable[[Batch], None], depth: int) -> Iterator[Fetched[Batch]]:
    """The batches in order; `prepare` has returned for each."""
    source = iter(batches)
    says = getattr(batches, "state_dict", None) if hasattr(batches, "load_state_dict") else None

    def fetch() -> tuple[Batch, Any] | None:
        for batch in source:
            position = says() if says is not None else None
            prepare(batch)
            return batch, position
        return None

    with ThreadPoolExecutor(1, "csc-ahead") as thread:
        coming = deque(thread.submit(fetch) for _ in range(depth))
        try:
            while (fetched := coming.popleft().result()) is not None:
                coming.append(thread.submit(fetch))
                yield Fetched(*fetched, coming[0])
        finally:
            thread.shutdown(wait=True, cancel_futures=True)
