"""When the same orders finish for many tables of work at once: start_times for all of them in one walk.

Terms
  way      one table of seconds and messages among many that are timed together: the last axis of all arrays
  walk     all actions, each after those that it waits for; the same for every way, since orders and feeds are
  place    an entry's row of a table of [entry][position] that is laid out flat: entry * microbatches + position

    orders = FixedOrders(work, orders)                     of any work with these stages, messages and links
    orders.makespans(seconds, wires) -> [way]              bit for bit csc.planning.schedules.timing.makespan
    orders.peaks(growth, moment) -> bytes by rank          bit for bit csc.planning.schedules.timing.peaks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from csc.errors import ScheduleError
from csc.planning.schedules.timing import start_times
from csc.planning.schedules.work import WorkTables, positions
from csc.simulation.pipeline import Network

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


class _Sent(NamedTuple):
    """A message behind an action: it holds its pair of ranks while it is on the wire."""

    slot: int
    wire: int  # place in the table of wires
    latency: float
    fed: int  # number of the action that it comes to, among those that wait for messages


class _Walked(NamedTuple):
    rank: int
    waits: int  # number among the actions that wait for messages; -1: its inputs are its own rank's
    place: int
    lasts: tuple[int, ...]  # of an action at the last position: places whose seconds lead to its lanes' ends
    sends: tuple[_Sent, ...]


@dataclass(frozen=True)
class FixedOrders:
    """work: of any seconds; orders: of each rank, free of deadlock."""

    work: WorkTables
    orders: Sequence[Sequence[int]]

    def makespans(self, seconds: Floats, wires: Floats) -> Floats:
        """[way]: seconds until the last action ends. seconds: [entry][position][way], fused entries too; wires:
        [channel in its order][position][way], seconds on the wire.
        """
        ways = seconds.shape[-1]
        rows, sent = list(seconds.reshape(-1, ways)), list(wires.reshape(-1, ways))
        clock, free = np.zeros((len(self.orders), ways)), list(np.zeros((self.work.slots, ways)))
        came, clocks = list(np.zeros((self._walk[1], ways))), list(clock)
        most = np.zeros(ways)
        for rank, waits, place, lasts, sends in self._walk[0]:
            now = clocks[rank]
            if waits >= 0:
                np.maximum(now, came[waits], out=now)
            if lasts:
                end = now
                for last in lasts:
                    end = end + rows[last]
                np.maximum(most, end, out=most)
            np.add(now, rows[place], out=now)
            for slot, wire, latency, fed in sends:
                at = free[slot]
                np.maximum(at, now, out=at)
                np.add(at, sent[wire], out=at)
                np.maximum(came[fed], at + latency, out=came[fed])
        return most

    def peaks(self, growth: Floats, moment: Floats) -> list[float]:
        """The most bytes of activations on each rank. growth: [entry][position]; moment: [stage][position]."""
        found = []
        for places, fused, moments in self._rank_places:
            alive = np.cumsum(growth.reshape(-1)[places])
            before = np.concatenate([[0.0], alive])[fused]
            found.append(float(max(0.0, alive.max(), (before + moment.reshape(-1)[moments]).max(initial=0.0))))
        return found

    @cached_property
    def _walk(self) -> tuple[list[_Walked], int]:
        """The walk, and how many actions wait for messages. ScheduleError for orders that never end."""
        work, count = self.work, self.work.microbatches
        starts = start_times(_of_ones(work), self.orders)
        if starts is None:
            raise ScheduleError("the ranks' orders wait for each other", "schedule", "give orders that end")
        wire_of = {
            (3 * source + "FBW".index(kind), 3 * destination + "FBW".index(kind)): number
            for number, (kind, source, destination) in enumerate(sorted(work.pipeline.messages))
        }
        came: dict[int, int] = {}
        walk = []
        everything = [(rank, *one) for rank, order in enumerate(self.orders) for one in positions(work, order)]
        for rank, entry, lane, k in sorted(everything, key=lambda one: starts[one[2]][one[3]]):
            ends = (lane, lane + 1) if entry != lane else (lane,)
            sends = tuple(
                _Sent(slot, wire_of[lane, fed] * count + k, latency, came.setdefault(fed * count + k, len(came)))
                for fed, slot, latency, _ in work.feeds[entry]
                if slot >= 0
            )
            lasts = tuple(one * count + k for one in ends) if k == count - 1 else ()
            walk.append(_Walked(rank, came.get(lane * count + k, -1), entry * count + k, lasts, sends))
        return walk, len(came)

    @cached_property
    def _rank_places(self) -> list[tuple[Places, Places, Places]]:
        """By rank: places of its actions in order; of those that are fused the numbers in that order, and the places of
        their stages' moments.
        """
        work, found = self.work, []
        for order in self.orders:
            own = positions(work, order)
            fused = [number for number, (entry, _, _) in enumerate(own) if entry >= work.size]
            moments = [(own[f][1] // 3) * work.microbatches + own[f][2] for f in fused]
            places = [entry * work.microbatches + k for entry, _, k in own]
            found.append(tuple(np.array(one, dtype=np.int64) for one in (places, fused, moments)))
        return found  # type: ignore[return-value]


def _of_ones(work: WorkTables) -> WorkTables:
    """The same stages and messages where every action takes a second and links nothing: an action starts after all
    that it waits for.
    """
    stages = tuple(replace(one, forward=1.0, backward_input=1.0, backward_weight=1.0) for one in work.pipeline.stages)
    pipeline = replace(work.pipeline, stages=stages, loads=None, network=Network())
    return WorkTables.of(pipeline, work.placement, work.microbatches)
