"""Templates: how replicas of different depths cover every number of ranks that failures may leave.

Terms
  rank         what one failure takes away: a position on the pp axis of one replica, with all of its tp and cp ranks
  template     how a replica of a given number of ranks (its *depth*) runs: stages, schedule, seconds of a step
  least        the fewest ranks that hold one replica in their memory
  arrangement  replicas, the microbatches of each, and ranks to spare, on a given number of ranks
  survives     how many ranks may fail at once so that a copy of every layer is left: one fewer than there are replicas

Depths are those of Oobleck (Jang et al., SOSP 2023, arXiv 2309.08125): from n0, the least, to N - f n0. Its guarantee:
as long as (f + 1) n0 ranks are left, they run as f + 1 replicas or more, so any f of them may fail at once. It follows
from n0 + ... + n0 + d = n for some d of these depths, for each n from (f + 1) n0 to N. Ranks may stay to spare here; so
one rank more never makes a step slower, for any number of replicas that is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from csc.errors import CscError, InputError
from csc.ir.schedule import Schedule
from csc.planning.partition import partition
from csc.planning.problem import Problem, Stages, pipeline
from csc.planning.schedules import SCHEDULES, timed
from csc.simulation.page import bytes_text
from csc.simulation.pipeline import Pipeline

NAMES = (
    "1f1b",
    "zb-h1",
    "eager-1f1b",
    "zb-h2",
)  # schedules of one stage on a rank, of which a template has the fastest
CLOSE = 1e-4  # how near the least step a search comes


# 1. Coverage: numbers alone


def depths(ranks: int, least: int, failures: int, units: int | None = None) -> range:
    """Depths from `least` to ranks - failures * least, none above the number of units.

    InputError if that many ranks have no room for failures + 1 replicas.
    """
    if ranks < (failures + 1) * least:
        replicas = ranks // least
        fewer = f", or ask for {replicas - 1}" if replicas > 1 else ""
        raise InputError(
            f"{ranks} ranks hold {_count(replicas, 'replica')} of {_count(least, 'rank')} or more, of which "
            f"{failures + 1} are needed so that {_count(failures, 'failure')} at once leave one",
            "survive",
            f"Start with {(failures + 1) * least} ranks or more{fewer}",
        )
    most = ranks - failures * least
    return range(least, (most if units is None else min(most, units)) + 1)


def covered(ranks: int, depths: Collection[int], replicas: int = 1) -> tuple[int, ...]:
    """Depths of `replicas` replicas or more that add up to `ranks`; of such the most replicas, as even as can be.

    Args:
        ranks: How many there are.
        depths: Of which there are templates.
        replicas: The fewest that will do.

    Raises:
        InputError: No replicas add up: how many ranks would do.
    """
    sums = _most_replicas(ranks, sorted(depths))
    most = sums[ranks]
    if most < max(1, replicas):
        near = [n for n in range(ranks) if sums[n] >= max(1, replicas)]
        least = min(depths, default=0)
        remedy = f"Leave {ranks - near[-1]} to spare" if near else f"Take {max(1, replicas) * least} ranks or more"
        raise InputError(
            f"{_count(ranks, 'rank')} are no sum of {_count(replicas, 'depth')} or more out of "
            f"{_ranges(depths)}", "survive", remedy,
        )  # fmt: skip
    found = []
    for left in range(most, 0, -1):  # the depth nearest to an even share that leaves a sum of one replica less
        share = ranks / left
        fitting = [d for d in depths if d <= ranks and (sums[ranks - d] >= left - 1 if left > 1 else d == ranks)]
        depth = min(fitting, key=lambda d: (abs(d - share), d))
        found.append(depth)
        ranks -= depth
    return tuple(sorted(found, reverse=True))


def _most_replicas(ranks: int, depths: Sequence[int]) -> list[int]:
    """[n]: the most depths that add up to n; -1 if none do."""
    most = [0] + [-1] * ranks
    for n in range(1, ranks + 1):
        before = [most[n - d] for d in depths if d <= n]
        best = max(before, default=-1)
        most[n] = best + 1 if best >= 0 else -1
    return most


def _ranges(numbers: Iterable[int]) -> str:
    """`2 to 5, 7`."""
    listed = sorted(numbers)
    starts = [n for i, n in enumerate(listed) if not i or listed[i - 1] != n - 1]
    ends = [n for i, n in enumerate(listed) if i + 1 == len(listed) or listed[i + 1] != n + 1]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends)) or "none"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


# 2. Templates: replicas that were planned


@dataclass(frozen=True)
class PipelineTemplate:
    """A replica of `depth` ranks: its stages, stage s on rank s of the replica, and the schedule that it runs."""

    depth: int
    stages: Stages
    pipeline: Pipeline
    schedule_name: str
    memory: float | None

    def seconds(self, microbatches: int) -> float:
        """Of a step of so many microbatches, by the simulator; inf if they do not fit into the memory."""
        known = self._seconds
        if microbatches not in known:
            try:
                known[microbatches] = timed(
                    self.schedule_name, self.pipeline, range(self.depth), microbatches, self.memory
                )
            except InputError:
                known[microbatches] = math.inf
        return known[microbatches]

    @cached_property
    def _seconds(self) -> dict[int, float]:
        return {0: 0.0}

    def most_microbatches(self, seconds: float, limit: int) -> int:
        """How many a step of so many seconds has, `limit` at most."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def schedule(self, microbatches: int) -> Schedule:
        """What its ranks run."""
        return SCHEDULES[self.schedule_name](self.pipeline, range(self.depth), microbatches, self.memory)


def templates(
    problem: Problem, depths: Iterable[int], microbatches: int, names: Sequence[str] = NAMES
) -> dict[int, PipelineTemplate]:  # fmt: skip
    """A template of each depth that the model and the memory allow.

    Args:
        problem: Units, values, memory and network; its ranks and microbatches do not matter, and microbatches count as
            equal.
        depths: To be planned.
        microbatches: Of a replica's step, about: the schedule is the one that is fastest for them.
        names: Of schedules with one stage on a rank.

    Raises:
        InputError: None of the depths fits: what the deepest says.
    """
    found_templates: dict[int, PipelineTemplate] = {}
    refused: CscError | None = None
    for depth in depths:
        try:
            found_templates[depth] = _template(problem, depth, microbatches, names)
        except CscError as error:
            refused = error
    if not found_templates and refused is not None:
        raise refused
    return found_templates


def _template(problem: Problem, depth: int, microbatches: int, names: Sequence[str]) -> PipelineTemplate:
    problem_here = replace(problem, ranks=depth, microbatches=microbatches, scale=None)
    limits = [None, lambda depth: 1.0]  # what 1F1B holds; else one microbatch at a time
    refused: CscError | None = None
    for in_flight in limits if problem_here.memory is not None else limits[:1]:
        try:
            stages = partition(problem_here, in_flight)
        except CscError as error:
            refused = refused or error
            continue
        numbers = pipeline(problem_here, stages, range(depth))
        times: dict[str, float] = {}
        for name in names:
            try:
                times[name] = timed(name, numbers, range(depth), microbatches, problem_here.memory)
            except CscError as error:
                refused = refused or error
        if times:
            name = min(times, key=lambda name: times[name])
            return PipelineTemplate(depth, stages, numbers, name, problem_here.memory)
    assert refused is not None
    raise refused


# 3. Arrangements: replicas on a number of ranks


@dataclass(frozen=True)
class Replica:
    """One replica: how many ranks, and how many microbatches of a step."""

    depth: int
    microbatches: int


@dataclass(frozen=True)
class ReplicaArrangement:
    """What so many ranks run. seconds: of a step, until the last replica has computed its gradients."""

    ranks: int
    replicas: tuple[Replica, ...]
    seconds: float

    @property
    def spare(self) -> int:
        """Ranks that have nothing to do."""
        return self.ranks - sum(replica.depth for replica in self.replicas)

    @property
    def survives(self) -> int:
        """How many ranks may fail at once so that a copy of each layer is left, whichever they are."""
        return len(self.replicas) - 1

    @property
    def microbatches(self) -> int:
        """Of a step, in all replicas."""
        return sum(replica.microbatches for replica in self.replicas)


def arrangements(
    templates: Mapping[int, PipelineTemplate],
    ranks: Iterable[int],
    microbatches: int,
    replicas: int = 1,
    equal: bool = False,
) -> dict[int, ReplicaArrangement]:
    """For each number of ranks that has room for so many replicas the arrangement of least seconds.

    Args:
        templates: By depth.
        ranks: The numbers of ranks.
        microbatches: Of a step in all; every arrangement has as many.
        replicas: The fewest; none has fewer microbatches than one.
        equal: Replicas of one depth and as many microbatches each, as a csc.Mesh has; else of any.

    Returns:
        Numbers of ranks that no arrangement fits are left out. Seconds never rise with the number of ranks: an
        arrangement may leave ranks to spare. They are within CLOSE of the least.
    """
    if microbatches < replicas:
        raise InputError(
            f"a step of {_count(microbatches, 'microbatch')} has nothing to do for some of {replicas} replicas",
            "survive", f"Ask for {replicas} microbatches or more in a step",
        )  # fmt: skip
    least = min(templates, default=0)
    wanted = sorted({n for n in ranks if templates and n >= replicas * least})
    by_ranks: dict[int, ReplicaArrangement] = {}
    before: ReplicaArrangement | None = None
    for n in wanted:
        search = _fastest_equal if equal else _fastest
        arrangement = search(templates, n, microbatches, replicas, before)
        if arrangement is not None:
            by_ranks[n] = before = arrangement
    return by_ranks


def _fastest(
    templates: Mapping[int, PipelineTemplate],
    ranks: int,
    microbatches: int,
    replicas: int,
    before: ReplicaArrangement | None,
) -> ReplicaArrangement | None:
    """before: of fewer ranks, which these can run too."""
    best = None if before is None else replace(before, ranks=ranks)
    if best is None:
        reach = max(s for t in templates.values() for n in (1, microbatches) if (s := t.seconds(n)) < math.inf)
        chosen = _filled(templates, ranks, microbatches, replicas, reach)
        best = None if chosen is None else arranged(templates, ranks, chosen, microbatches)
        if best is None:
            return None
    low = 0.0
    while best.seconds - low > CLOSE * best.seconds:
        middle = (low + best.seconds) / 2
        chosen = _filled(templates, ranks, microbatches, replicas, middle)
        other = None if chosen is None else arranged(templates, ranks, chosen, microbatches)
        if other is None or other.seconds > middle:
            low = middle
        else:
            best = other
    return best


def _fastest_equal(
    templates: Mapping[int, PipelineTemplate], ranks: int, microbatches: int, replicas: int,
    before: ReplicaArrangement | None,
) -> ReplicaArrangement | None:  # fmt: skip
    """Each depth with each number of replicas that divides the microbatches; of equals the one with more replicas."""
    best = None if before is None else replace(before, ranks=ranks)
    for count in range(min(ranks, microbatches), replicas - 1, -1):
        if microbatches % count:
            continue
        for depth, template in sorted(templates.items()):
            seconds = template.seconds(microbatches // count) if depth * count <= ranks else math.inf
            if seconds < (math.inf if best is None else best.seconds * (1 - 1e-9)):
                best = ReplicaArrangement(ranks, (Replica(depth, microbatches // count),) * count, seconds)
    return best


def arranged(
    templates: Mapping[int, PipelineTemplate], ranks: int, depths: Sequence[int], microbatches: int
) -> ReplicaArrangement | None:
    """Replicas of these depths with the microbatches shared out so that the last one is done as early as can be.

    None if some replica has no microbatch, or they do not fit. Where the model of time is exact, so is this: a step of
    so many seconds has room for all microbatches or not.
    """
    if len(depths) > microbatches:
        return None
    used = [templates[depth] for depth in depths]

    def shares(seconds: float) -> list[int] | None:
        most = {t.depth: t.most_microbatches(seconds, microbatches) for t in used}
        counts = [most[t.depth] for t in used]
        return counts if sum(counts) >= microbatches and min(counts) >= 1 else None

    share = -(-microbatches // len(used))
    high = max(t.seconds(share) for t in used)
    if math.isinf(high):
        return None
    low, counts = 0.0, shares(high)
    assert counts is not None
    while high - low > CLOSE / 4 * high:
        middle = (low + high) / 2
        fewer = shares(middle)
        if fewer is None:
            low = middle
        else:
            counts = fewer
            high = max(t.seconds(count) for t, count in zip(used, counts))
    while sum(counts) > microbatches:  # from the one that is done last
        last = max((i for i, n in enumerate(counts) if n > 1), key=lambda i: (used[i].seconds(counts[i]), i))
        counts[last] -= 1
    replicas_here = tuple(Replica(t.depth, count) for t, count in zip(used, counts))
    return ReplicaArrangement(ranks, replicas_here, max(t.seconds(count) for t, count in zip(used, counts)))


def _filled(
    templates: Mapping[int, PipelineTemplate], ranks: int, microbatches: int, replicas: int, seconds: float
) -> list[int] | None:
    """Depths that add up to `ranks` at most, so many replicas or more, which do the most microbatches in a step of
    these seconds; None if they do not do all. A knapsack of ranks, which counts replicas up to those that are needed.
    """
    done = {depth: t.most_microbatches(seconds, microbatches) for depth, t in templates.items()}
    useful = [(depth, count) for depth, count in sorted(done.items()) if count]
    if not useful:
        return None
    never = -1
    best = [[0] + [never] * replicas] + [[never] * (replicas + 1) for _ in range(ranks)]
    taken = [[0] * (replicas + 1) for _ in range(ranks + 1)]
    for n in range(1, ranks + 1):
        row, choice = best[n], taken[n]
        for k in range(replicas + 1):
            row[k], choice[k] = best[n - 1][k], 0  # a rank to spare
        for depth, count in useful:
            if depth > n:
                break
            before = best[n - depth]
            for k in range(replicas + 1):
                if before[k] < 0:
                    continue
                more, to = before[k] + count, min(k + 1, replicas)
                if more > row[to]:
                    row[to], choice[to] = more, depth * (replicas + 1) + k + 1
    if best[ranks][replicas] < microbatches:
        return None
    chosen, n, k = [], ranks, replicas
    while n:
        if not taken[n][k]:
            n -= 1
            continue
        depth, k = divmod(taken[n][k] - 1, replicas + 1)
        chosen.append(depth)
        n -= depth
    while len(chosen) > max(microbatches, replicas):
        chosen.remove(min(chosen))
    return chosen


# 4. All that failures may leave


@dataclass(frozen=True)
class SurvivalPlan:
    """For a job on `ranks` ranks that may lose `failures` of them: what every number that may be left runs.

    arrangements: by number of ranks, from ranks - failures to ranks. Each has as many replicas as its number of ranks
    has room for, failures + 1 at most.
    """

    ranks: int
    failures: int
    least: int
    templates: Mapping[int, PipelineTemplate]
    arrangements: Mapping[int, ReplicaArrangement]


def survival(
    problem: Problem,
    ranks: int,
    microbatches: int,
    failures: int,
    names: Sequence[str] = NAMES,
    equal: bool = False,
) -> SurvivalPlan:
    """Plan every number of ranks from `ranks` down to ranks - failures.

    Args:
        problem: Units, values, memory of a rank and network; as in `templates`.
        ranks: Of the job; with tp or cp, the groups of ranks that share a position.
        microbatches: Of a step in all replicas; a step keeps them whatever is lost.
        failures: How many ranks may fail, at once or one after the other.
        names: Of schedules that templates may have.
        equal: As of `arrangements`. A number of replicas that does not divide the microbatches is then none.

    Raises:
        InputError: What cannot be covered, and what would cover it.
    """
    if failures < 1:
        raise InputError(f"a job cannot survive {failures} failures", "survive", "Ask for 1 or more")
    units = len(problem.units)
    share = max(1, microbatches // (failures + 1))
    every = templates(problem, range(1, min(ranks, units) + 1), share, names)
    least = min(every)
    if ranks < (failures + 1) * least:
        raise _uncovered(problem, ranks, failures, least, share, names)
    wanted = depths(ranks, least, failures, units)
    kept = {depth: template for depth, template in every.items() if depth in wanted}
    by_ranks: dict[int, ReplicaArrangement] = {}
    for replicas in range(1, failures + 2):
        numbers = [n for n in range(ranks - failures, ranks + 1) if min(failures + 1, n // least) == replicas]
        by_ranks |= arrangements(kept, numbers, microbatches, replicas, equal)
    missing = [n for n in range(ranks - failures, ranks + 1) if n not in by_ranks]
    if missing:
        replicas = min(failures + 1, missing[0] // least)
        raise InputError(
            f"{_count(missing[0], 'rank')} would have no {replicas} equal replicas or more that share "
            f"{microbatches} microbatches out evenly",
            "survive", f"Ask for a step of a multiple of {failures + 1} microbatches, or for replicas that differ",
        )  # fmt: skip
    return SurvivalPlan(ranks, failures, least, kept, by_ranks)


def _uncovered(
    problem: Problem, ranks: int, failures: int, least: int, share: int, names: Sequence[str]
) -> InputError:  # fmt: skip
    """What N ranks lack to hold failures + 1 replicas of `least` ranks."""
    replicas = ranks // least
    remedies = [f"start with {(failures + 1) * least} ranks"]
    room = ranks // (failures + 1)
    if room and problem.memory is not None:
        unlimited = replace(problem, memory=None)
        need = _least_memory(unlimited, room, share, names)
        if need is not None:
            remedies.append(f"allow {bytes_text(need)} of memory so that {_count(room, 'rank')} hold a replica")
    if replicas > 1:
        remedies.append(f"ask for {replicas - 1}")
    text = "; or ".join(remedies)
    why = "" if problem.memory is None else f" ({bytes_text(problem.memory)} each)"
    return InputError(
        f"{ranks} ranks{why} hold {_count(replicas, 'replica')}, as one takes {_count(least, 'rank')}: "
        f"{_count(failures, 'failure')} at once may leave no copy of some layer; {failures + 1} replicas are needed",
        "survive",
        text[0].upper() + text[1:],
    )


def _least_memory(problem: Problem, depth: int, microbatches: int, names: Sequence[str]) -> float | None:
    """Bytes of a rank with which a replica fits on `depth` ranks, within a part in 100."""
    if depth > len(problem.units):
        return None
    low, high = 0.0, sum(unit.state + (microbatches + 1) * (unit.saved + unit.stashed) + unit.working
                         for unit in problem.units)  # fmt: skip
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        try:
            _template(replace(problem, memory=middle), depth, microbatches, names)
            high = middle
        except CscError:
            low = middle
    return high
