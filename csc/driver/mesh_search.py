"""The search for the mesh that trains a step's samples fastest: which layouts are planned, and in which order.

Terms
  layout     see csc.planning.meshes
  way        what makes a layout take less memory: ZeRO-1 (which costs nothing where ranks hold the same parameters),
             recomputation, ZeRO-3. The fastest that fits counts: where memory lets few microbatches wait, to compute
             again may be faster
  division   what layouts that need the same traced graphs have in common: tp, cp and the samples of a microbatch
  candidate  a layout with a way
  price      the simulated makespan of a plan, and behind it gradients summed and the optimizer's step
  order      how ranks count through the axes, which says what stands within a node (csc.ir.mesh)

    MeshSearch(model, devices, step, seconds, tell, fixed).choice() -> MeshChoice

Tracing and planning take the time. So every division is traced once, those near one sample on whole layers first; of
every candidate it is then told in milliseconds what no plan of it beats, and what to expect of one
(csc.planning.mesh_bounds). Candidates are planned in the order of the latter, but for those that the former shows to be
slower than the best so far, or to exceed the memory, and those expected to be far behind. Where several nodes are
filled, a plan is priced in every order of its ranks, and planned for one that makes it faster.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from csc.driver.mesh_rows import DividedModel, FixedChoices, MeshChoice, MeshIfRoom, MeshRow
from csc.driver.options import changed
from csc.driver.rank_orders import priced_orders
from csc.errors import CscError, InputError
from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program
from csc.passes.pipeline_problem import chosen_hardware, problem
from csc.passes.recompute import AUTO, NONE
from csc.passes.step_end import least_behind, seconds_behind
from csc.planning.mesh_bounds import expected_seconds, least_memory, least_seconds
from csc.planning.meshes import MeshLayout, layouts
from csc.planning.plan import PipelinePlan, plan
from csc.planning.problem import Problem

EFFORT, LIMIT = 0.1, 2.0  # of the search for each plan, in seconds
TRACING = 0.5  # of the time, at most, before the first plan
LATE = 2.0  # times the seconds that a search may take as long as nothing fits
GAIN = 1e-3  # what another order of ranks has to save, to be looked at
FAR = 1.5  # times the best: what is expected to take longer is not planned
ROOM = 1.02  # times its bound: a plan this near gains nothing from ZeRO-3, which makes room
MESHES = 5  # that are priced at least, though they may be slower than the best

Division = tuple[int, int, int]  # tp, cp, samples of a microbatch


@dataclass(frozen=True, eq=False)
class MeshCandidate:
    """seconds: that it takes at least. expected: that it may take. number: among all, in the order in which equal ones
    are planned. problem: once it was made, and its memory is in the seconds.
    """

    layout: MeshLayout
    options: Options
    recompute: Any
    seconds: float
    number: int
    expected: float
    problem: Problem | None = None

    def __lt__(self, other: MeshCandidate) -> bool:
        return (self.expected, self.number) < (other.expected, other.number)


@dataclass
class _Found:
    """What a search knows so far. best: seconds of the fastest row that fits; rows: by candidate; bytes: that those
    need at least which do not fit; settled: layouts with a recomputation for which more room brings nothing.
    """

    best: float = math.inf
    rows: dict[MeshCandidate, MeshRow] = field(default_factory=dict)
    bytes: dict[MeshCandidate, float] = field(default_factory=dict)
    slow: set[MeshCandidate] = field(default_factory=set)
    settled: set[tuple[MeshLayout, str]] = field(default_factory=set)
    refused: dict[Division, str] = field(default_factory=dict)

    def add(self, one: MeshCandidate, row: MeshRow) -> None:
        self.rows[one] = row
        self.best = min(self.best, row.seconds)
        if row.seconds <= ROOM * one.seconds:
            self.settled.add((one.layout, row.recompute))


class MeshSearch:
    """Of a model for `step` samples on so many devices, in about so many seconds. tell: is called with each layout."""

    def __init__(
        self, model: DividedModel, devices: int, step: int, seconds: float, tell: Callable[[str], None],
        fixed: FixedChoices,
    ) -> None:  # fmt: skip
        self.model, self.devices, self.step, self.tell, self.fixed = model, devices, step, tell, fixed
        self.programs: dict[Any, Program] = {}
        self.found = _Found()
        self.memory: float | None = None
        first = self._first()
        hardware = chosen_hardware(first, model.options)
        self.asked = [
            one for one in layouts(devices, step, model.sizes, hardware.ranks_per_node, len(first.regions))
            if fixed.microbatches in (None, one.microbatches)
        ]  # fmt: skip
        if not self.asked:
            given = fixed.microbatches is not None
            many, other = (
                (f" with microbatches={fixed.microbatches}", ", or leave microbatches out") if given else ("", "")
            )
            raise InputError(
                f"{step} samples of a step cannot be divided among {devices} devices alike{many}", "samples",
                f"give a multiple of {devices}, or fewer devices{other}",
            )  # fmt: skip
        self.seconds, self.start = seconds, time.monotonic()  # from here on: the model has been captured

    def choice(self) -> MeshChoice:
        """InputError where the model can be divided for no mesh."""
        waiting, untraced = self._candidates()
        found = self.found
        heapq.heapify(waiting)
        left: list[MeshCandidate] = []
        while waiting:
            one = heapq.heappop(waiting)
            if one.seconds >= found.best and self._enough():
                found.slow.add(one)
            elif self._late():
                left.append(one)
            elif one.expected > FAR * found.best and self._enough():
                found.slow.add(one)
            elif (again := self._look_at(one)) is not None:
                heapq.heappush(waiting, again)
        open_ = {one.layout for one in left} | set(untraced)
        if not found.rows:
            self._without_room()
        if not found.rows:
            raise InputError(
                f"no mesh of {self.devices} devices was found", "mesh",
                "; ".join(dict.fromkeys(found.refused.values())) or "allow more memory",
            )  # fmt: skip
        return self._answer(open_)

    def _answer(self, open_: set[MeshLayout]) -> MeshChoice:
        found = self.found
        by_layout: dict[MeshLayout, MeshRow] = {}
        for one, row in found.rows.items():
            known = by_layout.get(one.layout)
            by_layout[one.layout] = row if known is None else min(known, row, key=_rank)
        rest = {one.layout for one in found.slow} - by_layout.keys() - open_
        large = {one.layout for one in found.bytes} - by_layout.keys() - open_ - rest
        rows = tuple(sorted(by_layout.values(), key=_rank))
        left = len(open_ - by_layout.keys())
        return MeshChoice(
            self.devices, self.step, self.memory, rows, len(rest), len(large), self._told(), left, self._room(rows[0])
        )  # fmt: skip

    def _candidates(self) -> tuple[list[MeshCandidate], list[MeshLayout]]:
        """By what they take at least; and layouts for whose tracing there was no time."""
        divisions: dict[Division, list[MeshLayout]] = {}
        for layout in self.asked:
            divisions.setdefault(_division(layout), []).append(layout)
        candidates: list[MeshCandidate] = []
        untraced: list[MeshLayout] = []
        for division in sorted(divisions, key=lambda each: (math.prod(each), each[1], each)):
            if candidates and time.monotonic() - self.start > TRACING * self.seconds:
                untraced += divisions[division]
                continue
            self.tell("tp={}, cp={}, microbatches of {}".format(*division))
            try:
                candidates += self._bounded(divisions[division], len(candidates))
            except CscError as error:  # csc cannot divide the model so, or microbatches of this size
                self.found.refused[division] = str(error)
        return candidates, untraced

    def _bounded(self, listed: list[MeshLayout], before: int) -> list[MeshCandidate]:
        """The candidates of a division. before: how many others there are."""
        found: list[MeshCandidate] = []
        for zero, recompute in self.fixed.ways():
            base: Problem | None = None
            for layout in listed:
                several = len(layout.mesh.group(Group.DATA, 0)) > 1
                if zero == 3 and not several and self.fixed.zero is None:
                    continue
                options = self._options(layout, zero if several else 0, recompute)
                program = self._program(layout, _decided(options))
                base = base or problem(program, options)
                numbers = replace(base, ranks=layout.mesh.pp, microbatches=layout.microbatches, memory=None)
                least = least_seconds(numbers) + least_behind(program, options)
                found.append(MeshCandidate(layout, options, recompute, least, before + len(found), least))
        return found

    def _look_at(self, one: MeshCandidate) -> MeshCandidate | None:
        """Plan a candidate, unless that cannot help; or return it with what it takes at least by its memory."""
        found = self.found
        if one.options.zero == 3 and self.fixed.zero is None and (one.layout, _name(one.recompute)) in found.settled:
            found.slow.add(one)
        elif one.problem is None:
            return self._with_memory(one)
        else:
            self.tell(str(one.layout))
            planned = _planned(one.problem)
            if planned is None:
                found.bytes[one] = least_memory(one.problem)
            else:
                found.add(one, self._ordered(one, one.problem, planned))
        return None

    def _with_memory(self, one: MeshCandidate) -> MeshCandidate | None:
        """None if it surely does not fit."""
        try:
            numbers = self._problem(one)
        except CscError:  # recompute="auto" finds nothing to leave out that would make it fit
            self.found.bytes[one] = math.inf
            return None
        least = least_memory(numbers)
        if numbers.memory is not None and least > numbers.memory:
            self.found.bytes[one] = least
            return None
        behind = least_behind(self._program(one.layout, one.options), one.options)
        return replace(
            one, seconds=least_seconds(numbers) + behind, expected=expected_seconds(numbers) + behind, problem=numbers
        )

    def _without_room(self) -> None:
        """Nothing fits: what needs the least, as it is."""
        known = {one: size for one, size in self.found.bytes.items() if size < math.inf}
        if known:
            one = min(known, key=lambda each: known[each])
            planned = plan(replace(self._problem(one), memory=None), "1f1b", effort=EFFORT, limit=LIMIT)
            self.found.rows[one] = self._row(one, one.options, planned, False)

    def _ordered(self, one: MeshCandidate, numbers: Problem, planned: PipelinePlan) -> MeshRow:
        """By the order of ranks in which this plan is the fastest."""
        program = self._program(one.layout, one.options)
        best = self._row(one, one.options, planned, True)
        orders = priced_orders(
            program, one.options, numbers, planned.stages, planned.placement, planned.schedule
        )  # fmt: skip
        for other in orders[1:]:
            again = _planned(other.problem) if other.seconds < best.seconds * (1 - GAIN) else None
            if again is not None:
                best = min(best, self._row(one, other.options, again, True), key=_rank)
        return best

    def _row(self, one: MeshCandidate, options: Options, planned: PipelinePlan, fits: bool) -> MeshRow:
        program = self._program(one.layout, one.options)
        return MeshRow(
            mesh=str(options.mesh),
            microbatches=one.layout.microbatches,
            samples=one.layout.samples,
            zero=options.zero,
            recompute=_name(one.recompute),
            seconds=planned.makespan + seconds_behind(program, options, planned.stages, planned.placement),
            idle=sum(planned.bubble) / len(planned.bubble),
            peak_memory=max(planned.peak_memory),
            fits=fits,
        )

    def _room(self, best: MeshRow) -> tuple[MeshIfRoom, ...]:
        """What may be faster than the best with more memory, each at least as much faster as it needs more."""
        found: list[MeshIfRoom] = []
        for one, size in sorted(self.found.bytes.items(), key=lambda each: (each[1], each[0].seconds)):
            least = min([best.seconds * (1 - GAIN), *(each.seconds * (1 - GAIN) for each in found)])
            if best.fits and one.seconds < least and (self.memory or 0.0) < size < math.inf:
                found.append(
                    MeshIfRoom(
                        str(one.layout.mesh), one.layout.microbatches, one.options.zero, _name(one.recompute),
                        one.seconds, size,
                    )
                )  # fmt: skip
        return tuple(found)

    def _enough(self) -> bool:
        """Whether there are others beside the best."""
        return len({row.mesh for row in self.found.rows.values()}) >= MESHES

    def _late(self) -> bool:
        spent = time.monotonic() - self.start
        if self.found.rows:
            return spent > self.seconds
        return bool(self.found.bytes) and spent > LATE * self.seconds

    def _problem(self, one: MeshCandidate) -> Problem:
        numbers = problem(self._program(one.layout, one.options), one.options)
        self.memory = numbers.memory
        return replace(numbers, microbatches=one.layout.microbatches)

    def _options(self, layout: MeshLayout, zero: int, recompute: Any) -> Options:
        return changed(
            self.model.options, mesh=layout.mesh, microbatches=layout.microbatches, zero=zero, recompute=recompute
        )  # fmt: skip

    def _program(self, layout: MeshLayout, options: Options) -> Program:
        """Of the division of a layout; of the layout itself where its memory decides what is kept."""
        automatic = any(choice == AUTO for _, choice in options.recompute)
        own = (layout, options.zero) if automatic else None
        key = (_division(layout), options.recompute, own)
        if key not in self.programs:
            self.programs[key] = self.model.divided(options, layout.samples)
        return self.programs[key]

    def _first(self) -> Program:
        """Of the fewest samples that csc can divide. CscError if there are none."""
        whole = changed(self.model.options, mesh=Mesh(), microbatches=1, zero=0, recompute=NONE)
        *others, last = self.model.sizes
        for samples in others:
            try:
                return self.model.divided(whole, samples)
            except CscError:  # others may do
                continue
        return self.model.divided(whole, last)

    def _told(self) -> dict[str, str]:
        """Why there is none, by the division of layers and tokens where the microbatch makes no difference."""
        asked = {_division(layout) for layout in self.asked}
        refused = self.found.refused
        told = {}
        for (tp, cp, samples), why in refused.items():
            alike = {refused.get(one) for one in asked if one[:2] == (tp, cp)} == {why}
            division = f"tp={tp}, cp={cp}"
            told[division if alike else f"{division} with microbatches of {samples}"] = why
        return told


def _planned(numbers: Problem) -> PipelinePlan | None:
    """A plan that keeps to the limit; None if none was found."""
    try:
        return plan(numbers, "auto", effort=EFFORT, limit=LIMIT)
    except CscError:
        return None


def _decided(options: Options) -> Options:
    """The options with no recomputation where memory would decide on it: what a plan takes at least."""
    kept = tuple((name, NONE if choice == AUTO else choice) for name, choice in options.recompute)
    return replace(options, recompute=kept)


def _name(recompute: Any) -> str:
    return recompute if isinstance(recompute, str) else "as given"


def _rank(row: MeshRow) -> tuple[bool, float]:
    """What comes first."""
    return not row.fits, row.seconds


def _division(layout: MeshLayout) -> Division:
    return layout.mesh.tp, layout.mesh.cp, layout.samples
