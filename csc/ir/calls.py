"""What a model's code called while it was traced, to be compared with what it calls for another batch.

Terms
  call      the name of a torch function, and its arguments as tokens
  token     of an argument: where a tensor came from, a plain value as text, or a size: a number or an expression in the
            symbols of csc.ir.sizes

    alike(traced, others, values) -> bool       whether two runs made the same calls
    to_tree(calls) -> JSON                      Unstorable as of csc.ir.sizes
    from_tree(JSON) -> calls                    ValueError, KeyError or TypeError for a tree that is none
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from csc.ir.sizes import evaluated, expression_from_tree, expression_to_tree

Call = tuple[Any, ...]
EXPRESSION = "expression"
UNKNOWN = "unknown"  # the kind of a tensor that came from nowhere known


def alike(traced: Sequence[Call], others: Sequence[Call], values: Mapping[str, int]) -> bool:
    """Whether calls with these values of the symbols are those of another run, in which all sizes are numbers. A size
    that only values tell (a symbol without one) is the same in both if it has the same name. A tensor of which nobody
    knows where it came from is never the same.
    """
    known: dict[Any, Any] = {}

    def same(mine: Any, its: Any) -> bool:
        if not isinstance(mine, sympy.Basic):
            return bool(mine == its) and not (isinstance(mine, tuple) and mine[0] == UNKNOWN)
        if mine not in known:
            known[mine] = evaluated(mine, values)
        return bool(known[mine] == its) or str(known[mine]) == str(its)

    return len(traced) == len(others) and all(
        len(call) == len(other) and all(map(same, call, other)) for call, other in zip(traced, others)
    )


def to_tree(calls: Sequence[Call]) -> Any:
    """Plain JSON."""
    return [
        [[EXPRESSION, expression_to_tree(one)] if isinstance(one, sympy.Basic) else one for one in call]
        for call in calls
    ]


def from_tree(tree: Any) -> tuple[Call, ...]:
    """The inverse."""
    return tuple(tuple(map(_token, call)) for call in tree)


def _token(tree: Any) -> Any:
    if not isinstance(tree, list):
        return tree
    return expression_from_tree(tree[1]) if tree[0] == EXPRESSION else tuple(tree)
