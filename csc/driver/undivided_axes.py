"""Numbers of ranks that are known not to divide the layers of a component.

    UndividedAxes(context)                  context: components whose tokens are shared out, which have no tp
    .note(error)                            what csc said of a division
    .why(division) -> sentence or None      of this one, or another that divides a component so; None: nothing is known

Which of its dimensions divide depends on a component and its number of ranks alone, not on the form, nor on samples:
where a language model has 14,336 hidden features and 8 heads, none of six forms of tp=3, nor of tp=6, has to be traced.
"""

from __future__ import annotations

from collections.abc import Collection

from csc.errors import CscError
from csc.passes.tensor import Indivisible, OddAxis
from csc.planning.meshes import MeshDivision


class UndividedAxes:
    """See the module."""

    def __init__(self, context: Collection[str]) -> None:
        self._context = context
        self._axes: dict[str, list[OddAxis]] = {}

    def note(self, error: CscError) -> None:
        if not isinstance(error, Indivisible):
            return
        for component, axes in error.axes.items():
            own = self._axes.setdefault(component, [])
            own += [axis for axis in axes if not axis.why and axis not in own]

    def why(self, division: MeshDivision) -> str | None:
        for component, axes in self._axes.items():
            tp = dict(division.form.own).get(component, division.tp)
            odd = next((axis for axis in axes if not axis.divides(tp)), None)
            if odd is not None and component not in (*division.form.spread, *self._context):
                return f"{odd.size} {odd.what} of {odd.parameter} ({component}) cannot be divided by tp={tp}"
        return None
