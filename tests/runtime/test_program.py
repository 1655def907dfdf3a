"""Loading program directories: each thing that can be wrong with one is a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import handmade
import pytest
import torch

from csc.errors import CscError, ProgramError
from csc.ir.strides import dense, overlaps
from csc.runtime.consistency import digests
from csc.runtime.loaded_program import functions, load
from csc.runtime.trainer import Trainer
from csc.runtime.transport import Work, take_turns, until


def test_load_reads_everything(tmp_path: Path) -> None:
    program = load(handmade.write(tmp_path / "p", dp=2))
    manifest = program.manifest
    assert manifest.mesh.size == 6 and manifest.loss.stage == 2 and not program.edited
    assert manifest.parameters[0].owner == 0 and manifest.parameters[0].stages == (0, 2)
    assert set(program.example()) == {"ids", "labels"}
    assert set(program.constants(2)) == {"scale"} and not program.constants(0)


def test_two_loads_share_no_modules(tmp_path: Path) -> None:
    directory = handmade.write(tmp_path / "p")
    first = functions(load(directory), 0)[0].forward
    (directory / "layers/stage_0.py").write_text(handmade.STAGE_0 + handmade.BACKWARD + "\nEDITED = True\n")
    (directory / "rank_0.py").write_text((directory / "rank_0.py").read_text() + "from .layers.stage_0 import EDITED\n")
    again = load(directory)
    second = functions(again, 0)[0].forward
    assert "EDITED" not in first.__globals__ and second.__globals__["EDITED"]
    assert again.edited == ("layers/stage_0.py", "rank_0.py")
    assert not list(directory.rglob("__pycache__")), "a program directory holds what the compiler wrote"


Edit = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda t: t.pop("loss"), "program.json: field 'loss' is missing"),
        (lambda t: t.update(format=1), "format is version 1, this csc reads version 6"),
        (lambda t: t.update(microbatches="4"), "field 'microbatches' should be int, it is '4'"),
        (lambda t: t.update(microbatches=0), "0 microbatches"),
        (lambda t: t.update(inputs=[3]), r"inputs\[0\]: this should be an object"),
        (lambda t: t["mesh"].update(pp=2), r"rank is 2, there are 0\.\.1"),
        (lambda t: t["mesh"].update(tp=5), "mesh pp=3,tp=5 has 15 ranks"),
        (lambda t: t["parameters"][0].pop("weight"), "field 'weight' is missing"),
        (lambda t: t["parameters"][0].pop("gradient"), "field 'gradient' is missing"),
        (lambda t: t["parameters"][0].update(weight={"equal": "nobody"}), "cannot be 'equal' over 'nobody'"),
        (lambda t: t["parameters"][0].update(weight={"same": "data"}), "cannot be 'same' over 'data'"),
        (
            lambda t: t["parameters"][0].update(weight={"shard": "tensor"}),
            "says shard over tp: this runtime knows equal",
        ),
        (lambda t: t["parameters"][0].update(weight={"parts": "data"}), "says parts over dp: this runtime knows equal"),
        (
            lambda t: t["parameters"][0].update(gradient={"shard": "samples"}),
            "says shard over dp: this runtime knows eq",
        ),
        (
            lambda t: t["parameters"][0].update(gradient={"parts": "data", "equal": "samples"}),
            r"parameters\[0\], gradient: .* says two things of axis dp",
        ),
        (lambda t: t["parameters"][0].update(weight={"equal": "world"}), "places tensors over the pipeline"),
        (lambda t: t["mesh"].update(xx=2), "no axis 'xx'"),
        (lambda t: t["loss"].update(weight="max"), "loss weight 'max' is none of tokens, sum, mean"),
        (lambda t: t["loss"].update(stage=3), r"stage is 3, there are 0\.\.2"),
        (lambda t: t["inputs"][0].update(dtype="int65"), "'int65' is not a torch dtype"),
        (lambda t: t["inputs"][0].update(shape=[-1]), "should list sizes"),
        (lambda t: t["parameters"][0].update(stages=[5]), "different stages in 0..2"),
        (lambda t: t["messages"][0].update(kind="G"), "neither F nor B"),
        (lambda t: t["messages"][0]["values"][0].update(stride=[1, 1, 1]), "elements overlap"),
        (lambda t: t["messages"].pop(0), "'SEND F 0>1 0': there is no such message"),
        (lambda t: t["stages"][1].update(backward_weight=False), "stage 1 has no W"),
        (lambda t: t["files"].update({"layers/gone.py": "0"}), "its file layers/gone.py is missing"),
    ],
)
def test_manifests_that_do_not_fit(tmp_path: Path, edit: Edit, part: str) -> None:
    directory = handmade.write(tmp_path / "p")
    table = json.loads((directory / "program.json").read_text())
    edit(table)
    (directory / "program.json").write_text(json.dumps(handmade.sealed(table)))
    with pytest.raises(ProgramError, match=part):
        load(directory)


@pytest.mark.parametrize(
    ("file", "text", "part"),
    [
        ("program.json", "{", "it is not JSON"),
        ("program.json", "[]", "this should be an object"),
        ("schedule.txt", "rank 0: F 0 0", "no rank runs stage 1, the program has 3 stages"),
        ("schedule.txt", "nonsense", r"schedule.txt, schedule, line 1: 'nonsense'"),
        ("rank_1.py", "x = (\n", r"rank_1.py, line 1: syntax error: '\(' was never closed"),
        (
            "rank_1.py",
            "\nimport nothing_like_this\n",
            r"rank_1.py, line 2: importing it raised ModuleNotFoundError",
        ),
        ("layers/stage_1.py", "\n\n1 / 0\n", r"stage_1.py, line 3: importing it raised ZeroDivisionError"),
        ("rank_1.py", "STAGES = (2,)", r"STAGES is \(2,\), rank 1 runs stages \(1,\)"),
        ("rank_1.py", "STAGES = (1,)", "function forward is missing"),
        ("constants.safetensors", "x", "it is not safetensors"),
        ("__init__.py", None, "its file __init__.py is missing"),
        ("rank_2.py", None, "its file rank_2.py is missing"),
        ("program.json", None, "there is no program.json"),
        ("constants.safetensors", None, "constants.safetensors: there is no such file"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, file: str, text: str | None, part: str) -> None:
    directory = handmade.write(tmp_path / "p")
    if text is None:
        (directory / file).unlink()
    else:
        (directory / file).write_text(text)
    with pytest.raises(ProgramError, match=part):
        Trainer(load(directory))


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="there is no such directory"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ('yield "w1"', 'yield "w7"', "gradient for 'w7', which is not on stage 1"),
        ('yield "b1", dx.sum((0, 1))', 'yield "b1", dx', r"the gradient of 'b1' is \[2, 5, 6\]"),
        ('return {"x":', 'return {"y":', "returned no value 'x' to send"),
        ('+ weights["b1"]}, (a,)', "}, (a,)", None),
        (
            'return {"x": a @',
            'return {"x": a[:1] @',
            r"value 'x' is \[1, 5, 6\] torch.float32, the message says",
        ),
    ],
)
def test_rank_files_that_do_not_fit(tmp_path: Path, old: str, new: str, part: str | None) -> None:
    directory = handmade.write(tmp_path / "p")
    file = directory / "layers/stage_1.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    trainer = Trainer(load(directory))
    if part is None:
        trainer.train_step(handmade.batch(4))
        return
    with pytest.raises(ProgramError, match=part):
        trainer.train_step(handmade.batch(4))


def test_gradient_of_a_frozen_parameter_is_refused(tmp_path: Path) -> None:
    directory = handmade.write(tmp_path / "p", frozen="prefix")
    file = directory / "layers/stage_2.py"
    file.write_text(file.read_text())
    rank = directory / "rank_1.py"
    rank.write_text(rank.read_text() + "\ndef backward(saved, received, *rest):\n    yield 'w0', saved[0]\n")
    with pytest.raises(ProgramError, match="gradient for 'w0', which is not on stage 1"):
        Trainer(load(directory)).train_step(handmade.batch(4))


def test_strides_that_differ_from_the_message_are_mended(tmp_path: Path) -> None:
    directory = handmade.write(tmp_path / "p")
    file = directory / "layers/stage_0.py"
    file.write_text(file.read_text().replace("a.transpose(1, 2)}", "a.transpose(1, 2).contiguous()}"))
    loss = Trainer(load(directory)).train_step(handmade.batch(4))  # stage 1 asserts the strides it gets
    torch.testing.assert_close(loss, handmade.eager(handmade.weights(), handmade.batch(4))[0])


def test_ranks_that_cannot_go_on_are_named() -> None:
    there = list[str]()

    def waits(for_what: str) -> Work[None]:
        yield from until(lambda: there.append("") or len(there) > 2, "RECV F 0>1 0")  # type: ignore[func-returns-value]
        yield from until(bool, for_what)

    with pytest.raises(CscError, match="no rank can go on: rank 0 waits at 'RECV B 1>0 0'; rank 1 waits at 'x'"):
        take_turns({0: waits("RECV B 1>0 0"), 1: waits("x")})


def test_digests_tell_programs_apart(tmp_path: Path) -> None:
    base = digests(load(handmade.write(tmp_path / "a")))
    assert base == digests(load(handmade.write(tmp_path / "b")))
    wide = digests(load(handmade.write(tmp_path / "c", dtype="float64")))
    assert {what for what in base if base[what] != wide[what]} == {
        "fingerprints",
        "shapes, strides and dtypes of messages",
        "parameters and the stages that use them",
    }
    gpipe = digests(load(handmade.write(tmp_path / "d", schedule="gpipe")))
    assert {what for what in base if base[what] != gpipe[what]} == {"fingerprints", "schedules"}


def test_overlaps() -> None:
    assert not overlaps((2, 3), (3, 1)) and not overlaps((2, 3), (4, 1)) and not overlaps((), ())
    assert overlaps((2, 3), (0, 1)) and overlaps((2,), (1, 1)) and overlaps((4, 3), (2, 1))


def test_dense() -> None:
    assert dense((2, 3), (3, 1)) and dense((2, 3), (1, 2)) and dense((2, 1, 3), (3, 99, 1)) and dense((), ())
    assert dense((0, 3), (7, 7))
    assert not dense((2, 3), (0, 1)) and not dense((2, 3), (4, 1)) and not dense((2,), (1, 1))
