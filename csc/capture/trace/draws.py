"""Numbers drawn from Python's or NumPy's generator, whose value a trace may or may not need.

Layer drop draws a number for each layer and compares it with a rate. With a rate of 0 the answer is the same whatever
was drawn, and the program needs no number. So what is drawn is hidden at first: comparisons that the ends of its
interval decide are answered from these, and any other use reveals it.

    with hidden_draws(draw, revealed): ...    draw(function, args) -> the number; revealed(): one was used
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy

Draw = Callable[[Callable[..., Any], tuple[Any, ...]], Any]

BELOW_ONE = math.nextafter(1.0, 0.0)
# What draws one number, and how many arguments it then has: none, or the ends of the interval.
DRAWING = ((random, "random", (0,)), (random, "uniform", (2,)), (numpy.random, "rand", (0,)),
           (numpy.random, "random", (0,)), (numpy.random, "uniform", (0, 2)))  # fmt: skip


class Drawn:
    """A number from low to high, both included. It behaves as the number does, but is of another type."""

    def __init__(self, value: Any, low: float, high: float, revealed: Callable[[], None]) -> None:
        self._value, self._low, self._high, self._revealed = value, low, high, revealed

    def revealed(self) -> Any:
        """The number."""
        self._revealed()
        return self._value

    def _compared(self, sign: Callable[[Any, Any], bool], other: Any) -> bool:
        """An order holds between all numbers of the interval and another one, or none, if it does for both ends."""
        if type(other) in (int, float):
            low, high = sign(self._low, other), sign(self._high, other)
            if low == high:
                return low
        return sign(self.revealed(), other)

    def __lt__(self, other: Any) -> bool:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return self._compared(operator.le, other)

    def __gt__(self, other: Any) -> bool:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._compared(operator.ge, other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.revealed(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Torch takes one for a tensor, so that a torch function mode sees the call and can put the number there."""
        return NotImplemented


def _revealing(function: Callable[..., Any], reflected: bool = False) -> Callable[..., Any]:
    if reflected:
        return lambda drawn, other: function(other, drawn.revealed())
    return lambda drawn, *others: function(drawn.revealed(), *others)


CONVERSIONS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("float", float), ("int", int), ("bool", bool), ("hash", hash), ("round", round), ("repr", repr), ("str", str),
    ("format", format), ("neg", operator.neg), ("abs", abs), ("eq", operator.eq), ("ne", operator.ne),
    ("trunc", math.trunc), ("floor", math.floor), ("ceil", math.ceil),
)  # fmt: skip
for _name, _function in CONVERSIONS:
    setattr(Drawn, f"__{_name}__", _revealing(_function))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Drawn, f"__{_name}__", _revealing(getattr(operator, _name)))
    setattr(Drawn, f"__r{_name}__", _revealing(getattr(operator, _name), reflected=True))


@contextmanager
def hidden_draws(draw: Draw, revealed: Callable[[], None]) -> Iterator[None]:
    """While it lasts, functions that draw one number, called by way of their modules, give a Drawn."""
    with ExitStack() as patches:
        for module, name, counts in DRAWING:
            hiding = _hiding(getattr(module, name), counts, draw, revealed)
            patches.enter_context(patch.object(module, name, hiding))
        yield


def _hiding(
    own: Callable[..., Any], counts: tuple[int, ...], draw: Draw, revealed: Callable[[], None]
) -> Callable[..., Any]:
    def hiding(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) not in counts or not all(type(end) in (int, float) for end in args):
            return own(*args, **kwargs)
        low, high = sorted(args) if args else (0.0, BELOW_ONE)
        return Drawn(draw(own, args), low, high, revealed)

    return hiding
