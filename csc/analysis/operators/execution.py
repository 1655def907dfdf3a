"""How calls run on a device: as products, in a neighbour's kernel, over an operand, as views, with random numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from csc.analysis.operators import table
from csc.analysis.operators.table import ATTENTION, ELEMENTS, LABELS, QUANTISED, SAMPLES, SDPA
from csc.ir import graph as g
from csc.ir.graph import METHOD
from csc.torch_private.exported import OpOverload

# --- How the results of calls lie in memory: in that of an operand, or in one of their own ---------------------------


VIEWS = frozenset(
    {
        "aten::t", "aten::view", "aten::_unsafe_view", "aten::transpose", "aten::permute", "aten::expand",
        "aten::unsqueeze", "aten::squeeze", "aten::slice", "aten::select", "aten::alias", "aten::detach",
        "aten::as_strided", "aten::split", "aten::split_with_sizes", "aten::unbind", "aten::diagonal", "aten::unfold",
    }
)  # fmt: skip
OF_ALL = frozenset({"aten::t", "aten::view", "aten::transpose", "aten::permute"})  # that have all entries of a value
# Their results lie in memory in their own way, whatever their inputs do; csc's own operators are known to do as traced.
OWN_LAYOUT = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::linear", "aten::matmul", "aten::embedding"})


def is_view(node: fx.Node) -> bool:
    """True if the node's result shares the storage of its first argument; a reshape, if that one's strides allow it."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    return g.op_name(node) in VIEWS or (g.op_name(node) == "aten::reshape" and _shares(node.args[0], node))


def base(node: fx.Node) -> fx.Node:
    """Returns the call that a chain of views looks at; it may be an item of several results."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def maker(node: fx.Node) -> fx.Node:
    """The call, or the placeholder, whose memory a view or an item of several results looks at."""
    seen = base(node)
    while seen.op == "call_function" and seen.target is operator.getitem:
        seen = base(seen.args[0])  # type: ignore[arg-type]
    return seen


def strides_as(value: torch.Tensor, sizes: torch.Size) -> tuple[int, ...] | None:
    """Returns the strides of a view of these sizes; None where the value has to be copied for that."""
    alike = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    try:
        return alike.view(sizes).stride()
    except RuntimeError:
        return None


def _shares(operand: Any, node: fx.Node) -> bool:
    before, after = operand.meta["val"], node.meta["val"]
    if not all(isinstance(size, int) for size in (*before.shape, *before.stride(), *after.shape)):
        return False
    return strides_as(before, after.shape) is not None


# --- Calls whose result may take the place of an operand in memory, to the same bits ---------------------------------


WAYS = dict.fromkeys((
    "aten::add.Tensor", "aten::cos", "aten::div.Scalar", "aten::div.Tensor", "aten::exp", "aten::mul.Scalar",
    "aten::mul.Tensor", "aten::neg", "aten::pow.Tensor_Scalar", "aten::rsqrt", "aten::sigmoid", "aten::sin",
    "aten::sub.Tensor", "aten::tanh",
), METHOD) | {
    "aten::_log_softmax": "out", "aten::_log_softmax_backward_data": "out", "aten::gelu_backward": "grad_input",
    "aten::sigmoid_backward": "grad_input", "aten::silu_backward": "grad_input", "aten::tanh_backward": "grad_input",
}  # fmt: skip
EITHER = frozenset({"aten::add.Tensor", "aten::mul.Tensor"})
OWN = frozenset({
    "aten::addmm", "aten::bmm", "aten::cat", "aten::clone", "aten::mean.dim", "aten::mm", "aten::nll_loss_backward",
    "aten::sum.dim_IntList",
})  # fmt: skip
MAY_BE_OPERANDS = frozenset({
    "aten::alpha_dropout", "aten::conj_physical", "aten::dropout", "aten::feature_alpha_dropout",
    "aten::feature_dropout", "aten::type_as",
})  # fmt: skip


def written(node: fx.Node) -> fx.Node:
    """Returns the operand that a call marked as `in_place` writes over: its first."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def block(node: fx.Node) -> fx.Node:
    """Returns the call, or the placeholder, that first made the memory of a value. What is written in place is in the
    memory of what was there before.
    """
    producer = maker(node)
    while producer.meta.get("in_place"):
        producer = maker(written(producer))
    return producer


# --- Calls that draw random numbers ----------------------------------------------------------------------------------


DROPOUTS = frozenset({"aten::native_dropout", "aten::dropout"})  # a decision for each entry
FILLED_AT_RANDOM = frozenset({"aten::rand", "aten::randn", "aten::rand_like", "aten::randn_like"})
WHOLE_AT_RANDOM = frozenset({"aten::randint", "aten::randint_like"})


def is_random(node: fx.Node) -> bool:
    """True for ops that draw from the random generator."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if g.op_name(node).startswith("aten::scaled_dot_product"):
        arguments = g.bind(node)
        return bool(arguments.get("dropout_p", 0.0))
    return True


def draws(node: fx.Node) -> bool:
    """True for a random op and for one that takes its numbers from a seed: a value of its own in every region."""
    return is_random(node) or g.op_name(node) in g.SEEDED


# --- How calls run on a device ---------------------------------------------------------------------------------------
#
# A call may be a matrix product, run in the kernel of its neighbours, or read rows alone; each has a dtype.


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


OF_MATRICES = frozenset({"aten::mm", "aten::addmm"})
MATMULS = OF_MATRICES | {"aten::bmm", "aten::baddbmm"} | QUANTISED
ATTENTIONS = frozenset({ATTENTION, "aten::_scaled_dot_product_flash_attention_for_cpu"})
FUSED_REDUCTIONS = _names(
    "sum mean amax var_mean _to_copy native_layer_norm _softmax _log_softmax _softmax_backward_data "
    "_log_softmax_backward_data"
)
LOOK_UPS = table.LOOK_UPS | {"aten::gather"}
# Matmuls, convolutions and attention: their operands are lowered. As torch.autocast's list for lower precision.
COMPUTE = _names(
    "mm addmm bmm baddbmm addbmm matmul linear einsum mv addmv addr dot vdot convolution conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu"
) | {ATTENTION, SDPA, *QUANTISED}
LOSSES = frozenset({*LABELS, *ELEMENTS, *SAMPLES}) | _names("nll_loss_forward nll_loss2d_forward")
# Their operands are raised. As torch.autocast's list for float32; batch and RMS norms stand here, too.
FLOAT32 = LOSSES | _names(
    "layer_norm native_layer_norm group_norm native_group_norm batch_norm _native_batch_norm_legit rms_norm "
    "_fused_rms_norm softmax _softmax log_softmax _log_softmax logsumexp _safe_softmax acos asin cosh erfinv exp expm1 "
    "log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus norm linalg_vector_norm dist cdist renorm "
    "cosine_similarity cumprod cumsum prod sum var var_mean"
)
# Of these bfloat16 has no kernel, or one that is no good: decompositions, solvers and transforms, under the names that
# a trace has before it takes operations apart. What is made of products alone serves.
_NOT_IN_LOW = _names(
    "inverse matrix_exp det logdet slogdet svd _linalg_svd qr geqrf orgqr ormqr pinverse cholesky cholesky_solve "
    "cholesky_inverse lu_solve lu_unpack triangular_solve _lu_with_info nuclear_norm stft istft ctc_loss _ctc_loss "
    "view_as_complex complex polar"
)
_NOT_IN_LOW_PREFIXES = ("aten::linalg_", "aten::_linalg_", "aten::fft_", "aten::_fft_", "aten::special_bessel_")
_PRODUCTS = _names(
    "linalg_multi_dot linalg_vecdot linalg_cross linalg_matmul linalg_matrix_power linalg_vander linalg_diagonal "
    "linalg_vector_norm"
)


def serves_in_low(name: str) -> bool:
    """Whether bfloat16 has the operation of this name."""
    return name not in _NOT_IN_LOW and (not name.startswith(_NOT_IN_LOW_PREFIXES) or name in _PRODUCTS)
