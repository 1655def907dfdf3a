"""Calls that move entries: views, parts and joins, look-ups, padding, repetition.

RULES: {operation: rule}        see csc.analysis.operators.table
RESHAPES: calls that lay out the same entries in other sizes, in their order; SIZED_VIEWS: and EXPAND
COPIES: calls that give the entries of their first operand, in the same sizes; CASTS: those that may change the dtype
EXACT_COPIES: without casts, and for each of a dimension; UNSQUEEZED: reshapes, and dimensions of one entry more or less
SAME_NUMBERS: calls that hand on all entries of their first operand, and no others
LOOK_UPS: rows of a table by numbers; EMBEDDING: that of a table that trains
SLICE, PARTS, PADS: a part of a dimension; one, or all; more entries in front of it or behind
STOPS: calls whose result has no gradient to hand on
GATHER: the tokens of all context-parallel ranks
SIZES: {operation: argument}    that lists the result's sizes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.relation import Call, End, Link, Rule, Use, alike, dims_of, same, several, shape_of

RESHAPES = {"aten::view", "aten::_unsafe_view", "aten::reshape"}
EXPAND = "aten::expand"
SIZED_VIEWS = RESHAPES | {EXPAND}
COPIES = {"aten::clone", "aten::_to_copy", "aten::contiguous", "aten::alias", "aten::detach"}
CASTS = {"aten::_to_copy", "aten::to", "aten::type_as"}
EXACT_COPIES = (COPIES - CASTS) | {"aten::expand", "aten::lift_fresh_copy"}
UNSQUEEZED = RESHAPES | {"aten::unsqueeze", "aten::squeeze"}
SAME_NUMBERS = COPIES | CASTS | SIZED_VIEWS | {
    f"aten::{name}" for name in ("lift_fresh_copy", "unsqueeze", "squeeze", "transpose", "permute", "t")
}  # fmt: skip
EMBEDDING, SLICE = "aten::embedding", "aten::slice"
PARTS = {SLICE, "aten::split", "aten::split_with_sizes"}
PADS = {"aten::pad", "aten::constant_pad_nd"}
LOOK_UPS = {"aten::index", "aten::index_select", EMBEDDING}
STOPS = frozenset({"aten::detach", "csc::incoming"})
SIZES = {
    "aten::view": "size", "aten::_unsafe_view": "size", "aten::reshape": "shape", "aten::expand": "size",
    "aten::sum_to_size": "size",
}  # fmt: skip
GATHER = "csc::context_gather"
_MASKS = (torch.bool, torch.uint8)
_COMPLEX = ("view_as_complex", "view_as_real", "real", "imag", "conj", "_conj", "_neg_view", "resolve_conj",
            "resolve_neg")  # fmt: skip


def _view(given: Sequence[Any], out: Sequence[Any], dims: Sequence[int | None]) -> Link:
    """A view's link: of its dimensions, those that are whole. One entry is no dimension that is walked."""
    return tuple(d if d is not None and alike(given[d], size) and several(size) else None for d, size in zip(dims, out))


def reshape(call: Call) -> list[Use]:
    return [Use(call.first(), (None,) * len(call.out), End("regrouped"))]


def unchanged(call: Call) -> list[Use]:
    return [Use(call.first(), _view(shape_of(call.first()), call.out, range(len(call.out))))]


def permutation(call: Call) -> list[Use]:
    """`permute`, `transpose`, `t`."""
    rank = len(call.out)
    dims = list(range(rank))
    if "dims" in call.bound:
        dims = dims_of(call.bound["dims"], rank) if rank else []
    elif rank > 1:
        one, other = (call.bound.get(name, place) % rank for name, place in (("dim0", 0), ("dim1", 1)))
        dims[one], dims[other] = dims[other], dims[one]
    return [Use(call.first(), _view(shape_of(call.first()), call.out, dims))]


def unsqueeze(call: Call) -> list[Use]:
    new = call.bound["dim"] % len(call.out)
    dims = [None if d == new else d - (d > new) for d in range(len(call.out))]
    return [Use(call.first(), _view(shape_of(call.first()), call.out, dims))]


def squeeze(call: Call) -> list[Use]:
    given = shape_of(call.first())
    named = dims_of(call.bound.get("dim"), len(given))
    dims = [d for d, size in enumerate(given) if d not in named or several(size)]
    return [Use(call.first(), _view(given, call.out, dims))]


def expand(call: Call) -> list[Use]:
    shift = len(call.out) - len(shape_of(call.first()))
    dims = [d - shift if d >= shift else None for d in range(len(call.out))]
    return [Use(call.first(), _view(shape_of(call.first()), call.out, dims))]


def gathered(call: Call) -> list[Use]:
    """csc::context_gather: the tokens of all ranks in `dim`."""
    dim = call.bound["dim"]
    link = tuple(None if d == dim else d for d in range(len(call.out)))
    (plan,) = call.given("plan")
    return [
        Use(call.first(), link, ends={dim: End("blocked", dim)}),
        Use(plan, (None,) * len(call.out), End("blocked")),
    ]


def select(call: Call) -> list[Use]:
    """`select` and `unbind`: one dimension less."""
    given = shape_of(call.first())
    gone = call.bound["dim"] % len(given)
    dims = [d for d in range(len(given)) if d != gone]
    start = call.bound.get("index", 0)
    return [Use(call.first(), _view(given, call.out, dims), ends={gone: End("cut", None, start)})]


def part(call: Call) -> list[Use]:
    """`slice`, `narrow`, `split` and the like: of one dimension a part, unless it is all of it, step by step."""
    given = shape_of(call.first())
    dim = call.bound["dim"] % len(given)
    steps = call.bound.get("step", 1) != 1
    link = _view(given, call.out, [None if d == dim and steps else d for d in range(len(given))])
    end = End("blocked", dim) if steps else End("cut", dim, _first_of(call, given[dim]))
    return [Use(call.first(), link, ends={dim: end})]


def _first_of(call: Call, size: Any) -> int:
    start = call.bound.get("start", 0)
    if not isinstance(start, int) or not isinstance(size, int):
        return 0
    return slice(start, None).indices(size)[0]


def cat(call: Call) -> list[Use]:
    dim, start = call.bound["dim"] % max(len(call.out), 1), 0
    uses = []
    for one in call.bound["tensors"]:
        size = shape_of(one)
        end = End("joined", dim, start)
        uses.append(Use(one, same(size, call.out, without=[dim]), ends={dim: end}))
        start = start + size[dim] if len(size) > dim and isinstance(size[dim], int) else start
    return uses


def masked_scatter(call: Call) -> list[Use]:
    """Rows of `source`, in their order, where the mask says so."""
    link = same(shape_of(call.first()), call.out)
    places = same(shape_of(call.bound["mask"]), call.out, from_right=True)
    shift = len(call.out) - len(shape_of(call.bound["mask"]))
    ends = {d - shift: End("blocked", d) for d, along in enumerate(places) if along is not None}
    return [
        Use(call.first(), link),
        Use(call.bound["mask"], (None,) * len(call.out), ends=ends),
        Use(call.bound["source"], (None,) * len(call.out), End("blocked")),
    ]


def stack(call: Call) -> list[Use]:
    new = call.bound["dim"] % len(call.out)
    link = tuple(None if d == new else d - (d > new) for d in range(len(call.out)))
    return [Use(one, link) for one in call.bound["tensors"]]


def index_select(call: Call) -> list[Use]:
    """Rows of a table by numbers."""
    table: Any = call.bound["self"]
    dim = call.bound["dim"] % max(len(call.out), 1)
    return look_up(table, [None] * dim + [call.bound["index"]], call.out)


def embedding(call: Call) -> list[Use]:
    return look_up(call.bound["weight"], [call.bound["indices"]], call.out)


def one_hot(call: Call) -> list[Use]:
    return [Use(call.bound["self"], (*range(len(call.out) - 1), None))]


def index(call: Call) -> list[Use]:
    """`x[i, j]`."""
    by = [one for one in call.bound["indices"] if one is not None]
    if not by or any(one.meta["val"].dtype in _MASKS for one in by):
        return []
    return look_up(call.bound["self"], call.bound["indices"], call.out)


def look_up(table: fx.Node, indices: Sequence[fx.Node | None], out: Sequence[Any]) -> list[Use]:
    """Of a table, and of the tensors that index it: the dimensions that are indexed give way to those of the indices,
    broadcast together.
    """
    by = {place: one for place, one in enumerate(indices) if one is not None}
    places = list(by)
    rank = max(len(shape_of(one)) for one in by.values())
    front = places != list(range(places[0], places[-1] + 1))
    begin = 0 if front else places[0]
    kept = iter(d for d in range(len(shape_of(table))) if d not in by)
    link = tuple(None if begin <= d < begin + rank else next(kept) for d in range(len(out)))
    uses = [Use(table, link, ends={place: End("picked") for place in places})]
    for one in by.values():
        within = same(shape_of(one), out[begin : begin + rank], from_right=True)
        uses.append(Use(one, (*[None] * begin, *within, *[None] * (len(out) - begin - rank))))
    return uses


def along_others(call: Call) -> list[Use]:
    """`gather`, `scatter` and the like: by places of one dimension; in all others operands walk along together, from
    the first index on.
    """
    dim = call.bound["dim"] % max(len(call.out), 1)
    uses = []
    for used in call.tensors():
        if call.name == "aten::select_scatter" and used is call.bound["src"]:
            kept = [d - (d > dim) if d != dim else None for d in range(len(call.out))]
            uses.append(Use(used, tuple(kept)))
        elif len(shape_of(used)) == len(call.out):
            ends = {d: End("cut", d) for d, size in enumerate(shape_of(used)) if several(size)}
            ends[dim] = End("blocked")
            uses.append(Use(used, same(shape_of(used), call.out, without=[dim]), ends=ends))
    return uses


def pad(call: Call) -> list[Use]:
    """Dimensions that nothing is added to or cut from stay as they are."""
    rank, amounts = len(call.out), list(call.bound["pad"])
    touched = {rank - 1 - i // 2 for i, amount in enumerate(amounts) if not isinstance(amount, int) or amount}
    ends = {d: End("padded", d) for d in touched}
    return [Use(call.first(), tuple(None if d in touched else d for d in range(rank)), ends=ends)]


def repeat(call: Call) -> list[Use]:
    operand = call.first()
    shift = len(call.out) - len(shape_of(operand))
    ends = {d: End("repeated", d + shift) for d, size in enumerate(shape_of(operand)) if several(size)}
    return [Use(operand, same(shape_of(operand), call.out, from_right=True), ends=ends)]


def windows(call: Call) -> list[Use]:
    dim = call.bound["dimension"] % (len(call.out) - 1)
    link = tuple(None if d in (dim, len(call.out) - 1) else d for d in range(len(call.out)))
    return [Use(call.first(), link, End("blocked"))]


def pairs(call: Call) -> list[Use]:
    """Views between complex numbers and pairs of real ones: those lie in a dimension of their own, the last."""
    rank = min(len(call.out), len(shape_of(call.first())))
    link = tuple(d if d < rank else None for d in range(len(call.out)))
    return [Use(call.first(), link, End("blocked"))]


RULES: dict[str, Rule] = {
    **dict.fromkeys(RESHAPES, reshape),
    **dict.fromkeys(("aten::alias", "aten::detach"), unchanged),
    **dict.fromkeys(("aten::permute", "aten::transpose", "aten::t"), permutation),
    "aten::unsqueeze": unsqueeze,
    "aten::squeeze": squeeze,
    "aten::expand": expand,
    **dict.fromkeys(("aten::select", "aten::unbind"), select),
    **{f"aten::{name}": part for name in ("slice", "narrow", "split", "split_with_sizes", "unsafe_split", "chunk")},
    "aten::cat": cat,
    "aten::stack": stack,
    "aten::masked_scatter": masked_scatter,
    "aten::index_select": index_select,
    EMBEDDING: embedding,
    "aten::one_hot": one_hot,
    "aten::index": index,
    **{f"aten::{name}": along_others
       for name in ("gather", "scatter", "scatter_add", "scatter_reduce", "slice_scatter", "select_scatter",
                    "diff", "index_add", "index_copy", "index_fill", "index_reduce", "linalg_cross")},
    **dict.fromkeys(("aten::pad", "aten::constant_pad_nd"), pad),
    "aten::repeat": repeat,
    "aten::unfold": windows,
    GATHER: gathered,
    **{f"aten::{name}": pairs for name in _COMPLEX},
}  # fmt: skip


def getitem(node: fx.Node) -> list[Use]:
    """One of several results, which lies as the first of them does."""
    out = shape_of(node)
    return [Use(used, same(shape_of(used), out)) for used in node.all_input_nodes]
