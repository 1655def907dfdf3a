"""The models that the compiler's tests share: each is captured once a run, on first use in any of its processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import csc
from csc.driver.compiled import CompiledModel
from csc.driver.new_model import compiled_model
from tests.compiler import small
from tests.kept_traces import kept_traces
from tests.models import hf, packed, plain

Batch = Mapping[str, torch.Tensor]


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(hf.llava(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first: then every gradient of lora_A would be zero too
                parameter.normal_(std=0.1)
    return model


def _half(batch: Batch) -> Batch:
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in batch.items()}


# name -> (model, batch of a number of samples)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "llava": (hf.llava, hf.llava_batch),
    "llava_tied": (lambda: hf.llava(tied=True), hf.llava_batch),
    "llava_lora": (_lora, hf.llava_batch),
    "llava_bf16": (lambda: hf.llava().bfloat16(), lambda samples: _half(hf.llava_batch(samples))),
    "whisper": (hf.whisper_llama, hf.whisper_batch),
    "packed": (packed.llama, lambda samples: packed.batch(samples, length=200)),
    "plain": (plain.plain, plain.plain_batch),
    "plain_untied": (lambda: plain.plain(tied=False), plain.plain_batch),
    "mixed": (small.mixed, small.mixed_batch),
    "text": (lambda: small.text(4), small.text_batch),
}


class Models:
    """models("llava", mesh="pp=3", freeze=[...]): the model compiled with these options, from shared captures.

    models("llava", batch, ...): for another batch, which a capture serves whatever its lengths are.
    """

    def __init__(self) -> None:
        self.bases: dict[str, CompiledModel] = {}

    def __call__(self, name: str, example: Batch | None = None, **options: Any) -> CompiledModel:
        make, batch = MODELS[name]
        if name not in self.bases:
            with kept_traces():
                self.bases[name] = csc.compile(make(), example=batch(2))
        base = self.bases[name]
        # Two samples a microbatch whatever the options are: one capture serves all of them.
        chosen = base.with_options(**options).options
        rows = 2 * chosen.microbatches * chosen.mesh.dp
        return compiled_model(base.model, chosen, batch(rows) if example is None else example, None, base.compiler)


@pytest.fixture(scope="session")
def models() -> Models:
    return Models()
