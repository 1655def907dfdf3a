"""csc.opaque: a module that decides by values runs as it is, inside its stage."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.check.first import ComparedStep, compared_step
from csc.reports.verification import verify
from csc.runtime.loaded_program import load
from csc.runtime.trainer import Trainer
from tests.exactness import FLOAT32

WIDTH = 8


class Deciding(nn.Module):
    """Turns rows whose mean is positive, row by row, and drops some."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.turn, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(1.5))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, *, sign: int = 1) -> torch.Tensor:
        rows = []
        for row, kept in zip(hidden.flatten(0, 1), mask.flatten().tolist()):
            if kept and row.mean().item() > 0:
                rows.append(self.dropout(torch.tanh(self.turn(row)) * self.scale * sign))
            else:
                rows.append(row)
        return torch.stack(rows).view_as(hidden)


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear, self.deciding = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Deciding(dropout)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return hidden + self.deciding(self.linear(self.norm(hidden)), mask, sign=-1)


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([Layer(dropout), Layer(dropout)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def batch(length: int = 6) -> dict[str, torch.Tensor]:
    x = torch.sin(torch.arange(2 * length * 3.0)).view(2, length, 3)
    labels = torch.arange(2 * length).view(2, length) % 5
    return {"x": x, "mask": (labels != 2).long(), "labels": labels}


def model(dropout: float = 0.0) -> Model:
    torch.manual_seed(0)
    made = Model(dropout)
    for layer in made.layers:
        csc.opaque(layer.deciding)
    return made


@pytest.mark.slow
def test_without_it_the_error_names_it() -> None:
    with pytest.raises(csc.CscError, match=r"csc\.opaque") as caught:
        csc.compile(Model(), example=batch())
    assert "test_opaque.py" in caught.value.where


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=1", "pp=2"])
def test_gradients_are_those_of_eager(mesh: str) -> None:
    compiled = csc.compile(model(), mesh=mesh, example=batch())
    result = verify(compiled)
    assert result.params_missing == () and result.params_unexpected == () and result.params_checked == 18
    assert result.loss_rel <= FLOAT32 and result.grad_rel_max <= FLOAT32
    assert {name for name, _ in compiled.model.named_parameters()} == {name for name, _ in Model().named_parameters()}


@pytest.mark.slow
def test_a_frozen_one_passes_gradients_on() -> None:
    compiled = csc.compile(model(), mesh="pp=2", example=batch(), freeze=["layers.*"])
    result = verify(compiled)
    assert set(result.grad_rel) == {"embed.weight", "embed.bias", "head.weight", "head.bias"}
    assert result.params_missing == () and result.grad_rel_max <= FLOAT32


@pytest.mark.slow
def test_backward_draws_the_numbers_of_forward() -> None:
    """Where no row was dropped by chance the loss differs: so it is compared with itself, by finite differences."""
    compiled = csc.compile(model(dropout=0.5).double(), mesh="pp=2", example=_double(batch()))
    scale = compiled.model.layers[1].deciding.scale
    torch.manual_seed(3)
    compiled.train_step(_double(batch()))
    found, losses = float(scale.grad), []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            scale += step
        torch.manual_seed(3)
        losses.append(float(compiled.train_step(_double(batch()))))
    assert found == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)


def _double(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}


@pytest.mark.slow
def test_another_length_and_another_shape() -> None:
    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(WIDTH, 4)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            best = [row[int(row.norm(dim=-1).argmax())] for row in hidden]
            return self.out(torch.stack(best))

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(3, WIDTH)
            self.pool = csc.opaque(Pooling(), like=lambda hidden: hidden.new_empty(hidden.shape[0], 4))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.pool(torch.tanh(self.embed(x))), labels)

    torch.manual_seed(0)
    x = torch.cos(torch.arange(36.0)).view(3, 4, 3)
    compiled = csc.compile(Classifier(), mesh="pp=2", example={"x": x, "labels": torch.tensor([0, 3, 1])})
    for given in (x, torch.cat([x, x.flip(1)], 1)):
        result = verify(compiled, {"x": given, "labels": torch.tensor([0, 3, 1])})
        assert result.params_missing == () and result.grad_rel_max <= FLOAT32


@pytest.mark.slow
def test_a_program_from_its_directory_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = csc.compile(model(), example=batch()).write(tmp_path / "program", with_weights=True)
    monkeypatch.setattr("csc.kernels.opaque._CALLS", {})  # as in another process
    with pytest.raises(RuntimeError, match="exists only in the process that compiled it"):
        Trainer(load(written)).train_step(batch())


class Counting(nn.Module):
    """Computes with a buffer that it changes: a running mean, as batch norm's; and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.lerp_(hidden.detach().mean((0, 1)), 0.5)
        return hidden * (self.scale + self.mean) / self.calls


class Remembering(nn.Module):
    """Computes with an attribute that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = nn.Parameter(torch.ones(WIDTH)), 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden * self.scale * self.calls


class Around(nn.Module):
    """A loss around a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.embed, self.module, self.head = nn.Linear(3, WIDTH), module, nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.module(torch.tanh(self.embed(x)))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("check", [True, False])
def test_what_it_keeps_in_buffers_is_as_in_eager(check: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its backward runs its forward again from what that began with, and leaves no trace; nothing is traced again."""
    torch.manual_seed(0)
    eager = Around(Counting())
    model = copy.deepcopy(eager)
    csc.opaque(model.module)
    compiled = csc.compile(model, example=batch(), cache=False, check=check)
    with caplog.at_level(logging.INFO, "csc"):
        for _ in range(3):
            for one in (eager, model):
                one.zero_grad()
            loss = eager(**batch())
            loss.backward()
            torch.testing.assert_close(compiled.train_step(batch()), loss.detach(), rtol=1e-6, atol=0)
            for (name, buffer), (_, right) in zip(model.named_buffers(), eager.named_buffers(), strict=True):
                torch.testing.assert_close(buffer, right, rtol=1e-6, atol=1e-7, msg=name)
            for (name, parameter), (_, expected) in zip(model.named_parameters(), eager.named_parameters()):
                torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-5, atol=1e-7, msg=name)
    assert not [record for record in caplog.records if "has changed" in record.message]


def test_one_that_computes_with_anything_else_that_it_changes_is_refused() -> None:
    torch.manual_seed(0)
    model = Around(csc.opaque(Remembering()))
    compiled = csc.compile(model, example=batch(), cache=False, check=False)
    with pytest.raises(csc.CscError, match=r"Remembering.*run again for its backward.*register_buffer"):
        compiled.train_step(batch())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameters_of_it_that_are_replaced_are_trained() -> None:
    torch.manual_seed(0)
    model = Around(csc.opaque(Counting()))
    compiled = csc.compile(model, example=batch(), cache=False)
    compiled.train_step(batch())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    compiled.train_step(batch())
    assert model.module.scale.grad is not None


class Growing(nn.Module):
    """Of its buffer the loss depends much."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return hidden * 10 * self.seen


class Recurrent(nn.Module):
    """PyTorch runs it with another kernel where no gradient is asked for: other bits."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.cells(hidden)[0]
        return found


def test_rounding_of_another_kernel_is_no_change() -> None:
    torch.manual_seed(0)
    eager = Around(Recurrent())
    model = copy.deepcopy(eager)
    csc.opaque(model.module)
    eager(**batch()).backward()
    csc.compile(model, example=batch(), cache=False).train_step(batch())
    for (name, parameter), (_, right) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, right.grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("compiled_first", [True, False])
@pytest.mark.long_cases("True")
def test_a_copy_of_a_model_computes_with_its_own_weights(compiled_first: bool) -> None:
    """In eager mode and compiled, whatever becomes of the model that it was copied from."""
    torch.manual_seed(0)
    original = Around(csc.opaque(Counting()))
    if compiled_first:
        csc.compile(original, example=batch(), cache=False, check=False).train_step(batch())
        original.zero_grad()
    model = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    right = Around(Counting())
    right.load_state_dict(model.state_dict())
    compiled = csc.compile(model, example=batch(), cache=False, check=False)
    for eagerly in (True, False):
        model.zero_grad()
        right.zero_grad()
        expected = right(**batch())
        expected.backward()
        loss = model(**batch()) if eagerly else compiled.train_step(batch())
        if eagerly:
            loss.backward()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=0)
        for (name, parameter), (_, its) in zip(model.named_parameters(), right.named_parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, its.grad, rtol=1e-5, atol=1e-7, msg=name)
    assert all(parameter.grad is None for parameter in original.parameters())


class Telling(nn.Module):
    """Others read what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.table, self.scale, self.settings = torch.ones(()), 1.0, {"scale": 1.0}
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        self.calls += 1
        return 2 * hidden


class Reader(Around):
    """Of what its opaque module holds, before that runs or after."""

    def __init__(self, read: Callable[[Telling], torch.Tensor | float], before: bool = False) -> None:
        super().__init__(Telling())
        self.read, self.before = read, before

    def forward(self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.embed(x))
        factor = 1 + self.read(self.module) if self.before else 1.0
        hidden = self.module(hidden)
        factor = factor if self.before else 1 + self.read(self.module)
        return F.cross_entropy(self.head(factor * hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("read", [lambda one: one.seen.clone(), lambda one: one.table])
def test_a_tensor_of_it_that_others_read_is_refused(read: Any, before: bool) -> None:
    """It may change in every step, where a trace has seen one value."""
    model = Reader(read, before)
    csc.opaque(model.module)
    with pytest.raises(csc.CscError, match=r"reads 'module\.(seen|table)'.*outside of that module"):
        csc.compile(model, example=batch(), cache=False, check=False)


@pytest.mark.parametrize("read", [lambda one: one.scale, lambda one: one.settings["scale"]])
def test_what_others_read_of_it_is_taken_up(read: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What it counts itself, and nobody reads, is no change."""
    torch.manual_seed(0)
    eager = Reader(read)
    model = copy.deepcopy(eager)
    csc.opaque(model.module)
    compiled = csc.compile(model, example=batch(), cache=False, check=False)
    for scale in (1.0, 3.0, 3.0):
        for one in (eager, model):
            one.zero_grad()
            one.module.scale = one.module.settings["scale"] = scale
        with caplog.at_level(logging.INFO, "csc"):
            loss = eager(**batch())
            loss.backward()
            torch.testing.assert_close(compiled.train_step(batch()), loss.detach(), rtol=1e-6, atol=0)
        for (name, parameter), (_, right) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, right.grad, rtol=1e-5, atol=1e-7, msg=name)
    assert len([record for record in caplog.records if "has changed" in record.message]) == 1


def test_the_check_asks_what_rounding_does_from_where_the_step_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's step leaves its buffers changed, which is no rounding of eager PyTorch's step."""

    def wrong(*given: Any) -> ComparedStep:
        found = compared_step(*given)
        return replace(found, step=replace(found.step, loss=1.01 * found.step.loss))

    monkeypatch.setattr("csc.driver.checking.compared_step", wrong)
    torch.manual_seed(0)
    model = Around(csc.opaque(Growing()))
    compiled = csc.compile(model, example=batch(), cache=False)
    with pytest.raises(csc.errors.DifferenceError):
        compiled.train_step(batch())
    assert model.module.seen == 0
