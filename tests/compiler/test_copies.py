"""Components whose layers fewer tensor-parallel ranks divide than others': two hold the same of them, and share out
their samples or tokens. Against eager PyTorch, in one process and in several.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import csc
from csc.checkpoints import files
from csc.errors import InputError
from tests import launching
from tests.compiler import copies_worker
from tests.compiler.test_data_parallel import FLOAT32, captioner, collectives, llava, parity
from tests.compiler.test_dividing import same
from tests.models import hf, mixed
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")
TOWER = "vision_tower.tp=2"
SHARED = "vision_tower.dp=1,vision_tower.pp=1"  # by replicas: see test_shared_ranks
APART = "vision_tower.tp=1,vision_tower.pp=1"  # on ranks of its own, fewer than others have or more: see test_narrow


@pytest.mark.long
def test_an_encoder_divided_by_two_beside_a_language_model_divided_by_four() -> None:
    """Boxes are held twice, gradients of these are parts over the ranks that hold the same; sums of a layer meet two
    ranks, the features one exchange, and what each rank is stands in its file.
    """
    compiled = parity(llava(8, mesh={"vision_tower": {"tp": 2, "dp": 2}, "language_model": {"tp": 4}}), 80)
    assert str(compiled.options.mesh) == "tp=4,language_model.tp=4,vision_tower.tp=2"
    specs = {one.name: one for one in compiled.trainer().program.manifest.parameters}
    up = specs["model.vision_tower.encoder.layers.0.mlp.fc1.weight"]
    assert up.boxes[:2] == up.boxes[2:] and up.boxes[0] != up.boxes[1]
    assert up.gradient.to_dict() == {"parts": "holders 2", "shard": "division 2"}
    norm = specs["model.vision_tower.encoder.layers.0.layer_norm1.weight"]
    assert norm.gradient.to_dict() == {"parts": "holders 2", "equal": "division 2"}
    assert len(set(specs["model.language_model.layers.0.mlp.up_proj.weight"].boxes)) == 4
    assert collectives(compiled, "forward").count("csc.all_gather") == 1
    assert "2 groups of tp ranks share out 8 samples of a microbatch" in "".join(compiled.history()[-1].notes)
    file = (Path(compiled.trainer().program.directory) / "rank_2.py").read_text()
    assert "Divided   part 0 of 2 of vision_tower, copy 1 of 2" in file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "gradients", "options"),
    [
        long(f"tp=4,pp=2,{TOWER}", 43, {"microbatches": 2, "freeze": ["vision_tower"]}),
        long(f"tp=4,pp=2,{TOWER}", 4, {"microbatches": 2, "freeze": ["vision_tower", "language_model", "lm_head"]}),
        long(f"tp=4,dp=2,{TOWER}", 80, {"microbatches": 2, "zero": 1}),
        long(f"tp=4,dp=2,{TOWER}", 80, {"microbatches": 2, "zero": 2}),
        long(f"tp=4,pp=2,dp=2,order=pp-dp-tp,{TOWER}", 80, {"microbatches": 2, "zero": 3}),
        long(f"tp=4,cp=2,{TOWER}", 80, {"microbatches": 2}),
        long(f"tp=4,pp=2,{TOWER}", 80, {"microbatches": 2, "recompute": "full"}),
        long(f"tp=4,{TOWER}", 80, {"sequence_parallel": True}),
        long(f"tp=4,{TOWER}", 80, {"fuse": True}),
        long(f"tp=4,{TOWER}", 37, {"freeze": ["multi_modal_projector", "language_model", "lm_head"]}),
        long(f"tp=4,{TOWER},multi_modal_projector.tp=1", 80, {}),
        long(f"tp=4,{TOWER},multi_modal_projector.tp=2", 80, {}),
        long(f"tp=4,pp=3,{TOWER},vision_tower.pp=1", 43, {"microbatches": 4, "freeze": ["vision_tower"]}),
    ],
)
def test_with_other_axes_and_options(mesh: str, gradients: int, options: dict[str, Any]) -> None:
    parity(llava(8, mesh=mesh, **options), gradients)


@pytest.mark.long
def test_sounds() -> None:
    mesh = "tp=4,pp=2,audio_tower.tp=2"
    parity(csc.compile(hf.whisper_llama(), example=hf.whisper_batch(4), mesh=mesh), 59)


@pytest.mark.long
@pytest.mark.parametrize("counts", [(2, 1, 1, 0), (3, 2, 0, 0), (1, 0, 0, 0)])
def test_any_number_of_images(counts: Sequence[int]) -> None:
    """Three and one in two microbatches; none: the last slots repeat an image."""
    same(*mixed.built("LLaVA", counts), FLOAT32, mesh=f"tp=4,{TOWER}", microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts", "mesh", "options"),
    [
        long("Qwen2.5-VL", (1, 2), "tp=4,visual.tp=2", {}),
        long("Qwen2-VL", (2, 1, 1, 2), "tp=4,pp=2,visual.tp=2", {"microbatches": 2}),
        long("Qwen2-VL", (1, 1, 1, 1), "tp=4,dp=2,visual.tp=2", {"microbatches": 2, "zero": 3, "recompute": "full"}),
        long("Qwen2-Audio", (1, 2), "tp=4,audio_tower.tp=2", {}),
    ],
)
def test_images_in_one_row(name: str, counts: Sequence[int], mesh: str, options: dict[str, Any]) -> None:
    """Packed patches of images of several sizes, and sounds with masks: groups of ranks share out tokens, and divide
    the heads of each.
    """
    compiled = same(*mixed.built(name, counts), FLOAT32, mesh=mesh, **options)
    (spread,) = (one for one in compiled.program.contexts if one.axis == "copies 2")
    assert spread.ranks == 2 and spread.tokens > spread.shard


CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "projector": {"only": "multi_modal_projector"},
    "encoder frozen": {"frozen": ["vision_tower"]},
    "zero": {"mesh": f"tp=4,dp=2,{TOWER}", "options": {"zero": 2}},
    "shards": {"mesh": f"tp=4,dp=2,{TOWER}", "options": {"zero": 3}},
    "stages": {"mesh": f"tp=4,pp=2,{TOWER}"},
    "patches": {"model": "patches", "mesh": "tp=4,visual.tp=2"},
    "one rank": {"mesh": f"tp=2,pp=2,{APART},vision_tower.dp=1"},
    "two ranks, other images": {"mesh": f"tp=4,pp=2,{APART},vision_tower.dp=2"},
    "two ranks, divided": {"mesh": "tp=4,pp=2,vision_tower.tp=2,vision_tower.pp=1,vision_tower.dp=1"},
    "two ranks, frozen": {"mesh": f"tp=4,pp=2,{APART},vision_tower.dp=2", "frozen": ["vision_tower"]},
    "one rank, shards": {"mesh": f"tp=2,pp=2,dp=2,{APART},vision_tower.dp=2", "options": {"zero": 3}},
    "one rank, summed": {"mesh": f"tp=2,pp=2,dp=2,{APART},vision_tower.dp=2", "options": {"zero": 1}},
    "other images on cp ranks": {"mesh": "cp=2,pp=2,vision_tower.cp=1"},
    "other images on groups of cp ranks": {"mesh": "cp=4,vision_tower.cp=2", "options": {"zero": 1}},
    "other images on cp and tp ranks": {
        "mesh": "cp=2,tp=2,vision_tower.cp=1,vision_tower.tp=1",
        "options": {"zero": 1},
    },
    "two ranks, patches": {
        "model": "patches",
        "mesh": "tp=4,pp=2,visual.tp=1,visual.pp=1,visual.dp=2",
        "microbatches": 1,
    },
    "four ranks": {"mesh": f"tp=2,pp=2,{APART},vision_tower.dp=4"},
    "four ranks, frozen": {"mesh": f"tp=2,pp=2,{APART},vision_tower.dp=4", "frozen": ["vision_tower"]},
    "four ranks, divided": {"mesh": "tp=2,pp=2,vision_tower.tp=2,vision_tower.pp=1,vision_tower.dp=2"},
    "two ranks beside one": {"mesh": "pp=2,vision_tower.pp=1,vision_tower.dp=2"},
    "two ranks beside one, shards": {"mesh": f"dp=2,pp=2,{APART},vision_tower.dp=4", "options": {"zero": 3}},
    "two ranks beside one, summed": {"mesh": f"dp=2,pp=2,{APART},vision_tower.dp=4", "options": {"zero": 1}},
    "two ranks beside one, cp": {"mesh": f"cp=2,pp=2,{APART},vision_tower.cp=1,vision_tower.dp=4"},
    "a rank that two replicas share": {"mesh": f"dp=2,pp=2,{SHARED}"},
    "a rank that two replicas share, frozen": {"mesh": f"dp=2,pp=2,{SHARED}", "frozen": ["vision_tower"]},
    "two ranks for four replicas, shards": {
        "mesh": "dp=4,pp=2,vision_tower.dp=2,vision_tower.pp=1",
        "options": {"zero": 3},
    },
    "two ranks for four replicas, summed": {
        "mesh": "dp=4,pp=2,vision_tower.dp=2,vision_tower.pp=1",
        "options": {"zero": 2},
    },
    "a shared rank beside tp": {"mesh": f"dp=2,tp=2,pp=2,{SHARED},vision_tower.tp=1"},
    "shared ranks of tp": {"mesh": f"dp=2,tp=2,pp=2,{SHARED}", "options": {"zero": 1}},
    "shared ranks of cp": {"mesh": f"dp=2,cp=2,pp=2,{SHARED}"},
    "a shared rank, patches": {
        "model": "patches",
        "mesh": "dp=2,pp=2,visual.pp=1,visual.dp=1",
        "microbatches": 1,
    },
    "three numbers of ranks": {"model": "towers", "mesh": "tp=8,vision_encoder.tp=2,audio_encoder.tp=4"},
    "on three numbers of ranks, shards": {
        "model": "towers",
        "mesh": "tp=4,pp=3,vision_encoder.pp=1,vision_encoder.tp=1,vision_encoder.dp=1,audio_encoder.pp=1,"
        "audio_encoder.tp=2,audio_encoder.dp=1",
        "samples": 4,
    },
    "two ranks beside one, patches": {
        "model": "patches",
        "mesh": "pp=2,visual.pp=1,visual.dp=2",
        "microbatches": 1,
    },
}


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_processes(name: str, tmp_path: Path) -> None:
    """Losses, norms and parameters of three clipped steps are plain PyTorch's; what was saved goes on in one process
    and on another mesh as it does here, with the optimizer.
    """
    case = {"model": "llava", "mesh": f"tp=4,{TOWER}", "samples": 8, "microbatches": 2, **CASES[name]}
    ranks = csc.Mesh.of(case["mesh"]).size
    launching.ranks(copies_worker.train, ranks, case, tmp_path)
    losses, norms, parameters = copies_worker.eager(case, 3)
    results = [json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(ranks)]
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=FLOAT32)
        assert result["norms"] == pytest.approx(norms, rel=FLOAT32)
    found = {}
    for file in (tmp_path / "weights").glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    for key, expected in parameters.items():
        if key in found:
            assert (found[key] - expected).abs().max() <= FLOAT32 * expected.abs().max().clamp(min=1e-2), key
    assert len(found) >= len(parameters) - 1, "all of them were saved, tied ones once"
    other = "pp=2,tp=2" if case["model"] == "llava" else "tp=2"
    [folder] = files.saved(tmp_path / "run").values()
    assert all(one.missing() == 0 for _, one in files.read(folder).tensors()), "what two hold is written once"
    for mesh, run in (("pp=1", False), (other, True), (f"{other},dp=2", True)):
        later = copies_worker.go_on(case, tmp_path, mesh, run)
        assert later == pytest.approx(results[0]["more"], rel=FLOAT32), mesh


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize("mesh", [f"tp=4,{TOWER}", f"pp=2,{APART},vision_tower.dp=3"])
def test_a_run_of_one_process_is_taken_up(mesh: str, tmp_path: Path) -> None:
    case = {"model": "llava", "mesh": "pp=1", "samples": 8, "microbatches": 2}
    compiled, batch = copies_worker.compiled_of(case, "pp=1"), copies_worker.BATCHES["llava"](8)
    optimizer = compiled.optimizer(torch.optim.AdamW, **copies_worker.STEP)
    copies_worker.steps(compiled, optimizer, batch, 3)
    csc.CheckpointManager(tmp_path / "run", compiled, optimizer=optimizer).save(3).wait()
    later = copies_worker.steps(compiled, optimizer, batch, 2)["losses"]
    launching.ranks(copies_worker.taken_up, 4, {**case, "mesh": mesh}, tmp_path)
    for rank in range(4):
        assert json.loads((tmp_path / f"taken_up_{rank}.json").read_text()) == pytest.approx(later, rel=FLOAT32)


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize("mesh", [f"tp=4,{TOWER}", f"pp=2,{APART},vision_tower.dp=3"])
def test_ranks_that_hold_the_same_have_to_start_with_the_same(mesh: str, tmp_path: Path) -> None:
    launching.ranks(copies_worker.drawn_apart, 4, {"model": "llava", "mesh": mesh, "samples": 8}, tmp_path)
    for rank in range(4):
        said = (tmp_path / f"said_{rank}.txt").read_text()
        assert "parameter 'model.vision_tower" in said and "on rank 2 than on rank 0" in said, said


def test_what_cannot_be_divided_so() -> None:
    for mesh, said in (
        ("tp=4,vision.tp=2", "names 'vision', which is no component of the model.*vision_tower"),
        (
            "tp=6,vision_tower.tp=3",
            "4 heads of self_attn.q_proj.weight cannot be divided by vision_tower.tp=3.*divides it is 2",
        ),
        ("tp=9,vision_tower.tp=3", "divided by vision_tower.tp=3.*divides it is 1"),  # 2 does, and does not divide 9
    ):
        with pytest.raises(InputError, match=said):
            llava(8, mesh=mesh).trainer()
    with pytest.raises(InputError, match=r"vision\.tp=2 divides nothing of it.*leave tp at 1"):
        captioner(lambda h: h, 4, "tp=4,vision.tp=2").trainer()
