"""Layers that hold equal values and still differ: by who they are, or by what equal values have besides.

A model traced with equal layers once is the model traced whole, text for text.
"""

from __future__ import annotations

import functools
import math
import types
import weakref
from array import array
from collections import UserDict, UserList, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.capture.capture import capture
from csc.ir.printer import program_text
from tests.tiers import long

WIDTH, DEPTH = 4, 3
RUN = array("b")  # a number for every traced forward of a layer
EVERYONE: list[Any] = []
NUMBERS: dict[int, float] = {}
SHARED: dict[str, Any] = {}


class Layer(nn.Module):
    """What it has in `held` is put there by a case; `scale` computes with that."""

    registry: ClassVar[list[Any]] = []
    by_descriptor: Any = None

    def __init__(self, scale: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), scale
        self.held: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor:  # in a trace
            RUN.append(1)
        return x + self.scale(self) * torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, scale: Callable[[Any], float], give: Callable[[Model], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(Layer(scale) for _ in range(DEPTH))
        give(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    for held in (EVERYONE, NUMBERS, SHARED, Layer.registry):
        held.clear()  # type: ignore[attr-defined]
    Layer.by_descriptor = None


def traced(model: nn.Module) -> tuple[bool, int]:
    """Whether the Program is that of the model traced whole; how many layers' code ran for it."""
    batch = {"x": torch.arange(2.0 * WIDTH).view(2, WIDTH)}
    whole = program_text(capture(model, batch, whole=True))
    del RUN[:]
    return program_text(capture(model, batch)) == whole, len(RUN)


# --- who a layer is ---------------------------------------------------------------------------------------------------


def all_hold(make: Callable[[Model], Any]) -> Callable[[Model], None]:
    def give(model: Model) -> None:
        held = make(model)
        for layer in model.layers:
            layer.__dict__["held"] = held

    return give


def each_holds(make: Callable[[int], Any]) -> Callable[[Model], None]:
    def give(model: Model) -> None:
        for number, layer in enumerate(model.layers):
            layer.__dict__["held"] = make(number)

    return give


def first_if(is_so: Any) -> float:
    return 3.0 if is_so else 1.0


def numbered(things: Any) -> dict[Any, float]:
    return {thing: 1.0 + number for number, thing in enumerate(things)}


class Owner:
    """No module: what holds the layers, in a slot."""

    __slots__ = ("layers",)

    def __init__(self, layers: Any) -> None:
        self.layers = list(layers)

    def scale(self, layer: Any) -> float:
        return 1.0 + self.layers.index(layer)


class Beside:
    """A descriptor whose values stand in a table beside the objects."""

    def __init__(self, values: dict[Any, float]) -> None:
        self.values = weakref.WeakKeyDictionary(values)

    def __get__(self, layer: Any, kind: Any = None) -> Any:
        return self if layer is None else self.values[layer]


def remembered(model: Model) -> Any:
    count = iter(range(DEPTH))

    @functools.lru_cache
    def number(layer: Any) -> int:
        return next(count)

    for layer in model.layers:
        number(layer)
    return number


def closed_over(model: Model) -> Callable[[Any], bool]:
    last = model.layers[-1]
    return lambda layer: layer is last


def described(model: Model) -> None:
    Layer.by_descriptor = Beside(numbered(model.layers))


def acting(model: Model) -> None:
    for layer in model.layers:
        layer.__dict__["held"] = functools.partial(lambda x: x)
    SHARED.update(scales=numbered(layer.held for layer in model.layers))


def by_text(layer: Any) -> float:
    return SHARED["texts"][object.__repr__(layer)]


number_of = id
BY_IDENTITY: dict[str, tuple[Callable[[Any], float], Callable[[Model], None]]] = {
    "a table of modules": (lambda layer: layer.held[layer], all_hold(lambda model: numbered(model.layers))),
    "a table of modules below": (
        lambda layer: layer.held[layer.linear], all_hold(lambda model: numbered(one.linear for one in model.layers)),
    ),
    "a table that holds them weakly": (
        lambda layer: layer.held[layer],
        all_hold(lambda model: weakref.WeakKeyDictionary(numbered(model.layers))),
    ),
    "a set": (lambda layer: first_if(layer in layer.held), all_hold(lambda model: {model.layers[1]})),
    "a list": (lambda layer: 1.0 + layer.held.index(layer), all_hold(lambda model: list(model.layers))),
    "a global list": (lambda layer: 1.0 + EVERYONE.index(layer), lambda model: EVERYONE.extend(model.layers)),
    "a list of the class": (
        lambda layer: 1.0 + type(layer).registry.index(layer), lambda model: Layer.registry.extend(model.layers),
    ),
    "its owner": (lambda layer: first_if(layer is layer.held[0].layers[-1]), all_hold(lambda model: [model])),
    "its owner, held weakly": (
        lambda layer: 1.0 + [one is layer for _, one in layer.held().named_modules()].index(True) % 4,
        all_hold(weakref.ref),
    ),
    "its owner, through a proxy": (
        lambda layer: 1.0 + [one is layer for _, one in layer.held.named_modules()].index(True) % 4,
        all_hold(weakref.proxy),
    ),
    "an owner that is no module": (lambda layer: layer.held.scale(layer), all_hold(lambda model: Owner(model.layers))),
    "a method of it": (lambda layer: layer.held(layer), all_hold(lambda model: Owner(model.layers).scale)),
    "a part of a function": (
        lambda layer: 1.0 + layer.held(layer),
        all_hold(lambda model: functools.partial(list.index, list(model.layers))),
    ),
    "a closure": (lambda layer: first_if(layer.held(layer)), all_hold(closed_over)),
    "a cache": (lambda layer: 1.0 + layer.held(layer), all_hold(remembered)),
    "a descriptor": (lambda layer: layer.by_descriptor, described),
    "a number": (
        lambda layer: NUMBERS[id(layer)], lambda model: NUMBERS.update(numbered(map(id, model.layers))),
    ),
    "a number by another name": (
        lambda layer: NUMBERS[number_of(layer)], lambda model: NUMBERS.update(numbered(map(id, model.layers))),
    ),
    "a hash": (lambda layer: NUMBERS[hash(layer)], lambda model: NUMBERS.update(numbered(map(hash, model.layers)))),
    "a text": (by_text, lambda model: SHARED.update(texts=numbered(map(object.__repr__, model.layers)))),
    "a function that it holds": (lambda layer: SHARED["scales"][layer.held], acting),
    "a parameter": (
        lambda layer: first_if(layer.linear.weight is layer.held[0]),
        all_hold(lambda model: [model.layers[-1].linear.weight]),
    ),
}  # fmt: skip


def cases(every: Iterable[str], short: Collection[str]) -> list[Any]:
    return [case if case in short else long(case) for case in every]


@pytest.mark.parametrize("case", cases(BY_IDENTITY, ("a table of modules", "its owner", "a number")))
def test_layers_that_are_told_apart_by_who_they_are(case: str) -> None:
    assert traced(Model(*BY_IDENTITY[case]))[0]


def holds_itself(model: Model) -> None:
    def held_by(layer: Any) -> list[Any]:
        return [layer, layer.linear, lambda: layer.linear]

    for layer in model.layers:
        layer.__dict__["held"] = held_by(layer)


@pytest.mark.parametrize(
    "scale, give",
    [
        (lambda layer: first_if(layer.held[2]() is layer.held[1] and layer.held[0] is layer), holds_itself),
        long(lambda layer: len(layer.held), all_hold(lambda model: [model.head])),
        long(lambda layer: layer.held["a"], each_holds(lambda number: {"a": 2.0, "b": [(1, "c")]})),
    ],
    ids=["what holds itself", "what is none of them", "equal values"],
)
def test_what_is_the_same_for_each_layer_is_traced_once(
    scale: Callable[[Any], float], give: Callable[[Model], None]
) -> None:
    assert traced(Model(scale, give)) == (True, 1)


class Given(Model):
    """Gives each layer something of the model's with its input."""

    def __init__(self, scale: Callable[[Any, Any], float], more: Callable[[Any], Any]) -> None:
        super().__init__(len, lambda model: None)
        self.layers, self.more = nn.ModuleList(Taking(scale) for _ in range(DEPTH)), more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, self.more(self))
        return self.head(x).square().mean()


class Taking(nn.Module):
    def __init__(self, scale: Callable[[Any, Any], float]) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), scale

    def forward(self, x: torch.Tensor, more: Any) -> torch.Tensor:
        return x + self.scale(self, more) * torch.tanh(self.linear(x))


@pytest.mark.parametrize(
    "scale, more",
    [
        (lambda layer, more: first_if(layer is more.layers[-1]), lambda model: model),
        long(lambda layer, more: 1.0 + more.index(layer), lambda model: list(model.layers)),
        long(lambda layer, more: first_if(layer is more), lambda model: model.layers[-1]),
        long(lambda layer, more: 1.0 + more(layer), lambda model: functools.partial(list.index, list(model.layers))),
    ],
    ids=["the owner", "a list", "a layer", "a function"],
)
def test_layers_that_are_told_apart_by_what_they_are_given(
    scale: Callable[[Any, Any], float], more: Callable[[Any], Any]
) -> None:
    assert traced(Given(scale, more))[0]


# --- what equal values have besides -----------------------------------------------------------------------------------


def _subclass(base: type, **members: Any) -> Any:
    return type(base)(f"Tagged{base.__name__}", (base,), members)


def tagged(kind: Any, value: Any) -> Callable[[int], Any]:
    def make(number: int) -> Any:
        held = kind(value)
        held.scale = 1.0 + number
        return held

    return make


def function(number: int) -> Any:
    def held() -> float:
        return 1.0

    held.scale = 1.0 + number  # type: ignore[attr-defined]
    return held


TIMES = compile("times = lambda: SCALE\nagain = lambda: times()", "times.py", "exec")


def executed(number: int) -> Any:
    space: dict[str, Any] = {"SCALE": 1.0 + number, "__name__": "times"}
    exec(TIMES, space)
    return space["again"]


def by_scale(layer: Any) -> float:
    return layer.held.scale


BY_VALUE: dict[str, tuple[Callable[[Any], float], Callable[[int], Any]]] = {
    **{
        f"a subclass of {kind.__name__}": (by_scale, tagged(_subclass(kind), value))
        for kind, value in (
            (int, 3), (float, 2.0), (str, "a"), (bytes, b"a"), (tuple, (1, 2)), (list, [1]), (dict, {"a": 1}),
            (set, {1}), (frozenset, {1}),
        )
    },
    "a list with slots": (by_scale, tagged(_subclass(list, __slots__=("scale",)), [1])),
    "a dict of Python's": (by_scale, tagged(UserDict, {"a": 1})),
    "a list of Python's": (by_scale, tagged(UserList, [1])),
    "a key of a dict": (lambda layer: next(iter(layer.held)).scale, lambda n: {tagged(_subclass(int), 3)(n): 1}),
    "a key of another type": (
        lambda layer: first_if(isinstance(next(iter(layer.held)), float)), lambda n: {[1, 1.0, True][n]: 1},
    ),
    "an element of a set": (
        lambda layer: first_if(isinstance(next(iter(layer.held)), float)), lambda n: {[1, 1.0][n % 2]},
    ),
    "the order of a set": (lambda layer: first_if(next(iter(layer.held))), lambda n: set([[0, 8], [8, 0]][n % 2])),
    "the sign of zero": (lambda layer: math.copysign(1.0, layer.held), lambda n: [0.0, -0.0][n % 2]),
    "numbers of functions": (
        lambda layer: layer.held[0](2), lambda n: {0: float, 1: math.sqrt} if n % 2 else {1: float, 0: math.sqrt},
    ),
    "what is missing": (lambda layer: layer.held.copy()[1], lambda n: defaultdict([float, lambda: 2.0][n % 2])),
    "attributes of a function": (by_scale, function),
    "attributes of a part of one": (by_scale, tagged(functools.partial, float)),
    "globals of a function": (lambda layer: layer.held(), executed),
    "globals of a copied function": (
        lambda layer: layer.held(), lambda n: types.FunctionType((lambda: SCALE).__code__, {"SCALE": 1.0 + n}),  # noqa: F821
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", cases(BY_VALUE, ("a subclass of int", "globals of a function")))
def test_equal_values_that_differ(case: str) -> None:
    scale, make = BY_VALUE[case]
    assert traced(Model(scale, each_holds(make)))[0]


# --- layers whose parts are replaced ----------------------------------------------------------------------------------


class Replacing(Model):
    """replaced(model, number, x): what the layer of this number gives."""

    def __init__(self, replaced: Callable[[Any, int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(lambda layer: 1.0, lambda model: None)
        self.replaced = replaced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for number in range(DEPTH):
            x = self.replaced(self, number, x)
        return self.head(x).square().mean()


def other_weight(model: Any, number: int, x: torch.Tensor) -> torch.Tensor:
    layer = model.layers[number]
    if number != 1:
        return layer(x)
    return torch.func.functional_call(layer, {"linear.weight": 2 * layer.linear.weight}, (x,))


def weights_of_the_first(model: Any, number: int, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(model.layers[number], dict(model.layers[0].named_parameters()), (x,))


def slot_of_the_first(model: Any, number: int, x: torch.Tensor) -> torch.Tensor:
    linear = model.layers[number].linear
    own = linear._parameters["weight"]
    linear._parameters["weight"] = model.layers[0].linear.weight
    result = model.layers[number](x)
    linear._parameters["weight"] = own
    return result


def module_of_the_first(model: Any, number: int, x: torch.Tensor) -> torch.Tensor:
    layer = model.layers[number]
    own, layer.linear = layer.linear, model.layers[0].linear
    result = layer(x)
    layer.linear = own
    return result


def mode_of_all(model: Any, number: int, x: torch.Tensor) -> torch.Tensor:
    result = model.layers[number](x)
    for layer in model.layers:
        layer.train(number == DEPTH - 1)
    return result


@pytest.mark.parametrize(
    "replaced",
    [other_weight, long(weights_of_the_first), slot_of_the_first, long(module_of_the_first), long(mode_of_all)],
)
def test_layers_whose_parts_are_replaced(replaced: Callable[[Any, int, torch.Tensor], torch.Tensor]) -> None:
    model = Replacing(replaced)
    for layer in model.layers:
        layer.scale = lambda layer: F.dropout(torch.ones(()), 1.0, layer.linear.training)
    assert traced(model)[0]


def recursive() -> Callable[[Any], float]:
    def scale(layer: Any, times: int = 2) -> float:
        return 0.5 if times == 0 else scale(layer, times - 1) * 0.5

    return scale


def in_turns() -> Callable[[Any], float]:
    def one(layer: Any, times: int = 2) -> float:
        return 0.5 if times == 0 else other(layer, times - 1)

    def other(layer: Any, times: int = 2) -> float:
        return 0.25 if times == 0 else one(layer, times - 1)

    return one


def dict_in_itself() -> Callable[[Any], float]:
    held: dict[str, Any] = {"scale": 0.5}
    held["own"] = held
    return lambda layer: held["own"]["scale"]


def list_in_itself() -> Callable[[Any], float]:
    held: list[Any] = [0.5]
    held.append(held)
    return lambda layer: held[1][0]


def object_in_itself() -> Callable[[Any], float]:
    held = types.SimpleNamespace(scale=0.5)
    held.own = held
    return lambda layer: held.own.scale


def partial_in_itself() -> Callable[[Any], float]:
    def scale(layer: Any, held: dict[str, Any]) -> float:
        return 0.5 if held["own"] is not None else 0.25

    held: dict[str, Any] = {}
    held["own"] = functools.partial(scale, held=held)
    return held["own"]


def attribute_of_itself() -> Callable[[Any], float]:
    def scale(layer: Any) -> float:
        return scale.own.number

    scale.own, scale.number = scale, 0.5
    return scale


def test_functions_that_refer_to_themselves_train_as_in_eager() -> None:
    """What a walk of closures, globals and attributes would go round in."""
    makers = (
        recursive,
        in_turns,
        dict_in_itself,
        list_in_itself,
        object_in_itself,
        partial_in_itself,
        attribute_of_itself,
    )
    model = Model(lambda layer: 1.0, lambda model: None)
    model.layers = nn.ModuleList(Layer(make()) for make in makers for _ in range(2))
    batch = {"x": torch.randn(2, WIDTH)}
    loss = model(**batch)
    loss.backward()
    right = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled = csc.compile(model, mesh="pp=1", example=batch, cache=False, check=False)
    assert float(compiled.train_step(batch)) == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, right[name], msg=name)
