"""The precision of float32 products, whichever way torch was told it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import csc
from csc.runtime.compiled_function import KeptFunction, TorchState, float32_precision, set_float32_precision

BFLOAT16 = 2e-2
backends: Any = torch.backends


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.up(x)).square().mean()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = float32_precision()
    yield
    backends.fp32_precision = "none"
    set_float32_precision(before)
    assert float32_precision() == before


def by_word() -> None:
    torch.set_float32_matmul_precision("medium")


def of_onednn() -> None:
    backends.mkldnn.matmul.fp32_precision = "bf16"


def of_an_accelerator() -> None:
    backends.cuda.matmul.fp32_precision = "tf32"


def of_all() -> None:
    backends.fp32_precision = "tf32"


WAYS = [by_word, of_onednn, of_an_accelerator, of_all]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_told_can_be_set(way: Any) -> None:
    before = float32_precision()
    way()
    told = json.loads(json.dumps(float32_precision()))
    assert told != before
    backends.fp32_precision = "none"
    set_float32_precision(before)
    assert float32_precision() == before
    set_float32_precision(told)
    assert float32_precision() == told


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long_cases("by_word")
def test_functions_are_kept_for_their_precision(way: Any, tmp_path: Path) -> None:
    def key() -> tuple[str, TorchState]:
        return KeptFunction("forward", "", [], [], tmp_path).key, TorchState.now()

    before = key()
    way()
    for one, other in zip(before, key(), strict=True):
        assert one != other


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_compiled_step_of_products_in_bfloat16() -> None:
    torch.manual_seed(0)
    model, batch = Model(), {"x": torch.randn(32, 64).cumsum(0) / 8}
    compiled = csc.compile(model, example=batch, fuse=True, cache=False)
    of_onednn()
    model(**batch).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    compiled.train_step(batch)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() != set()
    for name, one in expected.items():
        assert float((found[name] - one).norm()) <= BFLOAT16 * float(one.norm()), name
