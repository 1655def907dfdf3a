"""Batches of one sample: the graph of several serves them, and one that starts with them serves several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from csc.passes.loss import ONE_SAMPLE
from torch import nn
from torch.nn import functional as F
from transformers import LlamaModel

import csc
from benchmarks.coverage.models import CASES
from csc.reports.verification import verify
from tests.compiler.check_gradients import differing
from tests.exactness import FLOAT32
from tests.models import hf
from tests.models.images import Batch
from tests.tiers import long


def captures(compiled: csc.CompiledModel) -> int:
    return len(compiled.compiler.captures)


def check(model: nn.Module, first: Batch, others: list[Batch], traced: int, largest: float = 0.0) -> None:
    """Gradients are those of eager for each batch, and the model was traced so often."""
    compiled = csc.compile(model, mesh="pp=2", example=first, cache=False)
    for batch in (first, *others):
        result = verify(compiled, batch)
        assert result.params_missing == () and result.params_unexpected == ()
        assert max(result.loss_rel, result.grad_rel_max) <= largest
    assert captures(compiled) == traced


class Plain(nn.Module):
    """What is done to two linear layers' rows in between comes from outside."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)
        self.between = between

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = self.between(torch.tanh(self.first(x)))
        shifted = labels[:, 1:].contiguous().view(-1)
        return F.cross_entropy(self.second(rows)[:, :-1].reshape(-1, 5), shifted)


def plain_batch(samples: int, length: int = 4) -> Batch:
    x = torch.sin(torch.arange(samples * length * 6.0)).view(samples, length, 6)
    return {"x": x, "labels": torch.arange(samples * length).view(samples, length) % 5}


def if_alone(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2 if rows.shape[0] == 1 else rows * 3


def if_several(rows: torch.Tensor) -> torch.Tensor:
    return rows - rows.mean(0) if rows.shape[0] > 1 else rows


def squeezed(rows: torch.Tensor) -> torch.Tensor:
    """Of one sample the dimension goes, and comes back as another one."""
    thin = rows.squeeze(0)
    return (thin + thin.mean(0)).view(rows.shape)


def asks(rows: torch.Tensor) -> torch.Tensor:
    """Asks for the number, and does the same whatever it is."""
    return torch.tanh(rows) if rows.shape[0] == 1 else rows.tanh()


def of_each(rows: torch.Tensor) -> torch.Tensor:
    """Nothing in it asks how many there are."""
    wide = rows.transpose(0, 1).contiguous().flatten(1).view(rows.shape[1], rows.shape[0], -1)
    return wide.transpose(0, 1) + rows.mean(dim=1, keepdim=True).expand_as(rows)


@pytest.mark.parametrize("order", [(3, 1, 2), (1, 4, 2)])
@pytest.mark.parametrize("between, traced", [(of_each, 1), (if_alone, 2), (if_several, 2), (squeezed, 2)])
@pytest.mark.long_cases("of_each-1-order0", "of_each-1-order1")
def test_a_model_is_traced_again_only_if_it_asks_for_the_number(
    between: Callable[[torch.Tensor], torch.Tensor], traced: int, order: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    first, *others = map(plain_batch, order)
    check(Plain(between), first, others, traced)


class Positions(nn.Module):
    """Three positions for each token, in the first dimension: there is no batch with every row of it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        height, width, time = positions
        rows = self.embed(ids) + torch.sin(height + 2 * width + 3 * time)[..., None]
        return F.cross_entropy(self.head(rows).flatten(0, 1), labels.flatten())


def positions_batch(samples: int) -> Batch:
    ids = torch.arange(samples * 5).view(samples, 5) % 20
    return {"ids": ids, "positions": torch.arange(3 * samples * 5).view(3, samples, 5).float(), "labels": ids}


def test_a_batch_that_cannot_be_doubled_is_traced_as_it_is() -> None:
    torch.manual_seed(0)
    check(Positions(), positions_batch(1), [positions_batch(2)], 2)


class Ended(nn.Module):
    """The first row of each thing, `counts` of them, is a learned one; its code asks whether there is one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.head = nn.Linear(3, 8), nn.Linear(8, 5)
        self.end = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, labels: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = [torch.cat((self.end[None], part[1:])) for part in torch.split(self.row(rows), counts.tolist())]
        hidden = torch.cat(parts)
        hidden = hidden * 2 if counts.shape[0] == 1 else hidden
        return F.cross_entropy(self.head(hidden.tanh()), labels)


def test_a_trace_that_was_ended_does_not_make_others_needed() -> None:
    """Several things and one are two traces, and both serve other numbers of rows in each."""
    torch.manual_seed(0)
    first, *others = (
        {
            "labels": torch.arange(sum(counts)) % 5,
            "rows": torch.sin(torch.arange(sum(counts) * 3.0)).view(-1, 3),
            "counts": torch.tensor(counts),
        }
        for counts in ([2, 3], [3], [3, 2, 4], [4])
    )
    check(Ended(), first, others, 2, FLOAT32)


def one_of(batch: Batch) -> Batch:
    return {name: tensor[:1] for name, tensor in batch.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", long("LLaVA-NeXT"), long("SmolVLM"), long("Qwen2-Audio"), long("Voxtral")])
def test_models_that_start_with_one_sample(name: str) -> None:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    check(model, one_of(batch), [batch], 1, FLOAT32 if name in ("LLaVA-NeXT", "SmolVLM") else 0.0)


class WithLogits(nn.Module):
    """A Llama, whose masks and positions are made otherwise for one sample; its labels, and a mean over all tokens."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.language_model = LlamaModel(hf.llama_config(2))
        self.head = nn.Linear(48, 50)
        self.between = between

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.between(self.head(self.language_model(input_ids=input_ids).last_hidden_state))
        loss = F.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss + 0.1 * x.logsumexp(-1).square().mean()


def tokens(samples: int = 4) -> Batch:
    ids = torch.randint(0, 50, (samples, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(ids % 3 == 0, -100)
    labels[0] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    "options",
    [long({"mesh": "pp=2", "microbatches": 4}), long({"mesh": "dp=2,tp=2", "microbatches": 2}), {"mesh": "cp=2,dp=4"}],
)
def test_two_samples_show_how_the_losses_of_one_combine(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    compiled = csc.compile(WithLogits(torch.Tensor.clone), example=tokens(), cache=False, **options)
    result = verify(compiled)
    assert result.params_missing == () and max(result.loss_rel, result.grad_rel_max) <= FLOAT32
    assert compiled.program.loss_weight == "terms" and captures(compiled) == 2
    found = compiled.train_step(tokens(8), microbatches=8) if options["mesh"] == "pp=2" else None
    if found is not None:
        assert float(found) == pytest.approx(float(compiled.model(**tokens(8)).detach()), rel=1e-5)


@pytest.mark.parametrize("between", [if_alone, if_several])
@pytest.mark.long_cases("if_several")
def test_one_sample_that_is_dealt_with_otherwise_shows_nothing(
    between: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    with pytest.raises(csc.CscError, match=r"cannot prove that the losses of microbatches"):
        csc.compile(WithLogits(between), example=tokens(), microbatches=4, check=False, cache=False)


def doubled(rows: torch.Tensor) -> torch.Tensor:
    """The same to each sample, and other operations where there are several."""
    return rows + rows if rows.shape[0] == 1 else rows * 2


def of_labels(between: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> csc.CompiledModel:
    """A mean over labels, in microbatches of one sample."""
    torch.manual_seed(0)
    return csc.compile(Plain(between), example=plain_batch(4), microbatches=4, cache=False, **options)


@pytest.mark.parametrize("between", [if_several, doubled])
@pytest.mark.long_cases("doubled")
def test_what_nothing_proves_is_not_trained_unless_it_is_compared(
    between: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(csc.InputError, match=r"microbatches of one sample .* of a batch of 2 .*loss_weight='tokens'"):
        of_labels(between, check=False)
    assert of_labels(between, check=False, loss_weight="tokens").program.loss_weight == "tokens"


def test_what_is_compared_trains_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    compiled = of_labels(doubled)
    assert "aten::add becomes aten::mul" in caplog.text and ONE_SAMPLE in compiled.program.notes
    expected = float(compiled.model(**plain_batch(4)).detach())
    assert float(compiled.train_step(plain_batch(4))) == pytest.approx(expected, rel=1e-6)


def test_what_two_samples_show_to_be_wrong_is_seen_in_the_first_step() -> None:
    compiled = of_labels(if_several)
    with pytest.raises(csc.DifferenceError):
        compiled.train_step(plain_batch(4))


def test_what_two_samples_prove_is_not_noted() -> None:
    compiled = of_labels(asks, check=False)
    assert compiled.program.notes == () and captures(compiled) == 2
    result = verify(compiled)
    assert result.params_missing == () and max(result.loss_rel, result.grad_rel_max) <= FLOAT32


class ByTwo(Plain):
    """A loss that is scaled by a number which might be that of two samples, in a trace that is for so many alone."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scales = dict.fromkeys(range(1, 5), 2.0)
        return super().forward(x, labels) * scales[x.shape[0]]


def test_three_samples_are_asked_where_two_may_be_a_number_of_the_model() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"microbatches": 4, "cache": False, "check": False}
    compiled = csc.compile(ByTwo(torch.Tensor.tanh), example=plain_batch(4), **options)
    assert compiled.program.notes == ()
    result = verify(compiled)
    assert result.params_missing == () and max(result.loss_rel, result.grad_rel_max) <= FLOAT32


class Pixels(nn.Module):
    """An attention over pixels, as autoencoders of images have it; what it gives lies channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.GroupNorm(4, 16), nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.project(self.norm(x).flatten(2).transpose(1, 2))
        query, key, value = rows[:, None].chunk(3, -1)
        seen = F.scaled_dot_product_attention(query, key, value)[:, 0].transpose(1, 2)
        return (seen.reshape(x.shape) + x) / 1.0


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Pixels() for _ in range(2)), nn.GroupNorm(2, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.silu(self.norm(x)).square().mean()


def test_a_single_image_that_lies_channel_by_channel_is_normalised() -> None:
    """Its dimension of one sample has another stride than a trace says, with which the operator fails."""
    torch.manual_seed(0)
    assert differing(Autoencoder(), {"x": torch.randn(4, 16, 4, 4)}, microbatches=4) == {}
