"""Views of values on shards, and of what shards are taken from.

Views(mode).fit(val, shape) -> bool     whether a layout can be seen in a shape without a copy
moved(node) -> {nodes}                  a value, and what it is a mere view or copy of
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.execution import is_view
from csc.analysis.operators.table import COPIES, SIZED_VIEWS
from csc.ir import graph as g
from csc.torch_private.traces import FakeTensorMode


class Views:
    """mode: of the values."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, bool] = {}

    def fit(self, val: torch.Tensor, shape: Sequence[int]) -> bool:
        """See the module."""
        key = (tuple(val.shape), val.stride(), *shape)
        if key not in self._known:
            try:
                with self._mode:
                    val.view(shape)
                self._known[key] = True
            except (RuntimeError, ValueError):
                self._known[key] = False
        return self._known[key]


def moved(node: fx.Node) -> set[fx.Node]:
    """See the module."""
    found: set[fx.Node] = set()
    here: Any = node
    while isinstance(here, fx.Node):
        found.add(here)
        moves = here.op == "call_function" and (is_view(here) or g.op_name(here) in SIZED_VIEWS | COPIES)
        here = here.args[0] if moves else None
    return found
