"""Dropout: the same masks whatever the split, and the gradients of eager code that has these masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from csc.kernels.dropout import DROPOUT, NORMAL, UNIFORM, mixed
from torch import fx, nn

import csc
from csc.analysis.operators.execution import is_random
from csc.driver.compiled import CompiledModel
from csc.driver.new_model import compiled_model
from csc.errors import InputError
from csc.ir import graph as g
from csc.reports.verification import verify
from csc.runtime import executor
from tests.compiler import small
from tests.exactness import FLOAT32
from tests.models import hf
from tests.tiers import long

Step = tuple[torch.Tensor, dict[str, torch.Tensor]]


def step(compiled: CompiledModel, seed: int = 0) -> Step:
    compiled.model.zero_grad()
    torch.manual_seed(seed)
    loss = compiled.train_step(compiled.example)
    found = {name: p.grad for name, p in compiled.model.named_parameters() if p.grad is not None}
    compiled.model.zero_grad()
    return loss, found


def same(one: Step, other: Step) -> None:
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys() != set()
    assert [name for name in one[1] if not torch.equal(one[1][name], other[1][name])] == []


# --- the operators -------------------------------------------------------------------------------------------------


def seed_of(own: int, of_step: int = 0, first: int = 0) -> torch.Tensor:
    return torch.tensor([own, of_step, first])


def test_dropout_keeps_and_scales() -> None:
    seed = seed_of(5)
    x = torch.randn(200, 300, requires_grad=True)
    y = DROPOUT(x, 0.3, seed, 0)
    kept = y != 0
    assert abs(float(kept.float().mean()) - 0.7) < 0.01
    torch.testing.assert_close(y[kept], (x / 0.7)[kept])
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(gradient != 0, kept) and torch.allclose(gradient[kept], torch.tensor(1 / 0.7))
    assert torch.equal(DROPOUT(x, 0.3, seed, 0), y)
    columns = DROPOUT(x.t().contiguous().t(), 0.3, seed, 0)
    assert torch.equal(columns, y), "the mask does not depend on strides"
    agree = [((DROPOUT(x, 0.3, s, i) != 0) == kept).float().mean() for s, i in ((seed, 1), (seed_of(6), 0))]
    assert all(abs(float(share) - 0.58) < 0.01 for share in agree), "other masks are independent: 0.7^2 + 0.3^2"
    assert not DROPOUT(x, 1.0, seed, 0).any()


def test_tokens_get_their_part_of_the_whole_mask() -> None:
    x = torch.ones(2, 10, 4)
    whole, tokens = DROPOUT(x, 0.5, seed_of(1), 3), torch.tensor([7, 0, 4])
    assert torch.equal(DROPOUT(x[:, :3], 0.5, seed_of(1), 3, tokens, 1, 10), whole[:, tokens])


def test_so_do_entries_of_another_dimension() -> None:
    """Alone, and with tokens; in the gradient too."""
    x, seed = torch.ones(2, 10, 6, requires_grad=True), seed_of(1)
    whole, tokens, entries = DROPOUT(x, 0.5, seed, 3), torch.tensor([7, 0, 4]), torch.tensor([1, 4])
    alone = DROPOUT(x[..., :2], 0.5, seed, 3, None, 0, 0, entries, 2, 6)
    assert torch.equal(alone, whole[..., entries])
    both = DROPOUT(x[:, :3, :2], 0.5, seed, 3, tokens, 1, 10, entries, 2, 6)
    assert torch.equal(both, whole[:, tokens][..., entries])
    (gradient,) = torch.autograd.grad(both.sum(), x)
    assert torch.equal(gradient[:, :3, :2], both.detach()) and not gradient[:, 3:].any()


def test_numbers_of_a_seed() -> None:
    given = (seed_of(1), 0, [1000], torch.float32, torch.device("cpu"))
    uniform, normal = UNIFORM(*given), NORMAL(*given)
    assert torch.equal(uniform, UNIFORM(*given)) and abs(float(uniform.mean()) - 0.5) < 0.05
    assert abs(float(normal.mean())) < 0.15 and abs(float(normal.std()) - 1) < 0.1
    for draw in (UNIFORM, NORMAL):
        whole = draw(seed_of(1, 7), 0, [6, 3], *given[3:], 6)
        parts = [draw(seed_of(own, 7, first), 0, [2, 3], *given[3:], 2) for own, first in ((1, 0), (2, 2), (3, 4))]
        assert torch.equal(torch.cat(parts), whole) and len(whole.unique()) == 18
        assert torch.equal(
            draw(seed_of(2, 7, 1), 0, [4, 3], *given[3:], 2), draw(seed_of(1, 7), 0, [6, 3], *given[3:], 3)[2:]
        )
    found = {mixed(a, b) for a in range(50) for b in range(50)}
    assert len(found) == 2500 and all(0 <= one < 2**63 for one in found)


# --- a model whose eager form can be given the same masks ------------------------------------------------------------


class Seeded(nn.Module):
    """Dropout with the mask that csc gives to one place in the model."""

    def __init__(self, p: float, region: str, index: int) -> None:
        super().__init__()
        self.p, self.region, self.index, self.seed = p, region, index, executor.of_microbatch(0, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return DROPOUT(x, self.p, executor.seed_of(self.seed, self.region), self.index)


def model(seeded: bool = False) -> small.Dropped:
    made = small.dropped()
    if seeded:
        made.drop = Seeded(0.1, "drop.", 0)  # type: ignore[assignment]
        for i, layer in enumerate(made.layers):
            layer.first, layer.second = Seeded(0.2, f"layers.{i}.", 0), Seeded(0.4, f"layers.{i}.", 1)
    return made


@pytest.fixture(scope="module")
def base() -> CompiledModel:
    return csc.compile(model(), example=small.text_batch(8, 10), microbatches=4)


@pytest.mark.slow
def test_eager_with_the_same_masks_has_the_same_bits(base: CompiledModel) -> None:
    eager, batch = model(seeded=True), small.text_batch(8, 10)
    torch.manual_seed(3)
    drawn = executor.draw()
    counts = [int((labels[:, 1:] != -100).sum()) for labels in batch["labels"].split(2)]
    total = 0.0
    for i in range(4):
        for part in eager.modules():
            if isinstance(part, Seeded):
                part.seed = executor.of_microbatch(drawn, i)
        loss = eager(**{name: t[2 * i : 2 * i + 2] for name, t in batch.items()})
        (loss * (counts[i] / sum(counts))).backward()
        total += float(loss.detach().double()) * counts[i] / sum(counts)
    expected = {name: p.grad for name, p in eager.named_parameters()}
    for options in ({"mesh": "pp=1"}, {"mesh": "pp=3", "schedule": "zb-h1"}):
        same(step(base.with_options(**options), 3), (torch.tensor(total), expected))


SPLITS = [
    {"mesh": "pp=2", "schedule": "gpipe"},
    {"mesh": "pp=3", "schedule": "1f1b"},
    {"mesh": "pp=2", "schedule": "interleaved-zb"},
    {"mesh": "dp=2", "microbatches": 2},
    {"mesh": "dp=2,pp=2", "microbatches": 2},
    {"mesh": "dp=4", "microbatches": 1},
    {"mesh": "pp=2", "recompute": "full"},
    {"mesh": "pp=2", "freeze": ["embed"]},
]


@pytest.mark.slow
class Noisy(nn.Module):
    """Noise that a call in place draws, added to what an embedding gives."""

    def __init__(self, fill: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fill, self.embed, self.head = fill, nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.embed(input_ids))
        hidden = hidden + 0.1 * self.fill(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


FILLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 3),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0, 0.5),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(1, 0.1),
    "gumbel_softmax": lambda x: nn.functional.gumbel_softmax(x, hard=True),
}


@pytest.mark.parametrize("name", ["uniform_", "exponential_", "gumbel_softmax", long("normal_"), long("cauchy_")])
@pytest.mark.long_cases("gumbel_softmax", "exponential_")
def test_calls_in_place_draw_by_place(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Their microbatches are compared with eager PyTorch, and a seed gives one step, on whatever ranks."""
    ids = torch.arange(24).view(4, 6) % 20
    steps = []
    for mesh in ("pp=1", "pp=2"):
        compiled = csc.compile(
            Noisy(FILLS[name]), example={"input_ids": ids, "labels": ids}, mesh=mesh, microbatches=2, cache=False
        )
        compiled.train_step(compiled.example)
        steps.append(step(compiled))
    same(*steps)
    assert not torch.equal(step(compiled, seed=1)[0], steps[0][0])
    assert "not checked" not in caplog.text


class Drawn(nn.Module):
    """The mean and the mean square of what is drawn, so that a loss shows the distribution."""

    def __init__(self, fill: Callable[[torch.Tensor], torch.Tensor], power: int) -> None:
        super().__init__()
        self.fill, self.power, self.weight = fill, power, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.fill(x) ** self.power).mean()


@pytest.mark.parametrize("name", ["uniform_", "normal_", "exponential_", "log_normal_"])
def test_they_have_torchs_distribution(name: str) -> None:
    x = torch.zeros(400, 500)
    for power in (1, 2):
        compiled = csc.compile(Drawn(FILLS[name], power), example={"x": x}, cache=False)
        torch.manual_seed(0)
        expected = (FILLS[name](x) ** power).mean()
        torch.testing.assert_close(compiled.train_step({"x": x}), expected, rtol=0.02, atol=0.0)


def test_the_same_seed_gives_the_same_step_whatever_the_split(base: CompiledModel) -> None:
    loss, expected = step(base)
    same(step(base), (loss, expected))
    assert not torch.equal(step(base, 1)[0], loss)
    torch.manual_seed(0)
    two = [base.train_step(base.example) for _ in range(2)]
    base.model.zero_grad()
    assert torch.equal(two[0], loss) and not torch.equal(two[1], loss), "every step draws anew"
    for options in SPLITS:
        found_loss, found = step(base.with_options(**options))
        assert torch.equal(found_loss, loss), options
        trained = {name: expected[name] for name in found}
        assert len(trained) == len(expected) - ("freeze" in options)
        if "dp" in options["mesh"]:  # replicas are added up in another order
            assert max(float((found[n] - t).norm() / t.norm()) for n, t in trained.items()) < FLOAT32, options
        else:
            same((loss, found), (loss, trained))


@pytest.mark.slow
def test_two_replicas_have_the_bits_of_two_microbatches(base: CompiledModel) -> None:
    def divided(**options: Any) -> CompiledModel:
        return compiled_model(
            base.model, base.with_options(**options).options, small.text_batch(4, 10), None, base.compiler
        )

    expected = step(divided(microbatches=2))
    same(step(divided(microbatches=1, mesh="dp=2")), expected)
    same(step(divided(microbatches=1, mesh="dp=2,pp=3")), expected)


@pytest.mark.slow
def test_microbatches_of_different_lengths(base: CompiledModel) -> None:
    def run(mesh: str) -> Step:
        compiled = base.with_options(mesh=mesh, microbatches=2, precision="bf16", recompute="full")
        torch.manual_seed(0)
        loss = compiled.train_step([small.text_batch(2, 10), small.text_batch(2, 14)])
        found = {name: p.grad for name, p in compiled.model.named_parameters() if p.grad is not None}
        compiled.model.zero_grad()
        return loss, found

    same(run("pp=1"), run("pp=3"))


@pytest.mark.slow
def test_spread_tokens_have_the_masks_of_the_whole(base: CompiledModel) -> None:
    loss, expected = step(base)
    found_loss, found = step(base.with_options(mesh="cp=2"))
    assert abs(float(found_loss - loss)) < 1e-5
    assert max(float((found[n] - t).norm() / t.norm()) for n, t in expected.items()) < 1e-5


def test_nothing_is_saved_for_dropout(base: CompiledModel) -> None:
    program = base.program
    layer = program.variants[program.region("layers.1").variant]
    _, saved = g.outputs(layer.forward)
    assert not any(node.meta["val"].dtype is torch.bool for node in saved)
    assert verify(base).random_ops == 7
    assert [region.variant for region in program.regions if region.kind == "layer"] == ["dropped_layer"] * 3


# --- Hugging Face's models -------------------------------------------------------------------------------------------


def gpt2(dropout: float = 0.1) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, **ends, tie_word_embeddings=False))


def gpt2_batch(samples: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (samples, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def by_autograd(compiled: CompiledModel, seed: int) -> Step:
    """The step from the forward graphs alone: one microbatch, regions in order, PyTorch's autograd through them."""
    torch.manual_seed(seed)
    random = executor.of_microbatch(executor.draw(), 0)
    program, weights = compiled.program, dict(compiled.model.named_parameters())
    entries: dict[Any, torch.Tensor] = {("input", n): t for n, t in compiled.example.items()}
    entries |= {("constant", n): t for n, t in program.constants.items()} | {("random", "seed"): random}
    shared = program.shared
    tables = dict(zip(shared.output_node().meta["names"], _run(shared, entries)))
    made: dict[str, torch.Tensor] = {}
    for region in program.regions:
        template = program.templates[region.template]
        values = {("activation", str(i)): made[v] for i, v in enumerate(region.activations)}
        values |= {("shared", own): tables[t] for own, t in zip(template.shared, region.shared)}
        values |= {("shared", "seed"): executor.seed_of(random, f"{region.name}.")}
        values |= {("parameter", own): weights[p] for own, p in zip(template.parameters, region.parameters)}
        made.update(zip(region.outputs, _run(template.graph, values)))
    made["loss"].backward()
    found = {name: p.grad for name, p in weights.items() if p.grad is not None}
    compiled.model.zero_grad()
    return made["loss"].detach(), found


def _run(graph: fx.Graph, values: Any) -> Any:
    return fx.Interpreter(nn.Module(), graph=graph).run(*(values[n.meta["role"]] for n in g.placeholders(graph)))


@pytest.mark.slow
def test_gpt2_with_dropout_of_hidden_states_and_attention() -> None:
    compiled = csc.compile(gpt2(), example=gpt2_batch(2))
    assert sum("attention written out" in note for note in compiled.program.notes) == 3
    assert not any(is_random(node) for node in g.calls(compiled.program.graph))
    found = step(compiled)
    same(found, by_autograd(compiled, 0))
    for options in ({"mesh": "pp=2"}, {"mesh": "pp=3", "schedule": "zb-h1", "recompute": "full"}):
        same(step(compiled.with_options(**options)), found)
    with pytest.raises(InputError, match="dropout of its weights"):
        _ = compiled.with_options(mesh="cp=2").program


@pytest.mark.slow
def test_attention_written_out_is_attention() -> None:
    """With a rate too small to drop anything, GPT-2 has the gradients of eager GPT-2 without dropout."""
    compiled = csc.compile(gpt2(1e-12), example=gpt2_batch(2), mesh="pp=2")
    assert compiled.program.notes
    _, found = step(compiled)
    eager = gpt2(0.0).train()
    eager(**gpt2_batch(2), use_cache=False).loss.backward()
    for name, p in eager.named_parameters():
        assert float((found[name] - p.grad).norm()) <= 2e-6 * float(p.grad.norm()) + 1e-8, name


@pytest.mark.long
def test_llava_with_dropout_of_attention_of_both_towers() -> None:
    made = hf.llava()
    made.config.text_config.attention_dropout = made.config.vision_config.attention_dropout = 0.1
    for part in made.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.1
        elif hasattr(part, "dropout") and isinstance(part.dropout, float):
            part.dropout = 0.1
    compiled = csc.compile(made, example=hf.llava_batch(4), microbatches=2)
    assert verify(compiled).random_ops >= 6
    expected = step(compiled)
    for options in ({"mesh": "pp=3", "schedule": "zb-h1"}, {"mesh": "pp=2", "recompute": "selective"}):
        same(step(compiled.with_options(**options)), expected)
    shared_loss, _ = step(compiled.with_options(mesh="dp=2,pp=2", microbatches=1))
    assert torch.equal(shared_loss, expected[0])


class Drawing(nn.Module):
    """Noise, a random gate and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x + 0.1 * torch.randn_like(x))
            x = x * torch.bernoulli(torch.full_like(x, 0.5)) + torch.rand_like(x)
            x = x * torch.floor(torch.rand(x.shape[0], 1) + 0.9)
        return x.pow(2).mean()


def test_other_random_numbers() -> None:
    torch.manual_seed(0)
    compiled = csc.compile(Drawing(), example={"x": torch.randn(4, 8)})
    assert not any(is_random(node) for node in g.calls(compiled.program.graph))
    found = step(compiled)
    assert not torch.equal(step(compiled, 1)[0], found[0])
    same(step(compiled.with_options(mesh="pp=3")), found)


class Diffused(nn.Module):
    """Noise, times and dropped samples, as a diffusion head draws them."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.embed = nn.Linear(8, 8), nn.Embedding(1000, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        time = torch.randint(0, 1000, (len(x),), device=x.device)
        dropped = torch.rand(x.shape[0], 1, device=x.device) < 0.5
        pairs = torch.rand(2 * len(x), 8).view(len(x), 2, 8).sum(1)
        hidden = torch.where(dropped, 0.0, x) * (1 - time[:, None] / 1000) + noise + pairs
        return (self.head(hidden + self.embed(time)) - noise).square().mean()


def test_what_has_rows_for_each_sample_is_drawn_alike_in_any_number_of_microbatches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model, x = Diffused(), torch.randn(8, 8)
    options: list[dict[str, Any]] = [{"microbatches": 4}, {"microbatches": 1, "mesh": "dp=2"}]
    compiled = csc.compile(model, example={"x": x}, cache=False)
    compiled.train_step({"x": x})
    assert "not checked" not in caplog.text
    assert not any("draws" in note for note in compiled.program.notes)
    loss, expected = step(compiled)
    assert 0 < len(expected["embed.weight"].abs().sum(1).nonzero()) <= 8
    for one in options:
        found_loss, found = step(csc.compile(model, example={"x": x}, cache=False, check=False, **one))
        torch.testing.assert_close(found_loss, loss)
        torch.testing.assert_close(found, expected)


class Placed(nn.Module):
    """What `draw` makes of a hidden state, [samples, tokens, 8], and a weight of 8."""

    def __init__(self, draw: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.draw, self.weight = draw, nn.Parameter(torch.ones(8))
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.draw(torch.tanh(self.embed(input_ids)), self.weight))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _of_tokens_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    samples, tokens, width = x.shape
    across = x.transpose(0, 1).flatten(0, 1)
    return x + torch.randn_like(across).view(tokens, samples, width).transpose(0, 1)


PLACED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "tokens before samples": lambda x, w: x + torch.randn(x.shape[1], x.shape[0], 8).transpose(0, 1),
    "features before samples": lambda x, w: x + torch.randint(0, 3, (8, len(x))).t()[:, None].float(),
    "tokens joined before samples": _of_tokens_first,
    "whole: a weight": lambda x, w: x @ (torch.eye(8) + 0.3 * torch.randn(8, 8)),
    "whole: like a weight": lambda x, w: x * (w + 0.3 * torch.randn_like(w)),
    "whole: dropped weight": lambda x, w: x * nn.functional.dropout(w, 0.3),
    "whole: chances of a weight": lambda x, w: x * torch.bernoulli(torch.sigmoid(w)),
    "whole: one number": lambda x, w: x * torch.rand(1),
}


DROPPED = "whole: dropped weight"


@pytest.mark.parametrize(
    "name", [name if place in (1, 2, 3) or name == DROPPED else long(name) for place, name in enumerate(PLACED)]
)
def test_each_sample_has_its_numbers_and_all_have_those_of_a_weight(name: str) -> None:
    """With as many samples as the weight has rows, so that sizes do not tell them apart."""
    ids = torch.arange(24).view(8, 3) % 20
    batch = {"input_ids": ids, "labels": ids}
    steps = []
    for options in ({}, {"microbatches": 4}, {"microbatches": 2, "mesh": "dp=2,pp=2"}):
        compiled = csc.compile(Placed(PLACED[name]), example=batch, cache=False, check=False, **options)  # type: ignore[arg-type]
        assert not compiled.program.notes
        steps.append(step(compiled))
    for loss, gradients in steps[1:]:
        torch.testing.assert_close(loss, steps[0][0])
        torch.testing.assert_close(gradients, steps[0][1])
    assert not torch.equal(step(compiled, seed=1)[0], steps[2][0])


def test_chances_that_are_learned_have_a_gradient_of_0() -> None:
    model, ids = Placed(PLACED["whole: chances of a weight"]), torch.arange(24).view(8, 3) % 20
    compiled = csc.compile(model, example={"input_ids": ids, "labels": ids}, cache=False)
    compiled.train_step(compiled.example)
    assert model.weight.grad is not None and not model.weight.grad.any()


class Repeating(nn.Module):
    """A loop over samples, so that the trace is for one number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([self.linear(row) for row in x])
        return (rows + torch.randn(8, 8)).square().mean()


def test_draws_of_a_trace_for_one_number_of_samples_are_said() -> None:
    compiled = csc.compile(Repeating(), example={"x": torch.randn(8, 8)}, cache=False)
    assert any("draws anew for each microbatch" in note for note in compiled.program.notes)


def test_the_places_of_samples_in_a_step() -> None:
    assert executor.first_samples([3, 1, 4]) == [0, 3, 4, 8]
    assert executor.of_microbatch(5, 2, 3) == executor.Seeds(executor.of_microbatch(5, 2).own, 5, 3)


class Masked(nn.Module):
    """Ones, masked with a chance for each of 8 columns; the gradient of `ones` says how many of them were kept."""

    def __init__(self, chance: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.ones, self.chance = nn.Parameter(torch.ones(8)), chance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.empty_like(x).bernoulli_(self.chance(x))
        hidden = x * self.ones
        return (hidden * kept * torch.randint_like(hidden, 1, 2)).sum(1).mean()


CHANCES = {
    "of each entry": lambda x: torch.full_like(x, 0.7),
    "of each column": lambda x: torch.linspace(0.0, 1.0, 8, dtype=torch.float64),
    "of all": lambda x: torch.tensor(0.7),
}


@pytest.mark.parametrize("chance", CHANCES.values(), ids=CHANCES.keys())
def test_chances_in_a_tensor(chance: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """`mask.bernoulli_(p)`."""
    x = torch.ones(128, 8)
    model = Masked(chance)
    csc.compile(model, example={"x": x}, cache=False).train_step({"x": x})
    expected = chance(x).expand(x.shape)[0].float()
    assert model.ones.grad is not None
    assert float((model.ones.grad - expected).abs().max()) < 0.2  # of 128 each
    sure = (expected == 0) | (expected == 1)
    assert torch.equal(model.ones.grad[sure], expected[sure])


class Permuting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x)[torch.randperm(len(x))] * x).pow(2).mean()


def test_what_csc_does_not_seed_is_said() -> None:
    compiled = csc.compile(Permuting(), example={"x": torch.randn(4, 8)})
    assert any("randperm draws from torch's generator" in note for note in compiled.program.notes)


@pytest.mark.parametrize("options", [{"microbatches": 2}, long({"mesh": "dp=2"})], ids=str)
def test_one_permutation_of_all_samples_is_refused_where_each_microbatch_would_draw_its_own(
    options: dict[str, Any],
) -> None:
    with pytest.raises(InputError, match=r"randperm draws one permutation for all samples.*draw it outside") as refused:
        csc.compile(Permuting(), example={"x": torch.randn(4, 8)}, check=False, **{"microbatches": 2, **options})
    assert refused.value.where.startswith("test_dropout.py:")
