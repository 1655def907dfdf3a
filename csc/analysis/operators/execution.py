"""How calls run on a device: as matrix products, in the kernel of their neighbours, reading rows alone; in which dtype.

MATMULS, ATTENTIONS: products, as kernels                FUSED_REDUCTIONS: what Inductor fuses beside pointwise calls
OF_MATRICES: products of two matrices, for which compiled functions may have another library
LOOK_UPS: read as many elements of their first argument as they write, whatever its size
COMPUTE, FLOAT32: in mixed precision                     serves_in_low(name): whether bfloat16 has the operation
"""

from __future__ import annotations

from csc.analysis.operators import moves
from csc.analysis.operators.products import ATTENTION, SDPA
from csc.analysis.operators.reductions import ELEMENTS, LABELS, SAMPLES


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


OF_MATRICES = frozenset({"aten::mm", "aten::addmm"})
MATMULS = OF_MATRICES | {"aten::bmm", "aten::baddbmm"}
ATTENTIONS = frozenset({ATTENTION, "aten::_scaled_dot_product_flash_attention_for_cpu"})
FUSED_REDUCTIONS = _names(
    "sum mean amax var_mean _to_copy native_layer_norm _softmax _log_softmax _softmax_backward_data "
    "_log_softmax_backward_data"
)
LOOK_UPS = moves.LOOK_UPS | {"aten::gather"}
# Matmuls, convolutions and attention: their operands are lowered. As torch.autocast's list for lower precision.
COMPUTE = _names(
    "mm addmm bmm baddbmm addbmm matmul linear einsum mv addmv addr dot vdot convolution conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu"
) | {ATTENTION, SDPA}
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
