"""Rows that are picked by number: whose they are, and how many a mean is over, in microbatches and in the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import CscError, InputError
from tests.compiler.test_mixed_steps import is_eagers
from tests.tiers import long

Tensor = torch.Tensor
IDS = torch.tensor([[1, 8, 3, 0, 4], [5, 2, 2, 7, 1], [0, 6, 8, 3, 3], [4, 1, 5, 7, 2]])
TWO_EACH = torch.arange(5).expand(4, 5) < 2
UNEVEN = torch.arange(5) < torch.tensor([[5], [3], [2], [1]])
NONE_LATER = torch.arange(5) < torch.tensor([[2], [3], [0], [0]])


class Rows(nn.Module):
    """pick(rows, ids, mask) -> rows, of which the loss is a mean; early: before all layers, not behind them."""

    def __init__(self, pick: Callable[[Tensor, Tensor, Tensor], Tensor], early: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.pick, self.early = pick, early

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        rows = self.embed(ids)
        if self.early:
            return self.out(torch.tanh(self.hidden(self.pick(rows, ids, mask)))).pow(2).mean()
        return self.pick(self.out(torch.tanh(self.hidden(rows))), ids, mask).pow(2).mean()


def flat(rows: Tensor, places: Tensor) -> Tensor:
    """Rows of a sample by their places in it, as numbers of the flattened batch."""
    count, length = rows.shape[:2]
    return rows.flatten(0, 1)[torch.arange(count) * length + places]


def step(model: nn.Module, *masks: Tensor, check: bool = False, microbatches: int = 2) -> csc.CompiledModel:
    """Steps with each of these masks are eager's."""
    batches = [{"ids": IDS, "mask": mask} for mask in masks]
    compiled = csc.compile(model, mesh="pp=2", example=batches[0], microbatches=microbatches, check=check, cache=False)
    assert all(is_eagers(compiled, batch) for batch in batches)
    return compiled


@pytest.mark.parametrize("early", [True, long(False)])
@pytest.mark.parametrize(
    "pick",
    [
        lambda rows, ids, mask: rows[mask.nonzero(as_tuple=True)],
        lambda rows, ids, mask: rows[torch.where(mask)],
        lambda rows, ids, mask: rows[torch.argwhere(mask)[:, 0], torch.argwhere(mask)[:, 1]],
        lambda rows, ids, mask: rows.flatten(0, 1)[mask.flatten().nonzero().squeeze(1)],
    ],
    ids=["nonzero", "where", "argwhere", "flat"],
)
def test_a_mean_over_rows_that_were_picked_is_over_as_many(
    pick: Callable[[Tensor, Tensor, Tensor], Tensor], early: bool
) -> None:
    """Microbatches weigh by rows, not by samples; one without any adds nothing."""
    step(Rows(pick, early), TWO_EACH, UNEVEN, NONE_LATER)


def gathered(rows: Tensor, labels: Tensor) -> Tensor:
    return rows.log_softmax(-1).gather(1, labels[:, None])


def chosen(rows: Tensor, labels: Tensor) -> Tensor:
    return (rows.log_softmax(-1) * F.one_hot(labels, 9)).sum(-1)


def beside(rows: Tensor, labels: Tensor) -> Tensor:
    return rows * torch.eye(9)[labels]


@pytest.mark.parametrize("read", [gathered, chosen, beside])
def test_labels_of_rows_that_were_not_picked_are_never_looked_up(read: Callable[[Tensor, Tensor], Tensor]) -> None:
    """They are -100 there: an IndexError, or a row of somebody else's."""

    def pick(rows: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        labels = ids.masked_fill(~mask, -100)
        at = torch.where(labels != -100)
        return read(rows[at], labels[at])

    step(Rows(pick), UNEVEN, NONE_LATER)


@pytest.mark.parametrize(
    "places",
    [
        lambda ids, mask: (mask.sum(1) - 1).clamp(min=0),
        lambda ids, mask: ids.argmax(1),
        lambda ids, mask: ids.shape[1] - 1,
        lambda ids, mask: ids[:, 0] % 5,
    ],
    ids=["clamped", "argmax", "last", "remainder"],
)
def test_places_that_lie_within_a_sample_are_its_own(places: Callable[[Tensor, Tensor], Tensor]) -> None:
    step(Rows(lambda rows, ids, mask: flat(rows, places(ids, mask))), UNEVEN, TWO_EACH)


@pytest.mark.parametrize(("microbatches", "check"), [(2, False), (4, True), long(2, True), long(4, False)])
@pytest.mark.parametrize(
    "pick",
    [
        lambda rows, ids, mask: flat(rows, mask.sum(1) - 1),
        lambda rows, ids, mask: flat(rows, mask.sum(1)),
        lambda rows, ids, mask: rows + rows[torch.arange(ids.shape[0]) - 1],
    ],
    ids=["before", "behind", "neighbour"],
)
def test_places_that_may_be_another_samples_are_refused(
    pick: Callable[[Tensor, Tensor, Tensor], Tensor], check: bool, microbatches: int
) -> None:
    with pytest.raises(InputError, match="may be another sample's"):
        step(Rows(pick), UNEVEN, check=check, microbatches=microbatches)


def classes(ids: Tensor) -> Tensor:
    """Run before the step, as Python decides by what it is given."""
    return torch.bincount(ids.flatten(), minlength=9).float() if ids.max() >= 0 else torch.ones(9)


class Distinct(nn.Module):
    """use(model, rows, ids, kinds) -> rows, or the loss: with a statistic of ids, or of kinds, one for each sample."""

    def __init__(self, use: Callable[[Distinct, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.words, self.out = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(4, 9)
        self.use = use

    def loss(self, rows: Tensor, ids: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(self.out(torch.tanh(rows)).flatten(0, 1), ids.flatten(), **options)

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        found = self.use(self, self.embed(ids), ids, kinds)
        return self.loss(found, ids) if found.dim() else found


STATISTICS: dict[str, Callable[[Distinct, Tensor, Tensor, Tensor], Tensor]] = {
    "added": lambda model, rows, ids, kinds: rows + model.words(ids.unique()).mean(0),
    "shares": lambda model, rows, ids, kinds: rows + (lambda _, place, n: n[place] / 10)(
        *ids.unique(return_inverse=True, return_counts=True))[..., None],
    "known": lambda model, rows, ids, kinds: rows / kinds.unique().numel(),
    "number in Python": lambda model, rows, ids, kinds: rows / int(ids.unique().numel()),
    "number": lambda model, rows, ids, kinds: rows / len(ids.unique()),
    "divisor of the loss": lambda model, rows, ids, kinds: model.loss(rows, ids, reduction="sum") / len(ids.unique()),
    "turns": lambda model, rows, ids, kinds: sum((rows * n for n in range(len(kinds.unique()))), rows),
    "inverse": lambda model, rows, ids, kinds: rows + model.words(ids.unique(return_inverse=True)[1]),
    "counts": lambda model, rows, ids, kinds: rows + ids.unique(return_counts=True)[1].float().mean(),
    "largest count": lambda model, rows, ids, kinds: rows * ids.unique(return_counts=True)[1].max(),
    "nearest": lambda model, rows, ids, kinds: rows + (rows[:, :, None] - model.words(ids.unique())).pow(2).sum(
        -1).amin(-1, keepdim=True),
    "attended": lambda model, rows, ids, kinds: rows + torch.softmax(rows @ model.words(ids.unique()).t(), -1)
        @ model.words(ids.unique()),
    "joined": lambda model, rows, ids, kinds: torch.cat(
        [rows, model.words(ids.unique()).mean(0).expand(*ids.shape, 4)], -1)[..., 2:6],
    "compared": lambda model, rows, ids, kinds: rows * (ids > ids.unique().float().mean())[..., None],
    "put": lambda model, rows, ids, kinds: rows * torch.zeros(9).index_put(
        (ids.unique(),), torch.ones(()))[ids.roll(1, 1)][..., None],
    "in the loss": lambda model, rows, ids, kinds: model.loss(rows, ids) + model.words(ids.unique()).pow(2).mean(),
    "scaled loss": lambda model, rows, ids, kinds: model.loss(rows, ids) * model.words(ids.unique()).pow(2).mean(),
    "weights": lambda model, rows, ids, kinds: model.loss(
        rows, ids, weight=1 / (torch.bincount(ids.flatten(), minlength=9) + 1.0)),
    "before the step": lambda model, rows, ids, kinds: rows / classes(ids)[ids][..., None],
    "places": lambda model, rows, ids, kinds: rows + (ids == 3).nonzero().float().mean(0).sum(),
    "places looked up": lambda model, rows, ids, kinds: rows + model.words((ids > 3).nonzero()[:, 1]).mean(0),
    "largest": lambda model, rows, ids, kinds: rows + (ids == ids.max()).nonzero().float()[0].sum(),
}  # fmt: skip
AT_ONCE = ("added", "known", "number in Python", "in the loss")


@pytest.mark.parametrize("name", [name if name in AT_ONCE else long(name) for name in STATISTICS])
def test_a_statistic_of_the_microbatch_is_refused(name: str) -> None:
    """As many distinct tokens in each microbatch as in the batch compared first, but other ones: sizes say nothing."""
    batch = {"ids": torch.arange(5).repeat(4, 1), "kinds": torch.tensor([1, 2, 2, 1])}
    told = r"statistic of all samples|for the microbatch|asks in Python|weighs classes"
    with pytest.raises(InputError, match=told) as raised:
        csc.compile(
            Distinct(STATISTICS[name]), mesh="pp=2", example=batch, microbatches=2, check=False, cache=False
        ).train_step(batch)
    assert "test_rows_by_number.py:" in raised.value.where


@pytest.mark.parametrize("name", ["shares", *(long(name) for name in STATISTICS if name != "shares")])
def test_a_statistic_of_the_only_microbatch_is_the_batchs(name: str) -> None:
    batches = [{"ids": ids, "kinds": torch.tensor([1, 2, 2, 1])} for ids in (IDS, IDS.clamp(max=6))]
    compiled = csc.compile(Distinct(STATISTICS[name]), example=batches[0], cache=False)
    assert all(is_eagers(compiled, batch) for batch in batches)


def test_a_mean_over_samples_counts_them_where_the_loss_reads_no_entry() -> None:
    """The stage of the loss reads nothing of the batch: the microbatches' rows are counted all the same."""
    model = Rows(lambda rows, ids, mask: rows)
    whole = {"ids": IDS, "mask": UNEVEN}
    parts = [{name: entry[:3] for name, entry in whole.items()}, {name: entry[3:] for name, entry in whole.items()}]
    compiled = csc.compile(model, mesh="pp=2", example=parts, microbatches=2, check=False, cache=False)
    model(**whole).backward()
    right = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    compiled.train_step(parts)
    assert right and all(torch.allclose(dict(model.named_parameters())[name].grad, one) for name, one in right.items())


class Smoothed(nn.Module):
    """A class that weighs nothing, beside label smoothing."""

    def __init__(self, penalty: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out, self.penalty = nn.Linear(6, 8), nn.Linear(8, 4), penalty
        self.register_buffer("weighs", torch.tensor([0.0, 1.0, 2.0, 1.0]))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        logits = self.out(torch.tanh(self.hidden(features)))
        loss = F.cross_entropy(logits, labels, weight=self.weighs, label_smoothing=0.1)
        return loss + 0.01 * logits.pow(2).mean() if self.penalty else loss


@pytest.mark.parametrize("penalty", [False, True])
def test_labels_that_weigh_nothing_are_smoothed_all_the_same(penalty: bool) -> None:
    """A microbatch of these alone has something to divide and nothing to divide by: it trains as it does in the whole
    batch, or is an error, and is not left out.
    """
    features = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    some, alone = ({"features": features, "labels": torch.tensor(one)} for one in ([1, 0, 3, 1], [0, 0, 3, 2]))
    compiled = csc.compile(Smoothed(penalty), mesh="pp=2", example=some, microbatches=2, cache=False)
    assert is_eagers(compiled, some)
    if penalty:
        assert is_eagers(compiled, alone)
    else:
        with pytest.raises(CscError, match="the loss of microbatch 0 is not finite"):
            compiled.train_step(alone)


class Segments(nn.Module):
    """A row for each token of one id, as of a model that draws masks: picked by the batch, or by places that it has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.mask = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(
        self, input_ids: Tensor, wanted: Tensor, places: Tensor | None = None, kept: Tensor | None = None
    ) -> Tensor:
        hidden = self.hidden(self.embed(input_ids)).tanh()
        if places is None or kept is None:
            return (self.mask(hidden[input_ids == 8]) - wanted).square().mean()
        rows = self.mask(hidden[torch.arange(hidden.shape[0])[:, None], places])
        return ((rows - wanted).square().mean(-1) * kept).sum() / kept.sum()


def test_tokens_picked_by_the_batch_have_a_remedy_and_both_ways_work() -> None:
    """One entry has a row for each of them: as many as samples, by chance, and not one each."""
    ids = torch.tensor([[8, 1, 8, 2], [1, 8, 2, 3], [3, 4, 5, 6], [4, 5, 8, 6]])
    batch = {"input_ids": ids, "wanted": torch.linspace(-1, 1, 12).view(4, 3)}
    model = Segments()
    with pytest.raises(InputError, match=r"placeholders for .*divide=\{'entry': lambda batch.*hidden\[torch.arange"):
        csc.compile(model, example=batch, microbatches=2).train_step(batch)
    own = lambda batch: (batch["input_ids"] == 8).sum(1)  # noqa: E731
    loss = csc.compile(model, example=batch, microbatches=2, divide={"wanted": own}).train_step(batch)
    torch.testing.assert_close(loss, model(**batch).detach())
    places, kept = torch.tensor([[0, 2], [1, 0], [0, 0], [2, 0]]), torch.tensor([[1.0, 1], [1, 0], [0, 0], [1, 0]])
    slots = {"input_ids": ids, "wanted": torch.zeros(4, 2, 3), "places": places, "kept": kept}
    slots["wanted"][kept.bool()] = batch["wanted"]
    loss = csc.compile(model, example=slots, microbatches=2).train_step(slots)
    torch.testing.assert_close(loss, model(**batch).detach())
