"""Small models that are captured in a second: one of every backward op with an output mask, and a deep text model."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, VOCABULARY = 16, 32


class Body(nn.Module):
    """Convolution, embedding, layer norm and linear in one region."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, WIDTH, kernel_size=3, padding=1)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        mixed = self.conv(hidden).transpose(1, 2) + self.embed(tokens)
        return self.linear(F.gelu(self.norm(mixed)))


class Mixed(nn.Module):
    """A projection, the body, a head; labels per position."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv1d(3, 4, kernel_size=1)
        self.body = Body()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, signal: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.project(signal), tokens))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def mixed_batch(samples: int = 2, length: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    signal = torch.randn(samples, 3, length, generator=generator)
    return {"signal": signal, "tokens": tokens, "labels": tokens.roll(1, dims=1)}


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)


class DecoderLayer(nn.Module):
    """As Llama's: rotary positions, causal attention, SwiGLU, no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.output_norm = RMSNorm(), RMSNorm()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def turn(t: torch.Tensor) -> torch.Tensor:
            first, second = t.chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

        samples, length, _ = hidden.shape
        q, k, v = self.qkv(self.input_norm(hidden)).view(samples, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.output_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)


class TextModel(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(layers))
        self.norm = RMSNorm()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = positions[:, None] / 100.0 ** torch.linspace(0, 1, WIDTH // 4, device=tokens.device)
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, angles.cos(), angles.sin())
        logits = self.lm_head(self.norm(hidden))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def text(layers: int) -> TextModel:
    torch.manual_seed(0)
    return TextModel(layers)


def text_batch(samples: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    tokens = (torch.arange(length) + 3 * torch.arange(samples)[:, None]) % VOCABULARY
    labels = tokens.clone()
    for sample in range(samples):
        labels[sample, : 1 + sample % 3] = -100
    return {"tokens": tokens, "labels": labels}


class DroppedLayer(nn.Module):
    """Attention and a linear, each followed by dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Dropout(0.2), nn.Dropout(0.4)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(hidden)).view(*hidden.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.first(self.out(mixed.transpose(1, 2).flatten(2)))
        return hidden + self.second(F.gelu(self.mlp(hidden)))


class Dropped(nn.Module):
    """A text model with dropout everywhere but in its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList(DroppedLayer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.embed(tokens))
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def dropped() -> Dropped:
    torch.manual_seed(0)
    return Dropped()
