"""csc.Mesh(ranks=...) where an encoder divided otherwise than the rest is the fastest: chosen, trained, told."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers as hf

import csc
from csc.analysis import hardware
from csc.driver import mesh_choice, mesh_search
from csc.ir.mesh import Axes, Mesh
from csc.planning.meshes import layouts
from tests.models.hf import IMAGE_TOKEN, VOCABULARY, llava_batch
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")

CHANGES = {  # work takes long beside exchanges, and sums of an LLM's gradients longer than those
    "launch = 5e-6": "launch = 0.0", "latency = 10e-6": "latency = 1e-9", "latency = 15e-6": "latency = 1e-9",
    "bandwidth = 380e9": "bandwidth = 1e9", "float32 = 67e12": "float32 = 2e11",
}  # fmt: skip


def slow(folder: Path, bandwidth: str = "1e9") -> str:
    """A profile with devices like this, as a file."""
    text = (Path(hardware.__file__).parent / "profiles" / "h100.toml").read_text().partition("[matmul]")[0]
    for old, new in CHANGES.items():
        assert old in text
        text = text.replace(old, new.replace("1e9", bandwidth) if "bandwidth" in new else new)
    (folder / "slow.toml").write_text(text)
    return str(folder / "slow.toml")


def llava() -> hf.LlavaForConditionalGeneration:
    torch.manual_seed(0)
    vision = hf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=24, patch_size=8,
        projection_dim=32,
    )  # fmt: skip
    text = hf.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=VOCABULARY,
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN)
    )


def trains_as_eager_does(
    compiled: csc.CompiledModel, model: torch.nn.Module, eager: torch.nn.Module, count: int
) -> None:
    """Two steps of so many samples."""
    steps = [torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1) for one in (model, eager)]
    for _ in range(2):
        loss = compiled.train_step(llava_batch(count))
        expected = eager(**llava_batch(count)).loss
        expected.backward()
        assert torch.allclose(loss, expected.detach(), rtol=1e-5)
        theirs = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
        own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert own.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert float((own[name] - gradient).norm()) <= 1e-5 * max(float(gradient.norm()), 1e-4), name
        for step in steps:
            step.step()
            step.zero_grad()


@pytest.mark.long
def test_a_tower_with_a_tp_of_its_own_is_chosen_and_trains_as_eager_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_choice, "SECONDS", 600.0)  # all layouts, however slow the machine is
    model = llava()
    eager = copy.deepcopy(model)
    eager.model.vision_tower.requires_grad_(False)
    compiled = csc.compile(
        model, mesh=csc.Mesh(ranks=4), example=llava_batch(4), microbatches=1, hardware=slow(tmp_path), cache=False,
        check=False, freeze=["vision_tower"],
    )  # fmt: skip
    mesh = compiled.options.mesh
    assert mesh.components == {"vision_tower": Axes(tp=1)} and mesh.tp > 1 and mesh.size == 4, mesh
    assert Mesh.parse(str(mesh)) == mesh and str(mesh) in compiled.inspected.mesh_text
    trains_as_eager_does(compiled, model, eager, 4)


@pytest.mark.parametrize(
    ("axes", "samples", "own", "context"),
    [
        long(Mesh(tp=4), 2, {"vision_tower": 2}, ()),  # of two images on four ranks
        (Mesh(cp=2), 1, {}, (("vision_tower", 2),)),
        long(Mesh(cp=2, tp=2), 1, {}, (("vision_tower", 2),)),
    ],
)
def test_what_samples_that_do_not_divide_are_divided_by_instead(
    axes: Mesh, samples: int, own: dict[str, int], context: tuple[tuple[str, int], ...],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of the layouts that divide layers and tokens so."""
    monkeypatch.setattr(mesh_choice, "SECONDS", 600.0)
    monkeypatch.setattr(mesh_search, "layouts", lambda *asked: [one for one in layouts(*asked) if one.mesh == axes])
    model = llava()
    eager = copy.deepcopy(model)
    eager.model.vision_tower.requires_grad_(False)
    compiled = csc.compile(
        model, mesh=csc.Mesh(ranks=axes.size), example=llava_batch(samples), microbatches=1, cache=False, check=False,
        hardware=slow(tmp_path, "1e11"), freeze=["vision_tower"],
    )  # fmt: skip
    assert (compiled.options.mesh.own("tp"), compiled.options.context) == (own, context)
    assert all(f"{name}': {ranks}" in compiled.inspected.mesh_text for name, ranks in context)
    trains_as_eager_does(compiled, model, eager, samples)
