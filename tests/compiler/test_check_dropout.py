"""The check of a model with dropout: eager PyTorch gets the program's masks, and the compared step trains."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import csc
from csc.check.eager import SameMasks, WithoutChance, eager_step
from csc.check.judge import relative
from csc.driver.compiler import Compiler
from csc.errors import DifferenceError
from csc.runtime.trainer import Trainer
from tests.compiler import small
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")

BATCH = small.text_batch(4)


def compiled(model: nn.Module, **options: Any) -> csc.CompiledModel:
    return csc.compile(model, **{"example": BATCH, "cache": False, **options})


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mesh", ["pp=2", long("dp=2,cp=2"), long("tp=2")])
def test_the_step_with_dropout_that_was_compared_is_the_training_step(
    mesh: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed again; gradients, and what is drawn after the step, are those of an unchecked one."""
    runs: list[bool] = []
    run = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda *given, **named: runs.append(True) or run(*given, **named))
    found = []
    for check in (True, False):
        model = compiled(small.dropped(), mesh=mesh, microbatches=2, check=check)
        torch.manual_seed(5)
        with caplog.at_level(logging.INFO, "csc"):
            loss = model.train_step(BATCH)
        found.append((loss, gradients(model.model), torch.rand(2)))
    assert len(runs) == 2 and "s beside the step itself" in caplog.text and "nothing left" not in caplog.text
    (loss, own, after), (plain, right, then) = found
    assert torch.equal(loss, plain) and torch.equal(after, then)
    assert own.keys() == right.keys() and all(torch.equal(own[name], right[name]) for name in right)


def test_eager_with_the_masks_is_the_step_and_drops_something() -> None:
    """By hand, whatever the check says: the gradients of a step under eager PyTorch with its seed's masks."""
    model = compiled(small.dropped(), microbatches=2, check=False)
    torch.manual_seed(5)
    drawn = int(torch.randint(2**62, (), dtype=torch.int64))
    torch.manual_seed(5)
    loss = model.train_step(BATCH)
    masks = SameMasks(model.trainer().program.manifest.draws, drawn, 2)
    names = gradients(model.model).keys()
    right = eager_step(model.model, BATCH, names, chance=WithoutChance(masks))
    constant = eager_step(model.model, BATCH, names)
    assert masks.fit and float(loss) == pytest.approx(right.loss, rel=1e-6) != pytest.approx(constant.loss, rel=1e-3)
    for name, found in gradients(model.model).items():
        torch.testing.assert_close(found, right.gradients[name], rtol=1e-4, atol=1e-6, msg=name)


class WeightDropped(nn.Module):
    """Drops out a weight beside features: the same mask for all samples of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(F.dropout(x, 0.3), F.dropout(self.first.weight, 0.5), self.first.bias)
        return self.second(hidden).square().mean()


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"mesh": "dp=2"}], ids=str)
def test_a_weight_that_is_dropped_out_is_compared_with_its_mask(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6)}
    model = compiled(WeightDropped(), example=batch, **options)
    with caplog.at_level(logging.INFO, "csc"):
        model.train_step(batch)
    assert "s beside the step itself" in caplog.text and "nothing left" not in caplog.text


def test_a_backward_with_another_mask_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing shows it where nothing is left to chance: each mask lets everything through."""
    emit = Compiler.emit
    before, after = "(d_dropout, p=0.1, seed=seed, index=0)", "(d_dropout, p=0.1, seed=seed, index=1)"

    def edited(*given: Any) -> Any:
        file = emit(*given) / "layers" / "drop.py"
        assert file.read_text().count(before) == 1
        file.write_text(file.read_text().replace(before, after))
        return file.parent.parent

    monkeypatch.setattr(Compiler, "emit", edited)
    model = compiled(small.dropped())
    with pytest.raises(
        DifferenceError, match=r"with the same dropout, 1 of 27 gradients differ, that of 'embed\.weight'"
    ):
        model.train_step(BATCH)
    assert not gradients(model.model)


class Again(small.Dropped):
    """Its dropout is made once more in the backward: eager PyTorch draws more often than the program lists."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.embed(tokens))
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Noisy(small.Dropped):
    """Draws something beside dropout."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.embed(tokens))
        hidden = hidden + 0.1 * torch.randn_like(hidden)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Mixing(small.Dropped):
    """Samples do not stand together along the first dimension of what is dropped."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.embed(tokens).transpose(0, 1)).transpose(0, 1)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Adapted(small.Dropped):
    """As Mixing, in front of a factor that is zero as LoRA's: the loss says nothing of the mask, gradients do."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(small.WIDTH))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens).transpose(0, 1)
        hidden = (hidden + self.zero * self.drop(hidden)).transpose(0, 1)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Again, "eager PyTorch draws"), long(Noisy, ""), (Mixing, "with dropout as"), (Adapted, "with dropout as")],
)
@pytest.mark.long_cases("Again-eager PyTorch draws")
def test_other_models_are_compared_with_nothing_left_to_chance(
    kind: type[nn.Module], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And their first step is as without a check."""
    found = []
    for check in (True, False):
        torch.manual_seed(0)
        model = compiled(kind(), microbatches=2, check=check)
        torch.manual_seed(5)
        with caplog.at_level(logging.INFO, "csc"):
            loss = model.train_step(BATCH)
        found.append((loss, gradients(model.model)))
    assert "checked against eager PyTorch: loss" in caplog.text and "beside the step" not in caplog.text
    assert (f"compared with nothing left to chance: {said}" in caplog.text) == bool(said), caplog.text
    (loss, own), (plain, right) = found
    assert torch.equal(loss, plain) and all(torch.equal(own[name], right[name]) for name in right)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e-25, 1e25])
def test_differences_of_gradients_of_any_size(scale: float) -> None:
    """In float32 where squares neither vanish nor overflow, in float64 elsewhere; a number that is none is seen."""
    right = {"a.weight": torch.randn(70_000, generator=torch.Generator().manual_seed(0)) * scale}
    found = {"a.weight": right["a.weight"] * (1 + 1e-3)}
    assert relative(right, found)["a.weight"] == pytest.approx(1e-3, rel=1e-3)
    found["a.weight"][3] = torch.nan
    assert math.isnan(relative(right, found)["a.weight"])


class Plain(small.Dropped):
    """Draws nothing."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(tokens))[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Attending(small.Dropped):
    """Drops weights of attention; dropout is called in another way."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(input=self.embed(tokens), p=0.1, training=self.training)
        heads = hidden.unflatten(-1, (4, -1)).transpose(1, 2)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        shared = heads[:, :2]
        mixed = F.scaled_dot_product_attention(heads, shared, shared, mask, dropout_p=0.2, scale=0.7, enable_gqa=True)
        hidden = hidden + mixed.transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Held(small.Dropped):
    """Holds the function that drops."""

    by = staticmethod(F.dropout)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.by(self.embed(tokens), 0.1)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Half(Plain):
    """Computes in 16 bits, with parameters of 32."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(tokens).bfloat16().float())
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_operations_are_looked_at_where_something_is_drawn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Elsewhere that would double a step of milliseconds; dropout is drawn without it, too, if it is called by name, or
    by a name of the model's own file. However it is called, eager PyTorch gets the program's masks.
    """
    looked_at: list[str] = []
    look = WithoutChance.__torch_dispatch__
    monkeypatch.setattr(
        WithoutChance, "__torch_dispatch__", lambda *given, **named: looked_at.append("") or look(*given, **named)
    )
    kinds = [(Plain, False), (small.Dropped, False), (Attending, False), (Noisy, True), (Again, True), (Held, True)]
    for kind, some in kinds:
        looked_at.clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, "csc"):
            compiled(kind(), microbatches=2).train_step(BATCH)
        assert bool(looked_at) == some, kind
        assert ("beside the step itself" in caplog.text) == (kind not in (Noisy, Again)), (kind, caplog.text)
    monkeypatch.setitem(globals(), "own_name", F.dropout)
    looked_at.clear()
    compiled(Attending(), microbatches=2).train_step(BATCH)
    assert not looked_at


def test_whether_16_bits_are_computed_with_is_found_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is wrong by a thousandth is none in float32, and rounding in bfloat16."""
    keep = Trainer.run

    def run(self: Trainer, *given: Any, **named: Any) -> torch.Tensor:
        loss = keep(self, *given, **named)
        for parameter in self.parameters():
            parameter.grad.mul_(1 + 1e-3)
        return loss

    monkeypatch.setattr(Trainer, "run", run)
    compiled(Half()).train_step(BATCH)
    with pytest.raises(DifferenceError, match="gradients differ"):
        compiled(Plain()).train_step(BATCH)
