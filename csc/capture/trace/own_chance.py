"""Random numbers that a model's forward draws as no program of csc would.

csc draws for each region from a seed of the step (csc.kernels.dropout). So a forward that seeds torch's generator, or
has one of its own, to draw the same numbers each time would have others; and what Python's or NumPy's generator gave
in the trace would stand in the program for good.

    with own_chance(): ...      while the model's forward is traced; InputError with the line, where it is known
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode

from csc.capture.diagnostics import calling_line
from csc.errors import InputError

SEED = 0x5EED_0F_C5C  # one that a model will not choose
FIXED = "make the numbers in __init__ and keep them as a buffer, or let them come with the batch"


class _Drawing(TorchFunctionMode):
    """Looks, at each call, whether torch's generator was seeded since, or another one was drawn from."""

    def __init__(self) -> None:
        super().__init__()
        self._states, self._after = _states(), ""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._after and self._states != _states():
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

    def refuse_drawn(self) -> None:
        """InputError if a generator that is not torch's will give other numbers than before the forward. One that the
        forward seeds gives the same in every step.
        """
        for (name, state), (_, now) in zip(self._states, _states()):
            if state != now:
                raise InputError(
                    f"the model draws random numbers from {name} in its forward; they would be the same in every step",
                    f"before {self._after}" if self._after else "model",
                    "draw them with torch, or let them come with the batch; where they are drawn in training alone, "
                    "put that module in eval mode",
                )


@contextmanager
def own_chance() -> Iterator[None]:
    """A context around the model's forward, in a trace."""
    with torch.random.fork_rng([]), _Drawing() as drawing:
        torch.manual_seed(SEED)
        yield
        drawing.refuse_drawn()


def _states() -> list[tuple[str, Any]]:
    """What the generators of the process will give next."""
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    return [("Python's random module", random.getstate()), ("NumPy", (kind, keys.tobytes(), *rest))]  # type: ignore[union-attr]
