"""Sums, means and losses over rows that a mask selects, and losses divided by how many there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import InputError
from tests.tiers import long

V, D = 30, 16
Loss = Callable[..., torch.Tensor]


class Model(nn.Module):
    """loss(model, hidden states, logits, loss of each token, labels, mask) -> a number."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self.embed, self.head, self.scale = nn.Embedding(V, D), nn.Linear(D, V), nn.Linear(V, 1)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        x = self.head(h)
        each = F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return self.loss(self, h, x, each, labels, labels != -100)


def batch(samples: int = 4) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(samples)
    labels = torch.randint(0, V, (samples, 6), generator=drawn)
    labels[torch.rand(samples, 6, generator=drawn) < 0.4] = -100
    return {"ids": torch.randint(0, V, (samples, 6), generator=drawn), "labels": labels}


def agrees(loss: Loss, microbatches: int = 1, dtype: torch.dtype = torch.float64, rel: float = 1e-12) -> None:
    """Loss, which parameters have a gradient, and each gradient are those of eager PyTorch."""
    torch.manual_seed(0)
    model, given = Model(loss).to(dtype), batch()
    expected = model(**given)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    compiled = csc.compile(model, example=given, microbatches=microbatches, check=False)
    assert float(compiled.train_step(given)) == pytest.approx(float(expected.detach()), rel=rel)
    found = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        assert torch.isfinite(gradient).all(), name
        assert (gradient - gradients[name]).abs().max() <= rel * gradients[name].abs().max().clamp(min=1e-3), name


LOSSES: dict[str, Loss] = {
    "a mean": lambda m, h, x, each, y, k: each[k].mean(),
    "a sum": lambda m, h, x, each, y, k: each[k].sum(),
    "over the mask's sum": lambda m, h, x, each, y, k: each[k].sum() / k.sum(),
    "over at least one": lambda m, h, x, each, y, k: each[k].sum() / k.sum().clamp(min=1),
    "over their length": lambda m, h, x, each, y, k: each[k].sum() / len(each[k]),
    "a mean over their number": lambda m, h, x, each, y, k: over_length(each[k]),
    "over their number": lambda m, h, x, each, y, k: x[k].sum() / x[k].numel(),
    "of whole rows": lambda m, h, x, each, y, k: x[k].square().mean(),
    "of a part of each": lambda m, h, x, each, y, k: x[k][:, :5].mean(),
    "of each, then all": lambda m, h, x, each, y, k: x[k].square().mean(-1).mean(),
    "along them": lambda m, h, x, each, y, k: x[k].sum(0).mean(),
    "kept": lambda m, h, x, each, y, k: x[k].sum((0, 1), keepdim=True).mean(),
    "masked_select": lambda m, h, x, each, y, k: each.masked_select(k).mean(),
    "gathered": lambda m, h, x, each, y, k: -F.log_softmax(x, -1)[k].gather(1, y[k][:, None]).mean(),
    "of another dtype": lambda m, h, x, each, y, k: each[k].mean(dtype=torch.float64),
    "among these": lambda m, h, x, each, y, k: x[k].mean(-1)[y[k] % 2 == 0].mean(),
    "of samples": lambda m, h, x, each, y, k: x[:, 0][k.any(1)].mean(),
    "two of one mask": lambda m, h, x, each, y, k: each[k].mean() + 0.1 * x[y != -100].square().mean(),
    "logarithms": lambda m, h, x, each, y, k: torch.log(x[k].abs() + 1e-9).mean(),
    "lengths": lambda m, h, x, each, y, k: x[k].norm(dim=-1).mean(),
    "quotients": lambda m, h, x, each, y, k: (1 / x[k].square().sum(-1)).mean(),
    "cross entropy of each": lambda m, h, x, each, y, k: F.cross_entropy(x[k], y[k], reduction="none").mean(),
    "focal": lambda m, h, x, each, y, k: focal(F.cross_entropy(x[k], y[k], reduction="none")),
    "smoothed logarithms": lambda m, h, x, each, y, k: torch.log(
        F.cross_entropy(x[k], y[k], label_smoothing=0.1, reduction="none")
    ).mean(),
    "nll": lambda m, h, x, each, y, k: F.nll_loss(F.log_softmax(x[k], -1), y[k]),
    "nll of each": lambda m, h, x, each, y, k: F.nll_loss(F.log_softmax(x[k], -1), y[k], reduction="none").mean(),
    "squares": lambda m, h, x, each, y, k: F.mse_loss(x[k], torch.zeros_like(x[k])),
    "distances": lambda m, h, x, each, y, k: F.l1_loss(x[k], torch.zeros_like(x)[k]),
    "huber": lambda m, h, x, each, y, k: F.huber_loss(x[k], x.detach()[k] * 0.5, reduction="sum", delta=0.7),
    "binary": lambda m, h, x, each, y, k: F.binary_cross_entropy_with_logits(
        m.scale(x[k]).squeeze(-1), (y[k] % 2).to(x), pos_weight=torch.tensor(2.0, dtype=x.dtype)
    ),
    "chances": lambda m, h, x, each, y, k: F.binary_cross_entropy(
        torch.sigmoid(m.scale(x[k])).squeeze(-1), (y[k] % 2).to(x)
    ),
    "divergence": lambda m, h, x, each, y, k: F.kl_div(
        F.log_softmax(x[k], -1), F.softmax(x[k] / 3, -1), reduction="batchmean"
    ),
    "ranks": lambda m, h, x, each, y, k: F.margin_ranking_loss(
        x[k][:, 0], x[k][:, 1], torch.ones_like(x[k][:, 0]), margin=0.5
    ),
}


def over_length(rows: torch.Tensor) -> torch.Tensor:
    number = len(rows)
    return rows.mean() * 2 + rows.sum() / number


def focal(each: torch.Tensor) -> torch.Tensor:
    return ((1 - torch.exp(-each)) ** 2.5 * each).mean()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("microbatches", [long(1), 2])
def test_loss_and_gradients(name: str, microbatches: int) -> None:
    agrees(LOSSES[name], microbatches)


@pytest.mark.parametrize("name", ["a mean", "of whole rows", "squares", "over their length", "over their number"])
def test_a_mean_in_16_bits_adds_up_in_32(name: str) -> None:
    """2,400 numbers around one: their sum in bfloat16 would be off by more than a rounding, so would their number."""
    torch.manual_seed(0)
    x = (1 + torch.rand(40, 60, 1) / 8).to(torch.bfloat16).requires_grad_()
    mask = torch.rand(40, 60) < 0.9

    class Ones(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(x.detach().clone())

        def forward(self, k: torch.Tensor) -> torch.Tensor:
            return LOSSES[name](self, None, self.x, self.x[..., 0], None, k)

    model = Ones()
    expected = float(model(mask).detach())
    assert float(csc.compile(model, example={"k": mask}, check=False).train_step({"k": mask})) == expected


def spoiled(x: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
    """Numbers in the rows of the mask alone, as attention gives for padding, with the gradient of x."""
    return x + torch.where(mask[..., None], 0.0, value).to(x)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["cross", "cross of each", "through a layer", "mean", "squares", "written"])
def test_what_is_no_number_in_other_rows_reaches_nothing(name: str, value: float) -> None:
    """A selection keeps it from losses in eager PyTorch: log_softmax of NaN, times a gradient of 0, would be NaN."""
    cases: dict[str, Loss] = {
        "cross": lambda m, h, x, each, y, k: F.cross_entropy(spoiled(x, k, value)[k], y[k]),
        "cross of each": lambda m, h, x, each, y, k: F.cross_entropy(
            spoiled(x, k, value)[k], y[k], reduction="none"
        ).mean(),
        "through a layer": lambda m, h, x, each, y, k: m.scale(spoiled(x, k, value)[k]).square().mean(),
        "mean": lambda m, h, x, each, y, k: spoiled(x, k, value)[k].mean(),
        "squares": lambda m, h, x, each, y, k: F.mse_loss(spoiled(x, k, value)[k], x.detach()[k] * 0.5),
        "written": lambda m, h, x, each, y, k: torch.zeros_like(x).index_put((k,), spoiled(x, k, value)[k]).sum(),
    }
    agrees(cases[name])


LOGITS: dict[str, Loss] = {
    "as they are": lambda m, h, x, each, y, k: F.cross_entropy(m.head(h * 2)[k], y[k]),
    "in another dtype": lambda m, h, x, each, y, k: F.cross_entropy(m.head(h * 2).double()[k], y[k]),
    "flat": lambda m, h, x, each, y, k: F.cross_entropy(m.head(h * 2).view(-1, V)[k.view(-1)], y.view(-1)[k.view(-1)]),
    "moved by one": lambda m, h, x, each, y, k: F.cross_entropy(m.head(h * 2)[:, :-1][k[:, 1:]], y[:, 1:][k[:, 1:]]),
    "read twice": lambda m, h, x, each, y, k: twice_read(m.head(h * 2), y, k),
}


def twice_read(x: torch.Tensor, y: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x[k], y[k]) + 0.1 * x[k].square().mean()


@pytest.mark.parametrize("name", LOGITS)
def test_logits_are_made_of_zeros_in_other_rows(name: str) -> None:
    agrees(LOGITS[name])


def squared(number: int) -> int:
    return number * number


REFUSED: dict[str, tuple[str, Loss]] = {
    "a variance": ("var works along the tokens", lambda m, h, x, each, y, k: x[k].var()),
    "the largest": ("max works along the tokens", lambda m, h, x, each, y, k: x[k].max()),
    "one more than their number": (
        "computes with the number of rows", lambda m, h, x, each, y, k: each[k].sum() / (each[k].numel() + 1)
    ),
    "their length and one": (
        "computes with the number of rows", lambda m, h, x, each, y, k: each[k].sum() / (len(each[k]) + 1)
    ),
    "their number twice": (
        "computes with the number of rows", lambda m, h, x, each, y, k: each[k].sum() / squared(len(each[k]))
    ),
    "a whole number of times": (
        "computes with the number of rows",
        lambda m, h, x, each, y, k: each.mean() + torch.div(y[k].sum(), len(y[k]), rounding_mode="floor"),
    ),
    "one number for all": (
        "makes rows, of which a mask has selected some, larger",
        lambda m, h, x, each, y, k: F.mse_loss(x[k], m.scale.bias.squeeze()),
    ),
    "rows of two masks": (
        "beside those of another", lambda m, h, x, each, y, k: torch.cat([each[k], each[y % 2 == 0]]).mean()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str) -> None:
    why, loss = REFUSED[name]
    with pytest.raises(InputError, match=why) as caught:
        csc.compile(Model(loss), example=batch(), check=False).train_step(batch())
    assert "test_selected_sums.py" in caught.value.where


def test_a_mask_of_the_batch() -> None:
    """Not made of anything: how many it selects is counted behind the batch's entries."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)

        def forward(self, ids: torch.Tensor, kept: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.embed(ids))
            number = len(logits[kept])
            return F.cross_entropy(logits[kept], labels[kept], reduction="sum") / number + logits[kept].mean()

    torch.manual_seed(0)
    model, given = Masked().double(), batch()
    given = {"ids": given["ids"], "kept": given["labels"] != -100, "labels": given["labels"]}
    expected = model(**given)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for mesh in ("pp=1", "pp=2"):
        compiled = csc.compile(model, example=given, mesh=mesh, microbatches=2, check=False)
        compiled.zero_grad()
        assert float(compiled.train_step(given)) == pytest.approx(float(expected.detach()), rel=1e-12)
        for name, parameter in compiled.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-11, atol=1e-14)
