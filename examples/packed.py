"""Long rows of packed documents on four context-parallel ranks.

csc verify examples/packed.py:llama                    every gradient against eager PyTorch
csc mask causal:300+80+500+144 --ranks 4 --block 32    which rank computes which tile of one such row
csc compile examples/packed.py:llama -o build/packed   look for plan.attention in layers/llama_decoder_layer.py
python examples/packed.py                              ten steps, all ranks in this process
torchrun --nproc-per-node 4 examples/packed.py         the same steps, one rank a process

Every step packs other documents. The program stays as it is: masks, and which rank gets which tokens, are data of the
batch.
"""

from __future__ import annotations

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import csc

TOKENS = 1024


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """One row of documents of random lengths, each counting from another number; positions start again in each."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(20, 400, (64,), generator=generator)
    ends = lengths.cumsum(0)
    document = torch.searchsorted(ends, torch.arange(TOKENS), right=True)
    starts = torch.cat([ends.new_zeros(1), ends])[document]
    positions = torch.arange(TOKENS) - starts
    ids = 1 + (7 * document + positions) % 90
    labels = ids.masked_fill(positions == 0, -100)  # nothing comes before a document's first token
    return {"input_ids": ids[None], "position_ids": positions[None], "labels": labels[None]}


@csc.compile(mesh="cp=4", example=batch_of(0))
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
    return LlamaForCausalLM(config)


def say(text: str) -> None:
    """Under torchrun the first rank alone prints."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


if __name__ == "__main__":
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-2)
    for step in range(10):
        loss = llama.train_step(batch_of(step))
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step}: loss {loss:.4f}")
