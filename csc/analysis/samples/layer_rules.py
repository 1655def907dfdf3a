"""Rules of layers and of calls with several results, for following samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from csc.analysis.operators.table import RECURRENT, shape_of
from csc.analysis.samples.operands import of
from csc.analysis.samples.propagation import SamplePropagation
from csc.analysis.samples.states import EVERY_OTHER, UNKNOWN, Lost, NewTensor, RowNumbers, SampleRows, State, Whole
from csc.ir import graph as g


def attention_rule(following: SamplePropagation, node: fx.Node) -> State:
    """Samples apart; those packed in one sequence are kept apart by a mask that the model's own code made of them."""
    bound = g.bind(node)
    query, mask = of(following, bound["query"]), of(following, bound.get("attn_mask"))
    along = len(shape_of(node)) - 2
    if isinstance(query, SampleRows) and query.axis[0] == along and isinstance(mask, NewTensor):
        if any(of(following, bound[which]) != query for which in ("key", "value")):
            raise Lost(EVERY_OTHER)
        return query
    return following.by_links(node)


def batch_norm_rule(following: SamplePropagation, node: fx.Node) -> State:
    """By running statistics samples stay apart."""
    bound = g.bind(node)
    state = of(following, bound["input"])
    if bound.get("training") or bound.get("running_mean") is None:
        raise Lost("normalises by statistics of all samples")
    if any(of(following, one) != Whole() for one in node.all_input_nodes if one is not bound["input"]):
        raise Lost(EVERY_OTHER)
    if not isinstance(state, SampleRows) or state.axis[0] == 1 or state.powers:
        raise Lost(UNKNOWN)
    return state


def recurrent_rule(following: SamplePropagation, node: fx.Node) -> State:
    """Each sample has a state of its own, which starts as zeros or as rows of samples."""
    bound = g.bind(node)
    if "batch_sizes" in bound or "input" not in bound:
        raise Lost(UNKNOWN)
    state, along = of(following, bound["input"]), 0 if bound["batch_first"] else 1
    if not isinstance(state, SampleRows) or state.axis != (along, 1) or state.powers:
        raise Lost(UNKNOWN)
    starts: Any = bound["hx"]
    for start in starts if isinstance(starts, (list, tuple)) else [starts]:
        found = of(following, start)
        if found != replace(state, axis=(1, 1)):
            raise Lost(UNKNOWN)
    if any(of(following, weight) != Whole() for weight in bound["params"]):
        raise Lost(EVERY_OTHER)
    return state


def item_rule(following: SamplePropagation, node: fx.Node) -> State:
    """One of several results; of tensors that were broadcast together each is its own operand, and so are the outputs
    of a function with a backward of its own.
    """
    several: Any = node.args[0]
    if g.op_name(several) == "csc::own_gradient":
        return of(following, several.args[0][node.args[1]])
    if g.op_name(several) in RECURRENT and node.args[1]:
        state = of(following, several)  # what every layer ends with: [layers, samples, width]
        return replace(state, axis=(1, 1)) if isinstance(state, SampleRows) else state
    if g.op_name(several) != "aten::broadcast_tensors":
        return of(following, several)
    operand: fx.Node = several.args[0][node.args[1]]
    state = of(following, operand)
    if isinstance(state, SampleRows | RowNumbers):
        return replace(state, axis=(state.axis[0] + len(shape_of(node)) - len(shape_of(operand)), state.axis[1]))
    return state


def broadcast_rule(following: SamplePropagation, node: fx.Node) -> State:
    """Looked at one by one, as its results are taken."""
    return NewTensor()
