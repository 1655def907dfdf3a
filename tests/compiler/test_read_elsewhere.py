"""What forward reads of files and of earlier batches: noticed when it changes, or refused."""

from __future__ import annotations

import functools
import io
import os
import queue
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import csc
from csc.errors import InputError
from tests.compiler.test_made_on_demand import BATCH, Scaled, is_eagers


class Reading(Scaled):
    """read: a number, from a folder or from what the module holds."""

    def __init__(self, folder: Path, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.folder, self.read, self.text, self.raw = folder, read, io.StringIO("2.0"), io.BytesIO(b"2.0")
        self.queue: queue.Queue[float] = queue.Queue()
        self.queue.put(2.0)
        self.file = (folder / "number").open()

    def scale(self) -> Any:
        return self.read(self)


def _from_the_beginning(file: Any) -> float:
    file.seek(0)
    return float(file.read())


def _opened(path: Path) -> float:
    with open(path) as file:
        return float(file.read())


def _to_the_file(model: Any) -> object:
    return (model.folder / "number").write_text("3.75")


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], object]]] = {
    "StringIO": (lambda m: _from_the_beginning(m.text), lambda m: (m.text.seek(0), m.text.write("3.0"))),
    "BytesIO": (lambda m: float(m.raw.getvalue()), lambda m: (m.raw.seek(0), m.raw.write(b"3.0"))),
    "queue": (lambda m: m.queue.queue[0], lambda m: (m.queue.get(), m.queue.put(3.0))),
    "open file": (lambda m: _from_the_beginning(m.file), _to_the_file),
    "open": (lambda m: _opened(m.folder / "number"), _to_the_file),
    "read_text": (lambda m: float((m.folder / "number").read_text()), _to_the_file),
    "NumPy": (
        lambda m: float(np.load(m.folder / "array.npy")[0]),
        lambda m: np.save(m.folder / "array.npy", np.full(2, 3.0)),
    ),
    "exists": (lambda m: 1.0 + os.path.exists(m.folder / "more"), lambda m: (m.folder / "more").write_text("")),
    "listdir": (lambda m: len(os.listdir(m.folder)), lambda m: (m.folder / "more").write_text("")),
}


def test_what_the_system_tells_nothing_of_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "number").write_text("2.0")
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("number", "2.0")
    with zipfile.ZipFile(tmp_path / "archive") as archive, archive.open("number") as inside:
        for held, is_told in ((io.TextIOWrapper(io.BytesIO(b"2.0")), False), (inside, True)):
            caplog.clear()
            model = Reading(tmp_path, lambda m: 2.0 if m.file is not None else 1.0)
            model.file = held
            assert is_eagers(csc.compile(model, example=BATCH, cache=False, check=False), model)
            assert ("a ZipExtFile: what it holds is read when" in caplog.text) is is_told


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_of_files_is_watched(case: str, tmp_path: Path) -> None:
    (tmp_path / "number").write_text("2.0")
    np.save(tmp_path / "array.npy", np.full(2, 2.0))
    read, change = CASES[case]
    model = Reading(tmp_path, read)
    compiled = csc.compile(model, example=BATCH, cache=False, check=False)
    assert is_eagers(compiled, model)
    change(model)
    assert is_eagers(compiled, model) and is_eagers(compiled, model)
    model.file.close()


class OfTheFirst(Scaled):
    """Keeps something of its first batch, as ActNorm does."""

    def __init__(self, keep: Callable[[torch.Tensor], Any], use: bool) -> None:
        super().__init__()
        self.keep, self.use = keep, use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.none is None:
            self.none = self.keep(x)
        scale = self.none if self.use else self.keep(x)
        return (self.second(torch.relu(self.first(x))) * (2.0 + scale)).square().mean()


class InADict(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "mean" not in self.plain:
            self.plain["mean"] = x.mean().detach()
        return (self.second(torch.relu(self.first(x))) * (2.0 + self.plain["mean"])).square().mean()


class OfWeights(Scaled):
    @functools.cached_property
    def norm(self) -> torch.Tensor:
        return self.first.weight.detach().norm()

    def scale(self) -> Any:
        return self.norm


FIRST: dict[str, Callable[[], nn.Module]] = {
    "none": lambda: OfTheFirst(lambda x: x.mean().detach(), use=True), "plain": InADict, "norm": OfWeights,
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_what_is_made_in_the_first_step_is_refused(name: str) -> None:
    model = FIRST[name]()
    with pytest.raises(InputError, match=rf"makes {name} of its first batch or of the weights.*run model\(\*\*batch\)"):
        csc.compile(model, example=BATCH, cache=False, check=False)
    model(**BATCH)
    assert is_eagers(csc.compile(model, example=BATCH, cache=False, check=False), model)


@pytest.mark.parametrize(
    ("keep", "use"), [(lambda x: x.mean().detach(), False), (lambda x: torch.arange(x.shape[1]).float(), True)]
)
def test_what_is_kept_and_not_used_or_made_of_sizes_alone_is_not(keep: Callable[[Any], Any], use: bool) -> None:
    model = OfTheFirst(keep, use)
    assert is_eagers(csc.compile(model, example=BATCH, cache=False, check=False), model)
