"""`csc energy`: what a planned step takes in joules, and the clocks with which it takes less.

Terms: see csc.planning.energy.frontier. The step is the simulated makespan: gradients that are added over data-parallel
ranks and the optimizer's step come behind it and are not in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from csc.analysis.clocks import ClockProfile
from csc.analysis.hardware import Hardware, hardware, names
from csc.driver.compiled import CompiledModel
from csc.errors import CscError, InputError
from csc.passes.pipeline_problem import profiles
from csc.planning.energy.frontier import (
    EnergyFrontier,
    EnergyPoint,
    EnergyProblem,
    changes_of,
    check_slack,
    frontier,
    of_profiles,
    point,
)  # fmt: skip
from csc.planning.plan import tried
from csc.reports.advice import alternatives, as_compiled, now_of, recomputations
from csc.runtime.clocks import clocks_document
from csc.simulation.pipeline import from_json as read_pipeline
from csc.simulation.simulate import simulate

ORDER_SECONDS = 45.0


@dataclass(frozen=True)
class OrderRow:
    """Another schedule or recomputation of the same step. seconds, peak_memory: with the highest clocks. joules, saved:
    at the time of the chosen point, or None: it takes longer than that, or more memory, for the reason `why`.
    """

    name: str
    seconds: float
    peak_memory: float
    joules: float | None = None
    saved: float | None = None
    why: str = ""


@dataclass(frozen=True)
class EnergyReport:
    """frontier: of the plan. chosen: the point at the slack that was asked for. sources: whose measurements the curves
    are, by device. devices: how many each rank has. orders: other schedules at the chosen time, least joules first.
    """

    name: str
    schedule: str
    layout: str
    problem: EnergyProblem
    frontier: EnergyFrontier
    chosen: EnergyPoint
    slack: float
    sources: tuple[str, ...]
    devices: tuple[int, ...]
    orders: tuple[OrderRow, ...] = ()

    @property
    def shortest_hold(self) -> float:
        """Seconds of the shortest run of computes of a rank at one clock, waits between them included."""
        numbers = self.problem
        timeline = simulate(numbers.pipeline, numbers.schedule, seconds=numbers.seconds_at(self.chosen.clocks))
        held = [math.inf]
        for events, clocks in zip(timeline.ranks, self.chosen.clocks):
            starts = [event.start for event, new in zip(events, changes_of(clocks)) if new]
            held += [later - earlier for earlier, later in pairwise(starts)]
        return min(min(held), timeline.makespan)

    @property
    def points(self) -> list[EnergyPoint]:
        """The frontier's points and the chosen one, the shortest step first."""
        points = list(self.frontier.points)
        if all(point is not self.chosen for point in points):
            points.append(self.chosen)
        return sorted(points, key=lambda point: point.seconds)

    def as_dict(self) -> dict[str, Any]:
        usual = self.frontier.usual
        return {
            "schedule": self.schedule,
            "layout": self.layout,
            "sources": list(self.sources),
            "devices": list(self.devices),
            "waiting_watts": list(self.problem.watts),
            "clock_change_seconds": self.problem.change_seconds,
            "usual": {"seconds": usual.seconds, "joules": usual.joules, "watts": usual.watts},
            "fastest_seconds": self.frontier.fastest.seconds,
            "points": [self._row(point) for point in self.frontier.points],
            "chosen": {**self._row(self.chosen), "slack": self.slack},
            "clocks": self.clocks_file()["ranks"],
            "orders": [vars(row) for row in self.orders],
        }

    def _row(self, point: EnergyPoint) -> dict[str, Any]:
        return {
            "seconds": point.seconds,
            "promised": point.promised,
            "over_usual": point.seconds / self.frontier.usual.seconds - 1,
            "joules": point.joules,
            "watts": point.watts,
            "saved": self.frontier.saved(point),
            "bound_joules": point.bound,
            "bound_saved": self.frontier.possible(point),
            "changes": list(point.changes),
            "until": point.until,
        }

    def clocks_file(self) -> dict[str, Any]:
        """The chosen point as JSON: the clock of every F, B, W and BW of every rank."""
        return clocks_document(
            self.name, self.problem.schedule, self.chosen.clocks, self.chosen.seconds, self.chosen.joules, self.sources
        )


def energy(
    compiled: CompiledModel, slack: float | str = 0.0, changes: int | None = None, straggler: float | None = None,
    orders: bool = False,
) -> EnergyReport:  # fmt: skip
    """The energy frontier of a compiled model's step, and the clock of every action at one point of it.

    Args:
        compiled: What `csc.compile` returned; its `hardware` has to carry measured clocks (a100, a40, or a profile that
            `csc profile --clocks` wrote).
        slack: By what share the step may be longer than at the highest clocks: 0.05 or "5%".
        changes: How often a rank may change its clock in a step; None: as often as it likes.
        straggler: How many times the step another pipeline takes, for which this one waits.
        orders: Whether to plan other schedules and recomputations, too, and compare their joules at the same time.

    Returns:
        The frontier, the chosen point and, with `orders`, the others.

    Raises:
        InputError: A profile has no clocks, the slack is below 0, or the straggler faster than the step.
    """
    share = slack_of(slack)
    program, options = compiled.program, compiled.options
    assert program.plan is not None and program.schedule is not None
    used = profiles(program, options)
    clocks = clocks_of(used)
    count = Counter(options.mesh.coordinates(rank).pp for rank in range(options.mesh.size))
    devices = tuple(count[rank] for rank in range(options.mesh.pp))
    problem = of_profiles(read_pipeline(program.plan.pipeline), program.schedule, clocks, devices)
    if changes is not None and changes < 0:
        raise InputError(f"{changes} changes of clock are asked for", "changes", "ask for 0 or more")
    front = frontier(problem, changes=changes, straggler=straggler)
    chosen = chosen_point(problem, front, share, changes, straggler)
    return EnergyReport(
        program.name, program.schedule.name, program.plan.layout, problem, front, chosen, share,
        tuple(dict.fromkeys(f"{profile.name}: {clock.source}" for profile, clock in zip(used, clocks))), devices,
        _orders(compiled, clocks, devices, chosen, front.usual, changes, straggler is not None) if orders else (),
    )  # fmt: skip


def chosen_point(
    problem: EnergyProblem, found: EnergyFrontier, slack: float, changes: int | None, straggler: float | None
) -> EnergyPoint:  # fmt: skip
    """At this slack, or the last point if that is sooner; with a straggler the last point, which waits no longer."""
    last = found.points[-1]
    if straggler is not None:
        return last
    seconds = max(found.usual.seconds * (1 + slack), found.fastest.seconds)
    if seconds >= last.promised:
        return last
    before = [each for each in found.points if each.promised <= seconds * (1 + 1e-9)]
    if before and before[-1].promised >= seconds * (1 - 1e-9):
        return before[-1]
    candidate = point(problem, seconds, changes)
    return candidate if not before or candidate.joules < before[-1].joules else before[-1]


def slack_of(given: float | str) -> float:
    """0.05 of 0.05 or "5%". InputError for anything else."""
    if isinstance(given, str):
        text = given.strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            raise InputError(f"the slack is {given!r}", "slack", "write a share of the step: 5% or 0.05") from None
    else:
        share = float(given)
    check_slack(share)
    return share


def clocks_of(own: Sequence[Hardware]) -> list[ClockProfile]:
    """What each profile knows of clocks. InputError for the first that knows nothing: nothing is guessed."""
    with_clocks = [name for name in names() if hardware(name).clocks is not None]
    clocks = []
    for profile in own:
        if profile.clocks is None:
            raise InputError(
                f"the profile {profile.name} has no measured clocks, what an action takes at each in seconds and watts",
                f"hardware {profile.name}",
                "measure them on such a device (csc profile TARGET --clocks -o mine.toml, then --hardware mine.toml), "
                f"or choose a profile that has them: {', '.join(with_clocks)}",
            )  # fmt: skip
        clocks.append(profile.clocks)
    return clocks


def _orders(
    compiled: CompiledModel, clocks: Sequence[ClockProfile], devices: Sequence[int], chosen: EnergyPoint,
    usual: EnergyPoint, changes: int | None, waited_for: bool,
) -> tuple[OrderRow, ...]:  # fmt: skip
    """Other schedules and recomputations in as much memory and time as the plan may have, beside the plan itself.
    waited_for: a straggler is, in all of them.
    """
    now = now_of(compiled.program, compiled.options)
    variations = [
        as_compiled(compiled, variation) for variation in (*alternatives(now), *recomputations(compiled, now))
    ]
    own_row = OrderRow(
        f"{now.whole.name}, this plan", now.makespan, max(now.peak_memory), chosen.joules,
        1 - chosen.joules / usual.joules,
    )  # fmt: skip
    rows = [own_row]
    for outcome in tried(variations, ORDER_SECONDS, compiled.inspected.progress):
        plan = outcome.plan
        if plan is None:
            continue
        name = outcome.variation.name
        if any(row.name == name and row.seconds == plan.makespan for row in rows):
            continue
        several = -(-len(plan.placement) // len(plan.peak_memory))
        named = f"{name}, {several} on a rank" if several > 1 else name
        peak = max(plan.peak_memory)
        limits = [now.problem.limit_of(kind) for kind in now.problem.kind_of]
        if any(limit is not None and most > limit * (1 + 1e-9) for most, limit in zip(plan.peak_memory, limits)):
            rows.append(OrderRow(named, plan.makespan, peak, why="it takes more memory than a rank has"))
            continue
        other = of_profiles(plan.pipeline, plan.schedule, clocks, devices)
        try:
            found_point = point(other, chosen.promised, changes, chosen.until if waited_for else None)
        except CscError as error:
            rows.append(OrderRow(named, plan.makespan, peak, why=error.what))
            continue
        rows.append(OrderRow(named, plan.makespan, peak, found_point.joules, 1 - found_point.joules / usual.joules))
    return tuple(sorted(rows, key=lambda row: math.inf if row.joules is None else row.joules))
