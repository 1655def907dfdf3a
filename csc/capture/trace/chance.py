"""Random numbers that a model's forward draws as no program of csc would, and those that a trace may keep."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch.overrides import TorchFunctionMode

from csc.errors import InputError, calling_line
from csc.torch_private.traces import pytree, unwatched

# --- Numbers drawn from Python's or NumPy's generator, whose value a trace may or may not need -----------------------
#
# Layer drop draws a number for each layer and compares it with a rate. With a rate of 0 the answer is the same
# whatever was drawn, and the program needs no number. So what is drawn is hidden at first: comparisons that the ends
# of its interval decide are answered from these, and any other use reveals it.


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
    return lambda drawn, *rest: function(drawn.revealed(), *rest)


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
    method: Callable[..., Any], counts: tuple[int, ...], draw: Draw, revealed: Callable[[], None]
) -> Callable[..., Any]:
    def hiding(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) not in counts or not all(type(end) in (int, float) for end in args):
            return method(*args, **kwargs)
        low, high = sorted(args) if args else (0.0, BELOW_ONE)
        return Drawn(draw(method, args), low, high, revealed)

    return hiding


# --- Random numbers that a model's forward draws as no program of csc would ------------------------------------------
#
# csc draws for each region from a seed of the step (csc.kernels.dropout). So a forward that seeds torch's generator,
# or has one of its own, to draw the same numbers each time would have others; and what Python's or NumPy's generator
# gave in the trace would stand in the program for good, if it was used for anything.
#
# `if torch.rand([]) < chance` is a decision by a number. With a chance of 0, as that of a layer to be skipped mostly
# is, or of 1, the answer is known. That a number is 0 itself, which is not above a chance of 0, happens once in 2^24
# draws, and is left out.


SEED = 0x5EED_0F_C5C  # one that a model will not choose


def _named(*names: str) -> frozenset[Any]:
    """Functions of torch, and methods of a tensor."""
    return frozenset(getattr(space, name) for space in (torch, torch.Tensor) for name in names if hasattr(space, name))


BELOW = _named("__lt__", "lt", "less", "__le__", "le", "less_equal")
ABOVE = _named("__gt__", "gt", "greater", "__ge__", "ge", "greater_equal")
FIXED = "make the numbers in __init__ and keep them as a buffer, or let them come with the batch"


class Unwritten:
    """Tensors to which nothing has been written since they were added."""

    def __init__(self) -> None:
        self._added: list[tuple[torch.Tensor, int]] = []  # held, so that no other tensor is taken for one of them

    def add(self, tensor: torch.Tensor) -> None:
        self._added.append((tensor, _version(tensor)))

    def __contains__(self, tensor: Any) -> bool:
        return any(tensor is member and _version(tensor) == version for member, version in self._added)


def _version(tensor: torch.Tensor) -> int:
    with unwatched():
        return tensor._version


class _Drawing(TorchFunctionMode):
    """Looks, at each call, whether torch's generator was seeded since, or another one was drawn from."""

    def __init__(self) -> None:
        super().__init__()
        self._before = self._expected = _states()
        self._after, self._drawn, self._used = "", False, False
        self._from_0_to_1, self._always, self._never = Unwritten(), Unwritten(), Unwritten()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._drawn:
            args, kwargs = pytree.tree_map_only(Drawn, Drawn.revealed, (args, kwargs))
        if not self._after and self._expected != _states():
            self._after = calling_line()
        if torch.initial_seed() != SEED:
            raise InputError(
                "the model seeds torch's random numbers in its forward; csc draws others",
                calling_line() or "model",
                FIXED,
            )
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise InputError(
                "the model draws random numbers from a generator of its own; csc draws others",
                calling_line() or "model",
                FIXED,
            )
        if func is torch.Tensor.__bool__ and (args[0] in self._always or args[0] in self._never):
            return args[0] in self._always
        result = func(*args, **kwargs)
        if func is torch.rand and result.numel() == 1:
            self._from_0_to_1.add(result)
        elif (func in BELOW or func in ABOVE) and len(args) == 2 and self._is_known(*args):
            always = (func in BELOW) is (args[1] >= 1)
            (self._always if always else self._never).add(result)
        return result

    def _is_known(self, left: Any, other: Any) -> bool:
        """Whether a number from 0 to 1 is compared with one that it is never between."""
        return isinstance(other, (int, float)) and (other <= 0 or other >= 1) and left in self._from_0_to_1

    def draw(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A number that may remain without use. Of a generator from which nothing else came before, that is as well as
        if nothing had been drawn.
        """
        alone = not self._used and self._expected == _states()
        drawn, self._drawn = function(*args), True
        if alone:
            self._expected = _states()
        return drawn

    def used(self) -> None:
        """The value of a number was used."""
        self._used, self._expected = True, self._before

    def refuse_drawn(self) -> None:
        """InputError if a generator that is not torch's will give other numbers than before the forward. One that the
        forward seeds gives the same in every step. If nothing came of what was drawn, it is put back.
        """
        for (name, state), (_, now) in zip(self._expected, _states()):
            if state != now:
                raise InputError(
                    f"the model draws random numbers from {name} in its forward; they would be the same in every step",
                    f"before {self._after}" if self._after else "model",
                    "draw them with torch, or let them come with the batch; where they are drawn in training alone, "
                    "put that module in eval mode",
                )
        if not self._used:
            _restore(self._before)


@contextmanager
def own_chance() -> Iterator[None]:
    """A context around the model's forward, in a trace."""
    with torch.random.fork_rng([]), _Drawing() as drawing:
        torch.manual_seed(SEED)
        with hidden_draws(drawing.draw, drawing.used):
            yield
        drawing.refuse_drawn()


def _states() -> list[tuple[str, Any]]:
    """What the generators of the process will give next."""
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    return [("Python's random module", random.getstate()), ("NumPy", (kind, keys.tobytes(), *rest))]  # type: ignore[union-attr]


def _restore(states: list[tuple[str, Any]]) -> None:
    (_, state), (_, (kind, keys, *rest)) = states
    random.setstate(state)
    numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))
