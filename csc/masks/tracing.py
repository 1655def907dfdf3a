"""A `mask_mod` function traced to a formula: called once, with numbers that record what is done to them.

Terms
  side       a number that depends on the query or on the key, not on both: its table is worked out by torch itself
  sum        a number of the query plus a number of the key: `q_idx - kv_idx`
  traced     what the function gets instead of indices: it records comparisons, and refuses what has no rules

    traced(mask_mod, batch, queries, keys) -> Formula           InputError that names the operation that has no rules
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from csc import devices
from csc.errors import InputError
from csc.masks.checks import INTEGERS
from csc.masks.formula import And, Compare, Constant, Formula, KeyTest, Not, Or, Queries

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
        inner = [item for one in flat for item in (one if isinstance(one, tuple | list) else [one])]
        if any(isinstance(one, TracedScalar) for one in inner):
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
        found = getattr(plain, name, None)
        return found(*args[1:], **kwargs) if found else getattr(torch, name)(plain, *args[1:], **kwargs)
    if name in ("clone", "detach", "contiguous", "pos"):
        return args[0]
    if name in devices.TYPES or (name == "to" and not _casts(args, kwargs)):
        return args[0]  # where the function runs is no part of what it says
    if name in CASTS:
        name, args = "to", (args[0], CASTS[name])
    if name == "getitem":
        return TracedScalar(_indexed(args[0], args[1]))
    values = [_lifted(one, name) if not isinstance(one, torch.dtype) else one for one in args]
    sides = [one for one in values if isinstance(one, Side)]
    if any("h" in one.depends for one in sides):
        raise InputError(f"{name} uses the head", "mask_mod", ONE_HEAD)
    depends = frozenset().union(*(one.depends for one in sides))
    if all(isinstance(one, Side | torch.dtype) for one in values) and not depends >= {"q", "k"}:
        if name not in ONE_SIDE:
            raise _no_rules(name, "is no operation on single indices that is known here")
        return TracedScalar(_one_sided(name, values, depends, kwargs))
    if name not in BOTH_SIDES or kwargs:
        raise _no_rules(name, "is used on a number of the query and a number of the key together")
    return TracedScalar(_both_sides(name, values))


def _casts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `to` changes the type; otherwise it names a device only."""
    return "dtype" in kwargs or any(isinstance(one, torch.dtype) for one in args)


def _one_sided(name: str, values: list[Any], depends: frozenset[str], kwargs: dict[str, Any]) -> Side:
    """The operation itself, on tables."""
    if any(isinstance(one, Side) and one.table.dim() > 3 for one in values):
        raise _no_rules(name, "is used on a table that is not indexed to a number")
    plain = [one.table if isinstance(one, Side) else one for one in values]
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
        if name != "where" and not any(isinstance(one, Side | Sum) and not _is_bool(one) for one in values):
            truths = [_truth(one, name) for one in values]
            return _logic(name, truths)
        if name == "where":
            condition = _truth(values[0], name)
            if all(_is_bool(one) for one in values[1:]):
                yes, no = (_truth(one, name) for one in values[1:])
                return Or(And(condition, yes), And(Not(condition), no))
        raise _no_rules(name, "is used on numbers of the query and of the key together")
    if name == "to":
        if _is_bool(values[0]) == (values[1] == torch.bool):
            return values[0]
        raise _no_rules(f"to({values[1]})", "is used on a condition of query and key together")
    if name in ("lt", "le", "gt", "ge", "eq", "ne"):
        return _compared(name, values[0], values[1])
    if any(not isinstance(one, Side | Sum) or (isinstance(one, Sum) and one.absolute) for one in values):
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
    items = [_lifted(one, "an index") for one in (index if isinstance(index, tuple) else (index,))]
    if isinstance(base, torch.Tensor):
        side = Side(base[None, None, None], frozenset())
    else:
        side = base.value
        if not isinstance(side, Side):
            raise _no_rules("getitem", "indexes a number of query and key together")
    if any(not isinstance(one, Side) or _is_bool(one) or one.table.dim() > 3 for one in items):
        raise _no_rules("getitem", "has an index that is no number of the query or of the key alone")
    depends = frozenset(side.depends).union(*(one.depends for one in items))
    if "h" in depends:
        raise InputError("a table is indexed by the head", "mask_mod", ONE_HEAD)
    if depends >= {"q", "k"}:
        raise _no_rules("getitem", "reads a table of queries by keys: a dense mask")
    lead = [
        torch.arange(size).view([-1 if i == j else 1 for j in range(3)]) for i, size in enumerate(side.table.shape[:3])
    ]
    places = [one.table.view(1, 1, 1) if one.table.dim() == 0 else one.table for one in items]
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


def _no_rules(name: str, what: str) -> InputError:
    return InputError(f"{name} {what}, which no ranges and kinds of keys can say", "mask_mod", REMEDY)
