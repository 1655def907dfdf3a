"""A loader's position in a checkpoint: the run that is resumed sees the batches that the first one would have seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import csc
from csc.errors import InputError
from tests.compiler import small


class Stateful:
    """A DataLoader in a shuffled order that says how many batches it has given."""

    def __init__(self) -> None:
        self.given = 0
        self.seed = 3

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        whole = small.text_batch(12)
        rows: Any = [{name: one[row] for name, one in whole.items()} for row in range(12)]
        order = RandomSampler(rows, generator=torch.Generator().manual_seed(self.seed))
        for number, batch in enumerate(DataLoader(rows, batch_size=2, sampler=order)):
            if number >= self.given:
                self.given += 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "generator": torch.tensor(self.seed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given, self.seed = state["given"], int(state["generator"])


@pytest.fixture(scope="module")
def compiled() -> csc.CompiledModel:
    return csc.compile(small.text(1), example=small.text_batch(2), check=False)


def test_a_loader_goes_on_where_it_was(compiled: csc.CompiledModel, tmp_path: Path) -> None:
    loader, losses = Stateful(), []
    for number, batch in enumerate(loader):
        if number == 2:
            compiled.save(tmp_path, loader=loader)
        losses.append(float(compiled.train_step(batch)))
    assert (tmp_path / "loader_0_of_1.pt").is_file()
    again = Stateful()
    again.seed = 0
    compiled.load(tmp_path, loader=again)
    assert [float(compiled.train_step(batch)) for batch in again] == losses[3:]


def test_what_is_no_position(compiled: csc.CompiledModel, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a DataLoader cannot say at which sample it is.*StatefulDataLoader"):
        compiled.save(tmp_path / "none", loader=DataLoader([]))
    assert not (tmp_path / "none").exists()
    compiled.save(tmp_path)
    before = {name: p.detach().clone() for name, p in compiled.named_parameters()}
    with torch.no_grad():
        next(iter(compiled.parameters())).add_(1)
    moved = {name: p.detach().clone() for name, p in compiled.named_parameters()}
    with pytest.raises(InputError, match="no position of a loader was saved there, and this process loads share 0 of"):
        compiled.load(tmp_path, loader=Stateful())
    (tmp_path / "loader_1_of_2.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"the positions there are loader_1_of_2\.pt, and this process"):
        compiled.load(tmp_path, loader=Stateful())
    (tmp_path / "loader_0_of_1.pt").write_bytes(b"something else")
    with pytest.raises(InputError, match="it holds no position of a loader"):
        compiled.load(tmp_path, loader=Stateful())
    assert all(torch.equal(p, moved[name]) for name, p in compiled.named_parameters()), "nothing was loaded"
    compiled.load(tmp_path)
    assert all(torch.equal(p, before[name]) for name, p in compiled.named_parameters())


def test_torchdata(compiled: csc.CompiledModel, tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    whole = small.text_batch(8)
    rows: Any = [{name: one[row] for name, one in whole.items()} for row in range(8)]
    loader = stateful.StatefulDataLoader(rows, batch_size=2, shuffle=True)
    iterator = iter(loader)
    next(iterator)
    compiled.save(tmp_path, loader=loader)
    rest = list(iterator)
    again = stateful.StatefulDataLoader(rows, batch_size=2, shuffle=True)
    compiled.load(tmp_path, loader=again)
    found = list(again)
    assert len(found) == len(rest) and all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(found, rest))
