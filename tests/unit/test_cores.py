"""Cores that this process may keep busy: those it may run on, and its container's share of the machine's time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from csc import cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of 16 cores, and a folder for what the system says of the container."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for name in ("QUOTA", "QUOTA_1", "PERIOD_1"):
        monkeypatch.setattr(cores, name, tmp_path / name)
    return tmp_path


def test_all_without_a_limit(machine: Path) -> None:
    assert cores.here() == 16


@pytest.mark.parametrize(
    "told, expected",
    [("max 100000", 16), ("200000 100000", 2), ("250000 100000", 3), ("10000 100000", 1), ("9000000 100000", 16)],
)
def test_a_share_of_the_machines_time(machine: Path, told: str, expected: int) -> None:
    (machine / "QUOTA").write_text(told + "\n")
    assert cores.here() == expected


@pytest.mark.parametrize("quota, expected", [("-1", 16), ("300000", 3), ("0", 16)])
def test_a_share_as_older_systems_tell_it(machine: Path, quota: str, expected: int) -> None:
    (machine / "QUOTA_1").write_text(quota + "\n")
    (machine / "PERIOD_1").write_text("100000\n")
    assert cores.here() == expected


@pytest.mark.parametrize("told", ["", "many", "1 2 3", "100000 0"])
def test_what_cannot_be_read_is_no_limit(machine: Path, told: str) -> None:
    (machine / "QUOTA").write_text(told)
    assert cores.here() == 16
