"""Components on ranks of their own, fewer than others have, against eager PyTorch in one process; with any number of
images and other models on more, too (else test_wide). In several processes: here where steps fail or lack images, else
test_copies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import csc
from csc.errors import InputError
from tests import launching
from tests.compiler import narrow_worker
from tests.compiler.tensor_models import BATCHES, MODELS
from tests.compiler.test_data_parallel import FLOAT32, collectives, llava, parity
from tests.compiler.test_dividing import same
from tests.models import hf, mixed
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")
APART = "vision_tower.tp=1,vision_tower.pp=1"
DIVIDED = "vision_tower.tp=2,vision_tower.pp=1,vision_tower.dp=1"


@pytest.mark.long
def test_two_ranks_for_an_encoder_beside_four_for_each_stage_of_the_language_model() -> None:
    """Each rank of the tower sends the features of its own images to two others; of what comes back it gets one."""
    mesh = {"vision_tower": {"tp": 1, "dp": 2, "pp": 1}, "language_model": {"tp": 4, "pp": 2}}
    compiled = parity(llava(8, mesh=mesh, microbatches=2), 80)
    assert compiled.options.mesh.size == 10
    program = compiled.trainer().program
    specs = {one.name: one for one in program.manifest.parameters}
    assert not specs["model.vision_tower.encoder.layers.0.mlp.fc1.weight"].boxes
    assert len(set(specs["model.language_model.layers.0.mlp.up_proj.weight"].boxes)) == 4
    assert collectives(compiled, "forward").count("csc.all_gather") == 1
    (message,) = [one for one in program.manifest.messages if (one.kind, one.source) == ("F", 0)]
    assert [value.shape[0] for value in message.values] == [2], "of four images of a microbatch"
    first, last = ((Path(program.directory) / f"rank_{rank}.py").read_text() for rank in (1, 9))
    assert "tp rank 1 of 2" in first and "tp rank 3 of 4" in last


@pytest.mark.parametrize("mesh", [f"tp=2,pp=2,{APART},vision_tower.dp=1", f"tp=4,pp=2,{DIVIDED}"])
@pytest.mark.long_cases("tp=2,pp=2,vision_tower.tp=1,vision_tower.pp=1,vision_tower.dp=1")
def test_one_rank_and_a_tower_that_its_ranks_divide(mesh: str) -> None:
    parity(llava(8, mesh=mesh, microbatches=2), 80)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "gradients", "options"),
    [
        long(f"tp=4,pp=2,{APART},vision_tower.dp=1", 80, {}),
        long("tp=4,pp=3,vision_tower.pp=2,vision_tower.tp=2,vision_tower.dp=1", 80, {}),
        long(f"tp=4,dp=2,pp=2,{APART},vision_tower.dp=4", 80, {"zero": 1}),
        long(f"tp=4,dp=2,pp=2,{DIVIDED.replace('dp=1', 'dp=2')}", 80, {"zero": 2}),
        long(f"tp=4,dp=2,pp=2,order=pp-dp-tp,{APART},vision_tower.dp=2", 80, {"zero": 3}),
        long(f"tp=4,cp=2,pp=2,{APART},vision_tower.dp=2", 80, {}),
        long(f"tp=4,pp=2,{DIVIDED}", 80, {"sequence_parallel": True}),
        long(f"tp=4,pp=2,{APART},vision_tower.dp=2", 80, {"sequence_parallel": True}),
        long(f"tp=4,pp=2,{APART},vision_tower.dp=2", 43, {"freeze": ["vision_tower"]}),
        long(f"tp=4,pp=2,{APART},vision_tower.dp=2", 4, {"freeze": ["vision_tower", "language_model", "lm_head"]}),
        long(f"tp=4,pp=2,{APART},vision_tower.dp=2", 37, {"freeze": ["multi_modal_projector", "language_model",
                                                                    "lm_head"]}),
        long(f"tp=4,pp=2,{APART},vision_tower.dp=2", 80, {"recompute": "full"}),
        long(f"tp=4,pp=3,{APART},vision_tower.dp=2", 80, {"schedule": "zb-h1"}),
        long(f"tp=2,pp=3,{APART},vision_tower.dp=1", 80, {"fuse": True}),
        long(f"tp=4,pp=3,{APART},vision_tower.dp=2,multi_modal_projector.pp=1,multi_modal_projector.tp=1", 80, {}),
        long(f"tp=4,pp=3,{APART},vision_tower.dp=2,multi_modal_projector.pp=1,multi_modal_projector.tp=1,"
             "multi_modal_projector.dp=2", 80, {}),
    ],
)  # fmt: skip
def test_with_other_axes_and_options(mesh: str, gradients: int, options: dict[str, Any]) -> None:
    parity(llava(8, mesh=mesh, microbatches=2, **options), gradients)


@pytest.mark.long
@pytest.mark.parametrize("own", ["audio_tower.tp=1,audio_tower.dp=2", "audio_tower.tp=2,audio_tower.dp=1"])
def test_sounds(own: str) -> None:
    mesh = f"tp=4,pp=2,audio_tower.pp=1,{own}"
    parity(csc.compile(hf.whisper_llama(), example=hf.whisper_batch(4), microbatches=2, mesh=mesh), 59)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts", "mesh", "options"),
    [
        long("LLaVA", (2, 1, 1, 0), f"tp=4,pp=2,{APART},vision_tower.dp=2", {"microbatches": 2}),
        long("LLaVA", (1, 0, 0, 0), f"tp=4,pp=2,{APART},vision_tower.dp=1", {"microbatches": 2}),
        long("LLaVA", (1, 0, 0, 0), f"tp=4,pp=2,{DIVIDED}", {"microbatches": 2}),
        long("Qwen2.5-VL", (1, 2), "tp=4,pp=2,visual.tp=1,visual.pp=1,visual.dp=2", {}),
        long("Qwen2.5-VL", (1, 2), "tp=4,pp=2,visual.tp=2,visual.pp=1,visual.dp=1", {}),
        long("Qwen2-VL", (2, 1, 1, 2), "tp=4,pp=2,visual.tp=1,visual.pp=1,visual.dp=2", {"microbatches": 2}),
        long("Qwen2-VL", (1, 1, 1, 1), "tp=4,pp=2,dp=2,visual.tp=1,visual.pp=1,visual.dp=4",
             {"microbatches": 2, "zero": 3, "recompute": "full"}),
        long("Qwen2-Audio", (1, 2), "tp=2,pp=2,audio_tower.tp=1,audio_tower.pp=1,audio_tower.dp=1", {}),
        long("Qwen2-Audio", (1, 2), "tp=4,pp=2,audio_tower.tp=1,audio_tower.pp=1,audio_tower.dp=2", {}),
        # on more ranks
        long("LLaVA", (2, 1, 1, 0), f"tp=2,pp=2,{APART},vision_tower.dp=4", {"microbatches": 2}),
        long("LLaVA", (1, 0, 0, 0), f"tp=2,pp=2,{APART},vision_tower.dp=4", {"microbatches": 2}),
        long("LLaVA", (3, 2, 0, 0), f"pp=2,{APART},vision_tower.dp=3", {"microbatches": 2}),
        long("Qwen2.5-VL", (1, 2), "tp=2,pp=2,visual.tp=1,visual.pp=1,visual.dp=4", {}),
        long("Qwen2.5-VL", (1, 2), "pp=2,visual.pp=1,visual.dp=2", {}),
        long("Qwen2.5-VL", (1, 2), "tp=2,pp=2,visual.tp=2,visual.pp=1,visual.dp=2", {}),
        long("LLaVA", (3, 2, 0, 0), f"tp=2,pp=2,{DIVIDED.replace('dp=1', 'dp=2')}", {"microbatches": 2}),
        long("Qwen2-VL", (2, 1, 1, 2), "tp=2,pp=3,visual.tp=1,visual.pp=2,visual.dp=4", {"microbatches": 2}),
        long("Qwen2-VL", (1, 1, 1, 1), "dp=2,pp=2,visual.pp=1,visual.dp=4",
             {"microbatches": 2, "zero": 3, "recompute": "full"}),
        long("Qwen2-Audio", (1, 2), "tp=2,pp=2,audio_tower.tp=1,audio_tower.pp=1,audio_tower.dp=4", {}),
        long("Qwen2-Audio", (1, 2), "pp=2,audio_tower.pp=1,audio_tower.dp=2", {}),
    ],
)  # fmt: skip
def test_any_number_and_size_of_images(
    name: str, counts: Sequence[int], mesh: str, options: dict[str, Any]
) -> None:  # fmt: skip
    same(*mixed.built(name, counts), FLOAT32, mesh=mesh, **options)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    ("name", "component"),
    [
        long(name, component) for name, component in (
            ("LLaVA-NeXT", "vision_tower"), ("LLaVA-OneVision", "vision_tower"), ("InternVL", "vision_tower"),
            ("Gemma 3", "vision_tower"), ("Qwen3-VL", "visual"), ("Idefics 3", "vision_model"),
            ("SmolVLM", "vision_model"),
        )
    ],
)  # fmt: skip
def test_more_models(name: str, component: str, ranks: int) -> None:
    """One rank beside two, and four."""
    mesh = f"tp=2,pp=2,{component}.tp=1,{component}.pp=1,{component}.dp={ranks}"
    same(*mixed.built(name, (1, 2)), FLOAT32, mesh=mesh)


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "victim"),
    [(f"tp=2,pp=2,{APART},vision_tower.dp=1", 0), (f"tp=2,pp=2,{APART},vision_tower.dp=1", 2),
     (f"pp=2,{APART},vision_tower.dp=2", 1), (f"pp=2,{APART},vision_tower.dp=2", 2),
     ("dp=2,pp=2,vision_tower.pp=1,vision_tower.dp=1", 0), ("dp=2,pp=2,vision_tower.pp=1,vision_tower.dp=1", 2)],
)  # fmt: skip
def test_a_rank_that_fails_in_the_middle_is_told_to_all(mesh: str, victim: int) -> None:
    """The encoder's, one that sends no gradient back; one of an encoder on more that sends nothing, and its reader; one
    that two replicas share, and that of the second.
    """
    told = launching.ranks(narrow_worker.fails, 3, mesh, victim)
    for rank, text in enumerate(told):
        said, same_bits = json.loads(text.splitlines()[-1])
        assert "index out of range" in said and same_bits
        assert (f"rank {victim} failed" in said) == (rank != victim)


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize(
    "mesh",
    [f"tp=2,pp=2,{APART},vision_tower.dp=1", f"tp=2,pp=2,dp=2,{APART},vision_tower.dp=2", "cp=2,vision_tower.cp=1",
     f"pp=2,{APART},vision_tower.dp=2", f"pp=2,dp=2,{APART},vision_tower.dp=4",
     "dp=2,pp=2,vision_tower.pp=1,vision_tower.dp=1"],
)  # fmt: skip
def test_microbatches_without_images_in_processes(mesh: str) -> None:
    model, batch = mixed.built("LLaVA", narrow_worker.IMAGES)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        expected.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    for text in launching.ranks(narrow_worker.uneven, csc.Mesh.of(mesh).size, mesh):
        assert json.loads(text.splitlines()[-1]) == pytest.approx(expected, rel=FLOAT32)


def test_a_schedule_that_puts_the_encoder_elsewhere_is_refused(tmp_path: Path) -> None:
    mesh = f"tp=2,pp=2,{APART},vision_tower.dp=1"
    directory = Path(llava(8, mesh=mesh, microbatches=2).trainer().program.directory)
    head, first, second = re.split(r"rank \d:", (directory / "schedule.txt").read_text().rstrip("\n"))
    written = tmp_path / "schedule.txt"
    written.write_text(f"{head}rank 0:{second}\nrank 1:{first}")
    with pytest.raises(InputError, match=r"on 1 tp ranks, is at position 1, which has 2.*leave the schedule out"):
        llava(8, mesh=mesh, microbatches=2, schedule=str(written)).trainer()


def test_a_parameter_that_both_have_is_refused() -> None:
    model = MODELS["llava"]()
    inner = model.model
    inner.multi_modal_projector.linear_2.weight = inner.language_model.layers[0].self_attn.q_proj.weight
    fewer = ",".join(f"{name}.{size}" for name in ("vision_tower", "multi_modal_projector")
                     for size in ("tp=1", "pp=1", "dp=1"))  # fmt: skip
    with pytest.raises(InputError, match=r"is a parameter of .* and .*, which are on different numbers of ranks"):
        csc.compile(model, example=BATCHES["llava"](4), mesh=f"tp=2,pp=3,{fewer}").trainer()
