"""Calls on images, signals and matrices: convolutions, pooling, resizing, sampling, inverses.

RULES: {operation: rule}        see csc.analysis.operators.table
"""

from __future__ import annotations

from csc.analysis.operators.relation import Call, End, Rule, Use

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


RULES: dict[str, Rule] = {
    **{f"aten::{name}": _first(behind) for name, behind in (_BEHIND | _MATRICES).items()},
    **{f"aten::{name}": _first(None) for name in _BY_SAMPLE},
    "aten::grid_sampler": sampling,
}
