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
from csc.runtime.consistency import Sample, read
from csc.runtime.loaded_program import load
from csc.runtime.specs import ParameterSpec
from csc.runtime.trainer import Trainer
from csc.runtime.weights import random_weights


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
    names = {"model-00001-of-00003-00000000.safetensors", "model-00002-of-00003-00000000.safetensors", weights.INDEX}
    assert {f.name for f in (tmp_path / "out").iterdir()} == names
    assert set(load_file(tmp_path / "out/model-00001-of-00003-00000000.safetensors")) == {"embed", "w0"}
    table = json.loads((tmp_path / "out" / weights.INDEX).read_text())
    assert table["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    found = weights.read(tmp_path / "out", manifest.parameters)
    assert all(torch.equal(found[n], t) for n, t in tensors.items())


@pytest.mark.parametrize("sharded", [False, True])
def test_what_the_program_does_not_use_is_saved_too(sharded: bool, tmp_path: Path) -> None:
    manifest = load(handmade.write(tmp_path / "p")).manifest
    tensors, others = handmade.weights(), {"pooler.weight": torch.arange(6.0)}
    form = weights.WeightLayout(weights.own_groups, dict, others)
    for stage in range(3) if sharded else [None]:
        weights.write(tmp_path / "out", manifest, stage, tensors, form)
    if sharded:
        weights.write_index(tmp_path / "out", manifest, form)
        assert "pooler.weight" in load_file(tmp_path / "out/model-00001-of-00003-00000000.safetensors")
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


@pytest.mark.parametrize("portion", [1, 100, 2**20])
def test_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    """However little is read at a time, whole tensors come: of any shape and dtype, in memory of their own."""
    monkeypatch.setattr(weights, "PORTION", portion)
    tensors = {
        "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "no columns": torch.zeros(4, 0),
        "half": torch.arange(15.0).bfloat16(), "matrix": torch.randn(7, 5), "cube": torch.randn(3, 4, 5).double(),
        "one row": torch.arange(40).view(1, 40), "flags": torch.tensor([True, False, True]),
    }  # fmt: skip
    save_file(tensors, tmp_path / "w.safetensors")
    specs = [ParameterSpec(n, tuple(t.shape), t.dtype, False, (), ()) for n, t in tensors.items()]
    found = weights.read(tmp_path / "w.safetensors", specs)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    for name, tensor in weights.each(tmp_path / "w.safetensors", specs, into=into):
        assert tensor is into[name]
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())
    (tmp_path / "w.safetensors").write_bytes(b"")  # what was read does not live in the file
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_nothing_is_read_before_all_is_checked(tmp_path: Path) -> None:
    """The last parameter does not fit: the first ones keep their values."""
    trainer = Trainer(load(handmade.write(tmp_path / "p")))
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    changed = {name: tensor + 1 for name, tensor in before.items()}
    changed[list(before)[-1]] = torch.zeros(1)
    save_file(changed, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match="has shape"):
        trainer.load(tmp_path / "w.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_dict().items())


def test_an_index_that_is_wrong(tmp_path: Path) -> None:
    program = load(handmade.write(tmp_path / "p"))
    (tmp_path / "w").mkdir()
    save_file({"w0": torch.zeros(6, 6)}, tmp_path / "w/shard.safetensors")
    table = {"weight_map": dict.fromkeys(handmade.weights(), "shard.safetensors")}
    (tmp_path / "w" / weights.INDEX).write_text(json.dumps(table))
    with pytest.raises(InputError, match="'embed' is not in it, though the index says so"):
        Trainer(program, tmp_path / "w")


def test_a_dtype_that_parameters_do_not_have(tmp_path: Path) -> None:
    program = load(handmade.write(tmp_path / "p"))
    save_file(handmade.weights() | {"w1": torch.zeros(6, 6).to(torch.float8_e5m2)}, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"parameter .w1. is torch\.float8_e5m2 there, torch\.float32"):
        Trainer(program, tmp_path / "w.safetensors")


def test_parameters_on_the_meta_device(tmp_path: Path) -> None:
    """They are made without values, train once they are loaded, and nothing comes of them before."""
    program = load(handmade.write(tmp_path / "p"))
    given = {name: torch.nn.Parameter(tensor.to("meta")) for name, tensor in handmade.weights().items()}
    trainer = Trainer(program, given)
    assert {p.device.type for p in trainer.parameters()} == {"cpu"}
    said = r"4 parameters of Handmade have no values yet, 'b1' for one: .* Load weights with compiled\.load"
    for use in (
        lambda: trainer.train_step(handmade.batch(4)),
        lambda: trainer.save(tmp_path / "out"),
        lambda: trainer.collect(handmade.weights()),
    ):
        with pytest.raises(InputError, match=said):
            use()
    trainer.load(tmp_path / "p/weights.safetensors")
    other = Trainer(program)
    assert torch.equal(trainer.train_step(handmade.batch(4)), other.train_step(handmade.batch(4)))
    expected = dict(other.named_parameters())
    assert all(torch.equal(p.grad, expected[name].grad) for name, p in trainer.named_parameters())
    assert [name for name, _ in trainer.named_parameters()] == list(expected)
    with pytest.raises(InputError, match="parameter 'embed' of the model is on the meta device"):
        trainer.collect(given)


def test_meta_parameters_of_another_model(tmp_path: Path) -> None:
    given = {name: tensor.to("meta") for name, tensor in handmade.weights().items()} | {"w1": torch.zeros(5, 6)}
    with pytest.raises(InputError, match=r"parameter 'w1' has shape \[5, 6\]"):
        Trainer(load(handmade.write(tmp_path / "p")), given)


def test_no_weights(tmp_path: Path) -> None:
    program = load(handmade.write(tmp_path / "p", with_weights=False))
    (tmp_path / "bad.safetensors").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "index").mkdir()
    (tmp_path / "pickles").mkdir()
    torch.save({}, tmp_path / "pickles" / "pytorch_model.bin")
    torch.save({}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "index" / weights.INDEX).write_text('{"weight_map": {"embedd": "x"}}')
    for given, part in (
        (None, "weights.safetensors: there is no such file"),
        (tmp_path / "bad.safetensors", "it is not safetensors"),
        (tmp_path / "empty", "it has neither model.safetensors.index.json nor"),
        (tmp_path / "pickles", r"pytorch_model.bin is a pickle, and csc loads none.*save_file\(torch.load"),
        (tmp_path / "pickles" / "pytorch_model.bin", "it holds a pickle, as torch.save writes it.*save_file"),
        (tmp_path / "old.pt", "it holds a pickle"),
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


@pytest.mark.parametrize("dtype", weights.DTYPES)
def test_every_dtype_that_is_saved_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"w": torch.arange(6.0).view(2, 3).to(dtype)}
    save_file(tensors, tmp_path / "w.safetensors")
    with weights.Files({"w": tmp_path / "w.safetensors"}) as files:
        found = files.tensor("w", "cpu")
    assert found.dtype == dtype and torch.equal(found.view(torch.uint8), tensors["w"].view(torch.uint8))


@pytest.mark.parametrize("shape", [(64, 64), (96, 128), (128, 40), (128,), (6, 5, 4, 3), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_writes_that_no_version_counts_are_seen(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of every row and column, whatever the sizes' common periods; of the same values in other memory nothing."""
    tensor = torch.randn(shape).to(dtype)
    sample = Sample(tensor)
    before, values = read([sample]), tensor.clone()
    for dim, size in enumerate(shape):
        for place in range(size):
            tensor.data.select(dim, place).copy_(torch.full((), 7.0).to(dtype))
            assert read([sample]) != before, f"place {place} of dimension {dim}"
            tensor.data.copy_(values)
    tensor.data = values.clone()
    assert read([sample]) == before
    tensor.data = torch.zeros(shape).to(dtype)
    assert read([sample]) != before
