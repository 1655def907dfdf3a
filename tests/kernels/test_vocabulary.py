"""A loss over words that ranks divide equals the whole one: the loss and every gradient, whatever the chunks are."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from csc.kernels import vocabulary
from csc.kernels.collectives import numbered
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

IGNORED = -7
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}  # relative, of a norm: terms cancel in it


class Threads:
    """Ranks in threads that meet. told: the elements that one rank told another in all."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.told = ranks, 0
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._given: list[Sequence[torch.Tensor]] = [()] * ranks

    def run(self, work: Callable[[int, torch.Tensor], Any]) -> list[Any]:
        """What work(index, number of the rank's meeting) returns on each rank."""
        meetings = [_Place(self, index) for index in range(self.ranks)]
        with ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(lambda place: work(place.index, numbered(place)), meetings))

    def meet(self, index: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._given[index] = tensors
        self._barrier.wait()
        found = [given[index].clone() for given in self._given]
        self._barrier.wait()
        if index == 0:
            self.told += tensors[0].numel()
        return found


class _Place:
    def __init__(self, threads: Threads, index: int) -> None:
        self.threads, self.index, self.ranks = threads, index, threads.ranks

    def exchange(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.threads.meet(self.index, tensors)


def operands(tokens: int, classes: int, width: int, dtype: torch.dtype, biased: bool, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    labels = torch.randint(0, classes, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.4] = IGNORED
    labels[0] = 0
    return {"x": tensor(tokens, width), "weight": tensor(classes, width), "labels": labels,
            "bias": tensor(classes) if biased else None}  # fmt: skip


def divided(threads: Threads, given: dict[str, Any], rows: int, scale: float, softcap: float, mean: bool) -> list[Any]:
    """(loss, d_x, d_weight, d_bias) of each rank."""
    each = len(given["weight"]) // threads.ranks

    def of_rank(index: int, number: torch.Tensor) -> Any:
        own = slice(index * each, (index + 1) * each)
        bias = None if given["bias"] is None else given["bias"][own]
        mask = [True, True, True, bias is not None]
        return vocabulary.DIVIDED_HEAD(
            given["x"], given["weight"][own], bias, given["labels"], number, scale, softcap, IGNORED, mean, rows, mask
        )

    return threads.run(of_rank)


def whole(given: dict[str, Any], scale: float, softcap: float, mean: bool) -> list[torch.Tensor]:
    """The same in float64, by whole logits."""
    x, weight, bias = (
        None if given[name] is None else given[name].double().requires_grad_(True) for name in ("x", "weight", "bias")
    )
    logits = F.linear(x, weight, bias) * scale
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    loss = F.cross_entropy(logits, given["labels"], ignore_index=IGNORED, reduction="mean" if mean else "sum")
    leaves = [one for one in (x, weight, bias) if one is not None]
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 4), tokens=st.integers(1, 30), each=st.integers(1, 9), width=st.integers(1, 9),
    rows=st.integers(1, 35), dtype=st.sampled_from(list(TOLERANCE)), biased=st.booleans(), mean=st.booleans(),
    scale=st.sampled_from([1.0, 0.3, -2.0]), softcap=st.sampled_from([0.0, 1.5]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_divided_head(ranks, tokens, each, width, rows, dtype, biased, mean, scale, softcap, seed) -> None:
    operand = operands(tokens, ranks * each, width, dtype, biased, seed)
    threads = Threads(ranks)
    found = divided(threads, operand, rows, scale, softcap, mean)
    assert threads.told == 3 * int((operand["labels"] != IGNORED).sum())
    assert all(torch.equal(one[0], found[0][0]) for one in found), "the loss is equal on all ranks"
    joined = [found[0][0], sum(one[1].double() for one in found), torch.cat([one[2] for one in found])]
    joined += [torch.cat([one[3] for one in found])] if biased else []
    for one, other in zip(joined, whole(operand, scale, softcap, mean), strict=True):
        error = float((one.double() - other).norm() / other.norm().clamp(min=0.01))
        assert error <= TOLERANCE[dtype], error


@pytest.mark.parametrize("label", [12, -1])
def test_a_label_that_is_no_word_makes_the_loss_no_number(label: int) -> None:
    operand = operands(9, 12, 3, torch.float32, biased=False, seed=0)
    operand["labels"][4] = label
    assert all(math.isnan(one[0]) for one in divided(Threads(2), operand, 4, 1.0, 0.0, True))


def masked(ranks: int) -> dict[str, Any]:
    """Words that cannot be said, as padding of a vocabulary is: the first of each rank's, and all of the last rank's."""
    operand = operands(20, 4 * ranks, 5, torch.float64, biased=True, seed=1)
    out = torch.arange(4 * ranks)
    out = (out % 4 == 0) | (out >= 4 * (ranks - 1))
    operand["bias"] = operand["bias"].masked_fill(out, -math.inf)
    operand["labels"] = torch.where(operand["labels"] == IGNORED, IGNORED, 1 + torch.arange(20) % 3)
    return operand


@pytest.mark.parametrize("ranks", [2, 3])
def test_words_that_cannot_be_said(ranks: int) -> None:
    operand = masked(ranks)
    found = divided(Threads(ranks), operand, 7, 1.0, 0.0, True)
    joined = [found[0][0], sum(one[1] for one in found), *(torch.cat([one[part] for one in found]) for part in (2, 3))]
    for one, other in zip(joined, whole(operand, 1.0, 0.0, True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_the_whole_loss_over_divided_logits_of_such_words() -> None:
    operand = masked(2)
    logits = F.linear(operand["x"], operand["weight"], operand["bias"])
    expected = F.cross_entropy(logits, operand["labels"], ignore_index=IGNORED)

    def of_rank(index: int, number: torch.Tensor) -> torch.Tensor:
        return vocabulary.DIVIDED_LOSS(logits[:, 4 * index : 4 * index + 4], operand["labels"], number, IGNORED, True)[0]

    for loss in Threads(2).run(of_rank):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_the_whole_loss_over_divided_logits() -> None:
    operand = operands(20, 12, 5, torch.float64, biased=False, seed=1)
    logits = operand["x"] @ operand["weight"].t()
    expected = F.cross_entropy(logits.requires_grad_(True), operand["labels"], ignore_index=IGNORED)
    (gradient,) = torch.autograd.grad(2 * expected, [logits])

    def of_rank(index: int, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = logits.detach()[:, 4 * index : 4 * index + 4].requires_grad_(True)
        loss, _ = vocabulary.DIVIDED_LOSS(own, operand["labels"], number, IGNORED, True)
        return loss.detach(), torch.autograd.grad(2 * loss, [own])[0]

    found = Threads(3).run(of_rank)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat([one for _, one in found], 1), gradient, rtol=1e-12, atol=1e-15)
