"""Rules of loss functions for following samples: what they are a sum of, and what it is divided by.

LOSS_RULES: {operation: rule}        see csc.analysis.samples.rules
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from csc.analysis.operators.table import CLASSES, ELEMENTS, LABELS, SAMPLES, SEQUENCES
from csc.analysis.samples.operands import uses_of
from csc.analysis.samples.propagation import SamplePropagation
from csc.analysis.samples.states import (
    ALONG_SAMPLES,
    EVERY_OTHER,
    NOT_LINEAR,
    UNKNOWN,
    Count,
    Lost,
    NewTensor,
    PartsOfSum,
    SampleRows,
    State,
    Whole,
    rows_of,
)
from csc.ir import graph as g

NONE, MEAN, SUM = 0, 1, 2  # values of ATen's `reduction` argument


def _labels(following: SamplePropagation, node: fx.Node) -> State:
    """Cross entropy: a mean over the labels that are not ignored, or over their weights."""
    bound = g.bind(node)
    logits, target, weight = bound["self"], bound["target"], bound.get("weight")
    state, own = following.states[logits], following.states[target]
    if not isinstance(state, SampleRows) or not isinstance(own, SampleRows | NewTensor):
        raise Lost(UNKNOWN if isinstance(state, SampleRows | NewTensor) else NOT_LINEAR)
    if isinstance(weight, fx.Node) and following.states[weight] != Whole():
        raise Lost("weighs classes by values of the batch")
    rows = replace(state, axis=_walked(following, node).axis)
    if bound["reduction"] != MEAN or target.meta["val"].dtype.is_floating_point:
        return _reduced(bound["reduction"], rows)
    if any(one not in following.of_batch for one in (target, weight) if isinstance(one, fx.Node)):
        raise Lost("is a mean over labels that are not known from the batch alone")
    return PartsOfSum(frozenset({(Count("labels", node.name), -1)}))


def _walked(following: SamplePropagation, node: fx.Node) -> SampleRows:
    """The samples of all operands, which the loss must walk along together; the axis is that of its terms."""
    found: Any = None
    uses = uses_of(node)
    for use in uses:
        state = following.states[use.node]
        if isinstance(state, SampleRows):
            walk: Any = use.ends[state.axis[0]].walk
            if walk is None or walk == CLASSES:
                raise Lost(ALONG_SAMPLES)
            if state.powers:
                raise Lost(NOT_LINEAR)
            moved = replace(state, axis=(walk, state.axis[1]))
            found = moved if found is None else following.together(found, moved)
        elif not isinstance(state, NewTensor) and state != Whole():
            raise Lost(NOT_LINEAR)
    if found is None:
        raise Lost(UNKNOWN)
    for use in uses:
        along = [dim for dim, end in use.ends.items() if end.walk == found.axis[0]]
        if following.states[use.node] == Whole() and any(following._varies(use.node, dim) for dim in along):
            raise Lost(EVERY_OTHER)
    return found


def _terms(following: SamplePropagation, node: fx.Node) -> State:
    """A term for each pair of entries, each sample, or each sequence."""
    return _reduced(g.bind(node)["reduction"], _walked(following, node))


def _reduced(reduction: int, rows: SampleRows) -> State:
    if reduction == MEAN:
        return PartsOfSum(frozenset({(rows_of(rows.entry), -1)}))
    return rows if reduction == NONE else PartsOfSum()


LOSS_RULES: dict[str, Callable[[SamplePropagation, fx.Node], State]] = {
    **dict.fromkeys(LABELS, _labels),
    **dict.fromkeys((*ELEMENTS, *SAMPLES, *SEQUENCES), _terms),
}
