"""Components that different numbers of tensor-parallel ranks divide, some but not all of them, against eager PyTorch.
In processes of their own: see test_copies.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import csc
from csc.errors import CscError
from csc.runtime.loaded_program import load
from tests.compiler.test_data_parallel import parity
from tests.models.composed import batch, towers
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")
OWN = "vision_encoder.tp=2,audio_encoder.tp=4"
VISION, AUDIO = "vision_encoder.encoder.layers.0", "audio_encoder.layers.0"


def compiled(**options: Any) -> csc.CompiledModel:
    model = towers()
    return csc.compile(model, example=batch(model, 4), **options)


def test_encoders_divided_by_two_and_by_four_beside_a_language_model_divided_by_eight() -> None:
    own = parity(compiled(mesh=f"tp=8,{OWN}"), 102)
    specs = {one.name: one for one in own.trainer().program.manifest.parameters}
    for name, size in ((f"{VISION}.mlp.fc1.weight", 2), (f"{AUDIO}.fc1.weight", 4)):
        boxes = specs[name].boxes
        assert len(set(boxes[:size])) == size and boxes == boxes[:size] * (8 // size)
        assert specs[name].gradient.to_dict() == {"parts": f"holders {size}", "shard": f"division {size}"}
    assert specs[f"{AUDIO}.final_layer_norm.weight"].gradient.to_dict() == {"parts": "holders 4", "equal": "division 4"}
    assert len(set(specs["language_model.model.layers.0.mlp.up_proj.weight"].boxes)) == 8
    file = (Path(own.trainer().program.directory) / "rank_6.py").read_text()
    assert "Divided   part 2 of 4 of audio_encoder, copy 1 of 2" in file
    assert "          part 0 of 2 of vision_encoder, copy 3 of 4" in file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "gradients", "options"),
    [
        ("tp=8,vision_encoder.tp=4,audio_encoder.tp=2,vision_projector.tp=4,audio_projector.tp=2", 102, {}),
        ("tp=8,pp=3,vision_encoder.pp=1,vision_encoder.tp=2,vision_encoder.dp=1,audio_encoder.pp=1,audio_encoder.tp=4,"
         "audio_encoder.dp=1", 102, {"microbatches": 2}),
        long(f"tp=8,{OWN},audio_projector.tp=1,vision_projector.tp=1", 102, {}),
        long(f"tp=8,{OWN},audio_projector.tp=4,vision_projector.tp=2", 102, {}),
        long(f"tp=8,{OWN}", 65, {"freeze": ["vision_encoder"]}),
        long(f"tp=8,{OWN}", 8, {"freeze": ["vision_encoder", "audio_encoder", "language_model"]}),
        long(f"tp=8,dp=2,{OWN}", 102, {"zero": 1}),
        long(f"tp=8,dp=2,{OWN}", 102, {"zero": 2}),
        long(f"tp=8,dp=2,{OWN}", 102, {"zero": 3}),
        long(f"tp=8,pp=2,{OWN}", 102, {"microbatches": 2, "schedule": "zb-h1", "recompute": "full"}),
        long(f"tp=8,cp=2,{OWN}", 102, {}),
        long(f"tp=8,cp=2,{OWN},vision_encoder.cp=1", 102, {}),
        long(f"tp=8,{OWN}", 102, {"sequence_parallel": True}),
        long(f"tp=8,{OWN}", 102, {"fuse": True}),
        # one and two ranks, two and four, eight and two beside others
        long("tp=2,pp=3,vision_encoder.pp=1,vision_encoder.dp=2,audio_encoder.pp=1,audio_encoder.tp=1,"
             "audio_encoder.dp=1", 102, {"microbatches": 2}),
        long("tp=8,pp=3,vision_encoder.pp=1,vision_encoder.tp=1,vision_encoder.dp=2,audio_encoder.pp=1,"
             "audio_encoder.tp=1,audio_encoder.dp=4", 102, {"microbatches": 1}),
        long("tp=8,pp=2,vision_encoder.pp=1,vision_encoder.dp=1,vision_encoder.tp=2,audio_encoder.tp=4", 102,
             {"microbatches": 1}),
        long("tp=4,pp=3,vision_encoder.pp=1,vision_encoder.dp=2,audio_encoder.pp=1,audio_encoder.tp=2,"
             "audio_encoder.dp=1", 102, {"microbatches": 1}),
        long("tp=4,pp=2,vision_encoder.pp=1,vision_encoder.tp=2,vision_encoder.dp=4,audio_encoder.tp=2", 102,
             {"microbatches": 1}),
    ],
)  # fmt: skip
@pytest.mark.long_cases("mesh1-102-options1")
def test_with_other_axes_and_options(mesh: str, gradients: int, options: dict[str, Any]) -> None:
    parity(compiled(mesh=mesh, **options), gradients)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Three(nn.Module):
    """Equal towers. tied: the names of two parameters of which the second is the first."""

    def __init__(self, *tied: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.text = (Tower() for _ in range(3))
        if tied:
            module, _, name = tied[1].rpartition(".")
            setattr(self.get_submodule(module), name, self.get_parameter(tied[0]))

    def forward(self, images: torch.Tensor, views: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        seen = self.one(images) * self.other(views)
        loss: torch.Tensor = self.text(words + seen.mean(1, keepdim=True)).square().mean()
        return loss


def three(mesh: str, *tied: str) -> csc.CompiledModel:
    drawn = torch.Generator().manual_seed(1)
    given = {name: torch.randn(16, 3, 8, generator=drawn) for name in ("images", "views", "words")}
    return csc.compile(Three(*tied), example=given, mesh=mesh)


@pytest.mark.parametrize("mesh", ["one.tp=2,other.tp=4", "one.tp=4,other.tp=2", "one.tp=4,other.tp=4", "other.tp=2"])
def test_components_have_a_template_together_where_as_many_divide_them(mesh: str) -> None:
    """Alike in all but how many ranks do."""
    own = parity(three(f"tp=8,{mesh}"), 24)
    templates = {region.component: region.template for region in own.program.regions if "layers" in region.name}
    found = {component: own.options.mesh.dividing(component) for component in templates}
    for (one, used), (other, beside) in combinations(templates.items(), 2):
        assert (used == beside) == (found[one] == found[other])


@pytest.mark.parametrize("mesh", ["tp=8,one.tp=2,other.tp=4", "tp=4,one.tp=1,other.tp=2"])
@pytest.mark.parametrize("tied", ["other.layers.1.0.bias", "other.layers.1.2.weight", "text.layers.1.2.bias"])
@pytest.mark.long_cases("text.layers.1.2.bias-tp=8,one.tp=2,other.tp=4")
def test_a_parameter_that_components_have_together(tied: str, mesh: str) -> None:
    parity(three(mesh, tied.replace("other", "one").replace("text", "one"), tied), 23)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_program_with_groups_that_its_mesh_has_not(tmp_path: Path) -> None:
    compiled(mesh=f"tp=8,{OWN}").write(tmp_path)
    content = json.loads((tmp_path / "program.json").read_text())
    [row] = [one for one in content["parameters"] if one["name"] == f"{VISION}.mlp.fc1.weight"]
    for field, value, said in (
        ("weight", {"equal": "holders 3", "shard": "division 3"}, "groups of 3, and the mesh none"),
        ("weight", {"equal": "holders 4", "shard": "division 4"}, "groups of 4, and 2 ranks divide it"),
        ("weight", {"equal": "holders 2", "shard": "division 4"}, "groups of 2 and of 4 within tp"),
        ("gradient", {"parts": "holders", "shard": "division 2"}, "cannot be 'parts' over 'holders'"),
    ):
        kept, row[field] = row[field], value
        (tmp_path / "program.json").write_text(json.dumps(content))
        with pytest.raises(CscError, match=said):
            load(tmp_path)
        row[field] = kept
