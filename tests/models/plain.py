"""A multimodal model in plain PyTorch with every shape of wiring that breaks pipelines.

Vision and audio encoders beside each other; DeepStack: features of two vision layers are added inside the language
model; cross-attention from two language layers to the audio; one block used twice; tied embeddings.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS = 64, 32, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor, causal: bool) -> torch.Tensor:
        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.view(*t.shape[:2], HEADS, -1).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(memory)), heads(self.value(memory))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, causal: bool, crosses: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.cross_norm = nn.LayerNorm(WIDTH) if crosses else None
        self.cross = Attention() if crosses else None

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, self.causal)
        if self.cross is not None and self.cross_norm is not None and memory is not None:
            hidden = hidden + self.cross(self.cross_norm(hidden), memory, causal=False)
        return hidden + self.mlp(hidden)


class VisionTower(nn.Module):
    """Patches of an 8 x 8 image; returns its last features and those of every layer (DeepStack)."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=4, stride=4)
        self.layers = nn.ModuleList(Block(causal=False) for _ in range(layers))

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        hidden = self.patches(pixels).flatten(2).transpose(1, 2)
        features = []
        for layer in self.layers:
            hidden = layer(hidden)
            features.append(hidden)
        return hidden, features


class AudioTower(nn.Module):
    """One weight-sharing block used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Linear(6, WIDTH)
        self.block = Block(causal=False)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(self.frames(sound)))


class LanguageModel(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Block(causal=True, crosses=index % 2 == 1) for index in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(
        self, tokens: torch.Tensor, image: torch.Tensor, deep: list[torch.Tensor], sound: torch.Tensor
    ) -> torch.Tensor:
        hidden = torch.cat([image, self.embed(tokens)], dim=1)
        hidden = hidden + self.positions(torch.arange(hidden.shape[1], device=tokens.device))
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, sound)
            if index < len(deep):
                patches = deep[index].shape[1]
                hidden = torch.cat([hidden[:, :patches] + deep[index], hidden[:, patches:]], dim=1)
        return self.norm(hidden)


class PlainMLLM(nn.Module):
    """Returns (loss,) for labels aligned with tokens (-100 is ignored)."""

    def __init__(self, tied: bool = True, vision_layers: int = 3, text_layers: int = 4) -> None:
        super().__init__()
        self.vision = VisionTower(vision_layers)
        self.audio = AudioTower()
        self.vision_projector = nn.Linear(WIDTH, WIDTH)
        self.deep_projector = nn.Linear(WIDTH, WIDTH)
        self.audio_projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.language = LanguageModel(text_layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.language.embed.weight

    def forward(self, tokens: torch.Tensor, pixels: torch.Tensor, sound: torch.Tensor, labels: torch.Tensor) -> tuple:
        image, features = self.vision(pixels)
        deep = [self.deep_projector(feature) for feature in features[:2]]
        hidden = self.language(tokens, self.vision_projector(image), deep, self.audio_projector(self.audio(sound)))
        logits = self.head(hidden[:, image.shape[1] :])
        return (F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100),)


def plain(tied: bool = True) -> PlainMLLM:
    torch.manual_seed(0)
    return PlainMLLM(tied)


def plain_batch(samples: int = 2, length: int = 10) -> dict[str, torch.Tensor]:
    """Counting tokens, striped images, waves; sample i has i ignored labels more than the first."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randint(0, VOCABULARY - length, (samples, 1), generator=generator)
    tokens = start + torch.arange(length)
    labels = tokens.clone()
    for sample in range(samples):
        labels[sample, : 2 + sample] = -100
    stripes = torch.sin(torch.arange(8.0) * torch.arange(1.0, samples + 1)[:, None])
    pixels = stripes[:, None, None, :].expand(samples, 1, 8, 8) + 0.1 * torch.randn(
        samples, 1, 8, 8, generator=generator
    )
    sound = torch.cos(torch.arange(5.0)[:, None] * torch.arange(1.0, 7.0)) + torch.randn(
        samples, 5, 6, generator=generator
    )
    return {"tokens": tokens, "pixels": pixels, "sound": sound, "labels": labels}
