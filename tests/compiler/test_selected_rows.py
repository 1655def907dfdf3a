"""Rows that a mask selects: those of one mask beside each other alone, and what others hold reaches nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import csc
from csc.capture.lower.masked_index import same_value
from csc.errors import InputError

WORDS, WIDTH, SAMPLES, TOKENS = 20, 16, 4, 6
Rows = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Selecting(nn.Module):
    """rows(model, features, logits, labels, mask) -> (logits, targets) of some tokens."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows
        self.embed, self.body = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + torch.tanh(self.body(x))
        logits, targets = self.rows(self, x, self.head(x), labels, mask)
        return F.cross_entropy(logits, targets)


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ids, labels = torch.randint(0, WORDS, (SAMPLES, TOKENS)), torch.randint(0, WORDS, (SAMPLES, TOKENS))
    mask = torch.ones(SAMPLES, TOKENS, dtype=torch.long)
    mask[0, 3:], mask[2, :2], mask[3, 1] = 0, 0, 0
    labels[1, :2] = -100
    return {"ids": ids, "labels": labels, "mask": mask}


def trained(rows: Rows, microbatches: int = 2) -> None:
    """Loss and every gradient are those of eager PyTorch."""
    torch.manual_seed(1)
    model, given = Selecting(rows), batch()
    right = copy.deepcopy(model)
    loss = right(**given)
    loss.backward()
    compiled = csc.compile(model, example=given, mesh={"pp": 2}, microbatches=microbatches, check=False, cache=False)
    torch.testing.assert_close(compiled.train_step(given), loss.detach(), rtol=1e-5, atol=0)
    for (name, one), (_, other) in zip(right.named_parameters(), model.named_parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        torch.testing.assert_close(
            other.grad, one.grad, rtol=1e-4, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}"
        )


def gathered(m: Selecting, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> object:
    sample, token = torch.where(labels >= 0)
    targets = labels[sample, token]
    return y[sample, token] * y[sample, token].log_softmax(-1).gather(1, targets[:, None]), targets


def embedded(m: Selecting, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> object:
    at = torch.where(labels >= 0)
    return m.head(x[at] + m.embed(labels[at])), labels[at]


ONE_MASK: dict[str, Rows] = {
    "places": lambda m, x, y, labels, mask: (y[torch.where(labels >= 0)], labels[torch.where(labels >= 0)]),
    "numbers less one": lambda m, x, y, labels, mask: (
        m.head(x[labels > 0] + m.embed(labels[labels > 0] - 1)), labels[labels > 0]
    ),
    "written twice": lambda m, x, y, labels, mask: (y[mask != 0], labels[mask != 0]),
    "another shape": lambda m, x, y, labels, mask: (y[mask != 0], labels.flatten()[mask.flatten() != 0]),
    "masked_select of labels": lambda m, x, y, labels, mask: (y[mask != 0], labels.masked_select(mask != 0)),
    "masked_select of both": lambda m, x, y, labels, mask: (
        y.masked_select((mask != 0).unsqueeze(-1)).view(-1, WORDS), labels.masked_select(mask != 0)
    ),
    "masked_select of flat ones": lambda m, x, y, labels, mask: (
        torch.masked_select(y.view(-1, WORDS), mask.view(-1)[:, None] != 0).view(-1, WORDS),
        labels.view(-1).masked_select(mask.view(-1) != 0),
    ),
    "labels that count": lambda m, x, y, labels, mask: (
        m.head(x[labels >= 0] + m.embed(labels[labels >= 0])), labels[labels >= 0]
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows", [gathered, embedded])
def test_labels_of_rows_that_were_left_out_look_nothing_up(rows: Rows) -> None:
    """Labels of -100, by which the model's own loss reads."""
    trained(rows)


@pytest.mark.parametrize("name", ONE_MASK)
def test_rows_of_one_mask(name: str) -> None:
    trained(ONE_MASK[name])


def others(mask: torch.Tensor) -> torch.Tensor:
    """As many, elsewhere."""
    return (mask != 0).flip(1)


TWO_MASKS: dict[str, Rows] = {
    "logits and labels": lambda m, x, y, labels, mask: (y[others(mask)], labels[mask != 0]),
    "a sum": lambda m, x, y, labels, mask: (y[mask != 0] + y[others(mask)], labels[mask != 0]),
    "a product": lambda m, x, y, labels, mask: (y[mask != 0] * mask[others(mask)][:, None], labels[mask != 0]),
    "side by side": lambda m, x, y, labels, mask: (
        torch.cat([x[mask != 0], x[others(mask)]], -1)[:, :WORDS], labels[mask != 0] % 16
    ),
    "what is selected in columns": lambda m, x, y, labels, mask: (
        y[mask.view(TOKENS, SAMPLES).flip(1).view(SAMPLES, TOKENS) != 0], labels[mask != 0]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TWO_MASKS)
def test_rows_of_two_masks_are_not_taken_for_the_same(name: str) -> None:
    """Each stays where it is in its own whole: one beside another would be the wrong one, without a word."""
    with pytest.raises(InputError, match="one mask has selected beside those of another"):
        trained(TWO_MASKS[name], microbatches=1)


def test_rows_of_another_mask_are_written_in_their_order() -> None:
    def rows(m: Selecting, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> object:
        z = x.clone()
        z[mask != 0] = x[others(mask)] * 2
        return m.head(z).flatten(0, 1), labels.flatten()

    trained(rows)


def overwritten(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = x[mask != 0].clone()
    rows[rows.sum(-1) > 0] = 0.5
    return rows


def returned(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[mask != 0] = overwritten(x, mask)
    return z


def counted(x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The places of rows that the mask selects, and of these those that have a label."""
    (places,) = torch.where(mask.flatten() != 0)
    return places[labels.flatten()[places] >= 0]


AMONG: dict[str, Rows] = {
    "by an entry": lambda m, x, y, labels, mask: (
        y[mask != 0][labels[mask != 0] >= 0], labels[mask != 0][labels[mask != 0] >= 0]
    ),
    "by what they hold": lambda m, x, y, labels, mask: (
        y[mask != 0][y[mask != 0].sum(-1) > 0], labels[mask != 0][y[mask != 0].sum(-1) > 0]
    ),
    "places": lambda m, x, y, labels, mask: (
        y.flatten(0, 1)[counted(x, labels, mask)], labels.flatten()[counted(x, labels, mask)]
    ),
    "written to": lambda m, x, y, labels, mask: (m.head(overwritten(x, mask)), labels[mask != 0]),
    "written back": lambda m, x, y, labels, mask: (m.head(returned(x, mask)).flatten(0, 1), labels.flatten()),
}  # fmt: skip


@pytest.mark.parametrize("name", AMONG)
def test_a_selection_among_selected_rows(name: str) -> None:
    """Rows that the first mask leaves out may seem to be among those of the second."""
    trained(AMONG[name], microbatches=1 if name in ("places", "by what they hold") else 2)


def test_places_among_selected_rows_are_refused() -> None:
    def rows(m: Selecting, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> object:
        own = labels[mask != 0]
        (places,) = torch.where(own >= 0)
        return y[mask != 0][places], own[places]

    with pytest.raises(InputError, match="how many is known only when the batch is there"):
        trained(rows, microbatches=1)


def of_experts(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    (places,) = torch.where(mask.flatten() != 0)
    rows = x[places] / mask.flatten()[places][:, None]
    return torch.zeros_like(x).index_add(0, places, rows)


def written(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[mask != 0] = x[mask != 0] / mask[mask != 0][:, None]
    return z


INFINITE: dict[str, Rows] = {
    "a quotient": lambda m, x, y, labels, mask: (y[mask != 0] / mask[mask != 0][:, None], labels[mask != 0]),
    "a root": lambda m, x, y, labels, mask: (
        y[mask != 0] * torch.sqrt((x.pow(2).sum(-1) * mask)[mask != 0])[:, None], labels[mask != 0]
    ),
    "a logarithm": lambda m, x, y, labels, mask: (
        torch.log(y.softmax(-1)[mask != 0] * mask[mask != 0][:, None]), labels[mask != 0]
    ),
    "a logarithm before a layer": lambda m, x, y, labels, mask: (
        m.head(torch.log(x.abs()[mask != 0] * mask[mask != 0][:, None])), labels[mask != 0]
    ),
    "a length": lambda m, x, y, labels, mask: (
        m.head(x[mask != 0] / (x * mask[..., None])[mask != 0].norm(dim=-1, keepdim=True)), labels[mask != 0]
    ),
    "infinite before": lambda m, x, y, labels, mask: (y[mask != 0] * (1 / mask)[mask != 0][:, None], labels[mask != 0]),
    "rows that are written back": lambda m, x, y, labels, mask: (
        m.head(written(x, mask)).flatten(0, 1), labels.flatten()
    ),
    "rows that are added": lambda m, x, y, labels, mask: (
        m.head(of_experts(x.flatten(0, 1), mask)), labels.flatten()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INFINITE)
def test_rows_that_were_left_out_reach_nothing(name: str) -> None:
    """They are computed with, too: 0 times infinity is no number, and was in every gradient."""
    trained(INFINITE[name], microbatches=1)


def normalised(m: Selecting, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> object:
    rows = F.layer_norm(x[mask != 0], (WIDTH,), m.body.bias, m.body.bias, 0.0)
    return m.head(rows), labels[mask != 0]


def probabilities(m: Selecting, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> object:
    return y[mask != 0], F.one_hot(labels.clamp(min=0), WORDS).float()[mask != 0]


@pytest.mark.parametrize(
    ("rows", "what"),
    [(normalised, "a deviation that may be 0"), (probabilities, "probabilities|depends on the values")],
)
def test_what_rows_that_were_left_out_would_reach_is_refused(rows: Rows, what: str) -> None:
    with pytest.raises(InputError, match=what):
        trained(rows, microbatches=1)


def traced(*masks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[fx.Node]:
    def run(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [mask(a, b) for mask in masks]

    graph = torch.export.export(_Module(run), (torch.ones(4, 4), torch.ones(4))).run_decompositions({}).graph
    (output,) = graph.find_nodes(op="output")
    found: list[fx.Node] = list(output.args[0])
    return found


def deep(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compared pair by pair without a memory this is 2^60 pairs."""
    for _ in range(60):
        a = a + a * 0.5
    return a > 1


class _Module(nn.Module):
    def __init__(self, run: Callable[..., list[torch.Tensor]]) -> None:
        super().__init__()
        self.run = run

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return self.run(a, b)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (lambda a, b: a > 1, lambda a, b: a.view(16) > 1, True),
        (lambda a, b: a.view(16) > 1, lambda a, b: (a > 1)[:, None].squeeze(1), True),
        (lambda a, b: a > 1, lambda a, b: a > 2, False),
        (lambda a, b: a.view(2, 8).flip(1) > 1, lambda a, b: a.flip(1) > 1, False),
        (lambda a, b: a.view(2, 8).cumsum(1) > 1, lambda a, b: a.cumsum(1) > 1, False),
        (lambda a, b: b[:, None] > b[None, :], lambda a, b: b[None, :] > b[:, None], False),
        (lambda a, b: a > b[:, None], lambda a, b: a > b[None, :], False),
        (lambda a, b: torch.rand_like(a) > 1, lambda a, b: torch.rand_like(a) > 1, False),
        (deep, deep, True),
    ],
)
def test_masks_that_are_the_same_in_another_shape(one: object, other: object, same: bool) -> None:
    assert same_value(*traced(one, other), shaped=False) == same  # type: ignore[arg-type]
