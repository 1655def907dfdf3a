"""A model as a trace runs it, and as it was before afterwards: contexts.

training(model)      without_kv_cache(model)      as_traced(model, layers): both, and all else that a trace needs
uncached(caching(modules))    the second one, for a model that is looked at once
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from csc.capture.dedup.layers import Layers
from csc.capture.trace.hf_varlen import one_attention
from csc.capture.trace.mutations import attributes_kept
from csc.torch_private.real_layouts import real_layouts
from csc.torch_private.traces import (
    each_computed,
    plain_checkpoints,
    tensors_of_data,
    unchanged_modules,
    without_messages,
)


def caching(modules: Iterable[nn.Module]) -> list[Any]:
    """The configurations of HF models that say whether a key/value cache is filled."""
    have = (one for one in modules if "config" in vars(one) or hasattr(type(one), "config"))
    found = {id(one.config): one.config for one in have if one.config is not None}
    return [one for one in found.values() if hasattr(one, "use_cache")]


@contextmanager
def uncached(configurations: Sequence[Any]) -> Iterator[None]:
    """HF models fill a key/value cache while training unless told not to; it would be dead weight in the graph. With it
    they also take packed documents (positions that start again) for one sequence. configurations: see `caching`.
    """
    before = [one.use_cache for one in configurations]
    try:
        for one in configurations:
            one.use_cache = False
        yield
    finally:
        for one, was in zip(configurations, before):
            one.use_cache = was


def without_kv_cache(model: nn.Module) -> AbstractContextManager[None]:
    """A model whose configurations are so."""
    return uncached(caching(model.modules()))


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
        real_layouts(),
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
