"""What a traced attention mask says, read off its graph: which keys a query sees, as a union of conjunctions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any, Literal, TypeGuard

import torch
from torch import fx

from csc.analysis.operators.execution import is_random
from csc.analysis.operators.table import AND, COMPARISONS, EXACT_COPIES, NOT, OR, UNSQUEEZED, filled_with
from csc.ir import graph as g

# --- What is known of a graph's values whatever the batch is ---------------------------------------------------------
#
# These are constants, places of keys, and tables that a mask looks up.


def one_number(value: Any) -> float | None:
    """The one number that a scalar or constant node holds; None if there is none."""
    if isinstance(value, (int, float)):
        return float(value)
    constant = folded(value) if isinstance(value, fx.Node) else None
    if constant is None or not constant.numel() or not bool((constant == constant.flatten()[0]).all()):
        return None
    return float(constant.flatten()[0])


def table(node: fx.Node) -> fx.Node | None:
    """The [B, T] or [T] values that a node holds for each query or each key: without views, and without an index that
    counts through all of them.
    """
    while node.op == "call_function":
        name = g.op_name(node)
        source = node.args[0]
        if name in EXACT_COPIES or name in UNSQUEEZED or name == "aten::slice":
            if not isinstance(source, fx.Node) or source.meta["val"].numel() != node.meta["val"].numel():
                return node
        elif name == "aten::index":
            if not _counts_through(node):
                return node
        else:
            return node
        node = source  # type: ignore[assignment]
    return node


def _counts_through(node: fx.Node) -> bool:
    """`x[samples, places]` with both counting from 0 to the end: all of x, in order."""
    source, sizes = node.args[0], node.args[1]
    shape = source.meta["val"].shape  # type: ignore[union-attr]
    if not isinstance(sizes, (list, tuple)) or len(sizes) != len(shape):
        return False
    for given_size, size in zip(sizes, shape):
        value = folded(given_size) if isinstance(given_size, fx.Node) else None
        if value is None or not torch.equal(value.flatten(), torch.arange(size)):
            return False
    return True


def restarting(groups: fx.Node | None) -> fx.Node | None:
    """The positions p if the node numbers their runs, `cumsum(diff(p) != 1)`; None if it is anything else."""
    for name in ("aten::cumsum", "aten::ne", "aten::diff"):
        if groups is None or groups.op != "call_function" or g.op_name(groups) != name:
            return None
        along = g.bind(groups).get("dim", -1)
        if name == "aten::ne" and g.bind(groups).get("other") != 1:
            return None
        if name != "aten::ne" and along not in (-1, groups.meta["val"].dim() - 1):
            return None
        if name == "aten::diff" and g.bind(groups).get("n", 1) != 1:
            return None
        groups = groups.args[0]  # type: ignore[assignment]
    return groups


def slots(node: fx.Node) -> int | None:
    """The constant c if the node is arange + c along keys, whatever the batch; None if it is anything else."""
    value = folded(node)
    if value is None or not value.numel():
        return None
    row = value.flatten() if value.dim() < 2 else value.flatten(0, -2)[0]
    offset = int(row.flatten()[0])
    steps = torch.arange(value.shape[-1]) + offset
    return offset if bool((value == steps).all()) else None


def folded(node: fx.Node) -> torch.Tensor | None:
    """The node's value if it depends on nothing but numbers (no batch, parameter or constant); None otherwise."""
    values: dict[fx.Node, Any] = {}
    stack = [node]
    while stack:
        current = stack[-1]
        if current.op != "call_function" or is_random(current):
            return None
        missing = [used for used in current.all_input_nodes if used not in values]
        if missing:
            stack += missing
            continue
        stack.pop()
        keywords = {key: "cpu" if key == "device" else value for key, value in current.kwargs.items()}
        evaluate: Callable[..., Any] = current.target  # type: ignore[assignment]
        values[current] = evaluate(
            *fx.map_arg(current.args, values.__getitem__), **fx.map_arg(keywords, values.__getitem__)
        )
    return values[node]


# --- What a traced attention mask says, read off its graph: which keys a query sees, as a union of conjunctions ------
#
# Terms
#   condition   one tensor comparison or predicate that concerns queries alone, keys alone, or bounds a key by its query
#   clause      conditions that all have to hold; a mask is the union of its clauses
#   literal     a condition or its negation
#   slot        the place of a key in K and V; a tensor of slots is `arange` plus a constant
#
# A mask node is [.., Tq, Tk]. Operators inside it broadcast from the right, so a node whose last size is 1 speaks of
# queries alone, one whose last but one is 1 (or missing) of keys alone. A comparison of both sides is a bound if the
# side of the keys is slots (`k <= q`, `k > q - window`, `k < prefix[q]`), and a grouping if it is an equality
# (`document[q] == document[k]`). Nothing else is guessed.


MOST_CLAUSES = 8


class Unrecognised(Exception):
    """The mask's graph holds something that has no form as ranges and kinds; the text says what."""


@dataclass(frozen=True)
class KeyBound:
    """lower: slot >= value(query) + shift; else slot < value(query) + shift.

    value: a node [.., Tq, 1]; OWN_PLACE: the query's own index; ZERO: the shift alone.
    """

    lower: bool
    value: fx.Node | Literal["own place", "zero"]
    shift: int


@dataclass(frozen=True)
class Predicate:
    """A bool node about queries ([.., Tq, 1]) or keys ([.., 1, Tk]), or its negation."""

    of: Literal["queries", "keys"]
    node: fx.Node
    negated: bool = False


@dataclass(frozen=True)
class SameGroup:
    """Query and key are of one group: queries [.., Tq, 1] == keys [.., 1, Tk]."""

    queries: fx.Node
    keys: fx.Node


@dataclass(frozen=True)
class OrderBound:
    """A bound that would hold if the tables of two sides counted places: queries [.., Tq, 1], keys [.., 1, Tk].

    Positions that start again in every document do, as long as query and key are of one document.
    """

    queries: fx.Node
    keys: fx.Node
    bound: KeyBound


OWN_PLACE: Literal["own place"] = "own place"
ZERO: Literal["zero"] = "zero"
Condition = KeyBound | Predicate | SameGroup | OrderBound
Clause = frozenset[Condition]
NOTHING: tuple[Clause, ...] = ()
EVERYTHING: tuple[Clause, ...] = (frozenset(),)

_OPPOSITE = {"<=": ">", "<": ">=", ">=": "<", ">": "<=", "==": "!=", "!=": "=="}
_MIRRORED = {"<=": ">=", "<": ">", ">=": "<=", ">": "<", "==": "==", "!=": "!="}


def clauses(node: fx.Node, asked: bool = False) -> tuple[tuple[Clause, ...], bool]:
    """The mask (bool, or floats that are 0 where a key is seen and very negative where not) as a union of clauses; and
    whether it holds only for batches in which every query sees a key.

    A query that sees no key gets zeros; where all its scores are lowered by the same finite number it attends to every
    key instead. A finite mask is therefore recognised only if each query sees something whatever the batch is, or if
    every batch will be `asked`.
    """
    val = node.meta["val"]
    if val.dim() < 2:
        raise Unrecognised(f"a mask of {val.dim()} dimensions")
    if val.dtype.is_floating_point:
        found_clauses, low = _of_bias(node)
        if low == -inf or _each_sees(found_clauses, *_sizes(node)):
            return found_clauses, False
        if not asked or not found_clauses:
            raise Unrecognised(f"{low:.4g} in place of -inf, with which a query that sees no key attends to all")
        return found_clauses, True
    return _simplified(_union(node, negated=False)), False


def _each_sees(found: tuple[Clause, ...], queries: int, keys: int) -> bool:
    """Whether every query sees a key, by bounds that no batch changes; a query is of its own group."""
    ranges = [spans for clause in found if (spans := _spans(clause, queries, keys)) is not None]
    return all(any(low[query] < high[query] for low, high in ranges) for query in range(queries))


def _spans(clause: Clause, queries: int, keys: int) -> tuple[list[int], list[int]] | None:
    """For each query the first of the keys that a clause lets it see for certain, and the one behind the last; None
    if the batch decides.
    """
    low, high = [0] * queries, [keys] * queries
    for condition in clause:
        if isinstance(condition, SameGroup) and table(condition.queries) is table(condition.keys):
            low, high = list(map(max, low, range(queries))), list(map(min, high, range(1, queries + 1)))
        elif isinstance(condition, KeyBound) and (places := _places(condition.value, queries)) is not None:
            shifted = [place + condition.shift for place in places]
            low = list(map(max, low, shifted)) if condition.lower else low
            high = high if condition.lower else list(map(min, high, shifted))
        else:
            return None
    return low, high


def _places(value: Any, queries: int) -> list[int] | None:
    """What a bound is for each query; None if the batch decides."""
    if not isinstance(value, fx.Node):
        return list(range(queries)) if value == OWN_PLACE else [0] * queries
    known = folded(value)
    if known is None or known.numel() not in (1, queries):
        return None
    return [int(place) for place in known.flatten().expand(queries)]


def _of_bias(node: fx.Node) -> tuple[tuple[Clause, ...], float]:
    """Floats: `where(seen, 0, low)`, `where(hidden, low, 0)` or `zeros.masked_fill(hidden, low)`; and what low is."""
    name, bound = g.op_name(node), g.bind(node) if node.op == "call_function" else {}
    if name in EXACT_COPIES or (name == "aten::_to_copy" and g.is_float(node.args[0])):  # type: ignore[arg-type]
        return _of_bias(node.args[0])  # type: ignore[arg-type]
    if name in UNSQUEEZED and _aligned(node):
        return _of_bias(node.args[0])  # type: ignore[arg-type]
    if name == "aten::where":
        first, second = (one_number(bound.get(side)) for side in ("self", "other"))
        if first == 0 and _hides(second):
            return _simplified(_union(bound["condition"], negated=False)), second
        if second == 0 and _hides(first):
            return _simplified(_union(bound["condition"], negated=True)), first
    if name == "aten::masked_fill" and one_number(bound["self"]) == 0 and _hides(low := one_number(bound["value"])):
        return _simplified(_union(bound["mask"], negated=True)), low
    raise Unrecognised(f"a bias made by {name}")


def _hides(value: float | None) -> TypeGuard[float]:
    return value is not None and value <= -1e4


def _union(node: fx.Node, negated: bool) -> tuple[Clause, ...]:
    """The node, or its negation, as clauses."""
    name = g.op_name(node)
    if node.op == "call_function":
        if name in EXACT_COPIES or (name in UNSQUEEZED and _aligned(node)):
            return _union(node.args[0], negated)  # type: ignore[arg-type]
        if name == "aten::_to_copy" and _is_bool(node) and _is_bool(node.args[0]):  # type: ignore[arg-type]
            return _union(node.args[0], negated)  # type: ignore[arg-type]
        if isinstance(value := filled_with(node), (int, float)):
            return EVERYTHING if bool(value) != negated else NOTHING
    sizes = _sizes(node)
    if sizes[0] == 1 or sizes[1] == 1:
        if not _is_bool(node):
            raise Unrecognised(f"numbers made by {name}, where yes or no is expected")
        return (frozenset({Predicate("queries" if sizes[1] == 1 else "keys", node, negated)}),)
    if node.op != "call_function":
        raise Unrecognised("a whole mask given in the batch; give what it is made from (lengths, token types) instead")
    if name in NOT:
        return _union(node.args[0], not negated)  # type: ignore[arg-type]
    if name in AND or name in OR:
        one, other = (_union(argument, negated) for argument in node.args[:2])  # type: ignore[arg-type]
        joined = (name in AND) != negated
        return _conjunction(one, other) if joined else one + other
    if name in ("aten::tril", "aten::triu"):
        return _triangle(node, name, negated)
    if name in COMPARISONS:
        sign = COMPARISONS[name]
        return _comparison(node, _OPPOSITE[sign] if negated else sign)
    raise Unrecognised(f"the operation {name}")


def _conjunction(one: tuple[Clause, ...], other: tuple[Clause, ...]) -> tuple[Clause, ...]:
    if len(one) * len(other) > 64:
        raise Unrecognised("too many alternatives")
    return tuple(a | b for a, b in product(one, other))


def _simplified(found: tuple[Clause, ...]) -> tuple[Clause, ...]:
    """Without clauses that can never hold or that another one contains."""
    found = tuple(_within_documents(clause) for clause in found)
    possible = [clause for clause in dict.fromkeys(found) if not any(_negation(c) in clause for c in clause)]
    kept = tuple(c for c in possible if not any(other < c for other in possible))
    if len(kept) > MOST_CLAUSES:
        raise Unrecognised(f"{len(kept)} alternatives; a mask can have {MOST_CLAUSES}")
    return kept


def _within_documents(clause: Clause) -> Clause:
    """The clause with bounds in place of orders: `position[k] <= position[q]` is `k <= q` where both are of one run of
    positions that count up by one. Unrecognised if the clause does not say so.
    """
    orders = [condition for condition in clause if isinstance(condition, OrderBound)]
    runs = {
        (restarting(table(c.queries)), restarting(table(c.keys))) for c in clause if isinstance(c, SameGroup)
    }  # fmt: skip
    for order in orders:
        query_table, other = table(order.queries), table(order.keys)
        if query_table is None or query_table is not other or (query_table, other) not in runs:
            raise Unrecognised("a comparison of something other than the places of keys")
    return frozenset(c.bound if isinstance(c, OrderBound) else c for c in clause)


def _negation(condition: Condition) -> Condition | None:
    if isinstance(condition, Predicate):
        return Predicate(condition.of, condition.node, not condition.negated)
    return None


def _triangle(node: fx.Node, name: str, negated: bool) -> tuple[Clause, ...]:
    """tril keeps k <= q + diagonal, triu k >= q + diagonal, of what it is applied to."""
    bound = g.bind(node)
    shift = int(bound["diagonal"])
    kept = KeyBound(False, OWN_PLACE, shift + 1) if name == "aten::tril" else KeyBound(True, OWN_PLACE, shift)
    inner = _union(bound["self"], negated)
    if not negated:
        return _conjunction(inner, (frozenset({kept}),))
    return (*inner, frozenset({replace(kept, lower=not kept.lower)}))


def _comparison(node: fx.Node, sign: str) -> tuple[Clause, ...]:
    left, right = node.args[0], node.args[1]
    sides = [_linear(left, +1), _linear(right, -1)]
    keys = [term for side in sides for term in side.keys]
    queries = [term for side in sides for term in side.queries]
    number = sum(side.number for side in sides)
    # keys + queries + number  (sign)  0, each term with its factor of +1 or -1
    if len(keys) != 1 or len(queries) > 1:
        raise Unrecognised(f"a comparison of {len(keys)} terms of keys with {len(queries)} of queries")
    factor, key_node = keys[0]
    if sign in ("==", "!="):
        if sign == "!=" or not queries or number or queries[0][0] == factor:
            raise Unrecognised("an inequality of groups" if sign == "!=" else "an equality of sums")
        return (frozenset({SameGroup(queries[0][1], key_node)}),)
    offset = slots(key_node)
    if offset is None and not queries:
        raise Unrecognised("a comparison of something other than the places of keys")
    if queries and queries[0][0] == factor:
        raise Unrecognised("a comparison of the sum of a query's and a key's place")
    if factor < 0:
        sign, number = _MIRRORED[sign], -number
    # key + number (sign) query, where key is slot + offset, or a table of positions
    lower, shift = sign in (">=", ">"), -number - (offset or 0) + (sign in ("<=", ">"))
    if offset is None:
        return (frozenset({OrderBound(queries[0][1], key_node, KeyBound(lower, OWN_PLACE, shift))}),)
    return (frozenset({KeyBound(lower, queries[0][1] if queries else ZERO, shift)}),)


@dataclass(frozen=True)
class _SignedTerms:
    """Terms with a factor of +1 or -1, and a number."""

    keys: tuple[tuple[int, fx.Node], ...] = ()
    queries: tuple[tuple[int, fx.Node], ...] = ()
    number: int = 0

    def __add__(self, other: _SignedTerms) -> _SignedTerms:
        return _SignedTerms(self.keys + other.keys, self.queries + other.queries, self.number + other.number)


def _linear(value: Any, factor: int) -> _SignedTerms:
    """An integer expression of a mask as a sum of terms of queries and of keys."""
    if isinstance(value, (bool, int)):
        return _SignedTerms(number=factor * int(value))
    if not isinstance(value, fx.Node) or g.is_float(value):
        raise Unrecognised("a comparison of fractions")
    sizes = _sizes(value)
    if sizes == (1, 1) and (number := one_number(value)) is not None:
        return _SignedTerms(number=factor * int(number))
    if sizes[1] == 1:
        return _SignedTerms(queries=((factor, value),))
    if sizes[0] == 1:
        return _SignedTerms(keys=((factor, value),))
    name = g.op_name(value)
    if name in ("aten::add", "aten::sub") and g.bind(value).get("alpha", 1) == 1:
        second = factor if name == "aten::add" else -factor
        return _linear(value.args[0], factor) + _linear(value.args[1], second)
    if name in EXACT_COPIES:
        return _linear(value.args[0], factor)
    raise Unrecognised(f"a comparison of what {name} makes of queries and keys")


def _sizes(node: fx.Node) -> tuple[int, int]:
    """(size along queries, size along keys); 1 for a dimension that is not there."""
    shape = node.meta["val"].shape
    return (int(shape[-2]) if len(shape) > 1 else 1, int(shape[-1]) if len(shape) > 0 else 1)


def _is_bool(node: fx.Node) -> bool:
    return node.meta["val"].dtype == torch.bool


def _aligned(node: fx.Node) -> bool:
    """True if a reshape leaves queries and keys as they are and only adds or drops sizes of 1 before them.

    A batch may so move among the dimensions in front; that no head sees a mask of its own is checked on the whole mask.
    """
    before, after = (list(n.meta["val"].shape) for n in (node.args[0], node))  # type: ignore[union-attr]
    if len(before) < 2 or len(after) < 2 or before[-2:] != after[-2:]:
        return False
    return [size for size in before[:-2] if size != 1] == [size for size in after[:-2] if size != 1]
