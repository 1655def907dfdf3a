"""Divisions traced for a search for a mesh: the candidates of each, in the first form in which csc can divide so.

Terms: see csc.driver.mesh_search.

    traces = MeshTraces(problems, found, clock, encoders, fixed, tell)
    traces.first_form(division, layouts) -> candidates      none: csc cannot divide the model so; why is noted
    traces.in_form(layouts, form)        -> candidates      of layouts of one division, in this form
    traces.recomputed(candidate)         -> candidates      with cheap work done again
    traces.made                                             how many there are
    traces.told(layouts) -> {division: why}                 what csc refused, where layouts were asked for
    traces.of_worker(clock, tell)                           from now on: this process was just forked
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from csc.driver.mesh_candidates import DividedProblems, MeshCandidate, are_several
from csc.driver.mesh_forms import forms
from csc.driver.mesh_found import FoundMeshes
from csc.driver.mesh_rows import FixedChoices
from csc.driver.search_clock import TRACE, SearchClock
from csc.driver.undivided_axes import UndividedAxes
from csc.errors import CscError
from csc.passes.recompute import SELECTIVE
from csc.planning.meshes import PLAIN, MeshDivision, MeshForm, MeshLayout


class MeshTraces:
    """See the module."""

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
        """See the module."""
        listed, refused = self._forms(division), self._found.refused
        alike = len({form.own for form in listed})  # in all but that
        why = self._undivided.get(replace(division, cp=1))
        for number, form in enumerate(listed):
            if number == alike and why is None:
                self._undivided[division] = why = self._why_undivided(layouts[0], listed)
            if why is not None:
                refused[replace(division, form=form)] = why
            elif replace(division, form=form) not in refused and (made := self.in_form(layouts, form)):
                return made
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
        """None if csc cannot divide the model so."""
        own = [layout.in_form(form) for layout in listed]
        known = self._odd.why(own[0].division)
        if known is not None:
            self._found.refused[own[0].division] = known
            return []
        self._tell(str(own[0].division))
        found: list[MeshCandidate] = []
        try:
            with self._clock.of(TRACE):
                for zero, recompute in self._fixed.ways():
                    possible = [one for one in own if zero < 3 or self._fixed.zero is not None or are_several(one)]
                    found += self._problems.bounded(possible, [(zero, recompute)], self.made + len(found))
        except CscError as error:  # or microbatches of this size
            self._odd.note(error)
            self._found.refused[own[0].division] = self._odd.why(own[0].division) or str(error)
            return []
        self.made += len(found)
        return found

    def recomputed(self, one: MeshCandidate) -> list[MeshCandidate]:
        """See the module."""
        self.made += 1
        return self._problems.bounded([one.layout], [(one.options.zero, SELECTIVE)], self.made)

    def told(self, asked: Sequence[MeshLayout]) -> dict[str, str]:
        """Why there is none, by division; but for the form or the microbatch where these make no difference."""
        samples, refused = {layout.division.samples for layout in asked}, self._found.refused
        told = {}
        for division, why in refused.items():
            forms = (PLAIN, *self._forms(division))
            if all(refused.get(replace(division, form=form)) == why for form in forms):
                division = replace(division, form=PLAIN)
            alike = {refused.get(replace(division, samples=each)) for each in samples} == {why}
            told[str(division) if alike else f"{division} with microbatches of {division.samples}"] = why
        return told
