"""Rules of loss functions for following samples: what they are a sum of, and what it is divided by.

LOSS_RULES: {operation: rule}        see csc.analysis.samples.rules
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from csc.analysis.links import shape_of
from csc.analysis.samples.propagation import (
    ALONG_SAMPLES,
    EVERY_OTHER,
    NOT_LINEAR,
    UNKNOWN,
    Count,
    Following,
    Lost,
    NewTensor,
    PartsOfSum,
    SampleRows,
    State,
    Whole,
)
from csc.ir import graph as g

NONE, MEAN, SUM = 0, 1, 2  # values of ATen's `reduction` argument

LABELS = ("aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::nll_loss", "aten::nll_loss2d")
ELEMENTS = ("aten::mse_loss", "aten::l1_loss", "aten::smooth_l1_loss", "aten::huber_loss",
            "aten::binary_cross_entropy", "aten::binary_cross_entropy_with_logits", "aten::kl_div",
            "aten::poisson_nll_loss", "aten::soft_margin_loss", "aten::hinge_embedding_loss",
            "aten::margin_ranking_loss")  # fmt: skip
SAMPLES = ("aten::cosine_embedding_loss", "aten::triplet_margin_loss", "aten::multi_margin_loss",
           "aten::multilabel_margin_loss")  # fmt: skip


def _labels(following: Following, node: fx.Node) -> State:
    """Cross entropy: a mean over the labels that are not ignored, or over their weights."""
    bound = g.bind(node)
    logits, target, weight = bound["self"], bound["target"], bound.get("weight")
    state, own = following.states[logits], following.states[target]
    if not isinstance(state, SampleRows) or not isinstance(own, SampleRows | NewTensor):
        raise Lost(UNKNOWN if isinstance(state, SampleRows | NewTensor) else NOT_LINEAR)
    if state.powers or (isinstance(own, SampleRows) and own.powers):
        raise Lost(NOT_LINEAR)
    if isinstance(weight, fx.Node) and following.states[weight] != Whole():
        raise Lost("weighs classes by values of the batch")
    classes = 0 if len(shape_of(logits)) == 1 else 1
    dim, inner = state.axis
    if dim == classes:
        raise Lost(ALONG_SAMPLES)
    same = len(shape_of(target)) == len(shape_of(logits))
    row = dim if same or dim < classes else dim - 1
    if isinstance(own, SampleRows) and (own.axis[0] != row or own.axis[1] * own.count != inner * state.count):
        raise Lost(EVERY_OTHER)
    if bound["reduction"] == NONE:
        return replace(state, axis=(dim if dim < classes else dim - 1, inner))
    if bound["reduction"] == SUM:
        return PartsOfSum()
    if target.meta["val"].dtype.is_floating_point:
        return _mean(state)
    if any(one not in following.of_batch for one in (target, weight) if isinstance(one, fx.Node)):
        raise Lost("is a mean over labels that are not known from the batch alone")
    return PartsOfSum(frozenset({(Count("labels", node.name), -1)}))


def _mean(state: SampleRows) -> PartsOfSum:
    return PartsOfSum(frozenset({(Count("rows", state.entry), -1)}))


def _elements(following: Following, node: fx.Node) -> State:
    """A term for each pair of entries."""
    bound = g.bind(node)
    found: Any = None
    whole = max((shape_of(used) for used in node.all_input_nodes), key=len)
    for used in node.all_input_nodes:
        state = following.states[used]
        if isinstance(state, SampleRows):
            if state.powers:
                raise Lost(NOT_LINEAR)
            moved = replace(state, axis=(state.axis[0] + len(whole) - len(shape_of(used)), state.axis[1]))
            found = moved if found is None else following.together(found, moved)
        elif not isinstance(state, NewTensor) and state != Whole():
            raise Lost(NOT_LINEAR)
    if found is None:
        raise Lost(UNKNOWN)
    for used in node.all_input_nodes:
        dim = found.axis[0] - len(whole) + len(shape_of(used))
        if following.states[used] == Whole() and dim >= 0 and following._varies(used, dim):
            raise Lost(EVERY_OTHER)
    return _reduced(bound["reduction"], found)


def _reduced(reduction: int, rows: SampleRows) -> State:
    return rows if reduction == NONE else _mean(rows) if reduction == MEAN else PartsOfSum()


def _samples(following: Following, node: fx.Node) -> State:
    """A term for each sample, in dimension 0 of all operands."""
    states = [following.states[used] for used in node.all_input_nodes]
    rows = [state for state in states if isinstance(state, SampleRows)]
    if not rows or any(state.axis != rows[0].axis or state.axis[0] or state.powers for state in rows):
        raise Lost(EVERY_OTHER)
    if any(not isinstance(state, SampleRows | NewTensor) and state != Whole() for state in states):
        raise Lost(NOT_LINEAR)
    return _reduced(g.bind(node)["reduction"], rows[0])


def _sequences(following: Following, node: fx.Node) -> State:
    """`ctc_loss`: log probabilities [T, samples, classes]; a mean of terms, each divided by the sample's own length."""
    state = following.states[node.args[0]]  # type: ignore[index]
    if not isinstance(state, SampleRows) or state.powers:
        raise Lost(UNKNOWN)
    if state.axis[0] != 1:
        raise Lost(ALONG_SAMPLES)
    return _reduced(g.bind(node)["reduction"], replace(state, axis=(0, state.axis[1])))


LOSS_RULES: dict[str, Callable[[Following, fx.Node], State]] = {
    **dict.fromkeys(LABELS, _labels),
    **dict.fromkeys(ELEMENTS, _elements),
    **dict.fromkeys(SAMPLES, _samples),
    "aten::ctc_loss": _sequences,
}
