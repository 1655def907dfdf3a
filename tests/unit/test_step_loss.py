"""The loss that a step returns is a number like any other, and its backward says that it was done."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from csc.errors import InputError
from csc.runtime.loss import StepLoss


@pytest.fixture
def loss() -> StepLoss:
    return StepLoss.of(torch.tensor(2.5))


SCALED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda loss: loss,
    lambda loss: loss / 4,
    lambda loss: loss * 0.5,
    lambda loss: 65536.0 * loss,
    lambda loss: loss * torch.tensor(2.0) / 3,
    lambda loss: loss.mean(),
]


@pytest.mark.parametrize("scaled", SCALED)
def test_backward_says_what_comes_next(loss: StepLoss, scaled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(InputError, match=r"has run forward and backward.*optimizer\.step\(\) comes next"):
        scaled(loss).backward()
    with pytest.raises(InputError, match="Leave this line out"):
        scaled(loss).backward(retain_graph=True)


def test_what_has_a_graph_of_its_own_is_differentiated(loss: StepLoss) -> None:
    weight = torch.tensor(3.0, requires_grad=True)
    for whole in (loss * weight, weight * loss, (loss + weight) * 2.5, loss * weight / 1):
        weight.grad = None
        whole.backward()
        assert weight.grad is not None and float(weight.grad) == 2.5


def test_it_is_a_number_like_any_other(loss: StepLoss) -> None:
    plain = torch.tensor(2.5)
    assert isinstance(loss, torch.Tensor) and not loss.requires_grad and loss.grad_fn is None
    assert loss.item() == float(loss) == 2.5 and bool(loss)
    assert (repr(loss), str(loss), f"{loss}", f"{loss:.3f}", f"{loss!r}") == (
        repr(plain), str(plain), f"{plain}", f"{plain:.3f}", f"{plain!r}",
    )  # fmt: skip
    assert loss.numpy() == 2.5 and loss.tolist() == 2.5
    assert loss == plain and loss < 3 and torch.isfinite(loss) and torch.equal(loss, plain)


@pytest.mark.parametrize(
    "made",
    [
        lambda loss: loss + 1, lambda loss: 1 + loss, lambda loss: loss - 1, lambda loss: -loss, lambda loss: loss**2,
        lambda loss: loss.detach(), lambda loss: loss.double(), lambda loss: loss.clone(),
        lambda loss: loss.exp(), lambda loss: torch.stack([loss, loss]), lambda loss: sum([loss, loss]),
        lambda loss: loss * torch.ones(2), lambda loss: torch.zeros(()).add_(loss), lambda loss: loss.view(1),
    ],
)  # fmt: skip
def test_what_is_made_of_it_is_plain(loss: StepLoss, made: Callable[[torch.Tensor], Any]) -> None:
    expected = made(torch.tensor(2.5))
    assert type(made(loss)) is torch.Tensor
    assert torch.equal(made(loss), expected)


def test_sums_of_losses_keep_no_graph(loss: StepLoss) -> None:
    total: Any = 0.0
    for _ in range(3):
        total += loss
    assert type(total) is torch.Tensor and total.grad_fn is None and float(total) == 7.5
    running = torch.zeros(())
    running += loss
    assert float(running) == 2.5


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
def test_copies_are_plain(loss: StepLoss, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert type(copied(loss)) is torch.Tensor and float(copied(loss)) == 2.5
    assert float(copied(loss).add_(1)) == 3.5 and (copied is copy.copy or float(loss) == 2.5)


def test_a_file_of_it_needs_no_class_of_csc(loss: StepLoss) -> None:
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)["loss"]) is torch.Tensor


def test_ranks_sum_it(loss: StepLoss, tmp_path: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        dist.all_reduce(loss)
    finally:
        dist.destroy_process_group()
    assert float(loss) == 2.5
