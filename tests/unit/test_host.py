"""What a frame still shows of the call that it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from csc.capture.values.hoist import Around, HostCall, around, call_of, named


def now(model: nn.Module) -> Around:
    """The function of the model's code that asks."""
    return around(model, sys._getframe(1))[0]


class Model(nn.Module):
    def __init__(self, asks: str) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, **batch: torch.Tensor) -> HostCall | None:
        found: Around = getattr(self, self.asks)(batch["grid"], 2, label="a")
        return call_of(self, found, named(batch)) if found.given is not None else None

    def as_given(self, grid: torch.Tensor, step: int, scale: float = 1.0, *rest: int, **more: str) -> Around:
        return now(self)

    def changed_afterwards(self, grid: torch.Tensor, step: int, label: str = "b") -> Around:
        found = now(self)
        grid = grid + step
        return found

    def changed_before(self, grid: torch.Tensor, step: int, label: str = "b") -> Around:
        grid = grid + step
        return now(self)

    def changed_in_a_loop(self, grid: torch.Tensor, step: int, label: str = "b") -> Around:
        for _ in range(2):
            found = now(self)
            grid = grid + step
        return found

    def changed_by_an_inner_function(self, grid: torch.Tensor, step: int, label: str = "b") -> Around:
        def add() -> torch.Tensor:
            return grid + step

        grid = add()
        return now(self)


@pytest.mark.parametrize(
    ("asks", "plain"),
    [
        ("as_given", (("step", 2), ("label", "a"))),
        ("changed_afterwards", (("step", 2), ("label", "a"))),
        ("changed_before", None),
        ("changed_in_a_loop", None),
        ("changed_by_an_inner_function", None),
    ],
)
def test_arguments_that_may_have_changed_are_not_taken_for_those_of_the_call(asks: str, plain: Any) -> None:
    call = Model(asks)(grid=torch.ones(3, dtype=torch.int64))
    if plain is None:
        assert call is None
    else:
        assert (call.function.name, call.arguments, call.plain) == (asks, (("grid", "grid"),), plain)


def derived(batch: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    return batch["grid"] + 1, 2


def signal(batch: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    return batch["pixels"], 2


def several(batch: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    return batch["grid"], 2, 1.0, 5


@pytest.mark.parametrize("given", [derived, signal, several])
def test_calls_that_are_not_for_the_host(given: Callable[[dict[str, torch.Tensor]], tuple[Any, ...]]) -> None:
    """Tensors that were computed, sound and pixels, and arguments without a name."""

    class Other(Model):
        def forward(self, **batch: torch.Tensor) -> HostCall | None:
            found = self.as_given(*given(batch))
            return call_of(self, found, named(batch)) if found.given is not None else None

    batch = {"grid": torch.ones(3, dtype=torch.int64), "pixels": torch.ones(2, 3)}
    if given is signal:
        with pytest.raises(IndexError):
            Other("")(**batch)  # left out by `around` already
    else:
        assert Other("")(**batch) is None


def of_user(model: nn.Module, grid: torch.Tensor) -> list[Around]:
    """Code that calls the model, which a forward of another name for `self` does not end."""
    return around(model, sys._getframe(0), caller=test_code_that_calls_the_model_is_none_of_its_own.__code__)


def test_code_that_calls_the_model_is_none_of_its_own() -> None:
    model = Model("as_given")

    def calls() -> list[Around]:
        return of_user(model, torch.ones(1))

    assert [one.function.name for one in calls()] == ["of_user"]
