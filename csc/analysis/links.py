"""The table of operator rules: how the dimensions of a call's result relate to those of its operands.

Terms
  link   of a call and one of its operands: for each dimension of the result, the operand's dimension that it walks
         along with, index by index; None where there is none (contracted, reduced, worked along, or new)
  axis   (dim, inner): index i of dimension `dim` belongs to item i // inner % count of what is counted (tokens,
         samples). inner is 1 unless a reshape has joined the items with what stood behind them

    links(node) -> [(operand, Link)]                              of operands that the table knows something about
    reshaped(shape before, after, axis, count) -> Axis | None     where a reshape has brought an axis

Sizes are plain numbers. Reshapes have an empty link: theirs is a matter of sizes, which `reshaped` looks at.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from csc.analysis.tokens import ALONG, NORMS, PRODUCTS, is_pointwise
from csc.ir import graph as g
from csc.torch_private import OpOverload

Axis = tuple[int, int]
Link = tuple[int | None, ...]

ATTENTION = "csc::attention"
SDPA = "aten::scaled_dot_product_attention"
RESHAPES = {"aten::view", "aten::_unsafe_view", "aten::reshape"}
REDUCTIONS = {"aten::mean", "aten::sum", "aten::amax", "aten::amin", "aten::var", "aten::std", "aten::logsumexp",
              "aten::linalg_vector_norm", "aten::any", "aten::all", "aten::prod", "aten::argmax",
              "aten::argmin"}  # fmt: skip
PICKS = {"aten::max": "dim", "aten::min": "dim"}  # with a dim: values and places
_ELEMENTWISE = {"aten::clone", "aten::_to_copy", "aten::type_as", "aten::contiguous", "aten::lift_fresh_copy",
                "aten::to", "aten::native_dropout", "aten::dropout", "csc::dropout", "aten::feature_dropout",
                "aten::detach", "aten::alias", "aten::masked_fill", "aten::zeros_like", "aten::ones_like",
                "aten::full_like", "aten::empty_like", "aten::rand_like", "aten::randn_like", "aten::bernoulli",
                "aten::fill"}  # fmt: skip
# Those that torch has not tagged as pointwise.
_BROADCASTING = {"aten::where", "aten::floor_divide", "aten::rsub", "aten::remainder", "aten::polar", "aten::complex",
                 "aten::hardswish", "aten::mish", "aten::_prelu_kernel"}  # fmt: skip
# How many dimensions of the first operand are behind the samples and channels, or features, that stay what they are.
_SPATIAL = {"aten::conv1d": 2, "aten::conv2d": 3, "aten::conv3d": 4, "aten::conv_transpose1d": 2,
            "aten::conv_transpose2d": 3, "aten::avg_pool1d": 1, "aten::avg_pool2d": 2, "aten::avg_pool3d": 3,
            "aten::max_pool1d": 1, "aten::max_pool2d": 2, "aten::max_pool3d": 3, "aten::adaptive_avg_pool1d": 1,
            "aten::adaptive_avg_pool2d": 2, "aten::adaptive_max_pool2d": 2, "aten::upsample_nearest2d": 2,
            "aten::upsample_bilinear2d": 2, "aten::upsample_bicubic2d": 2, "aten::upsample_linear1d": 1,
            "aten::_upsample_bicubic2d_aa": 2, "aten::_upsample_bilinear2d_aa": 2, "aten::pixel_shuffle": 3,
            "aten::pixel_unshuffle": 3, "aten::im2col": 2, "aten::convolution": None}  # fmt: skip
_BY_SAMPLE = {"aten::group_norm", "aten::instance_norm", "aten::native_group_norm"}  # dimension 0 stays, no other
FOURIER = ("_fft_r2c", "_fft_c2r", "_fft_c2c",  # along the dimensions that are named
           *(f"fft_{way}{kind}{dims}"
             for way in ("", "i") for kind in ("fft", "rfft", "hfft") for dims in ("", "2", "n")))  # fmt: skip
_SKIPPING = {  # works along one dimension, element by element along all others
    "aten::flip": "dims", "aten::roll": "dims", "aten::sort": "dim", "aten::argsort": "dim",
    "aten::logcumsumexp": "dim", "aten::cumprod": "dim", "aten::cummax": "dim",
    **{f"aten::{name}": "dim" for name in FOURIER},
}  # fmt: skip
_COMPLEX = ("aten::view_as_complex", "aten::view_as_real", "aten::real", "aten::imag", "aten::conj", "aten::_conj",
            "aten::_neg_view", "aten::resolve_conj", "aten::resolve_neg")  # fmt: skip
_OTHER_VIEWS = {"aten::as_strided", "aten::diagonal", "aten::unfold"}  # their dimensions are not those of the operand
_STRIDES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079)  # primes: no product of sizes is one of them


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Of a value, or of the first of several."""
    val: Any = node.meta["val"]
    return tuple((val[0] if isinstance(val, (tuple, list)) else val).shape)


def links(node: fx.Node) -> list[tuple[fx.Node, Link]]:
    """The link of every tensor operand that csc knows something about."""
    name = g.op_name(node)
    if node.target is operator.getitem:
        return [(used, _same(shape_of(used), _item_shape(node))) for used in node.all_input_nodes]
    if not isinstance(node.target, OpOverload):
        return []
    bound, out = g.bind(node), shape_of(node)
    if name in RESHAPES:
        return [(node.args[0], ())]  # type: ignore[list-item]
    if name == ATTENTION:
        whole: Link = (0, 1, 2, None)
        return [(used, whole if i == 0 else (0, None, None, None)) for i, used in enumerate(node.args[:3])]  # type: ignore[misc]
    if name in PRODUCTS:
        return _of_product(node, out)
    if name in NORMS:
        first = len(out) - len(bound["normalized_shape"])
        return [(node.args[0], tuple(d if d < first else None for d in range(len(out))))]  # type: ignore[list-item]
    if name in _MORE:
        return _MORE[name](node, bound, out)
    if name in ("aten::embedding", "aten::one_hot"):
        indices = bound["indices" if name == "aten::embedding" else "self"]
        return [(indices, (*range(len(out) - 1), None))]
    if name in REDUCTIONS or (name in PICKS and "dim" in bound):
        return [(node.args[0], _of_reduction(node, bound, out))]  # type: ignore[list-item]
    if name == "aten::stack":
        dim = bound["dim"] % len(out)
        return [(one, tuple(None if d == dim else d - (d > dim) for d in range(len(out)))) for one in bound["tensors"]]
    if g.is_view(node) and name not in _OTHER_VIEWS:
        return [(node.args[0], _of_view(node))]  # type: ignore[list-item]
    if name in ALONG:
        given: Any = bound["tensors"] if name == "aten::cat" else [node.args[0]]
        dim = bound[ALONG[name]]
        skipped = range(len(out)) if dim is None else {dim % len(out)}
        return [
            (one, tuple(None if d in skipped else e for d, e in enumerate(_same(shape_of(one), out)))) for one in given
        ]
    if name in _ELEMENTWISE:
        return [
            (used, _same(shape_of(used), out, from_right=used is not node.args[0])) for used in node.all_input_nodes
        ]
    if is_pointwise(node) or name in _BROADCASTING:
        return [(used, _same(shape_of(used), out, from_right=True)) for used in node.all_input_nodes]
    return []


def _same(operand: Sequence[int], out: Sequence[int], from_right: bool = False) -> Link:
    """Dimension by dimension, counted from the left or as broadcasting does; None where sizes differ."""
    shift = len(out) - len(operand) if from_right else 0
    return tuple(
        d - shift if 0 <= d - shift < len(operand) and operand[d - shift] == size else None
        for d, size in enumerate(out)
    )  # fmt: skip


def _item_shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape) if isinstance(node.meta["val"], torch.Tensor) else ()


def _of_product(node: fx.Node, out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
    left, right = (node.args[place] for place in PRODUCTS[g.op_name(node)])
    found: list[tuple[fx.Node, Link]] = []
    if isinstance(left, fx.Node):
        vector = (
            isinstance(right, fx.Node) and len(shape_of(right)) == 1
        )  # no dimension of the result is the right one's
        kept = out if vector else out[:-1]
        found.append((left, (*_same(shape_of(left)[:-1], kept, from_right=True), *(() if vector else (None,)))))
    if isinstance(right, fx.Node) and g.op_name(node) != "aten::linear" and len(shape_of(right)) > 1:
        batch = _same(shape_of(right)[:-2], out[:-2], from_right=True)
        found.append((right, (*batch, None, len(shape_of(right)) - 1)))
    added = [used for used in node.all_input_nodes if used not in (left, right)]
    if g.op_name(node) != "aten::linear":
        found += [(used, _same(shape_of(used), out, from_right=True)) for used in added]
    return found


def _of_reduction(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> Link:
    given = shape_of(node.args[0])  # type: ignore[arg-type]
    along = bound.get("dim", None)
    along = range(len(given)) if along is None or along == [] else [along] if isinstance(along, int) else along
    gone = {dim % len(given) for dim in along}
    if len(out) == len(given):
        return tuple(None if d in gone else d for d in range(len(given)))
    return tuple(d for d in range(len(given)) if d not in gone)


def _of_view(node: fx.Node) -> Link:
    """Which dimensions a view keeps: seen from the strides that it gives to memory with strides of our choice."""
    operand: Any = node.args[0]
    given = shape_of(operand)
    if len(given) > len(_STRIDES):
        return (None,) * len(shape_of(node))
    strides = _STRIDES[: len(given)]
    seen: Any = node.target(torch.empty_strided(given, strides, device="meta"), *node.args[1:], **node.kwargs)  # type: ignore[operator]
    seen = seen[0] if isinstance(seen, (tuple, list)) else seen
    of_stride = {stride: dim for dim, stride in enumerate(strides)}
    dims = [of_stride.get(stride) for stride in seen.stride()]
    return tuple(e if e is not None and given[e] == size > 1 else None for e, size in zip(dims, seen.shape))


def _first(rest: int | None) -> Any:
    """Rules of calls that leave all dimensions of their first operand but the last `rest` as they are."""

    def rule(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
        given: Any = node.args[0]
        kept = 1 if rest is None else len(out) - rest
        return [(given, tuple(d if d < kept else None for d in range(len(out))))]

    return rule


def _skipping(argument: str) -> Any:
    def rule(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
        along = bound.get(argument)
        dims = range(len(out)) if along in (None, []) else [along] if isinstance(along, int) else along
        skipped = {dim % max(len(out), 1) for dim in dims}
        operand: Any = node.args[0]
        return [(operand, tuple(None if d in skipped else e for d, e in enumerate(_same(shape_of(operand), out))))]

    return rule


def _of_attention(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
    """Samples and heads; of queries and of the mask's rows also the places. Keys may have fewer heads."""
    found: list[tuple[fx.Node, Link]] = []
    for which in ("query", "key", "value", "attn_mask"):
        used = bound.get(which)
        if isinstance(used, fx.Node):
            same = list(_same(shape_of(used), out, from_right=True))
            same[-1] = None
            if which in ("key", "value"):
                same[-2] = None
            found.append((used, tuple(same)))
    return found


def _of_gather(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
    """`gather`, `scatter` and the like: all but one dimension walk along together."""
    dim = bound["dim"] % max(len(out), 1)
    return [
        (used, tuple(None if d == dim else e for d, e in enumerate(_same(shape_of(used), out))))
        for used in node.all_input_nodes if len(shape_of(used)) == len(out)
    ]  # fmt: skip


def _of_padding(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
    """Dimensions that nothing is added to or cut from."""
    amounts, operand = list(bound["pad"]), node.args[0]
    touched = {len(out) - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    return [(operand, tuple(None if d in touched else d for d in range(len(out))))]  # type: ignore[list-item]


def _of_windows(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
    dim = bound["dimension"] % (len(out) - 1)
    return [(node.args[0], tuple(None if d == dim or d == len(out) - 1 else d for d in range(len(out))))]  # type: ignore[list-item]


def _of_repeat(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
    operand: Any = node.args[0]
    return [(operand, _same(shape_of(operand), out, from_right=True))]


def _of_complex(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
    """Views between complex numbers and pairs of real ones: those lie in a dimension of their own, the last."""
    rank = min(len(out), len(shape_of(node.args[0])))  # type: ignore[arg-type]
    return [(node.args[0], tuple(d if d < rank else None for d in range(len(out))))]  # type: ignore[list-item]


def _of_prelu(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
    """A slope for each channel, in dimension 1."""
    of_slopes = tuple(0 if d == 1 else None for d in range(len(out)))
    return [(bound["self"], tuple(range(len(out)))), (bound["weight"], of_slopes)]


def _of_sum_to_size(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
    """Dimensions before those of the result, and those of which it has one entry, are summed."""
    operand: Any = node.args[0]
    before = shape_of(operand)
    shift = len(before) - len(out)
    return [(operand, tuple(d + shift if before[d + shift] == size else None for d, size in enumerate(out)))]


def _of_search(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
    """Each value among boundaries that are the same for all."""
    return [(node.args[0], _same(shape_of(node.args[0]), out))]  # type: ignore[arg-type, list-item]


def _of_sampling(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
    """`grid_sampler`: features and places of the same sample; the places are laid out as the result is."""
    features, places = node.args[:2]
    behind = range(2, len(out))
    return [(features, (0, 1, *(None for _ in behind))), (places, (0, None, *(d - 1 for d in behind)))]  # type: ignore[list-item]


def _of_distance(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
    """A number for each pair of vectors along `dim` (the last one of pairwise_distance)."""
    found: list[tuple[fx.Node, Link]] = []
    for used in node.all_input_nodes:
        shape = shape_of(used)
        dim = bound.get("dim", -1) % len(shape)
        rest = [d for d in range(len(shape)) if d != dim]
        same = _same([shape[d] for d in rest], out, from_right=True)
        found.append((used, tuple(None if d is None else rest[d] for d in same)))
    return found


_MORE: dict[str, Any] = {
    **{name: _first(rest) for name, rest in _SPATIAL.items()},
    **dict.fromkeys(_BY_SAMPLE, _first(None)),
    **{name: _skipping(argument) for name, argument in _SKIPPING.items()},
    **dict.fromkeys(("aten::gather", "aten::scatter", "aten::scatter_add", "aten::scatter_reduce",
                     "aten::slice_scatter", "aten::diff"), _of_gather),
    **dict.fromkeys(("aten::pad", "aten::constant_pad_nd"), _of_padding),
    **dict.fromkeys(("aten::bucketize", "aten::searchsorted"), _of_search),
    **dict.fromkeys(("aten::cosine_similarity", "aten::pairwise_distance"), _of_distance),
    SDPA: _of_attention,
    "aten::unfold": _of_windows,
    **dict.fromkeys(_COMPLEX, _of_complex),
    "aten::prelu": _of_prelu,
    "aten::sum_to_size": _of_sum_to_size,
    "aten::repeat": _of_repeat,
    "aten::grid_sampler": _of_sampling,
}  # fmt: skip


def reshaped(one: Sequence[int], other: Sequence[int], axis: Axis, count: int) -> Axis | None:
    """The axis after a reshape: where the same stretch of the flat memory counts count, if one dimension holds it."""
    step = prod(one[axis[0] + 1 :]) * axis[1]  # elements from one token to the next
    for dim, size in enumerate(other):
        behind = prod(other[dim + 1 :])
        if behind and step % behind == 0 and (behind * size) % (step * count) == 0:
            return dim, step // behind
    return None
