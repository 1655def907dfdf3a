"""A small language model whose keys and values are read in other ways than by attention alone.

KeysRead("pieces")      what goes on with columns of a head: activations, a norm over all of them, a weight for each
KeysRead("heads")       what needs heads: swapped halves, a norm over a head, a gate
KeysRead("summed")      a sum over heads        KeysRead("beside")      each key head beside its queries in one matrix
KeysRead("scaled")      a number for each head
"""

from __future__ import annotations

import torch
from torch import nn

KINDS = ("pieces", "heads", "summed", "beside", "scaled")
HEADS, KEYS, WIDTH, HIDDEN, WORDS = 8, 2, 6, 48, 100


class KeysLayer(nn.Module):
    """Attention and an MLP."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, groups = kind, HEADS // KEYS
        self.norm = nn.LayerNorm(HIDDEN)
        if kind == "beside":
            self.qkv = nn.Linear(HIDDEN, KEYS * (groups + 2) * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(HIDDEN, heads * WIDTH) for heads in (HEADS, KEYS, KEYS))
        if kind == "pieces":
            self.columns = nn.Parameter(torch.rand(KEYS * WIDTH) + 0.5)
        if kind == "heads":
            self.width = nn.LayerNorm(WIDTH)
        if kind == "scaled":
            self.scale = nn.Parameter(torch.rand(KEYS) + 0.5)
        self.o, self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 96), nn.Linear(96, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, _ = x.shape
        q, k, v = self.projected(x)
        if self.kind == "heads":
            low, high = self.width(k).chunk(2, -1)
            k, v = torch.cat([high, low], -1), v * torch.sigmoid(x.mean(-1))[:, None, :, None]
        if self.kind == "scaled":
            v = v * self.scale[:, None, None]
        read = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if self.kind == "summed":
            x = x + k.sum(1)[..., :1]
        x = x + self.o(read.transpose(1, 2).reshape(samples, tokens, HIDDEN))
        return x + self.down(self.up(x).relu())

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, heads, T, width] of queries, keys and values."""
        samples, tokens, _ = x.shape
        y = self.norm(x)
        if self.kind == "beside":
            both = self.qkv(y).view(samples, tokens, KEYS, -1, WIDTH)
            q, k, v = both[..., :-2, :].reshape(samples, tokens, HEADS, WIDTH), both[..., -2, :], both[..., -1, :]
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k, v = self.q(y), self.k(y), self.v(y)
        if self.kind == "pieces":
            k = k * torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + 1e-6) * self.columns
            v = nn.functional.gelu(v + self.columns) * k
        q, k, v = (one.view(samples, tokens, -1, WIDTH).transpose(1, 2) for one in (q, k, v))
        return q, k, v


class KeysRead(nn.Module):
    """Two such layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, WORDS)
        self.layers = nn.ModuleList([KeysLayer(kind) for _ in range(2)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
