"""Tensors that a model takes apart and puts together again, kept whole.

Many models split the features of all images into a list with an entry an image, and concatenate the list a few lines
later. A trace that follows them holds for these images alone: their number, and the rows of each. So a split gives
stand-ins; if all of them are joined in their order, the tensor that was split takes their place. A stand-in that is
used in any other way becomes what it stands for.

Terms
  numbers   values as a Python list; whoever reads one of them in Python decides by it, or cannot, as it is not known
  chunk     a stand-in for a part of a tensor
  joined    the parts of one split, all of them, concatenated where they were split (or stacked where unbound)

    Numbers(count, read, known)                                  a list of int; read() gives them once they are read
    chunks.cut(name, args, kwargs, really)                       stand-ins for a split's result, or None
    chunks.joined(name, args, kwargs) -> Tensor | None           what a call makes of all chunks of a split
    chunks.reshaped(name, args, kwargs) -> Tensor | None         a chunk whose rows were flattened
    chunks.shape(name, func, args) -> tuple | None               the shape of a chunk
    chunks.real(leaf) -> Any                                     what a chunk stands for, or the leaf itself
    chunks.settle()                                              at the end: slices that were not put together again
    length(name, args) -> int | None                             for `list(tensor)`, which asks how long it will become

The length of a list cannot be watched. Where a function between the split and the join (both of them included) has a
call of `len` in its code, the chunks become real.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from dis import get_instructions
from functools import lru_cache
from inspect import CO_VARARGS, CO_VARKEYWORDS
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import torch

from csc.torch_private.symbolic_sizes import hint
from csc.torch_private.traces import outside_tracing

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
        found = cls(cut.whole.shape)
        found.cut, found.place = cut, place
        return found

    def real(self) -> torch.Size:
        """With the size along the split."""
        return self.cut.part(self.place).shape

    def __getitem__(self, index: Any) -> Any:
        asked = range(self.cut.whole.dim())[index]
        known = self.cut.along not in (asked if isinstance(asked, range) else (asked,))
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
        whole, (second, third) = args[0], (*args[1:3], None, None)[:2]
        if name == "unbind":
            along = kwargs.get("dim", second or 0)
            count = hint(whole.shape[0]) if along == 0 and whole.dim() > 1 else None
        else:
            sizes = kwargs.get("split_size", kwargs.get("split_size_or_sections", kwargs.get("split_sizes", second)))
            along = kwargs.get("dim", third or 0) % whole.dim()
            count = list.__len__(sizes) if isinstance(sizes, LazyNumbers) and sizes.unread else None
        if not count:
            return None
        made = _Cut(whole, along, name == "unbind", _stand_ins(count), lambda: really(args, kwargs), _codes())
        return self._known(made)

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
        found = _Shape.of(cut, place)
        return found[args[1]] if name == "size" and len(args) > 1 else found

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
            whole = rows(cut.whole)
            real = lambda: [rows(cut.part(place)) for place in range(len(cut.chunks))]  # noqa: E731
            cut.reshaped[tuple(rest)] = made = _Cut(whole, 0, False, _stand_ins(len(cut.chunks)), real, cut.stack)
            self._known(made)
        return cut.reshaped[tuple(rest)].chunks[place]

    def joined(self, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The tensor that was split, if the call puts all its chunks together where it was split."""
        parts = kwargs.get("tensors", args[0] if args else None)
        if name not in JOINS or not isinstance(parts, (list, tuple)) or not parts or id(parts[0]) not in self._cuts:
            return None
        cut, _ = self._cuts[id(parts[0])]
        along = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        whole, in_order = cut.whole, [id(one) for one in parts] == [id(chunk) for chunk in cut.chunks]
        if not in_order or cut.parts or _asks_for_a_length(cut.stack, _codes()):
            return None
        cut.joined = True
        if not cut.unbound:
            return self._copy(whole) if name != "stack" and along % whole.dim() == cut.along else None
        if along != 0:
            return None
        return self._copy(whole if name == "stack" else self._run(torch.Tensor.flatten, "flatten", (whole, 0, 1), {}))

    def settle(self) -> None:
        """Make slices real that were made and not joined: a model that went through them, and did nothing with them,
        has counted them.
        """
        for cut, place in list(self._cuts.values()):
            if not place and cut.unbound and not cut.joined:
                cut.part(place)

    def _copy(self, whole: torch.Tensor) -> torch.Tensor:
        """As a join makes one: what is written to it later is not written to what was split. Pass `shapes` takes out a
        copy that changes nothing.
        """
        return self._run(torch.Tensor.clone, "clone", (whole,), {"memory_format": torch.contiguous_format})

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
    found = []
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return found


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
    after = [two for one, two in pairwise(read) if one.opname.startswith("LOAD_") and one.argval == "len"]
    return frozenset(str(one.argval) if one.opname.startswith("LOAD_FAST") else "" for one in after)


def _collected(code: CodeType) -> frozenset[str]:
    """The names of `*args` and `**kwargs`: they hold what a function was called with before there were chunks."""
    named = code.co_argcount + code.co_kwonlyargcount
    count = bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    return frozenset(code.co_varnames[named : named + count])
