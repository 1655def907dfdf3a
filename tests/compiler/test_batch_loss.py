"""Losses whose samples meet: computed once a step over values of the whole batch, with eager PyTorch's gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import CscError, InputError, ScheduleError
from tests import launching
from tests.compiler import batch_loss_worker
from tests.compiler.test_losses import cut
from tests.tiers import long

Batch = dict[str, torch.Tensor]
WORDS, WIDTH = 17, 8
Loss = Callable[["Towers", torch.Tensor, torch.Tensor], torch.Tensor]


class Towers(nn.Module):
    """Two towers; `loss` has the model and the features of both."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text, self.image = nn.Embedding(WORDS, WIDTH), nn.Linear(6, 12)
        self.text_projection, self.image_projection = nn.Linear(WIDTH, WIDTH), nn.Linear(12, WIDTH)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-2.0))
        self.loss = loss

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        texts = self.text_projection(self.text(ids).mean(1))
        return self.loss(self, texts, self.image_projection(self.image(pixels).relu()))


def batch(samples: int = 8, length: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (samples, length), generator=generator)
    return {"ids": ids, "pixels": torch.randn(samples, 6, generator=generator)}


def clip(model: Towers, texts: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    logits = F.normalize(texts, dim=-1) @ F.normalize(images, dim=-1).t() * model.scale.exp() + 0 * model.bias
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def siglip(model: Towers, texts: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    logits = texts @ images.t() * model.scale.exp() + model.bias
    signs = 2 * torch.eye(logits.shape[0], device=logits.device) - 1
    return -F.logsigmoid(signs * logits).sum(-1).mean()


def nt_xent(model: Towers, texts: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Two views of each sample, one behind the other."""
    both = F.normalize(torch.cat([texts, images]), dim=1)
    count = both.shape[0] // 2
    alike = (both @ both.t()).masked_fill(torch.eye(both.shape[0], dtype=torch.bool), -1e9) * model.scale + model.bias
    return F.cross_entropy(alike, torch.cat([torch.arange(count) + count, torch.arange(count)]))


def vicreg(model: Towers, texts: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    total = F.mse_loss(texts, images) + model.bias.square()
    for one in (texts, images):
        apart = one - one.mean(0)
        covariance = apart.t() @ apart / (one.shape[0] - 1)
        total = total + F.relu(1 - torch.sqrt(one.var(0) + 1e-4)).mean() * model.scale + covariance.square().sum() / 8
    return total


def balanced(model: Towers, texts: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """A loss of each sample, and one of how all are shared out among experts."""
    chances = texts.softmax(-1)
    counts = F.one_hot(chances.topk(2, -1).indices, WIDTH).float().mean((0, 1))
    each = (texts - images).square().mean() * model.scale + model.bias.square()
    return each + 0.5 * WIDTH * (counts * chances.mean(0)).sum()


LOSSES: dict[str, Loss] = {
    "clip": clip, "siglip": siglip, "nt_xent": nt_xent, "vicreg": vicreg, "balanced": balanced,
}  # fmt: skip


def check(loss: Loss, given: Any, whole: Batch, **options: Any) -> csc.CompiledModel:
    """csc on `given`, the batch or its microbatches, against eager PyTorch on the batch."""
    model = Towers(loss)
    right = model(**whole)
    right.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = csc.compile(model, example=given, **options)
    found = compiled.train_step(given)
    torch.testing.assert_close(found, right.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    return compiled


@pytest.mark.parametrize("name", ["clip", long("siglip"), "nt_xent", long("vicreg"), "balanced"])
def test_a_loss_over_the_batch_is_that_of_the_whole_batch(name: str) -> None:
    compiled = check(LOSSES[name], batch(), batch(), microbatches=2, mesh="dp=2")
    head = compiled.program.batch_loss
    assert head is not None
    if name == "balanced":
        assert {one.kind for one in head.values} <= {"sum", "mean"}, "no rows of tokens are brought together"


@pytest.mark.parametrize("mesh", ["pp=2", long("dp=2,pp=2")])
def test_on_a_pipeline(mesh: str) -> None:
    compiled = check(clip, batch(), batch(), microbatches=2, mesh=mesh)
    assert compiled.program.plan is not None and compiled.program.plan.schedule.name == "gpipe"


@pytest.mark.long
@pytest.mark.gloo
def test_real_processes(tmp_path: Path) -> None:
    """Gradients of the ranks that hold a parameter are those of eager PyTorch."""
    model = Towers(clip)
    model(**batch()).backward()
    launching.ranks(batch_loss_worker.main, 4, {"mesh": "dp=2,pp=2", "microbatches": 2}, tmp_path)
    found: set[str] = set()
    for rank in range(4):
        for name, gradient in load_file(tmp_path / f"gradients_{rank}.safetensors").items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-5, msg=name)
            found.add(name)
    assert found == dict(model.named_parameters()).keys()


@pytest.mark.long
def test_microbatches_of_other_sizes_and_batches_of_other_sizes() -> None:
    compiled = check(clip, cut(batch(), [1, 4, 3]), batch(), microbatches=3)
    for samples in (6, 9):
        model = Towers(clip)
        right = model(**batch(samples))
        torch.testing.assert_close(compiled.train_step(batch(samples)), right.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(compiled.eval_step(batch(9)), right.detach(), rtol=1e-5, atol=1e-6)


def test_one_microbatch_alone_has_a_loss_of_its_own() -> None:
    assert check(clip, batch(), batch()).program.batch_loss is None


def test_the_file_says_where_samples_meet(tmp_path: Path) -> None:
    compiled = check(clip, batch(), batch(), microbatches=2, directory=tmp_path / "program")
    text = (compiled.write(tmp_path / "written") / "batch_loss.py").read_text()
    assert "samples meet in aten::matmul at test_batch_loss.py:" in text and "def batch_loss(values, weights" in text
    assert any("the loss is over the whole batch" in note for note in compiled.program.notes)


def test_a_schedule_in_which_b_comes_first_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="F of all microbatches comes before any B, and '1f1b' is no such schedule"):
        csc.compile(Towers(clip), example=batch(), microbatches=2, schedule="1f1b").program  # noqa: B018
    file = tmp_path / "own.txt"
    file.write_text("# own\nrank 0: F 0 0 | BW 0 0 | F 0 1 | BW 0 1 | REDUCE\n")
    with pytest.raises(ScheduleError, match="'F 0 1' comes after a B or W of stage 0, whose loss is over the whole"):
        csc.compile(Towers(clip), example=batch(), microbatches=2, schedule=str(file)).program  # noqa: B018


class Normed(Towers):
    """Samples meet in the middle."""

    def __init__(self) -> None:
        super().__init__(clip)
        self.image, self.image_projection = nn.Linear(6, 100), nn.Linear(100, WIDTH)

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        apart = pixels - pixels.mean(0)
        return (self.image_projection(self.image(apart).relu()) - self.text_projection(self.text(ids).mean(1))).mean()


def test_samples_that_meet_where_most_of_the_model_comes_after_are_refused() -> None:
    with pytest.raises(InputError, match=r"test_batch_loss.py:\d+: csc cannot prove .*samples meet in the middle of"):
        csc.compile(Normed(), example=batch(), microbatches=2).program  # noqa: B018


class EachToken(Towers):
    """Every token of a text is compared with every one of the others, so texts must have one length."""

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        tokens = self.text_projection(self.text(ids))
        images = self.image_projection(self.image(pixels))
        scores = torch.einsum("atd,bd->abt", tokens, images).amax(-1) * self.scale + self.bias
        return F.cross_entropy(scores, torch.arange(scores.shape[0]))


def test_values_of_unequal_width_are_refused() -> None:
    given = [batch(4, 5), batch(4, 7)]
    compiled = csc.compile(EachToken(clip), example=given, microbatches=2, widths=False)
    with pytest.raises(CscError, match=r"the loss is over the whole batch, and .* \[4, 5, 8\] and \[4, 7, 8\] .*width"):
        compiled.train_step(given)


def test_a_loss_over_the_batch_says_why_cp_cannot_spread_it() -> None:
    with pytest.raises(
        InputError, match=r"the labels of the loss are none of tokens, and cp spreads tokens: .* leave cp"
    ):
        csc.compile(Towers(clip), example=batch(), microbatches=2, mesh="cp=2", cache=False)


class OfDocuments(nn.Module):
    """Contrasts each token with all others, by the document that it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, cu_seqlens: torch.Tensor, reward: torch.Tensor
    ) -> torch.Tensor:
        flat = self.embed(input_ids).flatten(0, 1)
        document = torch.bucketize(torch.arange(flat.shape[0]), cu_seqlens[1:], right=True)
        scores = self.head(flat * reward[document][:, None])
        return nn.functional.cross_entropy(scores @ scores.t(), document, reduction="sum")


def test_where_sequences_begin_is_not_joined() -> None:
    """Those of a microbatch count from its first row, so one behind the other they are not those of the batch."""
    ids = torch.arange(24).view(4, 6) % 20
    begins = torch.tensor([0, 2, 6, 8, 12, 14, 18, 20, 24])
    given = {"input_ids": ids, "labels": ids, "cu_seqlens": begins, "reward": torch.arange(1.0, 9.0)}
    with pytest.raises(csc.InputError, match="'cu_seqlens' counts from the first row of each microbatch"):
        csc.compile(OfDocuments(), example=given, microbatches=2, cache=False, check=False)
