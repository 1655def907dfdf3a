"""Encoders, linear projectors and a language model as one module that returns the loss on its text.

vision, audio     a Hugging Face encoder; its output as [1, positions, width]
*_projector       a linear layer from an encoder's width to the language model's
llm               a Hugging Face decoder over features and text, and a head on the text

build(configuration, depths) -> MultimodalModel            batch(configuration) -> one microbatch
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.mllm import experts
from benchmarks.mllm.configurations import TEXT_TOKENS, Configuration

ENCODERS = {"vision": "pixel_values", "audio": "input_features"}  # and what each is fed


class Encoder(nn.Module):
    """`tower` run on tiles, the first `dropped` positions of each left out and the tiles laid end to end; `merged`
    neighbouring positions become one that is as many times as wide.
    """

    def __init__(self, tower: nn.Module, dropped: int, merged: int) -> None:
        super().__init__()
        self.tower = tower
        self.dropped = dropped
        self.merged = merged

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """[1, positions, width] of [tiles, ...]."""
        states = self.tower(tiles).last_hidden_state[:, self.dropped :]
        return states.reshape(1, -1, states.shape[-1] * self.merged)


class LanguageModel(nn.Module):
    """A decoder and its head. Features stand before the text; the loss is that of predicting the text."""

    decoder: Any

    def __init__(self, decoder: nn.Module, width: int, vocabulary: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, features: list[torch.Tensor]) -> torch.Tensor:
        """The mean loss. input_ids and labels: [1, text]; features: [1, positions, width] each."""
        text = self.decoder.get_input_embeddings()(input_ids)
        states = self.decoder(inputs_embeds=torch.cat([*features, text], dim=1)).last_hidden_state
        logits = self.head(states[:, -input_ids.shape[1] : -1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


class MultimodalModel(nn.Module):
    """The whole model: `encoders` by name with the width of what they give, and a language model of `width`."""

    vision: Encoder
    vision_projector: nn.Linear
    audio: Encoder
    audio_projector: nn.Linear

    def __init__(self, encoders: Mapping[str, tuple[Encoder, int]], llm: LanguageModel, width: int) -> None:
        super().__init__()
        for name, (encoder, given) in encoders.items():
            self.add_module(name, encoder)
            self.add_module(f"{name}_projector", nn.Linear(given, width))
        self.llm = llm

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss. pixel_values: [tiles, 3, height, width]; input_features: [1, mels, frames]."""
        features = []
        if pixel_values is not None:
            features.append(self.vision_projector(self.vision(pixel_values)))
        if input_features is not None:
            features.append(self.audio_projector(self.audio(input_features)))
        return self.llm(input_ids, labels, features)


def build(configuration: Configuration, depths: Mapping[str, int]) -> MultimodalModel:
    """The model with `depths[name]` layers in each component, weights as its classes leave them."""
    experts.register()
    encoders = {
        name: (Encoder(part.build(depths[name]), part.dropped, part.merged), part.width)
        for name, part in configuration.components.items()
        if name in ENCODERS
    }
    part = configuration.components["llm"]
    llm = LanguageModel(part.build(depths["llm"]), part.width, part.sizes["vocab_size"])
    return MultimodalModel(encoders, llm, part.width)


def batch(configuration: Configuration, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """One microbatch of zeros: capture reads shapes alone."""
    text = torch.zeros(1, TEXT_TOKENS, dtype=torch.int64)
    inputs = {
        ENCODERS[name]: torch.zeros(part.input, dtype=dtype)
        for name, part in configuration.components.items()
        if name in ENCODERS
    }
    return {"input_ids": text, "labels": text.clone(), **inputs}
