"""Components whose samples tensor-parallel ranks share out: the loss and every gradient of eager PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from benchmarks.mllm.models import build
from csc.errors import InputError
from csc.ir import graph as g
from csc.reports.verification import verify
from tests import launching
from tests.benchmarks.test_mesh import TINY
from tests.compiler import tensor_worker
from tests.compiler.tensor_models import BATCHES, MODELS
from tests.compiler.test_dividing import same
from tests.compiler.test_encoders_spread import Small, small_batch
from tests.models import hf, mixed, plain
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")

FLOAT32 = 1e-5  # what is promised; 1.5e-6 is the most that was seen
BY_COMPONENT = {"vision_tower": {"tp": 1, "dp": 2}, "language_model": {"tp": 2}}
TOWER = "vision_tower.tp=1"
Mix = Callable[[torch.Tensor], torch.Tensor]


def llava(samples: int = 4, **options: Any) -> csc.CompiledModel:
    return csc.compile(MODELS["llava"](), example=BATCHES["llava"](samples), **options)


def parity(compiled: csc.CompiledModel, gradients: int) -> csc.CompiledModel:
    result = verify(compiled)
    assert (result.params_missing, result.params_unexpected) == ((), ())
    assert len(result.grad_rel) == gradients
    assert result.loss_rel <= FLOAT32 and result.grad_rel_max <= FLOAT32
    return compiled


def collectives(compiled: csc.CompiledModel, part: str) -> str:
    """The graphs of F, B or W of all regions of the program."""
    program = compiled.history()[-1]
    return "\n".join(str(getattr(one, part)) for one in program.variants.values())


def test_an_encoder_beside_a_divided_language_model() -> None:
    """Its weights are whole, their gradients parts; it meets others once in F, where its features leave."""
    compiled = parity(llava(mesh=BY_COMPONENT), 80)
    placed = {p.name: p.gradient.over("tp") for p in compiled.trainer().program.manifest.parameters if p.trainable}
    assert {over for name, over in placed.items() if "vision_tower" in name} == {"parts"}
    assert placed["model.language_model.layers.0.mlp.up_proj.weight"] == "shard"
    assert collectives(compiled, "forward").count("csc.all_gather") == 1
    assert collectives(compiled, "backward_input").count("csc.all_gather") == 0
    assert "2 tp ranks share out 4 samples of a microbatch" in "".join(compiled.history()[-1].notes)


def test_an_encoder_on_ranks_of_its_own() -> None:
    """Its stage holds nothing else, and what goes to the next is each rank's own images, to and fro: those that read
    them gather them.
    """
    mesh = {"vision_tower": {"tp": 1, "dp": 2, "pp": 1}, "language_model": {"tp": 2, "pp": 1}}
    program = parity(llava(mesh=mesh), 80).program
    first, last = (set(stage.regions) for stage in program.stages)
    assert {"vision_tower" in name for name in first} == {True} and {"vision_tower" in name for name in last} == {False}
    half = 2 * 10 * 32 * 4  # two images of ten tokens
    assert sorted(map(tuple, program.plan.pipeline["messages"])) == [("B", 1, 0, half), ("F", 0, 1, half)]
    reader = next(one for one in program.regions if one.name.endswith("projector"))
    assert "csc.all_gather" in str(program.variants[reader.variant].forward)


@pytest.mark.long
def test_what_another_tp_began_makes_the_same_programs() -> None:
    """Passes that do not look at tp run once for all of a process; with a component's own tp fewer do not look."""

    def made(compiled: csc.CompiledModel) -> str:
        program = compiled.inspected.divided(compiled.inspected.microbatch)
        return repr([g.canonical(one.pruned) for one in program.variants.values()])

    shared = llava(mesh="tp=1", cache=False)
    for mesh in ("tp=1", "tp=2", f"tp=2,{TOWER}"):
        own = shared.with_options(mesh=mesh)
        assert made(own) == made(llava(mesh=mesh, cache=False)), mesh


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "gradients", "options"),
    [
        long(f"tp=2,pp=2,{TOWER}", 43, {"microbatches": 2, "freeze": ["vision_tower"]}),
        long(f"tp=2,dp=2,{TOWER}", 80, {"microbatches": 2, "zero": 3}),
        long(f"tp=2,cp=2,{TOWER}", 80, {"microbatches": 2}),
        long(f"tp=2,pp=2,{TOWER}", 80, {"microbatches": 2, "recompute": "full"}),
        long(f"tp=2,pp=2,dp=2,order=pp-dp-tp,{TOWER}", 80, {"microbatches": 2}),
        long(f"tp=2,{TOWER}", 37, {"freeze": ["multi_modal_projector", "language_model", "lm_head"]}),
        long(f"tp=2,{TOWER},multi_modal_projector.tp=1", 80, {}),
        long(f"tp=2,{TOWER}", 80, {"fuse": True}),
        long(f"tp=2,pp=3,{TOWER},vision_tower.pp=1", 43, {"microbatches": 4, "freeze": ["vision_tower"]}),
        long(f"tp=2,pp=3,dp=2,{TOWER},vision_tower.pp=2", 80, {"microbatches": 2, "zero": 3}),
        long(f"tp=2,pp=2,{TOWER},vision_tower.pp=1", 80, {"microbatches": 2, "recompute": "full"}),
        long("pp=3,vision_tower.pp=1", 80, {"microbatches": 2}),
    ],
)
def test_with_other_axes_and_options(mesh: str, gradients: int, options: dict[str, Any]) -> None:
    parity(llava(8, mesh=mesh, **options), gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "gradients"),
    [
        long("valm", "tp=2,vision_tower.tp=1,audio_tower.tp=1", 147),
        long("whisper_llama", "tp=2,pp=2,audio_tower.tp=1", 59),
    ],
)
def test_sounds(name: str, mesh: str, gradients: int) -> None:
    batch = {"valm": hf.valm_batch, "whisper_llama": hf.whisper_batch}[name](4)
    parity(csc.compile(getattr(hf, name)(), example=batch, mesh=mesh), gradients)


@pytest.mark.long
def test_layers_that_an_encoder_s_values_leave_from() -> None:
    parity(csc.compile(plain.plain(), example=plain.plain_batch(4), mesh="tp=2,vision.tp=1"), 164)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 1, 1, 0), long((3, 2, 0, 0)), long((1, 0, 0, 0))])
def test_any_number_of_images(counts: Sequence[int]) -> None:
    """Three and one in two microbatches; none. The last slots repeat an image, and nobody takes what they make."""
    same(*mixed.built("LLaVA", counts), FLOAT32, mesh=f"tp=2,{TOWER}", microbatches=2)


@pytest.mark.long
@pytest.mark.parametrize("name", ["LLaVA-NeXT", "InternVL", "Gemma 3"])
def test_models_of_hugging_face(name: str) -> None:
    same(*mixed.built(name, [2, 2, 1, 1]), FLOAT32, mesh=f"tp=2,{TOWER}", microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts", "mesh", "options"),
    [
        ("Qwen2.5-VL", (1, 2), "tp=2,visual.tp=1", {}),
        long("Qwen2.5-VL", (1, 2, 0, 0), "tp=2,pp=2,visual.tp=1", {"microbatches": 2}),
        long("Qwen2.5-VL", (1, 2, 0, 0), "tp=2,pp=2,visual.tp=1,visual.pp=1", {"microbatches": 2}),
        long("Qwen2-VL", (2, 1, 1, 2), "tp=4,visual.tp=1", {}),
        long("Qwen2-VL", (1, 1, 1, 1), "tp=2,dp=2,visual.tp=1", {"microbatches": 2, "zero": 3, "recompute": "full"}),
        long("Qwen3-VL", (1, 1), "tp=2,cp=2,visual.tp=1", {}),
        long("Qwen2-Audio", (1, 2), "tp=2,audio_tower.tp=1", {}),
        long("Qwen2-Audio", (1, 2), "tp=2,pp=2,audio_tower.tp=1,audio_tower.pp=1", {}),
        long("SmolVLM", (1, 2), "tp=2,vision_model.tp=1", {}),
    ],
)
def test_images_in_one_row(name: str, counts: Sequence[int], mesh: str, options: dict[str, Any]) -> None:
    """Packed patches of images of several sizes, and sounds and tiles with masks: ranks share out tokens."""
    compiled = same(*mixed.built(name, counts), FLOAT32, mesh=mesh, **options)
    (spread,) = (one for one in compiled.program.contexts if one.axis == "tp")
    assert spread.ranks == compiled.options.mesh.tp and spread.tokens > spread.shard


def masked(between: Any, mesh: str) -> csc.CompiledModel:
    torch.manual_seed(0)
    batch = {**small_batch(), "lengths": torch.tensor([16, 9])}
    return csc.compile(Small(between), example=batch, mesh=mesh)


@pytest.mark.parametrize(
    ("between", "gradients"),
    [
        (lambda tower, x: x + tower.mix(x.transpose(1, 2)).transpose(1, 2), 14),
        long(lambda _, x: x, 12),
        long(lambda _, x: F.dropout(x, 0.5), 12),
        long(lambda _, x: x - x.mean(1, keepdim=True), 12),
        long(lambda _, x: x + 0.01 * x @ x, 12),
        long(lambda tower, x: x * tower.places.mean(), 12),  # on its way to calls on shards, and added to them
    ],
)
def test_calls_that_see_all_tokens_are_computed_by_every_rank(between: Any, gradients: int) -> None:
    """Between calls on shards. Their gradients are equal on all ranks, those of the others parts."""
    compiled = parity(masked(between, "tp=2,tower.tp=1"), gradients)
    placed = {p.name: p.gradient.over("tp") for p in compiled.trainer().program.manifest.parameters}
    assert placed["tower.layers.0.project.weight"] == "parts"
    assert {placed[name] for name in ("tower.mix.weight", "tower.places") if name in placed} == {"equal"}


@pytest.mark.long
def test_a_weight_that_layers_on_shards_have_together_with_others() -> None:
    """Its gradient from the former is parts, which are added up where it enters them."""
    torch.manual_seed(0)
    model, batch = Small(), {**small_batch(), "lengths": torch.tensor([16, 9])}
    model.text[0].project = model.tower.layers[0].project
    parity(csc.compile(model, example=batch, mesh="tp=2,tower.tp=1"), 10)


class Mixing(nn.Module):
    """An encoder that computes `mix` of what its first parameters make."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix, self.row = mix, nn.Linear(12, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.row(pixels))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))


class Captioner(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.language = Mixing(mix), Words()

    def forward(self, pixels: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.language.embed(tokens) + self.vision(pixels).mean(1, keepdim=True)
        for layer in self.language.layers:
            hidden = hidden + layer(hidden)
        return F.cross_entropy(self.language.head(hidden).flatten(0, 1), labels.flatten())


APART: dict[str, Mix] = {
    "nothing": lambda h: h,
    "a norm of each": lambda h: F.layer_norm(h, (16,)) / h.norm(dim=(1, 2), keepdim=True),
    "tokens": lambda h: h.flip(1) - h.mean(1, keepdim=True) + h.cumsum(1) * h.softmax(1),
    "numbers of samples": lambda h: h * torch.arange(len(h))[:, None, None],
    "one row and back": lambda h: h.reshape(1, -1, 16).tanh().view(len(h), -1, 16),
    "the first alone": lambda h: torch.where(torch.arange(len(h))[:, None, None] == 0, h, 2 * h),
    "heads": lambda h: (
        (h.unflatten(2, (4, 4)).transpose(1, 2).flatten(0, 1) * 2).unflatten(0, (-1, 4)).mean(1).repeat(1, 1, 4)
    ),
}
MIXED: dict[str, Mix] = {
    "order": lambda h: h.flip(0), "moved": lambda h: h.roll(1, 0), "chosen": lambda h: h[torch.arange(len(h)).flip(0)],
    "mean": lambda h: h - h.mean(0, keepdim=True), "all of them": lambda h: h / (h.std() + 1),
    "largest": lambda h: h + h.amax(0, keepdim=True), "softmax": lambda h: h.softmax(0), "sums": lambda h: h.cumsum(0),
    "sorted": lambda h: h.sort(0).values, "norm": lambda h: h / h.norm(dim=0, keepdim=True).clamp(min=1),
    "parts": lambda h: torch.cat([part * (i + 1) for i, part in enumerate(h.chunk(2))]),
    "one by one": lambda h: torch.stack([h[i] * (i + 1) for i in range(len(h))]),
    "inside out": lambda h: h.permute(1, 0, 2).reshape(-1, 16).view(h.shape[1], len(h), 16).permute(1, 0, 2),
    "each with each": lambda h: h + torch.einsum("btc,dtc->bd", h, h).sum(1)[:, None, None],
    "the largest's number": lambda h: h * (1 + h.mean((1, 2)).argmax().float()),
    "drawn": lambda h: h * (torch.rand(len(h), 1, 1) > 0.3), "dropout": lambda h: F.dropout(h, 0.5),
}  # fmt: skip


def captioner(mix: Mix, samples: int, mesh: str = "tp=2,vision.tp=1") -> csc.CompiledModel:
    torch.manual_seed(1)
    tokens = torch.randint(0, 32, (samples, 6))
    batch = {"pixels": torch.randn(samples, 5, 12), "tokens": tokens, "labels": tokens}
    return csc.compile(Captioner(mix), example=batch, mesh=mesh)


@pytest.mark.long
@pytest.mark.parametrize("samples", [4, 3, 1])
@pytest.mark.parametrize("name", APART)
def test_encoders_that_keep_samples_apart(name: str, samples: int) -> None:
    parity(captioner(APART[name], samples), 17)


@pytest.mark.long
@pytest.mark.parametrize("name", MIXED)
def test_encoders_that_mix_samples_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="leave vision out of the mesh"):
        captioner(MIXED[name], 4).trainer()


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in {**MIXED, **APART} if name != "each with each"])  # ill-conditioned
def test_encoders_that_mix_samples_between_attentions(name: str) -> None:
    """Samples meet in calls on shards of tokens, or in calls that see all of them."""
    torch.manual_seed(0)
    batch = {**small_batch(samples=3), "lengths": torch.tensor([16, 9, 4])}
    parity(csc.compile(Small(lambda _, x: {**MIXED, **APART}[name](x)), example=batch, mesh="tp=2,tower.tp=1"), 12)


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "mesh"),
    [("llava", f"tp=2,{TOWER}"), ("llava", f"tp=2,pp=2,{TOWER}"), ("patches", "tp=2,visual.tp=1"),
     ("llava", f"tp=2,pp=2,{TOWER},vision_tower.pp=1"), ("patches", "tp=2,pp=2,visual.tp=1,visual.pp=1")],
)  # fmt: skip
def test_processes(model: str, mesh: str, tmp_path: Path) -> None:
    """Losses and norms of three clipped steps, of what was saved and loaded, of other microbatches."""
    ranks = csc.Mesh.of(mesh).size
    launching.ranks(
        tensor_worker.main, ranks, {"model": model, "mesh": mesh, "samples": 8, "microbatches": 2}, tmp_path
    )
    batch = BATCHES[model](8)
    expected, one = (
        tensor_worker.steps(csc.compile(MODELS[model](), example=batch, mesh=each, microbatches=2), batch)
        for each in ("pp=1", mesh)
    )
    for rank in range(ranks):
        result = json.loads((tmp_path / f"result_{rank}.json").read_text())
        assert result["losses"] == one["losses"] == pytest.approx(expected["losses"], rel=FLOAT32)
        assert result["norms"] == pytest.approx(expected["norms"], rel=FLOAT32)
        assert result["later"] == result["again"]
        assert result["others"] == pytest.approx([result["later"]] * 3, rel=FLOAT32)


def test_one_mesh_in_four_forms() -> None:
    mesh = csc.Mesh.of(BY_COMPONENT)
    assert mesh == csc.Mesh.parse(str(mesh)) == csc.Mesh.of(mesh.to_dict())
    assert mesh == csc.Mesh(tp=2, components={"vision_tower": {"tp": 1}, "language_model": {"tp": 2}})
    assert csc.Mesh.of({"a": {"tp": 4, "pp": 2}, "b": {"dp": 4}}) == csc.Mesh.parse("tp=4,pp=2,a.tp=4,b.tp=1")
    mesh = csc.Mesh.of({"a": {"tp": 4, "pp": 2}, "b": {"dp": 4, "pp": 1}})
    assert mesh == csc.Mesh.parse(str(mesh)) == csc.Mesh.of(mesh.to_dict())
    assert (mesh.pp, mesh.size, mesh.own("pp")) == (3, 12, {"a": 2, "b": 1})


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"a": {"tp": 4}, "b": {"tp": 3}}, "b has tp=3.*4 ranks are no groups of 3.*fits is b.tp=2, where 2 ranks"),
        ("tp=4,b.tp=8", "b has tp=8, and the mesh has tp=4: 4 ranks are no groups of 8.*fits is b.tp=4"),
        ({"a": {"tp": 4}, "b": {"tp": 2}}, r"b has dp \* tp = 2.*on the same ranks: b with tp=2 and dp=2"),
        ({"a": {"tp": 4}, "b": {"dp": 2}}, r"b has dp \* tp = 2.*on the same ranks: b with tp=1 and dp=4"),
        ({"a": {"tp": 4}, "b": {"dp": 4, "pp": 2}}, "b has pp=2 in a mesh where a has no pp.*those of all components"),
        (
            {"a": {"tp": 4, "cp": 4}, "b": {"dp": 4, "cp": 3}},
            "b has cp=3 in a mesh of cp=4.*no groups of 3.*is b.cp=2, where",
        ),
        ("cp=4,b.cp=8", "b has cp=8 in a mesh of cp=4: 4 ranks are no groups of 8.*fits is b.cp=4"),
        ("pp=2,vision_tower.pp=2", "vision_tower.pp=2 leaves none of pp=2 for the other components"),
        ("pp=2,vision_tower.pp=0", "axis pp of vision_tower has size 0"),
        ({"a": {"tp": 4}, "b": 2}, "the mesh has 2 for b.*Map components to sizes of axes"),
        ({"a": {"tp": 4}, "b": {"dp": 0}}, "axis dp of b has size 0"),
        ("vision_tower.cp=2", "vision_tower has cp=2 in a mesh of cp=1"),
        ("vision_tower.ep=2", "there is no axis 'vision_tower.ep'"),
    ],
)
def test_meshes_that_cannot_be(mesh: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        csc.Mesh.of(mesh)


def test_stages_that_cannot_be_a_component_s_own() -> None:
    for mesh, said, options in (
        ("pp=2,vision.pp=1", "vision pipeline stages of its own, and nothing of it runs.*vision_tower", {}),
        ("pp=9,vision_tower.pp=7", "7 pipeline stages for vision_tower, which has .* regions.*pp=4, or less", {}),
        ("pp=2,vision_tower.pp=1", "cuts says what stages hold too.*give one of the two", {"cuts": ["lm_head"]}),
    ):
        with pytest.raises(InputError, match=said):
            llava(mesh=mesh, **options).trainer()


@pytest.mark.long
def test_a_component_that_ends_in_the_loss_shares_out_its_tokens() -> None:
    """A loss is one result of all samples, so that these cannot be on different ranks."""
    torch.manual_seed(0)
    model = build(TINY, {name: part.layers for name, part in TINY.components.items()})
    text = {name: torch.randint(0, 50, (1, 24)) for name in ("input_ids", "labels")}
    given = {"pixel_values": torch.randn(2, 3, 28, 28), **text}
    compiled = parity(csc.compile(model, example=given, mesh="tp=2,llm.tp=1"), 81)
    assert any("llm: 2 tp ranks share out its" in note and "tokens" in note for note in compiled.program.notes)


def test_what_cannot_be_shared_out_is_an_error() -> None:
    for mesh, said, options in (
        ("tp=2,vision.tp=1", "names 'vision', which is no component of the model.*vision_tower", {}),
        ("tp=2,cp=2,language_model.tp=1", "context_attention has its tokens on other cp ranks, and the samples", {}),
        (f"tp=2,cp=2,{TOWER}", "a tp of its own in the mesh, and a number of ranks", {"context": {"vision_tower": 2}}),
    ):
        with pytest.raises(InputError, match=said):
            llava(mesh=mesh, **options).trainer()
