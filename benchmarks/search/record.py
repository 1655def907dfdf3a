"""Learning curves of all pairs of a task, up to their ends, for strategies to be replayed on.

    python -m benchmarks.search.record DIRECTORY [--task "rows of two"] [--seeds 0 1 2] [--samples 2048]
    python -m benchmarks.search.record DIRECTORY --seeds --join benchmarks/search/data/digits.json

Tasks are that of examples/search/digits.py, and the same with other parts.

writes DIRECTORY/curves-SEED.json: for each pair its scores after 8, 16, 32, ... samples, and after each of the first
ones the distances of encoders, and of language models behind each encoder. A seed decides projectors and the order of
samples; encoders, language models, data and held-out rows are the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from csc.model_search.candidates import Candidates, Parts
from csc.model_search.ledger import Ledger
from csc.model_search.strategies import Grid, Rung, Rungs, Seen, Space, drive
from csc.model_search.trials import PairTrials, Task, TrialSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "search"
# By name, what stands in the place of the example's own constants: on the first task strategies are reported, on the
# others they were chosen.
TASKS: Mapping[str, Mapping[str, Any]] = {
    "digits": {},
    "other parts": {
        "SEED": 17,
        "ENCODERS": {
            "v5": (32, 5), "v20": (32, 20), "v50": (32, 50), "v120": (32, 120), "v400": (32, 400), "w150": (64, 150),
        },
        "DECODERS": {
            "mid": (48, 2, 0), "mid-text": (48, 2, 100), "small-much": (32, 1, 300), "deep-little": (32, 3, 40),
        },
    },
    "rows of two": {
        "SEED": 41, "ROW": 2,
        "ENCODERS": {
            "v0": (32, 0), "v15": (32, 15), "v60": (32, 60), "v200": (32, 200), "w30": (64, 30), "w120": (64, 120),
        },
        "DECODERS": {"two": (32, 2, 0), "two-text": (32, 2, 60), "wide": (64, 1, 0), "wide-text": (64, 1, 200)},
    },
}  # fmt: skip
SAMPLES, BATCH = 2048, 8
APART = 8  # the share of a training up to which language models are compared


@dataclass(frozen=True)
class EveryRung(Grid):
    """All pairs, twice as far at each rung."""

    name: ClassVar[str] = "every rung"

    def rungs(self, space: Space, seed: int) -> Rungs:
        """From one batch to the end."""
        samples = space.least
        while samples < space.full:
            yield Rung(samples, space.pairs, "")
            samples *= 2
        return (yield from super().rungs(space, seed))


def example(task: str, directory: Path) -> dict[str, Any]:
    """The arguments that the example gives to csc.search, with the constants of a task. directory: for its parts."""
    sys.path.insert(0, str(EXAMPLE))
    import digits

    for name, value in {**TASKS[task], "PARTS": directory / "parts"}.items():
        setattr(digits, name, value)
    return digits.search()


def trials_of(given: dict[str, Any], directory: Path, seed: int) -> PairTrials:
    """Of the example, as csc.search makes them."""
    candidates = Candidates(
        given["encoders"], given["llms"], Parts("mlp", given["placeholders"]), directory / "features"
    )
    settings = TrialSettings(
        BATCH, ("vision_encoder",), given["optimizer"], None, 1.0, seed, 1e9, {"mesh": "pp=1", "check": False}
    )
    ledger = Ledger(directory / f"ledger-{seed}.jsonl", {"seed": seed})
    task = Task(given["data"], given["batch"], given["score"])
    return PairTrials(candidates, task, settings, ledger, directory / f"seed-{seed}")


def record(directory: Path, task: str, seed: int, samples: int) -> dict[str, Any]:
    """Curves and distances of one seed."""
    given = example(task, directory)
    trials = trials_of(given, directory, seed)
    apart: dict[str, dict[str, Any]] = {}

    def train(rung: Rung, seen: Seen) -> dict[Any, float | None]:
        shutil.rmtree(directory / f"seed-{seed}" / "probe", ignore_errors=True)  # of the rung before
        scores = {pair: trials.train(pair, rung.samples) for pair in sorted(rung.pairs, key=lambda pair: pair[1])}
        if rung.samples <= samples // APART:
            apart[str(rung.samples)] = {name: trials.llm_distances(name).tolist() for name in given["encoders"]}
        print(f"seed {seed}: {rung.samples} samples", flush=True)
        return scores

    count = len(given["encoders"]) * len(given["llms"])
    space = Space(tuple(given["encoders"]), tuple(given["llms"]), samples, samples * count, BATCH)
    _, seen = drive(EveryRung(), space, seed, train)
    assert not seen.failed, trials.ledger.records("failed")
    trained = trials.ledger.records("trial")
    return {
        "seed": seed, "samples": samples, "batch": BATCH, "encoders": list(given["encoders"]),
        "llms": list(given["llms"]), "seconds": sum(one["seconds"] for one in trained),
        "encoder_distances": trials.encoder_distances().tolist(),
        "llm_distances": apart, "curves": {" x ".join(pair): curve for pair, curve in seen.curves.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--task", choices=list(TASKS), default="digits")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(6)))
    parser.add_argument("--join", type=Path, help="write what DIRECTORY has of all seeds to this file")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for seed in given.seeds:
        file = given.directory / f"curves-{seed}.json"
        if not file.is_file():
            content = json.dumps(record(given.directory, given.task, seed, given.samples))
            file.write_text(content + "\n")
    if given.join is not None:
        seeds = [json.loads(file.read_text()) for file in sorted(given.directory.glob("curves-*.json"))]
        given.join.write_text(json.dumps(rounded(seeds)) + "\n")


def rounded(value: Any) -> Any:
    """Numbers with five digits behind the point, which is a hundredth of their noise and less."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 5) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
