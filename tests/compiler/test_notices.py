"""What is said before the first step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import csc
from tests.compiler import small

pytestmark = pytest.mark.usefixtures("traces")
TRAINS = "parameters train"


class Branched(nn.Module):
    """One layer of it is never called, one is called under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.text = small.text(2)
        self.unused, self.apart = nn.Linear(3, 3), nn.Linear(1, 1)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.text(**batch)
        with torch.no_grad():
            scale = self.apart(torch.ones(1))
        return loss * scale.sum()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if TRAINS in record.message]


def test_every_parameter_that_trains_is_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "csc")
    model = small.text(2)
    compiled = csc.compile(model, mesh="pp=2", example=small.text_batch(4), microbatches=2)
    for _ in range(2):
        compiled.train_step(small.text_batch(4))
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert len(said(caplog)) == 1, "once, not in each step"
    assert said(caplog)[0].startswith(f"{whole:,} of {whole:,} parameters train (")
    assert said(caplog)[0].endswith("; each gets a gradient")


def test_another_frozen_set_is_told_anew(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "csc")
    model = small.text(2)
    compiled = csc.compile(model, example=small.text_batch(4))
    compiled.train_step(small.text_batch(4))
    compiled.with_options(freeze=["layers"]).train_step(small.text_batch(4))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    next(iter(model.parameters())).requires_grad_(True)
    compiled.train_step(small.text_batch(4))
    counts = [int(one.split(" ")[0].replace(",", "")) for one in said(caplog)]
    layers = sum(parameter.numel() for name, parameter in model.named_parameters() if name.startswith("layers."))
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert counts == [whole, whole - layers, next(iter(model.parameters())).numel()]


def test_what_gets_no_gradient_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "csc")
    model = Branched()
    compiled = csc.compile(model, example=small.text_batch(4))
    compiled.train_step(small.text_batch(4))
    (line,) = said(caplog)
    missed = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert len(missed) == 4 and "unused.weight" in missed
    assert f"does not depend on {', '.join(missed[:3])} and 1 more: no gradient" in line
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.grad is not None)
    assert line.startswith(f"{trained:,} of ")


def test_batches_that_are_compiled_for_again_and_again_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "csc")
    compiled = csc.compile(small.text(2), example=small.text_batch(4), check=False)
    for length in (8, 8, 9, 10, 11, 12, 13, 14, 8):
        compiled.train_step(small.text_batch(4, length))
    (line,) = [record.message for record in caplog.records if "have waited" in record.message]
    assert line.startswith("5 of 6 steps have waited for a program, ") and "Pad to a few lengths" in line


def test_a_model_that_changes_is_no_new_size(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "csc")
    model = small.text(2)
    compiled = csc.compile(model, example=small.text_batch(4), check=False)
    for number in range(7):
        next(iter(model.parameters())).requires_grad_(number % 2 == 0)
        compiled.train_step(small.text_batch(4))
    assert "have waited" not in caplog.text


def test_evaluation_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "csc")
    csc.compile(small.text(2), example=small.text_batch(4)).eval_step(small.text_batch(4))
    assert not said(caplog)


def test_without_logging_it_is_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    log: Any = logging.getLogger("csc")
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "handlers", [])
    compiled = csc.compile(small.text(2), example=small.text_batch(4), cache=False)
    compiled.train_step(small.text_batch(4))
    output = capsys.readouterr()
    assert output.out == ""
    first, second = output.err.splitlines()
    assert first.startswith("csc: checked against eager PyTorch: loss to ")
    assert first and second.startswith("csc: ") and TRAINS in second
