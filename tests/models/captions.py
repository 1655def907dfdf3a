"""A small model of images, sounds and text in float64 throughout, each of which a batch may lack."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, IMAGE, AUDIO = 30, 8, 29, 28

Batch = dict[str, torch.Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(hidden).tanh())


class Encoder(nn.Module):
    """Rows of numbers; `each` of them become a token."""

    def __init__(self, numbers: int, each: int) -> None:
        super().__init__()
        self.row, self.layers, self.each = nn.Linear(numbers, WIDTH), nn.ModuleList([Layer(), Layer()]), each

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.row(rows)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.unflatten(0, (-1, self.each)).mean(1)


class Captions(nn.Module):
    """Images in patches, of which four are a token; sounds in slots of six frames, of which three are a token."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(image_token_id=IMAGE, audio_token_id=AUDIO)
        self.vision, self.audio = Encoder(5, 4), Encoder(3, 3)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers = nn.ModuleList([Layer(), Layer()])
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = self.embed(input_ids)
        if pixel_values is not None:
            hidden = hidden.masked_scatter((input_ids == IMAGE)[..., None], self.vision(pixel_values))
        if input_features is not None:
            sounds = self.audio(input_features.flatten(0, 1))
            hidden = hidden.masked_scatter((input_ids == AUDIO)[..., None], sounds)
        for layer in self.layers:
            hidden = layer(hidden + hidden.cumsum(1) / 8)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch(images: Sequence[Sequence[int]], sounds: Sequence[int] = (), length: int = 14) -> Batch:
    """images: for each sample the numbers of tokens of its images; sounds: how many sounds each has."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 25, (len(images), length), generator=generator)
    heard = list(sounds) or [0] * len(images)
    for sample, own in enumerate(images):
        tokens = [IMAGE] * sum(own) + [1] + [AUDIO] * 2 * heard[sample]
        ids[sample, 1 : 1 + len(tokens)] = torch.tensor(tokens)
    labels = ids.masked_fill((ids == IMAGE) | (ids == AUDIO), -100)
    labels[0, -3:] = -100
    found = {"input_ids": ids, "labels": labels}
    counts = [tokens for own in images for tokens in own]
    if counts:
        found["pixel_values"] = torch.randn(4 * sum(counts), 5, generator=generator).double()
        found["image_grid_thw"] = torch.tensor([[1, 2, 2 * tokens] for tokens in counts])
    if sum(heard):
        found["input_features"] = torch.randn(sum(heard), 6, 3, generator=generator).double()
    return found
