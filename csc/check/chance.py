"""Eager PyTorch without chance at the price of eager PyTorch: a step of a small model takes milliseconds, and as long
again if each of its operations is looked at (csc.check.numbers).

Terms: *drawing* calls may draw random numbers. They alone run without chance; the generators tell afterwards whether
anything was drawn elsewhere, and a step in which something was says nothing. (Nothing is seen of draws elsewhere after
which a model puts the generators back: a step that differs says nothing either.)

    with Sparing(chance, device, listening) as it: ...      it.missed, it.unknown
    generators(device) -> states                            of the CPU and the device
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from csc import devices
from csc.check.numbers import WithoutChance

# What models call; all else that draws is missed.
DRAWING = frozenset(
    {
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
        F.scaled_dot_product_attention, F.multi_head_attention_forward, F.gumbel_softmax, torch.dropout,
        torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.rand, torch.rand_like, torch.randn,
        torch.randn_like, torch.native_dropout,
    }
)  # fmt: skip


class Sparing:
    """chance: what drawing calls run in; listening: whether there are such calls, as far as is known. missed: whether
    anything was drawn elsewhere. unknown: see WithoutChance.
    """

    def __init__(self, chance: WithoutChance, device: torch.device, listening: bool) -> None:
        self.missed = False
        self.unknown = chance.unknown
        self._device = device
        self._mode = _InDrawing(chance) if listening else None

    def __enter__(self) -> Self:
        self._before = generators(self._device)
        if self._mode is not None:
            self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)
        self.missed = not torch.equal(self._before, generators(self._device))


Chance = WithoutChance | Sparing


class _InDrawing(TorchFunctionMode):
    """Drawing calls run in `chance`."""

    def __init__(self, chance: WithoutChance) -> None:
        super().__init__()
        self._chance = chance

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in DRAWING or (func is F.scaled_dot_product_attention and not _drops(*args, **kwargs)):
            return func(*args, **kwargs)
        if func is F.dropout:
            dropped = self._dropped(*args, **kwargs)
            if dropped is not None:
                return dropped
        with self._chance:
            return func(*args, **kwargs)

    def _dropped(
        self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor | None:
        """What most models draw, as torch computes it on a CPU, in operations that nobody looks at. None: elsewhere."""
        masks = self._chance.masks
        if masks is None or inplace or x.device.type != "cpu" or not 0 < p < 1 or not x.numel():
            return None
        return x * masks.take(x.shape, p, x.device).to(x.dtype).div_(1 - p) if training else x


def _drops(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any) -> bool:
    """Whether attention that is called so drops weights."""
    return bool(dropout_p)


def generators(device: torch.device) -> torch.Tensor:
    """What torch's generators will draw next, on the CPU and on the device."""
    return torch.cat([torch.get_rng_state(), devices.generator(device)])
