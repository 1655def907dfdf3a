"""Pass `attention`: masks read off a graph let through exactly what the graph's own mask did."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from csc.kernels import packing
from csc.passes.attention import AttentionPass
from csc.passes.shapes import ShapesPass
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn.functional import scaled_dot_product_attention

from csc.analysis.batch_limits import MaskGroups, places_for_features, set_in_samples
from csc.capture.capture import capture
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.program import Options, Program
from csc.torch_private.traces import make_fx

Batch = dict[str, torch.Tensor]
MaskOf = Callable[[Batch], torch.Tensor]
HEADS, WIDTH = 2, 8


class Masked(nn.Module):
    """One attention under the mask that a function makes of the batch."""

    def __init__(self, mask_of: MaskOf, **options: Any) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * HEADS * WIDTH)
        self.mask_of = mask_of
        self.options = options

    def forward(self, x: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        return scaled_dot_product_attention(q, k, v, self.mask_of(batch), **self.options).square().sum()


def places(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    place = torch.arange(tokens)
    return place[:, None], place[None, :]


def causal(batch: Batch) -> torch.Tensor:
    q, k = places(batch["kinds"].shape[1])
    return k <= q


def padded(batch: Batch) -> torch.Tensor:
    return causal(batch)[None, None] & batch["real"][:, None, None, :]


def window(batch: Batch) -> torch.Tensor:
    q, k = places(batch["kinds"].shape[1])
    return ((q - k) < 5) & (q >= k)


def symmetric_window(batch: Batch) -> torch.Tensor:
    q, k = places(batch["kinds"].shape[1])
    return (k - q < 4) & (k > q - 4)


def prefix(batch: Batch) -> torch.Tensor:
    q, k = places(batch["kinds"].shape[1])
    return (k <= q) | (k < 6)


def prefix_by_sample(batch: Batch) -> torch.Tensor:
    q, k = places(batch["kinds"].shape[1])
    return (k <= q)[None, None] | (k < batch["prefix"][:, :, None])[:, None]


def documents(batch: Batch) -> torch.Tensor:
    document = batch["document"]
    return ((document[:, :, None] == document[:, None, :]) & causal(batch)).unsqueeze(1)


def spans(batch: Batch) -> torch.Tensor:
    """Images see themselves, text sees what is earlier: the groups of text (-1) lie apart, and do not count."""
    span = batch["span"]
    image = span >= 0
    own = (span[:, :, None] == span[:, None, :]) & image[:, :, None] & image[:, None, :]
    return (own | causal(batch)).unsqueeze(1) & batch["real"][:, None, None, :]


def modality(batch: Batch) -> torch.Tensor:
    """Text sees what is earlier, an image token every image token."""
    kind = batch["kinds"]
    text, image = kind == 0, kind == 1
    return ((text[:, :, None] & causal(batch)) | (image[:, :, None] & image[:, None, :])).unsqueeze(1)


def packed_positions(batch: Batch) -> torch.Tensor:
    """As HF says it: causal by positions that start again, within a run of positions."""
    position = batch["position"]
    run = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    ordered = position[:, None, :] <= position[:, :, None]
    near = position[:, :, None] - position[:, None, :] < 3
    return ((run[:, :, None] == run[:, None, :]) & ordered & near).unsqueeze(1)


def lower_triangle(batch: Batch) -> torch.Tensor:
    tokens = batch["kinds"].shape[1]
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def above_hidden(batch: Batch) -> torch.Tensor:
    tokens = batch["kinds"].shape[1]
    return ~torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def bias_where(batch: Batch) -> torch.Tensor:
    return torch.where(padded(batch), 0.0, -torch.inf)


def finite(batch: Batch) -> torch.Tensor:
    """Every query sees itself."""
    q, k = places(batch["kinds"].shape[1])
    document = batch["document"]
    seen = ((q - k) < 5) & (q >= k) & (document[:, :, None] == document[:, None, :]).unsqueeze(1)
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def finite_and_padded(batch: Batch) -> torch.Tensor:
    return torch.where(padded(batch), 0.0, -1e4)


def bias_filled(batch: Batch) -> torch.Tensor:
    tokens = batch["kinds"].shape[1]
    return torch.zeros(tokens, tokens).masked_fill(~causal(batch), -float("inf"))


def only_keys(batch: Batch) -> torch.Tensor:
    return batch["real"][:, None, None, :].expand(-1, 1, batch["kinds"].shape[1], -1)


READ: list[MaskOf] = [
    causal, padded, window, symmetric_window, prefix, prefix_by_sample, documents, spans, modality, packed_positions,
    lower_triangle, above_hidden, bias_where, bias_filled, finite, only_keys,
]  # fmt: skip


def batch_of(tokens: int, seed: int = 0) -> Batch:
    """Two samples with documents, images and padding on the left."""
    generator = torch.Generator().manual_seed(seed)
    turns = torch.rand(2, tokens, generator=generator) < 0.2
    document = turns.cumsum(1)
    kinds = document % 2
    real = torch.arange(tokens) >= torch.randint(0, tokens, (2, 1), generator=generator)
    return {
        "x": torch.randn(2, tokens, WIDTH, generator=generator),
        "kinds": kinds,
        "document": document,
        "span": torch.where(kinds == 1, document, -1),
        "position": torch.arange(tokens) - torch.cummax(torch.where(turns, torch.arange(tokens), 0), 1).values,
        "prefix": torch.randint(0, tokens, (2, 1), generator=generator),
        "real": real,
    }


def traced(mask_of: MaskOf, tokens: int = 20, **options: Any) -> tuple[Program, Program]:
    """(before, after) the pass."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = ShapesPass()(capture(Masked(mask_of, **options), batch_of(tokens)), Options())
    return program, AttentionPass()(program, Options())


def values(program: Program, batch: Batch) -> dict[str, Any]:
    """Every value of the graph on a batch."""

    class Recording(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            seen[n.name] = result
            return result

    seen: dict[str, Any] = {}
    torch.manual_seed(1)
    weights = {p.name: torch.randn(p.shape) for p in program.parameters}
    sources = {"input": batch, "parameter": weights, "constant": program.constants}
    arguments = [sources[kind][name] for kind, name in (n.meta["role"] for n in g.placeholders(program.graph))]
    seen["loss"] = Recording(nn.Module(), graph=program.graph).run(*arguments)[0]
    return seen


def mask_in(program: Program, seen: dict[str, Any]) -> torch.Tensor:
    """The dense form of the one mask in a rewritten graph."""
    (call,) = [n for n in g.calls(program.graph) if g.op_name(n) == "csc::attention"]
    q, k, _, packed, rules, kinds, block_q, block_k, *_ = call.args
    queries, keys = seen[q.name].shape[2], seen[k.name].shape[2]
    form = packing.Form(rules, kinds, queries, keys, block_q, block_k)
    return packing.unpack(seen[packed.name], form)[0].dense()


@pytest.mark.slow
@pytest.mark.parametrize("mask_of", READ, ids=lambda f: f.__name__)
def test_lets_through_what_the_mask_did(mask_of: MaskOf) -> None:
    before, after = traced(mask_of)
    assert after.notes == ()
    assert not any(g.op_name(node) == "aten::scaled_dot_product_attention" for node in g.calls(after.graph))
    tables = [val for n in g.calls(after.graph) if (val := g.tensor_value(n)) is not None]
    assert not [val for val in tables if tuple(val.shape[-2:]) == (20, 20)], "a dense mask is left"
    for seed in range(8):
        batch = batch_of(20, seed)
        seen = values(after, batch)
        wanted = mask_of(batch)
        wanted = wanted if wanted.dtype == torch.bool else wanted == 0
        wanted = wanted.expand(2, 1, 20, 20)[:, 0]
        assert torch.equal(mask_in(after, seen).expand(2, -1, -1), wanted)
        if bool(wanted.any(-1).all()):
            torch.testing.assert_close(seen["loss"], values(before, batch)["loss"], rtol=2e-6, atol=0)


def test_is_causal_without_a_mask() -> None:
    before, after = traced(lambda batch: None, is_causal=True)  # type: ignore[arg-type, return-value]
    batch = batch_of(20)
    seen = values(after, batch)
    assert torch.equal(mask_in(after, seen)[0], torch.ones(20, 20, dtype=torch.bool).tril())
    torch.testing.assert_close(seen["loss"], values(before, batch)["loss"], rtol=2e-6, atol=0)


def alternating(batch: Batch) -> torch.Tensor:
    q, k = places(batch["kinds"].shape[1])
    return (q + k) % 2 == 0


def by_head(batch: Batch) -> torch.Tensor:
    tokens = batch["kinds"].shape[1]
    return (torch.arange(HEADS)[:, None, None] >= places(tokens)[0] - places(tokens)[1])[None]


def learned_bias(batch: Batch) -> torch.Tensor:
    q, k = places(batch["kinds"].shape[1])
    return -(q - k).abs().float()


def unequal(batch: Batch) -> torch.Tensor:
    document = batch["document"]
    return (document[:, :, None] != document[:, None, :]).unsqueeze(1)


def unproven_order(batch: Batch) -> torch.Tensor:
    position = batch["position"]
    return (position[:, None, :] <= position[:, :, None]).unsqueeze(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask_of", "why"),
    [
        (unproven_order, "other than the places"),
        (alternating, "remainder"),
        (by_head, "every head"),
        (learned_bias, "a bias made by"),
        (finite_and_padded, "-1e+04 in place of -inf, with which a query that sees no key attends to all"),
        (unequal, "an inequality of groups"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_read_is_kept_and_said(mask_of: MaskOf, why: str) -> None:
    before, after = traced(mask_of)
    (note,) = after.notes
    assert why in note and "test_attention_pass.py" in note
    assert str(before.graph) == str(after.graph)


@pytest.mark.slow
def test_dropout_is_kept_and_said() -> None:
    _, after = traced(causal, dropout_p=0.5)
    assert "dropout" in after.notes[0]


def test_documents_that_are_torn_apart_are_an_error() -> None:
    _, after = traced(documents)
    batch = batch_of(20)
    batch["document"] = torch.tensor([0, 1, 0, 1] * 5).expand(2, -1).contiguous()
    with pytest.raises(InputError, match="group 0 of sample 0 does not stand together"):
        values(after, batch)


class Twice(nn.Module):
    """Two attentions, each of which makes its mask: of the same groups, or the second one of others."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.first, self.second = Masked(documents), Masked(by_pairs if other else documents)

    def forward(self, x: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        return self.first(x, **batch) + self.second(x, **batch)


def by_pairs(batch: Batch) -> torch.Tensor:
    return documents({**batch, "document": batch["document"] // 2})


@pytest.mark.parametrize("other", [False, True])
def test_groups_are_compared_once_for_layers_that_compare_the_same(other: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = ShapesPass()(capture(Twice(other), batch_of(20)), Options())
    masked = AttentionPass()(before, Options())
    assert sum(g.op_name(node) == "csc::group_ranges" for node in g.calls(masked.graph)) == 2
    found = places_for_features(before, masked)
    assert len(found.groups) == 1 + other
    found.check(batch_of(20), "the batch")
    torn = batch_of(20) | {"document": torch.tensor([0, 1, 0, 1] * 5).expand(2, -1).contiguous()}
    kept = batch_of(20)
    for _ in range(2):
        with pytest.raises(InputError, match="the batch: group 0 of sample 0 does not stand together"):
            found.check(torn, "the batch")
        found.check(kept, "the batch")
        found.check(kept, "the batch")
    kept["document"].copy_(torn["document"])  # a loader that fills the same tensors again
    with pytest.raises(InputError, match="does not stand together"):
        found.check(kept, "the batch")


def test_groups_that_no_batch_decides_are_compared_too() -> None:
    def torn() -> torch.Tensor:
        numbers = torch.arange(4).remainder(2)[None]
        return torch.ops.csc.group_ranges(numbers, numbers, numbers >= 0, numbers >= 0)

    groups = MaskGroups(make_fx(torn, tracing_mode="fake")().graph, "model.py:1")
    for _ in range(2):
        with pytest.raises(InputError, match="does not stand together"):
            groups.check([])


def test_placeholders_are_counted_as_the_whole_mask_has_them() -> None:
    """Expanded from the sample, the token or both, as a copy, and with other numbers in each feature."""
    some = torch.tensor([[True, False, True], [False, False, True]])
    masks = [
        some[..., None].expand(2, 3, 4), some[..., None].expand(2, 3, 4).clone(), some[:, :1, None].expand(2, 3, 4),
        some[0].expand(2, 3), some[:, :, None] & torch.tensor([True, False]), torch.ones(2, 0, 3, dtype=torch.bool),
        some[:1, :, None].expand(2, 3, 0),
    ]  # fmt: skip
    for mask in masks:
        assert set_in_samples(mask) == mask.flatten(1).sum(1).tolist() == [int(one.sum()) for one in mask.clone()]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 10**6))
def test_group_ranges_equal_the_dense_comparison(queries: int, keys: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    runs = (torch.rand(2, keys, generator=generator) < 0.3).cumsum(1)
    numbers = torch.randperm(keys + 1, generator=generator)[runs]
    counting = torch.rand(2, keys, generator=generator) < 0.8
    numbers = torch.where(counting, numbers, torch.randint(0, keys + 1, (2, keys), generator=generator))
    asking = torch.randint(0, keys + 1, (2, queries), generator=generator)
    concerned = torch.rand(2, queries, generator=generator) < 0.8
    ranges = torch.ops.csc.group_ranges(asking, numbers, concerned, counting)
    slot = torch.arange(keys)
    found = (ranges[..., :1] <= slot) & (slot < ranges[..., 1:]) & counting[:, None]
    wanted = (asking[..., None] == numbers[:, None]) & counting[:, None] & concerned[..., None]
    assert torch.equal(found, wanted)


def test_a_wrong_rule_would_be_seen() -> None:
    """The comparison above can fail: a shifted bound lets through something else."""
    _, after = traced(causal)
    shifted = replace(after, graph=g.copy_graph(after.graph)[0])
    (bound,) = [n for n in g.calls(shifted.graph) if n.name == "bound"]
    bound.args = (bound.args[0], 2)
    assert not torch.equal(mask_in(shifted, values(shifted, batch_of(20)))[0], causal(batch_of(20)))
