"""QLoRA: a LLaVA whose linear layers are NF4, four bits a weight, learns brightness by its adapters.

csc explain examples/qlora.py:llava                    weights in bytes as they are packed; frozen layers have no W
csc verify examples/qlora.py:llava                     every gradient against the same quantised model in eager PyTorch
python examples/qlora.py                               train, save the adapters, read them again; half a minute
torchrun --nproc-per-node 2 examples/qlora.py          the same on two processes

`pip install -e ".[hf,quantised]"` brings all that is imported here; a CPU will do.

What to look at: `quantization_config=` and `get_peft_model` are those of any script of transformers and PEFT; the model
is compiled as it is. `csc compile examples/qlora.py:llava -o build/qlora` writes what runs: in layers/ a product is
`torch.ops.csc.quantised_linear(x, weight, absmax, ...)`.
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    BitsAndBytesConfig,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import csc

BASE, ADAPTER = "build/qlora_base", "build/qlora_adapter"
BOS, QUESTION, IMAGE = 10, 11, 12  # tokens 0 to 9 are the answers
PATCHES, STEPS, SAMPLES = 4, 30, 16


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    """Pictures of one brightness, the question, and the brightness as the answer."""
    generator = torch.Generator().manual_seed(seed)
    answers = torch.randint(0, 10, (SAMPLES, 1), generator=generator)
    prompt = torch.tensor([BOS] + [IMAGE] * PATCHES + [QUESTION]).repeat(SAMPLES, 1)
    return {
        "input_ids": torch.cat([prompt, answers], dim=1),
        "attention_mask": torch.ones(SAMPLES, PATCHES + 3, dtype=torch.long),
        "pixel_values": (answers / 5 - 1).view(-1, 1, 1, 1).expand(-1, 3, 16, 16).contiguous(),
        "labels": torch.cat([torch.full_like(prompt, -100), answers], dim=1),
    }


def write_base() -> None:
    """A checkpoint on disk with random weights, in place of a pretrained one."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8,
        initializer_factor=4.0,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=16,
        initializer_range=0.1, pad_token_id=15,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=-1)
    own = f"{BASE}.{os.getpid()}"  # under torchrun every process makes one, and the first is kept
    LlavaForConditionalGeneration(config).save_pretrained(own)
    with suppress(OSError):
        os.rename(own, BASE)


def base() -> LlavaForConditionalGeneration:
    """The checkpoint, its linear layers quantised as they are read: the encoder's too, the projector's not."""
    if not os.path.exists(BASE):
        write_base()
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["model.multi_modal_projector", "lm_head"],
    )  # fmt: skip
    return LlavaForConditionalGeneration.from_pretrained(BASE, quantization_config=four_bits, device_map="cpu")


@csc.compile(mesh="pp=2", example=batch_of(0), microbatches=2)
def llava() -> PeftModel:
    """Adapters on the LLM's projections; the projector is trained whole; all else is frozen."""
    config = LoraConfig(
        r=8, lora_alpha=32, target_modules=r".*language_model.*_proj", modules_to_save=["multi_modal_projector"]
    )
    torch.manual_seed(1)
    return get_peft_model(base(), config).train()


def say(text: str) -> None:
    """Under torchrun the first rank alone prints."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


def main() -> None:
    optimizer = torch.optim.AdamW(llava.parameters(), lr=5e-3)
    for step in range(STEPS):
        loss = llava.train_step(batch_of(step))
        llava.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            say(f"step {step}: loss {loss:.4f}")
    llava.save_adapter(ADAPTER)
    model = llava.gather()  # under torchrun a process has trained its own stages alone
    again = PeftModel.from_pretrained(base(), ADAPTER)
    same = all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters() if p.requires_grad)
    say(f"base: {sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad):,} bytes")
    say(f"{ADAPTER} read into a new model: {'the same bits' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
