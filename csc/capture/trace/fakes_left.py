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

DEEPEST = 3  # of containers within one that a trace has made


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


def _is_of_trace(value: Any, deep: int = DEEPEST) -> bool:
    """A tensor of a trace, or a container with one; containers may hold themselves."""
    if isinstance(value, torch.Tensor):
        return type(value).__module__.startswith("torch._subclasses")
    if not deep or not isinstance(value, (list, tuple, dict)):
        return False
    return any(_is_of_trace(one, deep - 1) for one in (dict.values(value) if isinstance(value, dict) else value))
