"""Sums as conversations, a tokenizer that knows their words, and a small Llama: what sft.py and dpo.py read."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>", "user", "assistant", *"0123456789", "what", "is", "+", "?"]
BASE = "build/sums_base"
TEMPLATE = "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' <eos> ' }}{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )


def sums(wrong: bool = False) -> list[dict[str, Any]]:
    """Each a prompt and its completion; wrong: the chosen and the rejected one, as preferences have them."""

    def said(number: int) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": " ".join(str(number))}]

    rows = []
    for a in range(8):
        for b in range(10):
            prompt = [{"role": "user", "content": f"what is {a} + {b} ?"}]
            answers = {"chosen": said(a + b), "rejected": said(a + b + 3)} if wrong else {"completion": said(a + b)}
            rows.append({"prompt": prompt, **answers})
    return rows


def base_checkpoint() -> str:
    """The path of a checkpoint with random weights, in place of a pretrained one. It is written if it is not there."""
    if not os.path.exists(BASE):
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=len(tokenizer()), pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )  # fmt: skip
        building = f"{BASE}.{os.getpid()}"  # under torchrun every process makes one, and the first is kept
        LlamaForCausalLM(config).save_pretrained(building)
        try:
            os.rename(building, BASE)
        except OSError:
            shutil.rmtree(building)
    return BASE
