"""Eager PyTorch without chance: every random number is the same one.

Two programs that draw different numbers cannot be compared. Here every uniform number is UNIFORM and every normal one
NORMAL, as a compiled program has them in a step whose seed is NO_CHANCE (csc.kernels.dropout); or dropout has
the masks of a step of a program.

    with WithoutChance(masks) as mode: ...    mode.unknown: random operations that were left as they are;
                                              mode.half: whether something was computed in 16 bits
"""

from __future__ import annotations

import math
from typing import Any

import torch

from csc.check.same_masks import SameMasks
from csc.torch_private.traces import TorchDispatchMode

UNIFORM = 0.25
NORMAL = 0.5
IN_HALF = (torch.bfloat16, torch.float16)

aten = torch.ops.aten


class WithoutChance(TorchDispatchMode):
    """unknown: names of operations that drew from torch's generator all the same. half: whether any result has a
    floating dtype of 16 bits, as under torch.autocast. masks: of dropout, if it is to drop something.
    """

    def __init__(self, masks: SameMasks | None = None) -> None:
        super().__init__()
        self.masks = masks
        self.unknown: set[str] = set()
        self.half = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            result = func(*args, **kwargs)
            self.half |= isinstance(result, torch.Tensor) and result.dtype in IN_HALF
            return result
        packet = func.overloadpacket
        if self.masks is not None:
            dropped = self._masked(func, self.masks, *args)
            if dropped is not None:
                return dropped
            if not _draws_nothing(func, args, kwargs):
                self.masks.refuse()
        if packet is aten.bernoulli and func is aten.bernoulli.default:
            return (args[0] > UNIFORM).to(args[0].dtype)
        if packet is aten.bernoulli:
            return torch.full_like(args[0], float(args[1] > UNIFORM))
        if func is aten.bernoulli_.float:
            return args[0].fill_(float((args[1] if len(args) > 1 else 0.5) > UNIFORM))
        if func is aten.bernoulli_.Tensor:
            return args[0].copy_((args[1] > UNIFORM).to(args[0].dtype))
        if packet is aten.native_dropout:
            return _dropped(*args)
        if packet in _FILLED and kwargs.get("generator") is None:
            return args[0].copy_(_FILLED[packet](torch.full_like(args[0], UNIFORM), *args[1:]))
        if kwargs.get("generator") is None:
            named = {name: value for name, value in kwargs.items() if name != "generator"}
            if packet in (aten.rand, aten.randn):
                named["dtype"] = named.get("dtype") or torch.get_default_dtype()
                return torch.full(args[0], UNIFORM if packet is aten.rand else NORMAL, **named)
            if packet in (aten.rand_like, aten.randn_like):
                return torch.full_like(args[0], UNIFORM if packet is aten.rand_like else NORMAL, **named)
        result = func(*args, **kwargs)
        if not _draws_nothing(func, args, kwargs):
            self.unknown.add(str(func))
        return result

    @staticmethod
    def _masked(func: Any, masks: SameMasks, x: Any = None, p: Any = 0.5, train: Any = True, *_: Any) -> Any:
        """The result of an operation that dropout is made of; None if it is another."""
        if func is aten.bernoulli_.float:  # p: of what stays
            return x.copy_(masks.take(x.shape, 1 - p, x.device))
        if func is aten.native_dropout.default and train is not False and 0 < p < 1:
            mask = masks.take(x.shape, p, x.device)
            return x * mask / (1 - p), mask
        return None


# What operations that fill a tensor make of a uniform number, by their distribution.
_FILLED: dict[Any, Any] = {
    aten.uniform_: lambda u, low=0.0, high=1.0: u * (high - low) + low,
    aten.normal_: lambda u, mean=0.0, std=1.0: torch.full_like(u, NORMAL) * std + mean,
    aten.exponential_: lambda u, rate=1.0: -torch.log1p(-u) / rate,
    aten.cauchy_: lambda u, median=0.0, sigma=1.0: torch.tan((u - 0.5) * math.pi) * sigma + median,
    aten.log_normal_: lambda u, mean=1.0, std=2.0: torch.exp(torch.full_like(u, NORMAL) * std + mean),
}


def _dropped(x: torch.Tensor, p: float, train: bool | None = True) -> tuple[torch.Tensor, torch.Tensor]:
    kept = torch.full_like(x, not train or 1 - p > UNIFORM, dtype=torch.bool)
    return (x * kept / (1 - p) if train and p < 1 else x * kept), kept


def _draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw, as attention may, was called so that it does not."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout", "p"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return not given
    return False
