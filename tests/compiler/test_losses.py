"""Losses of microbatches, unequal in samples and labels too, make the loss and gradients of the whole batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import InputError
from csc.reports.verification import verify

Batch = dict[str, Any]
WORDS, WIDTH = 17, 8


class Model(nn.Module):
    """Two linear layers over tokens; `loss` has the model, the hidden values, the cross entropy of each token, and what
    else the batch holds.
    """

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.loss = loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, **others: Any) -> torch.Tensor:
        hidden = self.first(self.embed(ids)).tanh()
        logits = self.head(hidden)
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return self.loss(self, hidden, each, labels, **others)


def tokens(samples: int = 6, length: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (samples, length), generator=generator)
    labels = ids.roll(1, 1)
    labels[0, 1:] = labels[3, :3] = -100
    return {"ids": ids, "labels": labels}


def cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [{name: t[end - n : end] for name, t in batch.items()} for n, end in zip(sizes, ends)]


def check(model: nn.Module, batch: Batch, given: Any, **options: Any) -> csc.CompiledModel:
    """csc on `given`, the batch or its microbatches, against eager PyTorch on the batch."""
    whole = model(**batch)
    whole.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    compiled = csc.compile(model, example=given, **options)
    loss = compiled.train_step(given)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-5, atol=0)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    return compiled


def masked(model: Any, hidden: Any, each: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return each.sum() / (labels != -100).sum()


def chunked(model: Any, hidden: torch.Tensor, each: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As models write it that save memory: Python's sum begins with 0."""
    chunks = zip(hidden.split(2, dim=1), labels.split(2, dim=1))
    losses = (F.cross_entropy(model.head(h).flatten(0, 1), own.flatten(), reduction="sum") for h, own in chunks)
    return torch.as_tensor(sum(losses) / labels.numel())


LOSSES: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "mean": ("mean", lambda m, h, each, labels: each.mean()),
    "mean(0).sum()": ("mean", lambda m, h, each, labels: each.mean(0).sum()),
    "sum(0).mean()": ("sum", lambda m, h, each, labels: each.sum(0).mean()),
    "sum over shape[0]": ("mean", lambda m, h, each, labels: each.sum() / labels.shape[0]),
    "a masked sum over labels": ("tokens", masked),
    "and a little": ("tokens", lambda m, h, each, labels: each.sum() / ((labels != -100).sum() + 0.5)),
    "not less than six": ("tokens", lambda m, h, each, labels: each.sum() / (labels != -100).sum().clamp(min=6)),
    "chunks in a loop": ("mean", chunked),
    "weights of classes": (
        "tokens",
        lambda m, h, each, labels: F.cross_entropy(
            m.head(h).flatten(0, 1), labels.flatten(), weight=torch.linspace(1, 2, WORDS)
        ),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.long_cases("chunks in a loop", "mean")
def test_microbatches_of_unequal_numbers_of_samples(name: str) -> None:
    weight, loss = LOSSES[name]
    compiled = check(Model(loss), tokens(), cut(tokens(), [1, 3, 2]), microbatches=3)
    assert compiled.program.loss_weight == weight


@pytest.mark.parametrize("mesh", ["dp=2", "dp=3,pp=2"])
@pytest.mark.long_cases("dp=2")
def test_replicas(mesh: str) -> None:
    check(Model(masked), tokens(), tokens(), mesh=mesh)
    check(Model(LOSSES["mean"][1]), tokens(), cut(tokens(), [1, 5] if mesh == "dp=2" else [1, 2, 3]), mesh=mesh)


def centred(model: Any, hidden: torch.Tensor, each: Any, labels: torch.Tensor) -> torch.Tensor:
    apart = hidden - hidden.mean(0)
    return F.cross_entropy(model.head(apart).flatten(0, 1), labels.flatten())


def contrast(model: Any, hidden: torch.Tensor, each: Any, labels: torch.Tensor) -> torch.Tensor:
    pooled = F.normalize(hidden.mean(1), dim=-1)
    return F.cross_entropy(pooled @ pooled.T * 5, torch.arange(pooled.shape[0]))


@pytest.mark.parametrize("loss", [centred, contrast])
@pytest.mark.long_cases("contrast")
def test_samples_that_depend_on_each_other(loss: Callable[..., torch.Tensor]) -> None:
    """They meet once a step, in values of the whole batch; in one microbatch they are its own."""
    assert check(Model(loss), tokens(), tokens(), mesh="pp=2").program.batch_loss is None
    for options in ({"microbatches": 2}, {"mesh": "dp=2"}):
        assert check(Model(loss), tokens(), tokens(), **options).program.batch_loss is not None


def test_a_weight_that_the_user_says_is_taken_where_nothing_compares_it() -> None:
    model = Model(centred)
    compiled = csc.compile(model, example=tokens(), microbatches=2, loss_weight="mean", check=False)
    loss = compiled.train_step(tokens())
    halves = [model(**half).item() for half in cut(tokens(), [3, 3])]
    assert float(loss) == pytest.approx(sum(halves) / 2, rel=1e-6)


# --- where no proof is found: the weights that could be right, and the one that is --------------------------------


def unknown(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Of each sample alone, by an operation of which csc does not know that."""
    return model.head(torch.renorm(hidden, 2, 0, 1.0))


def of_labels(model: Any, hidden: torch.Tensor, each: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(unknown(model, hidden).flatten(0, 1), labels.flatten())


def of_classes(model: Any, hidden: torch.Tensor, each: Any, labels: torch.Tensor) -> torch.Tensor:
    logits = unknown(model, hidden).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), weight=torch.linspace(1, 2, WORDS)) * 2


def of_a_mask(model: Any, hidden: torch.Tensor, each: Any, labels: torch.Tensor) -> torch.Tensor:
    each = unknown(model, hidden).logsumexp(-1)
    return (each * (labels != -100)).sum() / ((labels != -100).sum().clamp(min=12) + 0.0)


def of_samples(model: Any, hidden: torch.Tensor, each: Any, labels: torch.Tensor) -> torch.Tensor:
    return unknown(model, hidden).logsumexp(-1).mean()


def of_none(model: Any, hidden: torch.Tensor, each: Any, labels: torch.Tensor) -> torch.Tensor:
    return unknown(model, hidden).logsumexp(-1).sum()


BY = {of_labels: "tokens", of_classes: "tokens", of_a_mask: "tokens", of_samples: "mean", of_none: "sum"}


@pytest.mark.parametrize("loss", BY)
@pytest.mark.long_cases("of_labels", "of_a_mask", "of_classes")
def test_where_no_proof_is_found_every_weight_is_offered_and_the_right_one_is_right(loss: Any) -> None:
    with pytest.raises(InputError, match="csc cannot prove") as refusal:
        csc.compile(Model(loss), example=tokens(), microbatches=2)
    said = str(refusal.value)
    assert "loss_weight='mean'" in said and "loss_weight='sum'" in said
    if BY[loss] == "tokens":
        assert re.search(r"loss_weight='tokens' .* divided by .*as by aten::\w+ at test_losses.py:\d+", said), said
    else:
        assert "'tokens'" not in said, "nothing could be counted"
    check(Model(loss), tokens(), tokens(), microbatches=2, loss_weight=BY[loss])


@pytest.mark.parametrize("wrong", ["mean", "sum"])
@pytest.mark.long_cases("sum")
def test_a_weight_that_the_comparison_contradicts_is_an_error(wrong: str) -> None:
    compiled = csc.compile(Model(of_labels), example=tokens(), microbatches=2, loss_weight=wrong)
    with pytest.raises(csc.DifferenceError, match=rf"loss_weight='{wrong}' .*loss_weight='tokens' makes the loss"):
        compiled.train_step(tokens())
    halves = csc.compile(Model(of_labels), example=tokens(), microbatches=2, loss_weight=wrong)
    with pytest.raises(csc.DifferenceError, match="loss_weight='tokens' makes the loss"):
        halves.train_step(cut(tokens(), [3, 3]))


def test_no_weight_is_right_where_samples_depend_on_each_other() -> None:
    compiled = csc.compile(Model(centred), example=tokens(), microbatches=2, loss_weight="tokens")
    with pytest.raises(csc.DifferenceError, match=r"No loss_weight makes .*microbatches=1 and dp=1.*check=False"):
        compiled.train_step(tokens())


def equal_in_value(model: Any, hidden: torch.Tensor, each: Any, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each half is that of the whole; its gradients are not."""
    pooled = hidden.mean(0).square().mean()
    return pooled - pooled.detach() + 1


def test_gradients_contradict_a_weight_as_losses_do() -> None:
    compiled = csc.compile(Model(equal_in_value), example=tokens(), microbatches=2, loss_weight="mean")
    with pytest.raises(csc.DifferenceError, match=r"loss_weight='mean' .*gradients .*No loss_weight makes"):
        compiled.train_step(tokens())


def scaled(model: Any, hidden: torch.Tensor, each: Any, labels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    for number in range(4):
        hidden = hidden + model.first(hidden) * scale[number]
    return F.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("samples", [4, 6])
def test_an_entry_without_samples_is_whole_in_every_microbatch(samples: int) -> None:
    batch = {**tokens(samples), "scale": torch.rand(4)}
    compiled = check(Model(scaled), batch, batch, microbatches=2)
    assert [one.name for one in compiled.trainer().program.manifest.inputs if one.whole] == ["scale"]
    halves = [{**half, "scale": batch["scale"]} for half in cut(tokens(samples), [samples // 2] * 2)]
    compiled.zero_grad()
    compiled.train_step(halves)
    halves[1]["scale"] = halves[1]["scale"] + 1
    with pytest.raises(InputError, match="'scale' has no sample dimension, and microbatches differ in it"):
        compiled.train_step(halves)


def test_an_entry_of_one_value_a_sample_is_cut() -> None:
    batch = {**tokens(), "weights": torch.rand(6)}
    check(Model(lambda m, h, each, labels, weights: (each.mean(1) * weights).mean()), batch, batch, microbatches=3)
    normal = Model(lambda m, h, each, labels, weights: (each.mean(1) * (weights / weights.sum())).sum())
    check(normal, batch, cut(batch, [1, 3, 2]), microbatches=3)


def test_entries_that_csc_would_cut_though_they_have_no_samples() -> None:
    batch = {**tokens(), "scale": torch.ones(6, 2)}
    model = Model(lambda m, h, each, labels, scale: each.mean() * scale.sum())
    with pytest.raises(InputError, match=r"test_losses.py:\d+: csc cannot prove"):
        csc.compile(model, example=batch, microbatches=2).train_step(batch)


def test_a_list_is_not_cut() -> None:
    batch = {**tokens(), "factors": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
    model = Model(lambda m, h, each, labels, factors: each.mean() * factors[1])
    with pytest.raises(InputError, match="'factors' is a list of 6 values, as many as there are samples"):
        csc.compile(model, example=batch, microbatches=2)
    check(model, batch, batch)
    batch = {**tokens(), "factors": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)}
    check(Model(lambda m, h, each, labels, factors: each.mean() * factors[2]), batch, batch, microbatches=2)


class ScaledAlong(nn.Module):
    """The samples of `scale` lie along its second dimension, as divide= says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (self.head(torch.tanh(self.layer(x))) * scale.sum(0)[:, None]).square().sum() / x.shape[0]


@pytest.mark.parametrize("rule", ["auto", "mean"])
@pytest.mark.parametrize("names", [("x", "scale"), ("scale", "x")], ids=" before ".join)
@pytest.mark.parametrize("sizes", [(3, 2), (1, 1)], ids=["unlike", "one each"])
def test_microbatches_are_weighed_and_joined_along_the_axis_that_is_told(
    sizes: tuple[int, ...], names: tuple[str, ...], rule: str
) -> None:
    axes = {"x": 0, "scale": 1}
    listed = []
    for number in sizes:
        entries = {"x": torch.randn(number, 4), "scale": torch.rand(2, number)}
        listed.append({name: entries[name] for name in names})
    whole = {name: torch.cat([one[name] for one in listed], axes[name]) for name in names}
    compiled = csc.compile(
        ScaledAlong(), mesh="pp=1", example=listed, microbatches=2, divide={"scale": 1}, loss_weight=rule, cache=False
    )
    assert compiled.check().startswith("checked against eager PyTorch: loss to")
    with torch.no_grad():
        expected = float(ScaledAlong()(**whole))
    assert float(compiled.train_step(listed)) == pytest.approx(expected, rel=1e-6)
    assert verify(compiled, listed).good(1e-5)


def test_what_is_repeated_for_each_sample_and_taken_once_is_the_same_for_all() -> None:
    """As PEFT's prompt tuning looks up its prompts."""

    def prompted(model: Model, hidden: torch.Tensor, each: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        prompts = model.embed(torch.arange(3).unsqueeze(0).expand(len(labels), -1)[:1]).repeat(len(labels), 1, 1)
        return (each + model.first(torch.cat([prompts, hidden], 1)).mean((1, 2))[:, None]).mean()

    batch = tokens()
    check(Model(prompted), batch, batch, microbatches=2, check=False)

    def halved(model: Model, hidden: torch.Tensor, each: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        some = model.embed(torch.arange(3).unsqueeze(0).expand(len(labels), -1)[: len(labels) // 2])
        return each.mean() + some.sum()

    check(Model(halved), batch, batch, microbatches=2, check=False)  # computed over the whole batch


SQUARES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ones": lambda rows: (rows.T @ torch.ones(len(rows), len(rows))).sum(),
    "zeros of its dtype": lambda rows: (rows[:, :1] + rows.new_zeros(len(rows), len(rows))).sum(),
    "a number": lambda rows: (torch.full((len(rows), len(rows)), 0.3) * rows.sum()).sum(),
    "beside rows": lambda rows: torch.cat([rows, torch.ones(len(rows), len(rows))], 1).square().sum(),
    "squared": lambda rows: (rows.T @ torch.ones(len(rows), len(rows))).square().sum(),
}


@pytest.mark.parametrize("square", SQUARES.values(), ids=SQUARES)
def test_a_table_with_a_row_and_a_column_for_each_sample(square: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Its columns are as many as a microbatch has samples, and not as the batch has: computed over the whole batch."""

    def loss(model: Model, hidden: torch.Tensor, each: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return each.mean() + square(hidden.mean(1))

    check(Model(loss), tokens(), tokens(), microbatches=2, check=False)
