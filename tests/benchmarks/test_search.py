"""The benchmark of model search: what its recorded curves say of strategies, and in what environment searches run."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import csc
from benchmarks.search import __main__ as benchmark
from benchmarks.search.record import TASKS
from benchmarks.search.replay import outcome
from csc.model_search.strategies import STRATEGIES


@pytest.mark.parametrize("task", TASKS)
def test_the_default_is_the_better_strategy_of_the_recorded_curves(task: str) -> None:
    recorded = benchmark.recorded_tasks()[task]
    default = inspect.signature(csc.search).parameters["strategy"].default
    for share in (1 / 12, 1 / 8):
        regret, tau = {}, {}
        for name in (default, "mordal", "random"):
            found = [outcome(recorded, STRATEGIES[name], share, draw) for draw in range(30)]
            assert all(one.spent <= share * recorded.grid * (1 + 1e-9) for one in found)
            regret[name] = np.mean([recorded.regret(one.pair) for one in found])
            tau[name] = np.mean([recorded.tau(one.ranking) for one in found])
        assert min(regret, key=lambda name: regret[name]) == default == max(tau, key=lambda name: tau[name])


def test_searches_that_train_have_a_cache_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    given: list[dict[str, str]] = []

    def run(*_: Any, env: dict[str, str], **__: Any) -> Any:
        given.append(env)
        return SimpleNamespace(stdout=f"RESULT {json.dumps({'rows': []})}\n", stderr="", returncode=0)

    monkeypatch.setattr(benchmark.subprocess, "run", run)
    assert benchmark.searched(tmp_path, "cold") == {"rows": []}
    assert given[0]["CSC_CACHE"] == "1" and given[0]["CSC_CACHE_DIR"] == str(tmp_path / "cache")
