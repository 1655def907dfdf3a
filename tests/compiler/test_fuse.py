"""Programs whose templates Inductor compiles: numbers, and how often it compiles. Minutes, since it does."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import csc
from csc.errors import InputError
from csc.runtime import fusing
from csc.runtime.compiled_function import KeptFunction
from csc.runtime.flat_tensors import layouts_of, structure_of
from csc.runtime.loaded_program import load
from csc.runtime.trainer import Trainer
from tests.compiler import small
from tests.exactness import FLOAT32
from tests.launching import ranks

WIDTH = 16
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


class Layer(nn.Module):
    """A norm that is written out, a gated MLP, dropout."""

    RATE = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = small.RMSNorm(), nn.Dropout(self.RATE)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.drop(self.down(torch.nn.functional.silu(self.up(self.norm(hidden)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def made(**options: Any) -> csc.CompiledModel:
    torch.manual_seed(0)
    model = Model()
    every: dict[str, Any] = {"cache": False, "mesh": "pp=2", "microbatches": 2} | options
    return csc.compile(model, example={"x": torch.randn(4, 5, WIDTH)}, **every)


def artifacts(cache: Path) -> set[Path]:
    """What Inductor has made."""
    (folder,) = cache.glob("inductor-*")
    return {file.relative_to(folder) for file in folder.rglob("*") if file.is_file() and file.parent.name != "locks"}


def step(compiled: csc.CompiledModel) -> dict[str, torch.Tensor]:
    """Loss and gradients, with the same random numbers every time."""
    torch.manual_seed(1)
    compiled.zero_grad()
    loss = compiled.train_step({"x": torch.ones(4, 5, WIDTH).cumsum(1) / 5})
    grads = {name: p.grad.clone() for name, p in compiled.named_parameters() if p.grad is not None}
    return grads | {"": loss.clone()}


@pytest.mark.slow
@needs_compiler
def test_fused_steps_are_the_plain_ones_with_the_same_dropout(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over stages and microbatches; checked against eager at its first step; the same bits from step to step; each
    function compiled once, whatever the number of layers, and kept; and an edited layer file is what is compiled.
    """
    caplog.set_level(logging.INFO, "csc")
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CSC_CACHE", "1")
    plain, fused = made(), made(fuse=True, cache=True, directory=tmp_path / "program")
    expected, found = step(plain), step(fused)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= FLOAT32 * float(value.norm()), name
    rows = [row for trainer in fused._programs.trainers for row in trainer.fused.rows()]
    compiled = [row.name for row in rows]
    assert sorted(compiled) == sorted(set(compiled)), "each once"
    assert "layer__1_recomputed.forward" in compiled, "of three layers"
    assert {row.how for row in rows} == {"compiled"}, "in this start, before the step"
    with torch.compiler.set_stance("fail_on_recompile"):
        again = step(fused)
    for name, value in found.items():
        assert torch.equal(again[name], value), name
    kept = artifacts(tmp_path / "cache")
    assert {"fxgraph", "aotautograd"} <= {file.parts[0] for file in kept}
    torch.compiler.reset()
    step(made(fuse=True, cache=True))
    assert artifacts(tmp_path / "cache") == kept, "nothing was compiled a second time"
    assert str(tmp_path) not in os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""), "the user's own stays where it was"

    file = next((tmp_path / "program").rglob("layers/layer__1_recomputed.py"))
    text = file.read_text()
    file.write_text(text.replace("aten.silu.default(", "aten.tanh.default("))
    assert file.read_text() != text
    program = load(file.parent.parent)
    edited, other = (
        Trainer(program_, dict(fused.model.named_parameters()), fused=on)
        for program_, on in ((program, True), (load(file.parent.parent), False))
    )
    batch = {"x": torch.ones(4, 5, WIDTH)}
    losses = []
    for trainer in (edited, other):
        torch.manual_seed(1)
        losses.append(trainer.train_step(batch))
    torch.testing.assert_close(*losses)
    torch.manual_seed(1)
    assert abs(float(losses[0] - fused.train_step(batch))) > 1e-4, "the edit counts"


def settled(compiled: csc.CompiledModel) -> list[bool]:
    """Of each program, in the order of their sizes."""
    return [program.is_settled for trainer in compiled._programs.trainers for program in trainer.fused._programs]


def trained_as_eager(fused: csc.CompiledModel, eager: Model, x: torch.Tensor) -> None:
    """A step whose loss and gradients are eager's."""
    fused.zero_grad()
    loss = fused.train_step({"x": x})
    eager.zero_grad()
    expected = eager(x)
    expected.backward()
    assert abs(float(loss - expected.detach())) <= 1e-5 * float(loss)
    theirs = dict(eager.named_parameters())
    for name, one in fused.named_parameters():
        grad = theirs[name].grad
        assert grad is not None and float((one.grad - grad).norm()) <= 1e-5 * float(grad.norm()), name


@pytest.mark.long
@needs_compiler
def test_sizes_that_come_later_are_compiled_once_they_were_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are eager's before, at and after that step; a second start finds what was made."""
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CSC_CACHE", "1")
    monkeypatch.setattr(Layer, "RATE", 0.0)
    for start in ("compiled", "found in the cache"):
        fused, eager = made(fuse=True, cache=True, microbatches=1), Model()
        eager.load_state_dict(fused.model.state_dict())
        trained_as_eager(fused, eager, torch.randn(4, 5, WIDTH))
        for number in range(2 * fusing.MET + 4):
            assert settled(fused)[1:] == [number > 2 * fusing.MET + late for late in range(min(number, 2))]
            trained_as_eager(fused, eager, torch.randn(4, 6 + number % 2, WIDTH))
        assert settled(fused) == [True] * 3
        rows = [row for trainer in fused._programs.trainers for row in trainer.fused.rows()]
        assert {row.how for row in rows} == {start} and len(rows) % 3 == 0


@pytest.mark.long
@pytest.mark.gloo
@needs_compiler
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_ranks_switch_in_the_same_step(mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever of them has compiled."""
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CSC_CACHE", "1")
    switched = [json.loads(one.splitlines()[-1]) for one in ranks(_switching, 2, mesh)]
    assert switched[0] == switched[1] == [1, 3 * fusing.MET + 2, 3 * fusing.MET + 3]


def _switching(mesh: str) -> None:
    """Prints after how many steps functions were compiled, for each size. Gradients are eager's in each."""
    Layer.RATE = 0.0
    fused, eager, switched = made(fuse=True, cache=True, mesh=mesh, microbatches=1), Model(), list[int]()
    eager.load_state_dict(fused.model.state_dict())
    for number in range(3 * fusing.MET + 4):
        torch.manual_seed(number)
        trained_as_eager(fused, eager, torch.randn(4, (5, 6, 7)[number % 3], WIDTH))
        switched += [number + 1] * (sum(settled(fused)) - len(switched))
    print(json.dumps(switched))
    torch.distributed.destroy_process_group()


def test_fuse_is_a_switch() -> None:
    with pytest.raises(InputError, match="fuse is 'yes'"):
        csc.compile(Model(), fuse="yes")


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def test_a_function_draws_what_it_draws_as_it_is(tmp_path: Path) -> None:
    x = torch.ones(8, 8)
    kept = KeptFunction("noisy", "noisy", structure_of((x,)), layouts_of([x]), tmp_path)
    compiled, _ = kept.made(noisy, (x,), True)
    assert compiled is not None
    drawn = []
    for function in (noisy, lambda x: compiled([x])):
        torch.manual_seed(3)
        drawn += [function(x), function(x)]
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3])
