"""Clocks of a device: what an action takes, in seconds and joules, at each clock that it was measured at.

Terms: a *setting* is one clock with the seconds and joules of an action at it. A *curve* is an action's settings, the
highest clock first. *Waiting watts* are what a device draws while it waits for others. A *change* is one setting of a
new clock.

The least energy of a step (csc.planning.energy) is made of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from csc.errors import InputError

HOLE = 4.0  # times the median step between two clocks that are neighbours
FALL = 0.05  # of the watts, that measurements of a higher clock may lie below those of a lower one
REMEDY = "measure it again at evenly spaced clocks (csc profile TARGET --clocks)"


class Setting(NamedTuple):
    """clock: MHz of the streaming multiprocessors. seconds, joules: of one action, waiting not counted."""

    clock: int
    seconds: float
    joules: float

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


@dataclass(frozen=True)
class ClockCurve:
    """What one action takes at each clock, the highest first. where: the file or the field that it is from."""

    settings: tuple[Setting, ...]
    where: str = field(default="clocks", compare=False)

    @property
    def highest(self) -> Setting:
        """The setting of the highest clock, which a device runs at when nobody sets one. It need not be the fastest."""
        return self.settings[0]

    @cached_property
    def fastest(self) -> Setting:
        """The setting of the fewest seconds; of several the one of the fewest joules."""
        return min(self.settings, key=lambda setting: (setting.seconds, setting.joules))

    def at(self, clock: int) -> Setting:
        """The setting of a clock. InputError if it was not measured."""
        for setting in self.settings:
            if setting.clock == clock:
                return setting
        raise InputError(f"{clock} MHz was not measured", self.where, "choose one of the curve's clocks")

    def scaled(self, factor: float) -> ClockCurve:
        """The curve of an action that takes so many times the seconds and joules of this one."""
        return ClockCurve(tuple(Setting(c, factor * s, factor * j) for c, s, j in self.settings), self.where)


def measured(settings: Iterable[Setting], where: str = "clocks") -> ClockCurve:
    """The curve of these settings, in any order.

    Raises InputError, which names `where`, for fewer than two clocks, a clock that is there twice, figures that are no
    numbers above 0, a hole between two clocks, and power that falls as the clock rises.
    """
    curve = ClockCurve(tuple(sorted(settings, key=lambda setting: -setting.clock)), where)
    if len(curve.settings) < 2:
        count = f"{len(curve.settings)} clock{'s' * (len(curve.settings) != 1)}"
        raise InputError(f"the curve has {count}, so there is nothing to choose from", where, REMEDY)
    for setting in curve.settings:
        if not all(math.isfinite(figure) and figure > 0 for figure in setting):
            raise InputError(
                f"at {setting.clock} MHz it takes {setting.seconds!r} s and {setting.joules!r} J", where,
                "clocks, seconds and joules are finite and more than 0",
            )  # fmt: skip
    usual = median(upper.clock - lower.clock for upper, lower in pairwise(curve.settings))
    for upper, lower in pairwise(curve.settings):
        if upper.clock == lower.clock:
            raise InputError(f"{upper.clock} MHz is there twice", where, "keep one of the two")
        if upper.clock - lower.clock > HOLE * usual:
            raise InputError(
                f"the curve has a hole between {lower.clock} and {upper.clock} MHz, where its other clocks are "
                f"{usual:g} MHz apart", where, REMEDY,
            )  # fmt: skip
    least = curve.settings[0]
    for setting in curve.settings:
        if setting.watts * (1 - FALL) > least.watts:
            raise InputError(
                f"it draws {setting.watts:.0f} W at {setting.clock} MHz and {least.watts:.0f} W at {least.clock} MHz: "
                "power rises with the clock, so one of the two was measured wrong", where, REMEDY,
            )  # fmt: skip
        least = min(least, setting, key=lambda candidate: candidate.watts)
    return curve


@dataclass(frozen=True)
class ClockProfile:
    """Of a device. source: whose measurements these are, and of what. waiting: watts while it waits for others.
    change_seconds: that a rank loses when a new clock is set. forward, backward: curves of an action that takes one
    second at the highest clock; a backward is input and weight gradients alike.
    """

    source: str
    waiting: float
    forward: ClockCurve
    backward: ClockCurve
    change_seconds: float = 0.0


def curve_of(profile: ClockProfile, kind: str, seconds: float) -> ClockCurve:
    """What an action takes at each clock that takes so many seconds at the highest one. kind: F, B, W or BW."""
    return (profile.forward if kind == "F" else profile.backward).scaled(seconds)


def of_devices(curve: ClockCurve, devices: int) -> ClockCurve:
    """The curve of an action that so many devices run at the same time."""
    return ClockCurve(tuple(Setting(c, s, devices * j) for c, s, j in curve.settings), curve.where)


def relative(clocks: Sequence[int], seconds: Sequence[float], watts: Sequence[float], where: str) -> ClockCurve:
    """The curve of an action of one second at the highest clock. seconds: by clock, in any unit; watts: by clock.

    InputError for lists of unequal length, and as of `measured`.
    """
    if not len(clocks) == len(seconds) == len(watts):
        raise InputError(
            f"there are {len(clocks)} clocks, {len(seconds)} seconds and {len(watts)} watts: the curve has holes",
            where, "give one of each for every clock",
        )  # fmt: skip
    curve = measured([Setting(c, s, w * s) for c, s, w in zip(clocks, seconds, watts)], where)
    return curve.scaled(1 / curve.highest.seconds)
