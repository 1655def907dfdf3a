"""Plans made ahead of the step are those of the step: the same bits, and the step itself plans nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import csc
from csc.errors import InputError
from csc.runtime import context, transport
from tests.compiler.conftest import Models
from tests.models import packed

pytestmark = pytest.mark.slow

Batch = dict[str, torch.Tensor]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(what, thread) of all that is planned: where tokens go, and how queries meet keys."""
    seen: list[tuple[str, str]] = []

    def recording(what: str, real: Any) -> Any:
        def record(*given: Any, **named: Any) -> Any:
            seen.append((what, threading.current_thread().name))
            return real(*given, **named)

        return record

    monkeypatch.setattr(transport, "spread", recording("tokens", transport.spread))
    monkeypatch.setattr(context, "KVExchange", recording("keys", context.KVExchange))
    return seen


def batches(count: int) -> list[Batch]:
    """Other documents in every batch."""
    return [packed.batch(4, 96, (11 + 5 * number, 3, 30, 1 + number)) for number in range(count)]


@pytest.fixture
def compiled(models: Models) -> csc.CompiledModel:
    return models("packed", batches(1)[0], mesh="cp=2", microbatches=2)


def gradients(compiled: csc.CompiledModel, loop: Iterator[Batch]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    found = []
    for batch in loop:
        compiled.zero_grad()
        loss = float(compiled.train_step(batch))
        found.append((loss, {name: p.grad.clone() for name, p in compiled.named_parameters() if p.grad is not None}))
    return found


def test_the_same_bits_and_nothing_planned_in_the_step(
    planned: list[tuple[str, str]], compiled: csc.CompiledModel
) -> None:
    expected = gradients(compiled, iter(batches(6)))
    assert not [thread for _, thread in planned if thread.startswith("csc-ahead")]
    again = compiled.with_options(schedule="gpipe")  # the same traces, another trainer that has planned nothing
    found = []
    for place, batch in enumerate(again.ahead(batches(6))):
        if place == 2:  # the first step shows what its layers ask for, while the second batch is planned
            planned.clear()
        found += gradients(again, iter([batch]))
    assert planned and all(thread.startswith("csc-ahead") for _, thread in planned)
    assert [loss for loss, _ in found] == [loss for loss, _ in expected]
    for (_, one), (_, other) in zip(found, expected):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert {what for what, _ in planned} == {"tokens", "keys"}


def test_a_batch_that_is_changed_after_all_is_planned_in_its_step(compiled: csc.CompiledModel) -> None:
    other = batches(6)[5]
    expected = gradients(compiled, iter([batches(1)[0], other]))[1]
    found = None
    for place, batch in enumerate(compiled.ahead(batches(2))):
        if place:
            for name, tensor in batch.items():
                tensor.copy_(other[name])
        compiled.zero_grad()
        found = gradients(compiled, iter([batch]))[0]
    assert found is not None and found[0] == expected[0]
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


def test_a_batch_that_does_not_fit_is_refused_in_its_turn(compiled: csc.CompiledModel) -> None:
    seen = []
    compiled.trainer()
    bad = {name: tensor[:3] for name, tensor in batches(1)[0].items()}
    with pytest.raises(InputError):
        for batch in compiled.ahead([*batches(2), bad]):
            seen.append(batch)
    assert len(seen) == 2
    with pytest.raises(InputError, match="depth is 0"):
        compiled.ahead(batches(1), depth=0)


def test_without_cp_batches_are_only_fetched(models: Models) -> None:
    compiled = models("packed", batches(1)[0])
    assert len(gradients(compiled, compiled.ahead(batches(2)))) == 2


class Positioned:
    """A loader that says how many batches it has given, and fails at one of them once."""

    def __init__(self, count: int, failing: int = -1) -> None:
        self.given, self._batches, self._failing = 0, batches(count), failing

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.given < len(self._batches):
            if self.given == self._failing:
                self._failing = -1
                raise OSError("a disk was away")
            self.given += 1
            yield self._batches[self.given - 1]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_loader_is_saved_where_training_is(compiled: csc.CompiledModel, depth: int, tmp_path: Path) -> None:
    """Not where fetching is: batches in between would be trained on by nobody."""
    loader = Positioned(5)
    for place, _ in enumerate(compiled.ahead(loader, depth=depth)):
        if place == 2:
            compiled.save(tmp_path, loader=loader)
            break
    assert loader.given == 3, "a loop that is left is taken up where it stood"
    resumed = Positioned(5)
    compiled.load(tmp_path, loader=resumed)
    assert resumed.given == 3
    assert len(list(compiled.ahead(resumed, depth=depth))) == 2 and resumed.given == 5
    assert compiled.saved(resumed, None).loader is resumed


def test_a_loader_that_fails_loses_no_batch(compiled: csc.CompiledModel) -> None:
    loader, seen = Positioned(5, failing=3), 0
    with pytest.raises(OSError, match="a disk was away"):
        for _ in compiled.ahead(loader):
            seen += 1
    assert (seen, loader.given) == (3, 3)
    assert len(list(compiled.ahead(loader))) == 2
