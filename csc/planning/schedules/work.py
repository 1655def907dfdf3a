"""The work of a pipeline as lanes, the tables that schedulers run on: when orders finish, and what memory they take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from csc.errors import InputError, ScheduleError
from csc.ir.schedule import PARTS, Action, Kind, Message, Schedule
from csc.simulation.pipeline import Floats, Network, Pipeline, StageWork

# --- The work of a pipeline as lanes: the tables that schedulers run on ----------------------------------------------
#
# Terms
#   lane       the F, the B or the W of one stage, for all microbatches; all lanes run them in the same order
#   position   a microbatch's place in that order
#   fused      a stage's B and W of one position as one action, BW; it has no lane and moves both lanes on
#   feed       a lane whose position k waits for position k of this one, and the message in between
#   order      of a rank: one entry per action, its lane, or for a fused one `Work.fused(stage)`; positions follow from
#              counting


KINDS: tuple[Kind, ...] = ("F", "B", "W")

# (lane that is fed, slot of the directed pair of ranks or -1 within a rank, latency, seconds on the wire by position)
Feed = tuple[int, int, float, list[float]]


@dataclass(frozen=True)
class WorkTables:
    """Lane 3 s + i is kind i of F, B, W on stage s. Lanes without work are in no table. Tables by entry have a row for
    each lane and then one for each stage, for its fused actions.

    Raises InputError for a placement or sequence that does not fit, ScheduleError for a channel against the order of
    stages.
    """

    pipeline: Pipeline
    placement: tuple[int, ...]
    microbatches: int
    sequence: tuple[int, ...]

    @classmethod
    def of(
        cls, pipeline: Pipeline, placement: Sequence[int], microbatches: int, sequence: Sequence[int] | None = None
    ) -> WorkTables:
        """Returns the tables of a pipeline. sequence: the microbatch at each position; None: 0, 1, ..."""
        _check(pipeline, placement, microbatches)
        return cls(
            pipeline, tuple(placement), microbatches, tuple(range(microbatches) if sequence is None else sequence)
        )

    @property
    def ranks(self) -> int:
        return max(self.placement) + 1

    @property
    def size(self) -> int:
        """How many lanes there could be; entries from here on are fused."""
        return 3 * len(self.placement)

    def fused(self, stage: int) -> int:
        """The entry of BW of a stage. There is one where the stage has B and W."""
        return self.size + stage

    @cached_property
    def lane_of(self) -> list[int]:
        """[entry]: the lane whose inputs it waits for; of a fused one that of its B, its W is the next lane."""
        return [*range(self.size), *(3 * s + 1 for s in range(len(self.placement)))]

    @cached_property
    def lanes(self) -> list[int]:
        """All lanes with work."""
        return [
            3 * s + i
            for s, stage in enumerate(self.pipeline.stages)
            for i, exists in enumerate((True, stage.has_b, stage.has_w))
            if exists
        ]

    @cached_property
    def lanes_of(self) -> list[list[int]]:
        """For each rank its lanes."""
        lanes_found: list[list[int]] = [[] for _ in range(self.ranks)]
        for lane in self.lanes:
            lanes_found[self.placement[lane // 3]].append(lane)
        return lanes_found

    @cached_property
    def upstream_first(self) -> list[int]:
        """All lanes, each after those that feed it: F by ascending stage, B by descending stage, then W."""
        return sorted(self.lanes, key=lambda lane: (lane % 3, lane // 3 if lane % 3 == 0 else -(lane // 3)))

    @cached_property
    def features(self) -> list[tuple[float, ...]]:
        """For each position its microbatch's features; positions with the same ones are alike in all."""
        loads = self.pipeline.loads
        return [() if loads is None else loads.features[mb] for mb in self.sequence]

    def _rows(self, figure: str) -> list[list[float]]:
        """[stage][position]"""
        loads = self.pipeline.loads
        if loads is None:
            return [[getattr(stage, figure)] * self.microbatches for stage in self.pipeline.stages]
        return [[row[mb] for mb in self.sequence] for row in loads.table(figure)]

    @cached_property
    def seconds(self) -> list[list[float]]:
        """[entry][position]"""
        forward, backward, weight = map(self._rows, ("forward", "backward_input", "backward_weight"))
        apart = [row for three in zip(forward, backward, weight) for row in three]
        return apart + [[b + w for b, w in zip(*both)] for both in zip(backward, weight)]

    @cached_property
    def least(self) -> list[float]:
        """[entry]: the seconds of the position that takes the least."""
        return [min(row) for row in self.seconds]

    @cached_property
    def longest(self) -> float:
        """Seconds of the longest action."""
        return max(map(max, self.seconds))

    @cached_property
    def totals(self) -> list[float]:
        """[lane]: the seconds of all its actions."""
        return [sum(row) for row in self.seconds[: self.size]]

    @cached_property
    def growth(self) -> list[list[float]]:
        """[entry][position]: by how many bytes the action makes the rank's activations grow; see `growth`."""
        return growth(self.pipeline.stages, *(np.array(self._rows(figure)) for figure in ("saved", "stashed"))).tolist()

    @cached_property
    def owed(self) -> list[list[float]]:
        """[entry][position]: what W's that are ready will give back grows by so many bytes; negative if it shrinks."""
        nothing = [0.0] * self.microbatches
        rows = [nothing] * len(self.growth)
        for s, stage in enumerate(self.pipeline.stages):
            if stage.has_w:
                rows[3 * s + 2] = self.growth[3 * s + 2]
                rows[3 * s + (1 if stage.has_b else 0)] = [-gives for gives in self.growth[3 * s + 2]]
        return rows

    @cached_property
    def moment(self) -> list[list[float]]:
        """[stage][position]: the bytes that BW takes while it runs."""
        return self._rows("fused")

    @cached_property
    def shrinks(self) -> list[list[bool]]:
        """[stage][position]: whether BW takes no more bytes while it runs than B would leave behind."""
        return [
            [takes <= max(0.0, grows) for takes, grows in zip(row, self.growth[3 * s + 1])]
            for s, row in enumerate(self.moment)
        ]

    @cached_property
    def feeds(self) -> list[tuple[Feed, ...]]:
        """[entry]: what its actions make possible. Slots number the directed pairs of ranks that exchange messages."""
        feeds: list[list[Feed]] = [[] for _ in range(3 * len(self.pipeline.stages))]
        nothing = [0.0] * self.microbatches
        for s, stage in enumerate(self.pipeline.stages):
            if stage.has_b:
                feeds[3 * s].append((3 * s + 1, -1, 0.0, nothing))
            if stage.has_w:
                feeds[3 * s + (1 if stage.has_b else 0)].append((3 * s + 2, -1, 0.0, nothing))
        slots: dict[tuple[int, int], int] = {}
        for (kind, source, destination), size in sorted(self.pipeline.messages.items()):
            a, b = self.placement[source], self.placement[destination]
            i = "FBW".index(kind)
            if a == b:
                feeds[3 * source + i].append((3 * destination + i, -1, 0.0, nothing))
                continue
            link = self.pipeline.network.link(a, b)
            loads = self.pipeline.loads
            sizes = [size] * self.microbatches if loads is None else loads.sizes[kind, source, destination]
            wire = [sizes[mb] / link.bandwidth for mb in self.sequence]
            feeds[3 * source + i].append(
                (3 * destination + i, slots.setdefault((a, b), len(slots)), link.latency, wire)
            )
        both = [[feed for feed in feeds[3 * s + 1] if feed[0] != 3 * s + 2] for s in range(len(self.placement))]
        return [tuple(row) for row in feeds + both]

    @cached_property
    def slots(self) -> int:
        """How many directed pairs of ranks exchange messages."""
        return 1 + max((feed[1] for row in self.feeds for feed in row), default=-1)

    @cached_property
    def needs(self) -> list[int]:
        """[lane]: how many feeds an action waits for."""
        count = [0] * (3 * len(self.pipeline.stages))
        for row in self.feeds[: self.size]:
            for feed in row:
                count[feed[0]] += 1
        return count


def positions(work: WorkTables, order: Sequence[int]) -> list[tuple[int, int, int]]:
    """(entry, lane, position) of each action of a rank's order."""
    lane_of, positions_found = work.lane_of, []
    done: dict[int, int] = {}
    for entry in order:
        lane = lane_of[entry]
        k = done.get(lane, 0)
        done[lane] = k + 1
        if entry != lane:
            done[lane + 1] = k + 1
        positions_found.append((entry, lane, k))
    return positions_found


def growth(stages: Sequence[StageWork], saved: Floats, stashed: Floats) -> Floats:
    """[entry][position] of [stage][position]: by how many bytes each action makes a rank's activations grow; negative
    if they shrink.

    saved is alive from F's end until B's end, stashed from then until W's end; without a B, saved until W's end.
    """
    has_b, has_w = (
        np.array([[flag] for flag in flags]) for flags in zip(*((stage.has_b, stage.has_w) for stage in stages))
    )
    saved = np.where(has_b | has_w, saved, 0.0)
    stashed = np.where(has_w, np.where(has_b, stashed, saved), 0.0)
    apart = np.stack([saved, np.where(has_b, stashed - saved, 0.0), -stashed], axis=1)
    return np.concatenate([apart.reshape(-1, saved.shape[1]), -saved])


def actions(work: WorkTables, orders: Sequence[Sequence[int]]) -> list[list[Action]]:
    """The F, B, W and BW of each rank, in order."""
    return [
        [
            Action("BW" if entry != lane else KINDS[lane % 3], lane // 3, work.sequence[k])
            for entry, lane, k in positions(work, order)
        ]
        for order in orders
    ]


def orders_of(schedule: Schedule) -> list[list[int]]:
    """The orders that `actions` would make these of. ScheduleError if a lane does not take microbatches in turn."""
    stages = len(schedule.placement)
    done: dict[int, int] = {}
    orders = []
    for rank in schedule.ranks:
        order = []
        for action in rank:
            if not action.computes:
                continue
            lanes = [3 * action.stage + KINDS.index(kind) for kind in PARTS[action.kind]]
            for lane in lanes:
                if action.microbatch != done.get(lane, 0):
                    raise ScheduleError(
                        f"'{action}' comes where microbatch {done.get(lane, 0)} would be next",
                        f"schedule {schedule.name}", "use one whose stages take microbatches in turn",
                    )  # fmt: skip
                done[lane] = action.microbatch + 1
            order.append(lanes[0] if len(lanes) == 1 else 3 * stages + action.stage)
        orders.append(order)
    return orders


def _check(pipeline: Pipeline, placement: Sequence[int], microbatches: int) -> None:
    stages = len(pipeline.stages)
    if len(placement) != stages:
        raise InputError(
            f"the placement names {len(placement)} ranks for {stages} stages", "schedule", "Name one rank per stage"
        )
    if microbatches < 1:
        raise InputError(f"there cannot be {microbatches} microbatches", "schedule", "Ask for at least 1")
    if set(placement) != set(range(max(placement) + 1)):
        raise InputError(
            f"the placement {list(placement)} leaves a rank without a stage", "schedule", "Number the ranks from 0"
        )
    if pipeline.loads is not None and len(pipeline.loads.features) < microbatches:
        raise InputError(
            f"the pipeline has the loads of {len(pipeline.loads.features)} microbatches, the schedule has "
            f"{microbatches}",
            "schedule",
            "Give the features of each microbatch",
        )
    for kind, source, destination in pipeline.messages:
        if (source < destination) != (kind == "F"):
            raise ScheduleError(
                f"message {kind} {source}>{destination} leads the wrong way",
                "schedule",
                "Number the stages so that activations go to later stages and gradients to earlier ones",
            )


# --- Bytes of activations: what must fit, and what a rank holds back so that it can always go on ---------------------
#
# Terms: see work.py; saved, stashed and state as in csc.simulation.pipeline.


AT_ONCE = 2  # stages of a rank that gathers make whole


@dataclass(frozen=True)
class Reserve:
    """Bytes by position. saved[stage]: from F until B, for the stages of the rank that have a B. extra: what one
    microbatch takes for a moment on top of all it saves, with B and W fused or not, whichever takes less. most: both
    together, of the microbatch that needs the most.
    """

    stages: tuple[int, ...]
    saved: dict[int, list[float]]
    extra: list[float]
    most: float


def reserve(work: WorkTables, rank: int) -> Reserve:
    """The bytes of one rank by position."""
    stages_here = [s for s, home in enumerate(work.placement) if home == rank]
    stages = work.pipeline.stages
    turning = tuple(s for s in stages_here if stages[s].has_b)
    saved = {s: work.growth[3 * s] if stages[s].has_b else [0.0] * work.microbatches for s in stages_here}
    alike = {features: k for k, features in enumerate(work.features)}  # a position for each kind of microbatches
    extra = {features: _extra(work, stages_here, k) for features, k in alike.items()}
    most = max(sum(saved[s][k] for s in stages_here) + extra[features] for features, k in alike.items())
    return Reserve(turning, saved, [extra[features] for features in work.features], most)


def _extra(work: WorkTables, stages_here: Sequence[int], position: int) -> float:
    """Bytes that B or W of one microbatch takes for a moment, on that of these stages where it is most."""
    most = 0.0
    for s in stages_here:
        stage = work.pipeline.stages[s]
        if stage.has_w:
            apart = work.growth[3 * s + (1 if stage.has_b else 0)][position]
            most = max(most, min(apart, work.moment[s][position]) if stage.has_b else apart)
    return most


def reserves(work: WorkTables) -> list[Reserve | None]:
    """For each rank, what it must hold back; None where bytes never grow after a microbatch's first F on the rank."""
    reserves_found: list[Reserve | None] = []
    for rank in range(work.ranks):
        reserve_here = reserve(work, rank)
        saving = [s for s in reserve_here.saved if max(reserve_here.saved[s]) > 0]
        reserves_found.append(reserve_here if len(saving) > 1 or max(reserve_here.extra) > 0 else None)
    return reserves_found


def state(work: WorkTables) -> list[float]:
    """For each rank the bytes that are always there, see csc.simulation.pipeline.states, and those of the parameters
    that
    gathers make whole beside them, two stages at a time (csc.planning.gathers).
    """
    bytes_ = [0.0] * work.ranks
    working = [0.0] * work.ranks
    gathered_bytes: list[list[float]] = [[] for _ in range(work.ranks)]
    for stage, rank in zip(work.pipeline.stages, work.placement):
        bytes_[rank] += stage.state
        working[rank] = max(working[rank], stage.working)
        gathered_bytes[rank].append(stage.gathered)
    return [
        fixed + most + sum(sorted(gathered)[-AT_ONCE:])
        for fixed, most, gathered in zip(bytes_, working, gathered_bytes)
    ]  # fmt: skip


def least(work: WorkTables) -> list[float]:
    """For each rank the least memory limit, state and activations, with which it can run its microbatches in turn."""
    return [fixed + reserve(work, rank).most for rank, fixed in enumerate(state(work))]


def room(work: WorkTables, memory: Sequence[float] | float | None) -> list[float] | None:
    """For each rank the bytes that are left for activations. InputError if one microbatch at a time does not fit."""
    if memory is None:
        return None
    limits = [float(memory)] * work.ranks if isinstance(memory, (int, float)) else list(memory)
    if len(limits) != work.ranks:
        raise InputError(
            f"{len(limits)} memory limits for {work.ranks} ranks", "schedule", "Give one per rank, or one for all"
        )
    if any(math.isnan(limit) for limit in limits):
        raise InputError("a rank cannot work with nan bytes of memory", "schedule", "Give a number, or no limit")
    fixed, wanted = state(work), least(work)
    worst = max(range(work.ranks), key=lambda rank: wanted[rank] / limits[rank] if limits[rank] > 0 else float("inf"))
    if any(want > limit * (1 + 1e-9) for want, limit in zip(wanted, limits)):
        stages = ", ".join(str(s) for s, rank in enumerate(work.placement) if rank == worst)
        same = all(limit == limits[0] for limit in limits)
        raise InputError(
            f"nothing fits in {size(limits[worst])}: rank {worst} (stages {stages}) needs {size(wanted[worst])}, "
            f"{size(fixed[worst])} for parameters, gradients and optimizer state and "
            f"{size(wanted[worst] - fixed[worst])} for the activations of one microbatch at a time",
            "schedule",
            f"Allow {size(max(wanted) if same else wanted[worst])} or more, or give rank {worst} less to do",
        )
    return [limit - taken for limit, taken in zip(limits, fixed)]


def size(bytes_: float) -> str:
    """Bytes in words."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(bytes_) >= factor:
            return f"{bytes_ / factor:.4g} {unit}"
    return f"{bytes_:.4g} bytes"


# --- When given orders finish: the same model of time as `greedy`, without choices -----------------------------------
#
# Terms: see work.py.


def start_times(work: WorkTables, orders: Sequence[Sequence[int]]) -> list[list[float]] | None:
    """Start of every action when each rank runs its order without a pause; None if the orders deadlock, or if a fused
    action stands before the W of an earlier position. W of a fused action starts when its B is done.

    The times do not depend on the order in which ranks are looked at: only one rank sends over a directed pair.
    """
    count, seconds, feeds, lane_of = work.microbatches, work.seconds, work.feeds, work.lane_of
    left = [[n] * count for n in work.needs]
    when = [[0.0] * count for _ in left]
    head = [0] * len(left)
    free = [0.0] * work.slots
    clock = [0.0] * len(orders)
    place = [0] * len(orders)
    blocked = [-1] * len(left)
    ready = list(range(len(orders)))
    todo = sum(len(order) for order in orders)
    while ready:
        rank = ready.pop()
        now, order, i = clock[rank], orders[rank], place[rank]
        first = i
        size = len(order)
        while i < size:
            entry = order[i]
            lane = lane_of[entry]
            k = head[lane]
            if left[lane][k]:
                blocked[lane] = rank
                break
            row = when[lane]
            if row[k] > now:
                now = row[k]
            else:
                row[k] = now
            if entry != lane:
                if head[lane + 1] != k:
                    return None
                when[lane + 1][k] = now + seconds[lane][k]
                head[lane + 1] = k + 1
            now += seconds[entry][k]
            head[lane] = k + 1
            i += 1
            for fed, slot, latency, wire in feeds[entry]:
                moment = now
                if slot >= 0:
                    if free[slot] > moment:
                        moment = free[slot]
                    moment += wire[k]
                    free[slot] = moment
                    moment += latency
                row = when[fed]
                if moment > row[k]:
                    row[k] = moment
                waits = left[fed]
                waits[k] -= 1
                if not waits[k] and blocked[fed] >= 0 and head[fed] == k:
                    ready.append(blocked[fed])
                    blocked[fed] = -1
        clock[rank], place[rank] = now, i
        todo -= i - first
    return None if todo else when


def makespan(work: WorkTables, orders: Sequence[Sequence[int]]) -> float:
    """Seconds until the last action ends; inf if the orders deadlock."""
    starts = start_times(work, orders)
    if starts is None:
        return math.inf
    return max(starts[lane][-1] + work.seconds[lane][-1] for lane in work.lanes)


def peaks(work: WorkTables, orders: Sequence[Sequence[int]]) -> list[float]:
    """For each rank the most bytes of activations that are alive at once: it depends on the order alone."""
    result = []
    for order in orders:
        head = dict.fromkeys(work.lanes, 0)
        alive = peak = 0.0
        for entry in order:
            lane = work.lane_of[entry]
            k = head[lane]
            head[lane] += 1
            if entry != lane:
                head[lane + 1] += 1
                peak = max(peak, alive + work.moment[lane // 3][k])
            alive += work.growth[entry][k]
            peak = max(peak, alive)
        result.append(peak)
    return result


# --- When the same orders finish for many tables of work at once: start_times for all of them in one walk ------------
#
# Terms
#   way      one table of seconds and messages among many that are timed together: the last axis of all arrays
#   walk     all actions, each after those that it waits for; the same for every way, since orders and feeds are
#   place    an entry's row of a table of [entry][position] that is laid out flat: entry * microbatches + position


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
        columns = seconds.shape[-1]
        rows, sent = list(seconds.reshape(-1, columns)), list(wires.reshape(-1, columns))
        clock, free = np.zeros((len(self.orders), columns)), list(np.zeros((self.work.slots, columns)))
        came, clocks = list(np.zeros((self._walk[1], columns))), list(clock)
        most = np.zeros(columns)
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
                moment = free[slot]
                np.maximum(moment, now, out=moment)
                np.add(moment, sent[wire], out=moment)
                np.maximum(came[fed], moment + latency, out=came[fed])
        return most

    def peaks(self, growth: Floats, moment: Floats) -> list[float]:
        """The most bytes of activations on each rank. growth: [entry][position]; moment: [stage][position]."""
        peaks = []
        for places, fused, moments in self._rank_places:
            alive = np.cumsum(growth.reshape(-1)[places])
            before = np.concatenate([[0.0], alive])[fused]
            peaks.append(float(max(0.0, alive.max(), (before + moment.reshape(-1)[moments]).max(initial=0.0))))
        return peaks

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
        everything = [
            (rank, *position) for rank, order in enumerate(self.orders) for position in positions(work, order)
        ]
        for rank, entry, lane, k in sorted(everything, key=lambda item: starts[item[2]][item[3]]):
            ends = (lane, lane + 1) if entry != lane else (lane,)
            sends = tuple(
                _Sent(slot, wire_of[lane, fed] * count + k, latency, came.setdefault(fed * count + k, len(came)))
                for fed, slot, latency, _ in work.feeds[entry]
                if slot >= 0
            )
            lasts = tuple(end * count + k for end in ends) if k == count - 1 else ()
            walk.append(_Walked(rank, came.get(lane * count + k, -1), entry * count + k, lasts, sends))
        return walk, len(came)

    @cached_property
    def _rank_places(self) -> list[tuple[Places, Places, Places]]:
        """By rank: places of its actions in order; of those that are fused the numbers in that order, and the places of
        their stages' moments.
        """
        work, rank_places = self.work, []
        for order in self.orders:
            own_positions = positions(work, order)
            fused = [number for number, (entry, _, _) in enumerate(own_positions) if entry >= work.size]
            moments = [(own_positions[f][1] // 3) * work.microbatches + own_positions[f][2] for f in fused]
            places = [entry * work.microbatches + k for entry, _, k in own_positions]
            rank_places.append(tuple(np.array(column, dtype=np.int64) for column in (places, fused, moments)))
        return rank_places  # type: ignore[return-value]


def _of_ones(work: WorkTables) -> WorkTables:
    """The same stages and messages where every action takes a second and links nothing: an action starts after all
    that it waits for.
    """
    stages = tuple(
        replace(stage, forward=1.0, backward_input=1.0, backward_weight=1.0) for stage in work.pipeline.stages
    )
    pipeline = replace(work.pipeline, stages=stages, loads=None, network=Network())
    return WorkTables.of(pipeline, work.placement, work.microbatches)


# --- Bytes with the messages that wait, of orders that a search tries ------------------------------------------------
#
# They are those of csc.simulation.pipeline, without the simulation.
#
# Terms: see work.py and csc.simulation.pipeline. A *span* is the time for which a rank holds a message, and its bytes.


Ints = npt.NDArray[np.int64]


def excess(
    work: WorkTables,
    orders: Sequence[Sequence[int]],
    room: Sequence[float],
    starts: Sequence[Sequence[float]] | None = None,
) -> list[float] | None:
    """What does not fit."""
    starts = start_times(work, orders) if starts is None else starts
    if starts is None:
        return [math.inf] * work.ranks
    over = [peak - most * (1 + 1e-9) for peak, most in zip(peaks_with_messages(work, orders, starts), room)]
    return [max(0.0, more) for more in over] if max(over) > 0 else None


@dataclass(frozen=True)
class _RankActions:
    """The actions of all ranks in one row, rank after rank: their begin and end, and by how many bytes the rank grows
    at each. place[lane, position]: where in the row; first[rank]: where the rank begins.
    """

    begin: Floats
    end: Floats
    before: Floats
    after: Floats
    place: Ints
    first: Ints


def peaks_with_messages(
    work: WorkTables, orders: Sequence[Sequence[int]], starts: Sequence[Sequence[float]]
) -> list[float]:  # fmt: skip
    """As csc.simulation.pipeline.peaks, without what is there for the whole step."""
    run = _run(work, orders, np.array(starts))
    ranks = np.repeat(np.arange(len(orders)), np.diff([*run.first, len(run.begin)]))
    rows = [(ranks, run.begin, run.before), (ranks, run.end, run.after)]
    for home, begin, end, size in _spans(work, run):
        held = (end > begin) & (size > 0)
        rows += [(home[held], begin[held], size[held]), (home[held], end[held], -size[held])]
    where, when, change = (np.concatenate(column) for column in zip(*rows))
    sorted_ = np.lexsort((change > 0, when, where))  # at one time what ends goes first
    grown, where = np.cumsum(change[sorted_]), where[sorted_]
    edges = np.searchsorted(where, np.arange(len(orders)))
    base = np.concatenate([[0.0], grown])[edges]
    peaks: list[float] = np.maximum(np.maximum.reduceat(grown, edges) - base, 0.0).tolist()
    return peaks


def _run(work: WorkTables, orders: Sequence[Sequence[int]], starts: Floats) -> _RankActions:
    entries = np.concatenate([np.array(order, dtype=np.int64) for order in orders])
    lanes = np.array(work.lane_of)[entries]
    fused = entries != lanes
    # Fused actions are those of two lanes. Every lane has an action for each position, in order.
    twice = np.repeat(np.arange(len(entries)), 1 + fused)
    of_lane = lanes[twice] + np.concatenate([[False], twice[1:] == twice[:-1]])
    by_lane = np.argsort(of_lane, kind="stable")
    place = np.zeros((work.size, work.microbatches), dtype=np.int64)
    place[of_lane[by_lane[:: work.microbatches]]] = twice[by_lane].reshape(-1, work.microbatches)
    position = np.zeros(len(entries), dtype=np.int64)
    for lane in work.lanes:
        position[place[lane]] = np.arange(work.microbatches)
    begin = starts[lanes, position]
    grown = np.array(work.growth)[entries, position]
    moment = np.where(fused, np.array(work.moment)[lanes // 3, position], 0.0)
    forward = lanes % 3 == 0
    return _RankActions(
        begin,
        begin + np.array(work.seconds)[entries, position],
        np.where(forward, grown, moment),
        np.where(forward, 0.0, grown - moment),
        place,
        np.cumsum([0, *(len(order) for order in orders[:-1])]),
    )


def _spans(work: WorkTables, run: _RankActions) -> list[tuple[Ints, Floats, Floats, Floats]]:
    """(rank, from, until, bytes) of the messages of all channels, at both their ends."""
    network, home = work.pipeline.network, work.placement
    channels = sorted(work.pipeline.messages)
    if not channels:
        return []
    size = np.array([[work.pipeline.size(channel, mb) for mb in work.sequence] for channel in channels])
    kinds = np.array(["FBW".index(kind) for kind, *_ in channels])
    source, target = (np.array([channel[i] for channel in channels]) for i in (1, 2))
    a, b = np.array(home)[source], np.array(home)[target]
    sent_at, needed = run.place[3 * source + kinds], run.place[3 * target + kinds]
    links = [network.link(int(index), int(other)) for index, other in zip(a, b)]
    travel = np.array([[link.latency] for link in links]) + size / np.array([[link.bandwidth] for link in links])
    taken = _received(needed, sent_at, [*zip(kinds.tolist(), a.tolist(), b.tolist())])
    ahead = taken - 1
    posted = np.where(ahead >= run.first[b][:, None], run.begin[ahead], 0.0)
    begin, until = run.end[sent_at], run.begin[needed]
    moved = np.maximum(posted, begin) + travel
    if network.answered:
        moved = np.array([_answers(work, run, channel) for channel in channels])
    same = (a == b)[:, None]
    wide = size.shape
    return [
        (np.broadcast_to(b[:, None], wide), np.where(same, begin, posted), until, size),
        (np.broadcast_to(a[:, None], wide), begin, np.where(same, begin, moved), size),
    ]


def _received(needed: Ints, sent_at: Ints, wires: Sequence[tuple[int, int, int]]) -> Ints:
    """[channel, position]: the place of the action ahead of which a message is received: the first that needs it or a
    later one of its wire.
    """
    arrivals = needed.copy()
    rows: dict[tuple[int, int, int], list[int]] = {}
    for row, wire in enumerate(wires):
        rows.setdefault(wire, []).append(row)
    for listed in rows.values():
        sent = np.argsort(sent_at[listed], axis=None, kind="stable")
        earliest = np.minimum.accumulate(needed[listed].ravel()[sent][::-1])[::-1]
        taken = np.empty_like(earliest)
        taken[sent] = earliest
        arrivals[listed] = taken.reshape(len(listed), -1)
    return arrivals


def _answers(work: WorkTables, run: _RankActions, channel: Message) -> Floats:
    """When the sender has the answer to its message of each position."""
    kind, source, target = channel
    if kind == "F" and ("B", target, source) in work.pipeline.messages:
        return run.begin[run.place[3 * source + 1]]
    return np.full(work.microbatches, run.end.max())


# --- Orders that keep to a rank's memory, with the messages that wait ------------------------------------------------
#
# Terms: see work.py and csc.planning.schedules.work. How many bytes of messages wait follows from the times of the
# whole step, so an order is made first and counted then; where it exceeds a rank's room, it is made again with so much
# less on that rank alone.


Orders = list[list[int]]
Made = tuple[Orders, float]
TRIES = 5
FURTHER = 1.2  # times what is too much, as less room changes what waits


class Fitted(NamedTuple):
    """Orders of all ranks, and the seconds of the step."""

    orders: Orders
    seconds: float
    room: list[float] | None


def fitted(
    work: WorkTables,
    make: Callable[[Sequence[float]], Made | None],
    room: Sequence[float],
    below: float = math.inf,
) -> Fitted | None:
    """What `make` gives under the room, or under less of it; None if that does not fit, or takes `below` seconds."""
    left = list(room)
    for _ in range(TRIES):
        made_orders = make(left)
        if made_orders is None or made_orders[1] >= below:
            return None
        over = excess(work, made_orders[0], room)
        if over is None:
            return Fitted(*made_orders, left)
        left = [have - FURTHER * more for have, more in zip(left, over)]
        if any(more and reserve(work, rank).most > left[rank] for rank, more in enumerate(over)):
            return None
    return None
