"""Losses over tokens that are spread over context-parallel ranks, against eager PyTorch in float64: sums, means, terms,
losses entry by entry; and what is not linear in a sum over tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import LlamaModel

import csc
from csc.errors import InputError
from tests.launching import ranks
from tests.models import hf
from tests.tiers import in_turn, long

V, D, TOKENS = 50, 48, 19
Loss = Callable[..., torch.Tensor]


class Model(nn.Module):
    """A Llama; loss(model, hidden states, logits, token ids, labels) -> a number."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.language_model = LlamaModel(hf.llama_config(2))
        self.head, self.other = nn.Linear(D, V, bias=False), nn.Linear(D, V)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.language_model(input_ids=input_ids).last_hidden_state
        return self.loss(self, hidden, self.head(hidden), input_ids, labels)


def batch() -> dict[str, torch.Tensor]:
    """Two samples without labels, and one whose labels are on the first tokens alone."""
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (8, TOKENS), generator=drawn)
    labels = torch.where(torch.rand(8, TOKENS, generator=drawn) < 0.3, -100, ids)
    labels[:2], labels[3, 5:] = -100, -100
    return {"input_ids": ids, "labels": labels}


def entropy(x: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
    return F.cross_entropy(x.flatten(0, 1), labels.flatten(), **more)


def each(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return entropy(x, labels, reduction="none").view(labels.shape)


LOSSES: dict[str, Loss] = {
    "labels, and a mean over all tokens": lambda m, h, x, i, y: entropy(x, y) + 0.1 * x.logsumexp(-1).square().mean(),
    "shifted, and the tokens but for the last": lambda m, h, x, i, y: (
        entropy(x[:, :-1], y[:, 1:]) + 0.1 * x[:, :-1].logsumexp(-1).square().mean()
    ),
    "two heads": lambda m, h, x, i, y: (
        entropy(x[:, :-1], y[:, 1:]) + 0.3 * entropy(m.other(h)[:, :-2], y[:, 2:])
    ),
    "decay and a number": lambda m, h, x, i, y: entropy(x, y) + 0.1 * m.other.weight.square().sum() + 0.5,
    "a sum over its count": lambda m, h, x, i, y: entropy(x, y, reduction="sum") / (y != -100).sum(),
    "a sum over samples": lambda m, h, x, i, y: entropy(x, y, reduction="sum") / y.shape[0],
    "a sum": lambda m, h, x, i, y: 1e-2 * entropy(x, y, reduction="sum"),
    "a mask's mean": lambda m, h, x, i, y: (each(x, y) * (y != -100)).sum() / (y != -100).sum(),
    "a mean of each sample": lambda m, h, x, i, y: (
        ((each(x, y) * (y != -100)).sum(1) / (y != -100).sum(1).clamp(min=1)).mean()
    ),
    "along one dimension, then others": lambda m, h, x, i, y: (
        entropy(x, y) + h.square().mean(1, keepdim=True).mean(-1).sum() + x.square().sum(1).mean()
    ),
    "tokens joined with samples": lambda m, h, x, i, y: (
        (entropy(x, y, reduction="none") * torch.where(i % 3 == 0, 0.5, 2.0).flatten()).sum() / i.numel()
    ),
    "classes that weigh": lambda m, h, x, i, y: (
        entropy(x, y, weight=torch.linspace(0.5, 2, V, dtype=x.dtype)) + h.abs().mean()
    ),
    "smoothed": lambda m, h, x, i, y: entropy(x, y, label_smoothing=0.1) + h.abs().mean(),
    "log probabilities": lambda m, h, x, i, y: (
        F.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten()) + 1e-3 * h.abs().sum()
    ),
    "entry by entry": lambda m, h, x, i, y: (
        entropy(x, y) + F.mse_loss(x, m.other(h)) + 1e-2 * F.smooth_l1_loss(x, torch.zeros_like(x), reduction="sum")
    ),
    "distilled": lambda m, h, x, i, y: (
        entropy(x, y) + F.kl_div(x.log_softmax(-1), m.other(h).detach().softmax(-1), reduction="batchmean")
    ),
    "uncertainties": lambda m, h, x, i, y: (
        entropy(x, y) * torch.exp(-m.other.bias[0]) + m.other.bias[0] + h.abs().mean() * torch.exp(-m.other.bias[1])
    ),
    "rows of a mask": lambda m, h, x, i, y: entropy(x, y) + x[y != -100].square().mean(),
    "stacked": lambda m, h, x, i, y: torch.stack([entropy(x, y), h.abs().mean()]).sum(),
    "without labels": lambda m, h, x, i, y: F.mse_loss(x, m.other(h)),
    "an embedding beside": lambda m, h, x, i, y: (
        1 - entropy(x, y) + m.language_model.embed_tokens(i).square().mean()
    ),
}  # fmt: skip
MESHES: list[dict[str, Any]] = [
    {"mesh": "cp=2", "microbatches": 1},
    {"mesh": "cp=2,pp=2", "microbatches": 4, "schedule": "zb-h1"},
    {"mesh": "cp=3,dp=2,tp=2", "microbatches": 2, "zero": 2},
]


def agrees(found: float, gradients: dict[str, torch.Tensor], loss: Loss) -> None:
    """Loss, which parameters have a gradient, and each gradient."""
    model = Model(loss).double()
    expected = model(**batch())
    expected.backward()
    assert found == pytest.approx(float(expected.detach()), rel=1e-9)
    right = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == right.keys()
    for name, gradient in gradients.items():
        assert (gradient - right[name]).abs().max() <= 1e-9 * right[name].abs().max(), name


# Each is another sum than one of the rest is made of: of two heads the second alone, a sum with another divisor, ...
NEAR_OTHERS = {
    "shifted, and the tokens but for the last", "a sum over samples", "log probabilities", "stacked", "without labels",
    "an embedding beside", "a sum over its count",
}  # fmt: skip


def named(value: Any) -> str:
    return value if isinstance(value, str) else str(value["mesh"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *in_turn([one for one in LOSSES if one not in NEAR_OTHERS], MESHES),
        *(long(*case) for case in product(sorted(NEAR_OTHERS), MESHES)),
    ],
    ids=named,
)
@pytest.mark.long_cases(
    "two heads-cp=2,pp=2",
    "labels, and a mean over all tokens-cp=2",
    "decay and a number-cp=3,dp=2,tp=2",
    "distilled-cp=3,dp=2,tp=2",
    "classes that weigh-cp=3,dp=2,tp=2",
    "entry by entry-cp=2,pp=2",
    "a mean of each sample-cp=3,dp=2,tp=2",
    "along one dimension, then others-cp=2",
    "rows of a mask-cp=2,pp=2",
)
def test_ranks_add_up_what_their_tokens_have(name: str, options: dict[str, Any]) -> None:
    loss = LOSSES[name]
    compiled = csc.compile(Model(loss).double(), example=batch(), check=False, **options)
    found = float(compiled.train_step(batch()))
    agrees(found, {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}, loss)


REFUSED: dict[str, tuple[str, Loss]] = {
    "a square of a mean": ("does more than add up", lambda m, h, x, i, y: entropy(x, y) + h.mean().square()),
    "a layer behind a mean": ("works along|more than add up", lambda m, h, x, i, y: m.other(h.mean(1)).sum()),
    "a product of two": ("does more than add up", lambda m, h, x, i, y: entropy(x, y) * h.square().mean()),
    "the last token": ("works along the tokens", lambda m, h, x, i, y: F.cross_entropy(x[:, -1], i[:, 0])),
    "the largest": ("", lambda m, h, x, i, y: entropy(x, y) + h.amax()),
    "a quotient": ("does more than add up", lambda m, h, x, i, y: entropy(x, y) / h.square().mean()),
    "labels of its own": ("labels that the model computes", lambda m, h, x, i, y: entropy(x, m.other(h).argmax(-1))),
    "probabilities": ("", lambda m, h, x, i, y: F.cross_entropy(x.flatten(0, 1), m.other(h).softmax(-1).flatten(0, 1))),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.long_cases(
    "a layer behind a mean", "a product of two", "the largest", "a square of a mean", "probabilities"
)
def test_what_is_not_linear_in_a_sum_over_tokens_is_refused(name: str) -> None:
    why, loss = REFUSED[name]
    with pytest.raises(InputError, match=why) as raised:
        csc.compile(Model(loss).double(), example=batch(), mesh="cp=2", check=False)
    assert "test_context_losses.py" in str(raised.value)


def test_no_tokens_to_spread() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.a(pixels).square().mean()

    with pytest.raises(InputError, match="must have token ids or labels"):
        csc.compile(Images(), example={"pixels": torch.randn(4, 4)}, mesh="cp=2")


def _trains(name: str) -> None:
    dist.init_process_group("gloo")
    compiled = csc.compile(Model(LOSSES[name]).double(), example=batch(), mesh="cp=2,dp=2", microbatches=2)
    loss = float(compiled.train_step(batch()))
    gradients = {name: p.grad.tolist() for name, p in compiled.named_parameters() if p.grad is not None}
    print(json.dumps([loss, gradients]))
    dist.barrier()
    dist.destroy_process_group()


def test_in_processes() -> None:
    name = "labels, and a mean over all tokens"
    found = [json.loads(text.splitlines()[-1]) for text in ranks(_trains, 4, name)]
    for loss, gradients in found:
        tensors = {name: torch.tensor(gradient, dtype=torch.float64) for name, gradient in gradients.items()}
        agrees(loss, tensors, LOSSES[name])
