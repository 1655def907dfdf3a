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
    """In what they differ; what comes back is the compiled one's."""
    tensors = tensors_of(given)
    made: list[Any] = []

    def flat(tensors: Sequence[torch.Tensor]) -> Any:
        made.append(compiled(*tensors))
        return made[-1]

    results, why = tried(plain, given, flat, tensors)
    assert len(made) == 1 and results is made[0]
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
    "zeros with a sign": (lambda x: x * 0, lambda x: x * -0.0, X),
    "other strides": (lambda x: x * 2, lambda x: (x * 2).t().contiguous().t(), X),
    "a difference that cancels": (lambda x: x[0] - (x[1] - 3), lambda x: x[0] * 1e-7, X),
    "numbers that are drawn": (lambda x: x + torch.rand_like(x), lambda x: x + torch.rand_like(x), X),
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
    "other names": (lambda x: {"w": x, "b": x}, lambda x: {"w": x, "v": x}, X),
    "numbers that are drawn later": (
        lambda x: (torch.rand(1), x + torch.rand_like(x))[1],
        lambda x: x + torch.rand_like(x),
        X,
    ),
    "more than a difference that cancels": (lambda x: x[0] - (x[1] - 3), lambda x: x[0] * 1e-5, X),
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
    library.define("counted(Tensor x, float scale=1.0) -> (Tensor, Tensor)")

    def counted(x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(float(x.sum()))
        return x + len(made), x.clone()

    library.impl("counted", counted, "CompositeExplicitAutograd")
    yield made
    library._destroy()


def plain(x: torch.Tensor) -> torch.Tensor:
    first, _ = torch.ops.csc.counted(x * 2)
    return torch.ops.csc.counted(first)[0]


def test_own_operators_are_called_once(calls: list[float]) -> None:
    """What meets other ranks, draws or changes a module does so for the compiled function alone."""

    def compiled(flat: Sequence[torch.Tensor]) -> torch.Tensor:
        doubled = flat[0] + flat[0]
        first, rest = torch.ops.csc.counted(doubled)
        doubled.zero_()  # kernels take memory over
        rest.zero_()
        return torch.ops.csc.counted(first)[0].clone()

    results, why = tried(plain, (X,), compiled, [X])
    assert not why and len(calls) == 2 and torch.equal(results, X * 2 + 3)


def test_kernels_may_call_operators_in_another_order(calls: list[float]) -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.csc.counted(x)[1], torch.ops.csc.counted(x * 2)[1]

    def compiled(flat: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        second = torch.ops.csc.counted(flat[0] * 2)[1]
        return torch.ops.csc.counted(flat[0])[1], second

    assert not tried(both, (X,), compiled, [X])[1] and len(calls) == 2


def test_what_an_own_operator_raises_is_raised() -> None:
    library = torch.library.Library("csc", "FRAGMENT")
    library.define("failing(Tensor x) -> Tensor")

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("in a module of the user's")

    library.impl("failing", fails, "CompositeExplicitAutograd")
    with pytest.raises(ValueError, match="in a module of the user's"):
        tried(torch.ops.csc.failing, (X,), lambda flat: torch.ops.csc.failing(flat[0]), [X])
    library._destroy()


def test_without_memory_for_both_nothing_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    """And the log says so."""

    def full(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("of the device")

    results, why = tried(full, (X,), lambda flat: flat[0] * 2, [X])
    assert not why and torch.equal(results, X * 2)
    assert caplog.messages == ["fuse: full is not compared with what it stands for: there is no memory for both"]


def test_generators_go_on_as_after_one_call() -> None:
    torch.manual_seed(1)
    wanted = [torch.rand_like(X), torch.rand_like(X)]
    torch.manual_seed(1)
    found, why = tried(torch.rand_like, (X,), lambda flat: torch.rand_like(flat[0]), [X])
    assert not why and torch.equal(found, wanted[0]) and torch.equal(torch.rand_like(X), wanted[1])


@pytest.mark.parametrize(
    "compiled, why",
    [
        (lambda x: plain(x * 1.5), "argument of csc.counted.default 0 differs by 5.0e-01"),
        (lambda x: torch.ops.csc.counted(plain(x))[0], "it calls csc.counted.default more often"),
        (lambda x: x * 2 + 3, "it calls csc.counted.default less often"),
        (lambda x: torch.ops.csc.counted(torch.ops.csc.counted(x * 2)[0], 2.0)[0], "it calls csc.counted.default less"),
        (lambda x: plain(x) + 1, "result 0 differs by"),
    ],
)
def test_what_goes_another_way_differs(
    calls: list[float], compiled: Callable[[torch.Tensor], torch.Tensor], why: str
) -> None:
    assert tried(plain, (X,), lambda flat: compiled(flat[0]), [X])[1].startswith(why)
