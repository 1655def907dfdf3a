"""Features of frozen encoders kept on disk: the steps of a program that runs the encoder, bit for bit, or an error."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import csc
from benchmarks.coverage import models as coverage
from csc.cache.feature_entries import FeatureCache
from tests import launching
from tests.compiler import features_worker
from tests.compiler.features_worker import compiled_for, gradients
from tests.compiler.small import text, text_batch
from tests.exactness import FLOAT32
from tests.models import captions
from tests.models.hf import llava, llava_batch, valm, valm_batch, whisper_batch, whisper_llama
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")

Batch = dict[str, torch.Tensor]
Stepped = tuple[float, Batch]


def step(compiled: csc.CompiledModel, batch: Any) -> Stepped:
    compiled.zero_grad()
    return float(compiled.train_step(batch)), gradients(compiled)


def same(found: Stepped, expected: Stepped) -> None:
    """To the bit."""
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


def close(found: Stepped, expected: Stepped) -> None:
    assert found[0] == pytest.approx(expected[0], rel=FLOAT32)
    largest = max(float(gradient.norm()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        error = float((found[1][name] - gradient).norm())
        assert error <= FLOAT32 * max(float(gradient.norm()), 1e-2 * largest), name


def counts(compiled: csc.CompiledModel) -> tuple[float, float]:
    return compiled.metrics["features_made"], compiled.metrics["features_read"]


def reversed_samples(batch: Batch) -> Batch:
    return {name: one.flip(0) for name, one in batch.items()}


CASES: list[Any] = [
    ("llava", llava, llava_batch, "pp=2", ["vision_tower"], {}),
    long(("llava", llava, llava_batch, "pp=2,dp=2", ["vision_tower"], {"precision": "bf16"})),
    long(("valm", valm, valm_batch, "pp=3", ["vision_tower", "audio_tower"], {"schedule": "zb-h1"})),
    long(("whisper", whisper_llama, whisper_batch, "pp=2", ["audio_tower"], {"recompute": "full"})),
    long(("llava", llava, llava_batch, "cp=2,pp=2", ["vision_tower"], {})),
    long(("llava", llava, llava_batch, "pp=2,dp=2", ["vision_tower"], {"zero": 3})),
    long(("llava", llava, llava_batch, "pp=2", ["vision_tower", "multi_modal_projector"], {"fuse": False})),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}-{len(case[4])}")
def test_steps_are_those_of_a_program_that_runs_the_encoder(case: Any, tmp_path: Path) -> None:
    _, make, batch, mesh, freeze, options = case
    common = {"mesh": mesh, "example": batch(8), "freeze": freeze, "microbatches": 2, "schedule": "1f1b", **options}
    whole = csc.compile(make(), **common)
    kept = csc.compile(make(), **common, cache_features=tmp_path)
    encoders = tuple(pattern for pattern in freeze if "projector" not in pattern)
    regions = [region for stage in kept.program.stages for region in stage.regions if "features." not in region]
    assert not [region for region in regions if any(encoder in region for encoder in encoders)]
    expected = step(whole, batch(8))
    same(step(kept, batch(8)), expected)
    assert counts(kept)[0] > 0
    same(step(kept, batch(8)), expected)
    assert counts(kept) == (0, 8)
    again = csc.compile(make(), **common, cache_features=tmp_path)
    same(step(again, batch(8)), expected)
    assert counts(again)[0] == 0, "another process, or another day"
    other = reversed_samples(batch(8))  # other microbatches of the same images
    close(step(again, other), step(whole, other))
    assert counts(again)[0] == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava_next", "internvl"])
def test_encoders_whose_images_are_packed(name: str, tmp_path: Path) -> None:
    """One microbatch: that of an encoder whose rows nothing divides comes again as it was."""

    def made(folder: Path | None) -> tuple[csc.CompiledModel, Batch]:
        torch.manual_seed(0)
        model, batch = getattr(coverage, name)()
        encoder = "visual" if name.startswith("qwen") else "vision_tower"
        return csc.compile(model, mesh="pp=2", example=batch, freeze=[encoder], cache_features=folder), batch

    whole, batch = made(None)
    kept, _ = made(tmp_path)
    expected = step(whole, batch)
    for _ in range(2):
        same(step(kept, batch), expected)
    assert counts(kept)[0] == 0 and counts(kept)[1] == (1 if name == "llava_next" else 2)
    assert not [r for r in kept.program.regions if "vis" in r.component and r.parameters and not r.needs_dw]


@pytest.mark.gloo
@pytest.mark.parametrize("case", [("pp=2,dp=2", True), long(("pp=2,dp=2", False)), long(("pp=2", True))])
def test_processes_give_the_bits_of_one_process(case: tuple[str, bool], tmp_path: Path) -> None:
    mesh, shared = case
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = step(compiled_for(mesh, None), llava_batch(4))
    finally:
        torch.set_num_threads(threads)
    ranks = csc.Mesh.of(mesh).size
    launching.ranks(features_worker.main, ranks, {"mesh": mesh, "shared": shared}, tmp_path)
    results = [json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(ranks)]
    assert {told[0] for one in results for told in one["told"]} == {expected[0]}
    for one in results:
        reads = "pixel_values" in one["needs"]
        assert all(
            (made, read) == ((0, 4 // csc.Mesh.of(mesh).dp) if reads else (0, 0)) for _, made, read in one["told"][1:]
        )
    assert 0 < sum("pixel_values" in one["needs"] for one in results) < ranks
    for rank in range(ranks):
        for name, gradient in load_file(tmp_path / f"gradients_{rank}.safetensors").items():
            assert torch.equal(gradient, expected[1][name]), name


def files(folder: Path) -> list[Path]:
    """Of features: the largest; the others say how microbatches are divided."""
    return sorted(one for one in folder.rglob("*.safetensors") if one.stat().st_size > 1000)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def exchanged(file: Path) -> None:
    """Whole, and of another image."""
    other = next(one for one in files(file.parents[1]) if one != file)
    shutil.copy(other, file)


def replaced(file: Path) -> None:
    file.unlink()
    file.mkdir()


def test_damaged_entries_are_made_again(tmp_path: Path) -> None:
    kept = compiled_for("pp=2", tmp_path)
    expected = step(kept, llava_batch(4))
    step(kept, llava_batch(4))
    for damage in (cut, flipped, emptied, exchanged, Path.unlink, replaced):
        assert len(files(tmp_path)) == 4
        damage(files(tmp_path)[1])
        same(step(kept, llava_batch(4)), expected)
        assert counts(kept) == (2, 2), f"{damage}: the microbatch of the damaged one, and the other"
        same(step(kept, llava_batch(4)), expected)
        assert counts(kept) == ((0, 4) if damage is not replaced else (2, 2)), damage


def test_other_weights_have_other_features(tmp_path: Path) -> None:
    """Written to in place, through `.data`, which torch does not count, and through NumPy."""
    kept, whole = compiled_for("pp=2", tmp_path), compiled_for("pp=2", None)
    before = step(kept, llava_batch(4))
    for of in (lambda weight: weight.detach(), lambda weight: weight.data, lambda weight: weight.detach().numpy()):
        for compiled in (kept, whole):
            own = of(compiled.model.model.vision_tower.encoder.layers[0].mlp.fc1.weight)
            own *= 1.5
        after = step(kept, llava_batch(4))
        assert after[0] != before[0]
        assert counts(kept) == (4, 0)
        same(after, step(whole, llava_batch(4)))
        before = after


def test_another_phase_keeps_what_is_frozen_then(tmp_path: Path) -> None:
    """With the projector frozen too, its features are kept; with the encoder thawed nothing can be."""
    first = compiled_for("pp=2", tmp_path)
    step(first, llava_batch(4))
    second = first.with_options(freeze=["vision_tower", "multi_modal_projector"])
    whole = compiled_for("pp=2", None).with_options(freeze=["vision_tower", "multi_modal_projector"])
    expected = step(whole, llava_batch(4))
    same(step(second, llava_batch(4)), expected)
    assert second.program.features is not None
    assert second.program.features.values == ("model.multi_modal_projector",)
    with pytest.raises(csc.InputError, match=r"no features of .* can be kept: 'model.vision_tower.* trains"):
        first.with_options(freeze=["language_model"]).train_step(llava_batch(4))


def test_a_full_directory_keeps_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = step(compiled_for("pp=2", None), llava_batch(4))
    one = compiled_for("pp=2", tmp_path / "first")
    step(one, llava_batch(4))
    size = max(file.stat().st_size for file in files(tmp_path / "first"))
    caplog.set_level(logging.WARNING)
    small = compiled_for("pp=2", csc.FeatureCache(tmp_path / "small", limit=int(2.5 * size)))
    for _ in range(2):
        same(step(small, llava_batch(4)), expected)
    assert len(files(tmp_path / "small")) == 2
    assert sum("is full" in record.message for record in caplog.records) == 1


@pytest.mark.long
def test_microbatches_without_images_have_no_features(tmp_path: Path) -> None:
    def made(folder: Path | None) -> csc.CompiledModel:
        return csc.compile(
            captions.Captions(), mesh="pp=2", example=[captions.batch([[1, 2], []], [1, 0])] * 2, microbatches=2,
            schedule="1f1b", freeze=["vision", "audio"], cache_features=folder,
        )  # fmt: skip

    kept, whole = made(tmp_path), made(None)
    for batch in (
        [captions.batch([[1], [2]]), captions.batch([[], []], [2, 0])],
        [captions.batch([[], []]), captions.batch([[1, 1], []], [0, 1])],
        [captions.batch([[], []])] * 2,
    ):
        expected = step(whole, batch)
        for _ in range(2):
            same(step(kept, batch), expected)
        assert counts(kept)[0] == 0


class Centred(nn.Module):
    """What images are beside their mean."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(0)


class Blend(nn.Module):
    """An encoder in which the images of a batch meet."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), Centred(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)
        self.before = nn.Linear(6, 6)
        self.first = False

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        given = self.before(images).detach() if self.first else images
        hidden = self.encoder(given)
        return nn.functional.cross_entropy(self.head(hidden), labels)


def images(samples: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(3)
    return {"images": torch.randn(samples, 6, generator=generator), "labels": torch.arange(samples) % 4}


def test_images_that_meet_are_kept_together(tmp_path: Path) -> None:
    batch = images()
    kept = csc.compile(Blend(), example=batch, freeze=["encoder", "before"], cache_features=tmp_path)
    whole = csc.compile(Blend(), example=batch, freeze=["encoder", "before"])
    same(step(kept, batch), step(whole, batch))
    for one, found in ((batch, (0, 1)), (reversed_samples(batch), (1, 0)), (reversed_samples(batch), (0, 1))):
        same(step(kept, one), step(whole, one))
        assert counts(kept) == found


class Bytes(nn.Module):
    """Pictures of bytes, which forward makes numbers of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Tanh(), nn.Flatten(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.encoder(pixel_values / 255)), labels)


def test_pictures_of_bytes(tmp_path: Path) -> None:
    """Each is a unit, as those of floating point are."""
    pixels = (torch.arange(4 * 3 * 64) * 37 % 256).view(4, 3, 8, 8).to(torch.uint8)
    batch = {"pixel_values": pixels, "labels": torch.arange(4)}
    kept = csc.compile(Bytes(), example=batch, freeze=["encoder"], cache_features=tmp_path)
    whole = csc.compile(Bytes(), example=batch, freeze=["encoder"])
    same(step(kept, batch), step(whole, batch))
    assert counts(kept)[0] == 4
    other = reversed_samples(batch)
    close(step(kept, other), step(whole, other))
    assert counts(kept) == (0, 4)


def first() -> nn.Module:
    model = Blend()
    model.first = True
    return model


@pytest.mark.parametrize(
    ("model", "batch", "freeze", "said"),
    [
        (lambda: Blend(), images, ["before"], "'encoder.0.weight' trains"),
        (lambda: Blend(0.1), images, ["encoder", "before"], "random numbers"),
        (first, images, ["encoder"], "'before.weight' trains"),
        (lambda: text(2), text_batch, ["embed_tokens"], "no entry of floating point"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    model: Callable[[], nn.Module], batch: Callable[[], Batch], freeze: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(csc.InputError, match=said):
        csc.compile(model(), example=batch(), freeze=freeze, cache_features=tmp_path).train_step(batch())


def test_an_encoder_that_is_spread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(csc.InputError, match=r"vision_tower.* is spread over ranks"):
        compiled_for("tp=2", tmp_path)


def test_dropout_in_eval_mode_is_no_obstacle(tmp_path: Path) -> None:
    def made(folder: Path | None) -> csc.CompiledModel:
        model = Blend(0.5)
        model.encoder.eval()
        return csc.compile(model, example=images(), freeze=["encoder", "before"], cache_features=folder)

    try:
        expected = step(made(None), images())
    except csc.InputError as error:
        pytest.skip(f"csc refuses it without kept features, too: {error}")
    same(step(made(tmp_path), images()), expected)


def test_what_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(csc.InputError, match="features cannot be kept there"):
        compiled_for("pp=1", tmp_path / "file").train_step(llava_batch(4))
    with pytest.raises(csc.InputError, match=r"without cache_features"):
        compiled_for("pp=1", tmp_path / "kept").write(tmp_path / "program")
    with pytest.raises(csc.InputError, match="meta device"):
        model = llava().to("meta")
        csc.compile(model, example=llava_batch(4), freeze=["vision_tower"], cache_features=tmp_path).trainer()
    with pytest.raises(csc.InputError, match="limit"):
        FeatureCache(tmp_path, limit="much")


def test_features_may_be_one_tensor_and_a_part_of_it(tmp_path: Path) -> None:
    kept, whole = FeatureCache(tmp_path), torch.randn(3, 4)
    given = {"first": whole, "again": whole, "part": whole[1:]}
    assert kept.write("key", given)
    found = kept.read("key")
    assert found is not None and found.keys() == given.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())


def test_evaluation_runs_the_encoder(tmp_path: Path) -> None:
    kept, whole = compiled_for("pp=1", tmp_path), compiled_for("pp=1", None)
    assert float(kept.eval_step(llava_batch(4))) == float(whole.eval_step(llava_batch(4)))
    spread = compiled_for("pp=2", tmp_path)
    spread.train_step(llava_batch(4))
    with pytest.raises(csc.InputError, match="with cache_features no rank has"):
        spread.eval_step(llava_batch(4))
