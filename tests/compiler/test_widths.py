"""Microbatches of many widths are padded to a few where that changes nothing, and nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.check.eager import eager_step
from csc.driver import batches
from csc.driver.compiled import CompiledModel
from csc.errors import DifferenceError, InputError

WORDS, WIDE = 50, 16
Batch = dict[str, torch.Tensor]


class Text(nn.Module):
    """Causal attention over what the mask shows, and the cross entropy of labels."""

    def __init__(self, longest: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDE), nn.Embedding(longest, WIDE)
        self.layers = nn.ModuleList(nn.Linear(WIDE, 4 * WIDE) for _ in range(2))
        self.head = nn.Linear(WIDE, WORDS)

    def positions(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.arange(ids.shape[1], device=ids.device)

    def sees(self, mask: torch.Tensor) -> torch.Tensor:
        width = mask.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=mask.device).tril()
        own = torch.eye(width, dtype=torch.bool, device=mask.device)
        return (causal & mask[:, None, :].bool()) | own  # a token of padding sees itself

    def hidden(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(self.positions(ids))
        for layer in self.layers:
            q, k, v, gate = layer(x).chunk(4, -1)
            seen = F.scaled_dot_product_attention(
                q[:, None], k[:, None], v[:, None], attn_mask=self.sees(mask)[:, None]
            )
            x = x + seen[:, 0] * gate.sigmoid()
        return x

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.hidden(input_ids, attention_mask), labels)


class Dropping(Text):
    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().loss(F.dropout(x, 0.1, self.training), labels)


class MeanOfAllTokens(Text):
    """A label of padding counts."""

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten().clamp(min=0))


class FromTheEnd(Text):
    def positions(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.shape[1] - 1 - torch.arange(ids.shape[1], device=ids.device)


class Unmasked(Text):
    def sees(self, mask: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(mask), mask.shape[1], mask.shape[1], dtype=torch.bool, device=mask.device)


class ScaledByWidth(Text):
    def hidden(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().hidden(ids, mask) * (1 + ids.shape[1] / 64)


class LargestOfAll(Text):
    """What may be read of padding depends on values."""

    def hidden(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = super().hidden(ids, mask)
        return x + x.amax(1, keepdim=True)


class BesideAllTokens(Text):
    """A small term beside the loss, of the router of experts, say."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.hidden(input_ids, attention_mask)
        return self.loss(x, labels) + 1e-3 * (self.layers[0](x).softmax(-1).mean((0, 1)) ** 2).sum()


class ReadsTheMasksWidth(Text):
    """The mean over the places of the mask, of what is masked."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.hidden(input_ids, attention_mask)
        aside = (x.square().sum(-1) * attention_mask).sum() / attention_mask.numel()
        return self.loss(x, labels) + 0.01 * aside


def batch(width: int, samples: int = 4, left: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(width)
    lengths = torch.randint(width // 2, width + 1, (samples, 1), generator=generator)
    lengths[0] = width
    places = torch.arange(width)
    mask = places >= width - lengths if left else places < lengths
    ids = torch.randint(1, WORDS, (samples, width), generator=generator).where(mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def compiled_of(model: nn.Module, example: Any = None, **options: Any) -> CompiledModel:
    options = {"microbatches": 2, "cache": False, **options}
    made: CompiledModel = csc.compile(model, example=batch(21) if example is None else example, **options)
    made.parameters()
    return made


def sizes(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Widths of the programs that were made, in their order."""
    texts = [one.message for one in caplog.records if one.message.startswith("a program for microbatches of")]
    return [int(text.split("'input_ids': [")[1].split("]")[0].split(", ")[1]) for text in texts]


def steps_are_eagers(compiled: CompiledModel, batches: list[Batch]) -> None:
    model = compiled.model
    trainable = {name for name, _ in model.named_parameters()}
    for one in batches:
        right = eager_step(model, one, trainable)
        loss = compiled.train_step(one)
        assert float(loss) == pytest.approx(right.loss, rel=1e-5)
        for name, parameter in compiled.named_parameters():
            torch.testing.assert_close(parameter.grad, right.gradients[name], rtol=1e-4, atol=1e-6)
        compiled.zero_grad()


@pytest.fixture(autouse=True)
def listened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "csc")


def test_widths_share_programs(caplog: pytest.LogCaptureFixture) -> None:
    """Those within an eighth of the example's have its program; gradients are eager's of the batch as it came."""
    compiled = compiled_of(Text())
    steps_are_eagers(compiled, [batch(width) for width in (20, 18, 21, 13, 16, 9, 24, 23, 14)])
    assert sizes(caplog) == [21, 16, 24]
    told = [one.message for one in caplog.records if "are padded to a few" in one.message]
    assert len(told) == 1 and "those of 20 tokens to 21" in told[0] and "widths=False" in told[0]


def test_microbatches_of_one_step_are_padded_each(caplog: pytest.LogCaptureFixture) -> None:
    compiled = compiled_of(Text())
    for first, second in ((12, 19), (15, 17)):
        ready = [batch(first, 2), batch(second, 2)]
        counts = [int((one["labels"] != -100).sum()) for one in ready]
        losses = [eager_step(compiled.model, one, {"head.weight"}) for one in ready]
        right = sum(one.loss * count for one, count in zip(losses, counts)) / sum(counts)
        assert float(compiled.train_step(ready)) == pytest.approx(right, rel=1e-5)
    assert sizes(caplog) == [21, 16]


def test_padding_on_the_left_stays_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    compiled = compiled_of(Text(), batch(21, left=True))
    steps_are_eagers(compiled, [batch(20, left=True), batch(18, left=True)])
    assert sizes(caplog) == [21]


def test_dropout_is_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    compiled = compiled_of(Dropping())
    assert torch.isfinite(compiled.train_step(batch(20)))
    assert sizes(caplog) == [21]


WRONG = {
    MeanOfAllTokens: "depend on the token",
    FromTheEnd: "are others",
    Unmasked: "depend on the token",
    ScaledByWidth: "are others",
    LargestOfAll: "may choose among tokens by their values",
    BesideAllTokens: "depend on the token",
    ReadsTheMasksWidth: "are others",
}


@pytest.mark.parametrize("model", WRONG)
@pytest.mark.long_cases("MeanOfAllTokens", "FromTheEnd", "ReadsTheMasksWidth", "BesideAllTokens")
def test_what_padding_would_change_is_not_padded(
    model: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is tried where the graph shows that the loss is no mean over targets."""
    compiled = compiled_of(model(), batch(21), microbatches=1)
    steps_are_eagers(compiled, [batch(20)])
    assert sizes(caplog) == [21, 20]
    counts = compiled.trainer().program.manifest.loss.weight in batches.COUNTING
    told = [one.message for one in caplog.records if "are not padded to 21" in one.message]
    assert len(told) == counts and all(WRONG[model] in one for one in told)  # type: ignore[index]
    assert counts or model in (BesideAllTokens, ReadsTheMasksWidth)


def test_a_trial_by_itself_tells_what_padding_changes() -> None:
    """Whatever the graph of the loss shows."""
    for model, why in WRONG.items():
        if model is LargestOfAll:  # which may pass over a token of padding here, and not in another batch
            continue
        own = model()
        trainable = {name for name, _ in own.named_parameters()}
        assert why in batches.tried(own, batch(20), 24, trainable), model
    for right in (Text, Dropping):
        own = right()
        before = [parameter.clone() for parameter in own.parameters()]
        trainable = {name for name, _ in own.named_parameters()}
        assert batches.tried(own, batch(20), 24, trainable) == batches.SAME
        assert all(parameter.grad is None for parameter in own.parameters())
        assert all(map(torch.equal, own.parameters(), before))
    assert "fails" in batches.tried(Text(longest=21), batch(20), 24, {"head.weight"})
    assert "16 bits" in batches.tried(Text().bfloat16(), batch(20), 24, {"head.weight"})


def test_a_table_of_places_that_ends_is_not_passed(caplog: pytest.LogCaptureFixture) -> None:
    compiled = compiled_of(Text(longest=23))
    steps_are_eagers(compiled, [batch(20), batch(22)])
    assert sizes(caplog) == [21, 22]


def test_entries_that_nobody_knows_to_pad(caplog: pytest.LogCaptureFixture) -> None:
    class Placed(Text):
        def forward(self, position_ids: torch.Tensor, **entries: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            loss: torch.Tensor = super().forward(**entries)
            return loss + 0 * self.places(position_ids).sum()

    def placed(width: int) -> Batch:
        return {**batch(width), "position_ids": torch.arange(width).expand(4, -1).contiguous()}

    compiled = compiled_of(Placed(), placed(21))
    compiled.train_step(placed(20))
    assert sizes(caplog) == [21, 20]
    with pytest.raises(InputError, match="'position_ids' has a value for each token"):
        compiled_of(Placed(), placed(21), widths=True)


def test_nobody_tries_what_is_not_wanted(caplog: pytest.LogCaptureFixture) -> None:
    for options in ({"widths": False}, {"check": False}):
        caplog.clear()
        compiled = compiled_of(Text(), **options)
        compiled.train_step(batch(20))
        assert sizes(caplog) == [21, 20]


def test_widths_that_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    compiled = compiled_of(Text(), widths=[32, 16])
    steps_are_eagers(compiled, [batch(width) for width in (20, 9, 30, 16, 21)])
    assert sizes(caplog) == [32, 16]
    compiled.train_step(batch(33))
    assert sizes(caplog) == [32, 16, 33]
    caplog.clear()
    steps_are_eagers(compiled_of(Text(), widths=True), [batch(20), batch(22)])
    assert sizes(caplog) == [24]


def test_widths_that_are_asked_for_are_compared_with_the_batch_as_it_came() -> None:
    """Nothing is tried, so the check is what tells; a step that it has not seen is the user's word."""
    compiled = compiled_of(FromTheEnd(), widths=[24])
    with pytest.raises(DifferenceError) as caught:
        compiled.train_step(batch(20))
    assert "widths=False" in caught.value.__notes__[0]


@pytest.mark.parametrize("wrong", [[], [0], [True], "16", 16, [16.0]])
def test_widths_that_are_none(wrong: Any) -> None:
    with pytest.raises(InputError, match="widths is"):
        csc.compile(Text(), example=batch(21), widths=wrong)


def test_evaluation_is_tried_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    compiled = compiled_of(Text())
    for width in (20, 18):
        right = eager_step(compiled.model, batch(width), set())
        assert float(compiled.eval_step(batch(width))) == pytest.approx(right.loss, rel=1e-5)
    assert sizes(caplog) == [21, 21]


@pytest.mark.parametrize(("width", "wanted"), [(1, 8), (8, 8), (9, 16), (63, 64), (64, 64), (65, 72), (127, 128),
                                               (129, 144), (1000, 1024), (1025, 1152), (4097, 4608)])  # fmt: skip
def test_rounded(width: int, wanted: int) -> None:
    assert batches.rounded(width) == wanted
    assert wanted <= max(8, width * 9 / 8) or width < 64


def test_the_widths_of_a_run_are_few() -> None:
    assert len({batches.rounded(width) for width in range(128, 4096)}) == 41
