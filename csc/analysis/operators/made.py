"""Calls that make a tensor in a size that they name.

FILLED: every entry is the same number                           NEW: of the type of an operand (`x.new_zeros(..)`)
MADE: all of them, whatever their entries are                    RULES: see csc.analysis.operators.table
"""

from __future__ import annotations

from csc.analysis.operators.relation import Call, End, Rule, Use

FILLED = {f"aten::{name}" for name in ("full", "zeros", "ones", "new_full", "new_zeros", "new_ones")}
NEW = {f"aten::new_{name}" for name in ("empty", "zeros", "ones", "full")}
MADE = FILLED | NEW | {f"aten::{name}" for name in ("empty", "rand", "randn", "scalar_tensor")}


def typed(call: Call) -> list[Use]:
    """The operand is looked at for its type alone."""
    return [Use(call.first(), (None,) * len(call.out), End("unread"))]


RULES: dict[str, Rule] = dict.fromkeys(NEW, typed)
SIZES = dict.fromkeys(NEW, "size")
