"""What tensor-parallel ranks sum: no more than a token's row once for each layer, where what follows is linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import csc
from benchmarks.coverage.models import TEXT
from benchmarks.coverage.more import MORE
from tests.compiler.check_gradients import differing
from tests.compiler.test_routing import MIXTURES, batch
from tests.compiler.test_routing import TEXT as MIXTURE
from tests.tiers import long

WIDTH, VOCABULARY, TOKENS = 16, 50, 80
SAMPLES = {"ids": batch()["ids"], "labels": batch()["labels"]}


class MLP(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Two MLPs, and how a layer is made of them."""

    def __init__(self, made: Callable[..., torch.Tensor], bias: bool) -> None:
        super().__init__()
        self.one, self.other, self.norm = MLP(bias), MLP(bias), nn.LayerNorm(WIDTH)
        self.scale, self.gate = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), nn.Linear(WIDTH, 1)
        self.made = made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.made(self, x, self.norm(x))


class Model(nn.Module):
    def __init__(self, made: Callable[..., torch.Tensor], bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(made, bias) for _ in range(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def exchanged(model: nn.Module, entries: dict[str, torch.Tensor], **options: Any) -> dict[str, list[int]]:
    """The entries of each sum in a layer's F, and of each share, whose gradient is summed in its B."""
    compiled = csc.compile(model, mesh="tp=2", example=entries, cache=False, check=False, **options)
    program = next(one for one in compiled.history() if one.history and one.history[-1].name == "tensor")
    template = max(program.templates.values(), key=lambda one: len(one.graph.nodes))
    found: dict[str, list[int]] = {"csc.all_reduce.default": [], "csc.share.default": []}
    for node in template.graph.nodes:
        if str(node.target) in found:
            found[str(node.target)].append(node.meta["val"].numel())
    return {"sums": found["csc.all_reduce.default"], "shares": found["csc.share.default"]}


def beside(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    return x + layer.one(normed) + layer.other(normed)


def last(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    return layer.one(normed) + layer.other(normed) + x


def gated(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """The gate's gradient is a sum over all features, so parts of it are summed: an entry for each token."""
    return x + layer.one(normed) + torch.sigmoid(layer.gate(normed)) * layer.other(normed)


def difference(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    return x + torch.sub(layer.one(normed), layer.other(normed), alpha=2) / 3


def pooled(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """Few tokens are left of all."""
    return x + layer.one(normed).sum(1, keepdim=True) / 9 + layer.other(x)


def three(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    return x + layer.one(normed) + layer.other(normed) + layer.one(normed * 2)


def looked_up(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """As experts are, and one that all tokens go to behind them: what both read is shared once, before both."""
    rows = normed.reshape(-1, WIDTH)
    several = layer.one(rows[torch.arange(2 * TOKENS) // 2]).view(-1, 2, WIDTH).sum(1)
    return x + (several + layer.other(rows)).view_as(x)


ROWS = TOKENS * WIDTH
FEWER = [
    (beside, [ROWS], [ROWS]),
    (last, [ROWS], [ROWS]),
    (gated, [ROWS], [ROWS, TOKENS]),
    (difference, [ROWS], [ROWS]),
    (pooled, [2 * WIDTH, ROWS], [ROWS, ROWS]),
    (three, [ROWS], [ROWS, ROWS]),
    (looked_up, [ROWS], [ROWS]),
]


@pytest.mark.parametrize(
    ("made", "sums", "shares", "bias"),
    [
        (*case, bias) if bias == place % 2 else long(*case, bias)
        for place, case in enumerate(FEWER)
        for bias in (False, True)
    ],
)
@pytest.mark.long_cases(
    "beside-sums0-shares0-False",
    "gated-sums4-shares4-False",
    "looked_up-sums12-shares12-False",
    "difference-sums7-shares7-True",
    "last-sums3-shares3-True",
)
def test_what_is_added_is_one_sum(made: Any, sums: list[int], shares: list[int], bias: bool) -> None:
    if made in (gated, difference, pooled) and bias:  # a bias that is added to a sum ends what is linear
        sums, shares = [ROWS, ROWS], [one for one in shares if one == ROWS]
    elif made is looked_up and bias:
        sums = [2 * ROWS, ROWS]
    assert exchanged(Model(made, bias), SAMPLES) == {"sums": sums, "shares": shares}
    for options in ({}, {"sequence_parallel": True}):
        assert differing(Model(made, bias), SAMPLES, mesh="tp=2", **options) == {}


def squared(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    sum_ = layer.one(normed)
    return x + sum_ * sum_ + layer.other(normed)


def read_twice(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    sum_ = layer.one(normed)
    return x + sum_ + layer.other(normed) + sum_.tanh()


def twice(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    sum_ = layer.one(normed)
    return x + sum_ + sum_


def scaled(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    return x + layer.scale * layer.one(normed) + layer.other(normed) * layer.scale


def divided_by_it(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    return x + normed / (2 + layer.one(normed)) + layer.other(normed)


def bounded(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    return x + layer.one(normed).clamp(-0.1, 0.1) + layer.other(normed)


def padded(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    return x + F.pad(layer.one(normed), (0, 1), value=1.0).sum(-1, keepdim=True) + layer.other(normed)


def means(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    return x + layer.one(normed).mean(1, keepdim=True) + layer.other(normed)


def repeated(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """More rows than there were: summed before."""
    rows = torch.arange(80) // 2
    return x + layer.one(normed)[:, rows][:, ::2] + layer.other(normed[:, rows])[:, 1::2]


def rounded(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    return x + layer.one(normed).double().sum(1, keepdim=True).float() + layer.other(normed)


def of_itself(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    sum_ = layer.one(normed)
    return x + sum_ * torch.sigmoid(layer.gate(sum_)) + layer.other(normed)


def chained(layer: Any, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    return x + layer.one(normed + layer.other(normed)) * layer.gate(normed)


OTHERS = [
    squared, read_twice, twice, scaled, divided_by_it, bounded, padded, means, repeated, rounded, of_itself, chained,
]  # fmt: skip


@pytest.mark.parametrize("made", OTHERS)
@pytest.mark.long_cases("read_twice", "bounded", "means", "divided_by_it", "chained", "repeated", "of_itself", "padded")
def test_what_is_not_linear_reads_the_sum(made: Any) -> None:
    assert differing(Model(made), SAMPLES, mesh="tp=2") == {}
    assert differing(Model(made, bias=True), SAMPLES, mesh="tp=2", sequence_parallel=True) == {}


def mixture(name: str) -> nn.Module:
    made, numbers = MIXTURES[name]
    architecture = getattr(transformers, made)
    torch.manual_seed(0)
    return architecture(architecture.config_class(**MIXTURE, **numbers))  # type: ignore[no-any-return]


ENTRIES = {"input_ids": batch()["ids"], "labels": batch()["labels"]}


def test_experts_sum_a_token_once() -> None:
    """Not its row of each expert that it goes to, two of them here; in B its gradients are added up before, too. The
    other sums are the embedding's and that of attention.
    """
    rows = TOKENS * MIXTURE["hidden_size"]
    assert exchanged(mixture("Qwen3Moe"), ENTRIES) == {"sums": [rows] * 3, "shares": [rows, rows, 2 * TOKENS]}


@pytest.mark.parametrize("frozen", ["experts", long("gate."), "self_attn", long("model.embed_tokens")])
@pytest.mark.long_cases("self_attn")
def test_experts_with_frozen_weights(frozen: str) -> None:
    model = mixture("Qwen3Moe")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    assert differing(model, ENTRIES, mesh="tp=2") == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Qwen3Moe", {"sequence_parallel": True}), ("DeepseekV3", {}),
        *(long(name, options) for name in ("Mixtral", "Olmoe") for options in ({}, {"sequence_parallel": True})),
        long("Qwen3Moe", {}), long("DeepseekV3", {"sequence_parallel": True}),
    ],
)  # fmt: skip
@pytest.mark.long_cases("DeepseekV3-options1")
def test_mixtures_of_experts(name: str, options: dict[str, Any]) -> None:
    assert max(exchanged(mixture(name), ENTRIES)["sums"]) == TOKENS * MIXTURE["hidden_size"]
    assert differing(mixture(name), ENTRIES, mesh="tp=2", **options) == {}


@pytest.mark.slow
@pytest.mark.long
def test_attention_beside_an_mlp() -> None:
    torch.manual_seed(0)
    model, entries = MORE["Cohere 2"]()
    rows = entries["input_ids"].numel() * TEXT["hidden_size"]
    assert exchanged(model, entries) == {"sums": [rows], "shares": [rows]}
    assert differing(model, entries, mesh="tp=2") == {}
