"""Models whose forward asks which tensors require a gradient: another frozen set is another graph."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import csc
from tests.exactness import FLOAT32

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, question: str) -> None:
        super().__init__()
        self.up, self.question = nn.Linear(WIDTH, WIDTH), question

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made = torch.relu(self.up(hidden))
        answer = {
            "parameter": lambda: self.up.weight.requires_grad,
            "parameters": lambda: any(one.requires_grad for one in self.parameters()),
            "value": lambda: hidden.requires_grad,
            "leaf": lambda: not hidden.is_leaf,
            "grad_fn": lambda: made.grad_fn is not None,
        }[self.question]()
        return hidden + (2 * made if answer else made)


class Asking(nn.Module):
    def __init__(self, question: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(question) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.encoder(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"loss": nn.functional.cross_entropy(self.head(hidden), labels)}


BATCH = {"x": torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH), "labels": torch.arange(4)}
LOWER = ("encoder", "layers.0", "layers.1")


def froze(model: nn.Module, paths: Iterable[str]) -> None:
    for path in paths:
        model.get_submodule(path).requires_grad_(False)


def check(compiled: csc.CompiledModel, model: nn.Module) -> None:
    """One step is a step of eager PyTorch with the flags as they are."""
    eager = copy.deepcopy(model)
    eager.zero_grad()
    loss = eager(**BATCH)["loss"]
    loss.backward()
    model.zero_grad()
    assert float(compiled.train_step(BATCH)) == pytest.approx(loss.item(), rel=FLOAT32)
    for (name, parameter), right in zip(model.named_parameters(), eager.parameters()):
        assert (parameter.grad is None) == (right.grad is None), name
        if parameter.grad is not None and right.grad is not None:
            assert float((parameter.grad - right.grad).norm()) <= FLOAT32 * float(right.grad.norm()), name


@pytest.mark.parametrize("question", ["parameter", "parameters", "value", "leaf", "grad_fn"])
@pytest.mark.long_cases("parameter")
def test_flags_that_change_are_another_capture(question: str) -> None:
    model = Asking(question)
    compiled = csc.compile(model, mesh="pp=2", example=BATCH, microbatches=2, check=False)
    check(compiled, model)
    froze(model, LOWER)
    check(compiled, model)
    model.requires_grad_(True)
    check(compiled, model)


def test_freeze_that_changes_an_answer_names_the_line() -> None:
    model = Asking("parameter")
    with pytest.raises(
        csc.CscError, match=r"self\.up\.weight\.requires_grad.*freeze= changes the answer: requires_grad"
    ):
        csc.compile(model, mesh="pp=2", example=BATCH, freeze=LOWER).train_step(BATCH)
    froze(model, LOWER)
    check(csc.compile(model, mesh="pp=2", example=BATCH, freeze=LOWER, check=False), model)  # says what the model says


def test_a_cached_capture_serves_its_own_frozen_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSC_CACHE", "1")
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path))
    for paths in ((), LOWER, ()):
        model = Asking("value")
        froze(model, paths)
        check(csc.compile(model, mesh="pp=2", example=BATCH, check=False), model)
