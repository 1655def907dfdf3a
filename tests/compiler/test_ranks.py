"""Files of many ranks: what the ranks of a pipeline position share, single ranks, a thousand of them."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from csc.codegen import write as writing
from csc.codegen.write import sources
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import csc.run
from csc.driver.compiled import CompiledModel
from csc.errors import InputError, ProgramError
from csc.ir.mesh import Mesh
from csc.reports.inspection import dump
from csc.runtime.launch import Launch
from csc.runtime.loaded_program import LoadedProgram, functions, load
from csc.runtime.trainer import Trainer
from tests import launching
from tests.compiler import small, weights_worker
from tests.compiler.conftest import Models
from tests.compiler.peft_models import llama
from tests.counting import calls

pytestmark = pytest.mark.usefixtures("traces")

RANKS = 1024


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def gradients(directory: Path, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    trainer = Trainer(load(directory), weights={n: p.detach() for n, p in model.named_parameters()})
    trainer.train_step(batch)
    return {name: p.grad for name, p in trainer.named_parameters()}


# --- shared ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_functions_stand_once_for_all_ranks_of_a_position(models: Models) -> None:
    compiled = models("text", mesh="pp=2,dp=3")
    files = sources(compiled.program, compiled.options)
    assert sorted(p for p in files if "/" not in p and p.endswith(".py")) == [
        "__init__.py", "position_0.py", "position_1.py", *(f"rank_{rank}.py" for rank in range(6)),
    ]  # fmt: skip
    for rank in range(6):
        tree = ast.parse(files[f"rank_{rank}.py"])
        said = ast.get_docstring(tree) or ""
        assert said.startswith(f"Rank {rank} of 6: stage {rank % 2} of 2, replica {rank // 2} of 3, TextModel.")
        for title in ("Holds", "Receives", "Sends", "Order"):
            assert f"\n{title}" in said
        assert not any(isinstance(node, ast.FunctionDef) for node in tree.body)
        assert f"from .position_{rank % 2} import STAGES, backward" in files[f"rank_{rank}.py"]
    shared = [ast.parse(files[f"position_{position}.py"]) for position in range(2)]
    assert [ast.get_docstring(tree).split(".")[0] for tree in shared] == [
        f"Position {p} of 2: stage {p} of 2, for 3 ranks" for p in range(2)
    ]
    alone = models("text", mesh="pp=2")
    own = ast.parse(sources(alone.program, alone.options)["rank_1.py"])
    assert [ast.dump(node) for node in own.body[1:]] == [ast.dump(node) for node in shared[1].body[1:]]


@pytest.mark.slow
def test_a_shard_of_a_sequence_has_a_file_of_its_own(models: Models) -> None:
    compiled = models("text", mesh="cp=2")
    files = sources(compiled.program, compiled.options)
    said = [ast.get_docstring(ast.parse(files[f"rank_{rank}.py"])) or "" for rank in range(2)]
    for index, text in enumerate(said):
        assert text.startswith(f"Rank {index} of 2: stage 0 of 1, replica 0 of 1, cp rank {index} of 2")
        assert f"Tokens    shard {index} of 2 of" in text
    assert "position_0.py" in files


def test_dump_shows_a_rank_with_what_it_shares(models: Models) -> None:
    text = dump(models("text", mesh="pp=2,dp=2"), "schedule", "python", rank=3)
    assert "# ===== rank_3.py" in text
    assert "# ===== position_1.py" in text
    assert "def backward_input(" in text


def test_one_rank_may_be_edited_alone(models: Models, tmp_path: Path) -> None:
    """A function that its file defines goes before the shared one, on that rank only."""
    compiled = models("text", mesh="pp=2,dp=2")
    directory = compiled.write(tmp_path / "program")
    expected = gradients(directory, compiled.model, compiled.example)
    file = directory / "rank_3.py"
    file.write_text(
        file.read_text() + "\nfrom . import position_1\n\ndef forward(*given):\n    SEEN.append(given)\n"
        "    return position_1.forward(*given)\n\nSEEN = []\n"
    )
    program = load(directory)
    assert program.edited == ("rank_3.py",)
    trainer = Trainer(program, weights={n: p.detach() for n, p in compiled.model.named_parameters()})
    trainer.train_step(compiled.example)
    assert all(torch.equal(p.grad, expected[name]) for name, p in trainer.named_parameters())
    assert len(functions(program, 3)[1].forward.__globals__["SEEN"]) == 1
    assert functions(program, 1)[1].forward is not functions(program, 3)[1].forward


# --- alone -------------------------------------------------------------------------------------------------------


def test_a_directory_of_single_ranks(models: Models, tmp_path: Path) -> None:
    compiled = models("text", mesh="pp=2,dp=2")
    whole, part = compiled.write(tmp_path / "whole"), compiled.write(tmp_path / "part", ranks=[3, 3])
    others = {"rank_0.py", "rank_1.py", "rank_2.py", "position_0.py"}
    assert names(part) == names(whole) - others
    assert all((part / n).read_bytes() == (whole / n).read_bytes() for n in names(part) - {"program.json"})
    listed = [json.loads((directory / "program.json").read_text()) for directory in (whole, part)]
    assert all(one.pop("timings") for one in listed) and listed[0] == listed[1]
    program = load(part, [3])
    assert program.manifest.fingerprint == load(whole).manifest.fingerprint
    assert functions(program, 3).keys() == {1}
    assert load(part, []).schedule == program.schedule
    said = r"its file position_0\.py is missing\. Compile the program again, with --rank 2 or for all ranks"
    with pytest.raises(ProgramError, match=said):
        load(part, [2, 3])
    with pytest.raises(ProgramError, match=r"its file \w+\.py is missing.* with --rank \d or for all ranks"):
        load(part)


def test_only_the_files_of_the_own_ranks_are_checked(models: Models, tmp_path: Path) -> None:
    directory = models("text", mesh="pp=2,dp=2").write(tmp_path / "program")
    for name in ("rank_2.py", "position_0.py", "position_1.py"):
        (directory / name).write_text((directory / name).read_text() + "# edited\n")
    assert load(directory, [1]).edited == ("position_1.py",)
    assert load(directory, [2]).edited == ("position_0.py", "rank_2.py")
    assert load(directory).edited == ("position_0.py", "position_1.py", "rank_2.py")
    assert load(directory, []).edited == ()


def test_each_edited_file_is_said_by_one_rank(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = models("text", mesh="pp=2,dp=2").write(tmp_path / "program")
    files = ("rank_0.py", "rank_3.py", "position_0.py", "position_1.py", "schedule.txt")
    for name in files:
        (directory / name).write_text((directory / name).read_text() + "# edited\n")
    said = []
    for rank in range(4):
        csc.run._say_what_is_edited(load(directory, [rank]), Launch(rank, 4, torch.device("cpu")))
        said.append(capsys.readouterr().err.partition("since it was compiled: ")[2].strip(" .\n"))
    assert said == ["position_0.py, rank_0.py, schedule.txt", "position_1.py", "", "rank_3.py"]


@pytest.mark.parametrize(("ranks", "said"), [([4], "no rank 4"), ([0, -1], "no rank -1"), ([], "no rank is named")])
def test_ranks_that_the_mesh_does_not_have(models: Models, tmp_path: Path, ranks: list[int], said: str) -> None:
    with pytest.raises(InputError, match=f"{said}.*the mesh dp=2,pp=2 has ranks 0 to 3"):
        models("text", mesh="pp=2,dp=2").write(tmp_path / "program", ranks=ranks)
    assert list(tmp_path.iterdir()) == []


def contents(file: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors. Bytes are not comparable: the order of metadata in them is that of a hash table."""
    with safe_open(file, "pt") as opened:
        return opened.metadata(), load_file(file)


@pytest.mark.slow
def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    """In one process: its parameters are made where it runs, by `load`; what the step does not use is kept, too."""

    def make() -> nn.Module:
        model = small.text(2)
        model.unused = nn.Linear(3, 3)
        model.register_buffer("kept", torch.arange(5.0))
        return model

    first = csc.compile(make(), mesh="pp=2", example=small.text_batch())
    first.save(tmp_path / "first")
    loss = first.train_step(small.text_batch())
    with csc.meta_init():
        second = csc.compile(make(), mesh="pp=2", example=small.text_batch())
    with pytest.raises(InputError, match=r"parameters of TextModel have no values yet.* compiled\.load"):
        second.train_step(small.text_batch())
    with pytest.raises(InputError, match=r"'embed_tokens\.weight' has no data.*"):
        second.write(tmp_path / "program", with_weights=True)
    second.load(tmp_path / "first")
    assert torch.equal(second.train_step(small.text_batch()), loss)
    second.save(tmp_path / "second")
    one, other = (contents(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert one[0] == other[0] and one[1].keys() == other[1].keys()
    assert all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())
    with pytest.raises(InputError, match="of the model is on the meta device, which holds no values"):
        second.gather()


@pytest.mark.gloo
def test_a_model_on_the_meta_device_in_two_processes(tmp_path: Path) -> None:
    source = llama()
    source.save_pretrained(tmp_path / "hf")
    launching.ranks(weights_worker.meta, 2, tmp_path)
    again = type(source).from_pretrained(tmp_path / "csc").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in source.state_dict().items())


# --- a thousand --------------------------------------------------------------------------------------------------


@pytest.fixture
def many(models: Models) -> CompiledModel:
    """Four pipeline positions, 64 microbatches."""
    return models("text", mesh="pp=4", microbatches=64, schedule="1f1b")


def thousand(compiled: CompiledModel, directory: Path, ranks: list[int] | None = None) -> Path:
    """The program for 1,024 ranks: replicas do not change what `partition` leaves."""
    options = replace(compiled.options, mesh=Mesh(dp=256, pp=4))
    return writing.write(compiled.program, options, directory, compiled.inspected.microbatch, ranks=ranks)


def test_a_thousand_ranks_are_a_table_each(many: CompiledModel, tmp_path: Path) -> None:
    """What a rank has of its own is a few lines, whatever its functions are, and little work; one is loaded alone."""
    directory = tmp_path / "program"
    assert calls(lambda: thousand(many, directory)) < 1000 * RANKS
    files = {path.name: path.read_text() for path in directory.glob("*.py")}
    assert sum(name.startswith("rank_") for name in files) == RANKS
    assert sum(name.startswith("position_") for name in files) == 4
    assert max(len(text.splitlines()) for name, text in files.items() if name.startswith("rank_")) < 25
    loaded: list[LoadedProgram] = []
    assert calls(lambda: loaded.append(load(directory, [617]))) < 200 * RANKS
    (program,) = loaded
    assert program.manifest.mesh.coordinates(617) == (154, 1, 0, 0)
    assert functions(program, 617).keys() == {1}


def test_one_of_a_thousand(many: CompiledModel, tmp_path: Path) -> None:
    directory = thousand(many, tmp_path / "program", [617])
    assert {p.name for p in directory.glob("*.py")} == {"__init__.py", "position_1.py", "rank_617.py"}
    assert len(json.loads((directory / "program.json").read_text())["files"]) > RANKS
    assert load(directory, [617]).edited == ()
    assert (directory / "rank_617.py").read_text().startswith('"""Rank 617 of 1024: stage 1 of 4, replica 154 of 256, ')
