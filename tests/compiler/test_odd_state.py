"""What is changed after compiling in places that few look at: mappings with an order or a default of their own, bytes,
memory that is written without a version, modules that are not registered, hooks of all modules, what Python calls.
"""

from __future__ import annotations

import ctypes
import gc
from array import array
from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import csc
from csc.check.eager import eager_step
from tests.compiler import small

DEFAULT = 1.0


class Kind(type):
    """A class of classes."""

    @property
    def factor(cls) -> float:
        return 1.0


class Made(metaclass=Kind):
    """Has what its class's class says."""


class Described:
    """A descriptor with a value of its own."""

    factor = 1.0

    def __get__(self, one: object, kind: type | None = None) -> float:
        return self.factor


class Indexed:
    """Reads a global where Python calls it."""

    def __getitem__(self, place: int) -> float:
        return DEFAULT


class Holder:
    """An object with attributes."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor


class Odd(nn.Module):
    """Reads all of them."""

    scale: torch.Tensor
    described: Any = Described()

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.register_buffer("scale", torch.ones(16))
        self.plain, self.holder, self.indexed = torch.ones(16), Holder(), Indexed()
        self.ordered, self.by_default = OrderedDict(a=1.0, b=2.0), defaultdict(lambda: 1.0, {"a": 1.0})
        self.nested = [OrderedDict(a=1.0, b=2.0)]
        self.chained, self.raw, self.others = ChainMap({"a": 1.0}), bytearray(b"\x01"), [nn.Linear(16, 16)]
        self.numbers, self.of_c, table = array("d", [1.0]), ctypes.c_double(1.0), {"a": 1.0, "b": 1.0}
        self.seen, self.shown, self.view = memoryview(bytearray(b"\x01")), MappingProxyType(table), table.values()
        self.steady = [nn.Parameter(torch.ones(16), requires_grad=False)]

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.scale * self.plain * self.holder.factor * self.indexed[0] * self.described
        hidden = hidden * next(iter(self.ordered.values())) * self.by_default["a"] * self.by_default["none"]
        hidden = hidden * next(iter(self.nested[0].values())) * self.chained["a"] * self.raw[0] * self.steady[0]
        hidden = hidden * self.numbers[0] * self.of_c.value * self.seen[0] * self.shown["a"] * [*self.view][1]
        hidden = self.mix(hidden + self.others[0](hidden).detach()) * Made.factor
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


CHANGES: dict[str, Callable[[Odd], object]] = {
    "buffer's memory": lambda m: m.scale.data.mul_(0.5),
    "buffer through NumPy": lambda m: m.scale.numpy().fill(2.0),
    "other memory for a buffer": lambda m: setattr(m.scale, "data", torch.full((16,), 0.5)),
    "other memory for a tensor": lambda m: setattr(m.plain, "data", torch.full((16,), 2.0)),
    "order of its own": lambda m: m.ordered.move_to_end("a"),
    "order of its own, deeper": lambda m: m.nested[0].move_to_end("a"),
    "mapping with a default": lambda m: m.by_default.update(a=2.0),
    "the default": lambda m: m.by_default.__init__(lambda: 0.5, {"a": 2.0}),  # type: ignore[misc]
    "an entry by default": lambda m: m.by_default.pop("none"),
    "mapping of mappings": lambda m: m.chained.maps[0].update(a=0.5),
    "bytes": lambda m: m.raw.__setitem__(0, 2),
    "an array of Python's": lambda m: m.numbers.__setitem__(0, 2.0),
    "a number of ctypes": lambda m: setattr(m.of_c, "value", 2.0),
    "memory of others": lambda m: m.seen.__setitem__(0, 2),
    "a mapping behind a proxy": lambda m: gc.get_referents(m.shown)[0].update(a=2.0),
    "a mapping behind a view": lambda m: gc.get_referents(m.view)[0].update(b=2.0),
    "more bytes": lambda m: m.raw.insert(0, 3),
    "all attributes of an object": lambda m: setattr(m.holder, "__dict__", {"factor": 0.5}),
    "all attributes of a module": lambda m: object.__setattr__(
        m.mix, "__dict__", {**vars(m.mix), "forward": lambda x: 2 * x}
    ),
    "what Python calls": lambda m: globals().update(DEFAULT=DEFAULT * 2),
    "descriptor": lambda m: setattr(vars(Odd)["described"], "factor", Odd.described * 2),
    "class of a class": lambda m: setattr(Kind, "factor", property(lambda cls: 0.5)),
    "weights in a list": lambda m: m.others[0].weight.data.mul_(2),
    "parameter in a list": lambda m: nn.init.constant_(m.steady[0], 2.0),
    "forward of a module in a list": lambda m: setattr(m.others[0], "forward", lambda x: 0.5 * x),
}


def is_eagers(model: csc.CompiledModel) -> bool:
    """Whether the next step has eager's loss and gradients; nothing is compiled after it."""
    own = dict(model.model.named_parameters())
    right = eager_step(model.model, small.text_batch(2), own.keys())
    model.zero_grad()
    loss = float(model.train_step(small.text_batch(2)))
    found = {name: p.grad for name, p in own.items() if p.grad is not None}
    return loss == pytest.approx(right.loss, rel=1e-6) and all(
        torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-7) for name, gradient in right.gradients.items()
    )


def test_changes_that_few_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is taken up by the next step; a step without one compiles nothing."""
    monkeypatch.setattr(Kind, "factor", Kind.factor)
    torch.manual_seed(0)
    model = csc.compile(Odd(), example=small.text_batch(2), cache=False, check=False)
    assert is_eagers(model) and is_eagers(model)
    for name, change in CHANGES.items():
        change(model.model)
        assert is_eagers(model), name
        assert not model._steps.programs.changed(), name
    handle = register_module_forward_hook(
        lambda module, given, result: 2 * result if isinstance(module, nn.Embedding) else None
    )
    try:
        assert is_eagers(model), "a hook of all modules"
    finally:
        handle.remove()
    assert is_eagers(model)
    globals().update(DEFAULT=1.0)
