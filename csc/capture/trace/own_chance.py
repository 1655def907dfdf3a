"""Random numbers that a model's forward draws as no program of csc would.

csc draws for each region from a seed of the step (csc.kernels.dropout). So a forward that seeds torch's generator, or
has one of its own, to draw the same numbers each time would have others; and what Python's or NumPy's generator gave
in the trace would stand in the program for good, if it was used for anything (csc.capture.trace.draws).

    with own_chance(): ...      while the model's forward is traced; InputError with the line, where it is known
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode

from csc.capture.trace.draws import Drawn, hidden_draws
from csc.errors import InputError, calling_line
from csc.torch_private.traces import pytree

SEED = 0x5EED_0F_C5C  # one that a model will not choose
FIXED = "make the numbers in __init__ and keep them as a buffer, or let them come with the batch"


class _Drawing(TorchFunctionMode):
    """Looks, at each call, whether torch's generator was seeded since, or another one was drawn from."""

    def __init__(self) -> None:
        super().__init__()
        self._before = self._expected = _states()
        self._after, self._drawn, self._used = "", False, False

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
        return func(*args, **kwargs)

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
    (_, own), (_, (kind, keys, *rest)) = states
    random.setstate(own)
    numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))
