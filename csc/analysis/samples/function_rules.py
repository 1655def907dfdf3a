"""Rules of functions with a backward of their own (csc.kernels.own_gradient), for following samples.

The gradient of a batch's loss at its rows is that of its microbatches, one behind the other; at what is the same for
every batch it is the sum of theirs; and at a sum over samples it is the same for all. What the backward of a function
makes of it must be that again for its inputs. The loss of a microbatch is weighted before its backward starts, so
gradients that come in are those of the batch, not shares of them.

    incoming_rule, own_gradient_rule, hooked_rule        see csc.analysis.samples.rules
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from csc.analysis.samples.arithmetic_rules import is_zero
from csc.analysis.samples.operands import of
from csc.analysis.samples.propagation import SamplePropagation
from csc.analysis.samples.states import (
    NONE,
    Lost,
    Mixed,
    NewTensor,
    PartsOfSum,
    RowNumbers,
    SampleRows,
    State,
    Terms,
    Whole,
    times,
)


def incoming_rule(following: SamplePropagation, node: fx.Node) -> State:
    """The gradient of the value that a function gave."""
    return _of_gradient(of(following, node.args[0]))


def own_gradient_rule(following: SamplePropagation, node: fx.Node) -> State:
    """Its results are the outputs (csc.analysis.samples.layer_rules.item_rule): here it is seen to what the backward
    does.
    """
    _, inputs, gradients = node.args[:3]
    for value, gradient in zip(inputs, gradients):  # type: ignore[arg-type]
        if is_zero(gradient) or not isinstance(gradient, fx.Node):
            continue
        if not _agree(_of_gradient(of(following, value)), of(following, gradient)):
            raise Lost("has a backward that gives no gradient for each sample, or for what all share no sum of them")
    return NewTensor()


def hooked_rule(following: SamplePropagation, node: fx.Node) -> State:
    return of(following, node.args[0])


def _of_gradient(value: State) -> State:
    """What the gradient of a value is to the samples: one over all powers of counts that the value is multiplied by."""
    if isinstance(value, SampleRows):
        return replace(value, powers=times(NONE, value.powers, -1))
    if isinstance(value, Whole):
        return PartsOfSum(times(NONE, value.powers, -1))
    if isinstance(value, PartsOfSum):
        return Whole(times(NONE, value.powers, -1))
    if isinstance(value, Terms):
        raise Lost("has a backward for terms of the loss that are divided by different numbers")
    if isinstance(value, RowNumbers | Mixed):
        raise Lost("has a backward for the numbers of samples")
    return value


def _agree(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, SampleRows) and isinstance(found, SampleRows):
        same = wanted.axis[1] * wanted.count == found.axis[1] * found.count
        return wanted.axis[0] == found.axis[0] and same and wanted.powers == found.powers
    return bool(wanted == found)
