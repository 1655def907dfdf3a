"""Composed models on disk: bit for bit there and back, and the same files for the compiled model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import csc
from csc.composition import ComposedModel
from csc.errors import InputError
from tests.models.composed import ENCODERS, LANGUAGE_MODELS, Resampler, batch, composed, valm


def same(model: ComposedModel, other: ComposedModel) -> None:
    """Names, dtypes, values of the state, what trains, and the result."""
    state, there = model.state_dict(), other.state_dict()
    assert list(state) == list(there)
    for name in state:
        assert state[name].dtype == there[name].dtype and torch.equal(state[name], there[name]), name
    flags = [(name, p.requires_grad) for name, p in model.named_parameters()]
    assert flags == [(name, p.requires_grad) for name, p in other.named_parameters()]
    assert model.modalities == other.modalities
    given = batch(model)
    assert torch.equal(model.eval()(**given).logits, other.eval()(**given).logits)


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_every_language_model_there_and_back(kind: str, tmp_path: Path) -> None:
    model = composed({"vision": "clip"}, {"vision": "linear"}, kind)
    model.save_pretrained(tmp_path)
    same(model, ComposedModel.from_pretrained(tmp_path))


@pytest.mark.parametrize("kind", ENCODERS)
def test_every_encoder_there_and_back(kind: str, tmp_path: Path) -> None:
    model = composed({"vision": kind}, {"vision": "mlp"}, feature_layer=-2, keep_prefix=True)
    model.save_pretrained(tmp_path)
    same(model, ComposedModel.from_pretrained(tmp_path))


def test_the_directory_says_what_it_holds(tmp_path: Path) -> None:
    valm().save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    table = json.loads((tmp_path / "config.json").read_text())
    assert table["language_model"]["config"]["model_type"] == "llama"
    assert table["modalities"]["vision"]["encoder"]["config"]["model_type"] == "clip_vision_model"
    assert table["modalities"]["vision"]["projector"] == {"kind": "pixel-shuffle-mlp", "factor": 2}
    assert table["modalities"]["audio"]["placeholder"] == 98


def test_bfloat16_and_a_tied_head(tmp_path: Path) -> None:
    model = csc.compose(
        encoders={"vision": ENCODERS["vit"]()},
        projectors={"vision": "mlp"},
        language_model=LANGUAGE_MODELS["gemma"](),  # its head is its embedding
        placeholders={"vision": 99},
    ).bfloat16()
    model.save_pretrained(tmp_path)
    assert "language_model.lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again = ComposedModel.from_pretrained(tmp_path)
    assert again.language_model.lm_head.weight is again.get_input_embeddings().weight
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    for (name, parameter), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(parameter, other), name


def test_one_encoder_for_two_modalities_stays_one(tmp_path: Path) -> None:
    clip = ENCODERS["clip"]()
    model = csc.compose(
        encoders={"vision": clip, "ocr": clip},
        projectors={"vision": "mlp", "ocr": "linear"},
        language_model=LANGUAGE_MODELS["llama"](),
        placeholders={"vision": 99, "ocr": 97},
    )
    model.save_pretrained(tmp_path)
    again = ComposedModel.from_pretrained(tmp_path)
    same(model, again)
    assert again.vision_encoder is again.ocr_encoder


def test_a_projector_of_ones_own_is_given_again(tmp_path: Path) -> None:
    model = composed({"vision": "clip"}, {"vision": Resampler()})
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="vision_projector was a module of your own, a Resampler"):
        ComposedModel.from_pretrained(tmp_path)
    same(model, ComposedModel.from_pretrained(tmp_path, {"vision_projector": Resampler()}))
    with pytest.raises(InputError, match="modules names 'audio_projector'"):
        ComposedModel.from_pretrained(tmp_path, {"vision_projector": Resampler(), "audio_projector": Resampler()})


def test_what_cannot_be_made_again_is_not_saved(tmp_path: Path) -> None:
    model = composed({"vision": "clip"}, {"vision": "linear"})

    class Changed(type(model.vision_encoder)):  # type: ignore[misc]
        pass

    model.vision_encoder.__class__ = Changed
    with pytest.raises(InputError, match="Changed cannot be made again"):
        model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_compiled_model_reads_and_writes_the_same_directory(tmp_path: Path) -> None:
    """save_pretrained, compiled.load, a step, compiled.save, from_pretrained. CLIP's last layer is in no step."""
    model, start = valm(feature_layer={"vision": -2}), valm()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    start.save_pretrained(tmp_path)
    given = batch(model)
    compiled = csc.compile(model, mesh="pp=2", example=given, freeze=["language_model"])
    compiled.load(tmp_path)
    for (name, parameter), (_, stored) in zip(model.named_parameters(), start.named_parameters(), strict=True):
        assert torch.equal(parameter, stored), name
    compiled.train_step(given)
    torch.optim.SGD(compiled.parameters(), lr=0.1).step()
    (tmp_path / "model.safetensors").unlink()
    model.save_config(tmp_path)
    compiled.save(tmp_path)
    assert not torch.equal(model.audio_projector.linear_1.weight, start.audio_projector.linear_1.weight)
    same(model, ComposedModel.from_pretrained(tmp_path))


def test_shards_are_read(tmp_path: Path) -> None:
    model = valm()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    table = {name: f"model-{1 + i % 3:05d}-of-00003.safetensors" for i, name in enumerate(state)}
    for file in set(table.values()):
        save_file({name: state[name] for name in state if table[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    same(model, ComposedModel.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path)  # over the shards: the index must not outlive them
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    model = composed({"vision": "clip"}, {"vision": "mlp"})
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    name = "vision_projector.linear_1.bias"
    for change, what in (
        ({name: None}, f"it has no {name}"),
        ({"other": torch.zeros(1)}, "it has, and the model has not, other"),
        ({name: torch.zeros(3)}, rf"{name} has shape \[3\] there, \[32\]"),
    ):
        changed = {key: tensor for key, tensor in {**state, **change}.items() if tensor is not None}
        save_file(changed, file)
        with pytest.raises(InputError, match=what):
            ComposedModel.from_pretrained(tmp_path)
    file.write_bytes(b"no safetensors")
    with pytest.raises(InputError, match="the weights cannot be read"):
        ComposedModel.from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(InputError, match="a file is missing"):
        ComposedModel.from_pretrained(tmp_path)
    for listed in ("../elsewhere.safetensors", str(tmp_path / "model.safetensors"), 7):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: listed}}))
        with pytest.raises(InputError, match="the weights cannot be read"):
            ComposedModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "text, what",
    [
        (None, "there is no such file"),
        ("{", "it is not JSON"),
        ('{"model_type": "llama"}', "it is not that of a composed model"),
        ('{"model_type": "csc_composed", "format": 1}', "it says no composed model: KeyError: 'language_model'"),
    ],
)
def test_a_configuration_that_is_none(text: str | None, what: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=what):
        ComposedModel.from_pretrained(tmp_path)
