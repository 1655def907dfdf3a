"""Samples whose rows are sorted by the experts that work on them, group by group, and put back where they were.

sorted_rows(states, node) -> State | None        what such a call gives; None of any other call
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from csc.analysis.operators.table import shape_of
from csc.analysis.routing import TOKENS, SortedRows, follow, positions
from csc.analysis.samples.states import ALONG_SAMPLES, Mixed, SampleRows, SortedSamples, State, Whole
from csc.ir import graph as g

BEGIN = {"aten::sort", "aten::argsort", "aten::histc"}  # to sort rows, or to count them


def sorted_rows(states: Mapping[fx.Node, State], node: fx.Node) -> State | None:
    """Each row's result is its own, whichever others are sorted with it, as csc.analysis.routing finds: so samples stay
    apart. Other operands are the same for every batch, or the numbers of the rows that an order is inverted with.
    """
    given = {one: states[one] for one in node.all_input_nodes}
    known = {one: state.found for one, state in given.items() if isinstance(state, SortedSamples)}
    were = [state.rows for state in given.values() if isinstance(state, SortedSamples)]
    rows = [*were, *(state for state in given.values() if isinstance(state, SampleRows))]
    if not rows or not (known or _begins(node)):
        return None
    before = rows[0]

    def dims(one: fx.Node) -> tuple[int, ...]:
        state = given.get(one)
        if isinstance(state, SampleRows):
            return (state.axis[0],)
        return (0,) if isinstance(state, SortedSamples) or one is node else ()

    rest = [one for one, state in given.items() if not isinstance(state, SortedSamples | SampleRows)]
    fixed = all(given[one] == Whole() or one is positions(node) for one in rest)
    behind = all(_one_behind_the_other(one, state) for one, state in given.items() if isinstance(state, SampleRows))
    alike = behind and all(one.count == before.count and not one.powers for one in rows)
    found = follow(node, known, dims) if fixed and alike else ALONG_SAMPLES
    if found == TOKENS:
        return before
    if isinstance(found, SortedRows):
        return SortedSamples(found, before)
    return Mixed(node, found or ALONG_SAMPLES) if known else None


def _one_behind_the_other(node: fx.Node, rows: SampleRows) -> bool:
    """Whether the rows of a sample are, and in front of those of the next."""
    dim, inner = rows.axis
    return dim == 0 and shape_of(node)[0] == inner * rows.count


def _begins(node: fx.Node) -> bool:
    """A mask is not sorted by experts: what puts its rows in order picks them (csc.analysis.samples.move_rules)."""
    values = node.args[0] if g.op_name(node) in BEGIN else None
    return isinstance(values, fx.Node) and values.meta["val"].dtype is not torch.bool
