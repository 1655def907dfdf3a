"""Pictures, sound and text in one model: a ViT, a Whisper encoder and a Llama, put together with csc.compose.

csc explain examples/compose.py:model                  the parts: two encoders beside each other, two projectors, an LLM
csc verify examples/compose.py:model                   every gradient against eager PyTorch
python examples/compose.py                             trains, all ranks in this process; under a minute on a CPU
torchrun --nproc-per-node 3 examples/compose.py        the same, one rank a process

Each sample shows a handwritten digit (one of scikit-learn's scans) and plays a tone of one of four pitches; the model
says what it sees and what it hears. All parts start from random weights. What to look at: how many held-out digits
and pitches are right, before training and after. A number behind the file's name is the number of steps.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
    WhisperConfig,
    WhisperFeatureExtractor,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import csc
from csc.composition import ComposedModel, Processor

STEPS, SAMPLES = 200, 16
SCANS = load_digits()
HELD_OUT = 300  # the last scans, which no training sample shows
RATE, PITCHES = 16000, {"low": 250.0, "middle": 500.0, "high": 1000.0, "shrill": 2000.0}  # Hz
WORDS = ("<pad>", "<eos>", "<image>", "<audio>", "see", "hear", *"0123456789", *PITCHES)
SIZES = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "initializer_range": 0.1}


def build() -> ComposedModel:
    """8 x 8 pixels are 4 x 4 patches, shuffled to 4 tokens; a second of sound is 50 frames, stacked to 5 tokens."""
    torch.manual_seed(0)
    sight = ViTConfig(**SIZES, num_hidden_layers=2, image_size=8, patch_size=2)
    hearing = WhisperConfig(
        d_model=48,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=96,
        num_mel_bins=16,
        max_source_positions=50,
        init_std=0.1,  # small models from random weights: the usual 0.02 begins with a long plateau
    )
    text = LlamaConfig(**SIZES, num_hidden_layers=3, vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1)
    return csc.compose(
        encoders={"vision": ViTModel(sight, add_pooling_layer=False), "audio": WhisperEncoder(hearing)},
        projectors={"vision": "pixel-shuffle-mlp", "audio": {"kind": "stack-mlp", "factor": 10}},
        language_model=LlamaForCausalLM(text),
        placeholders={"vision": WORDS.index("<image>"), "audio": WORDS.index("<audio>")},
    )


def processor_of(composed: ComposedModel) -> Processor:
    """A tokenizer of one token a word, and Hugging Face's own preprocessors with the sizes of the encoders."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    pictures = ViTImageProcessor(do_resize=False)
    sound = WhisperFeatureExtractor(feature_size=16, sampling_rate=RATE, chunk_length=1)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    return composed.processor(tokenizer, {"vision": pictures, "audio": sound})


def tone(pitch: float, chance: np.random.Generator) -> np.ndarray:
    """A second of a sine, up to a tenth higher or lower than `pitch` (Hz), in noise."""
    times = np.arange(RATE) / RATE
    sine = np.sin(2 * np.pi * (pitch * chance.uniform(0.9, 1.1) * times + chance.uniform()))
    return (sine + 0.1 * chance.normal(size=RATE)).astype(np.float32)


def batch_of(processor: Processor, scans: np.ndarray, seed: int) -> dict[str, torch.Tensor]:
    """A sample for each of the scans (their numbers), each with a tone."""
    chance = np.random.default_rng(seed)
    names = chance.choice(list(PITCHES), len(scans))
    return processor(
        ["see <image> hear <audio>"] * len(scans),
        answers=[f"{SCANS.target[scan]} {name}" for scan, name in zip(scans, names)],
        vision=[np.repeat(np.uint8(15 * SCANS.images[scan])[:, :, None], 3, axis=2) for scan in scans],
        audio=[tone(PITCHES[name], chance) for name in names],
    )


def training_batch(step: int) -> dict[str, torch.Tensor]:
    scans = np.random.default_rng(step).choice(len(SCANS.target) - HELD_OUT, SAMPLES)
    return batch_of(processor_of(model.model), scans, step)


@csc.compile(mesh=csc.Mesh(pp=3), example=lambda: training_batch(0), microbatches=2)
def model() -> ComposedModel:
    return build()


@torch.no_grad()
def held_out(composed: ComposedModel) -> str:
    """How many digits and pitches of the held-out scans the model says right."""
    scans = np.arange(len(SCANS.target) - HELD_OUT, len(SCANS.target))
    batch = batch_of(processor_of(composed), scans, seed=2**31)
    said = composed.eval()(**batch).logits[:, :-1].argmax(-1)
    right = (said == batch["labels"][:, 1:])[:, -3:-1].float().mean(0)  # digit, pitch; the last is <eos>
    return f"digits {right[0]:.0%}, pitches {right[1]:.0%}"


def trained() -> ComposedModel:
    """Under torchrun a rank has the trained weights of its own stages alone; on disk they come together."""
    with tempfile.TemporaryDirectory() as temporary:
        place = [temporary]
        if dist.is_initialized():
            dist.broadcast_object_list(place)
        model.save(place[0])
        build().save_config(place[0])
        composed = ComposedModel.from_pretrained(Path(place[0]))
        if dist.is_initialized():
            dist.barrier()
        return composed


def say(text: str) -> None:
    """Under torchrun the first rank alone prints."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


if __name__ == "__main__":
    say(f"held out, before: {held_out(build())}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = int(sys.argv[1]) if sys.argv[1:] else STEPS
    for step in range(steps):
        loss = model.train_step(training_batch(step))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            say(f"step {step}: loss {loss:.4f}")
    say(f"held out, after: {held_out(trained())}")
