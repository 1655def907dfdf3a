"""Calls that select rows by a mask, write to them, or take them in order.

mask_of(call) -> node or None      of `x[mask]` and `x[mask] = ...`
is_scattered(value) -> bool        whether only scatters read it
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from csc.ir import graph as g


def mask_of(node: fx.Node) -> fx.Node | None:
    """The mask of `x[mask]` or `x[mask] = ...`, if that is what a call does."""
    if g.op_name(node) not in ("aten::index", "aten::index_put"):
        return None
    indices: Any = node.args[1]
    first = indices[0] if indices else None
    if not isinstance(first, fx.Node) or any(one is not None for one in indices[1:]):
        return None
    return first if first.meta["val"].dtype in (torch.bool, torch.uint8) else None


def is_scattered(node: fx.Node) -> bool:
    """Whether only scatters read it, which take values in order whatever their shape, or copies for these."""
    return all(
        g.op_name(user) == "aten::masked_scatter"
        or (g.op_name(user) in ("aten::clone", "aten::_to_copy") and is_scattered(user))
        for user in node.users
    )
