"""What forward itself writes is left out of the guards, and nothing beside it; what it imports while it runs is in."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import csc

STATS = {"scale": 1.0}
BATCH = {"x": torch.linspace(-1, 1, 12).view(3, 4)}


class Scaled(nn.Module):
    """Counts its runs beside what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table, self.info = np.ones(400_000), {"scale": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import late_settings
        from late_settings import FACTOR

        STATS["runs"] = STATS.get("runs", 0) + 1
        self.info["runs"] = self.info.get("runs", 0) + 1
        scale = STATS["scale"] * self.info["scale"] * float(self.table[3]) * late_settings.SCALE * FACTOR
        return (self.second(torch.relu(self.first(x))) * scale).square().mean()


@pytest.fixture(autouse=True)
def late_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module: Any = types.ModuleType("late_settings")
    module.SCALE = module.FACTOR = 1.0
    monkeypatch.setitem(sys.modules, "late_settings", module)
    yield module
    STATS.clear()
    STATS["scale"] = 1.0


CHANGES: dict[str, Callable[[Scaled], object]] = {
    "a key beside one that forward adds": lambda model: STATS.update(scale=3.0),
    "the same of a dict of the module": lambda model: model.info.update(scale=3.0),
    "an element of a large array": lambda model: model.table.__setitem__(3, 3.0),
    "an attribute of a module imported in forward": lambda model: setattr(sys.modules["late_settings"], "SCALE", 3.0),
    "a name imported from it": lambda model: setattr(sys.modules["late_settings"], "FACTOR", 3.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_taken_up(change: str) -> None:
    model = Scaled()
    compiled = csc.compile(model, example=BATCH, cache=False)
    compiled.train_step(BATCH)
    CHANGES[change](model)
    loss = compiled.train_step(BATCH)
    torch.testing.assert_close(loss, model(**BATCH).detach())


def test_what_forward_writes_compiles_nothing_anew(caplog: pytest.LogCaptureFixture) -> None:
    model = Scaled()
    compiled = csc.compile(model, example=BATCH, cache=False)
    with caplog.at_level(logging.INFO, "csc"):
        for _ in range(3):
            compiled.train_step(BATCH)
            model(**BATCH)
    assert not [record for record in caplog.records if "has changed" in record.message]
