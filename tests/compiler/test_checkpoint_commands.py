"""`csc checkpoint`: what it lists, shows and checks; to and from Hugging Face's and torch's own directories."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from typer.testing import CliRunner

import csc
from csc.checkpoints import dcp as torch_directories
from csc.checkpoints import files
from csc.commands.main import app
from csc.driver import checkpoint
from csc.errors import InputError
from tests.compiler import small
from tests.models import hf

pytestmark = pytest.mark.usefixtures("traces")


def said(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert result.exit_code == code, result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def told(*arguments: object, code: int = 0) -> Any:
    return json.loads(said(*arguments, "--json", code=code))


class Trained:
    """A model, trained for two steps, and its checkpoints."""

    def __init__(self, model: nn.Module, batch: Any, run: Path, **options: Any) -> None:
        self.compiled = csc.compile(model, mesh="pp=2", example=batch, check=False, **options)
        self.batch = batch
        named = list(self.compiled.named_parameters())
        self.optimizer = self.compiled.optimizer(
            torch.optim.AdamW,
            [{"params": [p for _, p in named if p.dim() > 1]},
             {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0}],
            lr=1e-2, betas=(0.8, 0.99),
        )  # fmt: skip
        self.checkpoints = csc.CheckpointManager(run, self.compiled, optimizer=self.optimizer)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            losses.append(float(self.compiled.train_step(self.batch)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses


def text(run: Path, **options: Any) -> Trained:
    return Trained(small.text(2), small.text_batch(2), run, **options)


def damaged_indices(table: dict[str, Any]) -> Iterator[str]:
    """Each with a value less, or another in its place, and the digest of that."""
    yield from ("null", "[]", "{}", '{"format": 2}', '{"format": 1}', "[" * 10**5)
    draw = random.Random(3)
    for _ in range(20):
        content = json.loads(json.dumps(table["content"]))
        at = content
        for _ in range(draw.randrange(4)):
            below = at.values() if isinstance(at, dict) else at
            deeper = [one for one in below if isinstance(one, (dict, list)) and one]
            at = draw.choice(deeper) if deeper else at
        if isinstance(at, dict):
            del at[draw.choice(list(at))]
        else:
            at[0] = None
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        yield json.dumps({"format": 1, "sha256": digest, "content": content})


def test_list_show_and_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    trained = text(run, freeze=["embed_tokens"])
    for step in (1, 2, 3):
        trained.steps(1)
        trained.checkpoints.save(step)
    (run / "step-00000003" / files.FILE).unlink()
    listed = told("list", run)
    assert [one["step"] for one in listed["checkpoints"]] == [1, 2] and listed["cut_off"] == ["step-00000003"]
    assert listed["checkpoints"][0]["has"] == ["weights", "optimizer", "random", "extra"]
    assert "cut off step-00000003: it has no index" in said("list", run)
    shown = told("show", run, "--tensors")
    assert (shown["step"], shown["mesh"], shown["optimizer"], len(shown["groups"])) == (2, "pp=2", "AdamW", 2)
    count = sum(p.numel() for p in trained.compiled.parameters())
    of = {row["what"]: row for row in shown["what"]}
    assert of["trained"]["entries"] == of["optimizer: exp_avg"]["entries"] == count
    assert of["frozen, buffers"]["bytes"] == trained.compiled.model.embed_tokens.weight.nbytes
    assert {"name": "norm.weight (exp_avg)", "shape": [16], "dtype": "float32", "trained": True, "parts": 1} in (
        shown["tensors"]
    )
    assert "step 2 of TextModel" in said("show", run)
    assert told("verify", run)["ok"] and "whole" in said("verify", run, "--step", 1)
    folder = run / "step-00000002"
    stored = files.read(folder).parameters["norm.weight"].parts[0]
    content = bytearray((folder / stored.file).read_bytes())
    content[stored.offset] ^= 1
    (folder / stored.file).write_bytes(content)
    [damaged] = told("verify", run, code=1)["damaged"]
    assert damaged == {
        "file": str(folder / stored.file),
        "what": "'norm.weight': its bytes are not those that were saved",
    }
    (folder / stored.file).write_bytes(content[: stored.offset])
    assert "'norm.weight': it cannot be read: the file ends before it" in said("verify", run, code=1)
    (folder / files.FILE).write_text((folder / files.FILE).read_text().replace("TextModel", "OtherModel"))
    assert list(told("list", run)["damaged"]) == ["step-00000002"]
    with pytest.raises(InputError, match=r"checkpoint\.json: it is not what was saved there: its bytes have changed"):
        trained.checkpoints.load()
    refused = 0
    for made in damaged_indices(json.loads((run / "step-00000001" / files.FILE).read_text())):
        (folder / files.FILE).write_text(made)
        try:  # what nobody reads may well be missing
            trained.checkpoints.load()
        except InputError as error:
            refused += str(folder) in str(error)
    assert refused > 20
    assert said("list", tmp_path).startswith("no checkpoint of csc in ")
    for wrong in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError):
            said("show", wrong, code=1)


def test_torchs_own_directories(tmp_path: Path) -> None:
    """`dcp.load` of what was converted, into a plain model and optimizer; and back."""
    trained = text(tmp_path / "run")
    trained.steps(2)
    trained.checkpoints.save(2)
    said("convert", tmp_path / "run", tmp_path / "dcp", "--to", "dcp")
    plain = small.text(2)
    named = dict(plain.named_parameters())
    groups = [{"params": [p for p in named.values() if p.dim() > 1]},
              {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    made = torch.optim.AdamW(groups, lr=1e-3)
    model, state = get_state_dict(plain, made)
    everything = {"model": model, "optim": state}
    dcp.load(everything, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(plain, made, model_state_dict=everything["model"], optim_state_dict=everything["optim"])
    assert made.param_groups[0]["lr"] == 1e-2 and tuple(made.param_groups[1]["betas"]) == (0.8, 0.99)
    for name, parameter in trained.compiled.model.named_parameters():
        assert torch.equal(named[name], parameter), name
        for key, value in trained.optimizer.state[parameter].items():
            assert torch.equal(made.state[named[name]][key], value), (name, key)
    dcp.save(
        {"model": model, "optim": get_state_dict(plain, made)[1], "more": {"x": 1}}, checkpoint_id=tmp_path / "saved"
    )
    converted = told("convert", tmp_path / "saved", tmp_path / "back", "--step", 2)
    assert converted["left_out"] == ["more.x"]
    again = text(tmp_path / "back")
    assert again.checkpoints.load(only=["weights", "optimizer"]).step == 2  # type: ignore[union-attr]
    assert again.steps(2) == trained.steps(2)
    with pytest.raises(InputError, match="something is there already"):
        said("convert", tmp_path / "run", tmp_path / "dcp", "--to", "dcp", code=1)
    with pytest.raises(InputError, match="it is csc, and --to is csc"):
        said("convert", tmp_path / "run", tmp_path / "x", "--to", "csc", code=1)


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("strange", [Runs(), {"a": 1}, print, [torch.nn.Linear(1, 1)], torch.utils])
def test_a_pickle_that_is_no_metadata(strange: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if strange is torch.utils:  # a name with a dot, as protocol 4 has them
        content = b"\x80\x04\x8c\x05torch\x8c\x10hub.os.system\xff\x93.".replace(
            b"\x10hub.os.system\xff", b"\rhub.os.system"
        )
    else:
        content = pickle.dumps(strange)
    (tmp_path / torch_directories.METADATA).write_bytes(content)
    with pytest.raises(InputError, match=r"names .*, which no metadata of a checkpoint has|it is no metadata"):
        torch_directories.read(tmp_path)
    assert not (tmp_path / "ran").exists()
    for cut in range(0, len(content) - 1, 7):
        (tmp_path / torch_directories.METADATA).write_bytes(content[:cut])
        with pytest.raises(InputError):
            torch_directories.read(tmp_path)


def test_chunks_of_several_ranks(tmp_path: Path) -> None:
    """As FSDP writes them: a tensor in two files; one of them cut short."""
    whole = torch.arange(12.0).view(4, 3)
    dcp.save({"model": {"w": whole, "v": whole[:1]}}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    about = metadata.state_dict_metadata["model.w"]
    del metadata.storage_data[dcp.metadata.MetadataIndex("model.w", (0, 0))]
    kind = type(next(iter(metadata.storage_data.values())))
    about.chunks = []
    for start in (0, 1):
        file, rows = f"__{start}_0.distcp2", slice(3 * start, 3 if not start else 4)
        torch.save(whole[rows].clone(), tmp_path / file)
        size = (tmp_path / file).stat().st_size
        metadata.storage_data[dcp.metadata.MetadataIndex("model.w", (3 * start, 0))] = kind(file, 0, size)
        about.chunks.append(dcp.metadata.ChunkStorageMetadata(torch.Size((3 * start, 0)), whole[rows].shape))
    metadata.planner_data = None
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert torch.equal(torch_directories.read(tmp_path).parameters["w"].load(), whole)
    (tmp_path / "__1_0.distcp2").write_bytes(b"PK")
    with pytest.raises(InputError, match=r"__1_0\.distcp2: 'model\.w' cannot be read"):
        torch_directories.read(tmp_path).parameters["w"].load()


@pytest.mark.slow
def test_hugging_faces_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and shapes as transformers has them in files, in several; what from_pretrained reads; and back."""
    batch = hf.llava_batch(2)
    trained = Trained(hf.llava(), batch, tmp_path / "run", freeze=["vision_tower"])
    trained.steps(1)
    trained.checkpoints.save(1)
    monkeypatch.setattr(checkpoint, "SHARD", 20_000)
    said("convert", tmp_path / "run", tmp_path / "hf")
    model = trained.compiled.model
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    found = type(model).from_pretrained(tmp_path / "hf")
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    model.save_pretrained(tmp_path / "theirs")
    said("convert", tmp_path / "theirs", tmp_path / "back", "--step", 4)
    again = Trained(hf.llava(), batch, tmp_path / "back", freeze=["vision_tower"])
    assert again.checkpoints.load(only=["weights"]).step == 4  # type: ignore[union-attr]
    for name, parameter in again.compiled.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
