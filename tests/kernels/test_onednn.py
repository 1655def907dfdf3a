"""Products by oneDNN: what they are, of operands laid out in any way, and where they are taken."""

from __future__ import annotations

import platform
from collections.abc import Callable
from itertools import product as every
from pathlib import Path

import pytest
import torch
from csc.kernels import onednn
from csc.kernels.onednn import LEAST, LEAST_IN_HALVES, PRODUCT, is_worth, least_multiplications, product

Preference = Callable[[bool], None]


@pytest.fixture
def preference(monkeypatch: pytest.MonkeyPatch) -> Preference:
    """Says whether `least_multiplications` finds oneDNN the faster one, whatever the machine."""
    return lambda prefers: monkeypatch.setattr(onednn, "least_multiplications", lambda: LEAST if prefers else 0)


def laid_out(rows: int, columns: int, how: str) -> torch.Tensor:
    if how == "transposed":
        return torch.randn(columns, rows).t()
    if how == "a slice":
        return torch.randn(rows, 2 * columns)[:, ::2]
    if how == "a part":
        return torch.randn(rows + 3, columns + 5)[3:, 2:-3]
    if how == "expanded":
        return torch.randn(1, columns).expand(rows, columns)
    return torch.randn(rows * columns + 1)[1:].view(rows, columns)  # at an address that is no multiple of 64


LAYOUTS = ("as it is", "transposed", "a slice", "a part", "expanded")


@pytest.mark.parametrize("layouts", list(every(LAYOUTS, LAYOUTS)), ids=" and ".join)
@pytest.mark.parametrize("biased", [False, True])
def test_operands_may_have_any_strides(layouts: tuple[str, str], biased: bool) -> None:
    torch.manual_seed(0)
    for rows, inner, columns in ((8, 512, 33), (130, 31, 65), (1, 1, 1)):
        a, b = laid_out(rows, inner, layouts[0]), laid_out(inner, columns, layouts[1])
        bias = torch.randn(columns) if biased else None
        found, exact = PRODUCT(a, b, bias), a.double() @ b.double() + (bias if biased else 0)
        assert found.shape == exact.shape and found.is_contiguous() and found.dtype is torch.float32
        size = a.double().abs() @ b.double().abs() + 1
        assert float(((found - exact).abs() / size).max()) < 1e-6


def test_what_is_no_number_stays_none() -> None:
    a, b = torch.ones(16, 64), torch.ones(64, 16)
    a[3, 5], b[7, 2] = float("nan"), float("inf")
    wanted = torch.mm(a, b)
    found = PRODUCT(a, b)
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())


def test_it_repeats_to_the_bit() -> None:
    torch.manual_seed(1)
    a, b = torch.randn(300, 200), torch.randn(200, 260)
    first = PRODUCT(a, b)
    assert all(torch.equal(first, PRODUCT(a.clone(), b.clone())) for _ in range(5))


def test_small_products_and_other_dtypes_are_atens_to_the_bit(preference: Preference) -> None:
    preference(True)
    torch.manual_seed(0)
    for dtype, sizes in ((torch.float32, (16, 16, 16)), (torch.float64, (256, 256, 256)), (torch.bfloat16, (256,) * 3)):
        rows, inner, columns = sizes
        a, b, bias = (torch.randn(n, dtype=dtype) for n in ((rows, inner), (inner, columns), (columns,)))
        assert torch.equal(product(a, b), torch.mm(a, b)) and torch.equal(product(a, b, bias), torch.addmm(bias, a, b))


def test_nothing_is_oneDNNs_where_it_is_not_the_faster_one(preference: Preference) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    preference(False)
    assert torch.equal(product(a, b), torch.mm(a, b))
    preference(True)
    assert torch.equal(product(a, b), PRODUCT(a, b))


def test_sizes_that_are_worth_it(preference: Preference) -> None:
    preference(True)
    assert is_worth(128, 128, 128) and LEAST == 128**3 and not is_worth(127, 128, 128)
    assert is_worth(8, 1024, 1024) and not is_worth(7, 4096, 4096) and not is_worth(4096, 4096, 1)
    assert not is_worth(0, 4096, 4096)


@pytest.fixture
def another_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which oneDNN has AVX-512 and MKL does not take it."""
    monkeypatch.setattr(onednn, "_processors", lambda: frozenset({("AuthenticAMD", "26")}))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for name in onednn.OWN_LIMITS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("another_vendor")
def test_who_asks_for_other_instructions_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert least_multiplications()
    with torch.backends.mkldnn.flags(enabled=False):
        assert not least_multiplications()
    for name, value in (("ONEDNN_MAX_CPU_ISA", "AVX2"), ("MKL_CBWR", "COMPATIBLE")):
        with monkeypatch.context() as narrower:
            narrower.setenv(name, value)
            assert not least_multiplications()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert not least_multiplications(), "PyTorch takes it itself"
    finally:
        torch.set_float32_matmul_precision(before)
    with monkeypatch.context() as narrower:
        narrower.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        assert not least_multiplications()
    with monkeypatch.context() as of_mkl:
        of_mkl.setattr(onednn, "_processors", lambda: frozenset({("GenuineIntel", "6")}))
        assert not least_multiplications()
    with monkeypatch.context() as untold:
        untold.setattr(onednn, "_processors", frozenset)
        assert not least_multiplications()
    assert least_multiplications()


@pytest.mark.usefixtures("another_vendor")
def test_processors_that_take_two_steps_gain_on_larger_products_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert least_multiplications() == LEAST and is_worth(128, 128, 128)
    monkeypatch.setattr(onednn, "_processors", lambda: frozenset({("AuthenticAMD", "25")}))
    assert least_multiplications() == LEAST_IN_HALVES
    assert is_worth(512, 512, 1024) and not is_worth(512, 512, 512) and not is_worth(256, 128, 4096)


def test_what_this_machine_says_of_its_processors() -> None:
    found = onednn._processors.__wrapped__()
    assert all(vendor and family.isdecimal() for vendor, family in found)
    if platform.machine() == "x86_64" and Path("/proc/cpuinfo").exists():
        assert len(found) == 1
