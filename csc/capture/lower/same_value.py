"""Whether two values of a graph are the same, as far as how they are computed tells.

same_value(one, other, shaped) -> bool
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.table import CASTS, COPIES, SLICE, UNSQUEEZED, is_pointwise
from csc.ir import graph as g

END = sys.maxsize  # of a slice that has none
_ALL = {(start, end, step) for start in (0, None) for end in (END, None) for step in (1, None)}


def same_value(one: Any, other: Any, shaped: bool = True) -> bool:
    """Whether they are made by the same calls of the same values. shaped: False: but for the shapes in which the same
    entries lie. What is made of several values is as their shapes have them broadcast, and what works along a dimension
    as that has it: those are looked at with their shapes. Two draws of random numbers are never the same.
    """
    return _same(one, other, shaped, {})


def _same(one: Any, other: Any, shaped: bool, known: dict[Any, bool]) -> bool:
    """known: what was found of pairs before, which many values may be made of."""
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return bool(one == other)
    if not shaped:
        one, other = _unshaped(one), _unshaped(other)
    if one is other:
        return True
    if one.op != "call_function" or one.target != other.target or len(one.args) != len(other.args):
        return False
    key = one, other, shaped
    if key not in known:
        draws = torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ())
        inner = shaped or len(one.all_input_nodes) > 1 or not is_pointwise(one)
        alike = not draws and one.kwargs == other.kwargs
        known[key] = alike and all(_same(*pair, inner, known) for pair in zip(one.args, other.args))
    return known[key]


def _unshaped(node: Any) -> fx.Node:
    """What a value is laid out from."""
    while g.op_name(node) in UNSQUEEZED | COPIES - CASTS or _is_all(node):
        node = node.args[0]
    found: fx.Node = node
    return found


def _is_all(node: fx.Node) -> bool:
    """Whether it is a slice of a whole dimension, as `x[:, None]` writes one."""
    return g.op_name(node) == SLICE and (*node.args[2:], *(None, None, None)[len(node.args) - 2 :]) in _ALL
