"""What a trace leaves in tables that the model's code keeps beside the model (globals, closures, caches of functions):
tensors without data, where eager PyTorch would find them.

    with no_fakes_left(model): ...        for a run of the model's code on such tensors
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from csc.capture.model_guards import reached
from csc.torch_private.traces import pytree


@contextmanager
def no_fakes_left(model: nn.Module) -> Iterator[None]:
    """Members that are, or hold, tensors of the trace are as they were before it, or gone; caches of functions that it
    has added to (functools.lru_cache) are empty.
    """
    before = reached(model)
    known = [(cache, cache.cache_info().misses) for cache in before.caches]
    try:
        yield
    finally:
        before.put_back(_is_of_trace)
        for cache, misses in known:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _is_of_trace(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, list, tuple, dict)):
        return any(type(one).__module__.startswith("torch._subclasses") for one in pytree.tree_leaves(value))
    return False
