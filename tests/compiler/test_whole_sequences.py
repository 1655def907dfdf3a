"""Components whose samples context-parallel ranks share out, each of them whole, against eager PyTorch in one process.
In several processes: test_copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import csc
from csc.errors import InputError
from tests.compiler.tensor_models import BATCHES, MODELS
from tests.compiler.test_data_parallel import FLOAT32, collectives, llava, parity
from tests.compiler.test_dividing import same
from tests.compiler.test_several_divisions import Tower
from tests.models import hf, mixed
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")
APART = "vision_tower.cp=1"


def test_an_encoder_of_which_cp_ranks_compute_other_images() -> None:
    """Features are gathered once in F, and their gradients, of which each rank has a part, summed to shards in B."""
    mesh = {"vision_tower": {"dp": 2, "cp": 1}, "language_model": {"cp": 2}}
    compiled = parity(llava(8, mesh=mesh, microbatches=2), 80)
    assert collectives(compiled, "forward").count("csc.gather_shared") == 1
    assert collectives(compiled, "backward_input").count("csc.reduce_scatter") == 1
    assert "2 cp ranks share out 4 samples of a microbatch" in "".join(compiled.history()[-1].notes)
    placed = {p.name: p.gradient for p in compiled.trainer().program.manifest.parameters if p.trainable}
    assert len({str(one.to_dict()) for one in placed.values()}) == 1, "as any other parameter's: parts over cp"


def test_both_axes_share_out_images() -> None:
    """Of eight images two ranks of cp have four each, and of these two ranks of tp two."""
    compiled = parity(llava(8, mesh=f"cp=2,tp=2,vision_tower.tp=1,{APART}"), 80)
    assert "2 tp ranks of 2 cp ranks share out 8 samples" in "".join(compiled.history()[-1].notes)


def test_an_encoder_of_which_groups_of_cp_ranks_compute_other_images() -> None:
    """Each of these for half of the images, whose tokens two of its ranks share."""
    mesh = {"vision_tower": {"dp": 2, "cp": 2}, "language_model": {"cp": 4}}
    compiled = parity(llava(8, mesh=mesh, microbatches=2), 80)
    assert str(compiled.options.mesh) == "cp=4,language_model.tp=1,vision_tower.tp=1,vision_tower.cp=2"
    notes = "".join(compiled.history()[-1].notes)
    assert "2 groups of cp ranks share out 4 samples of a microbatch" in notes and "2 cp ranks share out its" in notes
    assert collectives(compiled, "forward").count("csc.gather_shared") == 1
    assert collectives(compiled, "backward_input").count("csc.reduce_scatter") == 1
    [spread] = [one for one in compiled.program.contexts if one.component == "vision_tower"]
    assert (spread.axis, spread.ranks) == ("cp", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "gradients", "options"),
    [
        long("cp=4,pp=2,vision_tower.cp=2", 80, {}),
        long("cp=6,vision_tower.cp=2", 80, {}),
        long("cp=6,vision_tower.cp=3", 80, {"recompute": "full"}),
        long("cp=4,vision_tower.cp=2", 43, {"freeze": ["vision_tower"]}),
        long("cp=4,tp=2,vision_tower.tp=1,vision_tower.cp=2", 80, {}),
        long("cp=4,tp=4,vision_tower.tp=2,vision_tower.cp=2", 80, {}),
        long("cp=4,dp=2,vision_tower.cp=2", 80, {"zero": 3}),
        long("cp=4,vision_tower.cp=2", 80, {"fuse": True}),
        long("cp=4,pp=2,vision_tower.pp=1,vision_tower.dp=4,vision_tower.cp=2", 80, {}),
        long("cp=4,tp=2,pp=2,vision_tower.tp=1,vision_tower.pp=1,vision_tower.dp=2,vision_tower.cp=2", 80, {}),
        long(f"cp=2,pp=2,{APART}", 80, {}),
        long(f"cp=2,tp=2,{APART}", 80, {}),
        long(f"cp=2,dp=2,{APART}", 80, {"zero": 1}),
        long(f"cp=2,dp=2,pp=2,{APART}", 80, {"zero": 3}),
        long(f"cp=2,pp=2,vision_tower.pp=1,{APART}", 80, {}),
        long(f"cp=2,tp=4,vision_tower.tp=2,{APART}", 80, {}),
        long(f"cp=2,tp=2,pp=2,vision_tower.tp=1,vision_tower.pp=1,vision_tower.dp=2,{APART}", 80, {}),
        long(f"cp=2,{APART}", 43, {"freeze": ["vision_tower"]}),
        long(f"cp=2,{APART}", 37, {"freeze": ["multi_modal_projector", "language_model", "lm_head"]}),
        long(f"cp=2,{APART}", 4, {"freeze": ["vision_tower", "language_model", "lm_head"]}),
        long(f"cp=4,{APART}", 80, {"recompute": "full"}),
        long(f"cp=2,{APART}", 80, {"fuse": True}),
    ],
)
def test_with_other_axes_and_options(mesh: str, gradients: int, options: dict[str, Any]) -> None:
    parity(llava(8, mesh=mesh, microbatches=2, **options), gradients)


@pytest.mark.long
def test_sounds() -> None:
    mesh = "cp=2,audio_tower.cp=1"
    parity(csc.compile(hf.whisper_llama(), example=hf.whisper_batch(4), microbatches=2, mesh=mesh), 59)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts", "mesh", "options"),
    [
        long("LLaVA", (3, 2, 0, 0), f"cp=2,pp=2,{APART}", {"microbatches": 2}),
        long("LLaVA", (1, 0, 0, 0), f"cp=2,tp=2,vision_tower.tp=1,{APART}", {"microbatches": 2}),
        long("LLaVA", (1, 0, 0, 0), "cp=4,vision_tower.cp=2", {}),
        long("Qwen2.5-VL", (1, 2), "cp=4,visual.cp=2", {}),
        long("Gemma 3", (1, 2), "cp=4,vision_tower.cp=2", {}),
        long("Qwen2-Audio", (1, 2), "cp=4,audio_tower.cp=2", {}),
        long("Qwen2.5-VL", (1, 2), "cp=2,visual.cp=1", {}),
        long("Qwen2-VL", (1, 2), "cp=2,tp=2,visual.cp=1", {}),
        long("Gemma 3", (1, 2), f"cp=2,{APART}", {}),
        long("InternVL", (1, 2), f"cp=2,{APART}", {}),
        long("SmolVLM", (1, 2), "cp=2,vision_model.cp=1", {}),
        long("LLaVA-OneVision", (1, 2), f"cp=2,{APART}", {}),
        long("Qwen2-Audio", (1, 2), "cp=2,audio_tower.cp=1", {}),
    ],
)
def test_any_number_and_size_of_images(
    name: str, counts: Sequence[int], mesh: str, options: dict[str, Any]
) -> None:  # fmt: skip
    """Packed patches: their tokens, as with the option context."""
    same(*mixed.built(name, counts), FLOAT32, mesh=mesh, **options)


def test_forms_of_a_mesh() -> None:
    mesh = csc.Mesh.of({"vision_tower": {"dp": 4, "cp": 1, "tp": 1}, "language_model": {"cp": 2, "tp": 2}})
    assert (mesh.size, mesh.own("cp"), mesh.in_front) == (4, {"vision_tower": 1}, {})
    assert mesh == csc.Mesh.parse(str(mesh)) == csc.Mesh.of(mesh.to_dict())
    fewer = csc.Mesh.parse("cp=2,tp=2,pp=2,a.tp=1,a.pp=1,a.cp=1,a.dp=2")
    assert (fewer.size, fewer.in_front) == (6, {"a": (1, 1)})
    assert fewer == csc.Mesh.parse(str(fewer)) == csc.Mesh.of(fewer.to_dict())
    assert csc.Mesh.parse("tp=2,a.cp=1") == csc.Mesh(tp=2)


class Unattended(nn.Module):
    """An encoder without attention beside a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.eye, self.text = Tower(), MODELS["llama"]()
        self.widen = nn.Linear(8, 48)

    def forward(self, images: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        words = self.text.model.embed_tokens(input_ids)  # type: ignore[operator, union-attr]
        seen = self.widen(self.eye(images))
        return self.text(inputs_embeds=torch.cat([words[:, :3] + seen, words[:, 3:]], 1), labels=labels)


def test_samples_whose_tokens_cannot_be_shared() -> None:
    given = {"images": torch.randn(4, 3, 8), **BATCHES["llama"](4)}
    parity(csc.compile(Unattended(), example=given, mesh="cp=4,eye.cp=1"), 31)
    with pytest.raises(InputError, match=r"eye has cp=2 in the mesh.*no attention along tokens.*give it cp=1"):
        csc.compile(Unattended(), example=given, mesh="cp=4,eye.cp=2").trainer()


@pytest.mark.long
def test_what_cannot_be() -> None:
    for mesh, said in (
        ("cp=4,vision_tower.cp=3", "vision_tower has cp=3 in a mesh of cp=4: 4 ranks are no groups of 3"),
        ("cp=2,vision.cp=1", "names 'vision', which is no component of the model"),
        (f"cp=2,{APART},language_model.cp=1", "of whose gradient each cp rank would have another part"),
    ):
        with pytest.raises(InputError, match=said):
            llava(8, mesh=mesh).trainer()
    with pytest.raises(InputError, match="has a cp of its own in the mesh, and a number of ranks in context"):
        llava(8, mesh=f"cp=2,{APART}", context={"vision_tower": 2}).trainer()
    with pytest.raises(InputError, match=r"along cp and tp.*leave visual.cp out of the mesh"):
        model, batch = mixed.built("Qwen2-VL", (1, 2))
        csc.compile(model, example=batch, mesh="cp=2,tp=2,visual.tp=1,visual.cp=1").trainer()
