"""Whether an operation keeps the tokens of a sequence apart, so that ranks may each run it on some of them.

The same graph is lowered for two lengths of the sequence; a dimension whose size differs counts tokens.

    token_dims(one, other) -> tuple[int, ...]         of one value in its two lowerings
    is_pointwise(node) -> bool                        whether a call works element by element
    mixes(node, dims) -> str | None                   why a call must see the whole sequence; None if it need not
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from csc.ir import graph as g
from csc.torch_private import OpOverload

Dims = Callable[[fx.Node], tuple[int, ...]]

# Operations along the dimensions that one argument names; the rest they leave alone.
ALONG = {
    "aten::softmax": "dim", "aten::_softmax": "dim", "aten::log_softmax": "dim", "aten::_log_softmax": "dim",
    "aten::mean": "dim", "aten::sum": "dim", "aten::amax": "dim", "aten::amin": "dim", "aten::var": "dim",
    "aten::cumsum": "dim", "aten::cat": "dim", "aten::stack": "dim", "aten::slice": "dim", "aten::select": "dim",
    "aten::split": "dim", "aten::split_with_sizes": "dim", "aten::chunk": "dim", "aten::unbind": "dim",
    "aten::index_select": "dim", "aten::linalg_vector_norm": "dim", "aten::topk": "dim", "aten::narrow": "dim",
    "aten::repeat_interleave": "dim", "aten::glu": "dim",
    "aten::unfold": "dimension", "aten::sort": "dim", "aten::argsort": "dim", "aten::scatter": "dim",
    "aten::scatter_add": "dim",
}  # fmt: skip
NORMS = {"aten::layer_norm", "aten::native_layer_norm", "aten::rms_norm", "aten::_fused_rms_norm"}
PRODUCTS = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::matmul": (0, 1), "aten::linear": (0, 1),
             "aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}  # fmt: skip
_MOVES = {"aten::transpose", "aten::permute", "aten::t", "aten::unsqueeze", "aten::squeeze", "aten::clone",
          "aten::_to_copy", "aten::type_as", "aten::alias", "aten::detach", "aten::contiguous",
          "aten::lift_fresh_copy"}  # fmt: skip
_BY_INDEX = {"aten::gather", "aten::scatter", "aten::scatter_add", "aten::slice_scatter"}
_BITWISE = {"aten::__and__", "aten::__or__", "aten::__xor__"}
_APART = {"aten::embedding", "aten::native_dropout", "aten::dropout", "aten::one_hot", "aten::zeros_like",
          "aten::ones_like", "aten::empty_like", "aten::full_like"}  # fmt: skip
_UNKNOWN = "is an operation of which csc does not know that it keeps tokens apart"


def token_dims(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The dimensions in which two lowerings of a value differ."""
    return tuple(dim for dim, (size, changed) in enumerate(zip(one, other)) if size != changed)


def mixes(node: fx.Node, dims: Dims) -> str | None:
    """None if the call computes every token's result from that token alone; else what it does, as a phrase.

    dims: the token dimensions of a value. Reshapes are not for here: whether they tear tokens apart depends on sizes.
    """
    given = [used for used in node.all_input_nodes if dims(used)]
    if not given or node.target is operator.getitem:
        return None
    name, bound = g.op_name(node), g.bind(node) if isinstance(node.target, OpOverload) else {}
    if name in _MOVES or name in _APART:
        return None
    if name in ALONG:
        wanted = bound.get(ALONG[name])
        rank = given[0].meta["val"].dim()
        along = range(rank) if wanted is None else [wanted] if isinstance(wanted, int) else wanted
        hit = {dim % max(rank, 1) for dim in along} & {dim for used in given for dim in dims(used)}
        return "works along the tokens" if hit else None
    if name in _BY_INDEX:
        return _by_index(node, given, bound, dims)
    if name in ("aten::constant_pad_nd", "aten::pad"):
        padded = {len(bound["pad"]) // 2 - 1 - place // 2 for place, size in enumerate(bound["pad"]) if size}
        first = given[0].meta["val"].dim() - len(bound["pad"]) // 2
        return "pads tokens" if {dim - first for dim in dims(given[0])} & padded else None
    if name == "aten::repeat":
        first = len(bound["repeats"]) - given[0].meta["val"].dim()
        again = any(bound["repeats"][first + dim] != 1 for dim in dims(given[0]))
        return "repeats the sequence" if again else None
    if name == "aten::index":
        return _looked_up(node, bound, dims)
    if name in NORMS:
        first = given[0].meta["val"].dim() - len(bound["normalized_shape"])
        return "normalises over tokens" if any(dim >= first for dim in dims(given[0])) else None
    if name in PRODUCTS:
        left, right = (node.args[place] for place in PRODUCTS[name])
        if isinstance(right, fx.Node) and dims(right):
            return "multiplies tokens with tokens"
        if isinstance(left, fx.Node) and left.meta["val"].dim() - 1 in dims(left):
            return "sums over tokens"
        return None
    if is_pointwise(node):
        return _misaligned(node, given, dims)
    return _UNKNOWN


def _by_index(node: fx.Node, given: Sequence[fx.Node], bound: Mapping[str, Any], dims: Dims) -> str | None:
    """What picks and puts along one dimension: in all others, place by place of every operand."""
    operands = [one for one in (bound["self"], bound.get("index"), bound.get("src")) if isinstance(one, fx.Node)]
    own = {dims(one) for one in (*operands, node)}
    if bound["dim"] % max(given[0].meta["val"].dim(), 1) in {dim for used in given for dim in dims(used)}:
        return "works along the tokens"
    return None if len(own) == 1 else "combines the tokens of some operands with the first of others"


def _looked_up(node: fx.Node, bound: Mapping[str, Any], dims: Dims) -> str | None:
    """A table without tokens, looked up by numbers that each token has."""
    if dims(bound["self"]):
        return _UNKNOWN
    numbers = [one for one in bound["indices"] if one is not None]
    behind = {dim - one.meta["val"].dim() for one in numbers for dim in dims(one)}
    return None if len(behind) == len(dims(node)) == 1 else "combines every token with every other"


def is_pointwise(node: fx.Node) -> bool:
    """Whether a call works element by element, broadcasting its operands. torch has not tagged `a & b` and its like."""
    if not isinstance(node.target, OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or g.op_name(node) in _BITWISE


def _misaligned(node: fx.Node, given: Sequence[fx.Node], dims: Dims) -> str | None:
    """Broadcasting counts from the right: the tokens of every operand must lie where the result has them."""
    val: Any = node.meta["val"]
    if not isinstance(val, torch.Tensor):
        return _UNKNOWN
    own = {dim - val.dim() for dim in dims(node)}
    for used in given:
        if {dim - used.meta["val"].dim() for dim in dims(used)} - own or len(own) > 1:
            return "combines every token with every other"
    return None
