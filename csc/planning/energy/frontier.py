"""The energy frontier of a planned step: for every step time the clocks of the least joules, beside a proven bound.

Terms: see csc.planning.energy.clock_program. The *usual* step runs every compute at its highest clock, the *fastest* at
the clock of the fewest seconds. *Slack* is by what share a step may be longer than the usual one. A *change* is a clock
that differs from that of the rank's compute before it; steps follow each other, so the first comes after the last.

Every point is run through csc's simulator with the measured seconds of its clocks, and its seconds are what that says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from csc.analysis.clocks import ClockCurve, ClockProfile, Setting, curve_of, of_devices
from csc.errors import InputError
from csc.ir.schedule import Schedule
from csc.planning.energy.clock_program import ClockBlock, ClockOptions, relaxed
from csc.planning.energy.clock_rounding import assigned
from csc.planning.energy.clock_runs import in_runs
from csc.planning.energy.step_graph import Waits, waits
from csc.simulation.pipeline import Pipeline
from csc.simulation.simulate import compute_seconds, makespan

SLACKS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
FASTER = 1e-6  # of the step, by which the fastest step has to be shorter than the usual one to be a point of its own
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
    def free(self) -> list[ClockBlock]:
        """Every compute at a clock of its own."""
        ranks = self.waits.rank_of
        known: dict[tuple[int, float], ClockOptions] = {}
        blocks = []
        for compute, (rank, curve) in enumerate(zip(ranks, self.flat)):
            key = (id(curve), self.watts[rank])
            if key not in known:
                known[key] = ClockOptions.useful([(setting,) for setting in curve.settings], self.watts[rank])
            blocks.append(ClockBlock((compute,), known[key]))
        return blocks

    def point(self, settings: Sequence[Setting], bound: float, promised: float, until: float | None) -> EnergyPoint:
        """Of one setting for each compute, changes not yet charged."""
        by_rank: list[list[Setting]] = [[] for _ in self.curves]
        for rank, setting in zip(self.waits.rank_of, settings):
            by_rank[rank].append(setting)
        clocks = tuple(tuple(setting.clock for setting in listed) for listed in by_rank)
        step = makespan(self.pipeline, self.schedule, seconds=self.seconds_at(clocks))
        until = step if until is None else max(step, until)
        computed = sum(setting.joules for setting in settings)
        busy = [sum(setting.seconds for setting in listed) for listed in by_rank]
        waited = sum(watts * (until - busy_seconds) for watts, busy_seconds in zip(self.watts, busy))
        changes = tuple(sum(changed) for changed in map(changes_of, clocks))
        return EnergyPoint(step, promised, computed + waited, bound, clocks, changes, until)

    def seconds_at(self, clocks: Clocks) -> list[list[float]]:
        """By rank of every compute in its order, with the changes of clock ahead of it."""
        return [
            [
                curve.at(clock).seconds + self.change_seconds * changed
                for curve, clock, changed in zip(curves, listed, changes_of(listed))
            ]
            for curves, listed in zip(self.curves, clocks)
        ]

    @cached_property
    def usual(self) -> EnergyPoint:
        """Every compute at its highest clock."""
        settings = [curve.highest for curve in self.flat]
        return self.point(settings, 0.0, math.inf, None)

    @cached_property
    def fastest(self) -> EnergyPoint:
        """Every compute at the clock of the fewest seconds, changes not charged."""
        settings = [curve.fastest for curve in self.flat]
        return EnergyProblem(self.pipeline, self.schedule, self.curves, self.watts).point(settings, 0.0, math.inf, None)


@dataclass(frozen=True)
class EnergyPoint:
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
class EnergyFrontier:
    """points: the shortest step first, each with fewer joules than those before it. usual, fastest: see the module;
    where a straggler is waited for, the usual step waits for it, too.
    """

    usual: EnergyPoint
    fastest: EnergyPoint
    points: tuple[EnergyPoint, ...]

    def saved(self, point: EnergyPoint) -> float:
        """Joules that a point saves, as a share of the usual step's."""
        return 1 - point.joules / self.usual.joules

    def possible(self, point: EnergyPoint) -> float:
        """The share that no choice of clocks saves in as many seconds, with the order as it is."""
        return 1 - point.bound / self.usual.joules


def changes_of(clocks: Sequence[int]) -> list[bool]:
    """For each compute of a rank whether its clock is another than that of the compute before it."""
    return [clock != clocks[i - 1] for i, clock in enumerate(clocks)]


def point(
    problem: EnergyProblem, seconds: float, changes: int | None = None, until: float | None = None
) -> EnergyPoint:  # fmt: skip
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
) -> EnergyFrontier:  # fmt: skip
    """Points at these slacks, from the fastest step to that of the least joules. changes: as of `point`. straggler: how
    many times the usual step another pipeline takes, for which this one waits.

    InputError for a slack below 0, and a straggler that is faster than the usual step.
    """
    for slack in slacks:
        check_slack(slack)
    if straggler is not None and not 1 <= straggler < math.inf:
        raise InputError(
            f"a straggler takes {straggler:g} times the usual step", "straggler", "it is 1 or more: 1.1 is 10% longer"
        )  # fmt: skip
    usual, fastest = problem.usual.seconds, problem.fastest.seconds
    until = None if straggler is None else straggler * usual
    last = longest(problem, until)
    wanted = {usual * (1 + slack) for slack in slacks} | {last}
    free = (
        changes is None and not problem.change_seconds
    )  # else the fastest clocks may take more changes than there are
    wanted |= {fastest} if free and fastest < usual * (1 - FASTER) else set()
    points: list[EnergyPoint] = []
    for seconds in sorted(target for target in wanted if fastest <= target <= last):
        found_point = point(problem, seconds, changes, until)
        if not points or found_point.joules < points[-1].joules:
            points.append(found_point)
    settings = [curve.highest for curve in problem.flat]
    return EnergyFrontier(problem.point(settings, 0.0, math.inf, until), problem.fastest, tuple(points))


def longest(problem: EnergyProblem, until: float | None = None) -> float:
    """Seconds of the step beyond which no choice of clocks saves more, or of the straggler if that is shorter."""
    slowest = problem.waits.step([max(setting.seconds for setting in curve.settings) for curve in problem.flat])
    most = slowest if until is None else min(slowest, until)
    step = relaxed(problem.waits, problem.free, sum(problem.watts), most, until).step
    return max(step, problem.fastest.seconds)


def check_slack(slack: float) -> None:
    """InputError for one below 0."""
    if not 0 <= slack < math.inf:
        raise InputError(f"the slack is {slack:g}", "slack", "it is a share of the step, 0 or more: 5% or 0.05")


def of_profiles(
    pipeline: Pipeline, schedule: Schedule, profiles: Sequence[ClockProfile], devices: Sequence[int]
) -> EnergyProblem:  # fmt: skip
    """Of a plan whose rank r has so many devices of profile r, all of which do the same."""
    known: dict[tuple[int, bool, float, int], ClockCurve] = {}
    curves = []
    for rank, (actions, seconds) in enumerate(zip(schedule.ranks, compute_seconds(pipeline, schedule))):
        listed = []
        for action, action_seconds in zip((action for action in actions if action.computes), seconds):
            key = (id(profiles[rank]), action.kind == "F", action_seconds, devices[rank])
            if key not in known:
                known[key] = of_devices(curve_of(profiles[rank], action.kind, action_seconds), devices[rank])
            listed.append(known[key])
        curves.append(tuple(listed))
    watts = tuple(count * profile.waiting for count, profile in zip(devices, profiles))
    return EnergyProblem(
        pipeline, schedule, tuple(curves), watts, max(profile.change_seconds for profile in profiles)
    )  # fmt: skip
