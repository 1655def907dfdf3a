"""Every axis of the mesh x everything that ranks do together, with all ranks in this process.

The ranks of the cp and the tp axis of the handmade program all compute all of it. So a program's loss and gradients
are eager's if what is parts is added up, and divided among them, on each axis, and what is equal is counted once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import handmade
import pytest
import torch
from safetensors.torch import load_file

from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.runtime.consistency import Shared
from csc.runtime.loaded_program import load
from csc.runtime.trainer import Trainer

MESHES = [{"dp": 2}, {"pp": 3}, {"cp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"cp": 2, "tp": 3}, {"pp": 2, "cp": 2}]
MESHES += [{"dp": 2, "pp": 2, "cp": 2, "tp": 2}]
PLACEMENTS = {1: (0, 0, 0), 2: (0, 0, 1), 3: (0, 1, 2)}  # with two positions and three, `embed` is tied
named = pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: str(Mesh(**sizes)))


def written(directory: Path, sizes: dict[str, int], **more: Any) -> Path:
    sizes = {**sizes}
    return handmade.write(directory, placement=PLACEMENTS[sizes.pop("pp", 1)], microbatches=2, **sizes, **more)


# with "sum" each rank of a cp axis would have all labels, and none only some
@pytest.mark.parametrize(
    ("sizes", "weight"),
    [(one, "tokens") for one in MESHES] + [(one, "sum") for one in MESHES if "cp" not in one],
    ids=lambda given: given if isinstance(given, str) else str(Mesh(**given)),
)
def test_loss_gradients_and_norm_are_those_of_one_process(tmp_path: Path, sizes: dict[str, int], weight: str) -> None:
    trainer = Trainer(load(written(tmp_path / "p", sizes, weight=weight)))
    batch = handmade.batch(2 * sizes.get("dp", 1))
    loss, expected = handmade.eager(handmade.weights(), batch, "mean" if weight == "tokens" else "sum")
    torch.testing.assert_close(trainer.train_step(batch), loss)
    found = {name: p.grad for name, p in trainer.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], msg=lambda said, name=name: f"{name}: {said}")
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    torch.testing.assert_close(trainer.clip_grad_norm_(0.1), norm)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name] * 0.1 / norm, msg=lambda said, name=name: f"{name}: {said}")


@named
def test_samples_are_counted_once(tmp_path: Path, sizes: dict[str, int]) -> None:
    """A mean over samples, which the ranks of a cp axis share: their losses would be parts of each sample's."""
    directory = written(tmp_path / "p", sizes, weight="mean")
    table = json.loads((directory / "program.json").read_text())
    table["loss"]["rows"] = "ids"
    (directory / "program.json").write_text(json.dumps(handmade.sealed(table)))
    batch = {name: value.abs() for name, value in handmade.batch(2 * sizes.get("dp", 1)).items()}
    batch["labels"] %= handmade.VOCABULARY  # as many labels in every sample
    loss, expected = handmade.eager(handmade.weights(), batch)
    trainer = Trainer(load(directory))
    parts = sizes.get("cp", 1)
    torch.testing.assert_close(trainer.train_step(batch), loss * parts)
    for name, parameter in trainer.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name] * parts)


@named
def test_each_parameter_is_saved_once_and_loaded_by_all(tmp_path: Path, sizes: dict[str, int]) -> None:
    trainer = Trainer(load(written(tmp_path / "p", sizes)))
    trainer.save(tmp_path / "out")
    (file,) = tmp_path.glob("out/*")
    assert load_file(file).keys() == handmade.SHAPES.keys()
    with torch.no_grad():
        for value in trainer.state_dict().values():
            value.zero_()
    trainer.load(tmp_path / "out")
    for name, value in handmade.weights().items():
        assert torch.equal(trainer.state_dict()[name], value)


@named
def test_who_holds_writes_and_speaks_for_a_parameter(sizes: dict[str, int]) -> None:
    """Over a mesh of these sizes: of the holders of a parameter one speaks, at its owner's position."""
    mesh = Mesh(**sizes)
    at = [mesh.coordinates(rank) for rank in range(mesh.size)]
    for held in [(p,) for p in range(mesh.pp)] + [(mesh.pp - 1, 0)] * (mesh.pp > 1):
        (holders,) = mesh.groups(Shared("parameter", "w", held).equal, held)
        assert sorted(holders) == [rank for rank, its in enumerate(at) if its.pp in held]
        assert at[holders[0]] == (0, held[0], 0, 0)
        assert {mesh.group(Group.POSITION, rank, held)[0] for rank in range(mesh.size)} == {holders[0]}


@pytest.mark.parametrize("group", ["position", "data"])
def test_a_gradient_that_is_parts_over_tp_is_added_up_over_it(tmp_path: Path, group: str) -> None:
    """Each rank of the tp axis gives a part of w1's gradient, as of a norm's that is read by shards of tokens."""
    directory = written(tmp_path / "p", {"dp": 2, "tp": 2})
    table = json.loads((directory / "program.json").read_text())
    row = next(row for row in table["parameters"] if row["name"] == "w1")
    row["gradient"] = {"parts": "position"} if group == "position" else {"parts": "data", "equal": "tensor"}
    (directory / "program.json").write_text(json.dumps(handmade.sealed(table)))
    for rank in range(4):
        with (directory / f"rank_{rank}.py").open("a") as file:
            file.write(PART.replace("SHARE", "0.75" if rank % 2 else "0.25"))
    batch = handmade.batch(4)
    _, expected = handmade.eager(handmade.weights(), batch)
    trainer = Trainer(load(directory))
    trainer.train_step(batch)
    for name, parameter in trainer.named_parameters():
        whole = 0.25 if name == "w1" and group == "data" else 1.0  # what rank 0 alone has
        torch.testing.assert_close(parameter.grad, expected[name] * whole)


PART = """
def scaled(given):
    def weights(*arguments):
        for name, gradient in given(*arguments):
            yield name, gradient * SHARE if name == "w1" else gradient
    return weights


backward_weight_1 = scaled(backward_weight_1)
"""
