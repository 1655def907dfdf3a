"""A tokenizer of words, an image processor and a feature extractor with the sizes of the tiny encoders."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import CLIPImageProcessor, PreTrainedTokenizerFast, WhisperFeatureExtractor

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "what", "is", "it", "cat", "dog", "hear"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Ten words; <audio> is token 98 and <image> 99."""
    vocabulary = {word: i for i, word in enumerate(WORDS)} | {"<audio>": 98, "<image>": 99}
    model = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = Split(" ", "removed")
    made = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.add_special_tokens({"additional_special_tokens": ["<image>", "<audio>"]})
    return made


def image_processor() -> CLIPImageProcessor:
    sizes = {"height": 32, "width": 32}
    return CLIPImageProcessor(size=sizes, crop_size=sizes)


def feature_extractor() -> WhisperFeatureExtractor:
    """32 frames of 8 bins: a second at 16 kHz."""
    return WhisperFeatureExtractor(feature_size=8, hop_length=500, chunk_length=1)


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (40, 40, 3), dtype=np.uint8)


def tone(pitch: float, samples: int = 16000) -> np.ndarray:
    """A sine of `pitch` Hz at 16 kHz; at most a second."""
    return np.sin(2 * np.pi * pitch * np.arange(samples) / 16000).astype(np.float32)
