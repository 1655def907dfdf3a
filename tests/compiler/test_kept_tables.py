"""Tables that no batch changes are made once for a program, those that sizes alone change while these are the same.

What they are made of may be written to.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from csc.codegen import layer_file
from torch import nn

import csc
from csc.runtime.loaded_program import functions, load
from csc.runtime.made_once import Constants, once, while_equal

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
    monkeypatch.setattr(layer_file, "MOST", 100)  # bytes; factors have 192, angles' operands 48 and 32
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


class Lengths(nn.Module):
    """Samples of several lengths, which a batch gives in a number each; tokens see those before them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        there = torch.arange(6) < lengths[:, None]
        seen = torch.ones(6, 6, dtype=torch.bool).tril() & there[:, None]
        weights = seen / seen.sum(-1, keepdim=True).clamp(min=1)
        turned = weights @ self.linear(self.embedding(input_ids))
        return (turned.square().mean(-1) * there).mean()


def of_lengths(*lengths: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(24).view(4, 6) % 16, "lengths": torch.tensor(lengths)}


def as_eager(compiled: csc.Compiled, reference: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    compiled.zero_grad()
    reference.zero_grad()
    loss, expected = compiled.train_step(dict(batch)), reference(**batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    own = dict(compiled.named_parameters())
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("mesh, microbatches", [({}, 1), ({"pp": 2}, 2), ({"dp": 2}, 2)], ids=["one", "pp", "dp"])
def test_steps_are_eagers_whatever_sizes_come(mesh: dict[str, int], microbatches: int) -> None:
    """The same ones, others, the first ones again; a tensor that is written to, by torch and behind its back."""
    torch.manual_seed(0)
    model = Lengths()
    reference = copy.deepcopy(model)
    compiled = csc.compile(
        model, example=of_lengths(6, 6, 6, 6), mesh=mesh, microbatches=microbatches, cache=False, check=False
    )
    for lengths in ((6, 6, 6, 6), (6, 6, 6, 6), (1, 2, 3, 4), (6, 6, 6, 6), (3, 4, 3, 4), (4, 3, 4, 3)):
        as_eager(compiled, reference, of_lengths(*lengths))
    batch = of_lengths(2, 2, 2, 2)
    as_eager(compiled, reference, batch)
    batch["lengths"][1] = 5
    as_eager(compiled, reference, batch)
    batch["lengths"].numpy()[0] = 1
    as_eager(compiled, reference, batch)
    as_eager(compiled, reference, of_lengths(1, 5, 2, 2))


def test_what_sizes_alone_change_is_kept_while_they_are_equal(tmp_path: Path) -> None:
    compiled = csc.compile(Lengths(), example=of_lengths(6, 5, 4, 3), cache=False, check=False)
    assert compiled.program.sizes == ("lengths",), "tokens are none"
    program = load(compiled.write(tmp_path / "program"))
    functions(program, 0)
    text = (tmp_path / "program/layers/tables.py").read_text()
    assert '@while_equal("lengths")\ndef _sized_1(batch, constants):' in text and "= _sized_1(batch, constants)" in text
    tables = importlib.import_module(f"{program.package}.layers.tables").of_stage_0
    constants = program.constants(0)
    first, again = (tables(of_lengths(6, 5, 4, 3), constants) for _ in range(2))
    same = [one is other for one, other in zip(first, again)]
    assert any(same), "kept"
    lasting = {id(one) for one in constants.lasting()}
    held = {id(one) for one in constants.held()}
    kept = [one for one, is_kept in zip(first, same) if is_kept]
    assert all(id(one) in held for one in kept) and not all(id(one) in lasting for one in kept)
    other = tables(of_lengths(1, 5, 4, 3), constants)
    plain = tables(of_lengths(1, 5, 4, 3), dict(constants))
    assert all(torch.equal(one, two) for one, two in zip(other, plain)), "and of others made anew"
    assert any(not torch.equal(one, two) for one, two in zip(first, other))


def test_a_sized_function_runs_again_for_what_is_not_the_same() -> None:
    calls = []

    @while_equal("sizes")
    def doubled(batch: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        calls.append(batch["sizes"])
        return (batch["sizes"].reshape(-1) * constants["table"],)

    constants = Constants({"table": torch.full((1,), 2)})
    sizes = torch.tensor([[1, 2], [3, 4]])
    for given in (sizes, sizes.clone(), sizes):
        assert torch.equal(doubled({"sizes": given}, constants)[0], torch.tensor([2, 4, 6, 8]))
    assert len(calls) == 1 and calls[0] is not sizes
    for given in (sizes.int(), sizes.reshape(1, 4), sizes.t().contiguous().t()):
        assert torch.equal(doubled({"sizes": given}, constants)[0], torch.tensor([2, 4, 6, 8]))
    assert len(calls) == 4, "another dtype, another shape, other strides"
    doubled({"sizes": sizes}, constants)[0].zero_()
    assert torch.equal(doubled({"sizes": sizes}, constants)[0], torch.tensor([2, 4, 6, 8])), "a result was written to"
    constants["table"].add_(1)
    assert torch.equal(doubled({"sizes": sizes}, constants)[0], torch.tensor([3, 6, 9, 12])), "a constant was"
    other = Constants({"table": torch.zeros(1, dtype=torch.int64)})
    assert not doubled({"sizes": sizes}, other)[0].any()
    calls.clear()
    for _ in range(2):
        doubled({"sizes": sizes}, {"table": torch.ones(1)})
    assert len(calls) == 2 and calls[0] is sizes, "constants that keep nothing"
