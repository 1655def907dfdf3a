"""Operations of torch's run untold, and whatever may call code of the model's is told of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from csc.capture.dedup.equality import unprofiled
from csc.torch_private.traces import FakeTensorMode


def told_of(run: Callable[[], Any]) -> list[tuple[str, str]]:
    """(module, function) of the Python functions that are told of while `run` runs."""
    told: list[tuple[str, str]] = []

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            told.append((frame.f_globals["__name__"], frame.f_code.co_name))

    with unprofiled(look):
        run()
    assert sys.getprofile() is None
    return told


def own(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one - other).norm(dim=-1)


class OfFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class OfOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Index:
    def __index__(self) -> int:
        return 1


@torch.library.custom_op("csc_tests::told", mutates_args=())
def told(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@told.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


X = torch.ones(3, 4)
TRACING = "torch._subclasses.fake_tensor"


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: F.gumbel_softmax(x, dim=-1),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: F.softmax(x + 1, dim=-1)[:, 1:].sum((0, 1), keepdim=True),
        lambda x: 2 - x,
        lambda x: torch.split(x, [1, 2]),
    ],
)
def test_what_operations_do_in_a_trace_is_not_told_of(operation: Callable[[torch.Tensor], Any]) -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
        found = {module for module, _ in told_of(lambda: operation(fake))}
        assert TRACING not in found
        assert TRACING in {module for module, _ in told_of(lambda: torch.ops.csc_tests.told(fake))}


def within(mode: Any, run: Callable[[], Any]) -> list[tuple[str, str]]:
    with mode:
        return told_of(run)


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("own", lambda: told_of(lambda: F.triplet_margin_with_distance_loss(X, X, X, distance_function=own))),
        ("__torch_function__", lambda: told_of(lambda: X.as_subclass(Subclass) + 1)),
        ("__index__", lambda: told_of(lambda: X[Index()])),
        ("told", lambda: told_of(lambda: torch.ops.csc_tests.told(X))),
        ("__torch_function__", lambda: within(OfFunctions(), lambda: X + 1)),
        ("__torch_dispatch__", lambda: within(OfOperations(), lambda: X + 1)),
    ],
)
def test_what_may_be_the_models_is_told_of(name: str, of: Callable[[], list[tuple[str, str]]]) -> None:
    assert (__name__, name) in of()


def test_an_operation_that_fails_leaves_the_profile_on() -> None:
    def run() -> None:
        with pytest.raises(RuntimeError):
            torch.matmul(X, X)
        own(X, X)

    assert (__name__, "own") in told_of(run)
