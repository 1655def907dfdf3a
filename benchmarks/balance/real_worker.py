"""One rank of the real part. python -m benchmarks.balance.real_worker SET PROFILE.toml STEPS REPEATS RESULT.json"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

import csc
from benchmarks.balance.real_model import MULTIPLE, STEP, Samples, collate, compiled, together
from benchmarks.pipeline.real import makespan
from csc.balance.loader import Decider
from csc.planning.assign.step import Floats, Groups, SampleCosts
from csc.simulation.timeline import Timeline

SEED = 7
PROCESSOR = SimpleNamespace(perf_counter=time.thread_time)  # a clock that stands still while others run


def main(name: str, table: str, steps: int, repeats: int, result: Path) -> None:
    """The same samples balanced and at random, in turns; seconds of each step that was made, and as predicted."""
    torch.set_num_threads(1)
    samples = Samples(name)
    model = compiled(samples, hardware=table)
    loader = csc.balanced(
        samples, model, lengths=samples.lengths, batch_size=STEP, collate=collate, multiple=MULTIPLE, shuffle=True,
        seed=SEED, drop_last=True,
    )  # fmt: skip
    random, rows = np.random.default_rng(SEED), []
    for number in range(steps):
        own = random.choice(len(samples), STEP, replace=False).tolist()
        ways = _ways(loader.decider, own)
        batches = {way: [together(samples, group) for group in groups] for way, groups in ways.items()}
        for batch in batches.values():
            model.compile_for(batch)
            model.train_step(batch)
        made: dict[str, list[Timeline]] = {way: [] for way in ways}
        busy: dict[str, list[Timeline]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, batch in batches.items():
                made[way].append(model.timeline(batch))
                with patch("csc.runtime.executor.time", PROCESSOR):
                    busy[way].append(model.timeline(batch))
        step = loader.decider.step(own)
        for way, groups in ways.items():
            features = step.features([[own.index(sample) for sample in group] for group in groups])
            rows.append({
                "lengths": name, "step": number, "way": way, "predicted": step.seconds_of(features),
                "runs": list(map(makespan, made[way])), "undisturbed": _undisturbed(step, features, busy[way]),
            })  # fmt: skip
    if dist.get_rank() == 0:
        result.write_text(json.dumps(rows), encoding="utf-8")


def _ways(decider: Decider, own: list[int]) -> dict[str, Groups]:
    random = np.random.default_rng(SEED).permutation(own)
    ours = decider.decide(own).groups[0]
    return {"csc": ours, "random": [part.tolist() for part in np.array_split(random, decider.microbatches)]}


def _undisturbed(step: SampleCosts, features: Floats, busy: Sequence[Timeline]) -> float:
    """Seconds of the step if each action took what it took of the processor: the median of several times."""
    work = step.work(features)
    seconds = np.zeros((4 * len(step.placement), step.microbatches, 1))
    for events in zip(*(chain(*one.ranks) for one in busy), strict=True):
        action = events[0].action
        if not action.computes:
            continue
        took = statistics.median(event.seconds for event in events)
        lane = 3 * action.stage + (1 if action.kind == "BW" else "FBW".index(action.kind))
        seconds[lane, action.microbatch] = took
        if action.kind == "BW":
            seconds[work.fused(action.stage), action.microbatch] = took
    return float(step.fixed_orders.makespans(seconds, step.wires(features))[0])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
