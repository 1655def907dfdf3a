"""How long a search may go on: simulated actions, so that its result does not depend on the machine, and a clock.

    Budget(actions, seconds, tell)
    budget.part(share) -> Budget       budget.at_most(actions) -> Budget
    budget.spend(actions)              budget.spent       budget.left
    budget.tell(what, seconds)

What a part spends, the whole has spent; what it leaves is there for the parts after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

Tell = Callable[[str, float], None]


class Budget:
    """actions: to simulate in all. seconds: of wall clock from now on; what was found by then has to do. tell: called
    with what is being done and the seconds of the best step so far.
    """

    def __init__(self, actions: float = math.inf, seconds: float | None = None, tell: Tell | None = None) -> None:
        self.left = actions
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._tell = tell
        self._whole: Budget | None = None

    def part(self, share: float) -> Budget:
        """A budget with a share of what is left, under the same clock."""
        part = Budget(self.left * share, None, self._tell)
        part._end, part._whole = self._end, self
        return part

    def at_most(self, actions: float) -> Budget:
        """A budget of so many actions, or what is left if that is less, under the same clock."""
        part = self.part(1.0)
        part.left = min(actions, self.left)
        return part

    def spend(self, actions: float) -> None:
        """Note that so many actions were simulated."""
        self.left -= actions
        if self._whole is not None:
            self._whole.spend(actions)

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._end

    @property
    def spent(self) -> bool:
        """Whether nothing is left, of actions or of time."""
        return self.left <= 0 or self.late

    def tell(self, what: str, seconds: float) -> None:
        """Say what is being done now."""
        if self._tell is not None:
            self._tell(what, seconds)
