"""Tensors whose rows a model only moves about, as numbers of rows.

Models lay out the features of images by the size of each: LLaVA-NeXT takes the tiles of an image apart, puts them
together as the image was, cuts off what is padding and ends each line with a learned row. A trace that follows it holds
for images of these sizes. Here such code runs on the numbers of the rows. What it makes of them is computed for every
batch before the step, and the graph takes the rows by these numbers.

Terms
  table    a tensor that is taken apart along its first dimension, or a parameter with one dimension
  unit     dimensions of a table that stay whole: as few of the first ones are numbered as the code looks into
  moved    what a stand-in for rows of tables holds: their numbers, and a tensor without data that has their shape
  move     a call that only moves rows: reshapes, transposes, slices, concatenations. Before any other call the
           stand-ins in its arguments become what they stand for, and before the call of a module: rows taken by their
           numbers if they were joined from several, else what the same calls make of the table itself.

    rows = Rows(parameters, entries, run)     of a trace: entries has the numbers as traced batch entries
    rows = Rows(parameters, None, run)        of a replay: rows.made will have the numbers
    rows.call(func, name, args, kwargs)       what a call gives, or NotImplemented if it is none for this file
    rows.real(leaf)                           the tensor that a stand-in stands for; anything else as it is
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.weak import WeakIdKeyDictionary

from csc.capture.values.call_log import writes
from csc.capture.values.index_map import MovedUnits, TooFine, finest, joined, key_of, keys_of_parts
from csc.capture.values.lazy_split import JOINS, SPLITS, LazyNumbers
from csc.torch_private.symbolic_sizes import as_hinted
from csc.torch_private.traces import outside_tracing, pytree

PREFIX = "row_numbers_"  # of the names of batch entries
RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"})
TURNS = frozenset({"permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t"})
COPIES = frozenset({"contiguous", "clone", "to"})
QUESTIONS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "__len__", "is_floating_point", "is_complex"})
FACTS = frozenset({"shape", "dtype", "ndim"})
STARTS = frozenset({"__getitem__", "unsqueeze", "expand", "view", "reshape"})  # with a parameter


@dataclass(frozen=True)
class _StandIn:
    """again: the calls that make it of its table; None if it was joined from several."""

    moved: MovedUnits
    again: Callable[[], torch.Tensor] | None


class RowIndices:
    """The stand-ins of one run. run(func, name, args, kwargs): calls a function as the model would."""

    def __init__(
        self,
        parameters: Collection[torch.Tensor],
        entries: Mapping[str, torch.Tensor] | None,
        run: Callable[[Any, str, Any, Any], Any],
    ) -> None:
        self._parameters = {id(one) for one in parameters if one.dim() == 1}
        self._entries, self._run = entries, run
        self.made: dict[str, torch.Tensor] = {}
        self._stand_ins = WeakIdKeyDictionary()  # those that the model still has
        self._real = WeakIdKeyDictionary()
        self._tables: list[torch.Tensor] = []
        self._begins: list[int] = [0]  # of each table, among the elements of all; and where the last one ends
        self._taken = 0

    def call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What a call gives whose arguments hold stand-ins, or that takes a tensor apart; else NotImplemented."""
        leaves = pytree.tree_leaves((args, kwargs))
        if writes(name) or "out" in kwargs:
            self._settle()
            return NotImplemented
        if not any(self._holds(leaf) for leaf in leaves):
            if not self._starts(name, args, kwargs):
                return NotImplemented
            args, kwargs = pytree.tree_map_only(LazyNumbers, LazyNumbers.settled, (args, kwargs))
            with outside_tracing():
                args = (self._of_table(args[0]), *args[1:])
        fact = getattr(func.__self__, "__name__", "") if name == "__get__" else ""
        if fact == "device":
            return self._tables[min(self._stand_ins[args[0]].moved.tables)].device
        with outside_tracing():
            if name in QUESTIONS or fact in FACTS:
                return func(*self._likes(args), **self._likes(kwargs))
            try:
                return self._moved(func, name, args, kwargs)
            except TooFine:
                return NotImplemented

    def real(self, leaf: Any) -> Any:
        """What a stand-in stands for; anything else as it is."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self._holds(leaf) and leaf not in self._real:
            found = self._stand_ins[leaf]
            self._real[leaf] = found.again() if found.again is not None else self._by_number(found.moved)
        return self._real.get(leaf, leaf)

    def _holds(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf in self._stand_ins

    def _settle(self) -> None:
        """Before a tensor is written to, stand-ins become real: their tables may hold other values afterwards."""
        for stand_in in list(self._stand_ins):
            self.real(stand_in)
        self._stand_ins.clear()

    @contextmanager
    def real_for_modules(self) -> Iterator[None]:
        """Modules that are called in it get what stand-ins stand for: they would count with sizes."""
        own = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if any(self._holds(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
                args, kwargs = _as_given(args, kwargs)  # who watches the run makes them real
            return own(module, *args, **kwargs)

        with patch.object(nn.Module, "__call__", call):
            yield

    # --- how stand-ins begin -------------------------------------------------------------------------------------

    def _starts(self, name: str, args: Any, kwargs: Any) -> bool:
        table = args[0] if args else None
        if id(table) in self._parameters:
            return name in STARTS
        if name not in SPLITS or not isinstance(table, torch.Tensor) or not table.is_floating_point():
            return False
        known = all(one.known for one in (*args, *kwargs.values()) if isinstance(one, LazyNumbers))
        return known and table.dim() > 1 and _along(name, args, kwargs) % table.dim() == 0

    def _of_table(self, table: torch.Tensor) -> torch.Tensor:
        """A stand-in for all of a table."""
        place = next((place for place, one in enumerate(self._tables) if one is table), len(self._tables))
        like = torch.empty([as_hinted(size) for size in table.shape], dtype=table.dtype, device="meta")  # type: ignore
        if place == len(self._tables):
            self._tables.append(table)
            self._begins.append(self._begins[-1] + like.numel())
        numbered = 0 if id(table) in self._parameters else 1  # dimensions
        steps = math.prod(like.shape[numbered:])
        count = math.prod(like.shape[:numbered])
        numbers = self._begins[place] + torch.arange(count) * steps
        shape = [*like.shape[:numbered], *[1] * (like.dim() - numbered)]
        units = tuple(range(numbered, like.dim()))
        return self._stand_in(MovedUnits(frozenset({place}), numbers.view(shape), units, like), lambda: table)

    def _stand_in(self, moved: MovedUnits, again: Callable[[], torch.Tensor] | None) -> torch.Tensor:
        stand_in = torch.empty(0)
        self._stand_ins[stand_in] = _StandIn(moved, again)
        return stand_in

    def _likes(self, tree: Any) -> Any:
        """Arguments with tensors without data, and numbers for symbolic sizes."""

        def like(leaf: Any) -> Any:
            if self._holds(leaf):
                return self._stand_ins[leaf].moved.like
            return as_hinted(leaf) if isinstance(leaf, torch.SymInt) else leaf

        return pytree.tree_map(like, tree)

    # --- moves ---------------------------------------------------------------------------------------------------

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in JOINS:
            return self._joined(name, args, kwargs)
        found = self._stand_ins[args[0]] if self._holds(args[0]) else None
        if found is None:
            return NotImplemented
        moved, given, named = found.moved, self._likes(args[1:]), self._likes(kwargs)
        again = cache(lambda: self._run(func, name, *pytree.tree_map(self.real, (args, kwargs))))
        own = again if found.again is not None else None
        if name in COPIES:
            return self._stand_in(moved, own) if self._same_kind(moved, (args[1:], kwargs)) else NotImplemented
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((given, named))):
            return NotImplemented
        if name in SPLITS:
            dim = _along(name, args, kwargs) % moved.like.dim()
            keys = keys_of_parts(moved.like, func(moved.like, *given, **named), dim)
            return tuple(self._stand_in(_indexed(moved, key), _item(own, place)) for place, key in enumerate(keys))
        change = _change(func, name, moved, given, named)
        return NotImplemented if change is None else self._stand_in(finest(change, moved), own)

    def _joined(self, name: str, args: Any, kwargs: Any) -> Any:
        """Of several stand-ins, and no tensor beside them; parameters alone are not worth it."""
        tensors = kwargs.get("tensors", args[0] if args else ())
        found = [self._stand_ins[one] if self._holds(one) else None for one in tensors]
        parts = [one.moved for one in found if one is not None]
        tables = frozenset[int]().union(*(part.tables for part in parts))
        own = all(id(self._tables[place]) in self._parameters for place in tables)
        if own or len(parts) < len(found) or len({part.like.dtype for part in parts}) > 1:
            return NotImplemented
        dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        dim %= parts[0].like.dim() + (name == "stack")
        if name == "stack":
            key = (*[slice(None)] * dim, None, *[slice(None)] * (parts[0].like.dim() - dim))
            parts = [_indexed(part, key) for part in parts]
        return self._stand_in(joined(parts, dim), None)

    def _same_kind(self, moved: MovedUnits, rest: Any) -> bool:
        """Whether the arguments of `to` change neither dtype nor device."""
        device = self._tables[min(moved.tables)].device
        for leaf in pytree.tree_leaves(rest):
            if self._holds(leaf):
                leaf = self._stand_ins[leaf].moved.like.dtype
            dtypes = leaf if isinstance(leaf, torch.dtype) else getattr(leaf, "dtype", moved.like.dtype)
            where = torch.device(leaf) if isinstance(leaf, str) else getattr(leaf, "device", leaf)
            if dtypes != moved.like.dtype or (isinstance(where, torch.device) and where != device):
                return False
        return True

    # --- rows by their numbers -----------------------------------------------------------------------------------

    def _by_number(self, moved: MovedUnits) -> torch.Tensor:
        name = f"{PREFIX}{self._taken}"
        self._taken += 1
        tables = sorted(moved.tables)
        if self._entries is None:
            with outside_tracing():
                self.made[name] = self._within(moved, tables)
            numbers = self.made[name].to(self._tables[tables[0]].device)
        else:
            numbers = self._entries[name]
        given = ([self._tables[place] for place in tables], moved.units)
        return self._run(_Take(name, numbers), "rows", given, {})

    def _within(self, moved: MovedUnits, tables: Sequence[int]) -> torch.Tensor:
        """Numbers of units among those of these tables, one table after the other."""
        numbers, size = moved.without_units(), math.prod(moved.unit)
        found = torch.empty_like(numbers)
        before = 0
        for place in tables:
            begin, end = self._begins[place : place + 2]
            there = (numbers >= begin) & (numbers < end)
            found[there] = (numbers[there] - begin) // size + before
            before += (end - begin) // size
        return found


@dataclass(frozen=True, eq=False)
class _Take:
    """rows(tables, units): units of tables by their numbers, their dimensions at the places `units`."""

    name: str
    numbers: torch.Tensor

    def __str__(self) -> str:
        return self.name

    def __call__(self, tables: Sequence[torch.Tensor], units: Sequence[int]) -> torch.Tensor:
        unit = tables[0].shape[tables[0].dim() - len(units) :]
        pools = [table.reshape(-1, *table.shape[table.dim() - len(units) :]) for table in tables]
        pool = torch.cat(pools) if len(pools) > 1 else pools[0]
        found = pool.index_select(0, self.numbers.flatten())
        if self.numbers.dim() != 1:
            found = found.reshape(*self.numbers.shape, *unit)
        own = iter(range(self.numbers.dim()))
        order = [
            self.numbers.dim() + units.index(place) if place in units else next(own) for place in range(found.dim())
        ]
        return found if order == sorted(order) else found.permute(order)


def _as_given(args: Any, kwargs: Any) -> Any:
    """What each mode on the way makes of these arguments, as with a function of torch."""
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return handle_torch_function(_as_given, given, args, kwargs) if has_torch_function(given) else (args, kwargs)


def _indexed(moved: MovedUnits, key: Sequence[Any]) -> MovedUnits:
    return finest(lambda one: one.indexed(key), moved)


def _item(several: Callable[[], Any] | None, place: int) -> Callable[[], torch.Tensor] | None:
    return None if several is None else lambda: several()[place]


def _change(
    func: Any, name: str, moved: MovedUnits, given: Sequence[Any], named: dict[str, Any]
) -> Callable[[MovedUnits], MovedUnits] | None:
    """What a move of one stand-in does; None for a call that is none."""
    key = key_of(name, moved.like, given, named)
    if key is not None:
        return lambda one: one.indexed(key)
    if name in TURNS:
        return lambda one: one.turned(lambda tensor: func(tensor, *given, **named))
    if name in RESHAPES:
        return lambda one: one.reshaped(func(moved.like, *given, **named))
    if name == "expand":
        return lambda one: one.expanded(func(moved.like, *given, **named))
    return None


def _along(name: str, args: Any, kwargs: Any) -> int:
    """The dimension that a split goes along."""
    place = 1 if name == "unbind" else 2
    return int(kwargs.get("dim", args[place] if len(args) > place else 0))
