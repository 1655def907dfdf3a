"""`eval_step`: the loss of eager PyTorch in eval mode, from programs that run forward alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import csc
from csc.driver.compiled import Inspected
from csc.driver.programs import check_held, evaluated
from csc.errors import InputError
from tests import launching
from tests.compiler import evaluation_worker, small
from tests.compiler.evaluation_worker import SAMPLES, SEED, Batch, compiled_for
from tests.exactness import FLOAT32

pytestmark = pytest.mark.usefixtures("traces")


def eager(model: nn.Module, batches: list[Batch]) -> float:
    """The mean over all labels that count, in eval mode."""
    counts = [int((one["labels"][:, 1:] != -100).sum()) for one in batches]
    model.eval()
    with torch.no_grad():
        return sum(float(model(**one)) * count for one, count in zip(batches, counts)) / sum(counts)


def test_in_one_process() -> None:
    compiled = compiled_for("pp=2,dp=2")
    compiled.model.layers[1].eval()  # a frozen part, say
    torch.manual_seed(SEED)
    trained = compiled.train_step(SAMPLES)
    before = {name: p.grad.clone() for name, p in compiled.named_parameters() if p.grad is not None}
    modes = [module.training for module in compiled.model.modules()]
    state = torch.get_rng_state()
    loss = compiled.eval_step(SAMPLES)
    assert [module.training for module in compiled.model.modules()] == modes and "train" not in vars(compiled.model)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"
    assert all(torch.equal(p.grad, before[name]) for name, p in compiled.named_parameters() if p.grad is not None)
    with evaluated(compiled.model):
        evaluating = Inspected(compiled._steps.evaluating).program
    assert not any(stage.has_b or stage.has_w for stage in evaluating.stages)
    assert {message.kind for message in evaluating.messages} == {"F"}
    assert float(loss) == pytest.approx(eager(compiled.model, SAMPLES), rel=FLOAT32)
    assert float(loss) != pytest.approx(float(trained), rel=1e-3), "dropout"
    with torch.no_grad():
        for parameter in compiled.parameters():
            parameter.mul_(1.25)
    compiled.train()
    again = float(compiled.eval_step(SAMPLES))
    assert again == pytest.approx(eager(compiled.model, SAMPLES), rel=FLOAT32) and again != float(loss)


class Otherwise(nn.Module):
    """In eval mode it is another function, and its own `train` keeps a part in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def train(self, mode: bool = True) -> Otherwise:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        return self.last(hidden if self.training else hidden.tanh()).square().mean()


def test_what_the_model_does_in_eval_mode_alone() -> None:
    model = Otherwise().train()
    batch = {"x": torch.randn(4, 4)}
    compiled = csc.compile(model, mesh="pp=2", example=batch, microbatches=2)
    found, trained = float(compiled.eval_step(batch)), float(compiled.train_step(batch))
    with torch.no_grad():
        assert trained == pytest.approx(float(model(**batch)), rel=FLOAT32)
        assert found == pytest.approx(float(model.eval()(**batch)), rel=FLOAT32) != trained


def test_what_cannot_be_evaluated() -> None:
    compiled = csc.compile(small.text(2), mesh="pp=2", example=small.text_batch(2), check=False)
    with torch.inference_mode(), pytest.raises(InputError, match="call eval_step outside of it"):
        compiled.eval_step(small.text_batch(2))
    with pytest.raises(InputError, match="the batch has no entry 'labels'"):
        compiled.eval_step({"tokens": small.text_batch(2)["tokens"]})
    manifest = compiled.trainer().program.manifest
    other = csc.compile(small.text(2), mesh="pp=2", example=small.text_batch(2), cuts=["norm"], check=False)
    moved = csc.compile(small.text(2), mesh="pp=2", example=small.text_batch(2), cuts=["layers.0"], check=False)
    check_held([manifest], manifest)
    with pytest.raises(InputError, match=r"'layers.0.* in another stage than in training"):
        check_held([moved.trainer().program.manifest], other.trainer().program.manifest)


@pytest.mark.gloo
def test_processes_with_their_own_samples(tmp_path: Path) -> None:
    launching.ranks(evaluation_worker.main, 4, {"mesh": "dp=2,cp=2"}, tmp_path)
    results = [json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(4)]
    compiled = compiled_for("dp=2,cp=2")
    expected = [eager(compiled.model, SAMPLES)]
    compiled.train()
    torch.manual_seed(SEED)
    loss = float(compiled.train_step(SAMPLES))
    for rank in range(4):
        found = load_file(tmp_path / f"gradients_{rank}.safetensors")
        for name, parameter in compiled.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)
    torch.optim.SGD(compiled.parameters(), lr=0.5).step()
    expected += [eager(compiled.model, SAMPLES)] * 2
    for result in results:
        assert result["loss"] == pytest.approx(loss, rel=FLOAT32)
        assert result["evaluated"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_parameters_that_the_model_has_since() -> None:
    compiled = compiled_for("pp=2,dp=2")
    compiled.train_step(SAMPLES)
    before = float(compiled.eval_step(SAMPLES))
    compiled.model.load_state_dict({n: p.detach() * 1.25 for n, p in compiled.model.state_dict().items()}, assign=True)
    found = float(compiled.eval_step(SAMPLES))
    assert found == pytest.approx(eager(compiled.model, SAMPLES), rel=FLOAT32) and found != pytest.approx(before)


class AsksForGradients(nn.Module):
    """Another function where no gradients are made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(hidden if torch.is_grad_enabled() else hidden.tanh()).square().mean()


def test_each_step_is_traced_in_its_own_grad_mode() -> None:
    model, batch = AsksForGradients(), {"x": torch.randn(4, 4)}
    right = model(**batch)
    right.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with torch.no_grad():
        compiled = csc.compile(model, mesh="pp=2", example=batch, microbatches=2)
        trained = compiled.train_step(batch)
        without = model(**batch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
    assert float(trained) == pytest.approx(float(right), rel=FLOAT32)
    assert float(compiled.eval_step(batch)) == pytest.approx(float(without), rel=FLOAT32) != float(trained)
