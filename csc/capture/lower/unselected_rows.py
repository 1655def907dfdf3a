"""What rows that a mask leaves out may do to others: nothing, unless they come to hold what is no number.

Terms: see csc.capture.lower.masked_index. Such rows have a gradient of 0, and 0 times infinity is no number: a layer's
weight, which adds up over all rows, would have it too. So they hold zeros from the selection on, and again wherever
a call may make something infinite of them.

    is_only_moved(selection) -> bool     it is read by losses and writes alone, which do not compute with such rows
    stays_finite(call) -> bool           it gives numbers, and a gradient, for any rows of numbers
"""

from __future__ import annotations

from torch import fx

from csc.analysis.operators.moves import COPIES, RESHAPES
from csc.analysis.operators.pointwise import is_pointwise
from csc.ir import graph as g

READS_SELECTED = {  # as which arguments
    "aten::cross_entropy_loss": (0, 1),
    "aten::index_put": (2,),
    "aten::masked_scatter": (2,),
    "aten::index_add": (2, 3),
}
FINITE = {
    f"aten::{name}"
    for name in (
        "add", "sub", "rsub", "mul", "neg", "abs", "relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu",
        "softplus", "sin", "cos", "clamp", "maximum", "minimum", "where", "masked_fill", "dropout", "native_dropout",
    )
}  # fmt: skip


def is_only_moved(selection: fx.Node) -> bool:
    """See the module."""
    for user in selection.users:
        name = g.op_name(user)
        at = [place for place, one in enumerate(user.args) if one is selection]
        if name == "aten::sym_size" or (at and set(at) <= set(READS_SELECTED.get(name, ()))):
            continue
        if name not in RESHAPES | COPIES or not is_only_moved(user):
            return False
    return True


def stays_finite(call: fx.Node) -> bool:
    """See the module. Whole powers are as good as products; what is no pointwise call adds up, or normalises."""
    name = g.op_name(call)
    value = g.tensor_value(call)
    if value is None or not (value.is_floating_point() or value.is_complex()):
        return True
    if name == "aten::pow":
        power = call.args[1]
        return isinstance(power, int) and power >= 1
    return not is_pointwise(call) or name in FINITE | COPIES
