"""Documents packed into one row, said by positions that start again: no token sees another document."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from tests.models.hf import IGNORED, VOCABULARY, llama_config

LENGTHS = (20, 3, 30, 1)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(3))


def batch(samples: int = 2, length: int = 57, documents: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    """Counting documents of these lengths, again and again; the last is cut. No label for the first token of each."""
    lengths: list[int] = []
    while sum(lengths) < length:
        lengths.append(min(documents[len(lengths) % len(documents)], length - sum(lengths)))
    positions = torch.cat([torch.arange(one) for one in lengths]).expand(samples, -1).contiguous()
    document = (positions == 0).cumsum(1)
    ids = 1 + (7 * document + positions + torch.arange(samples)[:, None]) % (VOCABULARY - 5)
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, IGNORED)}
