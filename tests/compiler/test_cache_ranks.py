"""Of several ranks one compiles: the others get its program as bytes, and its error as the same sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import csc
from tests import launching
from tests.compiler import cache_worker, small

pytestmark = pytest.mark.gloo


def ranks(case: dict[str, Any], directory: Path) -> list[dict[str, Any]]:
    launching.ranks(cache_worker.main, 2, case, directory)
    return [json.loads((directory / f"result_{rank}.json").read_text()) for rank in range(2)]


def test_one_rank_compiles_or_fails_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSC_CACHE", "1")
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path / "cache"))
    case = {"wrong": "no_such_part", "lengths": [8, 8, 12, 8]}
    first, second = ranks(case, tmp_path)
    assert "'no_such_part' matches no parameter" in first["error"]
    assert first["error"] == second["error"] and first["error"].startswith("InputError: ")

    # What rank 0 traced before that error it has; the other one has done nothing.
    assert first["passes"].count("schedule") == 2
    assert second["passes"] == []
    assert len([line for line in second["log"] if "from rank 0" in line]) == 2
    assert first["loss"] == second["loss"]

    # The same in one process, and by eager PyTorch.
    batch = [small.text_batch(2, length) for length in case["lengths"]]
    alone = csc.compile(small.text(2), mesh={"pp": 2}, example=batch[:2], microbatches=2, schedule="1f1b", cache=False)
    assert float(alone.train_step(batch[2:])) == first["loss"]
    eager = small.text(2)
    counts = [int((one["labels"][:, 1:] != -100).sum()) for one in batch[2:]]
    for one, count in zip(batch[2:], counts, strict=True):
        (eager(**one) * (count / sum(counts))).backward()
    found = {name: g for rank in range(2) for name, g in load_file(tmp_path / f"gradients_{rank}.safetensors").items()}
    assert found.keys() == {name for name, _ in eager.named_parameters()}
    for name, parameter in alone.named_parameters():
        assert torch.equal(found[name], parameter.grad), name
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)

    # Another start: nobody compiles.
    again = ranks({**case, "wrong": ""}, tmp_path)
    assert [one["passes"] for one in again] == [["program, from the cache"] * 2, []]
    assert [one["loss"] for one in again] == [first["loss"]] * 2
