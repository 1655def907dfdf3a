"""One rank of the test that trains with HF's Trainer on two processes, with a checkpoint on the way.

main(directory, mesh, zero)
"""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

import csc
from csc.integrations.hf import CompiledTrainer
from tests.compiler.peft_models import llama, text_batch
from tests.compiler.test_integrations import ROWS, Losses, arguments, collate, samples


def main(directory: Path, mesh: str, zero: int) -> None:
    log, again = Losses(), Losses()
    changes = {"train_sampling_strategy": "random", "save_strategy": "steps", "save_steps": 2}
    for seen, checkpoint in ((log, None), (again, str(directory / "checkpoint-2"))):
        compiled = csc.compile(llama(), mesh=mesh, example=text_batch(ROWS), microbatches=2, zero=zero)
        trainer = CompiledTrainer(
            compiled,
            arguments(directory, **changes),
            train_dataset=samples(),
            data_collator=collate,
            callbacks=[seen],
        )
        trainer.train(resume_from_checkpoint=checkpoint)
    rows = {len(next(iter(trainer.get_train_dataloader()))["input_ids"])}
    assert rows == {ROWS // compiled.dp_size}, "each process loads its replica's share"
    evaluated = trainer.evaluate(samples()[:ROWS])
    assert again.seen == log.seen[2:], (again.seen, log.seen)
    if dist.get_rank() == 0:
        result = {"losses": log.seen, "evaluated": evaluated["eval_loss"]}
        (directory / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()
