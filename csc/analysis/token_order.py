"""Whether calls on tokens meet them in one order: what a reshape joins with a token, and tokens sorted by expert.

Terms: a *place* is the tokens [start, stop) of the sequence that a value has. A *step* is how many neighbours in the
dimension that counts tokens belong to one of them: 1, unless a reshape has joined tokens with what stood behind them.

    order = TokenOrder(dims)           dims(node): which dimensions count tokens
    order.step(node, place)            None if no single dimension counts tokens, or not in their order
    order.mixed(node, place)           whether a call's operands have their tokens in different orders
    order.follow(node)                 as csc.analysis.routing.follow
    order.keep(node, place, found)     of a call that was followed; False if it combines tokens with others
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from csc.analysis.operators.table import RESHAPES, reshaped
from csc.analysis.routing import TOKENS, SortedRows, follow
from csc.ir import graph as g

Place = tuple[int, int]


class TokenOrder:
    """Of the values of one graph."""

    def __init__(self, dims: Callable[[fx.Node], tuple[int, ...]]) -> None:
        self._dims = dims
        self._steps: dict[fx.Node, int | None] = {}
        self._moved: dict[fx.Node, SortedRows] = {}  # those whose tokens are sorted by expert

    def follow(self, node: fx.Node) -> SortedRows | str | None:
        """What becomes of tokens that are sorted by expert; None for a call that has none."""
        return follow(node, self._moved, self._dims)

    def mixed(self, node: fx.Node, place: Place) -> bool:
        """Whether a call's operands have their tokens in different orders."""
        return len({step for used in node.all_input_nodes if (step := self.step(used, place)) is not None}) > 1

    def keep(self, node: fx.Node, place: Place, found: SortedRows | str) -> bool:
        """Rows that a sort picks have their tokens where the sorted keys had theirs, and so have rows put back."""
        if isinstance(found, SortedRows):
            self._moved[node] = found
        known = [self._moved[used] for used in node.all_input_nodes if used in self._moved]
        sort = next((one.order for one in known if one.order is not None), None)
        step = None if sort is None else self.step(sort.args[0], place)
        if found == TOKENS:
            self._steps[node] = step
            return True
        each = next((one.each for one in known if one.kind == "tokens_of"), 1)
        steps = [own for used in node.all_input_nodes if (own := self.step(used, place)) is not None]
        return not known or all(own * each == step for own in steps)

    def step(self, node: Any, place: Place) -> int | None:
        """How many neighbours belong to one token."""
        if not isinstance(node, fx.Node) or g.tensor_value(node) is None or len(self._dims(node)) != 1:
            return None
        if node in self._moved:
            return None
        if node not in self._steps:
            self._steps[node] = self._step_of(node, place)
        return self._steps[node]

    def _step_of(self, node: fx.Node, place: Place) -> int | None:
        (dim,), shape, length = self._dims(node), node.meta["val"].shape, place[1] - place[0]
        made: Any = node.args[0] if node.target is operator.getitem else node
        operands = [used for used in made.all_input_nodes if self._dims(used)]
        if g.op_name(node) in RESHAPES and len(operands) == 1 and len(self._dims(operands[0])) == 1:
            before = self.step(operands[0], place)
            if before is None:
                return None
            axis = reshaped(operands[0].meta["val"].shape, shape, (self._dims(operands[0])[0], before), length)
            return axis[1] if axis is not None and axis[0] == dim else None
        if shape[dim] == length:
            return 1
        found = {step for used in operands if (step := self.step(used, place)) is not None}
        return found.pop() if len(found) == 1 else None
