"""Calls that make a tensor in a size that they name.

FILLED: every entry is the same number                           NEW: of the type of an operand (`x.new_zeros(..)`)
FACTORIES: of no operand, and known without a batch              filled_with(node): the number that all entries are
SIZES_READ: made for the sizes of an operand alone               SIZE_NUMBERS: those that are numbers
OF_VALUES: whose size, or number, is a matter of values          RULES: see csc.analysis.operators.table
MADE: all of them, whatever their entries are
"""

from __future__ import annotations

from typing import Any

from torch import fx

from csc.analysis.operators.relation import Call, End, Rule, Use
from csc.ir import graph as g

FILLED = {f"aten::{name}" for name in ("full", "zeros", "ones", "new_full", "new_zeros", "new_ones")}
NEW = {f"aten::new_{name}" for name in ("empty", "zeros", "ones", "full")}
FACTORIES = {f"aten::{name}" for name in ("full", "zeros", "ones", "scalar_tensor", "arange")}
SIZE_NUMBERS = {"aten::sym_size", "aten::sym_numel"}
SIZES_READ = SIZE_NUMBERS | {f"aten::{name}_like" for name in ("zeros", "ones", "empty", "rand", "randn")}
OF_VALUES = {
    f"aten::{name}" for name in ("item", "_local_scalar_dense", "nonzero", "nonzero_numpy", "argwhere", "_unique2")
}  # fmt: skip
COUNTED = {"aten::arange": "end"}  # by the argument that says how many there are
MADE = FILLED | NEW | {f"aten::{name}" for name in ("empty", "rand", "randn", "scalar_tensor")}


def filled_with(node: fx.Node) -> Any:
    """The number (or the call that makes it) that all entries of a call's result are; None if the call names none."""
    kind = g.short_op(node).removeprefix("new_").removesuffix("_like") if node.op == "call_function" else ""
    if kind in ("zeros", "ones"):
        return int(kind == "ones")
    if kind in ("full", "scalar_tensor"):
        return g.bind(node)["s" if kind == "scalar_tensor" else "fill_value"]
    return None


def typed(call: Call) -> list[Use]:
    """The operand is looked at for its type alone."""
    return [Use(call.first(), (None,) * len(call.out), End("unread"))]


RULES: dict[str, Rule] = dict.fromkeys(NEW, typed)
SIZES = dict.fromkeys(NEW, "size")
