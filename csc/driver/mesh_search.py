"""The search for the mesh that trains a step's samples fastest: which layouts are planned, and in which order."""

from __future__ import annotations

import heapq
import logging
import math
import multiprocessing
import signal
import sys
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from csc import cores, devices
from csc.driver.mesh_candidates import (
    GAIN,
    NEAR,
    ROOM,
    BestOfWorkers,
    DividedModel,
    DividedProblems,
    FixedChoices,
    FoundMeshes,
    MeshCandidate,
    MeshChoice,
    MeshRow,
    MeshTraces,
    OwnStages,
    Part,
    UntracedDivisions,
    encoders,
    fitting_first,
    forms_of,
    own_stages,
)
from csc.driver.search_clock import DRAFT, PLAN, TRACE, Kind, SearchClock
from csc.errors import CscError, InputError
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program
from csc.ir.schedule import Schedule
from csc.passes.pipeline_problem import chosen_hardware, problem, profiles
from csc.passes.recompute import NONE
from csc.passes.step_end import least_behind, seconds_behind
from csc.planning.gathers import with_gathers
from csc.planning.meshes import (
    MeshDivision,
    MeshForm,
    MeshLayout,
    expected_seconds,
    layouts,
    least_memory,
    least_seconds,
)
from csc.planning.partition import own_stages as staged
from csc.planning.plan import PipelinePlan, draft, plan
from csc.planning.problem import Problem, Stages, pipeline
from csc.simulation.simulate import makespan

# --- The same plan under other orders of the ranks: what stands within a node, and what that makes of a step ---------
#
# Terms: see csc.ir.mesh. An order changes which wires messages of the pipeline, collectives of layers and sums of
# gradients take, not what a rank computes.


@dataclass(frozen=True)
class Ordered:
    """seconds: of a step of the plan that was given, in this order."""

    mesh: Mesh
    options: Options
    problem: Problem
    seconds: float


def priced_orders(
    program: Program, options: Options, numbers: Problem, stages: Stages, placement: Sequence[int], schedule: Schedule
) -> list[Ordered]:  # fmt: skip
    """The own one alone where all ranks stand in one node, or are of several kinds, whose places the plan decides.
    numbers: of the options' own order; their microbatches and memory are kept.
    """
    several = not numbers.kinds and options.mesh.size > profiles(program, options)[0].ranks_per_node
    orders = []
    for mesh in options.mesh.orders() if several else [options.mesh]:
        other = replace(options, mesh=mesh)
        same = replace(problem(program, other), microbatches=numbers.microbatches, memory=numbers.memory)
        own_pipeline = pipeline(same, stages, placement)
        run = makespan(own_pipeline, with_gathers(own_pipeline, schedule, same.limits))
        orders.append(Ordered(mesh, other, same, run + seconds_behind(program, other, stages, placement)))
    return orders


# --- Parts of a search side by side, in processes that are forked from it and so know all that it knows --------------
#
# A model is not sent anywhere and captured once: what was traced before the fork is there. A worker computes on one
# thread, as one that a DataLoader forks does, and says nothing. Where this process holds a GPU, or was forked as a
# daemon itself, there is one worker.


log = logging.getLogger("csc")

MOST = 4  # workers: a search has few divisions worth tracing

T = TypeVar("T")


def workers_here() -> int:
    """As many as this process may keep cores busy."""
    if sys.platform != "linux" or devices.current() is not None or multiprocessing.current_process().daemon:
        return 1
    return min(MOST, cores.here())


def side_by_side(count: int, run: Callable[[int], T], patience: Callable[[], float]) -> list[T | None]:
    """run(0) here, run(1) to run(count - 1) in processes of their own, whose results can be pickled. patience: seconds
    that the others have when run(0) is done.
    """
    if count == 1:  # also where there is no fork
        return [run(0)]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(1, count)]
    processes = [
        context.Process(target=_work, args=(sending, run, number), daemon=True)
        for number, (_, sending) in enumerate(pipes, 1)
    ]
    for process, (_, sending) in zip(processes, pipes):
        with suppress(OSError):  # there is no memory for another, or there may be no more
            process.start()
        sending.close()
    try:
        return [run(0), *(_answer(here, patience) for here, _ in pipes)]
    finally:
        for process, (here, _) in zip(processes, pipes):
            here.close()
            if process.pid is not None:
                process.kill()
                process.join()


def _work(connection: Connection, run: Callable[[int], T], number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted search ends without a traceback of each worker
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the threads of the process that was forked are not there
    with suppress(Exception):  # whatever it is, the search can do without this worker
        connection.send(run(number))
    connection.close()


def _answer(here: Connection, patience: Callable[[], float]) -> T | None:
    try:
        answer: T | None = here.recv() if here.poll(max(0.0, patience())) else None
    except (EOFError, OSError):  # it failed, or was killed
        answer = None
    if answer is None:
        log.info("a worker of the search found nothing: its part is searched here")
    return answer


# --- The drafts and plans of a search for a mesh, each in the order of ranks in which it is the fastest --------------
#
# Terms: see csc.driver.mesh_search.


EFFORT = 0.2  # of the search for each plan, which is as good as a draft from there on
LIMIT = 20.0  # seconds of the clock for each, more than it takes: a busy machine chooses as an idle one does
LAST = 10.0  # for each that begins late

ALIKE = 1.03  # times as fast: a plan may make more of either draft

Make = Callable[[Problem], PipelinePlan | None]


class MeshPlans:
    """Drafts and plans the candidates of one search. The clock measures what each takes."""

    def __init__(self, problems: DividedProblems, found: FoundMeshes, clock: SearchClock) -> None:
        self._problems, self._found, self._clock = problems, found, clock

    def draft(self, one: MeshCandidate) -> tuple[MeshRow, MeshCandidate] | None:
        """Returns the drafted row and the candidate in its fastest order of ranks; None where nothing of it fits."""
        return self._ordered(one, self._drafted, DRAFT)

    def plan(self, one: MeshCandidate) -> MeshRow | None:
        """Returns the planned row of a candidate; None where nothing of it fits."""
        ordered = self._ordered(one, self._planned, PLAN)
        return None if ordered is None else ordered[0]

    def on_own_stages(self, one: MeshCandidate, own: OwnStages) -> MeshRow | None:
        """Returns the planned row of a candidate with encoders on stages of their own; None where there is no such
        plan.
        """
        assert one.problem is not None
        mesh = Mesh.parse(self._found.rows[one].mesh).with_own(pp=dict(own))
        options = replace(one.options, mesh=mesh)
        program = self._problems.program(one.layout, options)
        numbers = replace(problem(program, options), memory=one.problem.memory)
        with self._clock.of(PLAN), suppress(CscError):
            stages = staged(numbers, own)
            return self._row(one, options, plan(numbers, "auto", stages=stages, effort=EFFORT, limit=LIMIT))
        return None

    def without_room(self, one: MeshCandidate, numbers: Problem) -> MeshRow:
        """Returns the row of a 1f1b plan as if there were no limit of memory; the row says that it does not fit."""
        planned = plan(replace(numbers, memory=None), "1f1b", effort=EFFORT, limit=LIMIT)
        return replace(self._row(one, one.options, planned), fits=False)

    def _planned(self, numbers: Problem) -> PipelinePlan | None:
        """A plan that keeps to the limit; None if none was found."""
        limit = min(LIMIT, max(LAST, self._clock.left))
        with self._clock.of(PLAN), suppress(CscError):
            return plan(numbers, "auto", effort=EFFORT, limit=limit)
        return None

    def _drafted(self, numbers: Problem) -> PipelinePlan | None:
        """On one rank there is one plan."""
        if numbers.ranks == 1:
            return self._planned(numbers)
        with self._clock.of(DRAFT), suppress(CscError):
            return draft(numbers, LIMIT)
        return None

    def _ordered(self, candidate: MeshCandidate, make: Make, kind: str) -> tuple[MeshRow, MeshCandidate] | None:
        """In the order of ranks in which this plan is the fastest; made for it if that may make it the best: with
        ZeRO-3 a plan for gathers between nodes says less of one for gathers within them.
        """
        numbers = candidate.problem
        assert numbers is not None
        planned = make(numbers)
        if planned is None:
            return None
        best, best_candidate = self._row(candidate, candidate.options, planned), candidate
        program = self._problems.program(candidate.layout, candidate.options)
        orders = priced_orders(
            program, candidate.options, numbers, planned.stages, planned.placement, planned.schedule
        )  # fmt: skip
        room = (NEAR if candidate.options.zero == 3 else ROOM) * self._found.best
        for other in sorted(orders[1:], key=lambda order: order.seconds):
            gains = other.seconds < min(best.seconds, room) * (1 - GAIN)
            again = make(other.problem) if gains and self._clock.ends(kind) else None
            if again is not None:
                row = self._row(candidate, other.options, again)
                if fitting_first(row) < fitting_first(best):
                    best, best_candidate = row, replace(candidate, options=other.options, problem=other.problem)
        return best, best_candidate

    def _row(self, candidate: MeshCandidate, options: Options, planned: PipelinePlan) -> MeshRow:
        program = self._problems.program(candidate.layout, candidate.options)
        return MeshRow(
            mesh=str(options.mesh),
            microbatches=candidate.layout.microbatches,
            samples=candidate.layout.samples,
            zero=options.zero,
            recompute=candidate.choice,
            seconds=planned.makespan + seconds_behind(program, options, planned.stages, planned.placement),
            idle=sum(planned.bubble) / len(planned.bubble),
            peak_memory=max(planned.peak_memory),
            fits=True,
            sequence_parallel=candidate.layout.sequence,
            context=candidate.layout.context,
        )


def in_turn(drafted: Sequence[MeshCandidate], unfit: Collection[MeshCandidate]) -> list[MeshCandidate]:
    """The fastest first, of those about as fast the smaller step, which is planned sooner; then those of which no draft
    fits, where a plan may. Seconds of a draft are what is expected of its candidate.
    """
    fastest = min((candidate.expected for candidate in drafted if candidate not in unfit), default=0.0)

    def turn(candidate: MeshCandidate) -> tuple[bool, int, float]:
        if candidate in unfit:
            return True, 0, candidate.expected
        return (
            False,
            int(math.log(candidate.expected / fastest, ALIKE)),
            candidate.layout.mesh.pp * candidate.layout.microbatches,
        )

    return sorted(drafted, key=turn)


# --- The search for the mesh that trains a step's samples fastest: which layouts are planned, and in which order -----
#
# Terms
#   layout, form, division    see csc.planning.meshes
#   way        what makes a layout take less memory: ZeRO-1 (which costs nothing where ranks hold the same parameters),
#              recomputation, ZeRO-3. The fastest that fits counts: where memory lets few microbatches wait, to compute
#              again may be faster
#   candidate  a layout with a way
#   draft      of a plan: what even cuts come to, in a part of the time (csc.planning.plan)
#   price      the simulated makespan of a plan, and behind it gradients summed and the optimizer's step
#   order      how ranks count through the axes, which says what stands within a node (csc.ir.mesh)
#
# Tracing and planning take the time. So every division is traced once, those near one sample on whole layers first,
# and of its forms the first that csc can divide so; of every candidate it is then told in milliseconds what no plan of
# it beats, and what to expect of one (csc.planning.meshes). Candidates are drafted in the order of the latter, but for
# those that the former shows to be slower than the best so far, or to exceed the memory, and those expected to be far
# behind. When a part of the time is over, or all are drafted, come other forms of the layouts that are near the best.
# Then those that came near it are planned, the fastest draft first, and what is left of the time goes into the rest:
# last into tokens that are not shared out where tp is, which seldom gains, and into something to compare the best
# with. Where several nodes are filled, a plan is priced in every order of its ranks, and made again for one that makes
# it the best.
#
# Several workers divide the divisions among themselves once the first few are traced,
# which tell of the others, and from each other hear what the best takes.


SEARCHING = 0.75  # of the time, at least, whatever the capture takes
TRACING = 0.5  # of the time, at most, before the first draft
FIRST_FORMS = 0.6  # of the time, at most, before other forms of what is near the best
FIRST_PLANS = 0.75  # of the time, at most, before the first plan, those forms among it
LATE = 2.0  # times the seconds that a search may take as long as nothing fits
ALONE = 3  # divisions that are traced before several workers divide the others
GRACE = 10.0  # seconds of the clock that other workers have when the time is over, for what they are at
FAR = 2.0  # times the best: what is expected to take longer is not drafted
PLANNED = 1.25  # times the best: of what drafts come to, what is planned
MESHES = 5  # that are priced at least, though they may be slower than the best


class MeshSearch:
    """Of a model for `step` samples on so many devices, in about so many seconds of the clock, its capture among them.
    tell: is called with each layout. workers: processes, this one among them.
    """

    def __init__(
        self, model: DividedModel, devices: int, step: int, seconds: float, tell: Callable[[str], None],
        fixed: FixedChoices, clock: Callable[[], float] = time.monotonic, workers: int = 1,
    ) -> None:  # fmt: skip
        self.model, self.devices, self.step, self.tell, self.fixed = model, devices, step, tell, fixed
        self.problems = DividedProblems(model)
        self.found = FoundMeshes()
        self.drafted: list[MeshCandidate] = []
        self.behind: list[MeshCandidate] = []  # the best, which were not drafted
        self.workers = workers
        self.found.heard = BestOfWorkers() if workers > 1 else None
        begun, first = clock(), self.problems.first()  # which captures the model
        seconds = max(seconds - (clock() - begun), SEARCHING * seconds)
        hardware = chosen_hardware(first, model.options)
        self.asked = [
            layout for layout in layouts(devices, step, model.sizes, hardware.ranks_per_node, len(first.regions))
            if fixed.allow(layout)
        ]  # fmt: skip
        if not self.asked:
            microbatches, failures = fixed.microbatches, fixed.failures
            many, other = (
                "" if microbatches is None else f" with microbatches={microbatches}",
                ", or leave microbatches out",
            )
            many += f" over the {failures + 1} replicas that survive={failures} needs" if failures else ""
            other = other if microbatches is not None else ", or leave survive out"
            raise InputError(
                f"{step} samples of a step cannot be divided among {devices} devices alike{many}", "samples",
                f"give a multiple of {devices}, or fewer devices{other if many else ''}",
            )  # fmt: skip
        self.encoders, self.memory = encoders(first), self.problems.whole(first).memory
        self.clock = SearchClock(seconds, clock)
        self.plans = MeshPlans(self.problems, self.found, self.clock)
        self.traces = MeshTraces(self.problems, self.found, self.clock, self.encoders, fixed, tell)

    def choice(self) -> MeshChoice:
        """InputError where the model can be divided for no mesh."""
        untraced = UntracedDivisions(self.problems, self.asked)
        first: list[MeshCandidate] = []
        for _ in range(ALONE) if self.workers > 1 else ():
            if division := untraced.next():
                first += self._traced(untraced, *division)
        parts = untraced.parts(first, self.workers)
        answers = side_by_side(len(parts), partial(self._part, parts), self._patience)
        for part, answer in zip(parts, answers):
            self.found.merge(self._searched(*part) if answer is None else answer)
        meshes = self.found
        if not meshes.rows:
            self._without_room()
        if not meshes.rows:
            raise InputError(
                f"no mesh of {self.devices} devices was found", "mesh",
                "; ".join(dict.fromkeys(meshes.refused.values())) or "allow more memory",
            )  # fmt: skip
        self._give_stages()
        return meshes.answer(self.devices, self.step, self.memory, self.traces.told(self.asked))

    def _part(self, parts: Sequence[Part], number: int) -> FoundMeshes:
        """What a worker finds."""
        if number:
            self.tell, self.clock = _nothing, self.clock.of_fork()
            self.plans = MeshPlans(self.problems, self.found, self.clock)
            self.traces.of_worker(self.clock, self.tell)
        return self._searched(*parts[number]).told()

    def _searched(self, waiting: list[MeshCandidate], untraced: UntracedDivisions) -> FoundMeshes:
        for until in (FIRST_FORMS, FIRST_PLANS):
            self._draft(waiting, untraced, until)
            self._look_at_other_forms(self._of_encoders)
        self._plan()
        self._draft(waiting, untraced)
        self._plan()
        self._look_at_other_forms(self._of_tokens)
        self._plan()
        self._compare()
        return self.found

    def _patience(self) -> float:
        """Of the first worker that is done, with the others."""
        longer = 1.0 if self.found.best < math.inf else LATE
        return self.clock.left + (longer - 1) * self.clock.seconds + GRACE

    def _draft(
        self, waiting: list[MeshCandidate], untraced: UntracedDivisions | None = None, until: float = math.inf
    ) -> None:
        """Those that may be faster than the best, and divisions as soon as nothing traced is expected to be faster;
        what there is no time for is left. until: a part of the time, after which all stay where they are if something
        fits.
        """
        meshes = self.found
        heapq.heapify(waiting)
        while not (meshes.hear() < math.inf and self.clock.over(until)):
            division = untraced.next() if untraced is not None else None
            if untraced is not None and division and self._is_next(division[0], waiting):
                for candidate in self._traced(untraced, *division):
                    heapq.heappush(waiting, candidate)
                continue
            if not waiting:
                return
            one = heapq.heappop(waiting)
            if one.seconds >= meshes.best:
                self._leave(one, meshes.slow)
            elif self._late(DRAFT):
                meshes.left[one.layout] = min(one.seconds, meshes.left.get(one.layout, math.inf))
            elif one.expected > FAR * meshes.best:
                self._leave(one, meshes.far)
            else:
                for again in self._look_at(one):
                    heapq.heappush(waiting, again)

    def _leave(self, candidate: MeshCandidate, among: set[MeshLayout]) -> None:
        among.add(candidate.layout)
        self.behind.append(candidate)

    def _compare(self) -> None:
        """Draft what is behind, so that several meshes are priced."""
        heapq.heapify(self.behind)
        while self.behind and not (self._enough() or self._late(DRAFT)):
            for again in self._look_at(heapq.heappop(self.behind)):
                heapq.heappush(self.behind, again)

    def _traced(self, untraced: UntracedDivisions, expected: float, division: MeshDivision) -> list[MeshCandidate]:
        """Its candidates; none of a division that is left out."""
        layouts = untraced.take(division)
        if expected > NEAR * self.found.best:
            self.found.far |= set(layouts)
        elif self.traces.made and self._no_time_to_trace():
            self.found.left |= {layout: self.problems.ideal(layout) for layout in layouts}
        else:
            return self.traces.first_form(division, layouts)
        return []

    def _look_at_other_forms(self, forms_of: Callable[[MeshDivision, list[MeshLayout]], None]) -> None:
        """Of layouts near the best, the nearest first."""
        for division, listed in self._close().items():
            forms_of(division, listed)

    def _of_encoders(self, division: MeshDivision, listed: list[MeshLayout]) -> None:
        """Each encoder's, as far as it may matter."""
        form = division.form
        for name in self.encoders:
            if name not in dict(self.model.options.context):
                form = self._faster(listed, form, forms_of(name, division, form), name)

    def _of_tokens(self, division: MeshDivision, listed: list[MeshLayout]) -> None:
        """Whether they are shared out between products."""
        if division.tp > 1 and not self.model.options.sequence_parallel:
            other = replace(division.form, sequence=not division.form.sequence)
            self._faster(listed, division.form, [other], until=math.inf)

    def _close(self) -> dict[MeshDivision, list[MeshLayout]]:
        known = self.found.fastest()
        seconds = {layout: known.get(layout, candidate.expected) for layout, candidate in self.found.expected.items()}
        close: dict[MeshDivision, list[MeshLayout]] = {}
        for layout in sorted(seconds, key=lambda layout: seconds[layout]):
            if layout.mesh.tp * layout.mesh.cp > 1 and seconds[layout] <= NEAR * self.found.best:
                close.setdefault(layout.division, []).append(layout)
        return close

    def _faster(
        self, listed: Sequence[MeshLayout], form: MeshForm, others: Sequence[MeshForm], name: str = "",
        until: float = FIRST_PLANS,
    ) -> MeshForm:  # fmt: skip
        """The form, or which of the others is faster on a layout. name: of an encoder that they divide otherwise.
        until: a part of the time.
        """
        meshes = self.found
        for other in others:
            for layout in listed:
                new = layout.in_form(other)
                if new in meshes.expected or new.division in meshes.refused:
                    continue
                if name and not self._may_gain(layout.in_form(form), name):
                    continue
                if self._late(TRACE) or (meshes.best < math.inf and self.clock.over(until)):
                    meshes.left[new] = self.problems.ideal(layout)
                else:
                    self._draft(self.traces.in_form([layout], other))
        seconds = meshes.fastest()
        return min(
            [form, *others],
            key=lambda new_form: min(
                (seconds.get(layout.in_form(new_form), math.inf) for layout in listed), default=math.inf
            ),
        )

    def _may_gain(self, layout: MeshLayout, name: str) -> bool:
        """Whether it would be the fastest without all that an encoder takes beside an even division of its work."""
        candidate = self.found.expected.get(layout)
        if candidate is None:
            return False
        spare, seconds = self.problems.spare(candidate, name), self.found.fastest().get(layout, candidate.expected)
        return spare > GAIN and seconds * (1 - spare) < self.found.best * (1 - GAIN)

    def _look_at(self, candidate: MeshCandidate) -> list[MeshCandidate]:
        """Draft a candidate, unless that cannot help; or what to look at next: it with what it takes at least by its
        memory, or with some of its work done again where it does not fit.
        """
        meshes = self.found
        if (
            candidate.options.zero == 3
            and self.fixed.zero is None
            and (candidate.layout, candidate.choice) in meshes.settled
        ):
            meshes.slow.add(candidate.layout)
        elif candidate.problem is None:
            bounded = self._with_memory(candidate)
            return self._recomputed(candidate) if bounded is None else [bounded]
        else:
            self.tell(str(candidate.layout))
            drafted = self.plans.draft(candidate)
            if drafted is None:
                meshes.bytes[candidate] = least_memory(candidate.problem)
                self.drafted.append(candidate)
                return self._recomputed(candidate)
            row, ordered = drafted
            meshes.add(ordered, row)
            self.drafted.append(replace(ordered, expected=row.seconds))
        return []

    def _plan(self) -> None:
        """What was drafted."""
        meshes = self.found
        drafted, self.drafted = in_turn(self.drafted, meshes.bytes), []
        for candidate in drafted:
            fits = candidate not in meshes.bytes
            if candidate.seconds >= meshes.hear() or (fits and candidate.expected > PLANNED * meshes.best):
                continue
            if self._late(PLAN):
                return
            row = self.plans.plan(candidate)
            if row is not None:
                meshes.bytes.pop(candidate, None)
                meshes.add(candidate, row)

    def _recomputed(self, candidate: MeshCandidate) -> list[MeshCandidate]:
        """What does not fit, with cheap work done again."""
        if self.fixed.recompute is not None or candidate.recompute != NONE:
            return []
        return self.traces.recomputed(candidate)

    def _with_memory(self, candidate: MeshCandidate) -> MeshCandidate | None:
        """None if it surely does not fit."""
        meshes = self.found
        try:
            numbers = self.problems.problem(candidate)
        except CscError:  # recompute="auto" finds nothing to leave out that would make it fit
            meshes.bytes[candidate] = math.inf
            return None
        least = least_memory(numbers)
        if numbers.memory is not None and least > numbers.memory:
            meshes.bytes[candidate] = least
            return None
        behind = least_behind(self.problems.program(candidate.layout, candidate.options), candidate.options)
        expected = expected_seconds(numbers) + behind
        bounded = replace(candidate, seconds=least_seconds(numbers) + behind, expected=expected, problem=numbers)
        meshes.expect(bounded)
        return bounded

    def _without_room(self) -> None:
        """Nothing fits: what needs the least, as it is."""
        known = {candidate: size for candidate, size in self.found.bytes.items() if size < math.inf}
        if known:
            candidate = min(known, key=lambda candidate: known[candidate])
            self.found.rows[candidate] = self.plans.without_room(candidate, self.problems.problem(candidate))

    def _give_stages(self) -> None:
        """Encoders of the best layout stages of their own, if that makes it faster."""
        best = min(self.found.rows, key=lambda candidate: fitting_first(self.found.rows[candidate]))
        row = self.found.rows[best]
        if not row.fits or best.problem is None:
            return
        for stages in own_stages(self.encoders, best.problem):
            if self._late(PLAN):
                return
            other = self.plans.on_own_stages(best, stages)
            if other is not None and other.seconds < self.found.best * (1 - GAIN):
                self.found.add(best, other)

    def _enough(self) -> bool:
        """Whether there are others beside the best."""
        return len({candidate.layout.mesh.with_own(tp={}, cp={}) for candidate in self.found.rows}) >= MESHES

    def _late(self, kind: Kind) -> bool:
        """Whether there is no time for another of this kind; for the first that fits there is more."""
        if self.found.best < math.inf:
            return not self.clock.ends(kind)
        return bool(self.found.bytes) and not self.clock.ends(kind, LATE)

    def _is_next(self, expected: float, waiting: Sequence[MeshCandidate]) -> bool:
        """Whether to trace a division that may take so long, rather than to plan what is waiting."""
        return not waiting or (expected <= waiting[0].expected and not self._no_time_to_trace())

    def _no_time_to_trace(self) -> bool:
        """Where nothing of what was traced fits, something else may."""
        if self.found.bytes and self.found.best == math.inf:
            return self._late(TRACE)
        return self.clock.over(TRACING)


def _nothing(layout: str) -> None:
    """Told by a worker: what is shown is of the search that forked it."""
