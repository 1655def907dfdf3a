"""Modes in which a step would not be the one that was compiled: eval, inference_mode, autocast.

refuse_eval(was, model)      refuse_torch(was, operation)        was: the model as it was compiled; None: not yet
refuse_no_gradient(manifest)                                     a program that would train nothing
"""

from __future__ import annotations

import torch
from torch import nn

from csc.capture.model_guards import ModelGuards, autocasts
from csc.errors import InputError
from csc.runtime.specs import Manifest


def refuse_eval(was: ModelGuards | None, model: nn.Module) -> None:
    """InputError for a model that was put in eval mode since."""
    if was is not None and was.was_training and not model.training:
        raise InputError(
            "the model has been put in eval mode since it was compiled", "train_step",
            "call compiled.train() before a training step",
        )  # fmt: skip


def refuse_no_gradient(manifest: Manifest) -> None:
    """InputError where eager PyTorch's backward would have nothing to do."""
    if not any(spec.trainable and spec.reached for spec in manifest.parameters):
        raise InputError(
            "the loss depends on no parameter that trains", "train_step",
            "look for detach(), no_grad() or data between the parameters and the loss",
        )  # fmt: skip


def refuse_torch(was: ModelGuards | None, operation: str) -> None:
    """InputError for modes of torch around a call of this name."""
    if torch.is_inference_mode_enabled():
        raise InputError(
            "torch.inference_mode is on: what is made in it trains nothing", operation,
            f"call {operation} outside of it; torch.no_grad does no harm",
        )  # fmt: skip
    if was is not None and not was.was_autocast and autocasts():
        raise InputError(
            "autocast is on, and was not when the model was compiled", operation,
            f'compile with precision="bf16" and call {operation} outside of torch.autocast',
        )  # fmt: skip
