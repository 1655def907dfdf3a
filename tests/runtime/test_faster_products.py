"""Which calls of a traced function oneDNN takes, and that the function stays the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from csc.kernels import onednn
from csc.kernels.onednn import LEAST, PRODUCT

from csc.runtime import compiled_function
from csc.runtime.compiled_function import LARGE, products_by_onednn
from csc.torch_private.traces import make_fx

WIDE = 128


@pytest.fixture(autouse=True)
def preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (onednn, compiled_function):
        monkeypatch.setattr(module, "least_multiplications", lambda: LEAST)


def taken(function: Callable[..., Any], *given: torch.Tensor) -> int:
    """How many products of it oneDNN computes, when it gives what it gave."""

    def faster(*given: torch.Tensor) -> torch.Tensor:
        with products_by_onednn():
            found: torch.Tensor = function(*given)
        return found

    graph = make_fx(faster, tracing_mode="fake")(*given)
    found, wanted = graph(*given), function(*given)
    assert found.stride() == wanted.stride() and found.dtype is wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4 if found.dtype is torch.float32 else 1e-1)
    return sum(node.target is PRODUCT for node in graph.graph.nodes)


def matrices(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(WIDE, WIDE, dtype=dtype) for _ in range(count)]


def test_products_and_products_with_a_row() -> None:
    a, b, c = matrices(3)
    row = torch.randn(WIDE)
    assert taken(lambda a, b, c: a @ b.t() @ c, a, b, c) == 2
    assert taken(torch.nn.functional.linear, a, b, row) == 1
    assert taken(lambda a, b: a.t() @ b, a, b) == 1
    assert taken(lambda a, b: (a * 2).t() @ b.t(), a, b) == 1
    large = torch.randn(LARGE // WIDE, WIDE)
    assert taken(lambda d, x: d.t() @ x, large, torch.randn(len(large), WIDE)) == 1, "with a copy"


def test_what_is_added_otherwise_stays_atens() -> None:
    a, b, c = matrices(3)
    row = torch.randn(WIDE)
    assert taken(lambda r, a, b: torch.addmm(r, a, b, beta=2), row, a, b) == 0
    assert taken(lambda r, a, b: torch.addmm(r, a, b, alpha=0.5), row, a, b) == 0
    assert taken(torch.addmm, c, a, b) == 0, "a matrix"
    assert taken(torch.addmm, row[:1], a, b) == 0, "one number"
    assert taken(torch.addmm, row[:, None], a, b) == 0, "a column"


def test_other_dtypes_and_small_ones_stay_atens() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        assert taken(torch.mm, *matrices(2, dtype)) == 0
    a, b = matrices(2)
    assert taken(lambda a, b: a[:4] @ b, a, b) == 0
    assert taken(lambda a, b: a[:, :64] @ b[:64], a, b) == 0


def test_none_where_mkl_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_function, "least_multiplications", lambda: 0)
    assert taken(torch.mm, *matrices(2)) == 0


def test_one_that_is_read_several_times_and_returned() -> None:
    a, b = matrices(2)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made = a @ b
        return made + made.t() @ made

    assert taken(function, a, b) == 2
