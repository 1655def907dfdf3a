"""The check of a model that is too large for it, or has no weights: one layer of each kind beside its module."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from csc.passes import loss
from torch import nn
from torch.nn import functional as F

import csc
from csc.check import first, one_of_each
from csc.driver.compiler import Compiler
from csc.errors import DifferenceError
from tests.compiler import small
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")

DEPTH = 5


class Biased(nn.Module):
    """Linear layers with biases; every second one looks at the sign of what the layer before it made."""

    class Layer(nn.Module):
        def __init__(self, odd: bool) -> None:
            super().__init__()
            self.odd = odd
            self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            mixed = self.linear(self.norm(hidden))
            return hidden + (F.gelu(mixed) if self.odd else F.silu(mixed))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(self.Layer(bool(i % 2)) for i in range(DEPTH))
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def batch() -> dict[str, torch.Tensor]:
    """The second half has fewer labels: the microbatches count differently."""
    made = small.text_batch(4)
    made["labels"][2:, 2:] = -100
    return made


def compiled(make: Callable[[], nn.Module] = Biased, **options: Any) -> csc.CompiledModel:
    with csc.meta_init():
        model = make()
    return csc.compile(model, example=batch(), cache=False, **options)


def emitting(monkeypatch: pytest.MonkeyPatch, before: str, after: str, large_only: bool = False) -> None:
    """What is emitted from now on has this pattern replaced; large_only: not in the check's own programs."""
    emit = Compiler.emit

    def edited(self: Compiler, program: Any, *rest: Any) -> Path:
        written = emit(self, program, *rest)
        if not large_only or all(p.is_meta for p in self.model.parameters()):
            for file in (written / "layers").glob("*.py"):
                file.write_text(re.sub(before, after, file.read_text()))
        return written

    monkeypatch.setattr(Compiler, "emit", edited)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "pp=2", "microbatches": 2},
        {"mesh": "dp=2"},
        {"freeze": ["embed.*", "layers.0.*", "layers.1.*", "layers.2.*.bias"]},
        {"microbatches": 4, "recompute": {"*": "full"}},
    ],
    ids=str,
)
def test_a_right_program_without_weights_passes(options: dict[str, Any]) -> None:
    model = compiled(**options)
    own = [(p, p.requires_grad) for p in model.model.parameters()]
    assert model.check().startswith("checked against eager PyTorch with one layer of each kind: loss to ")
    assert all(p.is_meta and p.requires_grad is flag and p.grad is None for p, flag in own)
    assert all(a is b for (a, _), b in zip(own, model.model.parameters(), strict=True))
    assert not any("forward" in vars(module) for module in model.model.modules())


def test_context_parallel_templates_are_compared_too() -> None:
    assert "one layer of each kind: loss" in compiled(lambda: small.text(4), mesh="pp=2,cp=2", microbatches=2).check()


@pytest.mark.parametrize("large_only", [False, long(True)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (r"aten\.silu_backward\.", "aten.gelu_backward."),
        ('"weight": d_head', '"weight": 2 * d_head'),
        (r' +"linear\.bias": .*\n', ""),
        (r"aten\.silu\.", "aten.relu."),
    ],
    ids=["backward", "weight", "bias", "forward"],
)
def test_a_wrong_layer_file_is_found(
    monkeypatch: pytest.MonkeyPatch, before: str, after: str, large_only: bool
) -> None:
    emitting(monkeypatch, before, after, large_only)
    with pytest.raises(DifferenceError, match="what csc would train is not what eager PyTorch trains") as caught:
        compiled(mesh="pp=2", microbatches=2).check()
    assert caught.value.where.startswith("layers/" if large_only else ("region ", "Biased"))


def test_microbatches_that_count_wrongly_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = loss.proven
    monkeypatch.setattr(loss, "proven", lambda *given: (replace(real(*given)[0], weight="mean"), False))
    with pytest.raises(DifferenceError, match=r"the loss is .*, eager's .* microbatches together are not"):
        compiled(microbatches=2).check()


def test_what_is_too_large_for_that_too_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_of_each, "WORK", 1e5)
    assert re.search(r"not checked .* TFLOP at these sizes, and a check on a CPU up to", compiled().check())
    monkeypatch.setattr(one_of_each, "ROOM", 1e-9)
    assert re.search(r"not checked .* of one layer of each kind, .* GB, and a check takes up to", compiled().check())


def test_a_model_whose_weights_are_too_large_trains_after_a_check_by_layer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first, "ROOM", 1e-9)
    torch.manual_seed(0)
    model = csc.compile(Biased(), example=batch(), cache=False, microbatches=2)
    before = {name: p.detach().clone() for name, p in model.model.named_parameters()}
    with caplog.at_level(logging.INFO, "csc"):
        found = model.train_step(batch())
    assert "checked against eager PyTorch with one layer of each kind: loss" in caplog.text
    assert all(torch.equal(p, before[name]) for name, p in model.model.named_parameters())
    assert float(found) == pytest.approx(float(model.model(**batch()).detach()), rel=1e-6)


class Returning(Biased):
    """Layers that return two tensors, of which the second ends in the loss; by another way."""

    class Layer(Biased.Layer):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            made = super().forward(hidden)
            return made, made.pow(2).mean(-1)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, sizes = self.embed(tokens), []
        for layer in self.layers:
            hidden, size = layer(hidden)
            sizes.append(size)
        entropy = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
        return (entropy + torch.stack(sizes).sum()) / tokens.shape[0]


def test_layers_that_return_several_tensors() -> None:
    """The loss reads what each layer returned: with fewer of them it is another file, and the check says so."""
    assert "one layer of each kind (not layers/loss.py): loss" in compiled(Returning, microbatches=2).check()


def test_a_model_without_layers_is_checked_whole() -> None:
    assert "checked against eager PyTorch" in compiled(lambda: nn.Sequential(small.text(1))[0], microbatches=2).check()


def test_the_check_of_a_model_without_weights_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSC_CACHE", "1")
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path))
    said = []
    for _ in range(2):
        with csc.meta_init():
            model = small.text(2)
        said.append(csc.compile(model, example=batch(), microbatches=2).check())
    assert said[0].startswith("checked against eager PyTorch with one layer") and "done before" in said[1]
