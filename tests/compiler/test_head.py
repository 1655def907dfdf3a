"""Heads whose logits are never whole: the loss and every gradient against eager PyTorch, and what is left as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from csc.passes.head import HeadPass
from csc.passes.runner import after
from torch import nn
from torch.nn import functional as F

import csc
from csc.analysis.costs import variant_cost
from csc.driver.compiled import CompiledModel
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program
from csc.reports.verification import verify
from tests.compiler.conftest import Models
from tests.models import hf
from tests.tiers import long

# The same Llama again and again, with options that its trace is not about.
pytestmark = pytest.mark.usefixtures("traces")

TOLERANCE = 1e-6  # relative, of norms, in float32: sums over chunks in another order
CHUNK, VOCABULARY = 8, 103
OPERATOR = "csc::linear_cross_entropy"


def parity(compiled: CompiledModel, tolerance: float = TOLERANCE) -> CompiledModel:
    """The operator is there, no logits are, and the numbers are eager's."""
    result = verify(compiled)
    assert result.params_missing == () and result.params_unexpected == () and result.params_checked > 0
    assert result.loss_rel <= tolerance and result.grad_rel_max <= tolerance
    return compiled


def heads(program: Program) -> list[list[bool]]:
    """What each operator in F makes: the loss, gradients of x, weight and bias."""
    return [
        list(g.bind(node)["output_mask"])
        for variant in program.variants.values()
        for node in g.calls(variant.forward)
        if g.op_name(node) == OPERATOR
    ]


def widest(program: Program) -> int:
    """The most rows of any value with the vocabulary for its last dimension."""
    vals = [n.meta["val"] for v in program.variants.values() for n in v.pruned.nodes if n.op == "call_function"]
    shapes = [t.shape for t in vals if isinstance(t, torch.Tensor) and t.dim() > 1]
    return max((shape[:-1].numel() for shape in shapes if shape[-1] == VOCABULARY), default=0)


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"final_logit_softcapping": 0.5, "attn_implementation": "eager"},  # low enough to bend
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"logits_scaling": 4.0},
    "Phi": {},  # a head with a bias
}


def family(name: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | FAMILIES[name] | changes)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():  # logits that are not all alike
        model.get_output_embeddings().weight.normal_(std=0.5)
    return model


def batch(samples: int = 2, length: int = 13) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (samples, length), generator=generator)
    labels = ids.clone()
    labels[0, :4] = labels[-1, -2:] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("name", [long("Llama"), "Gemma2", long("Cohere"), long("Granite"), long("Phi")])
def test_families(name: str) -> None:
    compiled = parity(csc.compile(family(name), example=batch(), loss_chunk=CHUNK, mesh="pp=2"))
    assert heads(compiled.program) == [[True, True, True, name == "Phi"]]
    assert not widest(compiled.program)


def test_microbatches_and_replicas_with_other_numbers_of_labels() -> None:
    parity(csc.compile(family("Llama"), example=batch(8), loss_chunk=CHUNK, mesh="dp=2", microbatches=2))


@pytest.mark.parametrize("mesh", [long("pp=2"), "dp=2,pp=2", long("cp=2"), "cp=2,pp=2"])
@pytest.mark.long_cases("cp=2,pp=2")
def test_multimodal(models: Models, mesh: str) -> None:
    given = hf.llava_batch(4 if "dp" in mesh else 2, length=57)
    compiled = parity(models("llava", given, mesh=mesh, loss_chunk=CHUNK), 2e-6 if "cp" in mesh else TOLERANCE)
    assert heads(compiled.program) == [[True, True, True, False]]


TENSOR: dict[str, dict[str, Any]] = {
    "tp=2,pp=2": {"schedule": "zb-h1", "microbatches": 2},
    "tp=2": {"recompute": "full", "sequence_parallel": True},
    "tp=2,dp=2": {"zero": 3, "freeze": ["model.embed_tokens"]},
    "cp=2,tp=2": {},
}


@pytest.mark.parametrize("mesh", TENSOR)
@pytest.mark.parametrize("name", ["Llama", long("Gemma2"), long("Phi")])
@pytest.mark.long_cases("Llama-tp=2,pp=2")
def test_words_divided_over_ranks(name: str, mesh: str) -> None:
    """Each rank makes logits of its own words, a chunk of tokens at a time."""
    options: dict[str, Any] = {"example": batch(8), "loss_chunk": CHUNK, "mesh": mesh, **TENSOR[mesh]}
    compiled = parity(csc.compile(family(name, vocab_size=104), **options), 5e-6)
    calls = [(name, node) for variant in compiled.program.variants.values() for node in g.calls(variant.pruned)
             if (name := g.op_name(node)).endswith("linear_cross_entropy")]  # fmt: skip
    assert {name for name, _ in calls} == {"csc::divided_linear_cross_entropy"}
    assert {g.bind(node)["weight"].meta["val"].shape[0] for _, node in calls} == {52}


def test_words_that_ranks_cannot_divide_stay_together() -> None:
    options: dict[str, Any] = {"example": batch(), "loss_chunk": CHUNK, "mesh": "tp=2"}
    assert heads(parity(csc.compile(family("Llama"), **options)).program) == [[True, True, True, False]]


def test_tied_weights_have_the_sum_of_both_gradients(models: Models) -> None:
    parity(models("llava_tied", mesh="pp=2", loss_chunk=CHUNK))


def test_what_is_frozen_is_not_made(models: Models) -> None:
    frozen = models("llava", mesh="pp=2", loss_chunk=CHUNK, freeze=["language_model", "lm_head"])
    assert heads(parity(frozen).program) == [[True, True, False, False]]


def test_what_nothing_in_front_trains_with_is_not_made() -> None:
    model = family("Llama", tie_word_embeddings=False)
    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)
    compiled = parity(csc.compile(model, example=batch(), cache=False, loss_chunk=CHUNK))
    assert heads(compiled.program) == [[True, False, True, False]]


@pytest.mark.parametrize("recompute", [long("selective"), "full"])
def test_what_b_makes_again_f_does_not_make(recompute: str) -> None:
    options: dict[str, Any] = {"loss_chunk": CHUNK, "recompute": recompute}
    compiled = parity(csc.compile(family("Llama"), example=batch(), **options))
    again = recompute == "full"
    assert heads(compiled.program) == [[True, not again, not again, False]]


def test_costs_count_every_product_and_the_gradients_that_f_keeps() -> None:
    given = batch()
    made = {}
    for chunk in (0, CHUNK):
        compiled = csc.compile(family("Llama"), example=given, loss_chunk=chunk)
        region = next(one for one in compiled.program.regions if one.name == "lm_head")
        made[chunk] = variant_cost(compiled.program.variants[region.variant])
    whole, chunked = made[0], made[CHUNK]
    tokens, width = given["labels"].numel(), SIZES["hidden_size"]
    product = 2 * tokens * VOCABULARY * width
    assert (whole.forward.flops, whole.backward_input.flops, whole.backward_weight.flops) == (product,) * 3
    assert (chunked.forward.flops, chunked.backward_input.flops, chunked.backward_weight.flops) == (3 * product, 0, 0)
    assert chunked.saved == 4 * width * (tokens + VOCABULARY)
    assert chunked.forward.bytes > 4 * tokens * VOCABULARY * 9


def test_bfloat16_is_as_near_to_float64_as_eager_is() -> None:
    given = batch(4, 40)
    compiled = csc.compile(family("Llama").bfloat16(), example=given, cache=False, loss_chunk=CHUNK)
    result = verify(compiled, float64=True)
    assert heads(compiled.program) and not result.params_missing
    eager, own = (max(pair[i] for pair in result.from_float64.values()) for i in (0, 1))
    assert own <= 1.5 * eager


def test_mixed_precision() -> None:
    model = family("Llama")
    whole = csc.compile(model, example=batch(), cache=False, precision="bf16", loss_chunk=0)
    chunked = whole.with_options(loss_chunk=CHUNK)
    losses = [float(one.train_step(batch())) for one in (whole, chunked)]
    assert heads(chunked.program) and losses[0] == pytest.approx(losses[1], rel=1e-3)
    x = next(n for v in chunked.program.variants.values() for n in g.calls(v.forward) if g.op_name(n) == OPERATOR)
    assert x.args[0].meta["val"].dtype is torch.bfloat16


@pytest.mark.parametrize("mesh", [long("pp=1"), long("tp=2")])
def test_inductor_leaves_the_operator_as_it_is(mesh: str) -> None:
    """In steps with other numbers of labels, too."""
    model = family("Llama", num_hidden_layers=1, vocab_size=104)
    compiled = csc.compile(model, example=batch(), cache=False, loss_chunk=CHUNK, fuse=True, mesh=mesh)
    parity(compiled, 1e-5)
    fewer = batch()
    fewer["labels"][:, :7] = -100
    result = verify(compiled, fewer)
    assert result.params_missing == () and result.loss_rel <= 1e-5 and result.grad_rel_max <= 1e-5


def test_steps_repeat_to_the_bit() -> None:
    """Gradients are finished where they lie: a second step must not find what the first one left."""
    model = family("Llama")
    compiled = csc.compile(model, example=batch(), loss_chunk=CHUNK, microbatches=2)
    steps = []
    for _ in range(2):
        compiled.zero_grad()
        compiled.train_step(batch())
        steps.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(torch.equal(steps[0][name], gradient) for name, gradient in steps[1].items())


def test_evaluation_makes_no_gradient() -> None:
    model = family("Llama")
    compiled = csc.compile(model, example=batch(), loss_chunk=CHUNK)
    with torch.no_grad():
        expected = model(**batch()).loss
    torch.testing.assert_close(compiled.eval_step(batch()), expected, rtol=TOLERANCE, atol=0)


class Head(nn.Module):
    """An embedding, a linear layer, and a head whose loss is written in a way of its own."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)
        self.loss = loss

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self, self.first(self.embed(input_ids)).tanh(), labels)


def flat(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **options)


def summed(model: Head, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return flat(model.head(hidden).float(), labels, reduction="sum") / (labels != -100).sum()


TAKEN: dict[str, Callable[..., torch.Tensor]] = {
    "shifted logits": lambda m, h, y: flat(m.head(h)[..., :-1, :].contiguous(), y[..., 1:]),
    "shifted twice": lambda m, h, y: flat(m.head(h)[:, 1:][:, :-1], y[..., 2:]),
    "a sum over the number of labels": summed,
    "a matmul with the weight turned": lambda m, h, y: flat(torch.matmul(h, m.head.weight.t()), y),
    "a cap within a scale": lambda m, h, y: flat(2 * (torch.tanh(m.head(h) * 3) / 0.7), y),
    "a cap without numbers": lambda m, h, y: flat(m.head(h).tanh(), y),
    "half a loss": lambda m, h, y: flat(m.head(h), y) * 0.5,
    "another label to ignore": lambda m, h, y: flat(m.head(h), y.masked_fill(y == -100, 5), ignore_index=5),
    "float64 logits of a float64 model": lambda m, h, y: flat(m.head(h).double(), y),
}


@pytest.mark.parametrize("name", TAKEN)
def test_ways_to_write_it(name: str) -> None:
    model = Head(TAKEN[name])
    compiled = csc.compile(
        model.double() if "float64" in name else model, example=batch(), cache=False, loss_chunk=CHUNK
    )
    assert heads(parity(compiled, 1e-12 if "float64" in name else TOLERANCE).program)


def with_z_loss(model: Head, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.head(hidden)
    return flat(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


LEFT: dict[str, Callable[..., torch.Tensor]] = {
    "z-loss": with_z_loss,
    "smoothed labels": lambda m, h, y: flat(m.head(h), y, label_smoothing=0.1),
    "weights of classes": lambda m, h, y: flat(m.head(h), y, weight=torch.linspace(1, 2, VOCABULARY)),
    "a loss for each token": lambda m, h, y: flat(m.head(h), y, reduction="none").mean(),
    "logits behind a nonlinearity": lambda m, h, y: flat(m.head(h).relu(), y),
    "logits cut in their classes": lambda m, h, y: flat(m.head(h)[..., 1:], y.clamp(max=VOCABULARY - 2)),
    "logits masked by what enters the head": lambda m, h, y: flat(m.head(h).masked_fill(h[..., :1] > 0.1, 0.0), y),
    "two caps": lambda m, h, y: flat(m.head(h).tanh().tanh(), y),
    "logits raised beyond their operands": lambda m, h, y: flat(m.head(h).double(), y).float(),
    "a head that is no matrix": lambda m, h, y: flat(h @ m.embed.weight[None, :].transpose(1, 2), y),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_plain_head_stays_as_it_is(name: str) -> None:
    compiled = csc.compile(Head(LEFT[name]), example=batch(), cache=False, loss_chunk=CHUNK)
    assert not heads(parity(compiled).program)


def test_small_logits_stay_whole_and_large_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Program:
        return csc.compile(Head(TAKEN["half a loss"]), example=batch(), cache=False).program

    assert not heads(made())
    logits = batch()["labels"].numel() * VOCABULARY * 4
    for room, chunked in ((logits // 2, False), (logits // 2 - 1, True)):
        monkeypatch.setattr("csc.kernels.linear_cross_entropy.ROOM_ON_CPU", room)
        assert bool(heads(made())) == chunked
    before = after(csc.compile(Head(TAKEN["half a loss"]), example=batch(), cache=False).history(), "loss")
    assert HeadPass()(before, Options()) is not before
    assert HeadPass()(before, Options(mesh=Mesh(tp=2))) is not before, "ranks cannot divide 103 words"
    monkeypatch.setattr("csc.kernels.linear_cross_entropy.ROOM_ON_CPU", logits // 2)
    assert HeadPass()(before, Options(mesh=Mesh(tp=2))) is before


@pytest.mark.parametrize(("length", "least", "options", "chunked"), [
    (8, 0, {"fuse": True}, True), (7, 0, {"fuse": True}, False), (8, 0, {}, False),
    (8, 0, {"fuse": True, "loss_chunk": 0}, False), (8, 4 * 16 * VOCABULARY, {"fuse": True}, True),
    (8, 4 * 16 * VOCABULARY + 1, {"fuse": True}, False),
])  # fmt: skip
def test_with_fuse_logits_that_are_not_large_are_no_values_either(
    length: int, least: int, options: dict[str, Any], chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two samples have as many tokens as the head is wide (16), and so many bytes: bits are no promise there."""
    monkeypatch.setattr("csc.passes.head.FASTER", least)
    whole = csc.compile(Head(TAKEN["half a loss"]), example=batch(2, length), cache=False)
    before = after(whole.history(), "loss")
    assert (HeadPass(options.get("loss_chunk"))(before, Options(**options)) is not before) == chunked


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_a_sample_without_labels_beside_one_with_few(mesh: str) -> None:
    given = batch()
    given["labels"][0] = given["labels"][1, :-4] = -100  # the last two have none
    compiled = csc.compile(family("Llama"), example=batch(), loss_chunk=CHUNK, mesh=mesh)
    result = verify(compiled, given)
    assert result.params_missing == () and result.params_checked > 0
    assert result.loss_rel <= TOLERANCE and result.grad_rel_max <= TOLERANCE


@pytest.mark.parametrize("given", [-1, 1.5, True, "all"])
def test_a_chunk_that_is_no_number_of_tokens_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="loss_chunk"):
        csc.compile(Head(TAKEN["half a loss"]), example=batch(), loss_chunk=given)


LINEAR_CROSS_ENTROPY: Any = getattr(nn, "LinearCrossEntropyLoss", None)


@pytest.mark.skipif(LINEAR_CROSS_ENTROPY is None, reason="torch 2.13 brings nn.LinearCrossEntropyLoss")
@pytest.mark.parametrize("chunked", [False, True])
def test_torchs_own_head_with_its_loss_is_found(chunked: bool) -> None:
    """Whatever torch is told of how to make its gradients."""

    def loss(model: Head, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model.own(hidden.flatten(0, 1), labels.flatten())
        return result

    model: Any = Head(loss)
    options = nn.modules.linear_cross_entropy_options.LinearCrossEntropyOptions() if chunked else None  # type: ignore[attr-defined]
    model.own = LINEAR_CROSS_ENTROPY(16, VOCABULARY, bias=True, ignore_index=-100, options=options)
    compiled = parity(csc.compile(model, example=batch(), cache=False, loss_chunk=CHUNK, microbatches=2))
    assert heads(compiled.program) == [[True, True, True, True]] and not widest(compiled.program)
