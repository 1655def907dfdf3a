"""`len(x)` of a tensor in a model's code: as `x.shape[0]`, and a plain number where that is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from tests.compiler import helpers_of_lengths
from tests.tiers import in_turn

D, V = 16, 30


class Resampler(nn.Module):
    """Learned queries for each image, and a loss over a number of samples that Python knows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.queries = nn.Parameter(torch.randn(1, 2, D) / 4)
        self.projector = nn.MultiheadAttention(D, 2, kdim=6, vdim=6, batch_first=True)
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen = self.encoder(pixels)
        seen = self.projector(self.queries.expand(len(ids), -1, -1), seen, seen, need_weights=False)[0]
        x = torch.cat([seen, self.embed(ids)[:, 2:]], 1)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum") / len(labels)


class Unsqueezed(Resampler):
    """Its queries have no samples of their own, and go through views."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, D) / 4)

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen, queries = self.encoder(pixels), self.queries.unsqueeze(0).expand(pixels.shape[0], -1, -1)
        seen = self.projector(queries, seen, seen, need_weights=False)[0]
        x = torch.cat([seen, self.embed(ids)[:, 2:]], 1)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Helped(Resampler):
    """Its number of samples is asked for by a function of another file."""

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + helpers_of_lengths.zeros_of(pixels, D)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Wrapped(Resampler):
    """Its forward is within a function of another file."""

    @helpers_of_lengths.passed_on
    def forward(self, ids: torch.Tensor, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, pixels, labels) * len(ids) / pixels.shape[0]


class Listed(Resampler):
    """A plain number is needed: a key of a table, and a list of it."""

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scales = {len(ids): 2.0}
        x = self.embed(ids) * scales[len(ids)] + torch.tensor([0.5] * len(ids))[:, None, None]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(samples: int = 4) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(samples)
    return {
        "ids": torch.randint(0, V, (samples, 6), generator=drawn),
        "pixels": torch.randn(samples, 3, 6, generator=drawn),
        "labels": torch.randint(0, V, (samples, 6), generator=drawn),
    }


def agrees(model: nn.Module, compiled: csc.CompiledModel, given: Any) -> None:
    loss = model(**given)
    model.zero_grad()
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    compiled.zero_grad()
    assert float(compiled.train_step(given)) == pytest.approx(float(loss.detach()), rel=1e-6)
    found = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max().clamp(min=1e-6), name


@pytest.mark.parametrize(("kind", "mesh"), in_turn([Resampler, Helped, Wrapped], ["pp=2", "dp=2", "tp=2"]))
@pytest.mark.long_cases("Resampler-pp=2", "Wrapped-tp=2")
def test_the_number_of_samples_may_be_any(kind: type[Resampler], mesh: str) -> None:
    torch.manual_seed(0)
    model = kind()
    compiled = csc.compile(model, example=batch(), mesh=mesh, microbatches=2)
    for samples in (4, 8, 12):
        agrees(model, compiled, batch(samples))


@pytest.mark.parametrize("kind", [Resampler, Unsqueezed])
@pytest.mark.parametrize("first", [2, 4])
@pytest.mark.long_cases("2-Resampler", "2-Unsqueezed", "4-Resampler")
def test_one_sample_in_a_microbatch_has_the_regions_of_several(kind: type[Resampler], first: int) -> None:
    """Queries that are expanded are a region of their own, which an expansion to one sample would not need."""
    torch.manual_seed(0)
    model = kind()
    compiled = csc.compile(model, example=batch(first), mesh="pp=2", microbatches=2)
    for samples in (first, 6 - first, 8):
        agrees(model, compiled, batch(samples))


def test_where_a_plain_number_is_needed_it_is_that_of_the_batch() -> None:
    torch.manual_seed(0)
    model = Listed()
    compiled = csc.compile(model, example=batch())
    for samples in (4, 6):
        agrees(model, compiled, batch(samples))
    with pytest.raises(csc.CscError, match=r"one number of samples|number of samples in Python"):
        csc.compile(model, example=batch(), microbatches=2).train_step(batch())


def enumerated(ids: torch.Tensor) -> int:
    number = 0
    for place, _ in enumerate(ids):
        number = place + 1
    return number


COUNTS: list[Callable[[torch.Tensor], int]] = [
    lambda ids: sum(1 for _ in ids), lambda ids: len([0 for _ in ids]), lambda ids: len(ids.unbind()), enumerated,
    lambda ids: len([*ids, *ids]) // 2,
]  # fmt: skip


@pytest.mark.parametrize("count", COUNTS)
def test_samples_that_python_counts(count: Callable[[torch.Tensor], int]) -> None:
    """By going through them: then the trace holds for as many."""

    class Counted(Resampler):
        def forward(self, ids: torch.Tensor, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.head(self.embed(ids))
            return F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="sum") / count(ids)

    torch.manual_seed(0)
    model = Counted()
    compiled = csc.compile(model, example=batch(), check=False)
    for samples in (4, 6):
        agrees(model, compiled, batch(samples))
    with pytest.raises(csc.CscError, match=r"one number of samples|number of samples in Python"):
        csc.compile(model, example=batch(), microbatches=2, check=False).train_step(batch())


def test_the_models_files_are_as_they_were() -> None:
    """Behind a trace that succeeds and one that fails; a `len` of the file's own is its own."""
    own = sys.modules[__name__]
    csc.compile(Resampler(), example=batch(), mesh="pp=2").train_step(batch())
    assert "len" not in vars(own) and "len" not in vars(helpers_of_lengths)

    class Broken(Resampler):
        def forward(self, ids: torch.Tensor, **_: Any) -> torch.Tensor:
            raise RuntimeError(f"with {len(ids)} samples")

    with pytest.raises((csc.CscError, RuntimeError), match="with 4 samples"):
        csc.compile(Broken(), example=batch(), mesh="pp=2").train_step(batch())
    assert "len" not in vars(own)


def test_a_len_of_the_files_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with_own_len.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def len(x):\n    return 7\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.a = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n        return self.a(x).square().mean() * len(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made: ModuleType = __import__("with_own_len")
    model, x = made.Model(), torch.randn(4, 4)
    compiled = csc.compile(model, example={"x": x}, mesh="pp=1")
    assert float(compiled.train_step({"x": x})) == pytest.approx(float(model(x).detach()), rel=1e-6)
