"""How ranks are started, and what is said when the wrong number of them was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from csc.errors import InputError
from csc.runtime import starting


@pytest.mark.parametrize(
    ("ranks", "per_node", "nodes", "here"),
    [(3, 8, 1, 3), (8, 8, 1, 8), (1024, 8, 128, 8), (12, 8, 2, 6), (7, 4, 7, 1), (1, 1, 1, 1)],
)
def test_nodes_times_processes_are_the_ranks(ranks: int, per_node: int, nodes: int, here: int) -> None:
    said = starting.command(ranks, per_node, "train.py")
    assert nodes * here == ranks
    if nodes == 1:
        assert said == f"torchrun --nproc-per-node {here} train.py"
    else:
        assert said.startswith(f"on each of {nodes} nodes: torchrun --nnodes {nodes} --nproc-per-node {here} --rdzv-")


def test_world_of_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "error.json"
    for name, value in {"RANK": "0", "LOCAL_WORLD_SIZE": "8", starting.ERROR_FILE: str(place)}.items():
        monkeypatch.setenv(name, value)
    starting.check_world(16, 16, "dp=16")
    assert not place.exists()
    with pytest.raises(InputError, match=r"16 processes .* \(2 nodes x 8\) and the mesh has 12 ranks \(pp=12\)"):
        starting.check_world(16, 12, "pp=12")
    assert "the mesh has 12 ranks" in json.loads(place.read_text())["message"]


def test_other_ranks_leave_the_word_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(starting.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InputError):
        starting.check_world(3, 2, "pp=2")
    assert waited == [starting.PATIENCE]
