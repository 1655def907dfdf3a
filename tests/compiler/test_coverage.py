"""The models of the coverage table: compiled in stages, over context-parallel ranks, and with the projector alone; with
images of other sizes and numbers, and one sample, from the same capture; and their capture, in which equal layers are
traced once, beside that of the model traced whole.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.coverage.check import WAYS, compare, fine
from benchmarks.coverage.models import CASES, grids, words
from benchmarks.coverage.report import markdown, summary
from csc.capture.capture import capture
from csc.ir.printer import program_text
from csc.reports.verification import verify
from tests.exactness import FLOAT32
from tests.models.images import Batch, grids_batch, tiles_batch
from tests.tiers import long

pytestmark = pytest.mark.slow
LARGEST = 1e-5
# The others are in the long tier: each is of a kind with one of these.
OFTEN = {"Llama", "Mllama"}
# One of each kind: it takes as long as the rest of a model's test.
TRACED_WHOLE = {"LLaVA-NeXT", "Qwen2.5-VL", "Gemma 3", "Whisper encoder + Llama", "Llama"}

# The third batch of grids has more images; of the last two one has a video, as many patches as an image of three times
# the height, of which a frame sees a third.
GRIDS = [
    [[1, 4, 4], [1, 4, 8]], [[1, 8, 4], [1, 4, 4]], [[1, 4, 4], [1, 6, 4], [1, 4, 4]],
    [[3, 4, 4], [1, 4, 4]], [[1, 12, 4], [1, 4, 4]],
]  # fmt: skip
TILES = [[[24, 48], [48, 24]], [[48, 24], [20, 48]], [[13, 48], [47, 48], [48, 17], [48, 24]]]


def one_sample(name: str, model: Any, batch: Batch) -> list[Batch]:
    """A batch of one, for the graph of several (tests/compiler/test_one_sample.py has models that start with one)."""
    if name == "LLaVA-OneVision":
        return [{entry: tensor[:1] for entry, tensor in batch.items()}]
    if name in ("Qwen2-VL", "Qwen3-VL"):
        return [grids(words([[4]], length=24), [[1, 4, 4]], batch["pixel_values"].shape[1])]
    if name == "Gemma 3":
        ids = words([[4]], length=24)
        there = (ids["input_ids"] == model.config.image_token_id).long()
        return [{**ids, "pixel_values": batch["pixel_values"], "token_type_ids": there}]
    return []


def other_images(name: str, model: Any, batch: Batch) -> list[Batch]:
    """Batches with images that the example has not."""
    if name in ("LLaVA-NeXT", "LLaVA-OneVision"):
        return [tiles_batch(model, sizes) for sizes in TILES]
    if name == "Qwen2-VL":
        return [grids_batch(sizes, batch["pixel_values"].shape[1]) for sizes in GRIDS]
    if name in ("Qwen2.5-VL", "Qwen3-VL", "GLM-4V"):
        return [grids_batch(sizes, batch["pixel_values"].shape[1]) for sizes in GRIDS[:3]]
    return []


@pytest.mark.parametrize("name", [name if name in OFTEN else long(name) for name in CASES])
@pytest.mark.long_cases("Mllama")
def test_gradients_are_those_of_eager(name: str) -> None:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    row, compiled = compare(name, model, batch)
    for way, result in row.ways.items():
        assert fine(result), f"{way}: {result}"
        assert result in ("-", "bit-equal") or float(result) <= LARGEST, f"{way}: {result}"
    assert summary([row]) == {"models": 1, **dict.fromkeys(WAYS, 1)}
    assert name in markdown([row])
    for other in (*one_sample(name, model, batch), *other_images(name, model, batch)):
        assert compiled is not None
        result = verify(compiled, other)
        assert result.params_missing == () and result.params_unexpected == ()
        assert max(result.loss_rel, result.grad_rel_max) <= (FLOAT32 if "LLaVA" in name else 0)
        assert len(compiled.compiler.captures) == 1
    if name in TRACED_WHOLE:
        assert compiled is not None
        whole = capture(model, batch, compiled.compiler.guards, whole=True)
        assert program_text(compiled.history()[0]) == program_text(whole)
