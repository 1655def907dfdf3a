"""The check: a program that is wrong is not handed out, one that is right is, and nothing is left of the comparison."""

from __future__ import annotations

import json
import logging
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.check.eager import WithoutChance, eager_step
from csc.check.judge import moved
from csc.driver.compiler import Compiler
from csc.errors import DifferenceError, InputError
from csc.reports.verification import parting, verify
from csc.runtime import executor
from csc.runtime.trainer import Trainer
from tests import launching
from tests.compiler import check_worker, small
from tests.tiers import long


@pytest.fixture
def tampered(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is emitted from now on has these texts replaced."""
    changes: dict[str, str] = {}
    emit = Compiler.emit

    def edited(self: Compiler, program: Any, options: Any, directory: Path, *rest: Any) -> Path:
        written = emit(self, program, options, directory, *rest)
        found = 0
        for file in sorted((directory / "layers").glob("*.py")):
            text = file.read_text()
            for before, after in changes.items():
                found += text.count(before)
                text = text.replace(before, after)
            file.write_text(text)
        assert found or not changes
        return written

    monkeypatch.setattr(Compiler, "emit", edited)
    return changes


def compiled(**options: Any) -> csc.CompiledModel:
    return csc.compile(small.text(2), example=small.text_batch(4), cache=False, **options)


class Cached(nn.Module):
    """A model whose configuration fills a key/value cache."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids) * torch.cos(position_ids)[..., None]
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("restarts", [True, False])
def test_documents_that_a_cache_would_join_are_told(restarts: bool, caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.arange(12).view(2, 6)
    positions = torch.tensor([0, 1, 2, 0, 1, 2] if restarts else [0, 1, 2, 3, 4, 5]).expand(2, 6)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions.contiguous()}
    compiled = csc.compile(Cached(), example=batch, cache=False, check=True)
    compiled.train_step(batch)
    assert ("position_ids start again" in caplog.text) is restarts
    assert compiled.model.config.use_cache


def test_a_right_program_is_checked_once(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled(mesh="pp=2", microbatches=2)
    with caplog.at_level(logging.INFO, "csc"):
        for _ in range(3):
            model.train_step(small.text_batch(4))
    said = [record.message for record in caplog.records if "eager PyTorch" in record.message]
    assert len(said) == 1 and "15 gradients" in said[0]


def test_every_nth_step_is_checked(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled(check=2)
    with caplog.at_level(logging.INFO, "csc"):
        for _ in range(5):
            model.train_step(small.text_batch(4))
    assert sum("checked against eager PyTorch" in record.message for record in caplog.records) == 3  # 0, 2 and 4


@pytest.mark.parametrize("mesh", [long("pp=2"), "dp=2,cp=2"])
def test_the_step_that_was_compared_is_the_training_step(mesh: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is computed again, and no bit is another one; gradients add to those that are there."""
    checked, plain = compiled(mesh=mesh, microbatches=2), compiled(mesh=mesh, microbatches=2, check=False)
    plain.model.load_state_dict(checked.model.state_dict())
    runs: list[bool] = []
    run = Trainer.run
    for model in (checked, plain):
        for index, parameter in enumerate(model.model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.5) if index % 2 else None
    with pytest.MonkeyPatch.context() as patched, caplog.at_level(logging.INFO, "csc"):
        patched.setattr(Trainer, "run", lambda *given: runs.append(True) or run(*given))
        losses = [checked.train_step(small.text_batch(4)) for _ in range(2)]
    assert len(runs) == 2 and any("s beside the step itself" in record.message for record in caplog.records)
    assert [torch.equal(loss, plain.train_step(small.text_batch(4))) for loss in losses] == [True, True]
    assert checked.metrics["loss"] == plain.metrics["loss"]
    right = dict(plain.model.named_parameters())
    assert all(torch.equal(p.grad, right[name].grad) for name, p in checked.model.named_parameters())


def test_a_compared_step_is_kept_for_its_own_batch_alone() -> None:
    checked, plain = compiled(), compiled(check=False)
    plain.model.load_state_dict(checked.model.state_dict())
    checked.compile_for(small.text_batch(4))
    other = {name: tensor.flip(0) for name, tensor in small.text_batch(4).items()}
    assert torch.equal(checked.train_step(other), plain.train_step(other))
    right = dict(plain.model.named_parameters())
    assert all(torch.equal(p.grad, right[name].grad) for name, p in checked.model.named_parameters())


def test_where_numbers_are_drawn_a_checked_first_step_draws_them_too() -> None:
    batch, found = small.text_batch(4), []
    for check in (True, False):
        model = csc.compile(small.dropped(), example=batch, cache=False, check=check)
        model.train_step(batch)
        torch.manual_seed(5)
        model.model.zero_grad()
        model = csc.compile(model.model, example=batch, cache=False, check=check)
        found.append([model.train_step(batch), *(p.grad for p in model.model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("before", "after", "told", "where"),
    [
        ("aten.silu.default(", "aten.relu.default(", "the program that was written has others", "TextModel"),
        ("aten.silu_backward.", "aten.gelu_backward.", "its values are right", "region layers.1 (small.py"),
    ],
)
@pytest.mark.long_cases("aten.silu.default(-aten.relu.default(-the program that was written has others-TextModel")
def test_a_wrong_program_is_an_error_that_names_the_region(
    tampered: dict[str, str], before: str, after: str, told: str, where: str
) -> None:
    tampered[before] = after
    model = compiled(mesh="pp=2", microbatches=2)
    for parameter in model.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):  # it stays an error
        with pytest.raises(DifferenceError, match=told) as caught:
            model.train_step(small.text_batch(4))
    assert caught.value.where.split(":")[0] == where.split(":")[0]
    assert all(bool((parameter.grad == 1).all()) for parameter in model.model.parameters())
    unchecked = compiled(mesh="pp=2", microbatches=2, check=False)
    assert unchecked.train_step(small.text_batch(4)).isfinite()


def test_in_bfloat16_the_error_says_what_may_be_too_coarse(tampered: dict[str, str]) -> None:
    tampered["aten.silu.default("] = "aten.neg.default("
    with pytest.raises(DifferenceError, match=r"keep_fp32=\['layers.*csc verify --float64"):
        compiled(precision="bf16").train_step(small.text_batch(4))


def test_what_was_made_without_a_check_is_checked_before_it_trains(tampered: dict[str, str]) -> None:
    tampered["aten.silu_backward."] = "aten.gelu_backward."
    model = compiled(mesh="pp=2")
    assert not verify(model).good(1e-6)
    with pytest.raises(DifferenceError):
        model.train_step(small.text_batch(4))


def test_verify_says_where_both_part(tampered: dict[str, str]) -> None:
    tampered["aten.silu_backward."] = "aten.gelu_backward."
    model = compiled(mesh="pp=2")
    result = verify(model, steps=2)
    assert not result.good(1e-6) and max(result.trained_rel.values()) > 1e-3
    assert parting(model, 1e-6).startswith("region layers.1 ")


def test_several_steps_of_an_optimizer_end_where_eagers_do() -> None:
    model = compiled(mesh="pp=2", microbatches=2)
    before = {name: p.detach().clone() for name, p in model.model.named_parameters()}
    result = verify(model, steps=3)
    assert result.good(1e-6) and len(result.trained_rel) == 15 and max(result.trained_rel.values()) < 1e-5
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.model.named_parameters())


class Averaged(small.TextModel):
    """Mixes samples: its microbatches are not its batch."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        logits = self.lm_head(self.norm(hidden - hidden.mean(0)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_microbatches_that_are_not_the_batch_are_seen() -> None:
    """By the check alone: the user says that losses are to be added up, which the check takes for granted."""
    whole = csc.compile(Averaged(1), example=small.text_batch(4), cache=False)
    assert whole.train_step(small.text_batch(4)).isfinite()
    assert not verify(whole.with_options(microbatches=2, loss_weight="mean")).good(1e-4)


def test_a_step_that_was_checked_is_the_same_step() -> None:
    """Buffers, gradients, modes, attributes and random numbers are as if nobody had looked."""
    steps = []
    for check in (True, False):
        torch.manual_seed(0)
        dropped = small.dropped().eval()
        model = csc.compile(dropped, example=small.text_batch(4), microbatches=2, cache=False, check=check)
        torch.manual_seed(5)
        loss = model.train_step(small.text_batch(4))
        steps.append((loss, [p.grad for p in model.model.parameters()], torch.rand(3), model.model.training))
    assert torch.equal(steps[0][0], steps[1][0]) and torch.equal(steps[0][2], steps[1][2])
    assert all(map(torch.equal, steps[0][1], steps[1][1])) and steps[0][3] is steps[1][3] is False


class Counting(nn.Module):
    """Changes itself: a buffer in place, another by another one, an attribute, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("inside", torch.zeros(2))
        self.register_buffer("other", torch.zeros(2))
        self.calls, self.seen = 0, [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside += 1
        self.other = self.other + 1
        self.calls += 1
        self.seen.append(self.calls)
        return self.linear(x).mean()


def test_eager_steps_leave_the_model_as_it_was() -> None:
    model, x = Counting(), torch.randn(3, 4)
    inside, other = model.inside, model.other
    step = eager_step(model, {"x": x}, {"linear.weight"})
    assert set(step.gradients) == {"linear.weight"} and model.linear.bias.requires_grad
    assert model.inside is inside and model.other is other and not inside.any() and not other.any()
    assert model.calls == 0 and model.seen == [1] and model.linear.weight.grad is None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.by * x


class Cancelling(nn.Module):
    """The gradient of one number is a small difference of large sums, mostly rounding; that of another is not."""

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.plain = Scaled(), Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.noise(x.sum(-1) - x.flip(-1).sum(-1) + 1e-4) + self.plain(x.sum(-1))).mean()


def test_a_gradient_that_is_mostly_rounding_is_known_for_it() -> None:
    model, batch = Cancelling(), {"x": torch.linspace(0.1, 3, 4000).view(4, 1000)}
    before = {name: one.clone() for name, one in model.state_dict().items()}
    right = eager_step(model, batch, {"noise.by", "plain.by"})
    found = moved(model, batch, {"noise.by", "plain.by"}, "auto", right, torch.finfo(torch.float32).eps / 2)
    assert found["noise.by"] > 0.01 and found["plain.by"] < 1e-6
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_lists_of_microbatches_are_one_batch_where_they_can_be() -> None:
    model = small.text(1)
    names = {name for name, _ in model.named_parameters()}
    one, two = small.text_batch(1), {name: t[1:] for name, t in small.text_batch(4).items()}
    whole = eager_step(model, small.text_batch(4), names)
    assert eager_step(model, [one, two], names).loss == pytest.approx(whole.loss, rel=1e-6)
    longer = small.text_batch(1, 12)
    apart = eager_step(model, [one, longer], names)
    losses = [eager_step(model, batch, names).loss for batch in (one, longer)]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in (one, longer)]
    expected = sum(n * loss for n, loss in zip(counts, losses)) / sum(counts)
    assert apart.sure and apart.loss == pytest.approx(expected, rel=1e-6)


def test_numbers_that_are_no_chance() -> None:
    x = torch.ones(2, 3)
    with WithoutChance() as mode:
        assert torch.equal(F.dropout(x, 0.5), 2 * x) and not F.dropout(x, 0.8).any()
        assert torch.equal(torch.rand(2), torch.full((2,), 0.25)) and torch.randn_like(x).eq(0.5).all()
        assert torch.equal(torch.bernoulli(torch.tensor([0.2, 0.3])), torch.tensor([0.0, 1.0]))
        assert torch.equal(torch.randint(3, 11, (2,)), torch.tensor([5, 5]))
        assert not mode.unknown
        torch.multinomial(torch.ones(3), 2)
    assert mode.unknown == {"aten.multinomial.default"}


def test_what_cannot_be_checked_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(small.TextModel):
        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            noise = torch.multinomial(torch.ones(tokens.shape[0], 2), tokens.shape[1], replacement=True)
            return F.cross_entropy(self.lm_head(self.embed_tokens(tokens + noise)).flatten(0, 1), labels.flatten())

    batch = {name: t.clamp(0, 5) for name, t in small.text_batch(2).items()}
    model = csc.compile(Noisy(1), example=batch, cache=False)
    with caplog.at_level(logging.WARNING, "csc"):
        model.train_step(batch)
    assert "not checked against eager PyTorch: random numbers" in caplog.text


def test_the_cache_remembers_that_a_program_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CSC_CACHE", "1")
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.INFO, "csc"):
        for expected in (1, 1):
            csc.compile(small.text(1), example=small.text_batch(2)).train_step(small.text_batch(2))
            assert sum("checked against eager" in record.message for record in caplog.records) == expected
        csc.compile(small.text(1), example=small.text_batch(2), microbatches=2).train_step(small.text_batch(2))
    assert sum("checked against eager" in record.message for record in caplog.records) == 2


@pytest.mark.parametrize("given", ["often", -1, 1.5])
def test_check_is_a_choice_or_a_number(given: Any) -> None:
    with pytest.raises(InputError, match="check is"):
        compiled(check=given)


@pytest.mark.gloo
def test_of_several_processes_one_checks_and_all_raise(tmp_path: Path) -> None:
    launching.ranks(check_worker.main, 2, tmp_path)
    first, second = (json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(2))
    assert first["losses"] == second["losses"]
    checks = [[line for line in one["log"] if line.startswith("checked")] for one in (first, second)]
    assert [len(lines) for lines in checks] == [3, 0]  # the first step, the third, and the first of the changed model
    changed = "TextModel has changed since it was compiled: a hook (_forward_hooks) of layers.1"
    assert changed in first["log"] and changed in second["log"]

    eager = small.text(2)
    for loss in first["losses"][:3]:
        assert loss == pytest.approx(float(eager(**check_worker.BATCH).detach()), rel=1e-6)
    eager.layers[1].register_forward_hook(lambda module, given, result: 2 * result)
    assert first["losses"][3] == pytest.approx(float(eager(**check_worker.BATCH).detach()), rel=1e-6)

    assert first["errors"][:2] == second["errors"][:2] and first["gradients"] == []
    assert all(error.startswith("DifferenceError: region layers.1 ") for error in first["errors"][:2])

    assert (first["ran"], second["ran"]) == (5, 0)  # with rank 0's copies of the weights
    assert first["errors"][2:] == ["ValueError: no room"]
    assert "rank 0 failed while it compiled: ValueError: no room" in second["errors"][2]

    torch.manual_seed(5)
    assert (first["ran dropped"], second["ran dropped"]) == ([executor.draw()] * 2, [])  # the training step's masks
    assert "nothing left to chance" not in " ".join(first["dropped log"])
    assert sum(line.startswith("checked") for line in first["dropped log"]) == 2
    for one, other in zip(first["dropped"], second["dropped"]):
        assert one == other and one[0] == pytest.approx(one[1], rel=1e-6)


def test_a_program_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    model = compiled(check=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"the program cannot be written \(.*File exists.*make room"):
        model.write(tmp_path / "file" / "program")
    model.write(tmp_path / "program")
    before = (tmp_path / "program" / "program.json").read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as a full disk
    try:
        with pytest.raises(InputError, match=r"the program cannot be written \(.*File too large"):
            model.write(tmp_path / "program")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "program" / "program.json").read_text() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "program"]


def test_asking_for_parameters_compares_nothing_yet(caplog: pytest.LogCaptureFixture) -> None:
    """Every loop makes its optimizer first: a step that is compared is then still the training step."""
    caplog.set_level(logging.INFO, "csc")
    model = compiled(mesh="pp=2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "checked against" not in caplog.text
    model.train_step(small.text_batch(4))
    optimizer.step()
    assert caplog.text.count("checked against") == caplog.text.count("beside the step itself") == 1
