"""Products with a quantised weight that is frozen: the weight stays packed, and is made dense while a product runs.

Terms
  weight   [rows, columns] = [features out, features in], packed as its library packs it
  scale    what a block of the weight was divided by; second, code, offset: what else the scheme has, or None
  scheme   how the library computes with it, so that csc's numbers are those of the model in eager mode:
             nf4, fp4       bitsandbytes, two weights a byte, a scale for every `block` of them. Doubly quantised
                            scales are bytes too: code and second (for each 256 of them) make numbers of these
             int8           bitsandbytes, a scale for each row; threshold: of the outliers that a GPU keeps exact
             int8_rows      torchao, a scale for each row, which multiplies the result
             int8_groups    torchao, a scale and perhaps a zero (second) for every `block` of a row
             intx           torchao, the same for integers of fewer bits, each in a byte
  dtype    that the weight had, which bitsandbytes makes it dense in for the backward

The gradient of x makes the weight dense again; there is none of the weight, nor of what belongs to it. bias has one.
The libraries are imported when a product first runs.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from csc.kernels.operators import light_operator
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

FOUR_BITS = ("nf4", "fp4")
NESTED_BLOCK = 256  # scales that share one of their own; bitsandbytes computes with no other number


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    d_x = None
    if ctx.needs_input_grad[0]:
        d_x = torch.ops.csc.quantised_linear_backward(grad, *ctx.saved_tensors, *ctx.rest[:-1])
    d_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[6] else None
    return d_x, None, None, None, None, None, d_bias, *(None for _ in ctx.rest)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, weight, scale, second, code, offset, bias, *rest = inputs
    ctx.save_for_backward(weight, scale, second, code, offset)
    ctx.rest, ctx.bias_dtype = rest, None if bias is None else bias.dtype


@light_operator("quantised_linear", _gradients, _remember)
def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    second: torch.Tensor | None,
    code: torch.Tensor | None,
    offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    scheme: str,
    rows: int,
    columns: int,
    block: int,
    dtype: torch.dtype,
    threshold: float = 0.0,
) -> torch.Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    if x.numel() == 0:
        return x.new_zeros(*x.shape[:-1], rows)
    if scheme in FOUR_BITS and _has_product(scheme):
        scales = {"absmax_8bit": scale, "absmax_code": code, "absmax_offset": offset} if code is not None else {}
        own = second if code is not None else scale
        packed = weight.reshape(-1, 1)
        return torch.ops.bitsandbytes.gemm_4bit(x, packed, [rows, columns], own, block, scheme, bias=bias, **scales)
    if scheme == "int8" and not x.is_cpu:
        return _in_integers(x, weight, scale, bias, threshold)
    if scheme == "int8_rows":
        product = torch.mm(x.reshape(-1, columns), weight.t().to(x.dtype)) * scale.to(x.dtype).flatten()
        product = product.reshape(*x.shape[:-1], rows)
        return product if bias is None else product.add_(bias)
    dense = _dense(weight, scale, second, code, offset, scheme, rows, columns, block, dtype, x.dtype)
    if scheme == "int8_groups":
        product = torch.mm(x.reshape(-1, columns), dense.t()).reshape(*x.shape[:-1], rows)
        return product if bias is None else product.add_(bias)
    return F.linear(x, dense, bias)


@torch.library.register_fake("csc::quantised_linear")
def _(x: Any, weight: Any, scale: Any, second: Any, code: Any, offset: Any, bias: Any, scheme: str, rows: int,
      columns: int, *rest: Any) -> torch.Tensor:  # fmt: skip
    _fits(x, columns)
    return x.new_empty(*x.shape[:-1], rows)


@light_operator("quantised_linear_backward")
def _input_gradient(
    grad: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    second: torch.Tensor | None,
    code: torch.Tensor | None,
    offset: torch.Tensor | None,
    scheme: str,
    rows: int,
    columns: int,
    block: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    if grad.numel() == 0:
        return grad.new_zeros(*grad.shape[:-1], columns)
    if scheme == "int8_rows":
        scaled = (grad * scale.to(grad.dtype).flatten()).reshape(-1, rows)
        return torch.mm(scaled, weight.to(grad.dtype)).reshape(*grad.shape[:-1], columns)
    target = dtype if scheme in FOUR_BITS else grad.dtype
    dense = _dense(weight, scale, second, code, offset, scheme, rows, columns, block, dtype, target)
    return torch.matmul(grad, dense.to(grad.dtype))


@torch.library.register_fake("csc::quantised_linear_backward")
def _(grad: Any, weight: Any, scale: Any, second: Any, code: Any, offset: Any, scheme: str, rows: int, columns: int,
      *rest: Any) -> torch.Tensor:  # fmt: skip
    _fits(grad, rows)
    return grad.new_empty(*grad.shape[:-1], columns)


def _fits(x: Any, features: int) -> None:
    if x.shape[-1] != features:
        raise ValueError(f"a quantised weight takes {features} features, and is given {list(x.shape)}")


@register_flop_formula([torch.ops.csc.quantised_linear, torch.ops.csc.quantised_linear_backward])
def _flops(x_shape: Any, *rest: Any, out_shape: Any = None, **_: Any) -> int:
    """Of the product alone, two for each multiply-add."""
    tokens = 1
    for size in x_shape[:-1]:
        tokens *= size
    return 2 * tokens * x_shape[-1] * out_shape[-1]


def _dense(
    weight: torch.Tensor, scale: torch.Tensor, second: torch.Tensor | None, code: torch.Tensor | None,
    offset: torch.Tensor | None, scheme: str, rows: int, columns: int, block: int, dtype: torch.dtype,
    target: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """The weight [rows, columns], by the operations by which its library makes it dense."""
    if scheme in FOUR_BITS:
        _library("bitsandbytes", scheme)
        if code is not None:
            numbers = torch.ops.bitsandbytes.dequantize_blockwise(scale, second, code, NESTED_BLOCK, torch.float32)
            scale = numbers + offset
        packed = weight.reshape(-1, 1)
        return torch.ops.bitsandbytes.dequantize_4bit(packed, scale, block, scheme, [rows, columns], target)
    if scheme == "int8":
        return weight.to(target, copy=True).mul_(scale.unsqueeze(1).mul(1.0 / 127.0))
    primitives = _library("torchao.quantization.quant_primitives", scheme)
    dense = primitives.dequantize_affine(
        weight, (rows if block == 0 else 1, block or columns), scale, second, torch.int8, output_dtype=dtype
    )
    return dense.to(target)


def _in_integers(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """LLM.int8(): activations are rounded to integers too, outliers apart."""
    library = _library("bitsandbytes", "int8")
    state = library.MatmulLtState()
    state.CB, state.SCB, state.has_fp16_weights, state.threshold = weight, scale, False, threshold
    return library.matmul(x, weight, bias=bias, state=state)


def _has_product(scheme: str) -> bool:
    _library("bitsandbytes", scheme)
    return hasattr(torch.ops.bitsandbytes, "gemm_4bit")


def _library(name: str, scheme: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f"a weight of this model is quantised as {scheme}, which {package} computes with, and {package} is not "
            f"installed here: pip install {package}"
        ) from error
