"""Context parallelism of encoders, another number of ranks for each: the loss and every gradient of eager PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from benchmarks.coverage.models import qwen2_vl
from csc.errors import InputError
from csc.reports.verification import verify
from tests.compiler.conftest import Models
from tests.models import plain
from tests.models.images import grids_batch
from tests.tiers import long

pytestmark = pytest.mark.slow

FLOAT32 = 1e-5  # what is promised; 1.2e-6 is the most that was seen

Batch = dict[str, torch.Tensor]


def parity(compiled: csc.CompiledModel, gradients: int) -> None:
    result = verify(compiled)
    assert result.params_missing == ()
    assert result.params_unexpected == ()
    assert result.params_checked == gradients
    assert result.loss_rel <= FLOAT32
    assert result.grad_rel_max <= FLOAT32


def ranks_of(compiled: csc.CompiledModel) -> dict[str, int]:
    return {one.component: one.ranks for one in compiled.program.contexts}


# Ten tokens: five a rank, three and padding on four ranks; and two groups of two that compute the same.
@pytest.mark.parametrize(("mesh", "ranks"), [long("cp=2", 2), long("cp=4", 4), ("cp=4", 2)])
def test_llava(models: Models, mesh: str, ranks: int) -> None:
    compiled = models("llava", mesh=mesh, context={"vision_tower": ranks})
    parity(compiled, 80)
    assert ranks_of(compiled) == {"vision_tower": ranks, "language_model": csc.Mesh.of(mesh).cp}
    assert compiled.program.contexts[0].shard == {2: 5, 4: 3}[ranks]


@pytest.mark.parametrize(("freeze", "gradients"), [(["vision_tower"], 43), (["language_model"], 41)])
@pytest.mark.long_cases("freeze0-43")
def test_stages_and_frozen_parts(models: Models, freeze: list[str], gradients: int) -> None:
    """A frozen encoder has no backward to gather for; the gradients of a trained one come through a frozen LLM."""
    options = {"mesh": "cp=2,pp=2", "context": {"vision_tower": 2}, "freeze": freeze}
    cut = ["model.vision_tower.encoder.layers.1"]  # shards travel between the encoder's stages
    parity(models("llava", **options, cuts=cut), gradients)


def test_replicas_and_microbatches(models: Models) -> None:
    parity(models("llava", mesh="cp=2,dp=2", microbatches=2, context={"vision_tower": 2}), 80)


@pytest.mark.long
def test_speech(models: Models) -> None:
    compiled = models("whisper", mesh="cp=2,pp=2", context={"audio_tower": 2})
    parity(compiled, 59)
    assert compiled.program.contexts[0].tokens == 16


@pytest.mark.parametrize("mesh", [long("cp=2"), "cp=2,pp=2"])
def test_images_packed_in_one_row(mesh: str) -> None:
    """Qwen2-VL's encoder: patches of two images, each of which sees its own; then three of other sizes."""
    torch.manual_seed(0)
    model, batch = qwen2_vl()
    compiled = csc.compile(model, mesh=mesh, example=batch, context={"visual": 2})
    parity(compiled, len(list(model.parameters())))
    assert compiled.program.contexts[0].tokens == 40 and compiled.program.notes == ()
    result = verify(compiled, grids_batch([[1, 4, 4], [1, 6, 4], [1, 4, 8]], batch["pixel_values"].shape[1]))
    assert result.params_missing == () and result.grad_rel_max <= FLOAT32


@pytest.mark.parametrize(
    ("mesh", "context"),
    [long("cp=2", {"vision": 2}), long("cp=4", {"vision": 2, "audio": 4}), ("cp=4,pp=2", {"audio": 2})],
)
def test_skips_from_the_middle_of_an_encoder(models: Models, mesh: str, context: dict[str, int]) -> None:
    """DeepStack reads every vision layer; one block of the audio tower runs twice; both have four or five tokens."""
    compiled = models("plain", mesh=mesh, context=context)
    parity(compiled, 164)
    assert ranks_of(compiled) == {**context, "language": csc.Mesh.of(mesh).cp}


def test_what_a_rank_file_says(models: Models, tmp_path: Any) -> None:
    """The encoder's layers run on shards and name their plan; what reads them makes them whole."""
    compiled = models("llava", mesh="cp=2", context={"vision_tower": 2})
    compiled.write(tmp_path)
    assert "shard 1 of 2 of vision_tower: 5 slots for 10 tokens" in (tmp_path / "rank_1.py").read_text()
    assert 'vision_tower_plan = batch["csc.context"]["vision_tower"].plan' in (tmp_path / "position_0.py").read_text()
    layer = (tmp_path / "layers/clip_encoder_layer.py").read_text()  # one file: the last layer is like the others
    assert (
        "csc.context_attention.default(" in layer
        and "vision_tower_plan" in layer
        and "f32[2, 5, 32]" in layer
        and "f32[2, 10" not in layer
    )
    projector = (tmp_path / "layers/llava_multi_modal_projector.py").read_text()
    assert "image_features, vision_tower_plan, dim=1, tokens=10" in projector
    assert "torch.ops.csc.context_gather_backward.default(" in projector
    listed = json.loads((tmp_path / "program.json").read_text())
    assert [(one["component"], one["ranks"]) for one in listed["context"]] == [
        ("vision_tower", 2), ("language_model", 2),
    ]  # fmt: skip
    assert listed["stages"][0]["context"] == ["vision_tower", "language_model"]


def test_one_rank_is_the_whole_encoder(models: Models) -> None:
    compiled = models("llava", mesh="cp=2", context={"vision_tower": 1, "language_model": 2})
    assert ranks_of(compiled) == {"language_model": 2}


# A model of the test's own: an encoder of two layers with something between them, in front of a language model.


class Layer(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.project, self.causal = nn.Linear(16, 48), causal

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(hidden).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return hidden + seen.transpose(1, 2).flatten(2)


class Tower(nn.Module):
    def __init__(self, between: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(causal=False) for _ in range(2))
        self.places = nn.Parameter(torch.randn(16, 16))  # as many tokens as features
        self.mix = nn.Conv1d(16, 16, 3, padding=1)
        self.between = between

    def forward(self, frames: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        hidden = self.layers[0](frames + self.places[: frames.shape[1]], mask)
        return self.layers[1](self.between(self, hidden), mask)


class Small(nn.Module):
    def __init__(self, between: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda _, x: x) -> None:
        super().__init__()
        self.tower = Tower(between)
        self.embed = nn.Embedding(50, 16)
        self.text = nn.ModuleList(Layer(causal=True) for _ in range(2))
        self.head = nn.Linear(16, 50)

    def forward(self, frames: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor, **masked: Any) -> torch.Tensor:
        seen = self.tower(frames, self.mask(frames, **masked))
        hidden = self.embed(ids) + seen.mean(1, keepdim=True)
        for layer in self.text:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    def mask(self, frames: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor | None:
        """Frames behind a sample's own are not seen."""
        if lengths is None:
            return None
        return (torch.arange(frames.shape[1]) < lengths[:, None])[:, None, None]


def small_batch(tokens: int = 16, samples: int = 2) -> Batch:
    torch.manual_seed(0)
    ids = torch.arange(24).expand(samples, -1) % 50
    return {"frames": torch.randn(samples, tokens, 16), "ids": ids, "labels": (ids + 1) % 50}


def small(batch: Batch, between: Any = lambda _, x: x, mesh: str = "cp=2", ranks: int = 2) -> csc.CompiledModel:
    torch.manual_seed(0)
    return csc.compile(Small(between), example=batch, mesh=mesh, context={"tower": ranks})


@pytest.mark.parametrize(("tokens", "samples"), [(16, 16), (7, 2)])
def test_sizes_do_not_matter(tokens: int, samples: int) -> None:
    """As many tokens as samples and features; a number that no rank divides. The positions are a parameter."""
    compiled = small(small_batch(tokens, samples))
    assert compiled.program.contexts[0].tokens == tokens
    parity(compiled, 12)  # the convolution is not used


def test_masks_of_an_encoder_come_from_the_batch() -> None:
    compiled = small({**small_batch(), "lengths": torch.tensor([16, 9])}, mesh="cp=4", ranks=4)
    assert compiled.program.contexts[0].masks[0].kinds
    parity(compiled, 12)
    other = {**small_batch(), "lengths": torch.tensor([3, 12])}  # another mask, the same program
    compiled.zero_grad()
    loss = compiled.train_step(other)
    assert float(loss) == pytest.approx(float(compiled.model(**other).detach()), rel=FLOAT32)


@pytest.mark.parametrize(
    ("between", "what", "gradients"),
    [
        (lambda tower, x: x + tower.mix(x.transpose(1, 2)).transpose(1, 2), "aten::conv1d", 14),
        (lambda _, x: x - x.mean(1, keepdim=True), "aten::mean", 12),
        (lambda _, x: x + 0.01 * x @ x, "aten::matmul", 12),  # features of one token with tokens: both are sixteen
    ],
)
def test_operations_that_mix_tokens_are_computed_whole_and_noted(between: Any, what: str, gradients: int) -> None:
    compiled = small(small_batch(), between)
    parity(compiled, gradients)
    (note,) = (note for note in compiled.program.notes if "runs on all tokens of tower" in note)
    assert what in note and "test_encoders_spread.py" in note


@pytest.mark.parametrize(
    ("mesh", "context", "why"),
    [
        ("cp=2", {"towel": 2}, "'towel', which is no component of the model.*components: .*tower"),
        ("cp=1", {"towel": 1}, "'towel', which is no component"),
        ("cp=4", {"tower": 3}, "3 ranks of tower, which do not divide cp=4"),
        ("cp=1", {"tower": 2}, "2 ranks of tower, which do not divide cp=1"),
        ("cp=4", {"text": 2}, "2 ranks of text, which is spread over all of cp=4"),
        ("cp=2", {"embed": 2}, "spread embed, which has no attention along tokens of its own.*leave embed out"),
        ("cp=2", {"tower": 0}, "context of tower is 0"),
        ("cp=2", "tower", "context is 'tower'.*map components to ranks"),
    ],
)
def test_what_cannot_be_is_refused(mesh: str, context: Any, why: str) -> None:
    with pytest.raises(InputError, match=f"(?s){why}"):
        csc.compile(Small(), example=small_batch(), mesh=mesh, context=context)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="the 3 tokens of tower cannot be spread over cp=4"):
        small(small_batch(3), mesh="cp=4", ranks=4)


def test_attentions_of_two_lengths_are_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)spread tower, which has attentions along \[8, 16\] tokens"):
        small(small_batch(), lambda _, x: x[:, ::2])


def test_an_attention_that_cannot_be_read_is_named() -> None:
    class Odd(Small):
        def mask(self, frames: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
            place = torch.arange(frames.shape[1])
            return (place[:, None] + place[None]) % 2 == 0

    with pytest.raises(InputError, match=r"(?s)cannot read the mask of this attention.*tower\.layers\.0.*remainder"):
        csc.compile(Odd(), example=small_batch(), mesh="cp=2", context={"tower": 2})


@pytest.mark.long
def test_the_mllm_in_one_phase_after_another(models: Models) -> None:
    """The frozen set changes behind the spread: the same traces serve."""
    first = models("plain", mesh="cp=2", context={"vision": 2, "audio": 2})
    traced = len(first.compiler.traced)
    parity(first.with_options(freeze=["vision", "audio"]), verified_of(plain.plain(), ("vision.", "audio.")))
    assert len(first.compiler.traced) == traced + 1


def verified_of(model: nn.Module, frozen: tuple[str, ...]) -> int:
    return sum(not name.startswith(frozen) for name, _ in model.named_parameters())
