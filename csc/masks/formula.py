"""A boolean formula about queries and keys, brought to rules.

Terms
  atom       what a formula is made of: a predicate of queries alone, of keys alone, or a comparison of a number of the
             key with a number of the query
  literal    an atom or its negation, and a choice: for every query a range of keys, or a question to the kind of a key
  clause     literals that all hold; a formula is the union of its clauses, and a clause becomes one rule
  numbers    int64 tables [B, Tq] and [B, Tk], or [1, ...] where they are the same for the whole batch

    Queries(table)  Keys(table)  Compare(op, keys, queries)  Constant(value)  Not(f)  And(f, g)  Or(f, g)
    rules(formula, queries, keys) -> Mask

A comparison is a range if the numbers of keys are sorted (`k <= q`, blocks, documents in ascending order) or, for an
equality, if equal numbers lie together. Otherwise keys with equal numbers are a kind, up to 63. Nothing is Tq x Tk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch

from csc.errors import InputError
from csc.kernels.mask import EVERYTHING, Mask
from csc.masks.combine import MOST_CLASSES, classes, compact
from csc.masks.equal_runs import begins, bounds, returns

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
        tests = [(one.atom, one.holds) for one in asked if isinstance(one.atom, Compare)]
        plain = [one for one in asked if isinstance(one.atom, KeyTest)]
        name = (frozenset((id(one.atom), one.holds) for one in plain), tuple(id(atom.keys) for atom, _ in tests))
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
        for one in plain:
            assert isinstance(one.atom, KeyTest)
            fits = fits & (one.atom.table == one.holds)
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
    found: list[_Clause] = []
    for clause in sorted(clauses, key=len):
        asked = {(one.atom, one.holds) for one in clause if isinstance(one, _KeyQuestion)}
        if any((atom, not holds) in asked for atom, holds in asked):
            continue
        if not any(all(literal in clause for literal in other) for other in found):
            found.append(clause)
    if len(found) > MOST_CLAUSES:
        raise InputError(
            f"it is a union of more than {MOST_CLAUSES} conditions once it is multiplied out",
            "the mask",
            "Say it as a union of simpler masks",
        )
    return found


def _literals(atom: Queries | KeyTest | Compare, holds: bool, keys: int) -> Iterator[_Clause]:
    """An atom or its negation as a union of clauses of one literal."""
    if isinstance(atom, Queries):
        yield (Queries(atom.table == holds),)
        return
    found = _range_of_keys(atom) if isinstance(atom, KeyTest) else _range_of_compare(atom, keys)
    if found is None:
        yield (_KeyQuestion(atom, holds),)
    elif holds:
        yield (found,)
    else:
        if bool((found.lo > 0).any()):
            yield (_Range(torch.zeros_like(found.lo), found.lo),)
        if bool((found.hi < keys).any()):
            yield (_Range(found.hi, torch.full_like(found.hi, keys)),)


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
    asked = atom.queries.expand(batch, -1).contiguous()
    rising = bool((numbers[:, 1:] >= numbers[:, :-1]).all())
    falling = bool((numbers[:, 1:] <= numbers[:, :-1]).all())
    if falling and not rising:
        found = _range_of_compare(Compare(atom.op, numbers.flip(1), asked), keys, allowed)
        assert found is not None
        return _Range(keys - found.hi, keys - found.lo)
    if rising:
        behind = torch.searchsorted(numbers, asked, right=True)
        if atom.op == "<=":
            return _Range(torch.zeros_like(behind), behind)
        return _Range(torch.searchsorted(numbers, asked), behind)
    if atom.op == "<=":
        return None
    # Equal numbers lie together, in no order: look the run up among the runs sorted by number.
    order = numbers.sort(dim=1, stable=True)
    place = torch.searchsorted(order.values, asked).clamp(max=keys - 1)
    slot = order.indices.gather(1, place)
    there = numbers.gather(1, slot) == asked
    # A number with several runs does no harm if no query that counts asks for it (the -1 of text between images).
    row, again = returns(numbers).nonzero(as_tuple=True)
    torn = torch.zeros_like(numbers, dtype=torch.bool)
    torn[row, again] = True
    torn = _anywhere(order.indices, order.values, torn)
    if bool((there & torn.gather(1, slot) & (allowed if allowed is not None else there)).any()):
        return None
    lo, hi = bounds(numbers)
    return _Range(torch.where(there, lo.gather(1, slot), 0), torch.where(there, hi.gather(1, slot), 0))


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
    found: list[_Literal] = []
    for one in clause:
        better = None
        if isinstance(one, _KeyQuestion) and one.holds and isinstance(one.atom, Compare):
            better = _range_of_compare(one.atom, keys, allowed)
        found.append(better or one)
    return tuple(found)
