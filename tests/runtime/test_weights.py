"""Weights on disk."""

from __future__ import annotations

import json
from pathlib import Path

import handmade
import pytest
import torch
from safetensors.torch import load_file, save_file

from csc.errors import InputError
from csc.runtime import weights
from csc.runtime.initial import random_weights
from csc.runtime.program import load
from csc.runtime.specs import ParameterSpec
from csc.runtime.trainer import Trainer


def test_one_process_saves_one_file(tmp_path: Path) -> None:
    program = load(handmade.write(tmp_path / "p"))
    trainer = Trainer(program)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.add_(1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / weights.INDEX).write_text("stale")
    trainer.save(tmp_path / "out")
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    for source in (tmp_path / "out", tmp_path / "out/model.safetensors"):
        again = Trainer(program, source)
        assert all(torch.equal(t, again.state_dict()[n]) for n, t in trainer.state_dict().items())


def test_shards_and_index(tmp_path: Path) -> None:
    manifest = load(handmade.write(tmp_path / "p")).manifest
    tensors = handmade.weights()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model.safetensors").write_text("stale")
    for stage in range(3):
        weights.write(tmp_path / "out", manifest, stage, tensors)
    weights.write_index(tmp_path / "out", manifest)
    # stage 2 holds only a tied parameter, which stage 0 owns
    names = {"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", weights.INDEX}
    assert {f.name for f in (tmp_path / "out").iterdir()} == names
    assert set(load_file(tmp_path / "out/model-00001-of-00003.safetensors")) == {"embed", "w0"}
    table = json.loads((tmp_path / "out" / weights.INDEX).read_text())
    assert table["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    found = weights.read(tmp_path / "out", manifest.parameters)
    assert all(torch.equal(found[n], t) for n, t in tensors.items())


@pytest.mark.parametrize("sharded", [False, True])
def test_what_the_program_does_not_use_is_saved_too(sharded: bool, tmp_path: Path) -> None:
    manifest = load(handmade.write(tmp_path / "p")).manifest
    tensors, others = handmade.weights(), {"pooler.weight": torch.arange(6.0)}
    form = weights.Format(weights.own_pieces, dict, others)
    for stage in range(3) if sharded else [None]:
        weights.write(tmp_path / "out", manifest, stage, tensors, form)
    if sharded:
        weights.write_index(tmp_path / "out", manifest, form)
        assert "pooler.weight" in load_file(tmp_path / "out/model-00001-of-00003.safetensors")
        size = json.loads((tmp_path / "out" / weights.INDEX).read_text())["metadata"]["total_size"]
        assert size == sum(t.nbytes for t in (*tensors.values(), *others.values()))
    specs = [ParameterSpec(name, (6,), torch.float32, False, (), ()) for name in ("pooler.weight", "absent")]
    found = weights.read(tmp_path / "out", specs, optional=True)
    assert found.keys() == others.keys() and torch.equal(found["pooler.weight"], others["pooler.weight"])
    with pytest.raises(InputError, match="parameter 'absent' is not in it"):
        weights.read(tmp_path / "out", specs)


def test_views_are_saved_alone(tmp_path: Path) -> None:
    manifest = load(handmade.write(tmp_path / "p")).manifest
    flat = torch.arange(500.0)
    tensors = {n: flat[: t.numel()].view(t.shape) for n, t in handmade.weights().items()}
    weights.write(tmp_path, manifest, None, tensors)
    assert (tmp_path / "model.safetensors").stat().st_size < 1500


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"w1": None, "w_1": torch.zeros(6, 6)}, "parameter 'w1' is not in it. Close names there: w_1"),
        ({"w1": torch.zeros(5, 6)}, r"parameter 'w1' has shape \[5, 6\] there, \[6, 6\] in the program"),
        ({"w1": torch.zeros(6, 6).double()}, "parameter 'w1' is torch.float64 there, torch.float32"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, change: dict[str, torch.Tensor | None], part: str) -> None:
    program = load(handmade.write(tmp_path / "p"))
    tensors = {n: t for n, t in {**handmade.weights(), **change}.items() if t is not None}
    save_file(tensors, tmp_path / "w.safetensors")
    for given in (tmp_path / "w.safetensors", tensors):
        with pytest.raises(InputError, match=part):
            Trainer(program, given)


def test_no_weights(tmp_path: Path) -> None:
    program = load(handmade.write(tmp_path / "p", with_weights=False))
    (tmp_path / "bad.safetensors").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / weights.INDEX).write_text('{"weight_map": {"embedd": "x"}}')
    for given, part in (
        (None, "weights.safetensors: there is no such file"),
        (tmp_path / "bad.safetensors", "it is not safetensors"),
        (tmp_path / "empty", "it has neither model.safetensors.index.json nor"),
        (tmp_path / "index", "parameter 'embed' is not in it. Close names there: embedd"),
    ):
        with pytest.raises(InputError, match=part):
            Trainer(program, given)


def test_random_weights_depend_on_seed_and_name(tmp_path: Path) -> None:
    parameters = load(handmade.write(tmp_path / "p")).manifest.parameters
    one = random_weights(parameters, 0)
    alone = random_weights(parameters[1:2], 0)
    assert torch.equal(one["w0"], alone["w0"]) and not torch.equal(one["w0"], one["w1"])
    assert not torch.equal(one["w0"], random_weights(parameters, 1)["w0"])
