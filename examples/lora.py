"""LoRA on an LLM behind a frozen encoder: a LLaVA learns to read handwritten digits.

csc explain examples/lora.py:llava                     what adapters cost: a frozen layer has B, its adapters alone W
csc verify examples/lora.py:llava                      every gradient against eager PyTorch
python examples/lora.py                                train, save the adapters, read them again; half a minute
torchrun --nproc-per-node 2 examples/lora.py           the same on two processes

The digits are scikit-learn's: `pip install -e ".[demo]"` brings all that is imported here.

What to look at: the encoder has no B and no W in `csc explain`; the last lines, which compare the adapters in
build/lora_adapter (PEFT's own files) with what was trained.
"""

from __future__ import annotations

import os

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from sklearn.datasets import load_digits
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, get_scheduler

import csc

BOS, QUESTION, IMAGE = 10, 11, 12  # tokens 0 to 9 are the digits
PATCHES, STEPS, SAMPLES = 4, 100, 32
ADAPTER = "build/lora_adapter"


def batch_of(indices: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scans (8 x 8 pixels, made 16 x 16), the question, and the digit as the answer."""
    scans = load_digits()
    pixels = torch.tensor(scans.images, dtype=torch.float32)[indices, None] / 8 - 1
    prompt = torch.tensor([BOS] + [IMAGE] * PATCHES + [QUESTION]).repeat(len(indices), 1)
    answers = torch.tensor(scans.target)[indices, None]
    return {
        "input_ids": torch.cat([prompt, answers], dim=1),
        "attention_mask": torch.ones(len(indices), PATCHES + 3, dtype=torch.long),
        "pixel_values": nn.functional.interpolate(pixels, scale_factor=2).expand(-1, 3, -1, -1).contiguous(),
        "labels": torch.cat([torch.full_like(prompt, -100), answers], dim=1),
    }


def base() -> LlavaForConditionalGeneration:
    """Random weights stand for those of a pretrained model."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8,
        initializer_factor=4.0,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=16,
        initializer_range=0.1, pad_token_id=15,
    )  # fmt: skip
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=-1)
    )


@csc.compile(mesh="pp=2", example=batch_of(torch.arange(SAMPLES)), microbatches=2)
def llava() -> PeftModel:
    """Adapters on the LLM's projections; the projector is trained whole; all else is frozen."""
    config = LoraConfig(
        r=8, lora_alpha=32, target_modules=r".*language_model.*_proj", modules_to_save=["multi_modal_projector"]
    )
    return get_peft_model(base(), config)


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Share of the last 297 scans that are read right."""
    batch = batch_of(torch.arange(1500, 1797))
    answers = batch.pop("labels")[:, -1]
    return float((model(**batch).logits[:, -2, :10].argmax(dim=-1) == answers).float().mean())


def say(text: str) -> None:
    """Under torchrun the first rank alone prints."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


def main() -> None:
    optimizer = torch.optim.AdamW(llava.parameters(), lr=5e-3)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=10, num_training_steps=STEPS)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        loss = llava.train_step(batch_of(torch.randint(0, 1500, (SAMPLES,), generator=generator)))
        llava.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            say(f"step {step}: loss {loss:.4f}")
    llava.save_adapter(ADAPTER)
    model = llava.gather()  # under torchrun a process has trained its own stages alone
    again = PeftModel.from_pretrained(base(), ADAPTER)
    same = all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f"trained {adapters:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
    say(f"accuracy on held-out scans: {accuracy(model):.3f}")
    say(f"{ADAPTER} read into a new model: {'the same bits' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
