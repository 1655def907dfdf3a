"""Tensors as they were, by what changes when one is written to: its version; where and how it lies, as
`tensor.data = other` changes; and the bytes of a small one, since `tensor.data.mul_(2)` and NumPy leave the version as
it was.

    values = TensorValues([(path, tensor), ...])
    values.hold() -> bool                           values.changed() -> [path]
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from csc.torch_private.traces import outside_tracing

SMALL = 4096  # bytes: of what lies on the CPU, of which a microsecond compares that many
VERSION, KIND = attrgetter("_version"), attrgetter("dtype", "shape")
HOW = (torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.is_conj, torch.Tensor.is_neg, KIND)  # one lies


class TensorValues:
    """named: (path, tensor); those in inference mode have no versions, and are left out."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._paths, self._tensors = list[str](), list[torch.Tensor]()
        for path, tensor in named:
            if not tensor.is_inference():
                self._paths.append(path)
                self._tensors.append(tensor)
        self._versions = list(map(VERSION, self._tensors))
        lying = [(path, one) for path, one in zip(self._paths, self._tensors) if _lies(one)]
        self._lying, self._lying_paths = [one for _, one in lying], [path for path, _ in lying]
        self._places = self._as_they_lie()
        self._bytes = [(path, view, view.tobytes()) for path, one in lying if (view := _bytes(one)) is not None]

    def hold(self) -> bool:
        """Whether none was written to or moved."""
        return (
            list(map(VERSION, self._tensors)) == self._versions
            and self._as_they_lie() == self._places
            and all(view.tobytes() == before for _, view, before in self._bytes)
        )

    def changed(self) -> list[str]:
        """The paths of those that were."""
        found = [path for path, one, was in zip(self._paths, self._tensors, self._versions) if one._version != was]
        for now, before in zip(self._as_they_lie(), self._places):
            found += [path for path, one, was in zip(self._lying_paths, now, before) if one != was]
        return found + [path for path, view, before in self._bytes if view.tobytes() != before]

    def _as_they_lie(self) -> list[list[Any]]:
        return [list(map(one, self._lying)) for one in HOW]


def _lies(tensor: torch.Tensor) -> bool:
    """Whether it is one piece of memory, and no tensor class that has its own ways."""
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided


def _bytes(tensor: torch.Tensor) -> Any:
    """The memory of a small one, as NumPy shows it."""
    with outside_tracing():
        small = 0 < tensor.nbytes <= SMALL and tensor.device.type == "cpu" and tensor.is_contiguous()
        if not small or tensor.is_conj() or tensor.is_neg():
            return None
        return tensor.detach().reshape(-1).view(torch.uint8).numpy()
