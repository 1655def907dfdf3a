"""Eager PyTorch without chance at the price of eager PyTorch: a step of a small model takes milliseconds, and as long
again if each of its operations is looked at (csc.check.numbers).

Terms: *drawing* calls may draw random numbers. They alone run without chance; the generators tell afterwards whether
anything was drawn elsewhere, and a step in which something was says nothing. (Nothing is seen of draws elsewhere after
which a model puts the generators back: a step that differs says nothing either.)

    listening(chance, draws, model) -> context        of a model whose program draws these
    with Sparing(chance, device, calls) as it: ...    it.missed, it.unknown
    generators(device) -> states                      of the CPU and the device
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from csc import devices
from csc.check.numbers import WithoutChance
from csc.torch_private.dropped_attention import attention_that_drops

# What models call; all else that draws is missed.
DRAWING = frozenset(
    {
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
        F.scaled_dot_product_attention, F.multi_head_attention_forward, F.gumbel_softmax, torch.dropout,
        torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.rand, torch.rand_like, torch.randn,
        torch.randn_like, torch.native_dropout, torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.exponential_,
        torch.Tensor.cauchy_, torch.Tensor.log_normal_,
    }
)  # fmt: skip
DROPOUT, ATTENTION = F.dropout, F.scaled_dot_product_attention  # by which nearly all dropout is made


class Sparing:
    """chance: what drawing calls run in; calls: the context that sees them (see `listening`). missed: whether anything
    was drawn elsewhere. unknown: see WithoutChance.
    """

    def __init__(self, chance: WithoutChance, device: torch.device, calls: AbstractContextManager[Any]) -> None:
        self.missed = False
        self.unknown = chance.unknown
        self._device, self._calls = device, calls

    def __enter__(self) -> Self:
        self._before = generators(self._device)
        self._calls.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._calls.__exit__(*error)
        self.missed = not torch.equal(self._before, generators(self._device))


Chance = WithoutChance | Sparing


def listening(chance: WithoutChance, draws: bool, model: nn.Module) -> AbstractContextManager[Any]:
    """Within it, drawing calls of the model run in `chance`. draws: whether there are such calls, as far as is known.

    A mode sees each call of torch, which costs a small model a third of its forward. Dropout that takes masks is nearly
    always called by name, as nn.Dropout does: then these names are other functions meanwhile.
    """
    if not draws:
        return nullcontext()
    drawing = _DrawingCalls(chance)
    if chance.masks is None or _holds_drawing(model):
        return _InDrawing(drawing)
    return _named(drawing)


class _DrawingCalls:
    """Drawing calls, as they run in `chance`."""

    def __init__(self, chance: WithoutChance) -> None:
        self._chance = chance

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What one gives. Most of dropout is computed as torch does on a CPU, in operations that nobody looks at."""
        if func is ATTENTION:
            if not _drops(*args, **kwargs):
                return func(*args, **kwargs)
            dropped = self._attention(*args, **kwargs)
        else:
            dropped = self._dropout(*args, **kwargs) if func is DROPOUT else None
        if dropped is not None:
            return dropped
        with self._chance:
            return func(*args, **kwargs)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor | None:
        masks = self._chance.masks
        if masks is None or inplace or not _is_plain(input, p) or not input.numel():
            return None
        if not training:
            return input
        return input * masks.take(input.shape, p, input.device).to(input.dtype).div_(1 - p)

    def _attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor | None:  # fmt: skip
        masks, given = self._chance.masks, (query, key, value)
        if masks is None or not all(_is_plain(one, dropout_p) for one in given) or query.dim() != 4:
            return None
        kept = masks.take((*query.shape[:-1], key.shape[-2]), dropout_p, query.device)
        return attention_that_drops(*given, kept, dropout_p, attn_mask, is_causal, scale, enable_gqa)


def _is_plain(tensor: torch.Tensor, p: float) -> bool:
    """Whether torch drops elements of it as a CPU does."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu" and 0 < p < 1


class _InDrawing(TorchFunctionMode):
    """Each call is looked at."""

    def __init__(self, drawing: _DrawingCalls) -> None:
        super().__init__()
        self._drawing = drawing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._drawing.call(func, args, kwargs or {}) if func in DRAWING else func(*args, **(kwargs or {}))


@contextmanager
def _named(drawing: _DrawingCalls) -> Iterator[None]:
    """Dropout and attention are other functions by their names, for this thread."""
    here = get_ident()

    def another(func: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return drawing.call(func, args, kwargs) if get_ident() == here else func(*args, **kwargs)

        return call

    names = ("dropout", "scaled_dot_product_attention")
    with patch.multiple(F, **{name: another(getattr(F, name)) for name in names}):
        yield


def _holds_drawing(model: nn.Module) -> bool:
    """Whether a file that the model's classes stand in has drawing functions under names of its own."""
    drawing = set(map(id, DRAWING))
    homes = {kind.__module__ for kind in set(map(type, model.modules()))}
    own = [vars(sys.modules[home]) for home in homes if home in sys.modules and home.partition(".")[0] != "torch"]
    return any(not drawing.isdisjoint(map(id, space.values())) for space in own)


def _drops(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any) -> bool:
    """Whether attention that is called so drops weights."""
    return bool(dropout_p)


def generators(device: torch.device) -> torch.Tensor:
    """What torch's generators will draw next, on the CPU and on the device."""
    return torch.cat([torch.get_rng_state(), devices.generator(device)])
