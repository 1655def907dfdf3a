"""Mixed precision: against eager code with the same casts written out, bit for bit, and against float32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.capture.trace.export import without_kv_cache
from csc.capture.trace.traced_model import loss_of
from csc.driver.compiled import CompiledModel
from csc.driver.new_model import compiled_model
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.program import Program, compute_dtypes
from csc.reports.cost_report import report
from csc.reports.verification import default_tolerance, verify
from tests.compiler import small
from tests.compiler.conftest import Models
from tests.exactness import FLOAT32

LOW = torch.bfloat16
Gradients = dict[str, torch.Tensor]


class Layer(nn.Module):
    """Layer norm, attention, a gated MLP behind a norm that is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rms = nn.LayerNorm(16), small.RMSNorm()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.gate, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(hidden)).view(*hidden.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(2, 3) * 8**-0.5).softmax(-1) @ v
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.silu(self.gate(self.rms(hidden))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.project = nn.Linear(4, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens: torch.Tensor, signal: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.project(signal)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), labels.flatten())


def model() -> Model:
    torch.manual_seed(0)
    made = Model()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name or "rms" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def batch(samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 32, (samples, 6), generator=generator)
    signal = torch.randn(samples, 6, 4, generator=generator)
    return {"tokens": tokens, "signal": signal, "labels": tokens.roll(1, 1)}


def by_hand(made: Model, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Model.forward with every cast of the rules written out; the casts of parameters are differentiated, too."""
    full = dict(made.named_parameters())
    w = {name: p.to(LOW) for name, p in full.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:  # weights that only norms read stay in float32
        return F.layer_norm(x.float(), (16,), full[f"{name}.weight"], full[f"{name}.bias"]).to(LOW)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    hidden = F.embedding(given["tokens"], w["embed.weight"]) + linear(given["signal"].to(LOW), "project")
    for i in range(3):
        at = f"layers.{i}"
        q, k, v = (
            linear(norm(hidden, f"{at}.norm"), f"{at}.qkv").view(*hidden.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        )
        scores = (q @ k.transpose(2, 3) * 8**-0.5).float()
        mixed = scores.softmax(-1).to(LOW) @ v
        hidden = hidden + linear(mixed.transpose(1, 2).flatten(2), f"{at}.out")
        scaled = w[f"{at}.rms.weight"] * hidden  # first, as the module does: so gradients add up
        normed = (scaled * torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(LOW)
        hidden = hidden + linear(F.silu(linear(normed, f"{at}.gate")), f"{at}.down")
    return F.cross_entropy(linear(norm(hidden, "norm"), "head").float().flatten(0, 1), given["labels"].flatten())


def step(compiled: CompiledModel) -> tuple[torch.Tensor, Gradients]:
    compiled.model.zero_grad()
    loss = compiled.train_step(compiled.example)
    found = {name: p.grad for name, p in compiled.model.named_parameters() if p.grad is not None}
    compiled.model.zero_grad()
    return loss, found


def distance(found: Gradients, expected: Gradients) -> float:
    """|found - expected| / |expected| over all parameters together."""
    assert found.keys() == expected.keys() != set()
    difference = sum(float(((found[n].double() - expected[n].double()) ** 2).sum()) for n in expected)
    return (difference / sum(float((t.double() ** 2).sum()) for t in expected.values())) ** 0.5


@pytest.fixture(scope="module")
def base() -> CompiledModel:
    """The model in bf16 on one rank; one capture for all."""
    return csc.compile(model(), example=batch(2), precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"mesh": "pp=1"}, {"mesh": "pp=3"}, {"mesh": "pp=2", "recompute": "full"}])
@pytest.mark.long_cases("options0")
def test_the_casts_are_those_written_by_hand(base: CompiledModel, options: dict[str, Any]) -> None:
    compiled = base.with_options(**options)
    made: Any = compiled.model
    loss, found = step(compiled)
    expected_loss = by_hand(made, batch(2))
    expected_loss.backward()
    expected = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    assert loss.dtype is torch.float32 and torch.equal(loss, expected_loss.detach())
    assert {t.dtype for t in found.values()} == {torch.float32}
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.slow
def test_microbatches_and_replicas_add_up_in_float32(base: CompiledModel) -> None:
    """Four microbatches one after the other by hand, their gradients added in float32; two replicas of two."""
    made: Any = base.model
    whole = batch(8)
    made.zero_grad()
    for i in range(4):
        part = {name: t[2 * i : 2 * i + 2] for name, t in whole.items()}
        (by_hand(made, part) * 0.25).backward()
    expected = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    options = base.with_options(mesh="pp=2", microbatches=4).options
    compiled = compiled_model(made, options, whole, None, base.compiler)
    _, found = step(compiled)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    _, shared = step(compiled.with_options(mesh="pp=2,dp=2", microbatches=2))
    assert distance(shared, expected) < FLOAT32


@pytest.mark.slow
def test_what_is_computed_in_which_dtype(base: CompiledModel) -> None:
    compiled = base.with_options(mesh="pp=2")
    program = compiled.program
    dtypes = compute_dtypes(program)
    assert {name for name, dtype in dtypes.items() if dtype is torch.float32} == {
        f"{owner}.{part}" for owner in ("norm", *(f"layers.{i}.norm" for i in range(3))) for part in ("weight", "bias")
    }
    assert {p.dtype for p in program.parameters} == {torch.float32}
    for node in g.calls(program.graph):
        operands = {v.dtype for n in node.all_input_nodes if (v := g.tensor_value(n)) is not None}
        if g.op_name(node) in ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear"):
            assert operands == {LOW}
        if g.short_op(node) in ("_softmax", "native_layer_norm", "layer_norm", "softmax", "cross_entropy_loss"):
            assert LOW not in operands
    made = {v: n.meta["val"].dtype for r in program.regions for v, n in zip(r.outputs, _results(program, r.template))}
    assert made.pop("loss") is torch.float32
    assert set(made.values()) == {LOW}
    figures = report(compiled).components[0].figures
    numel = sum(p.numel for p in program.parameters)
    halved = sum(p.numel for p in program.parameters if dtypes[p.name] is LOW)
    assert (figures["parameters"], figures["gradients"], figures["optimizer"]) == (
        4 * numel + 2 * halved, 4 * numel, 8 * numel,
    )  # fmt: skip


def _results(program: Program, template: str) -> tuple[Any, ...]:
    return g.outputs(program.templates[template].graph)


DECOMPOSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matrix_exp": torch.matrix_exp,
    "det": lambda w: w * torch.det(w),
    "svdvals": lambda w: w * torch.linalg.svdvals(w),
    "matrix norm": lambda w: w / torch.linalg.norm(w, 2),
    "pinverse": torch.pinverse,
    "eigvalsh": lambda w: w * torch.linalg.eigvalsh(w @ w.T),
}


class Decomposed(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.function = nn.Linear(8, 8), function
        self.weight = nn.Parameter(2 * torch.eye(8) + 0.1 * torch.rand(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) @ self.function(self.weight)).square().mean()


@pytest.mark.parametrize("function", DECOMPOSED)
def test_what_bfloat16_cannot_do_is_done_in_float32(function: str) -> None:
    batch = {"x": torch.linspace(-1, 1, 32).reshape(4, 8)}
    eager, model = (Decomposed(DECOMPOSED[function]) for _ in range(2))
    loss = eager(**batch)
    loss.backward()
    own = csc.compile(model, example=batch, precision="bf16", cache=False).train_step(batch)  # checked
    assert float(own) == pytest.approx(loss.item(), rel=0.05)
    for (name, parameter), right in zip(model.named_parameters(), eager.parameters()):
        assert parameter.grad is not None and right.grad is not None
        assert float((parameter.grad - right.grad).norm()) <= 0.05 * float(right.grad.norm()), name


@pytest.mark.slow
def test_modules_kept_in_float32(base: CompiledModel) -> None:
    compiled = base.with_options(keep_fp32=["layers.1", "head"])
    kept = {name for name, dtype in compute_dtypes(compiled.program).items() if dtype is torch.float32}
    assert {n for n in kept if n.startswith("layers.1.") or n == "head.weight"} == {
        n for n, _ in compiled.model.named_parameters() if n.startswith("layers.1.") or n == "head.weight"
    }
    everything = compiled.with_options(keep_fp32=["*"])
    plain = compiled.with_options(precision=None, keep_fp32=None)
    exact = step(plain)[1]
    assert distance(step(compiled)[1], exact) < distance(step(base)[1], exact)
    assert distance(step(everything)[1], exact) < 0.02


@pytest.mark.slow
def test_llava_is_as_near_to_float32_as_the_model_in_bfloat16(models: Models) -> None:
    """HF's own bfloat16 run and csc's have errors of the same size."""
    compiled = models("llava", mesh="pp=3", freeze=["vision_tower"], precision="bf16")
    result = verify(compiled)
    assert result.params_missing == result.params_unexpected == ()
    assert result.params_checked == 43
    assert 0 < result.grad_rel_max < 0.05 < default_tolerance(compiled.options)
    assert result.loss_rel < 1e-3
    exact_loss, exact = step(models("llava", freeze=["vision_tower"]))
    loss, found = step(compiled)
    half = copy.deepcopy(compiled.model).bfloat16().train()
    low = {k: t.to(LOW) if t.is_floating_point() else t for k, t in compiled.example.items()}
    with without_kv_cache(half):
        half_loss = loss_of(half(**low))
    half_loss.backward()
    theirs = {name: p.grad for name, p in half.named_parameters() if p.grad is not None and name in exact}
    assert distance(found, exact) < 2 * distance(theirs, exact) < 0.04
    assert max(abs(loss - exact_loss), abs(half_loss.detach() - exact_loss)) < 1e-3 * exact_loss


@pytest.mark.slow
def test_recomputed_and_spread(models: Models) -> None:
    compiled = models("llava", mesh="pp=2", freeze=["vision_tower"], precision="bf16", microbatches=2)
    (loss, found), (again_loss, again) = step(compiled), step(compiled.with_options(recompute="full"))
    assert torch.equal(loss, again_loss)
    assert all(torch.equal(found[name], again[name]) for name in found) and found.keys() == again.keys()
    spread = verify(models("llava", mesh="cp=2", freeze=["vision_tower"], precision="bf16"))
    assert spread.params_checked == 43 and spread.grad_rel_max < 0.05


@pytest.mark.slow
def test_a_model_in_bfloat16_stays_as_it_is() -> None:
    half = {name: t.to(LOW) if t.is_floating_point() else t for name, t in small.mixed_batch().items()}
    plain = csc.compile(small.mixed().bfloat16(), example=half)
    assert g.canonical(plain.program.graph) == g.canonical(plain.with_options(precision="bf16").program.graph)


def test_options_that_cannot_be(base: CompiledModel) -> None:
    for options, says in (
        ({"precision": "fp8"}, "use 'bf16'"),
        ({"precision": None, "keep_fp32": ["head"]}, "without precision"),
        ({"keep_fp32": ["haed"]}, "no module"),
    ):
        with pytest.raises(InputError, match=says):
            _ = base.with_options(**options).program
