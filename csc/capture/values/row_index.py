"""Tensors whose rows a model only moves about, as numbers of rows."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from dis import get_instructions
from functools import cache, lru_cache
from inspect import CO_VARARGS, CO_VARKEYWORDS
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.weak import WeakIdKeyDictionary

from csc.capture.values.batch_alone import writes
from csc.torch_private.symbolic_sizes import as_hinted, hint
from csc.torch_private.traces import outside_tracing, pytree

# --- What moves of rows do with the numbers of rows (see csc.capture.values.row_index for the words) -----------------
#
# A move raises LooksInside where it would take units apart, and TooFine where there would be too many numbers.


LARGEST = 1 << 24  # numbers of one stand-in


class LooksInside(Exception):
    """A move would take the units of a stand-in apart."""


class TooFine(Exception):
    """More than LARGEST numbers."""


@dataclass(frozen=True)
class MovedUnits:
    """numbers: of the first element of each unit, among the elements of all tables; units: its dimensions that belong
    to them, in a table's order, of size 1 in numbers; like: of the shape that it has, without data.
    """

    tables: frozenset[int]
    numbers: torch.Tensor
    units: tuple[int, ...]
    like: torch.Tensor

    @property
    def unit(self) -> list[int]:
        """The sizes of a unit."""
        return [self.like.shape[place] for place in self.units]

    def finer(self) -> MovedUnits:
        """With the first dimension of its units numbered. Raises TooFine."""
        place, *units = self.units
        if self.numbers.numel() * self.like.shape[place] > LARGEST:
            raise TooFine
        steps = torch.arange(self.like.shape[place]) * math.prod(self.like.shape[unit] for unit in units)
        shape = [1] * self.like.dim()
        shape[place] = -1
        return replace(self, numbers=self.numbers + steps.view(shape), units=tuple(units))

    def without_units(self) -> torch.Tensor:
        """The numbers alone, without the dimensions of units."""
        return self.numbers.reshape([n for place, n in enumerate(self.numbers.shape) if place not in self.units])

    def _with_ones(self, shape: Sequence[int], units: Sequence[int]) -> list[int]:
        return [1 if place in units else size for place, size in enumerate(shape)]

    # --- one stand-in --------------------------------------------------------------------------------------------

    def reshaped(self, like: torch.Tensor) -> MovedUnits:
        """Of another shape, elements in order."""
        before, after = list(self.like.shape), list(like.shape)
        units: list[int] = []
        for place in self.units:
            ahead = math.prod(before[:place])
            fit = [
                dim for dim, size in enumerate(after)
                if size == before[place] and math.prod(after[:dim]) == ahead and dim not in units
            ]  # fmt: skip
            if not fit:
                raise LooksInside
            units.append(fit[0])
        return MovedUnits(self.tables, self.numbers.reshape(self._with_ones(after, units)), tuple(units), like)

    def turned(self, turn: Callable[[torch.Tensor], torch.Tensor]) -> MovedUnits:
        """With its dimensions in another order."""
        order = turn(torch.empty(tuple(range(2, 2 + self.like.dim())), device="meta")).shape
        units = tuple(list(order).index(2 + place) for place in self.units)
        return MovedUnits(self.tables, turn(self.numbers), units, turn(self.like))

    def indexed(self, key: Sequence[Any]) -> MovedUnits:
        """By whole numbers, slices and None, one for each dimension."""
        units: dict[int, int] = {}
        dim = place = 0
        for item in key:
            if item is None:
                place += 1
                continue
            if dim in self.units:
                if item != slice(None):
                    raise LooksInside
                units[dim] = place
            place += isinstance(item, slice)
            dim += 1
        moved = tuple(units[dim] for dim in self.units)
        return MovedUnits(self.tables, self.numbers[tuple(key)], moved, self.like[tuple(key)])

    def expanded(self, like: torch.Tensor) -> MovedUnits:
        """With dimensions of 1 repeated, and others in front."""
        more = like.dim() - self.like.dim()
        units = tuple(place + more for place in self.units)
        if [like.shape[place] for place in units] != self.unit:
            raise LooksInside
        return MovedUnits(self.tables, self.numbers.expand(self._with_ones(like.shape, units)), units, like)


def finest(move: Callable[[MovedUnits], MovedUnits], moved: MovedUnits) -> MovedUnits:
    """What a move makes of a stand-in, with as few of its dimensions numbered as it can."""
    while True:
        try:
            return move(moved)
        except LooksInside:
            moved = moved.finer()


def joined(several: Sequence[MovedUnits], dim: int) -> MovedUnits:
    """Concatenated along a dimension."""
    parts = list(several)
    while len({(part.units, *part.unit) for part in parts}) > 1 or dim in parts[0].units:
        most = max(len(part.units) for part in parts)
        parts = [part.finer() if len(part.units) == most else part for part in parts]
    tables = frozenset[int]().union(*(part.tables for part in parts))
    numbers = torch.cat([part.numbers for part in parts], dim)
    return MovedUnits(tables, numbers, parts[0].units, torch.cat([part.like for part in parts], dim))


def key_of(name: str, like: torch.Tensor, given: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...] | None:
    """Of a call that takes a part: a whole number, slice or None for each dimension; None if it indexes otherwise."""
    if name == "__getitem__":
        key = given[0] if isinstance(given[0], tuple) else (given[0],)
        if any(isinstance(item, bool) or not isinstance(item, (int, slice, type(None), type(...))) for item in key):
            return None
        count = sum(item is not None and item is not ... for item in key)
        rest = (slice(None),) * (like.dim() - count)
        if ... not in key:
            return (*key, *rest)
        ellipsis = key.index(...)
        return (*key[:ellipsis], *rest, *key[ellipsis + 1 :])
    if name == "narrow":
        dim, start, length = (*given, *named.values())
        return _along(like, dim, slice(start, start + length))
    if name == "select":
        dim, index = (*given, *named.values())
        return _along(like, dim, index)
    return None


def _along(like: torch.Tensor, dim: int, one: Any) -> tuple[Any, ...]:
    key: list[Any] = [slice(None)] * like.dim()
    key[dim] = one
    return tuple(key)


def keys_of_parts(like: torch.Tensor, parts: Sequence[torch.Tensor], dim: int) -> list[tuple[Any, ...]]:
    """Of the parts that a stand-in is taken apart into, slices or (of one dimension less) items."""
    keys, begin = [], 0
    for place, part in enumerate(parts):
        items = part.dim() < like.dim()
        end = begin + (1 if items else part.shape[dim])
        keys.append(_along(like, dim, place if items else slice(begin, end)))
        begin = end
    return keys


# --- Tensors that a model takes apart and puts together again, kept whole --------------------------------------------
#
# Many models split the features of all images into a list with an entry an image, and concatenate the list a few lines
# later. A trace that follows them holds for these images alone: their number, and the rows of each. So a split gives
# stand-ins; if all of them are joined in their order, the tensor that was split takes their place. A stand-in that is
# used in any other way becomes what it stands for.
#
# Terms
#   numbers   values as a Python list; whoever reads one of them in Python decides by it, or cannot, as it is not known
#   chunk     a stand-in for a part of a tensor
#   joined    the parts of one split, all of them, concatenated where they were split (or stacked where unbound)
#
# The length of a list cannot be watched. Where a function between the split and the join (both of them included) has a
# call of `len` in its code, the chunks become real.


SPLITS = frozenset({"split", "split_with_sizes", "unbind"})
_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # csc/capture
_NOT_THE_MODELS = (_OWN_FOLDER, os.path.dirname(torch.__file__))
SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]  # of each access a new one, equal to the others
JOINS = frozenset({"cat", "concat", "concatenate", "stack"})


class _Unread:
    """In a list of numbers that nobody has read yet; no number, so that code beyond Python's sight fails on it."""


class LazyNumbers(list[Any]):
    """A list of values. Until one is read it holds none; then read() gives them, or raises if they are not known, and
    it is a plain list.
    """

    def __init__(self, count: int, read: Callable[[], Sequence[int]], known: bool) -> None:
        super().__init__([_Unread()] * count)
        self.known = known
        self._read: Callable[[], Sequence[int]] | None = read

    @property
    def unread(self) -> bool:
        """Whether nobody has looked at one of them."""
        return self._read is not None

    def settled(self) -> LazyNumbers:
        """Itself, with its values in it."""
        if self._read is not None:
            values, self._read = self._read(), None
            super().__init__(values)
        return self


def _settling(name: str) -> Callable[..., Any]:
    own = getattr(list, name)

    def method(self: LazyNumbers, *args: Any, **kwargs: Any) -> Any:
        return own(self.settled(), *args, **kwargs)

    return method


for _name in (
    "__add__", "__contains__", "__delitem__", "__eq__", "__ge__", "__getitem__", "__gt__", "__iadd__", "__imul__",
    "__iter__", "__le__", "__len__", "__lt__", "__mul__", "__ne__", "__repr__", "__reversed__", "__rmul__",
    "__setitem__", "append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort",
):  # fmt: skip
    setattr(LazyNumbers, _name, _settling(_name))


@dataclass
class _Cut:
    """A tensor that was taken apart along a dimension; unbound: into slices without it. really() is its parts."""

    whole: torch.Tensor
    along: int
    unbound: bool
    chunks: tuple[torch.Tensor, ...]
    really: Callable[[], Sequence[torch.Tensor]]
    stack: list[CodeType]
    parts: Sequence[torch.Tensor] = field(default=())
    joined: bool = False
    reshaped: dict[tuple[int, ...], _Cut] = field(default_factory=dict)

    def part(self, place: int) -> torch.Tensor:
        """What a chunk stands for."""
        if not self.parts:
            self.parts = self.really()
        return self.parts[place]


class _Shape(tuple[Any, ...]):
    """The shape of a chunk. Its size along the split is looked up when it is asked for."""

    cut: _Cut
    place: int

    @classmethod
    def of(cls, cut: _Cut, place: int) -> _Shape:
        """Of the chunk at a place of a split."""
        shape = cls(cut.whole.shape)
        shape.cut, shape.place = cut, place
        return shape

    def real(self) -> torch.Size:
        """With the size along the split."""
        return self.cut.part(self.place).shape

    def __getitem__(self, index: Any) -> Any:
        dims = range(self.cut.whole.dim())[index]
        known = self.cut.along not in (dims if isinstance(dims, range) else (dims,))
        return super().__getitem__(index) if known else self.real()[index]

    def numel(self) -> Any:
        """As torch.Size has it."""
        return self.real().numel()


def _of_the_real_shape(name: str) -> Callable[..., Any]:
    def method(self: _Shape, *args: Any) -> Any:
        return getattr(self.real(), name)(*args)

    return method


for _name in (
    "__add__", "__contains__", "__eq__", "__ge__", "__gt__", "__hash__", "__iter__", "__le__", "__lt__", "__mul__",
    "__ne__", "__repr__", "__rmul__", "count", "index",
):  # fmt: skip
    setattr(_Shape, _name, _of_the_real_shape(_name))


class LazyChunks:
    """The chunks of one trace. run(func, name, args, kwargs): calls a function as the model would."""

    def __init__(self, run: Callable[[Any, str, Any, Any], Any]) -> None:
        self._run = run
        self._cuts: dict[int, tuple[_Cut, int]] = {}

    def cut(
        self, name: str, args: Any, kwargs: Any, really: Callable[[Any, Any], Sequence[torch.Tensor]]
    ) -> tuple[torch.Tensor, ...] | None:
        """Stand-ins for the parts of a split by numbers that nobody has read, or for the slices along the first
        dimension if its size is symbolic; None for other calls. really(args, kwargs) is the split itself.
        """
        if name not in SPLITS or not args or not isinstance(args[0], torch.Tensor):
            return None
        tensor, (second, third) = args[0], (*args[1:3], None, None)[:2]
        if name == "unbind":
            along = kwargs.get("dim", second or 0)
            count = hint(tensor.shape[0]) if along == 0 and tensor.dim() > 1 else None
        else:
            sizes = kwargs.get("split_size", kwargs.get("split_size_or_sections", kwargs.get("split_sizes", second)))
            along = kwargs.get("dim", third or 0) % tensor.dim()
            count = list.__len__(sizes) if isinstance(sizes, LazyNumbers) and sizes.unread else None
        if not count:
            return None
        cut = _Cut(tensor, along, name == "unbind", _stand_ins(count), lambda: really(args, kwargs), _codes())
        return self._known(cut)

    def _known(self, cut: _Cut) -> tuple[torch.Tensor, ...]:
        self._cuts |= {id(chunk): (cut, place) for place, chunk in enumerate(cut.chunks)}
        return cut.chunks

    def shape(self, name: str, func: Any, args: Any) -> tuple[Any, ...] | None:
        """`chunk.shape`, `chunk.size()`, `chunk.size(1)`; None for other calls."""
        if func != SHAPE and name != "size":
            return None
        cut, place = self._cuts.get(id(args[0]), (None, 0))
        if cut is None or cut.unbound or cut.parts:
            return None
        shape = _Shape.of(cut, place)
        return shape[args[1]] if name == "size" and len(args) > 1 else shape

    def reshaped(self, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
        """`chunk.reshape(-1, *rest)` or `chunk.view(-1, *rest)`, where rest are its last sizes: a chunk of the whole so
        reshaped, if it was split along its first dimension. None for other calls.
        """
        if name not in ("reshape", "view") or kwargs or id(args[0]) not in self._cuts:
            return None
        cut, place = self._cuts[id(args[0])]
        sizes = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
        if not all(isinstance(size, (int, torch.SymInt)) for size in sizes) or not 1 < len(sizes) <= cut.whole.dim():
            return None
        first, *rest = sizes
        if cut.unbound or cut.parts or cut.along or first != -1:
            return None
        if list(cut.whole.shape[-len(rest) :]) != rest:
            return None
        if tuple(rest) not in cut.reshaped:
            rows = lambda tensor: self._run(torch.Tensor.reshape, "reshape", (tensor, -1, *rest), {})  # noqa: E731
            tensor = rows(cut.whole)
            real = lambda: [rows(cut.part(place)) for place in range(len(cut.chunks))]  # noqa: E731
            cut.reshaped[tuple(rest)] = chunks = _Cut(tensor, 0, False, _stand_ins(len(cut.chunks)), real, cut.stack)
            self._known(chunks)
        return cut.reshaped[tuple(rest)].chunks[place]

    def joined(self, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The tensor that was split, if the call puts all its chunks together where it was split."""
        parts = kwargs.get("tensors", args[0] if args else None)
        if name not in JOINS or not isinstance(parts, (list, tuple)) or not parts or id(parts[0]) not in self._cuts:
            return None
        cut, _ = self._cuts[id(parts[0])]
        along = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        tensor, in_order = cut.whole, [id(part) for part in parts] == [id(chunk) for chunk in cut.chunks]
        if not in_order or cut.parts or _asks_for_a_length(cut.stack, _codes()):
            return None
        cut.joined = True
        if not cut.unbound:
            return self._copy(tensor) if name != "stack" and along % tensor.dim() == cut.along else None
        if along != 0:
            return None
        return self._copy(tensor if name == "stack" else self._run(torch.Tensor.flatten, "flatten", (tensor, 0, 1), {}))

    def settle(self) -> None:
        """Make slices real that were made and not joined: a model that went through them, and did nothing with them,
        has counted them.
        """
        for cut, place in list(self._cuts.values()):
            if not place and cut.unbound and not cut.joined:
                cut.part(place)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """As a join makes one: what is written to it later is not written to what was split. Pass `shapes` takes out a
        copy that changes nothing.
        """
        return self._run(torch.Tensor.clone, "clone", (tensor,), {"memory_format": torch.contiguous_format})

    def real(self, leaf: Any) -> Any:
        """What a chunk stands for; anything else as it is."""
        if isinstance(leaf, LazyNumbers):
            return leaf.settled()
        if isinstance(leaf, _Shape):
            return leaf.real()
        if id(leaf) not in self._cuts:
            return leaf
        cut, place = self._cuts[id(leaf)]
        return cut.part(place)


def _stand_ins(count: int) -> tuple[torch.Tensor, ...]:
    with outside_tracing():
        return tuple(torch.empty(0) for _ in range(count))


def length(name: str, args: Any) -> int | None:
    """What `list(tensor)` expects for its length, if the size is symbolic: to know that decides nothing. None for the
    `len(tensor)` of a function that calls `len`.
    """
    if name != "__len__" or not args or not isinstance(args[0], torch.Tensor) or not args[0].dim():
        return None
    caller = next((code for code in _codes() if not code.co_filename.startswith(_NOT_THE_MODELS)), None)
    return hint(args[0].shape[0]) if caller is not None and not _measured(caller) else None


def _codes() -> list[CodeType]:
    """What runs, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return codes


def _asks_for_a_length(cut: Sequence[CodeType], join: Sequence[CodeType]) -> bool:
    """Whether a function through which the chunks may have gone has a call of `len`: those on either stack below, and
    with, the innermost one on both.
    """
    shared = 0
    while shared < min(len(cut), len(join)) and cut[-1 - shared] is join[-1 - shared]:
        shared += 1
    called_before, called_after = cut[: len(cut) - shared + 1], join[: len(join) - shared]
    return any(_measured(code) - _collected(code) for code in called_before) or any(map(_measured, called_after))


@lru_cache(maxsize=1024)
def _measured(code: CodeType) -> frozenset[str]:
    """The names whose `len` a function of the model's takes; "" for the length of anything else."""
    if "len" not in code.co_names or code.co_filename.startswith(_OWN_FOLDER):
        return frozenset()
    read = list(get_instructions(code))
    after = [
        two
        for instruction, two in pairwise(read)
        if instruction.opname.startswith("LOAD_") and instruction.argval == "len"
    ]
    return frozenset(
        str(instruction.argval) if instruction.opname.startswith("LOAD_FAST") else "" for instruction in after
    )


def _collected(code: CodeType) -> frozenset[str]:
    """The names of `*args` and `**kwargs`: they hold what a function was called with before there were chunks."""
    named = code.co_argcount + code.co_kwonlyargcount
    count = bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    return frozenset(code.co_varnames[named : named + count])


# --- Tensors whose rows a model only moves about, as numbers of rows -------------------------------------------------
#
# Models lay out the features of images by the size of each: LLaVA-NeXT takes the tiles of an image apart, puts them
# together as the image was, cuts off what is padding and ends each line with a learned row. A trace that follows it
# holds for images of these sizes. Here such code runs on the numbers of the rows. What it makes of them is computed
# for every batch before the step, and the graph takes the rows by these numbers.
#
# Terms
#   table    a tensor that is taken apart along its first dimension, or a parameter with one dimension
#   unit     dimensions of a table that stay whole: as few of the first ones are numbered as the code looks into
#   moved    what a stand-in for rows of tables holds: their numbers, and a tensor without data that has their shape
#   move     a call that only moves rows: reshapes, transposes, slices, concatenations. Before any other call the
#            stand-ins in its arguments become what they stand for, and before the call of a module: rows taken by their
#            numbers if they were joined from several, else what the same calls make of the table itself.


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
    """The stand-ins of one run. entries: has the numbers as traced batch entries; None in a replay, where `made` has
    them afterwards. run(func, name, args, kwargs): calls a function as the model would.
    """

    def __init__(
        self,
        parameters: Collection[torch.Tensor],
        entries: Mapping[str, torch.Tensor] | None,
        run: Callable[[Any, str, Any, Any], Any],
    ) -> None:
        self._parameters = {id(parameter) for parameter in parameters if parameter.dim() == 1}
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
            stand_in = self._stand_ins[leaf]
            self._real[leaf] = stand_in.again() if stand_in.again is not None else self._by_number(stand_in.moved)
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
        call_module = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if any(self._holds(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
                args, kwargs = _as_given(args, kwargs)  # who watches the run makes them real
            return call_module(module, *args, **kwargs)

        with patch.object(nn.Module, "__call__", call):
            yield

    # --- how stand-ins begin -------------------------------------------------------------------------------------

    def _starts(self, name: str, args: Any, kwargs: Any) -> bool:
        table = args[0] if args else None
        if id(table) in self._parameters:
            return name in STARTS
        if name not in SPLITS or not isinstance(table, torch.Tensor) or not table.is_floating_point():
            return False
        known = all(argument.known for argument in (*args, *kwargs.values()) if isinstance(argument, LazyNumbers))
        return known and table.dim() > 1 and _split_dim(name, args, kwargs) % table.dim() == 0

    def _of_table(self, table: torch.Tensor) -> torch.Tensor:
        """A stand-in for all of a table."""
        place = next(
            (place for place, known_table in enumerate(self._tables) if known_table is table), len(self._tables)
        )
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
        stand_in = self._stand_ins[args[0]] if self._holds(args[0]) else None
        if stand_in is None:
            return NotImplemented
        moved, likes, named = stand_in.moved, self._likes(args[1:]), self._likes(kwargs)
        again = cache(lambda: self._run(func, name, *pytree.tree_map(self.real, (args, kwargs))))
        own = again if stand_in.again is not None else None
        if name in COPIES:
            return self._stand_in(moved, own) if self._same_kind(moved, (args[1:], kwargs)) else NotImplemented
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((likes, named))):
            return NotImplemented
        if name in SPLITS:
            dim = _split_dim(name, args, kwargs) % moved.like.dim()
            keys = keys_of_parts(moved.like, func(moved.like, *likes, **named), dim)
            return tuple(self._stand_in(_indexed(moved, key), _item(own, place)) for place, key in enumerate(keys))
        change = _change(func, name, moved, likes, named)
        return NotImplemented if change is None else self._stand_in(finest(change, moved), own)

    def _joined(self, name: str, args: Any, kwargs: Any) -> Any:
        """Of several stand-ins, and no tensor beside them; parameters alone are not worth it."""
        tensors = kwargs.get("tensors", args[0] if args else ())
        stand_ins = [self._stand_ins[tensor] if self._holds(tensor) else None for tensor in tensors]
        parts = [stand_in.moved for stand_in in stand_ins if stand_in is not None]
        tables = frozenset[int]().union(*(part.tables for part in parts))
        of_parameters = all(id(self._tables[place]) in self._parameters for place in tables)
        if of_parameters or len(parts) < len(stand_ins) or len({part.like.dtype for part in parts}) > 1:
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
        arguments = ([self._tables[place] for place in tables], moved.units)
        return self._run(_Take(name, numbers), "rows", arguments, {})

    def _within(self, moved: MovedUnits, tables: Sequence[int]) -> torch.Tensor:
        """Numbers of units among those of these tables, one table after the other."""
        numbers, size = moved.without_units(), math.prod(moved.unit)
        numbers_within = torch.empty_like(numbers)
        before = 0
        for place in tables:
            begin, end = self._begins[place : place + 2]
            inside = (numbers >= begin) & (numbers < end)
            numbers_within[inside] = (numbers[inside] - begin) // size + before
            before += (end - begin) // size
        return numbers_within


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
        taken = pool.index_select(0, self.numbers.flatten())
        if self.numbers.dim() != 1:
            taken = taken.reshape(*self.numbers.shape, *unit)
        index_dims = iter(range(self.numbers.dim()))
        order = [
            self.numbers.dim() + units.index(place) if place in units else next(index_dims)
            for place in range(taken.dim())
        ]
        return taken if order == sorted(order) else taken.permute(order)


def _as_given(args: Any, kwargs: Any) -> Any:
    """What each mode on the way makes of these arguments, as with a function of torch."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return handle_torch_function(_as_given, tensors, args, kwargs) if has_torch_function(tensors) else (args, kwargs)


def _indexed(moved: MovedUnits, key: Sequence[Any]) -> MovedUnits:
    return finest(lambda units: units.indexed(key), moved)


def _item(several: Callable[[], Any] | None, place: int) -> Callable[[], torch.Tensor] | None:
    return None if several is None else lambda: several()[place]


def _change(
    func: Any, name: str, moved: MovedUnits, arguments: Sequence[Any], named: dict[str, Any]
) -> Callable[[MovedUnits], MovedUnits] | None:
    """What a move of one stand-in does; None for a call that is none."""
    key = key_of(name, moved.like, arguments, named)
    if key is not None:
        return lambda units: units.indexed(key)
    if name in TURNS:
        return lambda units: units.turned(lambda tensor: func(tensor, *arguments, **named))
    if name in RESHAPES:
        return lambda units: units.reshaped(func(moved.like, *arguments, **named))
    if name == "expand":
        return lambda units: units.expanded(func(moved.like, *arguments, **named))
    return None


def _split_dim(name: str, args: Any, kwargs: Any) -> int:
    """The dimension that a split goes along."""
    place = 1 if name == "unbind" else 2
    return int(kwargs.get("dim", args[place] if len(args) > place else 0))
