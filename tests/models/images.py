"""Batches of the models in benchmarks.coverage with images of other sizes and numbers than the example's."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from benchmarks.coverage.models import grids, signal, words

Batch = dict[str, torch.Tensor]


def grids_batch(sizes: list[list[int]], width: int) -> Batch:
    """Of Qwen-VL and its like: frames, height and width of each image in patches of `width` numbers. All images but the
    last are in the first sample.
    """
    tokens = [t * h * w // 4 for t, h, w in sizes]
    return grids(words([tokens[:-1], tokens[-1:]], length=48), sizes, width)


def tiles_batch(model: Any, sizes: list[list[int]]) -> Batch:
    """Of LLaVA-NeXT and its like: an image of each height and width, cut into tiles as a processor cuts them, with as
    many placeholders as the model makes rows.
    """
    config, tile = model.config, model.config.vision_config.image_size
    counts = [image_size_to_num_patches(size, config.image_grid_pinpoints, tile) for size in sizes]
    tokens = (tile // config.vision_config.patch_size) ** 2
    options = {"vision_feature_select_strategy": "default"} if config.model_type == "llava_next" else {}
    features = [torch.zeros(count, tokens, 1) for count in counts]
    _, rows = model.model.pack_image_features(features, torch.tensor(sizes), image_newline=torch.zeros(1), **options)
    batch = words([[count] for count in rows.tolist()], length=12 + int(rows.max()))
    pixels = signal(len(sizes), max(counts), 3, tile, tile)
    return {**batch, "pixel_values": pixels, "image_sizes": torch.tensor(sizes)}
