"""A loss over words that ranks divide equals the whole one: the loss and every gradient, whatever the chunks are."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from csc.kernels import linear_cross_entropy
from csc.kernels.collectives import numbered
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.kernels.dense_head import IGNORED, MULTIPLE, dense, in_float64, operands, results, sizes
from tests.launching import PATIENCE

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}  # relative, of a norm


class Threads:
    """Ranks in threads that meet. told: the elements that one rank told another in all."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.told = ranks, 0
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE)
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


def divided(threads: Threads, given: dict[str, Any], rows: int, scale: float, softcap: float, mean: bool) -> list[Any]:
    """(loss, d_x, d_weight, d_bias) of each rank."""
    each = len(given["weight"]) // threads.ranks

    def of_rank(index: int, number: torch.Tensor) -> Any:
        own = slice(index * each, (index + 1) * each)
        bias = None if given["bias"] is None else given["bias"][own]
        mask = [True, True, True, bias is not None]
        return linear_cross_entropy.DIVIDED_HEAD(
            given["x"], given["weight"][own], bias, given["labels"], number, scale, softcap, IGNORED, mean, rows, mask
        )

    return threads.run(of_rank)


def joined(found: Sequence[Any], biased: bool) -> dict[str, torch.Tensor]:
    """What ranks made of one head, as `results` tells it."""
    losses, *gradients = ([one[part].detach().double() for one in found] for part in range(4 if biased else 3))
    of_x, *of_words = gradients
    parts = {"x": sum(of_x), **dict(zip(("weight", "bias"), map(torch.cat, of_words)))}
    return {"loss": losses[0], **{name: MULTIPLE * one for name, one in parts.items()}}


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 4), tokens=st.integers(1, 30), each=st.integers(1, 9), width=st.integers(1, 9),
    rows=st.integers(1, 35), dtype=st.sampled_from(list(TOLERANCE)), biased=st.booleans(), mean=st.booleans(),
    scale=st.sampled_from([1.0, 0.3, -2.0]), softcap=st.sampled_from([0.0, 1.5]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_divided_head(ranks, tokens, each, width, rows, dtype, biased, mean, scale, softcap, seed) -> None:
    operand = operands(tokens, ranks * each, width, dtype, biased, seed)
    operand["labels"][0] = 0
    threads = Threads(ranks)
    found = divided(threads, operand, rows, scale, softcap, mean)
    assert threads.told == 3 * int((operand["labels"] != IGNORED).sum())
    assert all(torch.equal(one[0], found[0][0]) for one in found), "the loss is equal on all ranks"
    exact, settings = in_float64(operand), {"scale": scale, "softcap": softcap, "mean": mean}
    expected, terms = results(dense(**exact, **settings), exact), sizes(exact, **settings)
    for name, one in joined(found, biased).items():
        error = float((one - expected[name]).norm() / max(expected[name].norm(), terms[name]))
        assert error <= TOLERANCE[dtype], f"{name}: {error:.2e}"


@pytest.mark.parametrize("label", [12, -1])
def test_a_label_that_is_no_word_makes_the_loss_no_number(label: int) -> None:
    operand = operands(9, 12, 3, torch.float32, biased=False, seed=0)
    operand["labels"][4] = label
    assert all(math.isnan(one[0].detach()) for one in divided(Threads(2), operand, 4, 1.0, 0.0, True))


def masked(ranks: int) -> dict[str, Any]:
    """Words that cannot be said, as a padded vocabulary has: the first of each rank's, and all of the last rank's."""
    operand = operands(20, 4 * ranks, 5, torch.float64, biased=True, seed=1)
    out = torch.arange(4 * ranks)
    out = (out % 4 == 0) | (out >= 4 * (ranks - 1))
    operand["bias"] = operand["bias"].detach().masked_fill(out, -math.inf).requires_grad_(True)
    operand["labels"] = torch.where(operand["labels"] == IGNORED, IGNORED, 1 + torch.arange(20) % 3)
    return operand


@pytest.mark.parametrize("ranks", [2, 3])
def test_words_that_cannot_be_said(ranks: int) -> None:
    operand = masked(ranks)
    found = divided(Threads(ranks), operand, 7, 1.0, 0.0, True)
    for name, one in results(dense(**operand), operand).items():
        torch.testing.assert_close(joined(found, True)[name], one, rtol=1e-11, atol=1e-13)


def test_the_whole_loss_over_divided_logits_of_such_words() -> None:
    operand = masked(2)
    logits = F.linear(operand["x"], operand["weight"], operand["bias"])
    expected = F.cross_entropy(logits, operand["labels"], ignore_index=IGNORED)

    def of_rank(index: int, number: torch.Tensor) -> torch.Tensor:
        own = logits[:, 4 * index : 4 * index + 4]
        return linear_cross_entropy.DIVIDED_LOSS(own, operand["labels"], number, IGNORED, True)[0]

    for loss in Threads(2).run(of_rank):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_the_whole_loss_over_divided_logits() -> None:
    operand = operands(20, 12, 5, torch.float64, biased=False, seed=1)
    logits = operand["x"] @ operand["weight"].t()
    expected = F.cross_entropy(logits.requires_grad_(True), operand["labels"], ignore_index=IGNORED)
    (gradient,) = torch.autograd.grad(2 * expected, [logits])

    def of_rank(index: int, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = logits.detach()[:, 4 * index : 4 * index + 4].requires_grad_(True)
        loss, _ = linear_cross_entropy.DIVIDED_LOSS(own, operand["labels"], number, IGNORED, True)
        return loss.detach(), torch.autograd.grad(2 * loss, [own])[0]

    found = Threads(3).run(of_rank)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat([one for _, one in found], 1), gradient, rtol=1e-12, atol=1e-15)
