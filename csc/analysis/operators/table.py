"""The table of operator rules: how the dimensions of a call's operands relate to those of its result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
from torch import fx

from csc.ir import graph as g
from csc.torch_private.exported import OpOverload

# --- How the dimensions of one call's operands relate to those of its result: the terms of the table of operators ----
#
#   link      for each dimension of the result, the operand's dimension that it walks along with, index by index; None
#             where there is none
#   end       what becomes of an operand's dimension that no dimension of the result walks along with
#   walk      dimensions of operands that are walked together and are not in the result have one number
#   axis      (dim, inner): index i of dimension `dim` belongs to item i // inner % count of what is counted (tokens,
#             samples). inner is 1 unless a reshape has joined the items with what stood behind them
#
# Sizes may be symbols: they are compared as expressions, so that nothing is assumed of a trace.


Axis = tuple[int, int]
Link = tuple[int | None, ...]

How = Literal[
    "broadcast",  # one entry for all indices of the result's dimension
    "contracted",  # multiplied with another operand's dimension of the same walk, and summed
    "summed",  # a sum, mean or other reduction over it, alone or together with another operand's of the same walk
    "normalised",  # a reduction over it is put back into every entry, in the result's dimension `dim`
    "blocked",  # worked along: in order, by windows, by places; its entries cannot be had apart. `dim`: as above
    "cut",  # a part of it, from index `start`, is the result's dimension `dim`: a term of a sum
    "joined",  # is the part of the result's dimension `dim` from index `start`: a term of a sum
    "repeated",  # walked several times by the result's dimension `dim`
    "padded",  # the result's dimension `dim`, with something in front of it or behind
    "picked",  # indices that another operand holds are looked up in it
    "grouped",  # the outer factor of the result's dimension `dim`: a key head for several query heads
    "regrouped",  # a factor or a product of the result's dimensions, by the order of elements
    "unread",  # the operand's type counts, not its values
]


@dataclass(frozen=True)
class End:
    how: How
    dim: int | None = None
    start: int = 0
    walk: int | None = None


@dataclass(frozen=True)
class Use:
    """One operand of a call. rest: the end of its dimensions that are neither in the link nor among `ends`."""

    node: fx.Node
    link: Link
    rest: End = End("broadcast")
    ends: Mapping[int, End] = field(default_factory=dict)

    def end(self, dim: int) -> End | None:
        """None for a dimension that one of the result walks along with."""
        return None if dim in self.link else self.ends.get(dim, self.rest)


@dataclass(frozen=True)
class Relation:
    """sizes: the argument that lists sizes of the result, which a shard of it would need anew; "" if there is none."""

    uses: tuple[Use, ...]
    sizes: str = ""


@dataclass(frozen=True)
class Call:
    """What a rule looks at. out: the shape of the result, or of the first of several."""

    node: fx.Node
    name: str
    bound: Mapping[str, Any]
    out: tuple[int, ...]

    def tensors(self) -> list[fx.Node]:
        return self.node.all_input_nodes

    def given(self, *names: str) -> list[fx.Node]:
        """The tensors among these arguments."""
        return [self.bound[name] for name in names if isinstance(self.bound.get(name), fx.Node)]

    def first(self) -> fx.Node:
        return self.node.args[0]  # type: ignore[return-value]


Rule = Callable[[Call], list[Use]]


def shape_of(node: Any) -> tuple[int, ...]:
    """Of a value, or of the first of several; () for a number."""
    val: Any = node.meta["val"]
    return tuple(getattr(val[0] if isinstance(val, (tuple, list)) else val, "shape", ()))


def alike(one: Any, other: Any) -> bool:
    """Whether two sizes are one number, or one expression in symbols: without a guard on a trace."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return str(one) == str(other)


def several(size: Any) -> bool:
    """Whether a size is known to be, or may be, more than 1."""
    return not isinstance(size, int) or size > 1


def same(operand: Sequence[Any], out: Sequence[Any], from_right: bool = False, without: Iterable[int] = ()) -> Link:
    """Dimension by dimension, counted from the left or as broadcasting does; None where sizes differ."""
    shift, left_out = len(out) - len(operand) if from_right else 0, set(without)
    return tuple(
        d - shift if d not in left_out and 0 <= d - shift < len(operand) and alike(operand[d - shift], size) else None
        for d, size in enumerate(out)
    )


def dims_of(value: Any, rank: int) -> list[int]:
    """What an argument `dim` names, counted from the left; None and []: all."""
    named = range(rank) if value is None or value == [] else [value] if isinstance(value, int) else value
    return [dim % max(rank, 1) for dim in named]


def reshaped(one: Sequence[int], other: Sequence[int], axis: Axis, count: int) -> Axis | None:
    """The axis after a reshape: where the same stretch of the flat memory counts count, if one dimension holds it."""
    step = prod(one[axis[0] + 1 :]) * axis[1]  # elements from one token to the next
    if not step * count:  # no elements, which lie in any order
        return None
    for dim, size in enumerate(other):
        behind = prod(other[dim + 1 :])
        if behind and step % behind == 0 and (behind * size) % (step * count) == 0:
            return dim, step // behind
    return None


# --- Calls that work element by element, their operands broadcast; and those that make a value as another one is -----


AND = {"aten::__and__", "aten::bitwise_and", "aten::logical_and", "aten::mul"}  # of what is true or false
OR = {"aten::__or__", "aten::bitwise_or", "aten::logical_or"}
NOT = {"aten::bitwise_not", "aten::logical_not"}
SCALES = ("aten::mul", "aten::div")
ARITHMETIC = (*SCALES, "aten::add", "aten::sub")
NEUTRAL = {"aten::pow": 1, "aten::mul": 1, "aten::div": 1}  # no sum: -0.0 + 0.0 is 0.0
COMPARISONS = {"aten::le": "<=", "aten::lt": "<", "aten::ge": ">=", "aten::gt": ">", "aten::eq": "==", "aten::ne": "!="}

# Those that torch has not tagged as pointwise.
_BROADCASTING = ("where", "floor_divide", "rsub", "remainder", "polar", "complex", "hardswish", "mish",
                 "_prelu_kernel", "__and__", "__or__", "__xor__")  # fmt: skip
_BITWISE = {"aten::__and__", "aten::__or__", "aten::__xor__"}
_ELEMENTWISE = ("clone", "_to_copy", "contiguous", "lift_fresh_copy", "to", "masked_fill", "fill",
                "native_dropout", "dropout", "feature_dropout", "bernoulli", "zeros_like", "ones_like", "full_like",
                "empty_like", "rand_like", "randint_like", "randn_like", "log_sigmoid_forward")  # fmt: skip


def is_pointwise(node: fx.Node) -> bool:
    """Whether a call works element by element, broadcasting its operands. torch has not tagged `a & b` and its like."""
    if not isinstance(node.target, OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or g.op_name(node) in _BITWISE


def broadcasting(call: Call) -> list[Use]:
    return [Use(used, same(shape_of(used), call.out, from_right=True)) for used in call.tensors()]


def elementwise(call: Call) -> list[Use]:
    """The first operand lies as the result does; others are broadcast."""
    first = call.first()
    return [Use(used, same(shape_of(used), call.out, from_right=used is not first)) for used in call.tensors()]


def typed(call: Call) -> list[Use]:
    """`type_as`: the second operand is looked at for its type alone."""
    first = call.first()
    unread = [Use(used, (None,) * len(call.out), End("unread")) for used in call.tensors() if used is not first]
    return [Use(first, same(shape_of(first), call.out)), *unread]


def prelu(call: Call) -> list[Use]:
    """A slope for each channel, in dimension 1."""
    slopes = tuple(0 if d == 1 else None for d in range(len(call.out)))
    return [Use(call.bound["self"], tuple(range(len(call.out)))), Use(call.bound["weight"], slopes)]


POINTWISE: dict[str, Rule] = {
    **{f"aten::{name}": broadcasting for name in _BROADCASTING},
    **{f"aten::{name}": elementwise for name in _ELEMENTWISE},
    "csc::dropout": elementwise,
    "aten::type_as": typed,
    "aten::prelu": prelu,
}


# --- Calls that make a tensor in a size that they name ---------------------------------------------------------------


FILLED = {f"aten::{name}" for name in ("full", "zeros", "ones", "new_full", "new_zeros", "new_ones")}
NEW = {f"aten::new_{name}" for name in ("empty", "zeros", "ones", "full")}
FACTORIES = {f"aten::{name}" for name in ("full", "zeros", "ones", "scalar_tensor", "arange")}
SIZE_NUMBERS = {"aten::sym_size", "aten::sym_numel"}
SIZES_READ = SIZE_NUMBERS | {f"aten::{name}_like" for name in ("zeros", "ones", "empty", "rand", "randint", "randn")}
OF_VALUES = {
    f"aten::{name}" for name in ("item", "_local_scalar_dense", "nonzero", "nonzero_numpy", "argwhere", "_unique2")
}  # fmt: skip
COUNTED = {"aten::arange": "end"}  # by the argument that says how many there are
MADE = FILLED | NEW | {f"aten::{name}" for name in ("empty", "rand", "randint", "randn", "scalar_tensor")}


def filled_with(node: fx.Node) -> Any:
    """The number (or the call that makes it) that all entries of a call's result are; None if the call names none."""
    kind = g.short_op(node).removeprefix("new_").removesuffix("_like") if node.op == "call_function" else ""
    if kind in ("zeros", "ones"):
        return int(kind == "ones")
    if kind in ("full", "scalar_tensor"):
        return g.bind(node)["s" if kind == "scalar_tensor" else "fill_value"]
    return None


def made_typed(call: Call) -> list[Use]:
    """The operand is looked at for its type alone."""
    return [Use(call.first(), (None,) * len(call.out), End("unread"))]


RULES_OF_NEW: dict[str, Rule] = dict.fromkeys(NEW, made_typed)
MADE_SIZES = dict.fromkeys(NEW, "size")


# --- Calls that move entries: views, parts and joins, look-ups, padding, repetition ----------------------------------


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
MOVED_SIZES = {
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
    shape = shape_of(call.first())
    named = dims_of(call.bound.get("dim"), len(shape))
    dims = [d for d, size in enumerate(shape) if d not in named or several(size)]
    return [Use(call.first(), _view(shape, call.out, dims))]


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
    shape = shape_of(call.first())
    gone = call.bound["dim"] % len(shape)
    dims = [d for d in range(len(shape)) if d != gone]
    start = call.bound.get("index", 0)
    return [Use(call.first(), _view(shape, call.out, dims), ends={gone: End("cut", None, start)})]


def part(call: Call) -> list[Use]:
    """`slice`, `narrow`, `split` and the like: of one dimension a part, unless it is all of it, step by step."""
    shape = shape_of(call.first())
    dim = call.bound["dim"] % len(shape)
    steps = call.bound.get("step", 1) != 1
    link = _view(shape, call.out, [None if d == dim and steps else d for d in range(len(shape))])
    end = End("blocked", dim) if steps else End("cut", dim, _first_of(call, shape[dim]))
    return [Use(call.first(), link, ends={dim: end})]


def _first_of(call: Call, size: Any) -> int:
    start = call.bound.get("start", 0)
    if not isinstance(start, int) or not isinstance(size, int):
        return 0
    return slice(start, None).indices(size)[0]


def cat(call: Call) -> list[Use]:
    dim, start = call.bound["dim"] % max(len(call.out), 1), 0
    uses = []
    for tensor in call.bound["tensors"]:
        size = shape_of(tensor)
        end = End("joined", dim, start)
        uses.append(Use(tensor, same(size, call.out, without=[dim]), ends={dim: end}))
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
    return [Use(tensor, link) for tensor in call.bound["tensors"]]


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
    by = [index for index in call.bound["indices"] if index is not None]
    if not by or any(index.meta["val"].dtype in _MASKS for index in by):
        return []
    return look_up(call.bound["self"], call.bound["indices"], call.out)


def look_up(table: fx.Node, indices: Sequence[fx.Node | None], out: Sequence[Any]) -> list[Use]:
    """Of a table, and of the tensors that index it: the dimensions that are indexed give way to those of the indices,
    broadcast together.
    """
    by = {place: index for place, index in enumerate(indices) if index is not None}
    places = list(by)
    rank = max(len(shape_of(index)) for index in by.values())
    front = places != list(range(places[0], places[-1] + 1))
    begin = 0 if front else places[0]
    kept = iter(d for d in range(len(shape_of(table))) if d not in by)
    link = tuple(None if begin <= d < begin + rank else next(kept) for d in range(len(out)))
    uses = [Use(table, link, ends={place: End("picked") for place in places})]
    for index in by.values():
        within = same(shape_of(index), out[begin : begin + rank], from_right=True)
        uses.append(Use(index, (*[None] * begin, *within, *[None] * (len(out) - begin - rank))))
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


MOVES: dict[str, Rule] = {
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


# --- Calls that multiply and sum: products of matrices, attention, distances -----------------------------------------


PRODUCTS = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::matmul": (0, 1), "aten::linear": (0, 1),
            "aten::addmm": (1, 2), "aten::baddbmm": (1, 2), "aten::addmv": (1, 2), "aten::mv": (0, 1),
            "aten::dot": (0, 1), "aten::vdot": (0, 1)}  # fmt: skip
GROUPED = {"transformers::grouped_mm_fallback": ("input", "weight", "offs"),
           "aten::_grouped_mm": ("self", "mat2", "offs")}  # fmt: skip
GROUPED_BACKWARD = "transformers::grouped_mm_fallback_backward"
QUANTISED = frozenset({"csc::quantised_linear", "csc::quantised_linear_backward"})  # csc.kernels.quantised
ATTENTION = "csc::attention"
CONTEXT_ATTENTION = "csc::context_attention"  # of a shard of the tokens: queries and keys are the rank's own
SDPA = "aten::scaled_dot_product_attention"
_SUMMED = End("contracted", walk=0)


def product(call: Call) -> list[Use]:
    """[.., M, K] and [.., K, N], or [N, K] of `linear`; vectors have no M, or no N."""
    left, right = (call.node.args[place] for place in PRODUCTS[call.name])
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    rank, right_rank = len(call.out), len(shape_of(right))
    vector = right_rank == 1
    kept = call.out if vector else call.out[:-1]
    own: Link = (*same(shape_of(left)[:-1], kept, from_right=True), *(() if vector else (None,)))
    uses = [Use(left, own, ends={len(shape_of(left)) - 1: _SUMMED})]
    if vector:
        uses.append(Use(right, (None,) * rank, ends={0: _SUMMED}))
    elif call.name == "aten::linear":
        uses.append(Use(right, (*(None for _ in range(rank - 1)), 0), ends={1: _SUMMED}))
    else:
        rows = len(shape_of(left)) > 1  # a vector's result has no dimension for them
        batch = same(shape_of(right)[:-2], call.out[: -2 if rows else -1], from_right=True)
        link = (*batch, *((None,) if rows else ()), right_rank - 1)
        uses.append(Use(right, link, ends={right_rank - 2: _SUMMED}))
    added = [used for used in call.tensors() if used not in (left, right)]
    return uses + [Use(used, same(shape_of(used), call.out, from_right=True)) for used in added]


def quantised(call: Call) -> list[Use]:
    """[.., K] and a packed weight, to [.., N]: who makes it needs all of K and of the weight, and makes all of N."""
    operand, *rest = call.tensors()
    rows: Link = (*same(shape_of(operand)[:-1], call.out[:-1], from_right=True), None)
    blocked = End("blocked")
    uses = [Use(operand, rows, ends={len(shape_of(operand)) - 1: blocked})]
    return uses + [Use(tensor, (None,) * len(call.out), blocked) for tensor in rest]


def grouped(call: Call) -> list[Use]:
    """[rows, K] and [groups, K, N], for what divides other dimensions than rows: which matrix a row is multiplied by is
    a matter of its place, so that the rule is not among RULES (csc.analysis.tokens follows rows).
    """
    rows, matrices, ends = (call.bound[name] for name in GROUPED[call.name])
    if (len(shape_of(rows)), len(shape_of(matrices))) != (2, 3):
        return []
    blocked = End("blocked")
    return [
        Use(rows, (None, None), blocked, ends={1: _SUMMED}),
        Use(matrices, (None, 2), blocked, ends={1: _SUMMED}),
        Use(ends, (None, None), blocked),
    ]


def einsum(call: Call) -> list[Use]:
    """Letters that the result lacks are summed. Nothing is known of a letter that one term has twice."""
    operands = call.bound["tensors"]
    terms, result = spelled_out(call.bound["equation"], [len(shape_of(operand)) for operand in operands])
    if any(len(set(term)) < len(term) for term in terms):
        return []
    uses = []
    for term, operand in zip(terms, operands):
        shape, dim_of = shape_of(operand), {letter: d for d, letter in enumerate(term)}
        link = tuple(dim_of[letter] if letter in dim_of and alike(shape[dim_of[letter]], size) else None
                     for letter, size in zip(result, call.out))  # fmt: skip
        ends = {d: End("contracted", walk=ord(letter)) for d, letter in enumerate(term) if letter not in result}
        uses.append(Use(operand, link, ends=ends))
    return uses


def spelled_out(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The terms and the result of an einsum, each dimension a letter: those behind `...` are digits, counted from the
    right; a result that is left out has the letters that occur once, in alphabetical order.
    """
    terms_text, arrow, result = equation.replace(" ", "").partition("->")
    terms = terms_text.split(",")
    most = max((rank - len(term) + 3 for term, rank in zip(terms, ranks) if "..." in term), default=0)
    dots = "0123456789"[:most]
    if not arrow:
        once = sorted(letter for letter in set(terms_text) - set(",.") if terms_text.count(letter) == 1)
        result = ("..." if "..." in terms_text else "") + "".join(once)
    shown = [
        term.replace("...", dots[len(dots) - (rank - len(term) + 3) :]) if "..." in term else term
        for term, rank in zip(terms, ranks)
    ]
    return shown, result.replace("...", dots)


def attention(call: Call) -> list[Use]:
    """[samples, heads, tokens, width]; keys and values may have fewer heads. What else is read says what is seen."""
    query, key, value, *rest = call.node.args
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
    heads, tokens, width = End("grouped", 1), End("blocked", walk=1), End("blocked", walk=0)
    uses = [
        Use(query, (0, 1, 2, None), ends={3: width}),
        Use(key, (0, None, None, None), ends={1: heads, 2: tokens, 3: width}),
        Use(value, (0, None, None, 3), ends={1: heads, 2: tokens}),
    ]
    masks = [used for used in rest if isinstance(used, fx.Node)]
    return uses + [Use(mask, (None,) * 4, End("blocked")) for mask in masks]


def written_attention(call: Call) -> list[Use]:
    """SDPA: samples and heads; of queries and of the mask's rows also the places. Keys may have fewer heads."""
    rank, keys, width = len(call.out), End("blocked", walk=1), End("blocked", walk=0)
    causal = [rank - 2] if call.bound["is_causal"] else []  # what a query sees depends on its place
    lost = {"query": [rank - 1, *causal], "key": [rank - 1, rank - 2], "value": [rank - 2], "attn_mask": [rank - 1]}
    last = {"query": width, "key": width, "attn_mask": keys}
    uses = []
    for which, without in lost.items():
        for used in call.given(which):
            rank_of_operand = len(shape_of(used))
            link = same(shape_of(used), call.out, from_right=True, without=without)
            ends = {rank_of_operand - 2: keys, rank_of_operand - 1: last.get(which, keys)}
            if which in ("key", "value") and rank_of_operand >= 3 and link[rank - 3] is None:
                ends[rank_of_operand - 3] = End("grouped", rank - 3)
            uses.append(Use(used, link, ends=ends))
    return uses


def distance(call: Call) -> list[Use]:
    """A number for each pair of vectors along `dim` (the last one of pairwise_distance), once they are broadcast."""
    uses = []
    most = max(len(shape_of(used)) for used in call.tensors())
    for used in call.tensors():
        shape = shape_of(used)
        dim = call.bound.get("dim", -1) % most - most + len(shape)
        rest = [d for d in range(len(shape)) if d != dim]
        link = same([shape[d] for d in rest], call.out, from_right=True)
        uses.append(Use(used, tuple(None if d is None else rest[d] for d in link), ends={dim: End("summed", walk=0)}))
    return uses


def bilinear(call: Call) -> list[Use]:
    """Two vectors each, in the last dimension."""
    return [Use(operand, (*range(len(call.out) - 1), None), _SUMMED) for operand in call.given("input1", "input2")]


def distances(call: Call) -> list[Use]:
    """`cdist`: [*, P, M] and [*, R, M] to [*, P, R]."""
    uses = []
    for which, where in (("x1", (True, False)), ("x2", (False, True))):
        used = call.bound[which]
        rank = len(shape_of(used))
        batch = same(shape_of(used)[:-2], call.out[:-2], from_right=True)
        uses.append(
            Use(used, (*batch, *(rank - 2 if has_batch else None for has_batch in where)), End("summed", walk=0))
        )
    return uses


PRODUCT_RULES: dict[str, Rule] = {
    **dict.fromkeys(PRODUCTS, product),
    **dict.fromkeys(QUANTISED, quantised),
    "aten::einsum": einsum,
    **dict.fromkeys((ATTENTION, CONTEXT_ATTENTION), attention),
    SDPA: written_attention,
    "aten::bilinear": bilinear,
    "aten::cdist": distances,
    **dict.fromkeys(("aten::cosine_similarity", "aten::pairwise_distance"), distance),
}


# --- Calls that reduce dimensions, or work along them: sums, norms, softmax, orders, losses --------------------------


NORMS = {"aten::layer_norm", "aten::native_layer_norm", "aten::rms_norm", "aten::_fused_rms_norm"}
BATCH_NORMS = ("aten::batch_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit",
               "aten::_native_batch_norm_legit_no_training", "aten::_batch_norm_no_update",
               "aten::cudnn_batch_norm", "aten::miopen_batch_norm")  # fmt: skip
RECURRENT = ("aten::gru", "aten::lstm", "aten::rnn_tanh", "aten::rnn_relu")
LABELS = ("aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::nll_loss", "aten::nll_loss2d")
ELEMENTS = ("aten::mse_loss", "aten::l1_loss", "aten::smooth_l1_loss", "aten::huber_loss",
            "aten::binary_cross_entropy", "aten::binary_cross_entropy_with_logits", "aten::kl_div",
            "aten::poisson_nll_loss", "aten::soft_margin_loss", "aten::hinge_embedding_loss",
            "aten::margin_ranking_loss")  # fmt: skip
SAMPLES = ("aten::cosine_embedding_loss", "aten::triplet_margin_loss", "aten::multi_margin_loss",
           "aten::multilabel_margin_loss")  # fmt: skip
SEQUENCES = ("aten::ctc_loss",)
HEAD = "csc::linear_cross_entropy"
CLASSES = -1  # the walk of a loss over classes
FOURIER = ("_fft_r2c", "_fft_c2r", "_fft_c2c",  # along the dimensions that are named
           *(f"fft_{inverse}{kind}{dims}"
             for inverse in ("", "i") for kind in ("fft", "rfft", "hfft") for dims in ("", "2", "n")))  # fmt: skip
_REDUCTIONS = ("mean", "sum", "amax", "amin", "var", "std", "logsumexp", "linalg_vector_norm", "any", "all", "prod",
               "argmax", "argmin", "nansum", "count_nonzero", "aminmax", "std_mean", "var_mean",
               "linalg_matrix_norm")  # fmt: skip
NORMALISING = ("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax")
_EXTREMES = ("max", "min", "median", "nanmedian", "kthvalue", "mode")  # with a dim: values and places
_ALONG = (
    "cumsum", "topk", "repeat_interleave", "glu", "sort", "argsort", "logcumsumexp", "cumprod", "cummax", "cummin",
)  # fmt: skip


def reduction(call: Call) -> list[Use]:
    shape = shape_of(call.first())
    gone = set(dims_of(call.bound.get("dim"), len(shape)))
    kept = [None if d in gone else d for d in range(len(shape))]
    if len(call.out) != len(shape):
        kept = [d for d in kept if d is not None]
    return [Use(call.first(), tuple(kept), End("summed"))]


def extreme(call: Call) -> list[Use]:
    """`max` and its like: of two values, along a dimension, or of all."""
    return broadcasting(call) if "other" in call.bound else reduction(call)


def sum_to_size(call: Call) -> list[Use]:
    """Dimensions before those of the result, and those of which it has one entry, are summed."""
    return [Use(call.first(), same(shape_of(call.first()), call.out, from_right=True), End("summed"))]


def norm(call: Call) -> list[Use]:
    rank, operand = len(call.out), call.first()
    first = rank - len(call.bound["normalized_shape"])
    leading = tuple(d if d < first else None for d in range(rank))
    scales = tuple(d - first if d >= first else None for d in range(rank))
    ends = {d: End("normalised", d) for d in range(first, rank)}
    return [Use(operand, leading, ends=ends), *(Use(operand, scales) for operand in call.given("weight", "bias"))]


def weight_norm(call: Call) -> list[Use]:
    """Of a weight, over all its dimensions but one, of whose entries each has a length of its own; -1: over all."""
    kept_dim = call.bound["dim"]
    ends = {dim: End("normalised", dim) for dim in range(len(call.out)) if dim != kept_dim}
    link = tuple(dim if dim == kept_dim else None for dim in range(len(call.out)))
    lengths = link if len(shape_of(call.bound["g"])) == len(call.out) else (None,) * len(call.out)
    return [Use(call.bound["v"], link, ends=ends), Use(call.bound["g"], lengths)]


def _along(how: How, argument: str = "dim") -> Rule:
    """Along the dimensions that an argument names, entry by entry along all others."""

    def rule(call: Call) -> list[Use]:
        named = dims_of(call.bound.get(argument), len(call.out))
        ends = {dim: End(how, dim) for dim in named}
        return [Use(call.first(), same(shape_of(call.first()), call.out, without=named), ends=ends)]

    return rule


def search(call: Call) -> list[Use]:
    """Each value among boundaries that are the same for all."""
    return [Use(call.first(), same(shape_of(call.first()), call.out))]


def _of_loss(operands: Sequence[tuple[fx.Node, Sequence[int | None]]], out: Sequence[Any]) -> list[Use]:
    """operands: each with the walk of each of its dimensions. out: the shape of the loss, whose dimensions are the
    walks from 0 on where it is no single number.
    """
    uses = []
    for node, walks in operands:
        shape = shape_of(node)
        dim_of = {walk: d for d, walk in enumerate(walks)}
        link = tuple(dim_of[d] if d in dim_of and alike(shape[dim_of[d]], size) else None for d, size in enumerate(out))
        uses.append(Use(node, link, ends={d: End("summed", walk=walk) for d, walk in enumerate(walks)}))
    return uses


def labels(call: Call) -> list[Use]:
    """Logits [N, classes, ..] or [classes], labels [N, ..] or probabilities as logits are."""
    logits, target = call.bound["self"], call.bound["target"]
    rank = len(shape_of(logits))
    classes = 0 if rank == 1 else 1
    walks = [CLASSES if d == classes else d - (d > classes) for d in range(rank)]
    known = walks if len(shape_of(target)) == rank else [walk for walk in walks if walk != CLASSES]
    weights = [(weight, [CLASSES]) for weight in call.given("weight")]
    return _of_loss([(logits, walks), (target, known), *weights], call.out)


def head(call: Call) -> list[Use]:
    """x [.., width], weight [classes, width], bias [classes], a label for each token: those are walked in no shards."""
    x, weight = call.bound["x"], call.bound["weight"]
    classes, width = End("summed", walk=CLASSES), End("contracted", walk=0)
    return [
        Use(x, (), End("blocked"), ends={len(shape_of(x)) - 1: width}),
        Use(weight, (), ends={0: classes, 1: width}),
        *(Use(bias, (), ends={0: classes}) for bias in call.given("bias")),
        Use(call.bound["labels"], (), End("blocked")),
    ]


def elements(call: Call) -> list[Use]:
    """A term for each pair of entries."""
    rank = max(len(shape_of(used)) for used in call.tensors())
    operands = [(used, list(range(rank - len(shape_of(used)), rank))) for used in call.tensors()]
    return _of_loss(operands, call.out)


def rows(call: Call) -> list[Use]:
    """A term for each row, in dimension 0 of all operands."""
    operands = [(used, [0, *(None for _ in shape_of(used)[1:])][: len(shape_of(used))]) for used in call.tensors()]
    return _of_loss(operands, call.out)


def sequences(call: Call) -> list[Use]:
    """`ctc_loss`: log probabilities [T, samples, classes]."""
    return _of_loss([(call.first(), [None, 0, None])], call.out)


REDUCTIONS: dict[str, Rule] = {
    **{f"aten::{name}": reduction for name in _REDUCTIONS},
    **{f"aten::{name}": extreme for name in _EXTREMES},
    "aten::sum_to_size": sum_to_size,
    "aten::_weight_norm": weight_norm,
    **dict.fromkeys(NORMS, norm),
    **{f"aten::{name}": _along("normalised") for name in NORMALISING},
    **{f"aten::{name}": _along("blocked") for name in (*_ALONG, *FOURIER)},
    **dict.fromkeys(("aten::flip", "aten::roll", "aten::rot90"), _along("blocked", "dims")),
    **dict.fromkeys(("aten::bucketize", "aten::searchsorted"), search),
    **dict.fromkeys(LABELS, labels),
    HEAD: head,
    **dict.fromkeys(ELEMENTS, elements),
    **dict.fromkeys(SAMPLES, rows),
    **dict.fromkeys(SEQUENCES, sequences),
}


# --- Calls on images, signals and matrices: convolutions, pooling, resizing, sampling, inverses ----------------------


# How many dimensions of the first operand are behind the samples and channels, or features, that stay what they are.
_BEHIND = {"conv1d": 2, "conv2d": 3, "conv3d": 4, "conv_transpose1d": 2, "conv_transpose2d": 3, "avg_pool1d": 1,
           "avg_pool2d": 2, "avg_pool3d": 3, "max_pool1d": 1, "max_pool2d": 2, "max_pool3d": 3,
           "adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 2, "adaptive_max_pool2d": 2, "upsample_nearest2d": 2,
           "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_linear1d": 1, "_upsample_bicubic2d_aa": 2,
           "_upsample_bilinear2d_aa": 2, "pixel_shuffle": 3, "pixel_unshuffle": 3, "im2col": 2, "col2im": 3,
           "max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3}  # fmt: skip
# Of functions of matrices: how many dimensions of the result are behind those that count the matrices.
_MATRICES = {"tril": 2, "triu": 2, "matrix_exp": 2, "linalg_matrix_exp": 2, "inverse": 2, "linalg_inv": 2,
             "linalg_pinv": 2, "linalg_cholesky": 2, "linalg_qr": 2, "linalg_svdvals": 1, "linalg_eigvalsh": 1,
             "linalg_det": 0, "_linalg_det": 0, "linalg_slogdet": 0, "_linalg_slogdet": 0, "diag_embed": 2}  # fmt: skip
_BY_SAMPLE = (
    "convolution", "group_norm", "instance_norm", "native_group_norm", "channel_shuffle",
)  # dimension 0 stays, no other  # fmt: skip


def _first(behind: int | None) -> Rule:
    """All dimensions of the first operand but the last `behind` stay; None: the first one alone."""

    def rule(call: Call) -> list[Use]:
        kept = 1 if behind is None else len(call.out) - behind
        return [Use(call.first(), tuple(d if d < kept else None for d in range(len(call.out))), End("blocked"))]

    return rule


def sampling(call: Call) -> list[Use]:
    """`grid_sampler`: features and places of the same sample; the places are laid out as the result is."""
    features, places = call.node.args[:2]
    behind = range(2, len(call.out))
    return [
        Use(features, (0, 1, *(None for _ in behind)), End("picked")),  # type: ignore[arg-type]
        Use(places, (0, None, *(d - 1 for d in behind)), End("blocked")),  # type: ignore[arg-type]
    ]


SPATIAL: dict[str, Rule] = {
    **{f"aten::{name}": _first(behind) for name, behind in (_BEHIND | _MATRICES).items()},
    **{f"aten::{name}": _first(None) for name in _BY_SAMPLE},
    "aten::grid_sampler": sampling,
}


# --- The table of operator rules: how the dimensions of a call's operands relate to those of its result --------------
#
# The terms are those of csc.analysis.operators.table. What else is known of operations stands beside the rules:
# which are views (memory), draw (randomness), are made of sizes or values (made), are copies or casts (moves), compare
# (pointwise), are products (products), normalise (reductions); how they run, and in which dtype (work). Nothing else
# of csc lists operations by what they are: who names one elsewhere looks for a pattern, or makes that call.


RULES: dict[str, Rule] = {
    **POINTWISE, **RULES_OF_NEW, **MOVES, **PRODUCT_RULES, **REDUCTIONS, **SPATIAL,
}  # fmt: skip
SIZES = MOVED_SIZES | MADE_SIZES
# Twice the operand, twice the result; and the result of a sum of operands is the sum of their results. See is_linear.
LINEAR = COPIES - CASTS | UNSQUEEZED | {f"aten::{name}" for name in (
    "transpose", "permute", "t", "select", "lift_fresh_copy", "neg", "unbind", "stack", "dropout", "diagonal", "flip",
    "pad", "constant_pad_nd", "view_as_complex", "view_as_real", "real", "imag", "complex", "conj", "_conj",
    "conj_physical", "_conj_physical", "resolve_conj", "_neg_view", "resolve_neg", "select_scatter",
    *FOURIER,
)}  # fmt: skip
# On shards the same as on the whole, whatever their arguments: what they do along an axis is blocked in the trees.
SAME_ON_SHARDS = COPIES | NORMS | {f"aten::{name}" for name in (
    "permute", "transpose", "t", "unsqueeze", "squeeze", "cat", "stack", "unbind", "select", "slice_scatter",
    "index_select", "prelu", "_weight_norm", *NORMALISING,
)} | {GATHER}  # fmt: skip


def relation(node: fx.Node) -> Relation | None:
    """Of a call. Operands that are in no Use are some of which nothing is known."""
    if node.target is operator.getitem:
        return Relation(tuple(getitem(node)))
    if not isinstance(node.target, OpOverload):
        return None
    name = g.op_name(node)
    rule = RULES.get(name, broadcasting if is_pointwise(node) else None)
    return _related(node, rule) if rule is not None else None


def relation_of_features(node: fx.Node) -> Relation | None:
    """As `relation`, and of products of groups of rows, whose rows stay together."""
    return _related(node, grouped) if g.op_name(node) in GROUPED else relation(node)


def _related(node: fx.Node, rule: Rule) -> Relation | None:
    name = g.op_name(node)
    uses = rule(Call(node, name, g.bind(node), shape_of(node)))
    return Relation(tuple(uses), SIZES.get(name, "")) if uses else None


def is_linear(node: fx.Node) -> bool:
    """Whether a call is one of LINEAR, and adds nothing of its own, as a pad with another number than 0 does."""
    return g.op_name(node) in LINEAR and not (g.op_name(node) in PADS and g.bind(node).get("value"))


def links(node: fx.Node) -> list[tuple[fx.Node, Link]]:
    known = relation(node)
    return [(use.node, use.link) for use in known.uses] if known is not None else []


def resized(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: list[int]) -> tuple[Any, Any]:
    """Arguments of a call that lists the sizes of its result, with these in their place."""
    listed = SIZES.get(g.op_name(node), "size")
    place = [argument.name for argument in node.target._schema.arguments].index(listed)  # type: ignore[union-attr]
    if place < len(args):
        return (*args[:place], sizes, *args[place + 1 :]), kwargs
    return args, {**kwargs, listed: sizes}
