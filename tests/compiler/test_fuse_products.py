"""Compiled functions take their products from the faster library, and unfused ones PyTorch's, to eager's bits."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from csc.kernels import onednn
from csc.kernels.onednn import LEAST
from torch import nn
from torch.profiler import ProfilerActivity, profile

import csc
from csc.runtime import compiled_function, fusing
from tests.exactness import FLOAT32

WIDTH, TOKENS = 128, 192


class Model(nn.Module):
    """One layer with a bias, one without, which is nothing but a product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x))).square().mean()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("prefers", [False, True], ids=["MKL", "oneDNN"])
def test_the_library_of_compiled_functions(prefers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (onednn, compiled_function, compiled_function, fusing):
        monkeypatch.setattr(module, "least_multiplications", lambda: LEAST if prefers else 0)
    monkeypatch.setattr(fusing, "worker_count", lambda: 0)  # they would ask the machine
    torch.manual_seed(0)
    model, batch = Model(), {"x": torch.randn(TOKENS, WIDTH).cumsum(0) / TOKENS}
    eager = copy.deepcopy(model)
    fused = csc.compile(model, example=batch, fuse=True, cache=False)
    expected = eager(**batch)
    expected.backward()
    found = fused.train_step(batch)
    torch.testing.assert_close(found, expected.detach(), rtol=FLOAT32, atol=0)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    wanted = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    assert gradients.keys() == wanted.keys()
    for name, one in wanted.items():
        assert gradients[name].stride() == one.stride()
        assert float((gradients[name] - one).norm()) <= FLOAT32 * float(one.norm()), name
    plain = fused.with_options(fuse=False)
    for compiled, some in ((fused, prefers), (plain, False)):
        with profile(activities=[ProfilerActivity.CPU]) as ran:
            compiled.train_step(batch)
        calls = {event.key: event.count for event in ran.key_averages()}
        assert calls.get("mkldnn::_linear_pointwise", 0) == 5 * some, "two of F, one of B, two of W"
        assert (calls.get("aten::mm", 0) + calls.get("aten::addmm", 0) == 0) is some
