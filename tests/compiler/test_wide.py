"""Components on ranks of their own, more than the language model has for each of its stages, against eager PyTorch in
one process. In several processes: see test_copies; other models and any number of images: test_narrow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import csc
from csc.analysis.costs import region_costs
from csc.analysis.hardware import hardware
from csc.errors import InputError
from tests.compiler.test_data_parallel import collectives, llava, parity
from tests.models import hf
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")
APART = "vision_tower.tp=1,vision_tower.pp=1"
DIVIDED = "vision_tower.tp=2,vision_tower.pp=1,vision_tower.dp=2"  # two copies, each divided as the language model is
PROJECTOR = "multi_modal_projector.tp=1,multi_modal_projector.pp=1"


def test_four_ranks_for_an_encoder_beside_two_for_each_stage_of_the_language_model() -> None:
    """The tower gathers its features itself: two of its ranks send them, each to one; all four get their gradients."""
    mesh = {"vision_tower": {"tp": 1, "dp": 4, "pp": 1}, "language_model": {"tp": 2, "dp": 1, "pp": 2}}
    compiled = parity(llava(8, mesh=mesh, microbatches=2), 80)
    assert compiled.options.mesh.size == 8
    program = compiled.trainer().program
    specs = {one.name: one for one in program.manifest.parameters}
    weight = specs["model.vision_tower.encoder.layers.0.mlp.fc1.weight"]
    assert not weight.boxes and weight.gradient.to_dict() == {"parts": "position"}
    assert len(set(specs["model.language_model.layers.0.mlp.up_proj.weight"].boxes)) == 2
    makers = [
        region.component for region in compiled.program.regions
        if "csc.all_gather" in str(compiled.program.variants[region.variant].forward)
    ]  # fmt: skip
    assert makers == ["vision_tower"] and collectives(compiled, "backward_input").count("csc.all_gather") == 0
    (message,) = [one for one in program.manifest.messages if (one.kind, one.source) == ("F", 0)]
    assert [value.shape[0] for value in message.values] == [4], "all images of a microbatch"
    sent = {(kind, source): size for kind, source, _, size in compiled.program.plan.pipeline["messages"]}
    assert sent["B", 1] == 2 * sent["F", 0], "each rank of the reader has two to tell"
    tower, reader = ((Path(program.directory) / f"rank_{rank}.py").read_text() for rank in (3, 4))
    assert "tp rank 3 of 4" in tower and "by tp ranks 0 to 1 alone" in tower
    assert "tp rank 0 of 2" in reader and "2 ranks for each of 2" in reader
    h100 = hardware("h100")
    alone, beside = (region_costs(compiled.program, h100, mesh=one) for one in (None, compiled.options.mesh))
    last = max(i for i, one in enumerate(alone) if one.component == "vision_tower")
    image = 10 * 32 * 4  # bytes of ten tokens
    met = h100.within.latency + 3 * image / h100.within.bandwidth
    assert beside[last].forward - alone[last].forward == pytest.approx(met), "three others' images come to each"
    assert beside[last].backward_input == alone[last].backward_input


def test_two_ranks_beside_one() -> None:
    """Where nothing is divided."""
    mesh = {"vision_tower": {"dp": 2, "pp": 1}, "language_model": {"dp": 1, "pp": 1}}
    compiled = parity(llava(8, mesh=mesh, microbatches=2), 80)
    assert (compiled.options.mesh.size, compiled.options.mesh.tp) == (3, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "gradients", "options"),
    [
        long("pp=3,vision_tower.pp=1,vision_tower.dp=4", 80, {}),
        long(f"tp=2,pp=3,{APART.replace('pp=1', 'pp=2')},vision_tower.dp=4", 80, {}),
        long(f"tp=2,dp=2,pp=2,{APART},vision_tower.dp=8", 80, {"zero": 1}),
        long(f"dp=2,pp=2,{APART},vision_tower.dp=4", 80, {"zero": 2}),
        long(f"tp=2,dp=2,pp=2,order=pp-dp-tp,{APART},vision_tower.dp=8", 80, {"zero": 3}),
        long(f"dp=2,pp=3,{APART},vision_tower.dp=6", 80, {"zero": 3}),
        long(f"tp=2,cp=2,pp=2,{APART},vision_tower.dp=4", 80, {}),
        long(f"cp=2,pp=2,{APART},vision_tower.dp=2", 80, {}),
        long(f"cp=2,pp=2,{APART},vision_tower.cp=1,vision_tower.dp=4", 80, {}),
        long(f"tp=2,pp=2,{APART},vision_tower.dp=4", 80, {"sequence_parallel": True}),
        long(f"tp=2,pp=2,{APART},vision_tower.dp=4", 43, {"freeze": ["vision_tower"]}),
        long(f"pp=2,{APART},vision_tower.dp=2", 43, {"freeze": ["vision_tower"]}),
        long(f"tp=2,pp=2,{APART},vision_tower.dp=4", 4, {"freeze": ["vision_tower", "language_model", "lm_head"]}),
        long(f"tp=2,pp=2,{APART},vision_tower.dp=4", 37, {"freeze": ["multi_modal_projector", "language_model",
                                                                    "lm_head"]}),
        long(f"tp=2,pp=2,{APART},vision_tower.dp=4", 80, {"recompute": "full"}),
        long(f"pp=3,{APART},vision_tower.dp=4", 80, {"schedule": "zb-h1"}),
        long(f"tp=2,pp=2,{APART},vision_tower.dp=4", 80, {"fuse": True}),
        long(f"pp=2,{APART},vision_tower.dp=3", 80, {"fuse": True}),
        long(f"tp=2,pp=3,{APART},vision_tower.dp=4,{PROJECTOR}", 80, {}),
        long(f"tp=2,pp=3,{APART},vision_tower.dp=4,{PROJECTOR},multi_modal_projector.dp=4", 80, {}),
        long(f"tp=2,pp=3,{APART},vision_tower.dp=8,{PROJECTOR},multi_modal_projector.dp=1", 80, {}),
        long(f"tp=2,pp=3,{APART},vision_tower.dp=1,{PROJECTOR},multi_modal_projector.dp=4", 80, {}),
        long(f"tp=2,pp=3,{DIVIDED},{PROJECTOR},multi_modal_projector.dp=4", 80, {}),
        long("tp=4,pp=2,vision_tower.tp=2,vision_tower.pp=1,vision_tower.dp=4", 80, {}),
        long(f"tp=2,dp=2,pp=2,{DIVIDED.replace('dp=2', 'dp=4')}", 80, {"zero": 1}),
        long(f"tp=2,dp=2,pp=2,{DIVIDED.replace('dp=2', 'dp=6')}", 80, {"zero": 3}),
        long(f"tp=2,cp=2,pp=2,{DIVIDED}", 80, {}),
        long(f"tp=2,pp=2,{DIVIDED}", 80, {"sequence_parallel": True}),
        long(f"tp=2,pp=2,{DIVIDED}", 43, {"freeze": ["vision_tower"]}),
        long(f"tp=2,pp=2,{DIVIDED}", 80, {"recompute": "full"}),
        long(f"tp=2,pp=2,{DIVIDED}", 80, {"fuse": True}),
        long(f"tp=2,pp=2,{APART},vision_tower.dp=4,multi_modal_projector.tp=1", 80, {}),
        long(f"tp=4,pp=2,{APART},vision_tower.dp=8,multi_modal_projector.tp=2", 80, {}),
    ],
)  # fmt: skip
def test_with_other_axes_and_options(mesh: str, gradients: int, options: dict[str, Any]) -> None:
    parity(llava(8, mesh=mesh, microbatches=2, **options), gradients)


@pytest.mark.long
@pytest.mark.parametrize("rest", ["tp=2,pp=2,audio_tower.dp=4", "pp=2,audio_tower.dp=2"])
def test_sounds(rest: str) -> None:
    mesh = f"{rest},audio_tower.pp=1,audio_tower.tp=1"
    parity(csc.compile(hf.whisper_llama(), example=hf.whisper_batch(4), microbatches=2, mesh=mesh), 59)


@pytest.mark.long
@pytest.mark.parametrize(
    "own",
    ["vision_tower.dp=4,audio_tower.dp=1", "audio_tower.dp=1,vision_tower.dp=6", "audio_tower.dp=6,vision_tower.dp=4"],
)
def test_two_encoders_on_several_numbers_of_ranks(own: str) -> None:
    towers = ",".join(f"{tower}_tower.{axis}=1" for tower in ("vision", "audio") for axis in ("tp", "pp"))
    parity(csc.compile(hf.valm(), example=hf.valm_batch(4), mesh=f"tp=2,pp=3,{towers},{own}"), 147)


def test_stages_stand_as_the_mesh_names_them() -> None:
    mesh = {
        "multi_modal_projector": {"dp": 4, "pp": 1},
        "vision_tower": {"dp": 2, "pp": 1},
        "language_model": {"pp": 1},
    }
    with pytest.raises(
        InputError, match=r"projector pipeline stages.*name dp of vision_tower in front of that of multi"
    ):
        llava(8, mesh=mesh).trainer()
    with pytest.raises(InputError, match=r"it reads what model.merge.*let the mesh's be those of language_model"):
        llava(8, mesh={"vision_tower": {"tp": 4, "pp": 1}, "language_model": {"tp": 2, "pp": 1}}).trainer()
