"""Calls whose result may take the place of an operand in memory, to the same bits.

WAYS        how they are written then: `a.mul_(b)`, as a METHOD, or `aten.silu_backward.grad_input(a, b, grad_input=a)`
EITHER      of these, those whose operands may change places
OWN         further calls whose result is memory of its own, which no operand shares
MAY_BE_OPERANDS     calls that may return an operand itself, though their types in torch do not say so

    written(node) -> Node       the operand that a call marked as `in_place` writes over: its first
    block(node) -> Node         the call, or the placeholder, that first made the memory of a value
"""

from __future__ import annotations

from torch import fx

from csc.analysis.operators.views import maker
from csc.ir.graph import METHOD

WAYS = dict.fromkeys((
    "aten::add.Tensor", "aten::cos", "aten::div.Scalar", "aten::div.Tensor", "aten::exp", "aten::mul.Scalar",
    "aten::mul.Tensor", "aten::neg", "aten::pow.Tensor_Scalar", "aten::rsqrt", "aten::sigmoid", "aten::sin",
    "aten::sub.Tensor", "aten::tanh",
), METHOD) | {
    "aten::_log_softmax": "out", "aten::_log_softmax_backward_data": "out", "aten::gelu_backward": "grad_input",
    "aten::sigmoid_backward": "grad_input", "aten::silu_backward": "grad_input", "aten::tanh_backward": "grad_input",
}  # fmt: skip
EITHER = frozenset({"aten::add.Tensor", "aten::mul.Tensor"})
OWN = frozenset({
    "aten::addmm", "aten::bmm", "aten::cat", "aten::clone", "aten::mean.dim", "aten::mm", "aten::nll_loss_backward",
    "aten::sum.dim_IntList",
})  # fmt: skip
MAY_BE_OPERANDS = frozenset({
    "aten::alpha_dropout", "aten::conj_physical", "aten::dropout", "aten::feature_alpha_dropout",
    "aten::feature_dropout", "aten::type_as",
})  # fmt: skip


def written(node: fx.Node) -> fx.Node:
    """See the module."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def block(node: fx.Node) -> fx.Node:
    """See the module. What is written in place is in the memory of what was there before."""
    made = maker(node)
    while made.meta.get("in_place"):
        made = maker(written(made))
    return made
