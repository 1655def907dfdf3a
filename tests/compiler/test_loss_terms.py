"""Losses of terms that are divided by different numbers, and microbatches that have nothing that a loss is a mean over,
against eager PyTorch, which takes the whole batch at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import CscError
from csc.runtime.loaded_program import load
from tests.launching import ranks
from tests.tiers import in_turn

V, D, TOKENS = 20, 16, 6
Loss = Callable[..., torch.Tensor]


class Model(nn.Module):
    """loss(model, ids, labels, weights of samples, values of tokens) -> a number. Dropout draws nothing."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.embed, self.head, self.other = nn.Embedding(V, D), nn.Linear(D, V), nn.Linear(D, V)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = h + layer(h)
        return h

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return self.loss(self, ids, labels, weights, values)


def batch(samples: int = 8) -> dict[str, torch.Tensor]:
    """The first two samples have no labels, the fourth has few."""
    drawn = torch.Generator().manual_seed(samples)
    labels = torch.randint(0, V, (samples, TOKENS), generator=drawn)
    labels[:2], labels[3, 2:] = -100, -100
    values = torch.randn(samples, TOKENS, generator=drawn, dtype=torch.float64)
    values[2:4] = -1.0
    return {
        "ids": torch.randint(0, V, (samples, TOKENS), generator=drawn),
        "labels": labels,
        "weights": torch.rand(samples, generator=drawn, dtype=torch.float64),
        "values": values,
    }


def entropy(x: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
    return F.cross_entropy(x.flatten(0, 1), labels.flatten(), **more)


def agrees(compiled: csc.CompiledModel, loss: Loss, given: dict[str, torch.Tensor], rel: float = 1e-12) -> None:
    """Loss, which parameters have a gradient, and each gradient."""
    model = Model(loss).double()
    expected = model(**given)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert float(compiled.train_step(given)) == pytest.approx(float(expected.detach()), rel=rel)
    found = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        assert torch.isfinite(gradient).all(), name
        assert (gradient - gradients[name]).abs().max() <= rel * gradients[name].abs().max(), name


def compiled(loss: Loss, **options: Any) -> csc.CompiledModel:
    return csc.compile(Model(loss).double(), example=batch(), check=False, **options)


def two_heads(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The next token, and the one after it."""
    h = m.hidden(ids)
    return entropy(m.head(h)[:, :-1], y[:, 1:]) + 0.3 * entropy(m.other(h)[:, :-2], y[:, 2:])


def small_logits(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    x = m.head(m.hidden(ids))
    return entropy(x, y) + 1e-2 * x.logsumexp(-1).square().mean()


def many(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Labels, rows of a mask, samples, their weights; a sum; what is the same for every batch, and a number."""
    h, mask = m.hidden(ids), v > 0
    chosen = F.mse_loss(h[mask][:, 0], v[mask])
    each = entropy(m.other(h), ids, reduction="none").view(ids.shape).mean(1)
    decay = 0.1 * m.head.weight.square().sum()
    return 1 - (0.5 - entropy(m.head(h), y)) + chosen + (each * w).sum() / w.sum() - 0.01 * h.abs().sum() + decay


def on_the_way(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Terms that layers add: they stand on stages before that of the loss."""
    h, beside = m.embed(ids), 0
    for number, layer in enumerate(m.layers):
        h = h + layer(h)
        beside = beside + (h.square().mean() if number % 2 else (h[..., 0] * (v > 0)).sum() / (v > 0).sum())
    return entropy(m.head(h), y) + 0.1 * beside


def stacked(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    h = m.hidden(ids)
    each = torch.stack([entropy(m.head(h), y), h.square().mean(), h.abs().sum() * 1e-3])
    return (each * torch.tensor([1.0, 0.3, 0.5])).sum()


def learned(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Uncertainties for weights (Kendall, Gal, Cipolla 2018): each term times a parameter."""
    h = m.hidden(ids)
    a, b = m.head.bias[0], m.head.bias[1]
    return entropy(m.head(h), y) * torch.exp(-a) + a + h.square().mean() * torch.exp(-b) + b


def sums_of_sums(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    h = m.hidden(ids)
    one = entropy(m.head(h), y) + h.square().mean()
    other = entropy(m.other(h), ids) + (h[..., 0] * (v > 0)).sum() / (v > 0).sum()
    return 0.3 * one + (one + other) / 2


def by_quotients(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What terms are divided by is a quotient itself."""
    h = m.hidden(ids)
    scale = torch.full((), 2.0, dtype=h.dtype)
    return (h.square().mean(-1) * (v > 0)).sum() / ((v > 0).sum() / scale) + (h.abs().mean((1, 2)) * w).sum() / (
        w.sum() / 3
    )


TERMS = [two_heads, small_logits, many, on_the_way, stacked, learned, sums_of_sums]
MESHES: list[dict[str, Any]] = [
    {"microbatches": 4},
    {"mesh": "pp=2", "microbatches": 4, "schedule": "zb-h1"},
    {"mesh": "dp=2", "microbatches": 2, "zero": 2},
    {"mesh": "pp=3,dp=2", "microbatches": 2, "recompute": "full"},
]


def named(value: Any) -> str:
    return value.get("mesh", "one") if isinstance(value, dict) else value.__name__


@pytest.mark.parametrize(("loss", "options"), in_turn([*TERMS, by_quotients], MESHES), ids=named)
@pytest.mark.long_cases("many-dp=2", "two_heads-one")
def test_each_term_is_a_mean_over_what_the_whole_batch_has(loss: Loss, options: dict[str, Any]) -> None:
    agrees(compiled(loss, **options), loss, batch())


@pytest.mark.parametrize("loss", [many, two_heads])
@pytest.mark.long_cases("two_heads")
def test_ranks_that_share_layers(loss: Loss) -> None:
    agrees(compiled(loss, mesh="tp=2,dp=2", microbatches=2), loss, batch())


def test_other_sizes_and_numbers_of_microbatches() -> None:
    model = compiled(many, mesh="pp=2", microbatches=4)
    for samples, microbatches in ((8, 4), (6, 3), (8, 2)):
        found = model.train_step(batch(samples), microbatches=microbatches)
        assert float(found) == pytest.approx(float(Model(many).double()(**batch(samples)).detach()), rel=1e-12)
        assert all(torch.isfinite(p.grad).all() for _, p in model.named_parameters())
        model.zero_grad()
    assert float(model.eval_step(batch())) == pytest.approx(float(Model(many).double()(**batch()).detach()), rel=1e-12)


@pytest.mark.parametrize("loss", TERMS)
@pytest.mark.long_cases("many", "two_heads", "on_the_way", "learned")
def test_one_microbatch_is_the_model_s_own_step(loss: Loss) -> None:
    """To the bit, and NaN where eager PyTorch has it: no label in the whole batch."""
    model, given = Model(loss).double(), batch()
    expected = model(**given)
    own = compiled(loss)
    assert torch.equal(own.train_step(given), expected.detach())
    given["labels"][:] = -100
    assert torch.isnan(model(**given))
    for microbatches in (1, 4):
        with pytest.raises(CscError, match="is not finite"):
            own.train_step(given, microbatches=microbatches)


def test_listed_microbatches_are_compared_with_the_batch_of_all(caplog: pytest.LogCaptureFixture) -> None:
    """No one weight of each makes its loss; of other lengths they are no batch, and nothing is compared."""
    given = batch()
    parts = [{name: tensor[start : start + 4] for name, tensor in given.items()} for start in (0, 4)]
    model = csc.compile(Model(many).double(), example=parts, microbatches=2)
    with caplog.at_level("INFO", logger="csc"):
        found = model.train_step(parts)
    assert float(found) == pytest.approx(float(Model(many).double()(**given).detach()), rel=1e-12)
    assert any(line.startswith("checked against eager PyTorch") for line in caplog.messages)


def test_the_program_says_what_terms_are_divided_by(tmp_path: Any) -> None:
    model = compiled(on_the_way, mesh="pp=2", microbatches=4)
    assert model.program.loss_weight == "terms"
    model.write(tmp_path)
    manifest = load(tmp_path).manifest
    assert len({stage.rank for stage in manifest.stages if stage.weighs}) == 2
    counted = [one.counts for one in manifest.loss.divisors]
    assert len(counted) == 4 and {"rows of labels", "cross_entropy_loss"} < {*counted}
    content = json.loads((tmp_path / "program.json").read_text())
    content["loss"]["divisors"] = []
    (tmp_path / "program.json").write_text(json.dumps(content))
    with pytest.raises(CscError, match="weighted by terms and has 0 divisors"):
        load(tmp_path)


# --- microbatches that have nothing to be a mean over ---------------------------------------------------------------


def masked(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (m.hidden(ids).square().mean(-1) * (v > 0)).sum() / (v > 0).sum()


def over_half(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (m.hidden(ids).square().mean(-1) * (v > 0)).sum() / ((v > 0).sum() / torch.full((), 2.0, dtype=w.dtype))


def normalised(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = (v > 0).double()
    return (m.hidden(ids).square().mean(-1) * (mask / mask.sum())).sum()


def scaled(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return entropy(m.head(m.hidden(ids)), y) * torch.exp(-m.head.bias[0])


@pytest.mark.parametrize(("loss", "options"), in_turn([masked, over_half, normalised, scaled], MESHES), ids=named)
def test_what_counts_nothing_has_no_gradient(loss: Loss, options: dict[str, Any]) -> None:
    """The gradient of 0 over 0 is NaN, and times 0 it is NaN again."""
    agrees(compiled(loss, **options), loss, batch())


def signed(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    signs = torch.where(ids % 2 == 0, 1.0, -1.0)
    return (m.hidden(ids).square().mean(-1) * signs).sum() / signs.sum()


def signed_batch() -> dict[str, torch.Tensor]:
    """Each of the first two samples has signs that add up to 0."""
    given = batch()
    given["ids"] = given["ids"] // 2 * 2
    given["ids"][:2, ::2] += 1
    return given


def test_weights_of_both_signs_that_add_up_to_nothing() -> None:
    """What they weigh is not nothing: it is an error, and no gradient is touched."""
    given = signed_batch()
    for options in ({"microbatches": 4}, {"mesh": "pp=2,dp=2", "microbatches": 2}):
        alone = compiled(signed, **options)
        with pytest.raises(CscError, match=r"microbatch 0.* is not finite"):
            alone.train_step(given)
        assert all(p.grad is None for _, p in alone.named_parameters())


@pytest.mark.parametrize("options", MESHES, ids=lambda one: one.get("mesh", "one"))
def test_weights_that_add_up_to_less_than_nothing(options: dict[str, Any]) -> None:
    given = signed_batch()
    given["ids"][:2, 1] += 1
    agrees(compiled(signed, **options), signed, given)


def signed_and_more(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What is the same for every batch stands beside what the signs weigh."""
    decay = 0.1 * m.head.weight.square().sum()
    return (1 - signed(m, ids, y, w, v) + decay) * 2 + entropy(m.head(m.hidden(ids)), y)


def signed_and_decay(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return signed(m, ids, y, w, v) + 0.1 * m.head.weight.square().sum()


def over_what_others_count(
    m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """A sum over all tokens, divided by the number of some."""
    return m.hidden(ids).square().sum() / (v > 0).sum() + entropy(m.other(m.hidden(ids)), ids)


def less_one(m: Model, ids: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """An estimate without bias, where a microbatch has one of what it counts."""
    return m.hidden(ids).square().sum() / ((v > 0).sum() - 1) + entropy(m.other(m.hidden(ids)), ids)


BY_ZERO = [signed_and_more, signed_and_decay, over_what_others_count, less_one]


@pytest.mark.parametrize(("loss", "options"), in_turn(BY_ZERO, MESHES), ids=named)
@pytest.mark.long_cases("less_one-pp=3,dp=2", "signed_and_more-one", "over_what_others_count-dp=2")
def test_a_term_that_a_microbatch_would_divide_by_zero(loss: Loss, options: dict[str, Any]) -> None:
    """Its share of the whole is no 0."""
    given = signed_batch()
    given["values"][:2], given["values"][0, 0], given["values"][1, 0] = -1.0, 1.0, 1.0
    if loss is over_what_others_count:
        given["values"][:4] = -1.0
    agrees(compiled(loss, **options), loss, given)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_batch_that_would_divide_by_zero_is_reported(microbatches: int) -> None:
    """As eager PyTorch has no finite loss either. One token counts as it does in a batch of several."""
    given = batch()
    given["values"][:] = -1.0
    own = compiled(over_what_others_count, microbatches=microbatches)
    with pytest.raises(CscError, match="is not finite"):
        own.train_step(given)
    given["values"][5, 1] = 1.0
    agrees(own, over_what_others_count, given)


# --- processes ------------------------------------------------------------------------------------------------------


def _trains() -> None:
    dist.init_process_group("gloo")
    model = compiled(on_the_way, mesh="pp=2,dp=2", microbatches=2)
    loss = model.train_step(batch())
    found = {name: p.grad.tolist() for name, p in model.named_parameters() if p.grad is not None and p.numel()}
    print(json.dumps({"loss": float(loss), "gradients": found}))
    dist.barrier()
    dist.destroy_process_group()


def test_in_processes_each_stage_counts_for_itself() -> None:
    eager, given = Model(on_the_way).double(), batch()
    expected = eager(**given)
    expected.backward()
    seen = set()
    for text in ranks(_trains, 4):
        found = json.loads(text.splitlines()[-1])
        assert found["loss"] == pytest.approx(float(expected.detach()), rel=1e-12)
        for name, gradient in found["gradients"].items():
            right = eager.get_parameter(name).grad
            assert right is not None
            torch.testing.assert_close(torch.tensor(gradient, dtype=torch.float64), right, rtol=1e-10, atol=1e-12)
            seen.add(name)
    assert seen == {name for name, p in eager.named_parameters() if p.grad is not None}
