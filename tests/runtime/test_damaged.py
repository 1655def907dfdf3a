"""Files of a program and of weights with random damage: each is what it was, or a sentence of csc.

Terms: see tests.damage. A changed program.json is tried with its old fingerprint, which gives it away, and with the
right one, as of a change that is meant.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import handmade
import pytest

from csc.errors import CscError, InputError, ProgramError
from csc.runtime import weights
from csc.runtime.loaded_program import functions, load
from csc.runtime.trainer import Trainer
from tests.damage import FAST, SLOW, changed_bytes, changed_tree


def tokens(draw: random.Random, text: str) -> str:
    """A schedule with some of its words replaced, swapped or removed."""
    words = text.split(" ")
    for _ in range(draw.choice([1, 1, 2, 5])):
        at, other = draw.randrange(len(words)), draw.randrange(len(words))
        words[at] = draw.choice([words[other], "", "F", "9", "1000000000", "9" * 5000, "\u0663", "rank 7:", "|", "\n"])
    return " ".join(words)


class Damage:
    """A program directory and a directory of weights, and ways to change them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole = handmade.write(folder / "whole")
        self.program = load(self.whole)
        self.table = json.loads((self.whole / "program.json").read_text())
        self.saved = folder / "saved"
        for rank in range(3):
            weights.write(self.saved, self.program.manifest, rank, handmade.weights())
        weights.write_index(self.saved, self.program.manifest)
        self.copy = folder / "copy"
        shutil.copytree(self.whole, self.copy)

    def put(self, name: str, content: bytes) -> None:
        (self.copy / name).write_bytes(content)

    def back(self, name: str) -> None:
        shutil.copyfile(self.whole / name, self.copy / name)

    def program_bytes(self, draw: random.Random) -> None:
        self.put("program.json", changed_bytes(draw, (self.whole / "program.json").read_bytes()))
        self._unchanged()

    def program_tree(self, draw: random.Random) -> None:
        self.put("program.json", json.dumps(changed_tree(draw, self.table)).encode())
        self._unchanged()

    def _unchanged(self) -> None:
        try:
            found = load(self.copy)
        except ProgramError:
            return
        assert found.manifest == self.program.manifest, "what was changed was not found"

    def program_meant(self, draw: random.Random) -> None:
        changed = changed_tree(draw, self.table)
        with contextlib.suppress(RecursionError, AttributeError, TypeError):  # no table any more, or too deep to write
            changed = handmade.sealed(changed)
        self.put("program.json", json.dumps(changed).encode())
        with contextlib.suppress(ProgramError, InputError):
            Trainer(load(self.copy))

    def schedule(self, draw: random.Random) -> None:
        text = (self.whole / "schedule.txt").read_text()
        self.put(
            "schedule.txt", tokens(draw, text).encode() if draw.random() < 0.7 else changed_bytes(draw, text.encode())
        )
        with contextlib.suppress(CscError):
            Trainer(load(self.copy)).train_step(handmade.batch(4))
        self.back("schedule.txt")

    def sources(self, draw: random.Random) -> None:
        name = draw.choice(
            ["rank_0.py", "rank_1.py", "rank_2.py", "layers/stage_1.py", "layers/__init__.py", "__init__.py"]
        )
        content = (self.whole / name).read_bytes() or b"\n"
        self.put(name, changed_bytes(draw, content))
        with contextlib.suppress(ProgramError):
            program = load(self.copy)
            assert program.edited == (name,) or (self.copy / name).read_bytes() == (self.whole / name).read_bytes()
            for rank in range(3):
                functions(program, rank)
        self.back(name)

    def index(self, draw: random.Random) -> None:
        file = self.saved / weights.INDEX
        before = file.read_bytes()
        tree = json.dumps(changed_tree(draw, json.loads(before))).encode()
        file.write_bytes(tree if draw.random() < 0.5 else changed_bytes(draw, before))
        try:
            found = weights.read(self.saved, self.program.manifest.parameters)
            assert all((found[name] == tensor).all() for name, tensor in handmade.weights().items())
        except InputError:
            pass
        file.write_bytes(before)


KINDS = [
    Damage.program_bytes, Damage.program_tree, Damage.program_meant, Damage.schedule, Damage.sources, Damage.index
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_damage(kind: Callable[[Damage, random.Random], None], tmp_path: Path) -> None:
    damage = Damage(tmp_path)
    for seed in range(FAST):
        tried(kind, damage, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_much_damage(kind: Callable[[Damage, random.Random], None], tmp_path: Path) -> None:
    damage = Damage(tmp_path)
    for seed in range(FAST, FAST + SLOW):
        tried(kind, damage, seed)


def tried(kind: Callable[[Damage, random.Random], None], damage: Damage, seed: int) -> None:
    try:
        kind(damage, random.Random(seed))
    except BaseException as error:
        error.add_note(f"{kind.__name__}, seed {seed}")
        raise


@pytest.mark.parametrize("name", ["program.json", "schedule.txt", "rank_1.py", "constants.safetensors"])
def test_something_else_in_place_of_a_file(name: str, tmp_path: Path) -> None:
    file = handmade.write(tmp_path / "p") / name
    for make in (os.mkfifo, Path.mkdir, lambda file: file.symlink_to("/dev/zero"), lambda file: file.symlink_to(file)):
        file.unlink() if not file.is_dir() else file.rmdir()
        make(file)
        with pytest.raises(ProgramError):
            Trainer(load(tmp_path / "p"))


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda t: t["mesh"].update(dp=10**9), "has 3000000000 ranks, and it lists 3 stages and"),
        (lambda t: t["mesh"].update(pp=10**9), "1000000000 ranks, and it lists 3 stages"),
        (lambda t: t["parameters"].append(t["parameters"][0]), "lists 'embed' twice among its parameters"),
        (lambda t: t["stages"][1]["inputs"].append("pixels"), "stage 1 reads 'pixels', which is no input"),
        (lambda t: t["inputs"][0].update(shape=[2**40, 2**40]), "no tensor is that large"),
        (lambda t: t.update(device="tpu"), "field 'device' is 'tpu', which is none"),
        (lambda t: t.update(microbatches=10**30), "is a number of 100 bits"),
    ],
)
def test_what_no_program_has(edit: Callable[[dict[str, Any]], object], part: str, tmp_path: Path) -> None:
    directory = handmade.write(tmp_path / "p")
    table = json.loads((directory / "program.json").read_text())
    edit(table)
    (directory / "program.json").write_text(json.dumps(handmade.sealed(table)))
    with pytest.raises(ProgramError, match=part):
        load(directory)


def test_a_program_json_that_was_changed(tmp_path: Path) -> None:
    """Found; and taken if whoever changed it says so, by its fingerprint. The times of compiling are no part of it."""
    directory = handmade.write(tmp_path / "p")
    file = directory / "program.json"
    table = json.loads(file.read_text())
    file.write_text(json.dumps(table | {"timings": {"capture": 1.0}}))
    load(directory)
    table["loss"]["weight"] = "mean"
    file.write_text(json.dumps(table))
    with pytest.raises(ProgramError, match=r"it has changed since it was compiled: its fingerprint") as caught:
        load(directory)
    table["fingerprint"] = caught.value.remedy.split("'")[1]
    file.write_text(json.dumps(table))
    assert load(directory).manifest.loss.weight == "mean"
    file.write_text(file.read_text().replace('"format"', '"format": 6, "format"'))
    with pytest.raises(ProgramError, match="key 'format' stands there twice"):
        load(directory)


def test_a_schedule_for_other_ranks(tmp_path: Path) -> None:
    directory = handmade.write(tmp_path / "p")
    other = handmade.write(tmp_path / "q", placement=(2, 1, 0))
    shutil.copyfile(other / "schedule.txt", directory / "schedule.txt")
    with pytest.raises(ProgramError, match=r"stage 0 is on rank 2, program\.json has it on 0"):
        load(directory)
