"""What a run of a model computes from its batch alone, kept call by call, so that another batch can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import resolve_name

from csc import devices
from csc.ir.capture_guards import (
    OBJECTS,
    UNKNOWN,
    Call,
    Decision,
    Expression,
    QueryStep,
    Unstorable,
    expression_to_tree,
    function,
)
from csc.torch_private.traces import in_functorch_transform, outside_tracing, pytree, random_state, unwatched

# --- Writes down what a model's code calls, so that two runs of it can be compared (see csc.ir.capture_guards) -------
#
# A trace and its replay with another batch make the same program if they make the same calls: each with the same plain
# values, on tensors that come from the same places, with gradients and autocast on or off alike. What is called for
# something that the loss does not depend on may differ. Inside vmap and the like tensors cannot be told apart; there
# plain values are compared alone.


# Other operators that write (x += y) come under the name of a method (add_).
WRITERS = frozenset({"__setitem__", "__iand__", "__ilshift__", "__ior__", "__ipow__", "__irshift__", "__ixor__"})
CONTIGUOUS = "torch.Tensor.contiguous"
PLAIN = (
    bool, float, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class Recording:
    """What one run of a model calls, in order."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        """named: tensors that are there before the run: batch entries, parameters and buffers."""
        self._origin: dict[int, tuple[Any, ...]] = {id(tensor): ("of", name) for name, tensor in named.items()}
        self._calls: list[tuple[str, tuple[Any, ...], bool]] = []  # name, leaves, whether the loss needs it anyway
        self._alive: list[torch.Tensor] = list(named.values())
        self._others = 0

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A call, and what it returned. One that gives no tensor decides at most what is called next."""
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        name = resolve_name(func) or str(func)
        within, written = in_functorch_transform(), writes(name)
        if not made and not written and not within:
            return
        # Of one sample it may be the tensor itself, of several or in a trace a copy: the same.
        if (name == CONTIGUOUS or (func is F.dropout and _drops_nothing(*args, **kwargs))) and not within:
            self._origin[id(made[0])] = self._leaf(args[0], within)
            self._alive.append(made[0])
            return
        leaves = (_modes(), *(self._leaf(leaf, within) for leaf in _leaves(args, kwargs)))
        if not within:
            for place, tensor in enumerate(made):
                if id(tensor) not in self._origin or written:
                    self._origin[id(tensor)] = ("call", len(self._calls), place)
                    self._alive.append(tensor)
        self._calls.append((name, leaves, written or within))

    def needed(self, loss: torch.Tensor) -> tuple[Call, ...]:
        """The calls that a tensor depends on, numbered among themselves, sizes as expressions in symbols; at the end
        which of their results it is. One that no call has given (an autograd function of the model's) is unknown.
        """
        last = self._origin.get(id(loss), (UNKNOWN, 0))
        wanted = {last[1]} if last[0] == "call" else set()
        for number in reversed(range(len(self._calls))):
            _, leaves, anyway = self._calls[number]
            if anyway or number in wanted:
                wanted.add(number)
                wanted |= {leaf[1] for leaf in leaves if isinstance(leaf, tuple) and leaf[0] == "call"}
        place = {number: index for index, number in enumerate(sorted(wanted))}
        named = [
            (name, *(_token(leaf, place) for leaf in leaves)) for name, leaves, _ in map(self._calls.__getitem__, place)
        ]
        return (*named, ("loss", _token(last, place)))

    def _leaf(self, leaf: Any, within: bool) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf if _is_size(leaf) else repr(leaf) if isinstance(leaf, PLAIN) else _described(leaf)
        if within:
            return ("tensor",)
        if id(leaf) not in self._origin:
            self._origin[id(leaf)] = self._found(leaf)
            self._alive.append(leaf)
        return self._origin[id(leaf)]

    def _found(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """A tensor that no recorded call has given: a constant, or what vmap made. A value that gradients may flow
        through came from somewhere else: nobody knows from what.
        """
        if type(tensor) is torch.Tensor:
            return _constant(tensor)
        self._others += 1
        kind = UNKNOWN if tensor.is_floating_point() or tensor.is_complex() else "other"
        return (kind, self._others)


def _drops_nothing(tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Of the arguments of F.dropout."""
    return not inplace and (not training or p == 0)


def _modes() -> str:
    """What else decides what a call does."""
    autocast = [device for device in devices.TYPES if torch.is_autocast_enabled(device)]
    return " ".join([*([] if torch.is_grad_enabled() else ["no_grad"]), *autocast])


def _constant(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor with values, which a module or a function has beside its parameters and buffers."""
    with outside_tracing():
        values = (
            tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return ("constant", str(tensor.dtype), str(tuple(tensor.shape)), hashlib.sha256(values).hexdigest())


def _leaves(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Of the arguments, with the length of a sequence before what is in it, and the name of a keyword."""
    for argument in args:
        yield from _inside(argument)
    for name, argument in kwargs.items():
        yield name
        yield from _inside(argument)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield len(value)
        for item in value:
            yield from _inside(item)
    elif isinstance(value, Mapping):
        yield from _leaves((), value)
    elif isinstance(value, slice):
        yield "slice"
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _is_size(leaf: Any) -> bool:
    return isinstance(leaf, (int, torch.SymInt)) and not isinstance(leaf, bool)


def _described(leaf: Any) -> str:
    """Of what has no text of its own: functions and other objects, the same in both runs if they are one."""
    return f"{type(leaf).__qualname__} {getattr(leaf, '__qualname__', id(leaf))}"


def writes(name: str) -> bool:
    """Whether a torch function of this name writes to what it is called with."""
    short_name = name.rpartition(".")[2]
    return short_name in WRITERS or (short_name.endswith("_") and not short_name.endswith("__"))


def _token(leaf: Any, place: Mapping[int, int]) -> Any:
    if isinstance(leaf, torch.SymInt):
        return leaf.node.expr
    if isinstance(leaf, tuple) and leaf[0] == "call":
        return ("call", place[leaf[1]], leaf[2])
    return leaf


# --- What a run of a model computes from its batch alone, kept call by call ------------------------------------------
#
# Another batch can be asked the same.
#
# Parameters, and what is computed with them, random numbers, and tensors that such values were written to are not of
# the batch alone. Views cannot be told from copies here: a write counts for whatever may lie in the same memory.


MISSING = object()
LONGEST = 64  # numbers of an answer
LARGEST = 4096  # elements of a constant
PLAIN_VALUES = (bool, int, float, str, type(None))
FACTORIES = frozenset({"arange", "tensor", "zeros", "ones", "full", "as_tensor", "eye", "linspace"})
# Of these the result lies in memory of its own.
COPIES = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "any", "all",
     "sum", "max", "min", "amax", "amin", "argmax", "argmin", "cumsum", "nonzero", "argwhere", "where", "clone", "isin",
     "add", "sub", "mul", "__add__", "__sub__", "__mul__", "__radd__", "__rsub__", "__rmul__", "__and__", "__or__",
     "__xor__", "__invert__", "logical_and", "logical_or", "logical_not", "logical_xor", "cat", "stack", "unique",
     "sort", "__floordiv__", "__mod__", "floor_divide", "remainder", "argsort", "topk", "bincount", "count_nonzero"}
)  # fmt: skip
Origin = tuple[Any, ...]


class _NotAlone(Exception):
    """Something in a call is not of the batch alone."""


@dataclass(frozen=True)
class _RecordedCall:
    step: QueryStep
    uses: frozenset[Origin]  # origins of what it reads
    written: Origin | None


class Alone:
    """What one run computes of its batch alone. entries: the traced batch entries, by name. values: their real values.
    `decisions` are in the order in which the model took them.
    """

    def __init__(
        self,
        entries: Mapping[str, torch.Tensor],
        constants: Mapping[int, tuple[str, torch.Tensor]],
        values: Mapping[str, torch.Tensor],
    ) -> None:
        """constants: names and values of buffers, by the `id` of what stands for them in this run."""
        self._values = values
        self._origin: dict[int, Origin] = {id(tensor): ("entry", name) for name, tensor in entries.items()}
        self._constants = constants
        self._alive: list[Any] = list(entries.values())
        self._calls: list[_RecordedCall] = []
        self._family: dict[Origin, Origin] = {}
        self._spoilt: set[Origin] = set()  # families that something else was written to
        self._sizes = _symbols(entries)
        self.decisions: list[Decision] = []
        self.constants_read: set[str] = set()

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A call, and what it returned."""
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        name = _own_name(func)
        written = _written(name, args, kwargs)
        if not leaves and written is None:
            return
        try:
            step, uses = self._step(func, args, kwargs)
        except _NotAlone:
            for leaf in leaves:
                if leaf is not written:
                    self._foreign(leaf, name, args, kwargs)
            if written is not None:
                self._spoil(written)
            return
        number: Origin = ("step", len(self._calls))
        target = self._origin.get(id(written)) if written is not None else None
        if written is not None and (target is None or "out" in kwargs):
            self._spoil(written)
            return
        self._calls.append(_RecordedCall(step, uses, target[:2] if target is not None else None))
        if name not in COPIES:
            for origin in uses:
                self._join(number, origin)
        for place, leaf in enumerate(leaves):
            if leaf is not written and not (written is None and id(leaf) in self._origin):
                self._origin[id(leaf)] = (*number, place)
                self._alive.append(leaf)

    def expression(self, func: Any, args: Any, kwargs: Any) -> Expression | None:
        """Returns a call as a function of the batch, with all that its operands go through before it; None if it is
        none.
        """
        try:
            step, uses = self._step(func, args, kwargs)
        except _NotAlone:
            return None
        needed = self._needed(uses)
        if needed is None:
            return None
        place = {number: index for index, number in enumerate(sorted(needed))}
        steps = [self._calls[number].step for number in sorted(needed)]
        expression = Expression(tuple(_numbered(recorded, place) for recorded in (*steps, step)))
        return expression if expression.entries else None

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns what a call gives for the batch at hand, and keeps it as a decision. Returns MISSING if the call is
        not of the batch alone, draws random numbers, or is longer than a decision should be.
        """
        expression = self.expression(func, args, kwargs)
        if expression is None:
            return MISSING
        before = random_state()
        try:
            answer = expression.of(self._values)
        except Exception:  # the model's own calls, on values of a batch
            return MISSING
        leaves = pytree.tree_leaves(answer)
        if len(leaves) > LONGEST or not all(type(leaf) in PLAIN_VALUES for leaf in leaves) or random_state() != before:
            return MISSING
        decision = Decision(expression, answer)
        if decision not in self.decisions:
            self.decisions.append(decision)
        return answer

    def _needed(self, uses: frozenset[Origin]) -> set[int] | None:
        """Calls behind these origins, writes to what may be their memory among them; None if that is not known."""
        needed: set[int] = set()
        origins = set(uses)
        while True:
            families = {self._root(origin) for origin in origins}
            if families & self._spoilt:
                return None
            steps_needed = {origin[1] for origin in origins if origin[0] == "step"}
            steps_needed |= {
                number
                for number, call in enumerate(self._calls)
                if call.written is not None and self._root(call.written) in families
            }
            if steps_needed <= needed:
                return needed
            needed |= steps_needed
            origins = origins.union(*(self._calls[number].uses for number in needed))

    def _step(self, func: Any, args: Any, kwargs: Any) -> tuple[QueryStep, frozenset[Origin]]:
        name = resolve_name(func) or ""
        short_name = _own_name(func)
        try:
            if not name.startswith("torch.") or function(name) != func:
                raise _NotAlone
        except AttributeError:
            raise _NotAlone from None
        uses: set[Origin] = set()
        tree = tuple(self._tree(list(args), uses)), self._tree(dict(kwargs), uses)
        if not uses and short_name not in FACTORIES:
            raise _NotAlone
        return QueryStep(name, *tree, writes(short_name) or "out" in kwargs), frozenset(uses)

    def _tree(self, value: Any, uses: set[Origin]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, uses)
        if isinstance(value, torch.SymInt):
            return ("size", self._size(value))
        if type(value) in PLAIN_VALUES:
            return value
        if isinstance(value, slice):
            return ("slice", *(self._tree(part, uses) for part in (value.start, value.stop, value.step)))
        if type(value) is list:
            return ("list", *(self._tree(item, uses) for item in value))
        if isinstance(value, tuple):
            return ("tuple", *(self._tree(item, uses) for item in value))
        if type(value) is dict and all(isinstance(name, str) for name in value):
            return ("dict", *(("pair", name, self._tree(item, uses)) for name, item in sorted(value.items())))
        if isinstance(value, torch.device):
            return ("device",)
        if value is ...:
            return ("...",)
        for kind, known in OBJECTS.items():
            if isinstance(value, known):
                return (kind, str(value).removeprefix("torch."))
        raise _NotAlone

    def _tensor(self, value: torch.Tensor, uses: set[Origin]) -> Any:
        origin = self._origin.get(id(value))
        if origin is not None:
            uses.add(origin[:2])
            return origin
        name, known = self._constants.get(id(value), ("", value))
        if type(known) is not torch.Tensor or known.requires_grad or known.is_meta or known.numel() > LARGEST:
            raise _NotAlone
        if self._root(("constant", id(value))) in self._spoilt:
            raise _NotAlone
        if name:
            self.constants_read.add(name)
        shape = tuple(known.shape)
        uses.add(("constant", id(value)))
        self._alive.append(value)
        with outside_tracing():
            values = tuple(known.detach().cpu().flatten().tolist())
        return ("constant", str(known.dtype).removeprefix("torch."), shape, values)

    def _size(self, value: torch.SymInt) -> Any:
        expression = value.node.expr
        if any(str(symbol) not in self._sizes for symbol in expression.free_symbols):
            raise _NotAlone
        try:
            return _as_tuples(_renamed(expression_to_tree(expression), self._sizes))
        except Unstorable:
            raise _NotAlone from None

    def _foreign(self, made: torch.Tensor, name: str, args: Any, kwargs: Any) -> None:
        """What a call has made that is not of the batch alone: it may be a view of something that is."""
        self._origin.pop(id(made), None)
        self._alive.append(made)
        if name in COPIES:
            return
        with unwatched():
            for leaf in pytree.tree_leaves((args, kwargs)):
                known = id(leaf) in self._origin and leaf is not made
                if known and isinstance(leaf, torch.Tensor) and leaf.dtype == made.dtype:
                    self._join(("constant", id(made)), self._origin[id(leaf)][:2])

    def _spoil(self, tensor: torch.Tensor) -> None:
        origin = self._origin.get(id(tensor), ("constant", id(tensor)))
        self._alive.append(tensor)
        self._spoilt.add(self._root(origin[:2]))

    def _root(self, origin: Origin) -> Origin:
        while origin in self._family:
            origin = self._family[origin]
        return origin

    def _join(self, left: Origin, other: Origin) -> None:
        left, other = self._root(left), self._root(other)
        if left != other:
            self._family[left] = other
            if left in self._spoilt:
                self._spoilt.add(other)


def _own_name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _written(name: str, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor that a call changes."""
    target = kwargs.get("out", args[0] if args and writes(name) else None)
    return target if isinstance(target, torch.Tensor) else None


def _symbols(entries: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """`input_ids:1`, by the symbol of that size."""
    sizes: list[tuple[str, Any]] = [
        (f"{name}:{dim}", size)
        for name, tensor in reversed(list(entries.items()))
        for dim, size in enumerate(tensor.shape)
        if isinstance(size, torch.SymInt)
    ]
    return {str(size.node.expr): place for place, size in sizes if size.node.expr.is_Symbol}


def _renamed(tree: Any, names: Mapping[str, str]) -> Any:
    if isinstance(tree, str):
        return names[tree]
    return [tree[0], *(_renamed(part, names) for part in tree[1:])] if isinstance(tree, list) else tree


def _as_tuples(tree: Any) -> Any:
    return tuple(map(_as_tuples, tree)) if isinstance(tree, list) else tree


def _numbered(step: QueryStep, place: Mapping[int, int]) -> QueryStep:
    def new(tree: Any) -> Any:
        if not isinstance(tree, tuple):
            return tree
        if tree[:1] == ("step",):
            return ("step", place[tree[1]], tree[2])
        return tree if tree[:1] == ("constant",) else tuple(map(new, tree))

    return QueryStep(step.function, new(step.args), new(step.kwargs), step.writes)
