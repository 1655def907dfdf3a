"""What a search for a mesh knows: layouts, their programs, problems and bounds, and the best so far."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from csc.driver.options import changed
from csc.driver.search_clock import TRACE, SearchClock
from csc.errors import CscError
from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program
from csc.passes.pipeline_problem import chosen_hardware, problem
from csc.passes.recompute import AUTO, NONE, SELECTIVE, default_choice
from csc.passes.step_end import least_behind
from csc.passes.tensor import Indivisible, OddAxis
from csc.planning.meshes import PLAIN, MeshDivision, MeshForm, MeshLayout, least_seconds
from csc.planning.problem import Problem, in_parts

# --- What a search for a mesh is asked, and what it finds. Terms: see csc.driver.mesh_search -------------------------


WAYS = ((1, "none"), (1, "full"), (3, "none"), (3, "full"))  # zero, recompute


@dataclass(frozen=True)
class DividedModel:
    """A model that csc divides. sizes: samples that a microbatch may have, ascending. divided(options, samples): the
    Program after pass `split`, of microbatches of so many; CscError where csc cannot divide it so.
    """

    options: Options
    sizes: tuple[int, ...]
    divided: Callable[[Options, int], Program]


def _how(row: MeshRow | MeshIfRoom) -> str:
    """What it takes besides the mesh, in words."""
    extras = [f"{row.microbatches} microbatches", f"zero={row.zero}", f"recompute={row.recompute}"]
    if row.context:
        extras.append(f"context={dict(row.context)}")
    return ", ".join([*extras, "sequence_parallel=True"] if row.sequence_parallel else extras)


@dataclass(frozen=True)
class MeshRow:
    """seconds: of a step, its end included. peak_memory: of the fullest rank. fits: within the limit. context: ranks
    that share out the tokens of components, as the option has it.
    """

    mesh: str
    microbatches: int
    samples: int
    zero: int
    recompute: str
    seconds: float
    idle: float
    peak_memory: float
    fits: bool
    sequence_parallel: bool = False
    context: Mapping[str, int] = field(default_factory=dict)

    how = property(_how)


@dataclass(frozen=True)
class MeshIfRoom:
    """What memory keeps from being chosen. seconds: that it takes at least; peak_memory: that it needs at least."""

    mesh: str
    microbatches: int
    zero: int
    recompute: str
    seconds: float
    peak_memory: float
    sequence_parallel: bool = False
    context: Mapping[str, int] = field(default_factory=dict)

    how = property(_how)


@dataclass(frozen=True)
class MeshChoice:
    """rows: the fastest first, those that do not fit behind all others. slower: layouts that were left out, as nothing
    on them can be faster than the best. large: those on which no plan was found that fits. refused: why there is none,
    by division. left: layouts there was no time for, all of which take at least so many seconds. room: faster ones with
    more memory, the least of that first. far: layouts left out as they were expected, not shown, to be far behind.
    """

    devices: int
    step: int
    memory: float | None
    rows: tuple[MeshRow, ...]
    slower: int
    large: int
    refused: Mapping[str, str]
    left: int
    room: tuple[MeshIfRoom, ...] = ()
    left_seconds: float = math.inf
    far: int = 0

    @property
    def gap(self) -> float:
        """How much faster, as a part of the best, what was left can be at most; 0: it cannot."""
        return max(0.0, 1 - self.left_seconds / self.rows[0].seconds)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it, which knows no infinity."""
        return {**asdict(self), "left_seconds": self.left_seconds if self.left else None, "gap": self.gap}


@dataclass(frozen=True)
class FixedChoices:
    """What is not chosen, but given. None: it is chosen. failures: how many ranks may be killed (`survive=`)."""

    microbatches: int | None = None
    zero: int | None = None
    recompute: Any = None
    failures: int = 0

    def allow(self, layout: MeshLayout) -> bool:
        """Whether a layout has these microbatches, and can lose so many ranks."""
        lasts = not self.failures or (layout.mesh.dp > self.failures and not layout.mesh.components)
        return lasts and self.microbatches in (None, layout.microbatches)

    def ways(self) -> list[tuple[int, Any]]:
        """(zero, recompute), in the order in which they are tried."""
        ways_found = [
            (zero if self.zero is None else self.zero, recompute if self.recompute is None else self.recompute)
            for zero, recompute in WAYS
            if not (self.failures and zero >= 3)
        ]
        return [way for number, way in enumerate(ways_found) if way not in ways_found[:number]]


NOTHING_FIXED = FixedChoices()


# --- Numbers of ranks that are known not to divide the layers of a component -----------------------------------------
#
# Which of its dimensions divide depends on a component and its number of ranks alone, not on the form, nor on samples:
# where a language model has 14,336 hidden features and 8 heads, none of six forms of tp=3, nor of tp=6, has to be
# traced.


class UndividedAxes:
    """The dimensions that csc was seen not to divide, by component. context: components whose tokens are shared out,
    which have no tp.
    """

    def __init__(self, context: Collection[str]) -> None:
        self._context = context
        self._axes: dict[str, list[OddAxis]] = {}

    def note(self, error: CscError) -> None:
        """Notes what csc said of a division, if it is Indivisible."""
        if not isinstance(error, Indivisible):
            return
        for component, axes in error.axes.items():
            kept_axes = self._axes.setdefault(component, [])
            kept_axes += [axis for axis in axes if not axis.why and axis not in kept_axes]

    def why(self, division: MeshDivision) -> str | None:
        """Returns a sentence that says why this division cannot divide a component; None where nothing is known against
        it.
        """
        for component, axes in self._axes.items():
            tp = dict(division.form.own).get(component, division.tp)
            odd = next((axis for axis in axes if not axis.divides(tp)), None)
            if odd is not None and component not in (*division.form.spread, *self._context):
                return f"{odd.size} {odd.what} of {odd.parameter} ({component}) cannot be divided by tp={tp}"
        return None


# --- The forms in which ranks may divide a model, and stages that its encoders may have of their own -----------------
#
# Terms: see csc.planning.meshes. The *encoders* are the components that have layers, but for the one whose layers run
# last, from which the loss comes.
#
# Shared-out tokens come first: they take the bytes of one sum in two exchanges, or less, and divide norms and
# additions too, in seconds and in bytes. Ranks of cp that share out an encoder's samples do a part of what each does
# else. Samples that do not divide (one image, six tiles among four ranks) let ranks compute the same: there fewer
# groups of ranks, each of which divides layers too, or tokens in place of samples, may take less.


OwnStages = tuple[tuple[str, int], ...]


def encoders(program: Program) -> tuple[str, ...]:
    """In order of execution."""
    names = list(dict.fromkeys(region.component for region in program.regions if region.kind == "layer"))
    last = next((region.component for region in reversed(program.regions) if region.kind == "layer"), "")
    return tuple(name for name in names if name != last)


def forms(names: Sequence[str], options: Options, division: MeshDivision) -> list[MeshForm]:
    """What a division, whatever its form, is first looked at in, until csc can divide so. A component whose tokens the
    options spread has no tp or cp of its own; options that share out tokens stay so.
    """
    free = tuple(name for name in names if name not in dict(options.context))
    groups = [(), free, *((name,) for name in free if len(free) > 1)] if free else [()]
    sequences = (True, *(() if options.sequence_parallel else (False,)))
    found_forms = [PLAIN]
    if division.tp > 1:
        owns = [tuple((name, 1) for name in sorted(apart)) for apart in groups]
        found_forms = [MeshForm(own_sizes, sequence) for sequence in sequences for own_sizes in owns]
    whole = tuple(sorted(free)) if division.cp > 1 else ()
    return [*(replace(form, whole=whole) for form in found_forms), *found_forms] if whole else found_forms


def forms_of(name: str, division: MeshDivision, form: MeshForm) -> list[MeshForm]:
    """The form with other numbers of ranks that divide the layers of an encoder, or share out its tokens over cp. Those
    between 1 and all of tp are the same for all components: the time that more would take is better given to other
    meshes (VALM-L of benchmarks.mesh on 64 H100: 14.6 s a step in place of 14.0).
    """
    other_sizes = tuple(size for size in form.own if size[0] != name)
    between = {tp for _, tp in other_sizes if tp > 1}
    sizes = [tp for tp in range(1, division.tp + 1) if division.tp % tp == 0]
    fitting = [tp for tp in sizes if tp in (1, division.tp) or not between or tp in between]
    if name in form.spread:
        return []
    new_forms = [
        replace(form, own=tuple(sorted((*other_sizes, (name, tp)))) if tp < division.tp else other_sizes)
        for tp in fitting
    ]
    if division.cp > 1:
        undivided = tuple(component for component in form.whole if component != name)
        new_forms.append(replace(form, own=other_sizes, whole=undivided, spread=tuple(sorted((*form.spread, name)))))
    return [new_form for new_form in new_forms if new_form != form]


def own_stages(names: Sequence[str], numbers: Problem) -> list[OwnStages]:
    """Of a pipeline with more ranks than encoders, so many that the rest has at least one."""
    work = sum(unit.work for unit in numbers.units)
    shares = {name: sum(unit.work for unit in numbers.units if unit.component == name) / work for name in names}
    divisions = [
        tuple((name, max(1, rounded(numbers.ranks * share))) for name, share in shares.items())
        for rounded in (math.floor, math.ceil)
    ]
    fitting = [division for division in divisions if division and sum(stages for _, stages in division) < numbers.ranks]
    return list(dict.fromkeys(fitting))


# --- What a search for a mesh knows of a layout before it is planned: its program, problem and bounds ----------------
#
# Terms: see csc.driver.mesh_search.


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

    @property
    def choice(self) -> str:
        """Its recomputation as rows show it."""
        return self.recompute if isinstance(self.recompute, str) else "as given"


class DividedProblems:
    """The programs and problems of the divisions of one model. What was divided once is kept."""

    def __init__(self, model: DividedModel) -> None:
        self.model = model
        self.programs: dict[Any, Program] = {}
        self.wholes: dict[int, Problem | None] = {}  # by samples, on one device
        self.ideals: dict[tuple[int, int, int, int], float] = {}  # by the sizes that they depend on
        self.extras: dict[MeshDivision, float] = {}  # of what was bounded with nothing computed again

    def first(self) -> Program:
        """Returns the program of the fewest samples that csc can divide, on one device. Raises CscError if there is
        none.
        """
        *fewer, last = self.model.sizes
        for samples in fewer:
            try:
                return self._whole(samples)
            except CscError:  # others may do
                continue
        return self._whole(last)

    def whole(self, program: Program) -> Problem:
        """Returns the problem of a program on one device."""
        return problem(program, self.options(MeshLayout(Mesh(), 1, 1), 0, NONE))

    def _whole(self, samples: int) -> Program:
        """Components whose tokens ranks are to share out are whole, too."""
        layout = MeshLayout(Mesh(), samples, 1)
        return self.program(layout, replace(self.options(layout, 0, NONE), context=()))

    def options(self, layout: MeshLayout, zero: int, recompute: Any) -> Options:
        """Returns the options of a layout. zero: where several ranks hold the same parameters."""
        return changed(
            self.model.options, mesh=layout.mesh, microbatches=layout.microbatches, zero=zero * are_several(layout),
            recompute=None if recompute == NONE else recompute, sequence_parallel=layout.sequence,
            context=dict(self.model.options.context) | layout.context,
        )  # fmt: skip

    def program(self, layout: MeshLayout, options: Options) -> Program:
        """Returns the program of a layout's division; of the layout itself where its memory decides what is kept."""
        automatic = any(choice == AUTO for _, choice in options.recompute)
        choice = (layout, options.zero) if automatic else None
        key = (layout.division, options.recompute, options.context, choice)
        if key not in self.programs:
            self.programs[key] = self.model.divided(options, layout.samples)
        return self.programs[key]

    def problem(self, one: MeshCandidate) -> Problem:
        """Returns the problem of a candidate, with memory. Raises CscError where recompute="auto" finds nothing to
        leave out that would make it fit.
        """
        numbers = problem(self.program(one.layout, one.options), one.options)
        return replace(numbers, microbatches=one.layout.microbatches)

    def bounded(
        self, listed: Sequence[MeshLayout], ways: Sequence[tuple[int, Any]], before: int
    ) -> list[MeshCandidate]:
        """Returns the candidates of layouts of one division, bounded without memory. ways: of (zero, recompute).
        before: how many other candidates there are.
        """
        candidates: list[MeshCandidate] = []
        for zero, recompute in ways:
            base: Problem | None = None
            for layout in listed:
                options = self.options(layout, zero, recompute)
                program = self.program(layout, _decided(options))
                if base is None:
                    base = problem(program, options)
                    if recompute == NONE:
                        self._note_extra(layout, base)
                numbers = replace(base, ranks=layout.mesh.pp, microbatches=layout.microbatches, memory=None)
                least = least_seconds(numbers) + least_behind(program, options)
                candidates.append(MeshCandidate(layout, options, recompute, least, before + len(candidates), least))
        return candidates

    def _note_extra(self, layout: MeshLayout, divided: Problem) -> None:
        undivided = self._of_one(layout.samples)
        if undivided is not None:
            ranks = layout.mesh.tp * layout.mesh.cp
            self.extras[layout.division] = ranks * _work(divided) / _work(undivided) - 1

    def ideal(self, layout: MeshLayout) -> float:
        """Returns the seconds that no form of the division takes less than, if tp and cp divided all work evenly and
        nothing was exchanged. Returns 0 where nothing is known of one device, and with measured seconds, which are of
        the regions that were measured. Nothing is traced for it.
        """
        parts = layout.mesh.tp * layout.mesh.cp
        key = (layout.samples, layout.microbatches, layout.mesh.pp, parts)
        if key not in self.ideals:
            undivided = self._of_one(layout.samples)
            self.ideals[key] = 0.0 if undivided is None else least_seconds(
                in_parts(replace(undivided, ranks=layout.mesh.pp, microbatches=layout.microbatches, memory=None), parts)
            )  # fmt: skip
        return self.ideals[key]

    def spare(self, one: MeshCandidate, component: str) -> float:
        """Which part of a candidate's work an even division of the component's would save: exchanges, and what ranks
        compute alike. All of its work where nothing is known of one device.
        """
        assert one.problem is not None
        undivided, ranks = self._of_one(one.layout.samples), one.layout.mesh.tp * one.layout.mesh.cp
        least = 0.0 if undivided is None else _work(undivided, component) / ranks
        return max(0.0, _work(one.problem, component) - least) / _work(one.problem)

    def _of_one(self, samples: int) -> Problem | None:
        if samples not in self.wholes:
            self.wholes[samples] = self._on_one(samples)
        return self.wholes[samples]

    def _on_one(self, samples: int) -> Problem | None:
        try:
            program = self._whole(samples)
        except CscError:
            return None
        if chosen_hardware(program, self.model.options).measured:
            return None
        return self.whole(program)


def _work(numbers: Problem, component: str | None = None) -> float:
    """Of all units, or those of a component."""
    return sum(unit.work for unit in numbers.units if component in (None, unit.component))


def are_several(layout: MeshLayout) -> bool:
    """Whether several ranks hold the same parameters."""
    return len(layout.mesh.group(Group.DATA, 0)) > 1


def _decided(options: Options) -> Options:
    """The options with the least recomputation where memory would decide on it: what a plan takes at least."""
    kept = tuple((name, default_choice(options) if choice == AUTO else choice) for name, choice in options.recompute)
    return replace(options, recompute=kept)


# --- Divisions that no graph was traced for yet, the most promising first --------------------------------------------
#
# Terms: see csc.driver.mesh_search. The *extra* of a division is what its ranks take together more than one device
# alone would, as a part of that: exchanges, and what is not divided.
#
# A rank that shares the work of a layer with more others exchanges no less, so the extra of an axis grows with its
# ranks at least in proportion; and the extras of tp and of cp add up. So a few divisions tell of the others, and of
# most it is known without a graph that they are far behind. Nothing is told from microbatches of other sizes, whose
# messages may take longer than their latency.


Part = tuple[list[MeshCandidate], "UntracedDivisions"]


class UntracedDivisions:
    """In the plain form, in which layouts are made."""

    def __init__(self, problems: DividedProblems, layouts: Sequence[MeshLayout]) -> None:
        self._problems, self._begun = problems, False
        self._layouts: dict[MeshDivision, list[MeshLayout]] = {}
        for layout in sorted(layouts, key=_simple):
            self._layouts.setdefault(layout.division, []).append(layout)

    def next(self) -> tuple[float, MeshDivision] | None:
        """The division that may take the least, and the seconds that are expected of its best layout; the simplest one
        before all others, with which the graph of one device has been traced.
        """
        if not self._layouts:
            return None
        if not self._begun:
            simplest = next(iter(self._layouts))
            return self._seconds(simplest), simplest
        return min(((self._seconds(layout), layout) for layout in self._layouts), key=lambda pair: pair[0])

    def take(self, division: MeshDivision) -> list[MeshLayout]:
        self._begun = True
        return self._layouts.pop(division)

    def parts(self, traced: Sequence[MeshCandidate], count: int) -> list[Part]:
        """All candidates of a division are of one part, as is a division without a trace, but for layouts of whole
        layers, which have no other forms to trace. The best are in turn.
        """
        least: dict[MeshDivision | MeshLayout, float] = {}
        for candidate in traced:
            least[_of_one_part(candidate)] = min(candidate.seconds, least.get(_of_one_part(candidate), math.inf))
        every = least | {division: self._seconds(division) for division in self._layouts}
        turn = {division: i % count for i, division in enumerate(sorted(every, key=lambda division: every[division]))}
        parts: list[Part] = []
        for number in range(count):
            part = UntracedDivisions(self._problems, ())
            part._begun = self._begun
            part._layouts = {
                division: layouts for division, layouts in self._layouts.items() if turn[division] == number
            }
            parts.append(([candidate for candidate in traced if turn[_of_one_part(candidate)] == number], part))
        return parts

    def _seconds(self, division: MeshDivision) -> float:
        """Those of the shortest pipeline, which has the least to wait for."""
        shortest = min(self._layouts[division], key=lambda layout: layout.mesh.pp)
        return self._problems.ideal(shortest) * (1 + self._extra(division))

    def _extra(self, division: MeshDivision) -> float:
        """At least, by what was traced in any form."""
        known = [(one, extra) for one, extra in self._problems.extras.items() if one.samples == division.samples]
        of_tp = _least((one.tp, extra) for one, extra in known if one.cp == 1 and one.tp <= division.tp)
        of_cp = _least((one.cp, extra) for one, extra in known if one.tp == 1 and one.cp <= division.cp)
        return _grown(of_tp, division.tp) + _grown(of_cp, division.cp)


def _of_one_part(candidate: MeshCandidate) -> MeshDivision | MeshLayout:
    """What a worker has all of."""
    layout = candidate.layout.in_form(PLAIN)
    return layout if layout.mesh.tp * layout.mesh.cp == 1 else layout.division


def _simple(layout: MeshLayout) -> tuple[int, int, int]:
    """Whole layers and few samples first."""
    division = layout.division
    return division.tp * division.cp * division.samples, division.cp, division.tp


def _least(extras: Iterable[tuple[int, float]]) -> dict[int, float]:
    """By ranks, of the form that takes the least."""
    found: dict[int, float] = {}
    for ranks, extra in extras:
        found[ranks] = min(extra, found.get(ranks, extra))
    return found


def _grown(extras: dict[int, float], ranks: int) -> float:
    return max([0.0, *(extra * ranks / fewer for fewer, extra in extras.items() if fewer > 1)])


# --- What a search for a mesh has found so far -----------------------------------------------------------------------
#
# Terms: see csc.driver.mesh_search.


GAIN = 1e-3  # what another order of ranks, form, stages of their own, or more memory have to save
NEAR = 1.15  # times the best: layouts of which other forms are looked at
ROOM = 1.02  # times its bound: a plan this near gains nothing from ZeRO-3, which makes room


class BestOfWorkers:
    """The seconds of the best that any of several processes has found, which were forked from the first."""

    def __init__(self) -> None:
        self._seconds = multiprocessing.get_context("fork").RawValue("d", math.inf)

    def least(self, seconds: float) -> float:
        """Without a lock: what one process overwrites, the other says again the next time."""
        best = min(seconds, self._seconds.value)
        self._seconds.value = best
        return float(best)


@dataclass
class FoundMeshes:
    """best: seconds of the fastest row that fits; rows: by candidate; bytes: that those need at least which do not fit;
    slow: layouts on which nothing can be faster; far: those that are expected to be far behind; settled: layouts with a
    recomputation for which more room brings nothing; refused: why csc cannot divide so; expected: of each layout that
    was bounded with its memory the candidate that may take the least; left: seconds that layouts take at least for
    which there was no time.
    """

    best: float = math.inf
    rows: dict[MeshCandidate, MeshRow] = field(default_factory=dict)
    bytes: dict[MeshCandidate, float] = field(default_factory=dict)
    slow: set[MeshLayout] = field(default_factory=set)
    far: set[MeshLayout] = field(default_factory=set)
    settled: set[tuple[MeshLayout, str]] = field(default_factory=set)
    refused: dict[MeshDivision, str] = field(default_factory=dict)
    expected: dict[MeshLayout, MeshCandidate] = field(default_factory=dict)
    left: dict[MeshLayout, float] = field(default_factory=dict)
    heard: BestOfWorkers | None = None

    def add(self, one: MeshCandidate, row: MeshRow) -> None:
        """Keeps the row of a candidate."""
        self.rows[one] = row
        self.best = min(self.best, row.seconds)
        if row.seconds <= ROOM * one.seconds:
            self.settled.add((one.layout, row.recompute))

    def hear(self) -> float:
        """Returns the seconds of the best row of all workers, where there are several."""
        if self.heard is not None:
            self.best = self.heard.least(self.best)
        return self.best

    def told(self) -> FoundMeshes:
        """Returns what a worker tells another one, who merges it."""
        return replace(self, expected={}, heard=None)

    def merge(self, other: FoundMeshes) -> None:
        """Adds what another worker has told."""
        self.best = min(self.best, other.best)
        for mine, theirs in ((self.rows, other.rows), (self.bytes, other.bytes), (self.refused, other.refused)):
            mine |= theirs  # type: ignore[operator]
        self.slow |= other.slow
        self.far |= other.far
        for layout, seconds in other.left.items():
            self.left[layout] = min(seconds, self.left.get(layout, math.inf))

    def expect(self, one: MeshCandidate) -> None:
        known = self.expected.get(one.layout)
        if known is None or one.expected < known.expected:
            self.expected[one.layout] = one

    def fastest(self) -> dict[MeshLayout, float]:
        """Seconds of each layout on which something fits."""
        seconds: dict[MeshLayout, float] = {}
        for candidate, row in self.rows.items():
            if row.fits:
                seconds[candidate.layout] = min(row.seconds, seconds.get(candidate.layout, math.inf))
        return seconds

    def answer(self, devices: int, step: int, memory: float | None, told: Mapping[str, str]) -> MeshChoice:
        """Returns what was found for so many devices. told: why there is no mesh, by division."""
        by_layout: dict[MeshLayout, MeshRow] = {}
        for candidate, row in self.rows.items():
            before = by_layout.get(candidate.layout, row)
            by_layout[candidate.layout] = min(before, row, key=fitting_first)
        rows = tuple(sorted(by_layout.values(), key=fitting_first))
        left = {layout: least for layout, least in self.left.items() if layout not in by_layout}
        known = by_layout.keys() | left.keys()
        far = self.far - known
        rest = self.slow - known - far
        large = {candidate.layout for candidate in self.bytes} - known - far - rest
        return MeshChoice(
            devices, step, memory, rows, len(rest), len(large), told, len(left), self._room(rows[0], memory or 0.0),
            min(left.values(), default=math.inf), len(far),
        )  # fmt: skip

    def _room(self, best: MeshRow, memory: float) -> tuple[MeshIfRoom, ...]:
        """What may be faster than the best with more memory, each at least as much faster as it needs more."""
        rooms: list[MeshIfRoom] = []
        for one, size in sorted(self.bytes.items(), key=lambda item: (item[1], item[0].seconds)):
            least = min([best.seconds * (1 - GAIN), *(room.seconds * (1 - GAIN) for room in rooms)])
            if best.fits and one.seconds < least and memory < size < math.inf:
                layout = one.layout
                rooms.append(
                    MeshIfRoom(
                        str(layout.mesh), layout.microbatches, one.options.zero, one.choice, one.seconds, size,
                        layout.sequence, layout.context,
                    )
                )  # fmt: skip
        return tuple(rooms)


def fitting_first(row: MeshRow) -> tuple[bool, float]:
    """What comes first."""
    return not row.fits, row.seconds


# --- Divisions traced for a search for a mesh ------------------------------------------------------------------------
#
# Each division has candidates, in the first form in which csc can divide so.
#
# Terms: see csc.driver.mesh_search.


class MeshTraces:
    """The divisions of one search, traced when they are asked for. `made` counts the candidates."""

    def __init__(
        self, problems: DividedProblems, found: FoundMeshes, clock: SearchClock, encoders: Sequence[str],
        fixed: FixedChoices, tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._problems, self._found, self._clock, self._fixed, self._tell = problems, found, clock, fixed, tell
        self._forms = partial(forms, encoders, problems.model.options)
        self._undivided: dict[MeshDivision, str | None] = {}  # why they are refused in every form, if they are
        self._odd = UndividedAxes(dict(problems.model.options.context))
        self.made = 0

    def of_worker(self, clock: SearchClock, tell: Callable[[str], None]) -> None:
        """This process was just forked: it knows what is known so far."""
        self._clock, self._tell = clock, tell

    def first_form(self, division: MeshDivision, layouts: Sequence[MeshLayout]) -> list[MeshCandidate]:
        """Returns the candidates of layouts of one division, in the first form in which csc can divide the model.
        Returns none where csc cannot divide it in any; `found.refused` then says why.
        """
        listed, refused = self._forms(division), self._found.refused
        alike = len({form.own for form in listed})  # in all but that
        why = self._undivided.get(replace(division, cp=1))
        for number, form in enumerate(listed):
            if number == alike and why is None:
                self._undivided[division] = why = self._why_undivided(layouts[0], listed)
            if why is not None:
                refused[replace(division, form=form)] = why
            elif replace(division, form=form) not in refused and (candidate := self.in_form(layouts, form)):
                return candidate
        return []

    def _why_undivided(self, layout: MeshLayout, listed: Sequence[MeshForm]) -> str | None:
        """Why csc refuses it in all forms: for the same reasons whether or not tokens, and samples over cp, are shared
        out. What it refuses without cp it refuses with it.
        """
        refused, why = self._found.refused, None
        for form in listed[:2]:
            why, other = refused[replace(layout.division, form=form)], replace(listed[-1], own=form.own)
            again = replace(layout.division, form=other)
            if again not in refused:
                self.in_form([layout], other)
            if refused.get(again) != why:
                return None
        return why

    def in_form(self, listed: Sequence[MeshLayout], form: MeshForm) -> list[MeshCandidate]:
        """Returns the candidates of layouts of one division in this form; none if csc cannot divide the model so."""
        layouts_in_form = [layout.in_form(form) for layout in listed]
        known = self._odd.why(layouts_in_form[0].division)
        if known is not None:
            self._found.refused[layouts_in_form[0].division] = known
            return []
        self._tell(str(layouts_in_form[0].division))
        candidates: list[MeshCandidate] = []
        try:
            with self._clock.of(TRACE):
                for zero, recompute in self._fixed.ways():
                    possible = [
                        layout
                        for layout in layouts_in_form
                        if (zero < 3 or self._fixed.zero is not None or are_several(layout))
                        and self._fixed.allow(layout)
                    ]
                    candidates += self._problems.bounded(possible, [(zero, recompute)], self.made + len(candidates))
        except CscError as error:  # or microbatches of this size
            self._odd.note(error)
            self._found.refused[layouts_in_form[0].division] = self._odd.why(layouts_in_form[0].division) or str(error)
            return []
        self.made += len(candidates)
        return candidates

    def recomputed(self, one: MeshCandidate) -> list[MeshCandidate]:
        """Returns the candidates of the same layout in which cheap work is done again in B."""
        self.made += 1
        return self._problems.bounded([one.layout], [(one.options.zero, SELECTIVE)], self.made)

    def told(self, asked: Sequence[MeshLayout]) -> dict[str, str]:
        """Returns why there is no candidate, by division; but for the form or the microbatch where these make no
        difference.
        """
        samples, refused = {layout.division.samples for layout in asked}, self._found.refused
        reasons = {}
        for division, why in refused.items():
            forms = (PLAIN, *self._forms(division))
            if all(refused.get(replace(division, form=form)) == why for form in forms):
                division = replace(division, form=PLAIN)
            alike = {refused.get(replace(division, samples=count)) for count in samples} == {why}
            reasons[str(division) if alike else f"{division} with microbatches of {division.samples}"] = why
        return reasons
