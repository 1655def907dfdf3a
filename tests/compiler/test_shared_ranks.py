"""Components with fewer replicas than others, whose ranks several of these share, against eager PyTorch in one process.
In several processes: test_narrow where steps fail or lack images, here what samples processes have, else test_copies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from csc.passes.pipeline_problem import gathering

import csc
from csc.analysis.costs import region_costs
from csc.analysis.hardware import hardware
from csc.errors import InputError
from csc.ir.program import Options
from csc.runtime.timelines import timeline
from tests import launching
from tests.compiler import shared_ranks_worker
from tests.compiler.tensor_models import BATCHES, MODELS
from tests.compiler.test_data_parallel import FLOAT32, llava, parity
from tests.compiler.test_dividing import same
from tests.models import hf, mixed
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")
SHARED = "vision_tower.dp=1,vision_tower.pp=1"
TWO = f"dp=2,pp=2,{SHARED}"  # three ranks: the tower's, and two of the language model


def test_one_rank_for_an_encoder_beside_two_replicas_of_the_language_model() -> None:
    """It makes the features of both, sends each its own, and gets a gradient from each: twice the work, the activations
    and the bytes of a microbatch.
    """
    mesh = {"vision_tower": {"dp": 1, "pp": 1}, "language_model": {"dp": 2, "pp": 1}}
    compiled = parity(llava(8, mesh=mesh, microbatches=2), 80)
    assert (compiled.options.mesh.size, compiled.options.mesh.dp) == (3, 2)
    trainer = compiled.trainer()
    [first, *others] = trainer.ranks
    assert [len(one.actions) for one in others] == [len(trainer.program.schedule.ranks[1])] * 2
    assert sum(one.kind == "F" for one in first.actions) == 4, "two microbatches of two replicas"
    manifest = trainer.program.manifest
    (message,) = [one for one in manifest.messages if (one.kind, one.source) == ("F", 0)]
    assert [value.shape[0] for value in message.values] == [2], "of one replica's microbatch"
    sent = {(kind, source): size for kind, source, _, size in compiled.program.plan.pipeline["messages"]}
    bytes_of_one = sum(value.numel * value.dtype.itemsize for value in message.values)
    assert sent == {("F", 0): 2 * bytes_of_one, ("B", 1): 2 * bytes_of_one}
    h100 = hardware("h100")
    alone, beside = (region_costs(compiled.program, h100, mesh=one) for one in (None, compiled.options.mesh))
    for one, other in zip(alone, beside, strict=True):
        times = 2 if one.component == "vision_tower" else 1
        assert (other.forward, other.saved) == (pytest.approx(times * one.forward), times * one.saved)
    tower, reader = ((Path(trainer.program.directory) / f"rank_{rank}.py").read_text() for rank in (0, 2))
    assert "replicas 0 to 1 of 2" in tower and "2 replicas for each" in tower and "for every replica, in turn" in tower
    assert "replica 1 of 2" in reader and "each from 2 replicas" in reader


def test_gathers_are_those_of_the_positions_with_the_most_ranks() -> None:
    """The first rank of a mesh may have nobody to gather from."""
    h100, options = hardware("h100"), Options(mesh=csc.Mesh.of(TWO), zero=3)
    assert gathering([h100, h100], options) == gathering([h100, h100], replace(options, mesh=csc.Mesh(dp=2, pp=2)))
    assert gathering([h100, h100], options).latency > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "gradients", "options"),
    [
        long(f"dp=4,pp=3,{SHARED}", 80, {"microbatches": 1}),
        long("dp=4,pp=3,vision_tower.pp=2,vision_tower.dp=2", 80, {"microbatches": 2, "zero": 1}),
        long("dp=4,pp=2,vision_tower.pp=1,vision_tower.dp=2", 80, {"zero": 2}),
        long("dp=4,pp=2,vision_tower.pp=1,vision_tower.dp=2", 80, {"zero": 3}),
        long(TWO, 80, {"zero": 3}),
        long(f"dp=2,tp=2,pp=2,{SHARED}", 80, {"zero": 3}),
        long(f"dp=2,tp=2,pp=2,{SHARED},vision_tower.tp=1", 80, {}),
        long(f"dp=2,tp=4,pp=2,{SHARED},vision_tower.tp=2", 80, {}),
        long(f"dp=2,tp=2,pp=2,{SHARED}", 80, {"sequence_parallel": True}),
        long(f"dp=2,cp=2,pp=2,{SHARED}", 80, {}),
        long(TWO, 43, {"freeze": ["vision_tower"]}),
        long(TWO, 4, {"freeze": ["vision_tower", "language_model", "lm_head"]}),
        long(TWO, 37, {"freeze": ["multi_modal_projector", "language_model", "lm_head"]}),
        long(TWO, 80, {"recompute": "full"}),
        long(f"dp=2,pp=3,{SHARED}", 80, {"schedule": "zb-h1", "microbatches": 4}),
        long(f"dp=2,pp=3,{SHARED}", 80, {"schedule": "gpipe", "microbatches": 4}),
        long(TWO, 80, {"fuse": True}),
        long(f"dp=4,pp=3,vision_tower.dp=2,vision_tower.pp=1,{SHARED.replace('vision_tower', 'multi_modal_projector')}",
             80, {}),
        long("dp=4,pp=3,vision_tower.dp=2,vision_tower.pp=1,multi_modal_projector.dp=2,multi_modal_projector.pp=1",
             80, {}),
        long(f"dp=2,tp=2,pp=3,{SHARED},multi_modal_projector.tp=1,multi_modal_projector.dp=2,multi_modal_projector.pp=1",
             80, {"zero": 3}),
        long("dp=2,tp=2,pp=3,vision_tower.tp=1,vision_tower.dp=8,vision_tower.pp=1,multi_modal_projector.tp=1,"
             "multi_modal_projector.dp=1,multi_modal_projector.pp=1", 80, {}),
    ],
)  # fmt: skip
def test_with_other_axes_and_options(mesh: str, gradients: int, options: dict[str, Any]) -> None:
    parity(llava(8, mesh=mesh, **{"microbatches": 2, **options}), gradients)


@pytest.mark.long
def test_two_encoders() -> None:
    """One shared by four replicas, one by two."""
    towers = "vision_tower.pp=1,audio_tower.pp=1,vision_tower.dp=1,audio_tower.dp=2"
    parity(csc.compile(hf.valm(), example=hf.valm_batch(4), mesh=f"dp=4,pp=3,{towers}"), 147)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts", "mesh", "options"),
    [
        long("LLaVA", (2, 1, 1, 0), TWO, {"microbatches": 2}),
        long("LLaVA", (1, 0, 0, 0), TWO, {"microbatches": 2}),
        long("Qwen2.5-VL", (1, 2), "dp=2,pp=2,visual.pp=1,visual.dp=1", {}),
        long("Qwen2-VL", (2, 1, 1, 2), "dp=2,pp=2,visual.pp=1,visual.dp=1",
             {"microbatches": 2, "zero": 3, "recompute": "full"}),
        long("Qwen2-Audio", (1, 2), "dp=2,pp=2,audio_tower.pp=1,audio_tower.dp=1", {}),
    ],
)  # fmt: skip
def test_any_number_and_size_of_images(
    name: str, counts: Sequence[int], mesh: str, options: dict[str, Any]
) -> None:  # fmt: skip
    same(*mixed.built(name, counts), FLOAT32, mesh=mesh, **options)


def trained(mesh: str, microbatches: int, batch: Any) -> list[torch.Tensor]:
    """Loss and gradients of a model with dropout in every layer, from one seed."""
    torch.manual_seed(0)
    model = MODELS["llava"]()
    for module in model.modules():
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.2)
    compiled = csc.compile(model.train(), mesh=mesh, example=batch, microbatches=microbatches, check=False)
    torch.manual_seed(7)
    loss = compiled.train_step(batch)
    assert compiled.trainer().program.manifest.random
    return [loss, *(p.grad for _, p in sorted(compiled.named_parameters()) if p.grad is not None)]


@pytest.mark.long
def test_dropout_has_the_masks_of_any_other_mesh() -> None:
    batch = BATCHES["llava"](8)
    expected = trained("pp=2", 4, batch)
    for found, other in zip(trained(TWO, 2, batch), expected, strict=True):
        assert (found - other).abs().max() <= FLOAT32 * other.abs().max().clamp(min=1e-6)


@pytest.mark.long
def test_batches_of_other_sizes_lists_and_accumulation() -> None:
    compiled, plain = llava(8, mesh=TWO, microbatches=2), MODELS["llava"]()
    for samples in (4, 12, 8):
        batch = BATCHES["llava"](samples)
        each = samples // 4
        parts = [{name: one[i * each : (i + 1) * each] for name, one in batch.items()} for i in range(4)]
        loss = plain(**batch).loss
        loss.backward()
        found = compiled.train_step(parts if samples == 12 else batch)
        assert float(found) == pytest.approx(float(loss.detach()), rel=FLOAT32)
    for name, parameter in compiled.named_parameters():
        expected = plain.get_parameter(name).grad
        assert (parameter.grad - expected).abs().max() <= FLOAT32 * expected.abs().max().clamp(min=1e-5), name
    with pytest.raises(InputError, match="the batch has 6 samples; 4 microbatches x replicas do not fit"):
        compiled.train_step(BATCHES["llava"](6))


@pytest.mark.long
def test_a_measured_timeline_is_that_of_one_replica() -> None:
    """A compute of the shared rank lasts until it is done for both."""
    compiled = llava(8, mesh=TWO, microbatches=2)
    trainer = compiled.trainer()
    trainer.trace = True
    compiled.train_step(BATCHES["llava"](8))
    found = timeline(trainer.timeline, trainer.program.manifest)
    for position, events in enumerate(found.ranks):
        assert [event.action for event in events] == list(trainer.program.schedule.ranks[position])
    first = next(event for event in found.ranks[0] if event.action.kind == "F")
    both = [timed for timed in trainer.timeline[0] if timed.action.kind == "F"][:2]
    assert first.end - first.start == pytest.approx(both[1].end - both[0].start)


@pytest.mark.gloo
@pytest.mark.long
def test_every_process_loads_all_samples(tmp_path: Path) -> None:
    """No process has those of one replica: local batches are the global one, and what differs is refused. A loader's
    position is saved once, and found again.
    """
    expected = float(MODELS["llava"]()(**BATCHES["llava"](8)).loss.detach())
    for text in launching.ranks(shared_ranks_worker.own_samples, 3, TWO, tmp_path):
        found = json.loads(text.splitlines()[-1])
        assert found["share"] == [0, 1] and found["position"] == 3
        assert found["local"] == pytest.approx(expected, rel=FLOAT32)
        assert found["balanced"] == pytest.approx(expected, rel=FLOAT32)
        assert "were given different batches" in found["others"] or "with other tokens" in found["others"]


def test_a_parameter_that_both_have_is_refused() -> None:
    model = MODELS["llava"]()
    inner = model.model
    inner.multi_modal_projector.linear_2.weight = inner.language_model.layers[0].self_attn.q_proj.weight
    fewer = ",".join(f"{name}.pp=1,{name}.dp=1" for name in ("vision_tower", "multi_modal_projector"))
    with pytest.raises(InputError, match=r"is a parameter of .* and .*, which are on different numbers of ranks"):
        csc.compile(model, example=BATCHES["llava"](4), mesh=f"dp=2,pp=3,{fewer}").trainer()


def test_a_language_model_named_first_is_refused() -> None:
    with pytest.raises(InputError, match=r"language_model pipeline stages in front.*component named last"):
        llava(8, mesh={"language_model": {"dp": 1, "pp": 1}, "vision_tower": {"dp": 2, "pp": 1}}).trainer()
