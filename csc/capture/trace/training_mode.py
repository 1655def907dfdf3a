"""A model as a trace runs it, and as it was before afterwards: contexts.

training(model)      without_kv_cache(model)      as_traced(model, layers): both, and all else that a trace needs
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from csc.capture.dedup.layers import Layers
from csc.capture.trace.hf_varlen import one_attention
from csc.capture.trace.mutations import attributes_kept
from csc.torch_private.traces import (
    each_computed,
    plain_checkpoints,
    tensors_of_data,
    unchanged_modules,
    without_messages,
)


@contextmanager
def without_kv_cache(model: nn.Module) -> Iterator[None]:
    """HF models fill a key/value cache while training unless told not to; it would be dead weight in the graph. With it
    they also take packed documents (positions that start again) for one sequence.
    """
    configs = {
        id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None and hasattr(c, "use_cache")
    }
    before = {key: config.use_cache for key, config in configs.items()}
    try:
        for config in configs.values():
            config.use_cache = False
        yield
    finally:
        for key, config in configs.items():
            config.use_cache = before[key]


@contextmanager
def as_traced(model: nn.Module, layers: Layers) -> Iterator[None]:
    """The model as a trace runs it, and as it was before afterwards."""
    with (
        training(model),
        without_kv_cache(model),
        one_attention(model),
        attributes_kept(model),
        layers.kept_out(),
        without_messages(),
        each_computed(),
        plain_checkpoints(),
        tensors_of_data(),
        unchanged_modules(),
    ):
        yield


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """In training mode, as the user left it: a model in eval mode is switched as a whole, and back afterwards; in one
    that trains, modules that were put in eval mode (frozen batch norms) stay so.
    """
    before = {module: module.training for module in model.modules()}
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for module, mode in before.items():
            if module.training is not mode:
                module.training = mode
