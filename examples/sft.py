"""Supervised fine-tuning with TRL: a Llama, read from a checkpoint on disk, learns sums as conversations.

    python examples/sft.py --eager                     # the script as it was: TRL's SFTTrainer
    python examples/sft.py                             # the same steps, compiled; both ranks in this process
    torchrun --nproc-per-node 2 examples/sft.py        # one process for each stage

`pip install trl==1.16.0 -e ".[hf]"` brings all that is imported here; a CPU will do.

What csc needs are two lines: the import, and `compiled_trainer(trainer, mesh="pp=2")`. It takes over the trainer's
model, arguments, data and collator, and compares TRL's loss with the model's own. Losses are those of TRL. Evaluation
runs the stages, too: no process has the whole model.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from sums import base_checkpoint, sums, tokenizer
from trl import SFTConfig, SFTTrainer

from csc.integrations.hf import compiled_trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="Supervised fine-tuning of a small Llama under TRL.")
    parser.add_argument("--eager", action="store_true", help="TRL's own trainer, without csc")
    parser.add_argument("--output", default="build/sft", help="where checkpoints go (default: build/sft)")
    given = parser.parse_args()
    rows = Dataset.from_list(sums()).train_test_split(16, seed=0)
    arguments = SFTConfig(
        given.output, per_device_train_batch_size=8, per_device_eval_batch_size=8, max_steps=6, learning_rate=1e-2,
        logging_steps=1, eval_strategy="steps", eval_steps=3, report_to="none", save_strategy="no", seed=0,
        use_cpu=not torch.cuda.is_available(), bf16=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        base_checkpoint(),
        args=arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=tokenizer(),
    )
    if not given.eager:
        trainer = compiled_trainer(trainer, distributed_evaluation=True, mesh="pp=2", microbatches=2)
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
