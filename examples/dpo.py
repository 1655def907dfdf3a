"""DPO with TRL: a Llama, read from a checkpoint on disk, learns to prefer right sums to wrong ones.

    python examples/dpo.py --eager                     # the script as it was: TRL's DPOTrainer
    python examples/dpo.py                             # the same steps, compiled; both ranks in this process
    torchrun --nproc-per-node 2 examples/dpo.py        # one process for each stage

`pip install trl==1.16.0 -e ".[hf]"` brings all that is imported here; a CPU will do.

TRL's trainer reads and collates the data; what it computes in `compute_loss` is the forward of a module here,
`Preferences`: the policy that trains and the frozen reference beside it are one model, so csc cuts both into stages and
gives the reference no backward. `CompiledTrainer` in place of DPOTrainer trains it. Losses are those of TRL.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import Dataset
from sums import base_checkpoint, sums, tokenizer
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

from csc.integrations.hf import CompiledTrainer, compile_for

BETA = 0.1


def pretrained() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(base_checkpoint())


class Preferences(nn.Module):
    """The sigmoid loss of DPO (arXiv 2305.18290, equation 7), as TRL computes it."""

    def __init__(self, policy: nn.Module, reference: nn.Module, beta: float) -> None:
        super().__init__()
        self.policy, self.reference, self.beta = policy, reference.requires_grad_(False), beta

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Each (pair, 2, length): the chosen answer, and the rejected one."""
        ids, present, counted = (x.flatten(0, 1) for x in (input_ids, attention_mask, completion_mask[..., 1:]))

        def of(model: nn.Module) -> torch.Tensor:
            logits = model(input_ids=ids, attention_mask=present, use_cache=False).logits[:, :-1]
            each = F.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            return (each * counted).sum(-1).unflatten(0, (-1, 2))

        with torch.no_grad():
            expected = of(self.reference)
        gained = of(self.policy) - expected
        return {"loss": -F.logsigmoid(self.beta * (gained[:, 0] - gained[:, 1])).mean()}


class Pairs:
    """TRL's batch has all chosen answers before all rejected ones; here a sample is a pair."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.collator(samples)
        return {name: torch.stack(value.chunk(2), dim=1) for name, value in batch.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="DPO of a small Llama under TRL, eager or compiled.")
    parser.add_argument("--eager", action="store_true", help="TRL's own trainer, without csc")
    parser.add_argument("--output", default="build/dpo", help="where logs go (default: build/dpo)")
    given = parser.parse_args()
    arguments = DPOConfig(
        given.output, per_device_train_batch_size=8, max_steps=6, learning_rate=1e-2, logging_steps=1, beta=BETA,
        report_to="none", save_strategy="no", seed=0, use_cpu=not torch.cuda.is_available(), bf16=False,
    )  # fmt: skip
    data = Dataset.from_list(sums(wrong=True))
    trainer = DPOTrainer(
        pretrained(), ref_model=pretrained(), args=arguments, train_dataset=data, processing_class=tokenizer()
    )
    if not given.eager:
        pairs, samples = Pairs(trainer.data_collator), trainer.train_dataset
        model = Preferences(pretrained(), pretrained(), BETA)
        example = pairs([samples[index] for index in range(8)])
        compiled = compile_for(model, arguments, mesh="pp=2", example=example, microbatches=2)
        arguments.remove_unused_columns = False  # the collator reads columns that are no entries of the model
        trainer = CompiledTrainer(compiled, args=arguments, train_dataset=samples, data_collator=pairs)
    trainer.train()
    if not given.eager:
        trainer.compiled.gather().policy.save_pretrained(f"{given.output}/policy")


if __name__ == "__main__":
    main()
