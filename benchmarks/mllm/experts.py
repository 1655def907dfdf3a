"""A mixture-of-experts block with fixed sizes, for capture.

Hugging Face's implementations either loop over the experts that were hit (their number depends on values), copy a
weight matrix for every token, or call a kernel that PyTorch's FLOP counter does not know. Here every expert gets the
same number of tokens: what a balanced router gives it (Switch Transformer, Fedus et al. 2021, capacity factor 1).
FLOPs are those of the top-k experts of each token, parameters, gradients and reads those of all experts.

    register()        makes the implementation known to transformers as "balanced"
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

BALANCED = "balanced"


def register() -> None:
    """Make `experts_implementation = "balanced"` known. Doing it again changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(BALANCED, balanced_experts)


def balanced_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts' output. hidden_states: [tokens, width]; top_k_index, top_k_weights: [tokens, k].

    Pairs of token and expert are sorted by expert and dealt out in equal shares, the last one padded with zeros; with
    a router that is in balance every pair goes to the expert that it asked for.
    """
    tokens, width = hidden_states.shape
    chosen = top_k_index.shape[-1]
    experts: int = self.gate_up_proj.shape[0]
    share = (tokens * chosen + experts - 1) // experts
    order = top_k_index.reshape(-1).argsort()
    rows = nn.functional.pad(hidden_states[order // chosen], (0, 0, 0, share * experts - tokens * chosen))
    gate, up = torch.bmm(rows.view(experts, share, width), self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    made = torch.bmm(self.act_fn(gate) * up, self.down_proj.transpose(1, 2)).view(-1, width)
    back = made[order.argsort()].view(tokens, chosen, width)
    return (back * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)
