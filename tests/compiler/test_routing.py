"""Context parallelism of experts: tokens that are sorted by expert, worked on in groups and put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import InputError
from tests.compiler.check_gradients import differing
from tests.tiers import long

WIDTH, EXPERTS, VOCABULARY = 16, 4, 50
Batch = dict[str, torch.Tensor]


def batch(samples: int = 2) -> Batch:
    ids = (7 * torch.arange(40) % 50).expand(samples, -1) + 3 * torch.arange(samples)[:, None]
    return {"ids": ids % VOCABULARY, "labels": (ids + 1) % VOCABULARY}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(hidden).chunk(3, -1))
        return hidden + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Experts(nn.Module):
    """Two experts a token, chosen by a router; each pair of token and expert is a row. How rows are sorted, put back,
    and what else is made of them, is a case's own.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.way = way

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, WIDTH)
        chances, chosen = self.router(rows).softmax(-1).topk(2)
        experts, chances = chosen.reshape(-1), chances.reshape(-1)
        if self.way == "sorted by less":
            chosen = experts = experts + chances.detach()
            experts = experts.to(torch.int64)
        keys, order = torch.sort(experts, descending=self.way == "falling")
        if self.way == "two sorts":
            order = torch.argsort(keys.float() + 0.5)
        of_keys = chosen[:, :1].repeat(1, 2).reshape(-1) if self.way == "counts of other keys" else keys
        of_keys = chosen if self.way == "sorted by less" else of_keys
        counts = torch.histc(of_keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        if self.way == "another order":
            rows = hidden.transpose(0, 1).reshape(-1, WIDTH)
        given = rows[order // (4 if self.way == "other tokens" else 2)]
        product = torch.ops.transformers.grouped_mm_fallback
        made = product(given, self.up, ends) + self.bias[keys]
        if self.way == "in pairs":
            made = (made.view(-1, 2, WIDTH) + made.view(-1, 2, WIDTH).flip(1)).view(-1, WIDTH)
        if self.way == "unsorted beside sorted":
            made = made * chances[:, None]
        if self.way == "places":
            made = made * order[:, None]
        if self.way == "mean of rows":
            made = made - made.mean(0)
        if self.way == "counts as values":
            made = made * counts.sum()
        made = product(made.tanh(), self.down, ends) * chances[order][:, None]
        if self.way == "sorted twice":
            back = torch.argsort(order)
        elif self.way == "put back elsewhere":
            back = torch.empty_like(order)
            back[order] = torch.arange(order.shape[0]).flip(0)
        elif self.way == "not put back":
            back = order
        else:
            back = torch.empty_like(order)
            back[order] = torch.arange(order.shape[0])
        return hidden + made[back].view(-1, 2, WIDTH).sum(1).view_as(hidden)


class Routed(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(nn.Sequential(Attention(), Experts(way)) for _ in range(1))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def routed(way: str) -> nn.Module:
    torch.manual_seed(0)
    return Routed(way)


@pytest.mark.parametrize("way", ["", "sorted twice"])
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4,pp=2"])
def test_sorted_worked_on_and_put_back(way: str, mesh: str) -> None:
    assert differing(routed(way), batch(), mesh=mesh) == {}


REFUSED = [
    ("falling", "aten::sort sorts tokens"),
    long("two sorts", "aten::argsort sorts tokens"),
    ("counts of other keys", "aten::histc|grouped_mm_fallback"),
    long("sorted by less", "grouped_mm_fallback"),
    ("other tokens", "aten::index"),
    long("another order", "aten::index combines tokens with others"),
    ("in pairs", "aten::view joins or cuts rows that are sorted by expert"),
    ("unsorted beside sorted", "aten::mul combines rows sorted by expert with rows that are not"),
    ("places", "aten::unsqueeze counts rows of all tokens, or makes something of their places"),
    long("mean of rows", "aten::mean works along the tokens"),
    long("counts as values", "aten::sum counts rows of all tokens, or makes something of their places"),
    long("put back elsewhere", "aten::index_put"),
    ("not put back", "aten::index"),
]


WAYS = [str(getattr(one, "values", one)[0]) for one in REFUSED]


@pytest.mark.parametrize(("way", "why"), REFUSED)
def test_what_is_not_each_tokens_own_is_refused(way: str, why: str) -> None:
    whole = csc.compile(routed(way), example=batch(), cache=False, check=False)
    with pytest.raises(InputError, match=rf"({why}).*test_routing.py|test_routing.py.*({why})"):
        whole.with_options(mesh="cp=2").prepare()


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"mesh": "dp=2,pp=2"}])
@pytest.mark.parametrize("way", ["", "sorted twice"])
def test_samples_stay_apart(way: str, options: dict[str, Any]) -> None:
    """As rows do: the losses of microbatches make that of the batch."""
    assert differing(routed(way), batch(4), **options) == {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long_cases("another order")
def test_nothing_else_is_proven_of_samples(way: str) -> None:
    with pytest.raises(InputError, match="cannot prove that the losses of microbatches make the loss of the batch"):
        csc.compile(routed(way), example=batch(4), microbatches=2, cache=False, check=False)


@pytest.mark.parametrize("way", WAYS)
def test_microbatches_of_one_sample_are_refused_or_compared(way: str) -> None:
    """Two samples are sorted together, so what one alone shows holds for no batch."""
    with pytest.raises(InputError, match="cannot prove that the losses of microbatches of one sample"):
        csc.compile(routed(way), example=batch(), microbatches=2, cache=False, check=False)


TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "pad_token_id": 0,
}  # fmt: skip
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "Olmoe": ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "DeepseekV3": (
        "DeepseekV3ForCausalLM",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0,
            "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8, "v_head_dim": 8,
        },
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [long(name) if name in ("Mixtral", "Olmoe") else name for name in MIXTURES])
@pytest.mark.long_cases("DeepseekV3")
def test_mixtures_of_experts(name: str) -> None:
    """With padding, whose tokens are routed too, and slots without a token."""
    made, numbers = MIXTURES[name]
    architecture = getattr(transformers, made)
    torch.manual_seed(0)
    model = architecture(architecture.config_class(**TEXT, **numbers))
    ids = batch()["ids"][:, :37]
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    entries = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    assert differing(model, entries, mesh="cp=2") == {}
    entries = {name: entry.repeat(2, 1) for name, entry in entries.items()}
    assert differing(model, entries, microbatches=2) == {}
