"""Calls that reduce dimensions, or work along them: sums, norms, softmax, orders, losses.

RULES: {operation: rule}        see csc.analysis.operators.table
NORMS: layers that normalise over trailing dimensions
BATCH_NORMS: those that normalise over samples; NORMALISING: softmax and its like
RECURRENT: layers that keep a state from token to token
LABELS, ELEMENTS, SAMPLES, SEQUENCES: loss functions over classes, entry by entry, row by row, sequence by sequence
HEAD: one over classes with the linear layer that makes their logits
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from csc.analysis.operators.pointwise import broadcasting
from csc.analysis.operators.relation import Call, End, How, Rule, Use, alike, dims_of, same, shape_of

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
           *(f"fft_{way}{kind}{dims}"
             for way in ("", "i") for kind in ("fft", "rfft", "hfft") for dims in ("", "2", "n")))  # fmt: skip
_REDUCTIONS = ("mean", "sum", "amax", "amin", "var", "std", "logsumexp", "linalg_vector_norm", "any", "all", "prod",
               "argmax", "argmin", "nansum", "count_nonzero", "aminmax", "std_mean", "var_mean",
               "linalg_matrix_norm")  # fmt: skip
NORMALISING = ("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax")
_EXTREMES = ("max", "min", "median", "nanmedian", "kthvalue", "mode")  # with a dim: values and places
_ALONG = (
    "cumsum", "topk", "repeat_interleave", "glu", "sort", "argsort", "logcumsumexp", "cumprod", "cummax", "cummin",
)  # fmt: skip


def reduction(call: Call) -> list[Use]:
    given = shape_of(call.first())
    gone = set(dims_of(call.bound.get("dim"), len(given)))
    kept = [None if d in gone else d for d in range(len(given))]
    if len(call.out) != len(given):
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
    own = tuple(d if d < first else None for d in range(rank))
    scales = tuple(d - first if d >= first else None for d in range(rank))
    ends = {d: End("normalised", d) for d in range(first, rank)}
    return [Use(operand, own, ends=ends), *(Use(one, scales) for one in call.given("weight", "bias"))]


def weight_norm(call: Call) -> list[Use]:
    """Of a weight, over all its dimensions but one, of whose entries each has a length of its own; -1: over all."""
    own = call.bound["dim"]
    ends = {dim: End("normalised", dim) for dim in range(len(call.out)) if dim != own}
    link = tuple(dim if dim == own else None for dim in range(len(call.out)))
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
        at = {walk: d for d, walk in enumerate(walks)}
        link = tuple(at[d] if d in at and alike(shape[at[d]], size) else None for d, size in enumerate(out))
        uses.append(Use(node, link, ends={d: End("summed", walk=walk) for d, walk in enumerate(walks)}))
    return uses


def labels(call: Call) -> list[Use]:
    """Logits [N, classes, ..] or [classes], labels [N, ..] or probabilities as logits are."""
    logits, target = call.bound["self"], call.bound["target"]
    rank = len(shape_of(logits))
    classes = 0 if rank == 1 else 1
    own = [CLASSES if d == classes else d - (d > classes) for d in range(rank)]
    known = own if len(shape_of(target)) == rank else [walk for walk in own if walk != CLASSES]
    weights = [(one, [CLASSES]) for one in call.given("weight")]
    return _of_loss([(logits, own), (target, known), *weights], call.out)


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


RULES: dict[str, Rule] = {
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
