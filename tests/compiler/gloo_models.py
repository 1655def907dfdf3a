"""Models and batches by name, for the processes of test_gloo.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.models import llava_next
from tests.compiler import small
from tests.models import captions, packed
from tests.models.hf import llava, llava_batch, valm, valm_batch, whisper_batch, whisper_llama
from tests.models.images import tiles_batch
from tests.models.plain import plain, plain_batch

TILES = ([[24, 48], [48, 24]], [[48, 24], [20, 48]], [[13, 48], [24, 48], [48, 17]])


def tiles() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """LLaVA-NeXT."""
    torch.manual_seed(0)
    return llava_next()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llava": llava,
    "llava_tied": lambda: llava(tied=True),
    "whisper": whisper_llama,
    "plain": plain,
    "valm": valm,
    "llava_long": llava,
    "plain_long": plain,
    "packed": packed.llama,
    "dropped": small.dropped,
    "llava_lengths": llava,
    "tiles": lambda: tiles()[0],
    "captions": captions.Captions,
    "captions_tied": lambda: captions.Captions(tied=True),
}
BATCHES: dict[str, Callable[[int], Any]] = {
    "llava": llava_batch,
    "llava_tied": llava_batch,
    "whisper": whisper_batch,
    "plain": plain_batch,
    "valm": valm_batch,
    "llava_long": lambda samples: llava_batch(samples, length=57),
    "plain_long": lambda samples: plain_batch(samples, length=30),
    "dropped": lambda samples: small.text_batch(samples, length=10),
    "packed": lambda samples: packed.batch(samples, length=200),
    "llava_lengths": lambda count: [llava_batch(2, length=20 + 9 * (i % 3)) for i in range(count)],  # microbatches
    "tiles": lambda count: [tiles_batch(tiles()[0], sizes) for sizes in TILES[:count]],  # microbatches
    "captions": lambda samples: captions.batch([[1, 2], [3], *[[]] * (samples - 2)], [0, 0, 1, *[0] * (samples - 3)]),
    "captions_tied": lambda samples: captions.batch([*[[]] * (samples - 2), [1], [2, 1]]),
    "captions_text": lambda samples: captions.batch([[]] * samples),
    "packed_otherwise": lambda samples: packed.batch(samples, 200, (11, 40, 2)),
}
