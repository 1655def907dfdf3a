"""Fake tensors that lie in memory as real ones do.

Torch computes what some operations give on fake tensors by other operations, whose results have other strides:
`mse_loss_backward` is contiguous whatever its operands are, its fake one follows them. A trace then views what cannot
be viewed, here or in the next region.

Terms
  layout     a function of a call's fake result and its tensors that gives the result with the strides of the real one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor

aten = torch.ops.aten
Layout = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]


def _contiguous(result: torch.Tensor, _: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def _like(place: int) -> Layout:
    return lambda _, tensors: torch.empty_like(tensors[place])


def _elementwise(*places: int) -> Layout:
    """Where operands differ, as the earlier of these; one may be a plain number, or left out."""

    def layout(_: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        operands = [tensors[place] for place in places if place < len(tensors)]
        # laid out as these are, and so are their fake ones
        return torch.addcmul(*operands) if len(operands) == 3 else torch.add(*operands, *[1] * (2 - len(operands)))

    return layout


LAYOUTS: dict[Any, Layout] = {
    **dict.fromkeys(
        (
            aten._log_softmax_backward_data.default, aten._standard_gamma.default, aten._weight_norm_interface.default,
            aten.huber_loss_backward.default, aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default,
            aten.isin.Tensor_Scalar, aten.isin.Tensor_Tensor, aten.pow.Scalar, aten.float_power.Scalar,
            aten.normal.Tensor_Tensor, aten.normal.float_Tensor, aten.poisson.default, aten.rrelu.default,
            aten.rrelu_with_noise.default,
        ),
        _contiguous,
    ),
    **dict.fromkeys((aten.binary_cross_entropy.default, aten.huber_loss.default, aten.ldexp.Tensor), _like(0)),
    aten.binary_cross_entropy_backward.default: _like(1),
    aten.soft_margin_loss_backward.default: _like(2),
    **dict.fromkeys(
        (
            aten.complex.default, aten.copysign.Tensor, aten.elu_backward.default, aten.floor_divide.default,
            aten.hardsigmoid_backward.default, aten.hardswish_backward.default, aten.hardtanh_backward.default,
            aten.heaviside.default, aten.logaddexp.default, aten.logit_backward.default,
            aten.native_dropout_backward.default, aten.polar.default, aten.softplus_backward.default,
            aten.special_xlog1py.default, aten.special_xlogy.default, aten.xlogy.Tensor,
        ),
        _elementwise(0, 1),
    ),
    aten.clamp.Tensor: _elementwise(0, 1, 2),
    **dict.fromkeys((aten.leaky_relu_backward.default, aten.threshold_backward.default), _elementwise(1, 0)),
    aten.rrelu_with_noise_backward.default: _elementwise(2, 0),
    aten._prelu_kernel_backward.default: _elementwise(1, 2, 0),
}  # fmt: skip
OF_CPU: dict[Any, Layout] = dict.fromkeys((aten.log_sigmoid.default, aten.log_sigmoid_forward.default), _contiguous)


class FakeTensorMode(fake_tensor.FakeTensorMode):
    """Torch's fake mode, whose results have the strides of the real ones for the operations of LAYOUTS."""

    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Of torch, called for each operation."""
        return _laid_out(self, func, args, super().dispatch(func, types, args, kwargs))


@contextmanager
def real_layouts() -> Iterator[None]:
    """A context in which every fake mode gives results the strides of LAYOUTS, also modes that torch makes itself."""
    own = fake_tensor.FakeTensorMode.dispatch

    def dispatch(
        self: fake_tensor.FakeTensorMode, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _laid_out(self, func, args, own(self, func, types, args, kwargs))

    with patch.object(fake_tensor.FakeTensorMode, "dispatch", dispatch):
        yield


def _laid_out(mode: fake_tensor.FakeTensorMode, func: Any, args: Sequence[Any], result: Any) -> Any:
    """The result of a call, or the first of several, with the strides of the real one."""
    layout = LAYOUTS.get(func) or OF_CPU.get(func)
    if layout is None:
        return result
    first = result if isinstance(result, torch.Tensor) else result[0]
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if not all(isinstance(one, fake_tensor.FakeTensor) for one in (first, *tensors)):
        return result
    if func in OF_CPU and first.device.type != "cpu":
        return result
    with mode:
        real = layout(first, tensors)
        if real.shape != first.shape:  # operands that are broadcast
            return result
        real = torch.empty_strided(first.shape, real.stride(), dtype=first.dtype, device=first.device)
    return real if isinstance(result, torch.Tensor) else (real, *result[1:])
