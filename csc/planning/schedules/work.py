"""The work of a pipeline as lanes: the tables that schedulers run on.

Terms
  lane       the F, the B or the W of one stage, for all microbatches; all lanes run them in the same order
  position   a microbatch's place in that order
  fused      a stage's B and W of one position as one action, BW; it has no lane and moves both lanes on
  feed       a lane whose position k waits for position k of this one, and the message in between
  order      of a rank: one entry per action, its lane, or for a fused one `Work.fused(stage)`; positions follow from
             counting

    Work.of(pipeline, placement, microbatches, sequence)   sequence: the microbatch at each position; default 0, 1, ...
    growth(stages, saved, stashed) -> bytes by entry and position
    positions(work, order) -> (entry, lane, position) of each action of a rank
    actions(work, orders) -> for each rank its F, B, W and BW as Actions
    orders_of(schedule) -> orders                          of one in which all lanes run microbatches 0, 1, 2, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from csc.errors import InputError, ScheduleError
from csc.ir.schedule import PARTS, Action, Kind, Schedule
from csc.simulation.pipeline import Floats, Pipeline, StageWork

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
            for i, there in enumerate((True, stage.has_b, stage.has_w))
            if there
        ]

    @cached_property
    def lanes_of(self) -> list[list[int]]:
        """For each rank its lanes."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for lane in self.lanes:
            found[self.placement[lane // 3]].append(lane)
        return found

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
        found: list[list[Feed]] = [[] for _ in range(3 * len(self.pipeline.stages))]
        nothing = [0.0] * self.microbatches
        for s, stage in enumerate(self.pipeline.stages):
            if stage.has_b:
                found[3 * s].append((3 * s + 1, -1, 0.0, nothing))
            if stage.has_w:
                found[3 * s + (1 if stage.has_b else 0)].append((3 * s + 2, -1, 0.0, nothing))
        slots: dict[tuple[int, int], int] = {}
        for (kind, source, destination), size in sorted(self.pipeline.messages.items()):
            a, b = self.placement[source], self.placement[destination]
            i = "FBW".index(kind)
            if a == b:
                found[3 * source + i].append((3 * destination + i, -1, 0.0, nothing))
                continue
            link = self.pipeline.network.link(a, b)
            loads = self.pipeline.loads
            sizes = [size] * self.microbatches if loads is None else loads.sizes[kind, source, destination]
            wire = [sizes[mb] / link.bandwidth for mb in self.sequence]
            found[3 * source + i].append(
                (3 * destination + i, slots.setdefault((a, b), len(slots)), link.latency, wire)
            )
        both = [[feed for feed in found[3 * s + 1] if feed[0] != 3 * s + 2] for s in range(len(self.placement))]
        return [tuple(row) for row in found + both]

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
    lane_of, found = work.lane_of, []
    done: dict[int, int] = {}
    for entry in order:
        lane = lane_of[entry]
        k = done.get(lane, 0)
        done[lane] = k + 1
        if entry != lane:
            done[lane + 1] = k + 1
        found.append((entry, lane, k))
    return found


def growth(stages: Sequence[StageWork], saved: Floats, stashed: Floats) -> Floats:
    """[entry][position] of [stage][position]: by how many bytes each action makes a rank's activations grow; negative
    if they shrink.

    saved is alive from F's end until B's end, stashed from then until W's end; without a B, saved until W's end.
    """
    has_b, has_w = (np.array([[one] for one in own]) for own in zip(*((stage.has_b, stage.has_w) for stage in stages)))
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
