"""How much of its time a search for a mesh has spent, and whether what comes next would end within it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 45.0
TRACE, DRAFT, PLAN = "trace", "draft", "plan"
Kind = str


class SearchClock:
    """Measures what a search spends of its seconds, and how long each kind of work takes. read: the time in seconds, of
    any origin.
    """

    def __init__(self, seconds: float, read: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._read, self._start = seconds, read, read()
        self._took = dict[Kind, float]()
        self._spent = 0.0

    @property
    def left(self) -> float:
        """The seconds that are left of the search; negative when its time is over."""
        self._spent = self._read() - self._start
        return self.seconds - self._spent

    @contextmanager
    def of(self, kind: Kind) -> Iterator[None]:
        """A context that measures how long work of this kind takes. Some take much longer than others: what took long
        is forgotten by and by.
        """
        before = self.left
        try:
            yield
        finally:
            self._took[kind] = max(before - self.left, self._took.get(kind, 0.0) / 2)

    def ends(self, kind: Kind, times: float = 1.0) -> bool:
        """times: that of so many times the seconds."""
        return self.left + (times - 1) * self.seconds >= self._took.get(kind, 0.0)

    def of_fork(self) -> SearchClock:
        """It goes on where this one was read last."""
        clock = SearchClock(self.seconds, self._read)
        clock._start -= self._spent
        clock._took = dict(self._took)
        return clock

    def over(self, part: float) -> bool:
        """Returns whether more than this part (0 to 1) of the seconds is spent."""
        return self.seconds - self.left > part * self.seconds
