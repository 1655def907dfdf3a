"""Calls that draw random numbers.

is_random(node): from torch's generator        draws(node): or from a seed that they are given
"""

from __future__ import annotations

import torch
from torch import fx

from csc.ir import graph as g
from csc.torch_private.exported import OpOverload

DROPOUTS = frozenset({"aten::native_dropout", "aten::dropout"})  # a decision for each entry
FILLED_AT_RANDOM = frozenset({"aten::rand", "aten::randn", "aten::rand_like", "aten::randn_like"})


def is_random(node: fx.Node) -> bool:
    """True for ops that draw from the random generator."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if g.op_name(node).startswith("aten::scaled_dot_product"):
        arguments = g.bind(node)
        return bool(arguments.get("dropout_p", 0.0))
    return True


def draws(node: fx.Node) -> bool:
    """True for a random op and for one that takes its numbers from a seed: a value of its own in every region."""
    return is_random(node) or g.op_name(node) in g.SEEDED
