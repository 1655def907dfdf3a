"""A tensor that is read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class LazyTensor(NamedTuple):
    """about: its shape and dtype, as a meta tensor. load: reads it, anew each time."""

    about: torch.Tensor
    load: Callable[[], torch.Tensor]
