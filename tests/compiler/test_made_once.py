"""Tables that no batch changes are made once for a program; what they are made of may be written to."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from csc.codegen import fixed_tables
from torch import nn

import csc
from csc.runtime.loaded_program import functions, load
from csc.runtime.made_once import Constants, once

BATCH = {"x": torch.ones(2, 6, 8).cumsum(1) / 6, "mask": torch.ones(2, 6)}


class Rotated(nn.Module):
    """Rotary factors of a buffer, and noise of a generator if there is any: neither is changed by a batch."""

    frequencies: torch.Tensor

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise
        self.linear = nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.arange(1.0, 9.0) / 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(6)[:, None] * self.frequencies
        seen = torch.ones(6, 6).tril() * mask[:, None]
        turned = self.linear(x) * angles.cos() + x * angles.sin()
        if self.noise:
            turned = turned + self.noise * torch.rand(2, 6, 8)
        return (seen @ turned).square().mean()


def made(noise: float = 0.0) -> Rotated:
    torch.manual_seed(0)
    return Rotated(noise)


def of_stage(directory: Path, constants: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Two calls of the stage's tables; those that are the same objects in both."""
    program = load(directory)
    functions(program, 0)
    tables = importlib.import_module(f"{program.package}.layers.tables")
    first, again = ([*tables.of_stage_0(BATCH | {"random": torch.tensor(i)}, constants)] for i in range(2))
    assert len(first) == len(again)
    return tuple(one for one, other in zip(first, again) if one is other)


def test_fixed_tables_are_made_once_and_others_in_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary factors, and the causal half of a mask; not noise, which is drawn, and nothing that is too large."""
    compiled = csc.compile(made(0.1), example=BATCH, cache=False, check=False)
    directory = compiled.write(tmp_path / "program")
    constants = load(directory).constants(0)
    kept = of_stage(directory, constants)
    assert [tuple(one.shape) for one in kept] == [(6, 8)], "the factors that a layer reads; the others meet the batch"
    assert not of_stage(directory, dict(constants)), "constants that keep nothing"
    assert "_fixed_1(constants)" in (directory / "layers/tables.py").read_text()
    own = {one.data_ptr() for one in constants.lasting()}
    assert own >= {one.data_ptr() for one in kept}, "what gradients must not share memory with"
    monkeypatch.setattr(fixed_tables, "MOST", 100)  # bytes; factors have 192, angles' operands 48 and 32
    small = csc.compile(made(), example=BATCH, cache=False, check=False).write(tmp_path / "small")
    constants = load(small).constants(0)
    assert not of_stage(small, constants)
    assert all(one.numel() * one.element_size() <= 100 for one in constants.lasting())


def test_steps_are_eagers_after_a_buffer_is_written() -> None:
    model, reference = made(), made()
    compiled = csc.compile(model, example=BATCH, cache=False, check=False)
    for number in range(4):
        if number == 2:
            for one in (model, reference):
                one.frequencies.mul_(0.5)
        assert compiled.eval_step(BATCH).isfinite()
        compiled.zero_grad()
        reference.zero_grad()
        loss, expected = compiled.train_step(BATCH), reference(**BATCH)
        expected.backward()
        assert torch.equal(loss, expected.detach())
        own = dict(compiled.named_parameters())
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None and torch.equal(own[name].grad, parameter.grad), name


def test_what_is_written_to_is_made_anew() -> None:
    calls = []

    @once
    def doubled(constants: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        calls.append(1)
        return (constants["table"] * 2,)

    constants = Constants({"table": torch.ones(3)})
    (first,), (again,) = doubled(constants), doubled(constants)
    assert first is again and len(calls) == 1
    constants["table"].add_(1)
    assert torch.equal(doubled(constants)[0], torch.full((3,), 4.0))
    doubled(constants)[0].zero_()
    assert torch.equal(doubled(constants)[0], torch.full((3,), 4.0)) and len(calls) == 3
    other = Constants({"table": torch.zeros(3)})
    assert torch.equal(doubled(other)[0], torch.zeros(3)) and len(calls) == 4
