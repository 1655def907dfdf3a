"""Units that are new in several microbatches, put into as few runs of the encoder as their sizes allow.

Terms: see csc.driver.kept_features.
  partly  a microbatch of which some units are kept, and others are new
  run     of the encoder at a microbatch's sizes: its new units keep their places, and in the place of a unit that is
          kept stands a new one of another microbatch, where one with the same label is left

    runs(partly) -> EncoderRun ...        every new unit is in one of them, the first time that it comes
    run.entries() -> what the encoder takes          run.keys -> of the unit in each place
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from csc.driver.apart import Entries
from csc.driver.feature_units import Units


@dataclass(frozen=True)
class Partly:
    """number: of the microbatch among those of a step. kept: by key, what is there of its units."""

    number: int
    units: Units
    keys: Sequence[str]
    entries: Entries
    kept: dict[str, Entries]

    def rows(self, name: str, place: int) -> torch.Tensor:
        """Of an entry, those of the unit in this place."""
        return self.entries[name].split(self.units.cut.entries[name])[place]


@dataclass(frozen=True)
class EncoderRun:
    """At the sizes of a microbatch. filled: for each of its places whose unit stands there."""

    at: Partly
    filled: Sequence[tuple[Partly, int]]

    @property
    def keys(self) -> list[str]:
        """Of the unit in each place."""
        return [one.keys[place] for one, place in self.filled]

    @property
    def is_whole(self) -> bool:
        """Whether the microbatch is encoded as it is."""
        return all(one is self.at for one, _ in self.filled)

    def entries(self) -> Entries:
        """What the encoder takes."""
        if self.is_whole:
            return self.at.entries
        moved = {name: torch.cat([one.rows(name, place) for one, place in self.filled])
                 for name in self.at.units.cut.entries}  # fmt: skip
        return {**self.at.entries, **moved}


def runs(partly: Sequence[Partly]) -> Iterator[EncoderRun]:
    """partly: microbatches of one program."""
    done = {key for one in partly for key in one.kept}
    waiting: dict[str, deque[tuple[Partly, int]]] = {}
    for one in partly:
        for place, label in enumerate(one.units.labels):
            waiting.setdefault(label, deque()).append((one, place))
    for at in partly:
        if done.issuperset(at.keys):
            continue
        free = [key in done for key in at.keys]
        done.update(at.keys)
        filled = []
        for place, (label, is_free) in enumerate(zip(at.units.labels, free, strict=True)):
            other = _next(waiting[label], done) if is_free else None
            filled.append(other or (at, place))
        yield EncoderRun(at, filled)


def _next(waiting: deque[tuple[Partly, int]], done: set[str]) -> tuple[Partly, int] | None:
    """The first unit that is not done, which it is from then on; those before it are not looked at again."""
    while waiting:
        one, place = waiting.popleft()
        if one.keys[place] not in done:
            done.add(one.keys[place])
            return one, place
    return None
