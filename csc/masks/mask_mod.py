"""FlexAttention's `mask_mod(b, h, q_idx, kv_idx)` as a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from csc import devices
from csc.errors import InputError
from csc.kernels.mask import EVERYTHING, Mask
from csc.masks.builders import INTEGERS, positive
from csc.masks.combine import MOST_CLASSES, begins, bounds, classes, compact, returns

# --- A boolean formula about queries and keys, brought to rules ------------------------------------------------------
#
# Terms
#   atom       what a formula is made of: a predicate of queries alone, of keys alone, or a comparison of a number of
#              the key with a number of the query
#   literal    an atom or its negation, and a choice: for every query a range of keys, or a question to the kind of a
#              key
#   clause     literals that all hold; a formula is the union of its clauses, and a clause becomes one rule
#   numbers    int64 tables [B, Tq] and [B, Tk], or [1, ...] where they are the same for the whole batch
#
# A comparison is a range if the numbers of keys are sorted (`k <= q`, blocks, documents in ascending order) or, for an
# equality, if equal numbers lie together. Otherwise keys with equal numbers are a kind, up to 63. Nothing is Tq x Tk.


MOST_CLAUSES = 64


@dataclass(frozen=True, eq=False)
class Queries:
    """bool [B, Tq]: holds or not, whatever the key."""

    table: torch.Tensor


@dataclass(frozen=True, eq=False)
class KeyTest:
    """bool [B, Tk]: holds or not, whatever the query."""

    table: torch.Tensor


@dataclass(frozen=True, eq=False)
class Compare:
    """keys[b, k] <= queries[b, q], or ==. int64 [B, Tk] and [B, Tq]."""

    op: Literal["<=", "=="]
    keys: torch.Tensor
    queries: torch.Tensor


@dataclass(frozen=True, eq=False)
class Constant:
    """True or False."""

    value: bool


@dataclass(frozen=True, eq=False)
class Not:
    of: Formula


@dataclass(frozen=True, eq=False)
class And:
    one: Formula
    two: Formula


@dataclass(frozen=True, eq=False)
class Or:
    one: Formula
    two: Formula


Formula = Queries | KeyTest | Compare | Constant | Not | And | Or


@dataclass(frozen=True, eq=False)
class _Range:
    """Key k of [lo, hi), int64 [B, Tq] or [B, 1]."""

    lo: torch.Tensor
    hi: torch.Tensor


@dataclass(frozen=True)
class _KeyQuestion:
    """A question to the kind of a key: an atom whose keys do not lie together, or the negation of one."""

    atom: KeyTest | Compare
    holds: bool


_Literal = Queries | _Range | _KeyQuestion
_Clause = tuple[_Literal, ...]


def rules(formula: Formula, queries: int, keys: int) -> Mask:
    """The mask of a formula over queries x keys. InputError if it needs more rules or kinds than a mask has."""
    clauses = _clauses(formula, True, {}, keys)
    kinds = _Kinds(keys)
    lows, highs, admits = [], [], []
    for clause in (_with_ranges(clause, keys) for clause in clauses):
        lo, hi = torch.zeros(1, queries, dtype=torch.int64), torch.full((1, queries), keys)
        for literal in clause:
            if isinstance(literal, _Range):
                lo, hi = torch.maximum(lo, literal.lo), torch.minimum(hi, literal.hi)
        for literal in clause:
            if isinstance(literal, Queries):
                hi = torch.where(literal.table, hi, lo)
        lows.append(lo)
        highs.append(hi)
        admits.append(kinds.admits([literal for literal in clause if isinstance(literal, _KeyQuestion)], queries))
    if not clauses:
        empty = torch.zeros(1, 1, queries, 2, dtype=torch.int32)
        return Mask(empty, None, None, keys)
    table = kinds.table()
    batch = max(len(t) for t in [*lows, *highs, *admits, *([] if table is None else [table])])
    lo, hi, let = (torch.stack([t.expand(batch, queries) for t in column], 1) for column in (lows, highs, admits))
    return compact(torch.stack([lo, hi], -1), None if table is None else let, table, keys)


class _Kinds:
    """Hands out bits: one for the keys that fulfil some predicates, one for every class of keys that is compared."""

    def __init__(self, keys: int) -> None:
        self._keys, self._used, self._all = keys, 0, False
        self._table = torch.zeros(1, keys, dtype=torch.int64)
        self._known: dict[tuple[object, ...], tuple[torch.Tensor, int]] = {}

    def admits(self, asked: list[_KeyQuestion], queries: int) -> torch.Tensor:
        """int64 [B, Tq] or [1, Tq]: the kinds that a clause admits."""
        if not asked:
            self._all = True
            return torch.full((1, queries), EVERYTHING)
        tests = [(literal.atom, literal.holds) for literal in asked if isinstance(literal.atom, Compare)]
        plain = [literal for literal in asked if isinstance(literal.atom, KeyTest)]
        name = (
            frozenset((id(literal.atom), literal.holds) for literal in plain),
            tuple(id(atom.keys) for atom, _ in tests),
        )
        if name not in self._known:
            self._known[name] = self._allot(plain, [atom.keys for atom, _ in tests])
        values, first = self._known[name]
        let = torch.zeros(1, queries, dtype=torch.int64)
        for i, row in enumerate(values):
            holds = [
                ((value <= atom.queries) if atom.op == "<=" else (value == atom.queries)) == good
                for value, (atom, good) in zip(row, tests)
            ]
            bit = 1 << (first + i)
            let = let | (torch.where(reduce(torch.logical_and, holds), bit, 0) if holds else bit)
        return let

    def _allot(self, plain: list[_KeyQuestion], numbers: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        fits = torch.ones(1, self._keys, dtype=torch.bool)
        for literal in plain:
            assert isinstance(literal.atom, KeyTest)
            fits = fits & (literal.atom.table == literal.holds)
        batch = max([len(fits), *map(len, numbers)])
        fits = fits.expand(batch, -1)
        columns = [number.expand(batch, -1) for number in numbers]
        # Keys that do not fulfil the predicates are a class of their own, the last one, and get no bit.
        values, index = classes(*columns) if columns else (torch.zeros(1, 0), torch.zeros_like(fits, dtype=torch.int64))
        first, self._used = self._used, self._used + len(values)
        if self._used > MOST_CLASSES:
            raise InputError(
                f"it tells {self._used} kinds of keys apart, and {MOST_CLASSES} is the limit",
                "the mask",
                "Groups of keys that lie together (documents, spans) need no kinds: order the keys by group",
            )
        self._table = self._table | torch.where(fits, torch.ones_like(index) << (index + first), 0)
        return values, first

    def table(self) -> torch.Tensor | None:
        """int64 [B, Tk], None where nothing is asked of kinds."""
        if not self._used:
            return None
        if not self._all:
            return self._table
        if self._used == MOST_CLASSES:
            raise InputError(
                f"it tells {self._used + 1} kinds of keys apart, and {MOST_CLASSES} is the limit", "the mask"
            )
        return self._table | 1 << self._used  # what sees everything also sees keys of no other kind


def _clauses(formula: Formula, holds: bool, known: dict[tuple[int, bool], list[_Clause]], keys: int) -> list[_Clause]:
    """The clauses of a formula or of its negation. An atom has one set of literals, wherever it is met."""
    if isinstance(formula, Not):
        return _clauses(formula.of, not holds, known, keys)
    if isinstance(formula, And | Or):
        one, two = _clauses(formula.one, holds, known, keys), _clauses(formula.two, holds, known, keys)
        if isinstance(formula, And) != holds:
            return _distinct([*one, *two])
        return _distinct([_together(a, b) for a in one for b in two])
    if isinstance(formula, Constant):
        return [()] if formula.value == holds else []
    if (id(formula), holds) not in known:
        known[id(formula), holds] = list(_literals(formula, holds, keys))
    return known[id(formula), holds]


def _together(one: _Clause, two: _Clause) -> _Clause:
    return (*one, *(literal for literal in two if literal not in one))


def _distinct(clauses: list[_Clause]) -> list[_Clause]:
    """Without clauses that another one covers, and without those that contradict themselves."""
    distinct: list[_Clause] = []
    for clause in sorted(clauses, key=len):
        literals = {(literal.atom, literal.holds) for literal in clause if isinstance(literal, _KeyQuestion)}
        if any((atom, not holds) in literals for atom, holds in literals):
            continue
        if not any(all(literal in clause for literal in other) for other in distinct):
            distinct.append(clause)
    if len(distinct) > MOST_CLAUSES:
        raise InputError(
            f"it is a union of more than {MOST_CLAUSES} conditions once it is multiplied out",
            "the mask",
            "Say it as a union of simpler masks",
        )
    return distinct


def _literals(atom: Queries | KeyTest | Compare, holds: bool, keys: int) -> Iterator[_Clause]:
    """An atom or its negation as a union of clauses of one literal."""
    if isinstance(atom, Queries):
        yield (Queries(atom.table == holds),)
        return
    span = _range_of_keys(atom) if isinstance(atom, KeyTest) else _range_of_compare(atom, keys)
    if span is None:
        yield (_KeyQuestion(atom, holds),)
    elif holds:
        yield (span,)
    else:
        if bool((span.lo > 0).any()):
            yield (_Range(torch.zeros_like(span.lo), span.lo),)
        if bool((span.hi < keys).any()):
            yield (_Range(span.hi, torch.full_like(span.hi, keys)),)


def _range_of_keys(atom: KeyTest) -> _Range | None:
    """The keys of a predicate, if they lie together in every row."""
    start = begins(atom.table) & atom.table
    if bool((start.sum(1) > 1).any()):
        return None
    first = torch.where(start, torch.arange(start.shape[1]), 0).sum(1, keepdim=True)
    return _Range(first, first + atom.table.sum(1, keepdim=True))


def _range_of_compare(atom: Compare, keys: int, allowed: torch.Tensor | None = None) -> _Range | None:
    """The keys that compare so with a query, if they are one range for every query (of `allowed` bool [B, Tq])."""
    batch = max(len(atom.keys), len(atom.queries))
    numbers = atom.keys.expand(batch, -1).contiguous()
    numbers_asked = atom.queries.expand(batch, -1).contiguous()
    rising = bool((numbers[:, 1:] >= numbers[:, :-1]).all())
    falling = bool((numbers[:, 1:] <= numbers[:, :-1]).all())
    if falling and not rising:
        mirrored = _range_of_compare(Compare(atom.op, numbers.flip(1), numbers_asked), keys, allowed)
        assert mirrored is not None
        return _Range(keys - mirrored.hi, keys - mirrored.lo)
    if rising:
        behind = torch.searchsorted(numbers, numbers_asked, right=True)
        if atom.op == "<=":
            return _Range(torch.zeros_like(behind), behind)
        return _Range(torch.searchsorted(numbers, numbers_asked), behind)
    if atom.op == "<=":
        return None
    # Equal numbers lie together, in no order: look the run up among the runs sorted by number.
    order = numbers.sort(dim=1, stable=True)
    place = torch.searchsorted(order.values, numbers_asked).clamp(max=keys - 1)
    slot = order.indices.gather(1, place)
    present = numbers.gather(1, slot) == numbers_asked
    # A number with several runs does no harm if no query that counts asks for it (the -1 of text between images).
    row, again = returns(numbers).nonzero(as_tuple=True)
    torn = torch.zeros_like(numbers, dtype=torch.bool)
    torn[row, again] = True
    torn = _anywhere(order.indices, order.values, torn)
    if bool((present & torn.gather(1, slot) & (allowed if allowed is not None else present)).any()):
        return None
    lo, hi = bounds(numbers)
    return _Range(torch.where(present, lo.gather(1, slot), 0), torch.where(present, hi.gather(1, slot), 0))


def _anywhere(slots: torch.Tensor, numbers: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    """bool [B, T]: marked, or of a number with a mark in the row. numbers: sorted, as they stand at `slots`."""
    before = torch.nn.functional.pad(marked.gather(1, slots).cumsum(1), (1, 0))
    lo, hi = bounds(numbers)
    return torch.zeros_like(marked).scatter(1, slots, before.gather(1, hi) > before.gather(1, lo))


def _with_ranges(clause: _Clause, keys: int) -> _Clause:
    """The clause, with a range for every equality that is one for the queries of which the rest of it holds."""
    tables = [literal.table for literal in clause if isinstance(literal, Queries)]
    if not tables:
        return clause
    allowed = reduce(torch.logical_and, tables)
    literals: list[_Literal] = []
    for literal in clause:
        better = None
        if isinstance(literal, _KeyQuestion) and literal.holds and isinstance(literal.atom, Compare):
            better = _range_of_compare(literal.atom, keys, allowed)
        literals.append(better or literal)
    return tuple(literals)


# --- A `mask_mod` function traced to a formula: called once, with numbers that record what is done to them -----------
#
# Terms
#   side       a number that depends on the query or on the key, not on both: its table is worked out by torch itself
#   sum        a number of the query plus a number of the key: `q_idx - kv_idx`
#   traced     what the function gets instead of indices: it records comparisons, and refuses what has no rules


MaskMod = Callable[..., Any]
ONE_HEAD = "All heads share a mask: give heads that differ an attention of their own"
REMEDY = "Build this mask with csc.masks and say what it means, or keep this attention as it is"


def traced(mask_mod: MaskMod, batch: int, queries: int, keys: int) -> Formula:
    """What the function says, as a formula over queries x keys. Tables that it captures are on the CPU."""
    index = {
        "b": Side(torch.arange(batch)[:, None, None], frozenset("b")),
        "h": Side(torch.zeros(1, 1, 1, dtype=torch.int64), frozenset("h")),
        "q": Side(torch.arange(queries)[None, :, None], frozenset("q")),
        "k": Side(torch.arange(keys)[None, None, :], frozenset("k")),
    }
    with _Tracing():
        result = mask_mod(*(TracedScalar(index[name]) for name in "bhqk"))
    return _truth(_lifted(result, "the result"), "the result")


@dataclass(frozen=True)
class Side:
    """table: [B, Tq, Tk, ..] with 1 where it does not depend on a size; more dimensions are still to be indexed."""

    table: torch.Tensor
    depends: frozenset[str]


@dataclass(frozen=True)
class Sum:
    """queries + keys, or its size if `absolute`."""

    queries: Side
    keys: Side
    absolute: bool = False


class TracedScalar:
    """A scalar as the function sees it. It has the operators and methods of a tensor."""

    def __init__(self, value: Side | Sum | Formula) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("dtype", "device", "shape", "ndim"):
            return getattr(torch.zeros((), dtype=_dtype(self.value)), name)
        return lambda *args, **kwargs: _apply(name, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _apply(function.__name__, args, kwargs or {})

    def __bool__(self) -> bool:
        raise InputError(
            "it asks for the truth of a condition (if, and, or, not)",
            "mask_mod",
            "Write conditions with &, | and ~, or torch.where, as FlexAttention needs it too",
        )

    def __index__(self) -> int:
        raise InputError("it turns an index into a Python number", "mask_mod", "Index tensors, not lists")

    __int__ = __float__ = __index__
    __hash__ = object.__hash__


def _operator(name: str) -> Callable[..., Any]:
    return lambda *args: _apply(name, args, {})


OPERATORS = (
    "add sub mul floordiv truediv mod pow and or xor lshift rshift radd rsub rmul rfloordiv rmod rand ror rxor "
    "lt le gt ge eq ne neg abs invert pos getitem"
)
REFLECTED = {"radd", "rsub", "rmul", "rfloordiv", "rmod", "rand", "ror", "rxor"}
for _name in OPERATORS.split():
    setattr(TracedScalar, f"__{_name}__", _operator(_name))


class _Tracing(TorchFunctionMode):
    """Functions of torch with a traced argument come to us, tensors indexed by one too."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [*args, *(kwargs or {}).values()]
        inner = [item for argument in flat for item in (argument if isinstance(argument, tuple | list) else [argument])]
        if any(isinstance(item, TracedScalar) for item in inner):
            return _apply(function.__name__, args, kwargs or {})
        return function(*args, **(kwargs or {}))


# What an operation is called in the places where it can be written, and what torch does for one side of it.
NAMES = {
    "floordiv": "floor_divide", "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "logical_and": "bitwise_and", "logical_or": "bitwise_or", "logical_xor": "bitwise_xor", "logical_not": "invert",
    "bitwise_not": "invert", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift", "less": "lt",
    "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "negative": "neg", "absolute": "abs",
    "subtract": "sub", "multiply": "mul", "type": "to",
}  # fmt: skip
BOTH_SIDES = {"add", "sub", "mul", "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne", "bitwise_and", "bitwise_or"}
BOTH_SIDES |= {"bitwise_xor", "invert", "where", "to", "pos"}
ONE_SIDE = BOTH_SIDES | {
    "floor_divide", "remainder", "fmod", "bitwise_left_shift", "bitwise_right_shift", "minimum", "maximum", "clamp",
    "clamp_min", "clamp_max", "min", "max", "div", "isin", "pow", "sign",
}  # fmt: skip
CASTS = {"long": torch.int64, "int": torch.int32, "bool": torch.bool, "short": torch.int16}
NEW = {"new_zeros", "new_ones", "new_full", "new_tensor", "zeros_like", "ones_like", "full_like"}


def _apply(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name.endswith("_") and not name.endswith("__"):
        raise _no_rules(name, "changes a number in place")
    name = name.strip("_")
    if name in REFLECTED:
        name, args = name[1:], args[::-1]
    name = NAMES.get(name, name)
    if name in NEW:
        plain = torch.zeros((), dtype=_dtype(args[0].value))
        method = getattr(plain, name, None)
        return method(*args[1:], **kwargs) if method else getattr(torch, name)(plain, *args[1:], **kwargs)
    if name in ("clone", "detach", "contiguous", "pos"):
        return args[0]
    if name in devices.TYPES or (name == "to" and not _casts(args, kwargs)):
        return args[0]  # where the function runs is no part of what it says
    if name in CASTS:
        name, args = "to", (args[0], CASTS[name])
    if name == "getitem":
        return TracedScalar(_indexed(args[0], args[1]))
    values = [_lifted(argument, name) if not isinstance(argument, torch.dtype) else argument for argument in args]
    sides = [side for side in values if isinstance(side, Side)]
    if any("h" in side.depends for side in sides):
        raise InputError(f"{name} uses the head", "mask_mod", ONE_HEAD)
    depends = frozenset().union(*(side.depends for side in sides))
    if all(isinstance(side, Side | torch.dtype) for side in values) and not depends >= {"q", "k"}:
        if name not in ONE_SIDE:
            raise _no_rules(name, "is no operation on single indices that is known here")
        return TracedScalar(_one_sided(name, values, depends, kwargs))
    if name not in BOTH_SIDES or kwargs:
        raise _no_rules(name, "is used on a number of the query and a number of the key together")
    return TracedScalar(_both_sides(name, values))


def _casts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `to` changes the type; otherwise it names a device only."""
    return "dtype" in kwargs or any(isinstance(argument, torch.dtype) for argument in args)


def _one_sided(name: str, values: list[Any], depends: frozenset[str], kwargs: dict[str, Any]) -> Side:
    """The operation itself, on tables."""
    if any(isinstance(value, Side) and value.table.dim() > 3 for value in values):
        raise _no_rules(name, "is used on a table that is not indexed to a number")
    plain = [value.table if isinstance(value, Side) else value for value in values]
    if name == "invert":
        return Side(torch.bitwise_not(plain[0]), depends)
    if name == "to":
        return Side(plain[0].to(plain[1]), depends)
    if name in ("min", "max") and len(plain) != 2:
        raise _no_rules(name, "is used on all of a table")
    table = getattr(torch, name)(*plain, **kwargs)
    return Side(table, depends)


def _both_sides(name: str, values: list[Any]) -> Sum | Formula:
    if name in ("bitwise_and", "bitwise_or", "bitwise_xor", "invert", "where"):
        if name != "where" and not any(isinstance(value, Side | Sum) and not _is_bool(value) for value in values):
            truths = [_truth(value, name) for value in values]
            return _logic(name, truths)
        if name == "where":
            condition = _truth(values[0], name)
            if all(_is_bool(value) for value in values[1:]):
                yes, no = (_truth(value, name) for value in values[1:])
                return Or(And(condition, yes), And(Not(condition), no))
        raise _no_rules(name, "is used on numbers of the query and of the key together")
    if name == "to":
        if _is_bool(values[0]) == (values[1] == torch.bool):
            return values[0]
        raise _no_rules(f"to({values[1]})", "is used on a condition of query and key together")
    if name in ("lt", "le", "gt", "ge", "eq", "ne"):
        return _compared(name, values[0], values[1])
    if any(not isinstance(value, Side | Sum) or (isinstance(value, Sum) and value.absolute) for value in values):
        raise _no_rules(name, "is used on a condition or on the size of a difference")
    if name == "add":
        return _added(values[0], values[1], 1)
    if name == "sub":
        return _added(values[0], values[1], -1)
    if name == "neg":
        return _scaled(values[0], torch.tensor(-1))
    if name == "abs":
        return replace(_sum(values[0]), absolute=True)
    factor, number = (values[0], values[1]) if isinstance(values[0], Side) else (values[1], values[0])
    if not isinstance(factor, Side) or factor.depends or not isinstance(number, Sum):
        raise _no_rules(name, "multiplies a number of the query with one of the key")
    return _scaled(number, factor.table)


def _logic(name: str, truths: list[Formula]) -> Formula:
    if name == "invert":
        return Not(truths[0])
    one, two = truths
    if name == "bitwise_and":
        return And(one, two)
    if name == "bitwise_or":
        return Or(one, two)
    return Or(And(one, Not(two)), And(Not(one), two))


def _compared(name: str, one: Any, two: Any) -> Formula:
    """A comparison with a number of the query on one end and one of the key on the other."""
    if not isinstance(one, Side | Sum) or not isinstance(two, Side | Sum):
        same = _logic("bitwise_xor", [_truth(one, name), _truth(two, name)])
        if name in ("eq", "ne"):
            return Not(same) if name == "eq" else same
        raise _no_rules(name, "orders conditions")
    if name == "ne":
        return Not(_compared("eq", one, two))
    if name in ("gt", "ge"):
        return _compared({"gt": "lt", "ge": "le"}[name], two, one)
    if isinstance(two, Sum) and two.absolute:  # c < |x| is not |x| <= c
        if name == "eq":
            return _compared(name, two, one)
        return Not(_compared({"lt": "le", "le": "lt"}[name], two, one))
    if isinstance(one, Sum) and one.absolute:
        plain = replace(one, absolute=False)
        if isinstance(two, Sum):
            raise _no_rules("abs", "is compared with a number of query and key together")
        if name == "eq":
            return And(_compared("le", one, two), Not(_compared("lt", one, two)))
        return And(_compared(name, plain, two), _compared(name, _scaled(plain, torch.tensor(-1)), two))
    difference = _added(one, two, -1)  # keys + queries against 0
    keys, queries = _column(difference.keys), -_row(difference.queries)
    if name == "eq":
        return Compare("==", keys, queries)
    return Compare("<=", keys, queries - 1 if name == "lt" else queries)


def _added(one: Side | Sum, two: Side | Sum, sign: int) -> Sum:
    a, b = _sum(one), _scaled(_sum(two), torch.tensor(sign))
    queries = Side(a.queries.table + b.queries.table, a.queries.depends | b.queries.depends)
    return Sum(queries, Side(a.keys.table + b.keys.table, a.keys.depends | b.keys.depends))


def _scaled(number: Side | Sum, factor: torch.Tensor) -> Sum:
    number = _sum(number)
    queries, keys = number.queries, number.keys
    return Sum(Side(queries.table * factor, queries.depends), Side(keys.table * factor, keys.depends))


def _sum(number: Side | Sum) -> Sum:
    """A side as a sum with nothing on the other one. Floats are refused: sums of them round."""
    if isinstance(number, Sum):
        return number
    if number.table.dim() > 3:
        raise _no_rules("a comparison", "is of a table that is not indexed to a number")
    if number.table.dtype not in INTEGERS:
        raise _no_rules("a comparison", f"is of {number.table.dtype} numbers of query and key")
    nothing = Side(torch.zeros(1, 1, 1, dtype=torch.int64), frozenset())
    number = Side(number.table.long(), number.depends)
    return Sum(nothing, number) if "k" in number.depends else Sum(number, nothing)


def _row(side: Side) -> torch.Tensor:
    """[B, Tq] or [B, 1] of a side that does not depend on the key."""
    return side.table.reshape(*side.table.shape[:2]) if side.table.dim() == 3 else side.table.reshape(1, 1)


def _column(side: Side) -> torch.Tensor:
    """[B, Tk] or [B, 1]."""
    return side.table.flatten(1, 2) if side.table.dim() == 3 else side.table.reshape(1, 1)


def _indexed(base: Any, index: Any) -> Side:
    """table[i, ..] with indices that depend on the query or on the key."""
    items = [_lifted(item, "an index") for item in (index if isinstance(index, tuple) else (index,))]
    if isinstance(base, torch.Tensor):
        side = Side(base[None, None, None], frozenset())
    else:
        side = base.value
        if not isinstance(side, Side):
            raise _no_rules("getitem", "indexes a number of query and key together")
    if any(not isinstance(item, Side) or _is_bool(item) or item.table.dim() > 3 for item in items):
        raise _no_rules("getitem", "has an index that is no number of the query or of the key alone")
    depends = frozenset(side.depends).union(*(item.depends for item in items))
    if "h" in depends:
        raise InputError("a table is indexed by the head", "mask_mod", ONE_HEAD)
    if depends >= {"q", "k"}:
        raise _no_rules("getitem", "reads a table of queries by keys: a dense mask")
    lead = [
        torch.arange(size).view([-1 if i == j else 1 for j in range(3)]) for i, size in enumerate(side.table.shape[:3])
    ]
    places = [item.table.view(1, 1, 1) if item.table.dim() == 0 else item.table for item in items]
    try:
        return Side(side.table[(*lead, *places)], depends)
    except IndexError as error:
        raise InputError(f"an index leaves its table: {error}", "mask_mod") from error


def _lifted(value: Any, name: str) -> Any:
    """A traced value's content, or a plain number as a side that depends on nothing."""
    if isinstance(value, TracedScalar):
        return value.value
    if isinstance(value, bool | int | float):
        return Side(torch.tensor(value), frozenset())
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 or name == "isin":
            return Side(value, frozenset())
        raise _no_rules(name, f"gets a tensor {list(value.shape)} that is not indexed")
    raise _no_rules(name, f"gets {value!r}")


def _truth(value: Side | Sum | Formula, name: str) -> Formula:
    """A condition. Numbers count as true where they are not 0."""
    if isinstance(value, Sum):
        raise _no_rules(name, "takes a number for a condition")
    if not isinstance(value, Side):
        return value
    if value.table.dim() > 3:
        raise _no_rules(name, "is a table that is not indexed to a number")
    if "h" in value.depends:
        raise InputError(f"{name} depends on the head", "mask_mod", ONE_HEAD)
    table = value.table.bool()
    if not value.depends:
        return Constant(bool(table))
    side = Side(table, value.depends)
    return KeyTest(_column(side)) if "k" in value.depends else Queries(_row(side))


def _is_bool(value: Any) -> bool:
    return _dtype(value) == torch.bool


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, Side):
        return value.table.dtype
    return torch.int64 if isinstance(value, Sum) else torch.bool


def _no_rules(name: str, fault: str) -> InputError:
    return InputError(f"{name} {fault}, which no ranges and kinds of keys can say", "mask_mod", REMEDY)


# --- FlexAttention's `mask_mod(b, h, q_idx, kv_idx)` as a mask -------------------------------------------------------
#
# The function is called once with traced indices, which gives a formula, and
# then once more, under vmap, with sampled pairs: a mask that says something else is an error, never a result.


SAMPLED = 4096


def from_mask_mod(mask_mod: MaskMod, batch: int | None, queries: int, keys: int | None = None) -> Mask:
    """The mask of a `mask_mod` as `torch.nn.attention.flex_attention` takes it (also `and_masks`, `or_masks`).

    Args:
        mask_mod: A function of batch, head, query and key; tables that it captures are on the CPU.
        batch: B; None: 1.
        queries: How many.
        keys: How many; None: as many as queries.

    Raises:
        InputError: The mask depends on the head or has no rules (the operation is named), or the mask and the function
            differ on sampled pairs.
    """
    batch = 1 if batch is None else positive(batch, "batch")
    keys = positive(queries, "queries") if keys is None else positive(keys, "keys")
    mask = rules(traced(mask_mod, batch, queries, keys), queries, keys)
    _check(mask, mask_mod, batch)
    return mask


class _Lookup(TorchFunctionMode):
    """Lets vmap index a table by a scalar, which outside of it would be a Python number."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(item, torch.Tensor) for item in items):
                plain = [item if isinstance(item, torch.Tensor) else torch.tensor(item) for item in items]
                return torch.ops.aten.index.Tensor(args[0], plain)
        return function(*args, **(kwargs or {}))


def _check(mask: Mask, mask_mod: MaskMod, batch: int) -> None:
    """InputError if mask and function differ on a sample: pairs anywhere, and pairs where ranges begin and end."""
    b, q, k = _sample(mask, batch)
    with _Lookup():
        answers = torch.vmap(mask_mod)(b, torch.zeros_like(b), q, k)
    answers = answers.bool().expand(len(b))
    row = b if mask.batch > 1 else torch.zeros_like(b)
    ranges = mask.ranges[row, :, q]
    seen = (ranges[..., 0] <= k[:, None]) & (k[:, None] < ranges[..., 1])
    if mask.admits is not None and mask.kinds is not None:
        seen &= (mask.admits[row, :, q] & mask.kinds[row, k][:, None]) != 0
    wrong = (seen.any(1) != answers).nonzero().flatten()
    if len(wrong):
        i = int(wrong[0])
        raise InputError(
            f"the function says {bool(answers[i])} and the mask that was read from it {not bool(answers[i])}",
            f"mask_mod at batch {int(b[i])}, query {int(q[i])}, key {int(k[i])}",
            REMEDY,
        )


def _sample(mask: Mask, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int64 [n] each: batch, query and key, of all pairs where they are few, of some otherwise. Always the same."""
    if batch * mask.queries * mask.keys <= SAMPLED:
        grid = torch.meshgrid(torch.arange(batch), torch.arange(mask.queries), torch.arange(mask.keys), indexing="ij")
        return tuple(axis.flatten() for axis in grid)  # type: ignore[return-value]
    generator = torch.Generator().manual_seed(0)
    b, q, k = (torch.randint(0, size, (SAMPLED,), generator=generator) for size in (batch, mask.queries, mask.keys))
    edge_b, edge_q = b[: SAMPLED // 16], q[: SAMPLED // 16]
    row = edge_b if mask.batch > 1 else torch.zeros_like(edge_b)
    edges = mask.ranges[row, :, edge_q].flatten(1).long()  # [n, 2 R]
    near = torch.cat([edges - 1, edges, edge_q[:, None]], 1).clamp(0, mask.keys - 1)
    b = torch.cat([b, edge_b[:, None].expand_as(near).flatten()])
    q = torch.cat([q, edge_q[:, None].expand_as(near).flatten()])
    return b, q, torch.cat([k, near.flatten()])
