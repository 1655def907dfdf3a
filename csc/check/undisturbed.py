"""A model that several steps run on, each of which finds it as the first one did.

    undisturbed(model)              context: gradients, buffers, attributes, modes, random numbers stay
    standing = Snapshot(model)      the same, looked at once
    with standing.kept(): ...       for a step
    with standing.in_training(): ...    and for one that trains: in training mode, without a cache of keys and values

To look at a small model takes as long as a tenth of its step, so what is there is compared in loops of C, and written
back where something has changed alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, compress, filterfalse
from operator import is_

import torch
from torch import nn

from csc import devices
from csc.capture.batch import device_of
from csc.capture.trace.export import caching, uncached

CONTAINERS = frozenset({list, dict, set, OrderedDict})  # the last one of hooks


class Snapshot:
    """A model as it is now, and its parameters by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = device_of(model)
        self.modules, self.parameters = list(model.modules()), dict(model.named_parameters())
        self._gradients = [(p, p.requires_grad, p.grad) for p in self.parameters.values()]
        own = list(map(vars, self.modules))
        held = list(chain.from_iterable(map(dict.values, own)))
        containers = list(compress(held, map(CONTAINERS.__contains__, map(type, held))))
        full = list(filter(None, containers))
        self._empty = list(filterfalse(None, containers))  # most are, and stay so
        self._others = [(one, one.copy()) for one in full if not isinstance(one, dict)]
        self._dicts = [*own, *(one for one in full if isinstance(one, dict))]
        self._before = [one.copy() for one in self._dicts]  # an OrderedDict in its own order
        self._sizes, self._names = list(map(len, self._before)), list(chain.from_iterable(self._before))
        self._values = list(chain.from_iterable(map(dict.values, self._before)))
        buffers = (one for module in own for one in module["_buffers"].values() if one is not None)
        self._buffers = [(one, one._version, one.clone()) for one in buffers]
        self._configurations = caching(self.modules)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What changes within is as it was afterwards; so are torch's generators."""
        try:
            with devices.forked(self.device):
                yield
        finally:
            self._put_back()

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """The same in training mode, as the user left it: see `training`; without what HF models cache."""
        with self.kept(), uncached(self._configurations):
            if not self.model.training:
                self.model.train()
            yield

    def _put_back(self) -> None:
        for parameter, trains, gradient in self._gradients:
            if parameter.requires_grad is not trains:
                parameter.requires_grad_(trains)
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, version, value in self._buffers:
                if buffer._version != version or not _is(buffer, value):  # batch norm counts no versions
                    buffer.copy_(value)
        if not self._dicts_hold():
            for own, before in zip(self._dicts, self._before):
                own.clear()
                own.update(before)
        for container, contents in self._others:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)
        for container in filter(None, self._empty):
            container.clear()

    def _dicts_hold(self) -> bool:
        return (
            list(map(len, self._dicts)) == self._sizes
            and all(map(is_, chain.from_iterable(self._dicts), self._names))
            and all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._values))
        )


def undisturbed(model: nn.Module) -> AbstractContextManager[None]:
    """What a step changes in a model is as it was afterwards; so are torch's generators."""
    return Snapshot(model).kept()


def _is(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor is this one, NaN included."""
    if tensor.layout == value.layout == torch.strided and torch.equal(tensor, value):
        return True
    return bool(((tensor == value) | ((tensor != tensor) & (value != value))).all())
