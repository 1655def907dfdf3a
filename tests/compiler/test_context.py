"""Context parallelism: tokens on several ranks, the loss and every gradient of eager PyTorch."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc import masks
from csc.errors import InputError
from csc.ir import graph as g
from csc.reports.verification import verify
from tests.compiler.check_gradients import differing
from tests.compiler.conftest import Models
from tests.models import hf, plain
from tests.tiers import long

FLOAT32 = 1e-5  # what is promised; 1.2e-6 is the most that was seen

Batch = dict[str, torch.Tensor]


def check(model: nn.Module, batch: Batch, gradients: int, **options: Any) -> csc.CompiledModel:
    return parity(csc.compile(model, example=batch, **options), gradients)


def parity(compiled: csc.CompiledModel, gradients: int) -> csc.CompiledModel:
    result = verify(compiled)
    assert result.params_missing == ()
    assert result.params_unexpected == ()
    assert result.params_checked == gradients
    assert result.loss_rel <= FLOAT32
    assert result.grad_rel_max <= FLOAT32
    return compiled


# Lengths that no block divides, and more than one block of 128.
@pytest.mark.slow
@pytest.mark.parametrize(("length", "mesh"), [(57, "cp=2"), long(57, "cp=4"), (600, "cp=4"), long(1000, "cp=2")])
@pytest.mark.long_cases("600-cp=4")
def test_llava(models: Models, length: int, mesh: str) -> None:
    parity(models("llava", hf.llava_batch(length=length), mesh=mesh), 80)


@pytest.mark.slow
@pytest.mark.parametrize(
    "freeze", [["vision_tower"], ["vision_tower", "language_model"]], ids=["encoder", "projector only"]
)
@pytest.mark.long_cases("encoder")
def test_llava_with_stages_and_frozen_parts(models: Models, freeze: list[str]) -> None:
    compiled = models("llava", hf.llava_batch(length=57), mesh="cp=2,pp=2", freeze=freeze)
    parity(compiled, 43 if len(freeze) == 1 else 4)


@pytest.mark.slow
def test_llava_with_replicas_and_microbatches(models: Models) -> None:
    parity(models("llava_tied", hf.llava_batch(samples=8, length=57), mesh="cp=2,dp=2", microbatches=2), 79)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [long("cp=2"), "cp=4,pp=2"])
def test_plain_model_with_skips_into_the_middle(models: Models, mesh: str) -> None:
    """DeepStack adds to a slice of the sequence and concatenates; labels are shifted by slicing; weights are tied."""
    parity(models("plain", plain.plain_batch(length=30), mesh=mesh), 164)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [long("cp=2"), "cp=4", "cp=2,pp=2"])
def test_packed_documents(models: Models, mesh: str) -> None:
    parity(models("packed", mesh=mesh), 30)


@pytest.mark.long
@pytest.mark.slow
def test_speech_in_front_of_text(models: Models) -> None:
    parity(models("whisper", hf.whisper_batch(length=40), mesh="cp=2,pp=2"), 59)


@pytest.mark.slow
def test_full_and_sliding_layers() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=12, vocab_size=100, sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    batch = hf.llava_batch(length=57)
    del batch["pixel_values"]
    compiled = check(Gemma3ForCausalLM(config), batch, 41, mesh="cp=2")
    assert [mask.layers for mask in compiled.program.contexts[-1].masks] == [2, 1]


@pytest.mark.slow
def test_what_a_rank_file_says(tmp_path: Any) -> None:
    """Layers call operators with the plan; embeddings, positions and labels are dispatched; no dense mask is made."""
    compiled = csc.compile(hf.llava(), example=hf.llava_batch(length=57), mesh="cp=2,pp=2")
    compiled.write(tmp_path)
    layer = (tmp_path / "layers/llama_decoder_layer.py").read_text()
    called = re.findall(r"torch\.ops\.csc\.(context_\w+)\.default\([^()]*\bplan\b", layer)
    assert called == ["context_attention", "context_attention_backward"] and "import csc.kernels.context" in layer
    assert "[2, 32, 48]" in layer and "57" not in layer.split('"""')[2]
    tables = (tmp_path / "layers/tables.py").read_text()
    assert 'batch["csc.context"]["language_model"].tokens' in tables
    assert "def language_model_visibility(batch, constants):" in tables
    assert "57, 57" not in tables


def test_labels_are_shifted_before_they_are_spread(models: Models) -> None:
    """The fault of splitting labels first shows on data with structure: the order of the two is in the graph."""
    compiled = models("llava", hf.llava_batch(length=57), mesh="cp=2")
    shared = compiled.program.shared
    labels = dict(zip(shared.output_node().meta["names"], g.outputs(shared)))["labels"]
    names = [g.op_name(node) for node in g.calls(shared) if node in g.ancestors([labels])]
    assert names.index("aten::pad") < names.index("aten::index_select")


class Mixing(nn.Module):
    """A language model of two layers, with something of the test's own between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(plain_layer() for _ in range(2))
        self.head = nn.Linear(16, 50)
        self.between = between

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](self.embed(ids))
        hidden = self.layers[1](self.between(hidden))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class plain_layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(hidden).chunk(3, -1))
        return hidden + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def mixing(between: Callable[[torch.Tensor], torch.Tensor]) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    ids = torch.arange(40).expand(2, -1) % 50
    return Mixing(between), {"ids": ids, "labels": (ids + 1) % 50}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("between", "why"),
    [
        (lambda x: x - x.mean(1, keepdim=True), "aten::mean works along the tokens"),
        long(lambda x: x + x.roll(1, 1), "aten::roll works along the tokens"),
        (lambda x: x.cumsum(1), "aten::cumsum works along the tokens"),
        long(lambda x: torch.softmax(x, 1), "softmax works along the tokens"),
        (lambda x: (x @ x.transpose(1, 2)) @ x, "multiplies tokens with tokens"),
        (lambda x: x.reshape(2, -1, 32).tanh().reshape(2, -1, 16), "joins or cuts neighbouring tokens"),
        long(lambda x: torch.cat([x[:, 20:], x[:, :20]], 1), "moves tokens to other places"),
        (lambda x: torch.cat([x[:, :1], x[:, 1:] - x[:, :-1]], 1), "combines tokens of different places"),
        long(lambda x: x.repeat_interleave(2, 1)[:, ::2], "aten::repeat_interleave works along"),
        (lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1), "takes some of the tokens in steps"),
    ],
)  # fmt: skip
def test_other_operations_that_mix_tokens_are_refused(between: Any, why: str) -> None:
    model, batch = mixing(between)
    whole = csc.compile(model, example=batch)
    with pytest.raises(InputError) as caught:
        whole.with_options(mesh="cp=2").prepare()
    text = str(caught.value)
    assert why in text and "cp=2" in text and "test_context.py" in text and "leave cp at 1" in text
    assert verify(whole).grad_rel_max <= FLOAT32  # without cp it is fine


@torch.library.custom_op("csc_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    """No operation of the table."""
    return x.flip(0).clone()


turned.register_fake(torch.empty_like)
turned.register_autograd(lambda ctx, d: d.flip(0))


def test_an_operation_that_csc_does_not_know_is_an_error_with_its_line() -> None:
    model, batch = mixing(turned)
    known = "csc_tests::turned is an operation of which csc does not know that it keeps"
    with pytest.raises(InputError, match=rf"test_context\.py:\d+: .*{known} samples apart"):
        csc.compile(model, example={name: entry.repeat(2, 1) for name, entry in batch.items()}, microbatches=2)
    with pytest.raises(InputError, match=rf"test_context\.py:\d+: {known} tokens apart.*cp=2"):
        csc.compile(model, example=batch, mesh="cp=2")


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (lambda x: (x.reshape(-1, 16) + x.transpose(0, 1).reshape(-1, 16)).view_as(x), "operands have them in another"),
        (lambda x: x + x.transpose(0, 1).reshape(2, -1, 16), "gives tokens the places of others"),
    ],
)
def test_tokens_in_another_order_are_refused(between: Any, why: str) -> None:
    model, batch = mixing(between)
    with pytest.raises(InputError, match=rf"test_context.py.*{why}.*cp=2"):
        csc.compile(model, example=batch, mesh="cp=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [
        [
            lambda x: torch.cat([x[:, :7] * 2, x[:, 7:30].tanh(), x[:, 30:]], 1),
            lambda x: F.layer_norm(x, (16,)) * (1 + x.mean(-1, keepdim=True)),
            lambda x: x.transpose(0, 1).reshape(-1, 16).tanh().reshape(-1, 2, 16).transpose(0, 1),
            lambda x: (x.reshape(-1, 4) * x.reshape(-1, 4).sin()).view_as(x),
        ],
        [
            lambda x: torch.cat([x[:, :7].softmax(-1) + torch.arange(7.0)[:, None], x[:, 7:]], 1),
            lambda x: x.reshape(-1, 16).softmax(-1).reshape(2, -1, 16),
            lambda x: x * torch.linspace(0.5, 1, 40)[:, None],  # no other length fits
        ],
    ],
    ids=["reordered", "by place"],
)
@pytest.mark.long_cases("reordered")
def test_operations_that_keep_tokens_apart_are_not(steps: list[Any]) -> None:
    model, batch = mixing(lambda x: functools.reduce(lambda value, step: step(value), steps, x))
    check(model, batch, 7, mesh="cp=2")


class WrittenOut(Mixing):
    """Attention as two products with a softmax between them, in one of several writings."""

    def __init__(self, way: str) -> None:
        super().__init__(torch.tanh)
        self.project, self.way = nn.Linear(16, 48), way

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(hidden).chunk(3, -1))
        scores = torch.matmul(q, k.permute(0, 1, 3, 2) if self.way == "divided" else k.transpose(-1, -2))
        scores = scores / 8**0.5 if self.way == "divided" else scores * 8**-0.5
        if self.way == "capped":
            scores = torch.tanh(scores / 0.5) * 0.5
        places = torch.arange(hidden.shape[1])
        lowest = float("-inf") if self.way == "divided" else torch.finfo(torch.float32).min
        mask = torch.zeros(()).masked_fill(places[:, None] < places[None], lowest)[None, None]
        weights = (scores + mask).softmax(-1, dtype=torch.float32).to(v.dtype)
        hidden = hidden + torch.matmul(F.dropout(weights, 0.0), v).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(self.layers[0](hidden)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("way", ["times", "divided", "capped"])
def test_attention_that_is_written_out(way: str) -> None:
    torch.manual_seed(0)
    assert differing(WrittenOut(way), mixing(torch.tanh)[1], mesh="cp=2") == {}


class Shifted(Mixing):
    """What is in front of, or behind the sequence joins it after the layers."""

    def __init__(self, shift: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(lambda x: x)
        self.shift, self.start = shift, nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[1](self.layers[0](self.embed(ids)))
        hidden = self.shift(self.start.expand(hidden.shape[0], 1, 16), hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "shift", [lambda s, x: torch.cat([s, x[:, :-1]], 1), lambda s, x: torch.cat([x[:, 1:], s], 1)], ids=["bos", "eos"]
)
def test_what_shifts_the_sequence_behind_the_layers_is_refused(shift: Any) -> None:
    """A label would be lost: that of the token which the sequence has no place for."""
    torch.manual_seed(0)
    _, batch = mixing(torch.tanh)
    whole = csc.compile(Shifted(shift), example=batch)
    with pytest.raises(InputError, match=r"test_context.py.*in front of the first token or behind the last.*cp=2"):
        whole.with_options(mesh="cp=2").prepare()
    assert verify(whole).grad_rel_max <= FLOAT32


class Grouped(Mixing):
    """Each token sees its group."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.project = nn.Linear(16, 48)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = self.embed(ids)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(hidden).chunk(3, -1))
        mask = groups[:, None, :, None] == groups[:, None, None, :]
        hidden = hidden + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("mesh", ["pp=1", "cp=2"])
def test_groups_that_do_not_stand_together_are_an_error_before_the_step(mesh: str) -> None:
    torch.manual_seed(0)
    _, batch = mixing(torch.tanh)
    batch["groups"] = (torch.arange(40) // 10).expand(2, -1).contiguous()
    compiled = csc.compile(Grouped(), example=batch, mesh=mesh)
    assert verify(compiled).grad_rel_max <= FLOAT32
    torn = {**batch, "groups": (torch.arange(40) % 3).expand(2, -1).contiguous()}
    compiled.zero_grad()
    with pytest.raises(InputError, match=r"test_context.py:\d+: the batch: group 0 of sample 0 .* order the tokens"):
        compiled.train_step(torn)
    assert all(p.grad is None for p in compiled.model.parameters())


@pytest.mark.slow
def test_an_attention_that_cannot_be_read_is_named() -> None:
    class Odd(plain_layer):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            place = torch.arange(hidden.shape[1])
            mask = (place[:, None] + place[None]) % 2 == 0
            q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(hidden).chunk(3, -1))
            return hidden + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)

    model, batch = mixing(lambda x: x)
    model.layers = nn.ModuleList([plain_layer(), Odd()])
    with pytest.raises(InputError, match=r"scaled_dot_product_attention .* keeps PyTorch's attention, .*remainder"):
        csc.compile(model, example=batch, mesh="cp=2")
    model.layers = nn.ModuleList([Odd(), Odd()])
    with pytest.raises(InputError, match=r"no attention along the labels' tokens.*remainder"):
        csc.compile(model, example=batch, mesh="cp=2")


@pytest.mark.slow
def test_layers_before_the_first_that_is_spread_see_the_whole_sequence() -> None:
    model, batch = mixing(lambda x: x - x.mean(1, keepdim=True))
    model.layers = nn.ModuleList([nn.Linear(16, 16), plain_layer()])
    check(model, batch, 7, mesh="cp=2")


def test_too_short_a_sequence_is_refused() -> None:
    model, batch = mixing(lambda x: x)
    short = {name: tensor[:, :3] for name, tensor in batch.items()}
    with pytest.raises(InputError, match=r"the 3 tokens of .* cannot be spread over cp=4"):
        csc.compile(model, example=short, mesh="cp=4")


@pytest.mark.slow
class Typed(Mixing):
    """Tokens see those of their own type, which is made of the hidden state."""

    def __init__(self, types: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(torch.tanh)
        self.project, self.types = nn.Linear(16, 48), types

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        types, places = self.types(hidden), torch.arange(hidden.shape[1])
        seen = (types[:, None, :, None] == types[:, None, None, :]) & (places[:, None] >= places)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(hidden).chunk(3, -1))
        hidden = hidden + F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(self.layers[0](hidden)).flatten(0, 1), labels.flatten())


def test_types_that_have_but_the_sizes_of_hidden_states() -> None:
    torch.manual_seed(0)
    model = Typed(lambda hidden: torch.zeros_like(hidden, dtype=torch.int)[:, :, 0])
    assert differing(model, mixing(torch.tanh)[1], mesh="cp=2") == {}


def test_what_attention_sees_may_not_depend_on_parameters() -> None:
    torch.manual_seed(0)
    model = Typed(lambda hidden: (hidden[:, :, 0] > 0).long())
    with pytest.raises(InputError, match=r"group_ranges is an operation|decides with .* what attention sees"):
        csc.compile(model, mesh="cp=2", example=mixing(torch.tanh)[1], cache=False)


def test_a_model_that_says_its_mask_itself() -> None:
    """csc.attention in the user's own code, its mask made by the data loader."""

    class Layer(plain_layer):
        def forward(self, hidden: torch.Tensor, mask: csc.Mask) -> torch.Tensor:
            q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(hidden).chunk(3, -1))
            return hidden + csc.attention(q, k, v, mask).transpose(1, 2).flatten(2)

    class Packed(Mixing):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(ids)
            for layer in self.layers:
                hidden = layer(hidden, csc.Mask(ranges, None, None, ids.shape[1]))
            return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    model = Packed(lambda x: x)
    model.layers = nn.ModuleList(Layer() for _ in range(2))
    batch = mixing(lambda x: x)[1]
    documents = masks.documents(masks.ids_of_lengths([20, 3, 17]))
    batch["ranges"] = documents.ranges.expand(2, -1, -1, -1).contiguous()
    for mesh in ("cp=1", "cp=2"):
        check(model, batch, 7, mesh=mesh)


def test_latents_that_look_at_the_tokens_are_refused() -> None:
    """A resampler between the layers: few queries of its own over all tokens of the sequence."""

    class Resampling(Mixing):
        def __init__(self) -> None:
            super().__init__(lambda x: x)
            self.latents = nn.Parameter(torch.randn(1, 2, 4, 8))

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden = self.layers[0](self.embed(ids))
            keys = hidden.unflatten(-1, (2, 8)).transpose(1, 2)
            seen = F.scaled_dot_product_attention(self.latents.expand(len(ids), -1, -1, -1), keys, keys)
            hidden = self.layers[1](hidden + seen.mean(2).flatten(1)[:, None])
            return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    with pytest.raises(InputError, match="lets queries that are not of the sequence see its tokens"):
        csc.compile(Resampling(), example=mixing(lambda x: x)[1], mesh="cp=2")


def test_ranks_without_a_label_add_nothing() -> None:
    """All labels on the first tokens: other ranks' own mean is over nothing."""
    model, batch = mixing(lambda x: x)
    labels = batch["labels"].clone()
    labels[:, 3:] = -100
    check(model, {**batch, "labels": labels}, 7, mesh="cp=4")
