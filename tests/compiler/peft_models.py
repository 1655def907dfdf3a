"""PEFT models that training starts in the middle of: adapters that are not zero, so that every gradient counts."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.models import hf

# The adapters sit on the LLM alone: "q_proj" would name the encoder's projections too.
LLM = r".*language_model.*\.(q_proj|v_proj)"
TEXT = r".*\.(q_proj|v_proj)"


def llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(hf.llama_config(3, tied))


def text_batch(samples: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Counting sequences with unequal numbers of labels; token 98 is a new one."""
    ids = 1 + (7 * torch.arange(samples).unsqueeze(1) + torch.arange(length)) % 90
    ids[:, 3] = 98
    labels = ids.clone()
    for sample in range(samples):
        labels[sample, : 2 + sample % 4] = hf.IGNORED
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def adapted(model: nn.Module, **config: Any) -> PeftModel:
    """The model under PEFT. lora_B is zero at first, and with it every gradient of lora_A."""
    made = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": TEXT, **config}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return made


def base(name: str) -> PreTrainedModel:
    return hf.llava() if name == "llava" else llama()


def peft_model(name: str) -> PeftModel:
    """LoRA on the LLM of a LLaVA with encoder and projector frozen ("llava"), or on a text model ("llama")."""
    return adapted(base(name), target_modules=LLM if name == "llava" else TEXT)
