"""One rank of the test that compares CompiledTrainer on two processes with the Trainer on one.

main(directory, mesh)
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

import csc
from csc.integrations.hf import CompiledTrainer
from tests.compiler.test_trainer_parity import (
    TWO,
    Stream,
    arguments,
    collate,
    counted,
    model,
    samples,
)


def main(directory: Path, mesh: str) -> None:
    found = {}
    for name, (kind, changes) in TWO.items():
        example = collate(samples(4))
        if name == "items passed":
            example["num_items_in_batch"] = torch.tensor(10)
        own = csc.compile(model(kind), mesh=mesh, example=example)
        trainer = CompiledTrainer(
            own, arguments(directory / name, per_device_train_batch_size=4, **changes),
            train_dataset=Stream(samples(14)) if name == "stream" else samples(15), eval_dataset=samples(7),
            data_collator=collate, compute_metrics=counted,
        )  # fmt: skip
        trainer.train()
        history = [
            {k: v for k, v in entry.items() if isinstance(v, (int, float))} for entry in trainer.state.log_history
        ]
        found[name] = {
            "history": history, "streamed": trainer.evaluate(Stream(samples(7)))["eval_loss"],
            "predictions": trainer.predict(samples(7)).predictions.argmax(-1).tolist(),
            "weight": own.gather().get_parameter("lm_head.weight").tolist(), "flos": trainer.state.total_flos,
        }  # fmt: skip
    if dist.get_rank() == 0:
        (directory / "result.json").write_text(json.dumps(found))
    dist.destroy_process_group()
