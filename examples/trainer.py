"""A script for HF's Trainer: Qwen2-VL with LoRA reads handwritten digits, several in a sample, each of another size.

    python examples/trainer.py --eager                         # the script as it was: transformers' own Trainer
    python examples/trainer.py                                 # all four ranks in this process
    torchrun --nproc-per-node 4 examples/trainer.py            # dp=2, pp=2: one process for each rank
    torchrun --nproc-per-node 4 examples/trainer.py --resume   # goes on from the checkpoint of the third step

What csc needs are the lines that `main` has for it: the imports, `csc.compile`, and `CompiledTrainer` for `Trainer`.
Images go through transformers' own processor. The digits are scikit-learn's: `pip install -e ".[demo]"` brings all that
is imported here. --report-to wandb, or tensorboard, as with any Trainer.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Trainer, TrainingArguments
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import csc
from csc.integrations.hf import CompiledTrainer

PADDING, ZERO, IMAGE, START, END, VIDEO = 0, 1, 20, 21, 22, 23  # tokens; ZERO to ZERO + 9 are the digits
PATCH = 14
Sample = dict[str, torch.Tensor]


def make_model() -> nn.Module:
    """Random weights; the vision tower is frozen, adapters train in the language model."""
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        vision_config={
            "depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2, "patch_size": PATCH,
        },
        text_config={
            "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
        },
        image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END, video_token_id=VIDEO,
    )  # fmt: skip
    model = Qwen2VLForConditionalGeneration(config)
    return get_peft_model(model, LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|v_proj)"))


class Digits(Dataset[Sample]):
    """One to three scans in a sample, of 2 to 6 patches a side; behind them their digits as text."""

    def __init__(self) -> None:
        self.scans, self.labels = load_digits(return_X_y=True)
        self.processor = Qwen2VLImageProcessorPil(patch_size=PATCH, min_pixels=4 * PATCH**2, max_pixels=64 * PATCH**2)

    def __len__(self) -> int:
        return len(self.scans) // 3

    def __getitem__(self, index: int) -> Sample:
        chosen = range(3 * index, 3 * index + 1 + index % 3)
        sides = [2 * PATCH * (1 + (7 * index + number) % 3) for number in chosen]
        scans = [Image.fromarray((self.scans[number].reshape(8, 8) * 15).astype(np.uint8)) for number in chosen]
        images = [scan.resize((side, side)).convert("RGB") for scan, side in zip(scans, sides)]
        made = self.processor(images=images, return_tensors="pt")
        tokens: list[int] = []
        for count in (made["image_grid_thw"].prod(-1) // 4).tolist():
            tokens += [START, *[IMAGE] * count, END]
        tokens += [ZERO + int(self.labels[number]) for number in chosen]
        return {"input_ids": torch.tensor(tokens), **made}


def collate(samples: list[Sample]) -> Sample:
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True, padding_value=PADDING)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PADDING).long(),
        "labels": ids.masked_fill((ids == PADDING) | (ids >= IMAGE), -100),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.cat([sample["pixel_values"] for sample in samples]),
        "image_grid_thw": torch.cat([sample["image_grid_thw"] for sample in samples]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Qwen2-VL with LoRA under HF's Trainer, eager or compiled.")
    parser.add_argument("--eager", action="store_true", help="transformers' own Trainer, without csc")
    parser.add_argument("--output", default="build/trainer", help="where checkpoints go (default: build/trainer)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint of the third step")
    parser.add_argument("--report-to", default="none", help="wandb, tensorboard, ... (default: none)")
    given = parser.parse_args()
    data, model = Digits(), make_model()
    arguments = TrainingArguments(
        given.output, per_device_train_batch_size=8, max_steps=6, learning_rate=1e-2, logging_steps=1, save_steps=3,
        report_to=given.report_to, seed=0, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    if given.eager:
        trainer = Trainer(model, args=arguments, train_dataset=data, data_collator=collate)
    else:
        batch = collate([data[index] for index in range(8)])
        compiled = csc.compile(model, mesh="dp=2,pp=2", example=batch, microbatches=2)
        trainer = CompiledTrainer(compiled, args=arguments, train_dataset=data, data_collator=collate)
    trainer.train(resume_from_checkpoint=f"{given.output}/checkpoint-3" if given.resume else None)


if __name__ == "__main__":
    main()
