"""Saves that are cut off, cannot be written, or are changed afterwards: what is read is one save, whole, or nothing."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import handmade
import pytest
import torch
from safetensors.torch import load_file, save_file

from csc.errors import InputError
from csc.runtime import weights
from csc.runtime.loaded_program import load
from csc.runtime.specs import Manifest
from csc.runtime.trainer import Trainer

Tensors = dict[str, torch.Tensor]
Steps = list[Callable[[], None]]
OLD = handmade.weights()
NEW = {name: tensor + 1 for name, tensor in OLD.items()}


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return load(handmade.write(tmp_path / "p")).manifest


def sharded(directory: Path, manifest: Manifest, tensors: Tensors, save: str) -> Steps:
    """A save by three ranks, one call after the other."""
    shards: Steps = [
        lambda rank=rank: weights.write(directory, manifest, rank, tensors, save=save)  # type: ignore[misc]
        for rank in range(3)
    ]
    return [*shards, lambda: weights.write_index(directory, manifest, save=save)]


def single(directory: Path, manifest: Manifest, tensors: Tensors, save: str) -> Steps:
    return [lambda: weights.write(directory, manifest, None, tensors)]


def found(directory: Path, manifest: Manifest) -> Tensors:
    return weights.read(directory, manifest.parameters)


def as_hugging_face_reads(directory: Path) -> Tensors:
    if (directory / "model.safetensors").is_file():
        return load_file(directory / "model.safetensors")
    files = set(json.loads((directory / weights.INDEX).read_text())["weight_map"].values())
    return {name: tensor for file in files for name, tensor in load_file(directory / file).items()}


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("before", [sharded, single])
@pytest.mark.parametrize("after", [sharded, single])
def test_a_save_that_is_cut_off_leaves_the_one_before(
    before: Callable[..., Steps], after: Callable[..., Steps], tmp_path: Path, manifest: Manifest
) -> None:
    out = tmp_path / "out"
    for call in before(out, manifest, OLD, "0000000a"):
        call()
    *first, last = after(out, manifest, NEW, "0000000b")
    for call in first:
        assert equal(found(out, manifest), OLD) and equal(as_hugging_face_reads(out), OLD)
        call()
    assert equal(found(out, manifest), OLD) and equal(as_hugging_face_reads(out), OLD)
    (out / ".model-00001-of-00003-0000000c.safetensors.77.tmp").write_text("of a process that was killed")
    last()
    assert equal(found(out, manifest), NEW) and equal(as_hugging_face_reads(out), NEW)
    assert len(list(out.iterdir())) == (1 if after is single else 3), "nothing is left of other saves"


def test_a_byte_that_has_changed_is_found(tmp_path: Path, manifest: Manifest) -> None:
    weights.write(tmp_path, manifest, None, OLD)
    file = tmp_path / "model.safetensors"
    whole, damaged = file.read_bytes(), 0
    for place in range(0, len(whole), 3):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        file.write_bytes(changed)
        try:
            assert equal(found(tmp_path, manifest), OLD), place
        except InputError:
            damaged += 1
    assert damaged > sum(tensor.nbytes for tensor in OLD.values()) // 3
    file.write_bytes(whole[:-1])
    with pytest.raises(InputError, match="it is not safetensors"):
        found(tmp_path, manifest)


def test_what_another_program_wrote_has_no_digests(tmp_path: Path, manifest: Manifest) -> None:
    save_file(OLD, tmp_path / "model.safetensors")
    assert equal(found(tmp_path, manifest), OLD)


def test_a_load_that_fails_halfway_leaves_nothing_to_train(tmp_path: Path) -> None:
    trainer = Trainer(load(handmade.write(tmp_path / "p")))
    trainer.save(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(InputError, match="'w1' is not what was saved there: its bytes have changed"):
        trainer.load(tmp_path)
    with pytest.raises(InputError, match=r"have no values yet, .* or a load failed halfway"):
        trainer.train_step(handmade.batch(4))
    trainer.load(tmp_path / "p/weights.safetensors")
    trainer.train_step(handmade.batch(4))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_save_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, manifest: Manifest) -> None:
    out = tmp_path / "out"
    for call in sharded(out, manifest, OLD, "0000000a"):
        call()
    before = sorted(out.iterdir())
    said = r"it cannot be written .*what was saved there before is as it was"
    with pytest.raises(InputError, match=said), files_of_at_most(100):
        weights.write(out, manifest, 0, NEW, save="0000000b")
    assert sorted(out.iterdir()) == before and equal(found(out, manifest), OLD)
    with pytest.raises(InputError, match="a file is where a directory is to be made"):
        weights.write(out / before[0].name, manifest, None, NEW)
    assert equal(found(out, manifest), OLD)


def test_an_index_that_cannot_be_written(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / weights.INDEX).mkdir()
    with pytest.raises(InputError, match=r"index\.json: it cannot be written"):
        for call in sharded(tmp_path, manifest, NEW, "0000000b"):
            call()
    assert sorted(one.name for one in tmp_path.iterdir()) == [weights.INDEX, "p"]


def test_names_that_lead_out_of_a_directory(tmp_path: Path, manifest: Manifest) -> None:
    """A file's own link may: that is how the cache of Hugging Face keeps its files."""
    inside, outside = tmp_path / "snapshot", tmp_path / "blobs"
    inside.mkdir()
    outside.mkdir()
    save_file(OLD, outside / "1234")
    (inside / "model-1.safetensors").symlink_to("../blobs/1234")
    (inside / "folder").symlink_to(outside)

    def listed(name: object) -> None:
        (inside / weights.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(OLD, name)}))

    listed("model-1.safetensors")
    assert equal(found(inside, manifest), OLD)
    for name in ("../blobs/1234", str(outside / "1234"), "folder/1234", "", "x\0y", 7, ["model-1.safetensors"]):
        listed(name)
        with pytest.raises(InputError, match=r"within it|leads out of it|no weight_map"):
            found(inside, manifest)
    os.mkfifo(inside / "pipe")
    listed("pipe")
    with pytest.raises(InputError, match="it is not a file"):
        found(inside, manifest)
