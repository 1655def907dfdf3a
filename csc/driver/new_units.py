"""Units that are new in several microbatches, put into as few runs of the encoder as their sizes allow.

Terms: see csc.driver.kept_features.
  partly  a microbatch of which some units are kept, and others are new
  run     of the encoder at a microbatch's sizes: its new units keep their places, and in the place of a unit that is
          kept stands a new one of another microbatch, where one with the same label is left

    runs(partly) -> EncoderRun ...        every new unit is in one of them, the first time that it comes
    run.entries() -> what the encoder takes          run.keys -> of the unit in each place
"""

from __future__ import annotations

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
    for number, at in enumerate(partly):
        if done.issuperset(at.keys):
            continue
        waiting = _waiting(partly[number + 1 :], done.union(at.keys))
        filled = []
        for place, (key, label) in enumerate(zip(at.keys, at.units.labels, strict=True)):
            others = waiting.get(label, []) if key in done else []
            filled.append(others.pop(0) if others else (at, place))
        run = EncoderRun(at, filled)
        done.update(run.keys)
        yield run


def _waiting(partly: Sequence[Partly], done: set[str]) -> dict[str, list[tuple[Partly, int]]]:
    """By label the units that are not done, each once."""
    found: dict[str, list[tuple[Partly, int]]] = {}
    for one in partly:
        for place, (key, label) in enumerate(zip(one.keys, one.units.labels, strict=True)):
            if key not in done:
                done.add(key)
                found.setdefault(label, []).append((one, place))
    return found
