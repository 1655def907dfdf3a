"""The energy frontier of a planned step: for every step time the clocks of the least joules, beside a proven bound.

Terms: see csc.planning.energy.program. The *usual* step runs every compute at its highest clock, the *fastest* at the
clock of the fewest seconds. *Slack* is by what share a step may be longer than the fastest. A *change* is a clock that
differs from that of the rank's compute before it; steps follow each other, so the first compute comes after the last.

    EnergyProblem(pipeline, schedule, curves, watts, change_seconds)
    point(problem, seconds, changes, until) -> Point of the least joules found among steps of at most so many seconds
    frontier(problem, slacks, changes, straggler) -> Frontier

Every point is run through csc's simulator with the measured seconds of its clocks, and its seconds are what that says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from csc.analysis.clocks import ClockCurve, Setting
from csc.errors import InputError
from csc.ir.schedule import Schedule
from csc.planning.energy.program import Block, Options, relaxed
from csc.planning.energy.rounding import assigned
from csc.planning.energy.runs import in_runs
from csc.planning.energy.waits import Waits, waits
from csc.simulation.pipeline import Pipeline
from csc.simulation.simulate import makespan

SLACKS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
MARGIN = 1e-9  # of the step, by which plans are shorter than promised, for sums of floats

Clocks = tuple[tuple[int, ...], ...]  # MHz by rank, of every compute in its order


@dataclass(frozen=True)
class EnergyProblem:
    """A planned step with what its computes take at each clock. curves: by rank, of every compute in its order. watts:
    what each rank draws while it waits; all devices of a rank together, as in the curves. change_seconds: that a rank
    loses when its clock changes.
    """

    pipeline: Pipeline
    schedule: Schedule
    curves: tuple[tuple[ClockCurve, ...], ...]
    watts: tuple[float, ...]
    change_seconds: float = 0.0

    def __post_init__(self) -> None:
        computes = [sum(action.computes for action in actions) for actions in self.schedule.ranks]
        if computes != [len(listed) for listed in self.curves]:
            raise InputError(
                f"there are {[len(listed) for listed in self.curves]} curves by rank for {computes} computes",
                f"schedule {self.schedule.name}", "give every F, B, W and BW a curve",
            )  # fmt: skip
        for rank, (watts, listed) in enumerate(zip(self.watts, self.curves)):
            least = min(
                (setting.watts for curve in listed for setting in curve.settings if setting.seconds), default=watts
            )
            if not 0 <= watts <= least:
                raise InputError(
                    f"a waiting device of rank {rank} draws {watts:.1f} W, a computing one {least:.1f} W",
                    listed[0].where if listed else "energy",
                    "waiting watts are at least 0, and no more than those of any clock",
                )  # fmt: skip

    @cached_property
    def waits(self) -> Waits:
        """The graph of the step. ScheduleError for a schedule that the simulator refuses."""
        fastest = [[curve.fastest.seconds for curve in listed] for listed in self.curves]
        makespan(self.pipeline, self.schedule, seconds=fastest)
        return waits(self.pipeline, self.schedule, fastest)

    @cached_property
    def flat(self) -> list[ClockCurve]:
        """The curves in the order of the graph's computes."""
        return [curve for listed in self.curves for curve in listed]

    @cached_property
    def free(self) -> list[Block]:
        """Every compute at a clock of its own."""
        ranks = self.waits.rank_of
        known: dict[tuple[int, float], Options] = {}
        found = []
        for compute, (rank, curve) in enumerate(zip(ranks, self.flat)):
            key = (id(curve), self.watts[rank])
            if key not in known:
                known[key] = Options.useful([(setting,) for setting in curve.settings], self.watts[rank])
            found.append(Block((compute,), known[key]))
        return found

    def point(self, settings: Sequence[Setting], bound: float, promised: float, until: float | None) -> Point:
        """Of one setting for each compute, changes not yet charged."""
        by_rank: list[list[Setting]] = [[] for _ in self.curves]
        for rank, setting in zip(self.waits.rank_of, settings):
            by_rank[rank].append(setting)
        clocks = tuple(tuple(setting.clock for setting in listed) for listed in by_rank)
        changed = [[clock != listed[i - 1] for i, clock in enumerate(listed)] for listed in clocks]
        seconds = [
            [setting.seconds + self.change_seconds * change for setting, change in zip(listed, changes)]
            for listed, changes in zip(by_rank, changed)
        ]
        step = makespan(self.pipeline, self.schedule, seconds=seconds)
        until = step if until is None else max(step, until)
        computed = sum(setting.joules for setting in settings)
        busy = [sum(setting.seconds for setting in listed) for listed in by_rank]
        waited = sum(watts * (until - own) for watts, own in zip(self.watts, busy))
        return Point(step, promised, computed + waited, bound, clocks, tuple(map(sum, changed)), until)

    @cached_property
    def usual(self) -> Point:
        """Every compute at its highest clock."""
        settings = [curve.highest for curve in self.flat]
        return self.point(settings, 0.0, float("inf"), None)

    @cached_property
    def fastest(self) -> Point:
        """Every compute at the clock of the fewest seconds, changes not charged."""
        settings = [curve.fastest for curve in self.flat]
        return EnergyProblem(self.pipeline, self.schedule, self.curves, self.watts).point(
            settings, 0.0, float("inf"), None
        )


@dataclass(frozen=True)
class Point:
    """One choice of clocks. seconds: of the step, as simulated. promised: what it may take at most. joules: of all
    devices in `until` seconds, those in which they wait included; until: the step, or that of a straggler they wait
    for. bound: joules below which no choice of clocks of this order comes in as many seconds as are promised. clocks:
    see Clocks. changes: of clock, by rank, in a step.
    """

    seconds: float
    promised: float
    joules: float
    bound: float
    clocks: Clocks
    changes: tuple[int, ...]
    until: float

    @property
    def watts(self) -> float:
        """On average, of all devices together."""
        return self.joules / self.until


@dataclass(frozen=True)
class Frontier:
    """points: the shortest step first, each with fewer joules than those before it. usual, fastest: see the module."""

    usual: Point
    fastest: Point
    points: tuple[Point, ...]

    def saved(self, point: Point) -> float:
        """Joules that a point saves, as a share of the usual step's."""
        return 1 - point.joules / self.usual.joules


def point(
    problem: EnergyProblem, seconds: float, changes: int | None = None, until: float | None = None
) -> Point:  # fmt: skip
    """The least joules found in a step of at most so many seconds. changes: clocks that a rank may change in a step;
    None: any number. until: seconds that the ranks wait for in any case.

    InputError if no choice of clocks makes the step that short.
    """
    shortest = problem.fastest.seconds
    if not seconds >= shortest * (1 - MARGIN):
        raise InputError(
            f"no choice of measured clocks makes the step shorter than {shortest:.6g} s, and {seconds:.6g} s was asked "
            "for", f"schedule {problem.schedule.name}", "allow more time, or choose another plan",
        )  # fmt: skip
    limit = max(seconds, shortest)
    graph, watts = problem.waits, sum(problem.watts)
    answer = relaxed(graph, problem.free, watts, limit, until)
    blocks = problem.free
    if changes is not None or problem.change_seconds:
        settings = in_runs(graph, problem.flat, problem.watts, answer, limit, problem.change_seconds, changes, until)
    else:
        picks = assigned(graph, blocks, answer)
        settings = [block.choices[pick][0] for block, pick in zip(blocks, picks)]
    return problem.point(settings, answer.bound, limit, until)


def frontier(
    problem: EnergyProblem, slacks: Sequence[float] = SLACKS, changes: int | None = None, straggler: float | None = None
) -> Frontier:  # fmt: skip
    """Points at these slacks, up to the step of the least joules, which is the last one. straggler: how many times the
    fastest step another pipeline takes, for which this one waits.

    InputError for a slack below 0, and a straggler that is faster than the fastest step.
    """
    for slack in slacks:
        if not slack >= 0:
            raise InputError(f"the slack is {slack:g}", "slack", "it is a share of the fastest step, 0 or more")
    if straggler is not None and not straggler >= 1:
        raise InputError(
            f"a straggler takes {straggler:g} times the fastest step", "straggler", "it is 1 or more: 1.1 is 10% longer"
        )  # fmt: skip
    fastest = problem.fastest.seconds
    until = None if straggler is None else straggler * fastest
    slowest = problem.waits.step([max(each.seconds for each in curve.settings) for curve in problem.flat])
    longest = slowest if until is None else min(slowest, until)
    last = relaxed(problem.waits, problem.free, sum(problem.watts), longest, until).step
    wanted = sorted({fastest * (1 + slack) for slack in slacks if fastest * (1 + slack) < last} | {max(last, fastest)})
    points: list[Point] = []
    for seconds in wanted:
        found = point(problem, seconds, changes, until)
        if not points or found.joules < points[-1].joules:
            points.append(found)
    return Frontier(problem.usual, problem.fastest, tuple(points))
