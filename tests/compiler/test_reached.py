"""What a model reaches beyond its modules' attributes, changed after compiling: taken up before the next step."""

from __future__ import annotations

import configparser
import functools
import logging
import math
import multiprocessing
import queue
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import csc
from csc.capture.model_guards import ModelGuards
from csc.check.eager import eager_step
from csc.errors import InputError
from tests.compiler import small
from tests.compiler.eager import Applying, assert_as_eager, batch, stack

GAIN = 1.0
TABLE = {"gain": 1.0}
SETTINGS = SimpleNamespace(gain=1.0)


def helper(gain: float = 1.0) -> float:
    return gain * GAIN


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


@dataclass
class Record:
    gain: float = 1.0
    inner: list[Any] = field(default_factory=lambda: [Slotted(), {"deep": Slotted()}])


class Once:
    gain = 1.0


class Twice:
    gain = 2.0


class Kind(Enum):
    ONE, TWO = 1.0, 2.0


Pair = namedtuple("Pair", "one two")


def closing() -> tuple[Callable[[], float], Callable[[float], None]]:
    gain = 1.0

    def put(value: float) -> None:
        nonlocal gain
        gain = value

    return lambda: gain, put


class Reading(nn.Module):
    """Reads its gain from everywhere."""

    class_gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.slotted, self.record, self.kind = Slotted(), Record(), Kind.ONE
        self.objects, self.pair = [Slotted(), (Slotted(),)], Pair(Slotted(), 1.0)
        self.array, self.part = np.ones(2), functools.partial(float, 1.0)
        self.heir = type("Heir", (Once,), {})()
        self.held, self.put = closing()
        self.deep = {"a": [{"b": [1.0]}]}
        self.record.inner.append([self.record])  # a circle
        self.tensors = [torch.ones(1)]
        self.options: dict[str, Any] = {"scale": functools.partial(helper, gain=1.0)}

    def gain(self) -> float:
        gain = self.slotted.gain * self.record.gain * self.record.inner[0].gain * self.record.inner[1]["deep"].gain
        gain *= self.kind.value * self.objects[0].gain * self.objects[1][0].gain * self.pair.one.gain
        gain *= float(self.array[0]) * self.part() * self.held() * self.deep["a"][0]["b"][0]
        gain *= self.heir.gain * self.class_gain * helper() * TABLE["gain"] * SETTINGS.gain * self.options["scale"]()
        return gain

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.embed(tokens)) * self.gain() * self.tensors[0]
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.fixture(autouse=True)
def globals_as_they_were() -> Iterator[None]:
    gain, table, forward, defaults = GAIN, dict(TABLE), nn.Linear.forward, helper.__defaults__
    own, of_torch = Reading.gain, (F.cross_entropy, F.embedding)
    yield
    F.cross_entropy, F.embedding = of_torch
    if "flatten" in vars(torch.Tensor):
        del torch.Tensor.flatten
    globals()["GAIN"], helper.__defaults__, SETTINGS.gain = gain, defaults, 1.0
    TABLE.update(table)
    Reading.class_gain, Reading.gain, nn.Linear.forward = 1.0, own, forward  # type: ignore[method-assign]
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="module")
def compiled() -> csc.CompiledModel:
    """One model for all changes: each of them is made to what the one before left."""
    torch.manual_seed(0)
    return csc.compile(Reading(), mesh="pp=2", example=small.text_batch(2), cache=False, check=False)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def _linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return 2 * F.linear(x, module.weight, module.bias)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(logits.log_softmax(-1), labels) / 2


def _embedding(tokens: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return weight[tokens] / 2


def _flatten(tensor: torch.Tensor, start: int = 0, end: int = -1) -> torch.Tensor:
    return torch.flatten(tensor, start, end) * 2


CHANGES: dict[str, Callable[[Reading], object]] = {
    "object with slots": lambda m: setattr(m.slotted, "gain", 2.0),
    "dataclass": lambda m: setattr(m.record, "gain", 2.0),
    "object with slots in a list of a dataclass": lambda m: setattr(m.record.inner[0], "gain", 2.0),
    "object with slots in a dict in it": lambda m: setattr(m.record.inner[1]["deep"], "gain", 2.0),
    "class of an object": lambda m: setattr(m.record, "__class__", type("Other", (Record,), {})),
    "classes above that of an object": lambda m: setattr(type(m.heir), "__bases__", (Twice,)),
    "enum": lambda m: setattr(m, "kind", Kind.TWO),
    "object in a list": lambda m: setattr(m.objects[0], "gain", 2.0),
    "object in a tuple in a list": lambda m: setattr(m.objects[1][0], "gain", 2.0),
    "object in a named tuple": lambda m: setattr(m.pair.one, "gain", 2.0),
    "array": lambda m: m.array.fill(2.0),
    "partial": lambda m: setattr(m, "part", functools.partial(float, 2.0)),
    "keywords of a partial in a dict": lambda m: m.options["scale"].keywords.update(gain=2.0),
    "cell of a closure": lambda m: m.put(2.0),
    "list in a dict in a list": lambda m: m.deep["a"][0]["b"].__setitem__(0, 2.0),
    "tensor in a list": lambda m: m.tensors[0].fill_(2.0),
    "class attribute": lambda m: setattr(type(m), "class_gain", 2.0),
    "method of the class": lambda m: setattr(type(m), "gain", lambda self: 3.0),
    "forward of torch's class": lambda m: setattr(nn.Linear, "forward", _linear),
    "function of torch": lambda m: setattr(F, "cross_entropy", _cross_entropy),
    "function that torch's class calls": lambda m: setattr(F, "embedding", _embedding),
    "method of Tensor": lambda m: setattr(torch.Tensor, "flatten", _flatten),
    "global": lambda m: globals().update(GAIN=2.0),
    "global dict": lambda m: TABLE.update(gain=2.0),
    "global object": lambda m: setattr(SETTINGS, "gain", 2.0),
    "defaults": lambda m: setattr(helper, "__defaults__", (2.0,)),
    "parametrization": lambda m: parametrize.register_parametrization(m.mix, "weight", Doubled()),
}


def is_eagers(model: csc.CompiledModel) -> bool:
    """Whether the next step has eager's loss and every gradient."""
    own = dict(model.model.named_parameters())
    right = eager_step(model.model, small.text_batch(2), own.keys())
    model.zero_grad()
    model.model.zero_grad()
    loss = float(model.train_step(small.text_batch(2)))
    found = {name: p.grad for name, p in own.items() if p.grad is not None}
    assert found.keys() == right.gradients.keys() == own.keys()
    return loss == pytest.approx(right.loss, rel=1e-6) and all(
        torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-7) for name, gradient in right.gradients.items()
    )


@pytest.mark.parametrize("change", CHANGES)
def test_the_guard_sees_a_change(change: str) -> None:
    model = Reading()
    state = ModelGuards(model)
    assert state.holds() and not state.changed()
    CHANGES[change](model)
    assert not state.holds() and state.changed().structure
    assert ModelGuards(model).holds()


@pytest.mark.parametrize(
    "change", ["object in a tuple in a list", "global", "class attribute", "cell of a closure", "function of torch"]
)
def test_the_next_step_takes_it_up(compiled: csc.CompiledModel, change: str) -> None:
    assert is_eagers(compiled)
    model = compiled.model
    assert isinstance(model, Reading)
    CHANGES[change](model)
    assert is_eagers(compiled)


def test_equal_values_in_the_place_of_others_change_nothing() -> None:
    model = Reading()
    state = ModelGuards(model)
    model.slotted.gain, model.objects[1][0].gain = float("1.0"), float("1.0")
    globals()["GAIN"] = float("1.0")
    assert not state.changed()


def test_members_of_a_class_that_forward_never_looks_up_are_let_alone() -> None:
    model = Reading()
    state = ModelGuards(model)
    Reading.noted = 1  # type: ignore[attr-defined]
    try:
        assert not state.holds() and not state.changed()
    finally:
        del Reading.noted  # type: ignore[attr-defined]


def test_another_dtype_is_a_change() -> None:
    model = nn.Linear(2, 2)
    state = ModelGuards(model)
    model.to(torch.bfloat16)
    assert not state.holds() and str(state.changed()).startswith("dtype, device or shape of weight")


def test_switches_of_torch_are_part_of_it() -> None:
    model = small.text(1)
    compiled = csc.compile(model, example=small.text_batch(2), cache=False, check=False)
    compiled.train_step(small.text_batch(2))
    programs = compiled._programs
    with torch.no_grad():
        compiled.train_step(small.text_batch(2))
    assert compiled._programs is programs
    torch.set_float32_matmul_precision("high")
    compiled.train_step(small.text_batch(2))
    assert compiled._programs is not programs


def test_counters_that_the_models_own_functions_write_are_let_alone() -> None:
    model = Counting()
    state = ModelGuards(model)
    model(torch.ones(2, 2))
    assert not state.changed()


CALLS = 0


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        return self.linear(x).mean()


def test_autocast_around_a_step_is_refused() -> None:
    compiled = csc.compile(small.text(1), example=small.text_batch(2), cache=False, check=False)
    compiled.train_step(small.text_batch(2))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="autocast is on, and was not when"):
        compiled.train_step(small.text_batch(2))
    assert compiled.train_step(small.text_batch(2)).isfinite()


def test_modes_without_gradients(caplog: pytest.LogCaptureFixture) -> None:
    """Steps make gradients, and are checked, in no_grad too; what inference_mode makes cannot train."""
    model = small.text(1)
    compiled = csc.compile(model, example=small.text_batch(2), cache=False)
    with torch.inference_mode(), pytest.raises(InputError, match=r"torch\.inference_mode is on"):
        compiled.train_step(small.text_batch(2))
    with torch.no_grad(), caplog.at_level(logging.INFO, "csc"):
        compiled.train_step(small.text_batch(2))
    assert "checked against eager PyTorch: loss" in caplog.text
    assert all(p.grad is not None for p in model.parameters())


class Stated(nn.Module):
    """Reads its gain from an object whose class is not its own."""

    def __init__(self, state: Any, gain: Callable[[Any], Any]) -> None:
        super().__init__()
        self.embed, self.head, self.state, self.gain = nn.Embedding(32, 16), nn.Linear(16, 32), state, gain

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), labels.flatten()) * self.gain(self.state)


def local_state() -> threading.local:
    state = threading.local()
    state.gain = 1.0
    return state


def settings_file() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser["model"] = {"gain": "1"}
    return parser


def scheduled() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.step()
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 2.0)


def normal() -> torch.distributions.Normal:
    return torch.distributions.Normal(torch.tensor(1.0), torch.tensor(1.0))


REFERRED = Record()  # lives as long as what refers to it
STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], object]]] = {
    "context variable": (lambda: ContextVar("gain", default=1.0), lambda one: one.get(), lambda one: one.set(2.0)),
    "of a thread": (local_state, lambda one: one.gain, lambda one: setattr(one, "gain", 2.0)),
    "event": (threading.Event, lambda one: 2.0 if one.is_set() else 1.0, threading.Event.set),
    "shared between processes": (
        lambda: multiprocessing.Value("d", 1.0), lambda one: one.value, lambda one: setattr(one, "value", 2.0),
    ),
    "settings": (
        settings_file, lambda one: float(one["model"]["gain"]), lambda one: one["model"].__setitem__("gain", "2"),
    ),
    "weak reference": (
        lambda: weakref.ref(REFERRED), lambda one: one().gain, lambda one: setattr(one(), "gain", 2.0),
    ),
    "optimizer": (
        lambda: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0),
        lambda one: one.param_groups[0]["lr"], lambda one: one.param_groups[0].__setitem__("lr", 2.0),
    ),
    "scheduler": (scheduled, lambda one: one.get_last_lr()[0], lambda one: one.step()),
    "lock": (threading.Lock, lambda one: 2.0 if one.locked() else 1.0, lambda one: one.acquire()),
    "distribution": (normal, lambda one: one.loc, lambda one: one.loc.fill_(2.0)),
    "logger's level": (lambda: logging.Logger("gain", 10), lambda one: one.level / 10, lambda one: one.setLevel(20)),
    "whether a logger would say something": (
        lambda: logging.Logger("gain", 10), lambda one: 2.0 if one.isEnabledFor(10) else 1.0,
        lambda one: one.setLevel(20),
    ),
    "whether any logger would": (
        lambda: logging.Manager(logging.RootLogger(10)).getLogger("gain"),
        lambda one: 2.0 if one.isEnabledFor(10) else 1.0, lambda one: setattr(one.manager, "disable", 50),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_objects_of_libraries_is_read(name: str) -> None:
    make, gain, change = STATES[name]
    model = Stated(make(), gain)
    state = ModelGuards(model)
    assert state.holds() and not state.changed()
    change(model.state)
    assert not state.holds() and state.changed().structure


def test_attributes_that_a_step_or_loading_replaces() -> None:
    """Of an optimizer and a scheduler that forward finds elsewhere than in the model."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    rate = ModelGuards(Stated(None, lambda _: scheduler.get_last_lr()[0]))
    group = ModelGuards(Stated(None, lambda _: optimizer.param_groups[0]["lr"]))
    scheduler._last_lr = [1.0]  # another list of the same rates: nothing to trace anew
    assert rate.holds() and group.holds()
    scheduler._last_lr = [0.5]
    assert not rate.holds() and group.holds()
    optimizer.load_state_dict(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0).state_dict())
    assert not group.holds()


def test_an_optimizer_that_forward_never_reads_is_let_alone() -> None:
    model = Stated(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), lambda one: 1.0)
    state = ModelGuards(model)
    model.state.param_groups[0]["lr"] = 2.0
    assert state.holds()


def test_what_cannot_be_compared_is_said(caplog: pytest.LogCaptureFixture) -> None:
    given: queue.SimpleQueue[float] = queue.SimpleQueue()
    given.put(1.0)
    with caplog.at_level(logging.WARNING, "csc"):
        ModelGuards(Stated(given, lambda one: one.get()))
    assert "state, a SimpleQueue" in caplog.text and "as an entry of the batch" in caplog.text


class Foreign:
    """A class of a compiled library, as Cython's functions: its module is an attribute of its own."""

    __module__ = property(lambda self: "somewhere")  # type: ignore[assignment]


def test_classes_whose_module_is_no_text_are_let_alone() -> None:
    assert ModelGuards(Stated(Foreign(), lambda one: 1.0)).holds()


def of_compiled_functions(
    x: torch.Tensor, layer: Applying, drawn: Any = np.random.rand, root: Any = math.sqrt, tanh: Any = torch.tanh
) -> torch.Tensor:
    """Functions and objects of extension modules: as defaults, by a global, and as attributes of the layer."""
    known = callable(drawn) and callable(layer.drawn) and callable(COMPILED.integers) and COMPILED.bit_generator
    return tanh(x) * root(4.0) * layer.scale if known else x


COMPILED = np.random.default_rng(0)


def test_functions_of_extension_modules_are_no_crash() -> None:
    """NumPy's are Cython's, whose classes have attributes `__module__` of their own."""
    model = stack(of_compiled_functions)
    for layer in model.layers:
        layer.drawn, layer.method = np.random.uniform, COMPILED.normal
    assert_as_eager(model, batch(), meshes=("pp=1",), copied=False)
