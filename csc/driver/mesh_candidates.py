"""What a search for a mesh knows of a layout before it is planned: its program, problem and bounds.

Terms: see csc.driver.mesh_search.

    DividedProblems(model)
    problems.first() -> Program                  of the fewest samples that csc can divide, on one device
    problems.whole(program) -> Problem           of such a program
    problems.options(layout, zero, recompute)    problems.program(layout, options)
    problems.problem(candidate) -> Problem       with memory
    problems.bounded(listed, ways, before)       -> candidates of layouts of one division, bounded without memory
    are_several(layout) -> bool                  whether several ranks hold the same parameters
    problems.ideal(layout) -> seconds            that no form of its division takes less than; nothing of it is traced
    problems.spare(candidate, component)         -> part of its work that a better form may save at most
    problems.extras                              of divisions, see csc.driver.mesh_divisions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from csc.driver.mesh_rows import DividedModel
from csc.driver.options import changed
from csc.errors import CscError
from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program
from csc.passes.pipeline_problem import chosen_hardware, problem
from csc.passes.recompute import AUTO, NONE, default_choice
from csc.passes.step_end import least_behind
from csc.planning.meshes import MeshDivision, MeshLayout, least_seconds
from csc.planning.problem import Problem, in_parts


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
    """What was divided once is kept."""

    def __init__(self, model: DividedModel) -> None:
        self.model = model
        self.programs: dict[Any, Program] = {}
        self.wholes: dict[int, Problem | None] = {}  # by samples, on one device
        self.ideals: dict[tuple[int, int, int, int], float] = {}  # by the sizes that they depend on
        self.extras: dict[MeshDivision, float] = {}  # of what was bounded with nothing computed again

    def first(self) -> Program:
        """CscError if there are none."""
        *others, last = self.model.sizes
        for samples in others:
            try:
                return self._whole(samples)
            except CscError:  # others may do
                continue
        return self._whole(last)

    def whole(self, program: Program) -> Problem:
        """Of a program on one device."""
        return problem(program, self.options(MeshLayout(Mesh(), 1, 1), 0, NONE))

    def _whole(self, samples: int) -> Program:
        """Components whose tokens ranks are to share out are whole, too."""
        layout = MeshLayout(Mesh(), samples, 1)
        return self.program(layout, replace(self.options(layout, 0, NONE), context=()))

    def options(self, layout: MeshLayout, zero: int, recompute: Any) -> Options:
        """Of the layout. zero: where several ranks hold the same parameters."""
        return changed(
            self.model.options, mesh=layout.mesh, microbatches=layout.microbatches, zero=zero * are_several(layout),
            recompute=None if recompute == NONE else recompute, sequence_parallel=layout.sequence,
            context=dict(self.model.options.context) | layout.context,
        )  # fmt: skip

    def program(self, layout: MeshLayout, options: Options) -> Program:
        """Of the division of a layout; of the layout itself where its memory decides what is kept."""
        automatic = any(choice == AUTO for _, choice in options.recompute)
        own = (layout, options.zero) if automatic else None
        key = (layout.division, options.recompute, options.context, own)
        if key not in self.programs:
            self.programs[key] = self.model.divided(options, layout.samples)
        return self.programs[key]

    def problem(self, one: MeshCandidate) -> Problem:
        """CscError where recompute="auto" finds nothing to leave out that would make it fit."""
        numbers = problem(self.program(one.layout, one.options), one.options)
        return replace(numbers, microbatches=one.layout.microbatches)

    def bounded(
        self, listed: Sequence[MeshLayout], ways: Sequence[tuple[int, Any]], before: int
    ) -> list[MeshCandidate]:
        """ways: of (zero, recompute). before: how many other candidates there are."""
        found: list[MeshCandidate] = []
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
                found.append(MeshCandidate(layout, options, recompute, least, before + len(found), least))
        return found

    def _note_extra(self, layout: MeshLayout, divided: Problem) -> None:
        whole = self._of_one(layout.samples)
        if whole is not None:
            ranks = layout.mesh.tp * layout.mesh.cp
            self.extras[layout.division] = ranks * _work(divided) / _work(whole) - 1

    def ideal(self, layout: MeshLayout) -> float:
        """If tp and cp divided all work evenly and nothing was exchanged. 0 where nothing is known of one device, and
        with measured seconds, which are of the regions that were measured.
        """
        parts = layout.mesh.tp * layout.mesh.cp
        key = (layout.samples, layout.microbatches, layout.mesh.pp, parts)
        if key not in self.ideals:
            whole = self._of_one(layout.samples)
            self.ideals[key] = 0.0 if whole is None else least_seconds(
                in_parts(replace(whole, ranks=layout.mesh.pp, microbatches=layout.microbatches, memory=None), parts)
            )  # fmt: skip
        return self.ideals[key]

    def spare(self, one: MeshCandidate, component: str) -> float:
        """Which part of a candidate's work an even division of the component's would save: exchanges, and what ranks
        compute alike. All of its work where nothing is known of one device.
        """
        assert one.problem is not None
        whole, ranks = self._of_one(one.layout.samples), one.layout.mesh.tp * one.layout.mesh.cp
        least = 0.0 if whole is None else _work(whole, component) / ranks
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
