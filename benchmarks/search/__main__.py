"""python -m benchmarks.search: what strategies find and spend, replayed on recorded curves, and searches that train.

    python -m benchmarks.search [--json] [--quick]

Replayed: draws of each strategy on the curves in benchmarks/search/data, ten for the summary and a hundred for the
table (24 pairs, six seeds; a draw takes each pair's curve from a seed at random). Strategies were chosen on the two
other tasks, which have three seeds each, and are reported on the first. Trained: the search of
examples/search/digits.py as it stands, with an empty cache; and a short one that finds its programs there, once to its
end and once killed and taken up. Each in a process of its own.
--quick: replayed alone.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.search.record import EXAMPLE, TASKS
from benchmarks.search.replay import Recorded, least_budget, mean_regret, outcome
from csc import cores
from csc.errors import InputError
from csc.model_search.strategies import STRATEGIES

DATA = Path(__file__).parent / "data"
DRAWS, MANY = 10, 100  # of the summary; of what budgets are compared by
BUDGET = 1 / 12
SHARES = (1 / 24, 1 / 16, 1 / 12, 1 / 8, 1 / 5)
SAMPLES, KILLED = 512, 60  # of a training to the end of a short search; steps after which it is killed

SEARCH = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
import digits
import csc
from csc.model_search.trials import PairTrials
step, left = PairTrials._step, int(sys.argv[4])
def counted(*arguments):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*arguments)
if left:  # a class that is patched is none that the cache knows
    PairTrials._step = counted
samples = int(sys.argv[3]) or None
result = csc.search(**digits.search(), directory=sys.argv[2], samples=samples, mesh=sys.argv[5] or None)
print("RESULT", json.dumps(result.as_dict()))
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="replayed strategies alone")
    given = parser.parse_args()
    tasks = recorded_tasks()
    rows = [
        {"task": task, **row}
        for task, recorded in tasks.items()
        for name in ("halving", "mordal", "random")
        for share in SHARES
        if (row := replayed(recorded, name, share))
    ]
    recorded = next(iter(tasks.values()))
    summary = of_replay(recorded)
    if not given.quick:
        summary |= of_training()
    if given.json:
        print(
            json.dumps(
                {"summary": summary, "rows": rows, "noise": recorded.noise, "seeds": len(recorded.seeds)}, indent=1
            )
        )
        return
    console = Console()
    table = Table("task", "strategy", "budget", "spent, grid /", "mean regret", "within noise", "weighted tau")
    for row in rows:
        table.add_row(
            row["task"], row["strategy"], f"1/{1 / row['budget']:.0f}", f"{1 / row['spent']:.1f}",
            f"{row['regret']:.4f}", f"{row['within_noise']:.0%}", f"{row['weighted_tau']:.3f}",
        )  # fmt: skip
    console.print(table)
    console.print(f"{MANY} draws each; noise of a score between seeds {recorded.noise:.4f}")
    for name, value in summary.items():
        console.print(f"{name}: {value}", highlight=False)


def recorded_tasks() -> dict[str, Recorded]:
    """By name; the example's is the first."""
    return {task: Recorded.of_file(DATA / f"{task.replace(' ', '-')}.json") for task in TASKS}


def replayed(recorded: Recorded, name: str, share: float, draws: int = MANY) -> dict[str, Any] | None:
    """Means over draws; None where the budget is below the first rung."""
    try:
        found = [outcome(recorded, STRATEGIES[name], share, draw) for draw in range(draws)]
    except InputError:
        return None
    regrets = [recorded.regret(one.pair) for one in found]
    return {
        "strategy": name, "budget": share, "spent": float(np.mean([one.spent for one in found])) / recorded.grid,
        "regret": float(np.mean(regrets)),
        "within_noise": float(np.mean([regret <= recorded.noise for regret in regrets])),
        "weighted_tau": float(np.mean([recorded.tau(one.ranking) for one in found])),
    }  # fmt: skip


def of_replay(recorded: Recorded) -> dict[str, Any]:
    """Of the default strategy and of Mordal's, at a twelfth of the grid."""
    default, other = replayed(recorded, "halving", BUDGET, DRAWS), replayed(recorded, "mordal", BUDGET, DRAWS)
    assert default is not None and other is not None
    # The least samples with so little regret, over many draws: those of others over those of Mordal's.
    regret = mean_regret(recorded, STRATEGIES["mordal"], BUDGET, MANY)
    own = least_budget(recorded, STRATEGIES["mordal"], regret, MANY)
    least = {name: least_budget(recorded, STRATEGIES[name], regret, MANY) for name in ("halving", "random")}
    return {
        "samples_over_grid": default["spent"],
        "best_pair_found": default["within_noise"],
        "weighted_kendall_tau": default["weighted_tau"],
        "mordal_best_pair_found": other["within_noise"],
        "mordal_weighted_kendall_tau": other["weighted_tau"],
        "samples_over_halving": own / least["halving"],
        "samples_over_random": own / least["random"],
        "default": "halving",
    }


def of_training() -> dict[str, Any]:
    """The example's search from an empty cache; a short one that finds its programs there, once killed and taken up."""
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        cold = searched(home, "cold", samples=0, mesh="pp=2")
        whole = searched(home, "whole")
        searched(home, "killed", killed=KILLED)
        resumed = searched(home, "killed")
    counts, cached = cold["counts"], whole["counts"]["compile_seconds"]
    return {
        "captures": counts["captures"],
        "captures_at_most": 6 + 4,
        "pairs": len(cold["rows"]),
        "encoder_passes_over_samples": max(counts["encoder_passes"].values()),
        "compile_share": counts["compile_share"],
        "compile_seconds": counts["compile_seconds"],
        "compile_seconds_from_cache": cached,
        "train_and_score_seconds": counts["train_seconds"] + counts["score_seconds"],
        "samples_of_the_search": counts["samples"],
        "killed_and_resumed_equal": curves(resumed) == curves(whole)
        and max(resumed["counts"]["encoder_passes"].values()) == 1.0,
    }


def searched(home: Path, name: str, samples: int = SAMPLES, killed: int = 0, mesh: str = "") -> dict[str, Any]:
    """A search in a process of its own. samples: of a training to the end, 0: as in the example. killed: the step that
    it does not live to see; mesh: for which it plans.
    """
    environment = {**cores.environment(), "CSC_CACHE": "1", "CSC_CACHE_DIR": str(home / "cache")}
    command = [sys.executable, "-c", SEARCH, str(EXAMPLE), str(home / name), str(samples), str(killed), mesh]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=home)
    if killed:
        assert done.returncode == -signal.SIGKILL, done.stderr
        return {}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def curves(result: Mapping[str, Any]) -> list[Any]:
    """Pairs in order, with every score that they had."""
    return [(row["encoder"], row["llm"], row["curve"], row["score"]) for row in result["rows"]]


if __name__ == "__main__":
    main()
