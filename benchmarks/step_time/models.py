"""The models and batches of the benchmark: Hugging Face classes with random weights, float32.

    build(case) -> (model in training mode with its frozen set, batch of two samples)

The encoder has half the language model's width and as many layers; features are about an eighth of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    WhisperConfig,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from benchmarks.step_time.cases import Case

SAMPLES, VOCABULARY, IGNORED = 2, 4096, -100
IMAGE, VIDEO, START, END = 4095, 4094, 4093, 4092
MANY_WORDS = 150_000
FEATURES = 16  # of an image or clip, in the language model
SIDE = 4  # patches of a row of an image
Batch = dict[str, torch.Tensor]
PARTS: dict[
    str, tuple[tuple[str, ...], tuple[str, ...]]
] = {  # of each model: the encoder and the projector, by what their parameters' names start with
    "head": ((), ()),
    "llama": ((), ()),
    "llava": (("model.vision_tower",), ("model.multi_modal_projector",)),
    "qwen2.5-vl": (("model.visual",), ("model.visual.merger",)),
    "whisper": (("audio_tower",), ("projector",)),
}


def build(case: Case) -> tuple[nn.Module, Batch]:
    """The model of a case, and its batch."""
    torch.manual_seed(0)
    model, batch = MODELS[case.model](case)
    freeze(model, case)
    if case.frozen == "nf4":
        in_four_bits(model)
    if case.frozen in ("lora", "nf4"):
        scope = r".*(language_model|^model\.layers).*\.(q_proj|v_proj)" if case.model != "llama" else None
        targets: Any = scope or ["q_proj", "v_proj"]
        model = get_peft_model(model, LoraConfig(r=8, target_modules=targets))
    return model.train(), batch


def in_four_bits(model: nn.Module) -> None:
    """Put layers of bitsandbytes in place of the linear ones, but for the head."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and not path.endswith("lm_head"):
            layer = Linear4bit(
                module.in_features, module.out_features, module.bias is not None, torch.float32, quant_type="nf4"
            )
            layer.weight = Params4bit(module.weight.data, requires_grad=False, quant_type="nf4", module=layer)
            layer.bias = module.bias
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layer.to("cpu"))


def freeze(model: nn.Module, case: Case) -> None:
    """Set `requires_grad`; "lora" and "nf4" are peft's own business."""
    encoder, projector = PARTS[case.model]
    for name, parameter in model.named_parameters():
        if case.frozen == "encoder":
            parameter.requires_grad_(not name.startswith(encoder) or name.startswith(projector))
        elif case.frozen == "rest":
            parameter.requires_grad_(name.startswith(projector))


def sizes(case: Case) -> dict[str, Any]:
    """Of the language model."""
    heads = case.width // 64
    return {
        "hidden_size": case.width, "intermediate_size": 4 * case.width, "num_hidden_layers": case.layers,
        "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2), "vocab_size": VOCABULARY,
        "max_position_embeddings": max(2048, case.tokens), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def words(case: Case, placeholder: int | None = None, features: int = 0) -> Batch:
    """Counting sequences with placeholders in front; a quarter of the second sample is padding where there is any."""
    ids = 3 + torch.arange(SAMPLES * case.tokens).view(SAMPLES, case.tokens).remainder(4000)
    mask = torch.ones_like(ids)
    if placeholder is not None:
        ids[:, 1 : 1 + features] = placeholder
    if case.padded:
        mask[1, -case.tokens // 4 :] = 0
    labels = ids.masked_fill((mask == 0) | (ids == (placeholder or -1)), IGNORED)
    found = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}
    if not case.padded:
        del found["attention_mask"]
    return found


def signal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def llama(case: Case) -> tuple[nn.Module, Batch]:
    return LlamaForCausalLM(LlamaConfig(**sizes(case))), words(case)


def llava(case: Case) -> tuple[nn.Module, Batch]:
    half = case.width // 2
    vision = CLIPVisionConfig(
        hidden_size=half, intermediate_size=4 * half, num_hidden_layers=case.layers, num_attention_heads=half // 32,
        image_size=14 * SIDE, patch_size=14,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**sizes(case)), image_token_id=IMAGE)
    batch = words(case, IMAGE, SIDE * SIDE) | {"pixel_values": signal(SAMPLES, 3, 14 * SIDE, 14 * SIDE)}
    return LlavaForConditionalGeneration(config), batch


def qwen(case: Case) -> tuple[nn.Module, Batch]:
    half = case.width // 2
    vision = {
        "depth": case.layers, "hidden_size": half, "intermediate_size": 4 * half, "num_heads": half // 32,
        "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [case.layers - 1], "out_hidden_size": case.width,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
    config = Qwen2_5_VLConfig(
        vision_config=vision, text_config={**sizes(case), "rope_parameters": rope}, image_token_id=IMAGE,
        video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    side = 2 * SIDE  # 2 x 2 patches are a feature
    batch = words(case, IMAGE, SIDE * SIDE) | {
        "pixel_values": signal(SAMPLES * side * side, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, side, side]] * SAMPLES),
    }
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    return Qwen2_5_VLForConditionalGeneration(config), batch


class WhisperLlama(nn.Module):
    """Speech in front of the text."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        half = case.width // 2
        self.audio_tower = WhisperEncoder(
            WhisperConfig(
                d_model=half, encoder_layers=case.layers, encoder_attention_heads=half // 32, encoder_ffn_dim=4 * half,
                num_mel_bins=80, max_source_positions=FEATURES, dropout=0.0,
            )
        )  # fmt: skip
        self.projector = nn.Linear(half, case.width)
        self.language_model = LlamaForCausalLM(LlamaConfig(**sizes(case)))

    def forward(
        self,
        input_features: torch.Tensor,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> Any:
        speech = self.projector(self.audio_tower(input_features).last_hidden_state)
        text = self.language_model.get_input_embeddings()(input_ids)
        heard = labels.new_full(speech.shape[:2], IGNORED)
        if attention_mask is not None:
            attention_mask = torch.cat([attention_mask.new_ones(speech.shape[:2]), attention_mask], 1)
        return self.language_model(
            inputs_embeds=torch.cat([speech, text], 1),
            attention_mask=attention_mask,
            labels=torch.cat([heard, labels], 1),
        )


def whisper(case: Case) -> tuple[nn.Module, Batch]:
    return WhisperLlama(case), words(case) | {"input_features": signal(SAMPLES, 80, 2 * FEATURES)}


class Head(nn.Module):
    """A linear layer and the end of a language model with many words, as Hugging Face's give it: logits too. chunked:
    torch's own linear layer with its loss instead, in chunks, without logits.
    """

    chunked = False

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first = nn.Linear(case.width, case.width)
        self.lm_head = nn.Linear(case.width, MANY_WORDS, bias=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> Any:
        if self.chunked:
            options = nn.modules.linear_cross_entropy_options.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
            rows = self.first(hidden).flatten(0, 1)
            return CausalLMOutput(
                loss=nn.functional.linear_cross_entropy(rows, self.lm_head.weight, labels.flatten(), options=options)  # type: ignore[attr-defined]
            )
        logits = self.lm_head(self.first(hidden))
        loss = nn.functional.cross_entropy(logits.float().view(-1, MANY_WORDS), labels.view(-1))
        return CausalLMOutput(loss=loss, logits=logits)


def head(case: Case) -> tuple[nn.Module, Batch]:
    labels = torch.arange(SAMPLES * case.tokens).view(SAMPLES, case.tokens) * 97 % MANY_WORDS
    return Head(case), {"hidden": signal(SAMPLES, case.tokens, case.width), "labels": labels}


MODELS = {"head": head, "llama": llama, "llava": llava, "qwen2.5-vl": qwen, "whisper": whisper}
