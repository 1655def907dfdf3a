"""Names that forward asks namespaces for: what they stand for is watched, and what cannot be told is refused."""

from __future__ import annotations

import importlib
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import csc
from csc.capture.code_names import asked_of_namespaces
from csc.errors import InputError
from tests.compiler.test_made_on_demand import BATCH, is_eagers

SCALE = 2.0
NAME = "SCALE"
VARIABLE = "CSC_ASKED"


class Held:
    gain = 2.0

    def method(self) -> float:
        return self.gain


class Asking(nn.Module):
    """ask: of the module, in forward."""

    def __init__(self, ask: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(4, 4), ask
        self.gain, self.name, self.held = 2.0, "gain", type("Heir", (Held,), {"__module__": __name__})()
        self.call = operator.methodcaller("method")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.ask(self)).square().mean()


def _imported(_: Any) -> float:
    import asked_settings

    found: float = asked_settings.VALUE
    return found


def _unbound(_: Any) -> float:
    try:
        return float(LATER)  # type: ignore[name-defined]
    except NameError:
        return 1.0


def _global(_: Any) -> object:
    return globals().update(SCALE=3.0, LATER=3.0)


def _module(_: Any) -> object:
    return setattr(sys.modules["asked_settings"], "VALUE", 3.0)


def _another_module(_: Any) -> None:
    module: Any = types.ModuleType("asked_settings")
    module.VALUE = 4.0
    sys.modules["asked_settings"] = module


def _method(model: Any) -> None:
    type(model.held).method = lambda held: 3.0


def _variable(_: Any) -> None:
    os.environ["CSC_ASKED"] = "3"


def _gain(model: Any) -> None:
    model.gain = 3.0


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], object]]] = {
    "globals": (lambda _: globals()["SCALE"], _global),
    "globals, get": (lambda _: globals().get("LATER", 1.0), _global),
    "a name that is nowhere yet": (_unbound, _global),
    "eval": (lambda _: eval("SCALE * 2"), _global),
    "the own module": (lambda _: sys.modules[__name__].SCALE, _global),
    "another module": (lambda _: sys.modules["asked_settings"].VALUE, _module),
    "another module, by another": (lambda _: sys.modules["asked_settings"].VALUE, _another_module),
    "import_module": (lambda _: importlib.import_module("asked_settings").VALUE, _module),
    "__import__": (lambda _: __import__("asked_settings").VALUE, _another_module),
    "an import replaced": (_imported, _another_module),
    "a variable by a name that is computed": (lambda _: float(os.environ.get(VARIABLE, "2")), _variable),
    "a dict of attributes": (lambda model: model.__dict__.get("gain"), _gain),
    "vars": (lambda model: vars(model)["gain"], _gain),
    "getattr": (lambda model: getattr(model, model.name), _gain),
    "attrgetter": (lambda model: operator.attrgetter("gain")(model), _gain),
    "methodcaller": (lambda model: model.call(model.held), _method),
}


@pytest.fixture(autouse=True)
def as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = types.ModuleType("asked_settings")
    module.VALUE = 2.0
    monkeypatch.setitem(sys.modules, "asked_settings", module)
    yield
    globals().update(SCALE=2.0)
    os.environ.pop(VARIABLE, None)
    globals().pop("LATER", None)


@pytest.mark.parametrize("case", CASES)
def test_what_a_name_stands_for_is_watched(case: str) -> None:
    ask, change = CASES[case]
    model = Asking(ask)
    compiled = csc.compile(model, example=BATCH, cache=False, check=False)
    assert is_eagers(compiled, model)
    change(model)
    assert is_eagers(compiled, model) and is_eagers(compiled, model)


COMPUTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "globals": (lambda _: globals()[NAME], "globals"),
    "globals, a text made of two": (lambda model: globals()["SCA" + model.name[:0] + "LE"], "globals"),
    "eval": (lambda _: eval(NAME), "eval"),
    "exec": (lambda _: exec("x = SCALE", globals(), {}) or SCALE, "exec"),
    "modules": (lambda model: sys.modules[f"asked_{model.name[:0]}settings"].VALUE, "modules"),
    "import_module": (lambda _: importlib.import_module("asked_" + NAME[:0] + "settings").VALUE, "import_module"),
    "a frame": (lambda _: sys._getframe().f_globals["SCALE"], "f_globals"),
    "a function's globals": (lambda _: _global.__globals__["SCALE"], "__globals__"),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_a_name_that_is_computed_is_refused(case: str) -> None:
    ask, what = COMPUTED[case]
    with pytest.raises(InputError, match=rf"<lambda> asks `{what}`.*would not notice that it changes") as raised:
        csc.compile(Asking(ask), example=BATCH, cache=False, check=False)
    assert f"{__file__}:" in raised.value.where


def _builder(name: str) -> Any:
    """Nothing that forward runs."""
    return globals()[name]


def test_what_forward_does_not_name_may_ask_anything() -> None:
    csc.compile(Asking(lambda model: vars(model)["gain"]), example=BATCH, cache=False, check=False)


def _handed_on(*arguments: Any) -> Any:
    return [globals, globals(*arguments)]


def test_a_function_that_is_handed_on_asks_for_what_nobody_knows() -> None:
    (asked,) = {what for what, _ in asked_of_namespaces(_handed_on.__code__).computed}
    assert asked == "globals"
