"""What rows that a mask leaves out may do to others: nothing, unless they come to hold what is no number.

Terms: see csc.capture.lower.masked_index. Such rows have a gradient of 0, and 0 times infinity is no number: a layer's
weight, which adds up over all rows, would have it too. So they hold zeros from the selection on, and again wherever
a call may make something infinite of them. They may be no numbers in the model itself: what attention makes of
padding. Logits are many, so what a loss over classes reads is made of zeros, by the layer that makes it.

    is_only_moved(selection) -> bool     it is read by writes alone, which do not compute with such rows, or has none
    made_by(selected, selection, mask) -> [calls] or None      a linear layer and copies; the last gives what is
                                         selected from. None: others read them, or more than losses the selection
    stays_finite(call) -> bool           it gives numbers, and a gradient, for any rows of numbers
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from csc.analysis.operators.table import COPIES, RESHAPES, is_pointwise
from csc.ir import graph as g

LOSSES = {"aten::cross_entropy_loss": (0, 1), "aten::nll_loss_nd": (0, 1)}  # what they read as which arguments
WRITES = {
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
    return _is_only_read(selection, WRITES if _has_numbers(selection) else WRITES | LOSSES)


def made_by(selected: fx.Node, selection: fx.Node, mask: fx.Node) -> list[fx.Node] | None:
    """See the module."""
    rows = selected.meta["val"].dim() - 1
    if not _is_only_read(selection, LOSSES) or len(selected.users) > 1 or mask.meta["val"].dim() != rows:
        return None
    found = [selected]
    while g.op_name(found[0]) in COPIES | RESHAPES:
        before: fx.Node = found[0].args[0]  # type: ignore[assignment]
        if len(before.users) > 1 or str(before.meta["val"].shape[-1:]) != str(selected.meta["val"].shape[-1:]):
            return None
        found.insert(0, before)
    return found if g.op_name(found[0]) == "aten::linear" else None


def _is_only_read(selection: fx.Node, by: Mapping[str, tuple[int, ...]]) -> bool:
    for user in selection.users:
        name = g.op_name(user)
        at = [place for place, one in enumerate(user.args) if one is selection]
        if name == "aten::sym_size" or (at and set(at) <= set(by.get(name, ()))):
            continue
        if name not in RESHAPES | COPIES or not _is_only_read(user, by):
            return False
    return True


def _has_numbers(value: fx.Node) -> bool:
    val = value.meta["val"]
    return bool(val.is_floating_point() or val.is_complex())


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
