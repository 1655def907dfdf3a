"""A compiled function beside the plain one: what counts as near, and what neither may do twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import csc.kernels.attention  # noqa: F401  the operators torch.ops.csc
import pytest
import torch
from csc.kernels.onednn import PRODUCT

from csc.runtime.flat_tensors import tensors_of
from csc.runtime.tried_function import tried

X = torch.arange(1.0, 7.0).view(2, 3)
Changed = Callable[[torch.Tensor], torch.Tensor]


def found(plain: Callable[..., Any], compiled: Callable[..., Any], *given: Any) -> str:
    """In what they differ; what comes back is the plain one's."""
    tensors = tensors_of(given)
    results, why = tried(plain, given, lambda flat: compiled(*flat), tensors)
    for one, other in zip(tensors_of(results), tensors_of(plain(*given)), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    return why


def changed(place: int, by: float) -> Changed:
    def of(x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        made.view(-1)[place] += by
        return made

    return of


NEAR: dict[str, tuple[Callable[..., Any], Callable[..., Any], torch.Tensor]] = {
    "equal": (lambda x: x * 2, lambda x: x + x, X),
    "rounding": (lambda x: x * 2, lambda x: x * (2 + 2e-6), X),
    "rounding of bfloat16": (lambda x: x * 2, lambda x: x * 2.03, X.bfloat16()),
    "infinite where it should be": (lambda x: x / 0, lambda x: x * float("inf"), X),
    "no numbers where there should be none": (lambda x: x * float("nan"), lambda x: x - float("nan"), X),
    "nothing but zeros": (lambda x: x * 0, lambda x: x - x, X),
    "no entries": (lambda x: x[:0], lambda x: x[:0], X),
    "whole numbers": (lambda x: x.argmax(-1), lambda x: x.max(-1).indices, X),
    "a product of another library": (lambda x: x @ x.t(), lambda x: PRODUCT(x, x.t()), X),
    "complex numbers": (lambda x: torch.complex(x, x), lambda x: torch.complex(x, x * (1 + 1e-6)), X),
    "noise beside gradients": (
        lambda x: {"w": x, "b": x[0] * 1e-7}, lambda x: {"w": x, "b": x[0] * -1e-8}, X,
    ),
}  # fmt: skip
FAR: dict[str, tuple[Callable[..., Any], Callable[..., Any], torch.Tensor]] = {
    "a product of others": (lambda x: x @ x.t(), lambda x: PRODUCT(x, x.t() * 2), X),
    "a scale": (lambda x: x * 2, lambda x: x * (2 + 1e-4), X),
    "one entry": (lambda x: x * 2, changed(4, 1e-2), X),
    "a scale in bfloat16": (lambda x: x * 2, lambda x: x * 2.25, X.bfloat16()),
    "a scale in float64": (lambda x: x * 2, lambda x: x * (2 + 1e-9), X.double()),
    "no number": (lambda x: x * 2, changed(0, float("nan")), X),
    "a number where there is none": (changed(0, float("nan")), lambda x: x * 2, X),
    "infinite": (lambda x: x * 2, changed(0, float("inf")), X),
    "infinite the other way": (lambda x: x / 0, lambda x: x / -0.0, X),
    "zeros": (lambda x: x * 2, lambda x: x * 0, X),
    "where there are zeros": (lambda x: x * 0, lambda x: x * 1e-9, X),
    "another shape": (lambda x: x * 2, lambda x: (x * 2).view(-1), X),
    "another dtype": (lambda x: x * 2, lambda x: (x * 2).double(), X),
    "too few": (lambda x: (x, x), lambda x: (x,), X),
    "whole numbers": (lambda x: x.argmax(-1), lambda x: x.argmin(-1), X),
    "a small gradient": (lambda x: {"w": x, "b": x[0] * 1e-4}, lambda x: {"w": x, "b": x[0] * 1e-5}, X),
}


@pytest.mark.parametrize("what", NEAR)
def test_near(what: str) -> None:
    assert not found(*NEAR[what])


@pytest.mark.parametrize("what", FAR)
def test_far(what: str) -> None:
    assert found(*FAR[what])


def test_what_fails_differs() -> None:
    def fails(_: Sequence[torch.Tensor]) -> Any:
        raise RuntimeError("no kernel")

    assert tried(lambda x: x * 2, (X,), fails, [X])[1] == "RuntimeError: no kernel"


@pytest.fixture
def calls() -> list[float]:
    """Of an operator of csc that counts them; it gives another number each time."""
    made: list[float] = []
    library = torch.library.Library("csc", "FRAGMENT")
    library.define("counted(Tensor x) -> (Tensor, Tensor)")

    def counted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(float(x.sum()))
        return x + len(made), x.clone()

    library.impl("counted", counted, "CompositeExplicitAutograd")
    yield made
    library._destroy()


def plain(x: torch.Tensor) -> torch.Tensor:
    first, _ = torch.ops.csc.counted(x * 2)
    return torch.ops.csc.counted(first)[0]


def test_own_operators_are_called_once(calls: list[float]) -> None:
    """What meets other ranks, draws or changes a module does not do so for the one that is tried."""

    def compiled(flat: Sequence[torch.Tensor]) -> torch.Tensor:
        first, rest = torch.ops.csc.counted(flat[0] + flat[0])
        rest.zero_()  # kernels take memory over
        return torch.ops.csc.counted(first)[0].clone()

    results, why = tried(plain, (X,), compiled, [X])
    assert not why and len(calls) == 2 and torch.equal(results, X * 2 + 3)


@pytest.mark.parametrize(
    "compiled, why",
    [
        (lambda x: torch.ops.csc.counted(x * 3)[0], "argument of csc.counted.default 0 differs by 5.0e-01"),
        (lambda x: torch.ops.csc.counted(plain(x))[0], "it calls csc.counted.default more often"),
        (lambda x: x * 2 + 4, "result 0 differs by"),
    ],
)
def test_what_goes_another_way_differs(
    calls: list[float], compiled: Callable[[torch.Tensor], torch.Tensor], why: str
) -> None:
    assert tried(plain, (X,), lambda flat: compiled(flat[0]), [X])[1].startswith(why)
