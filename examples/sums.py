"""Sums as conversations, and a tokenizer that knows their words: the data of sft.py and dpo.py."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>", "user", "assistant", *"0123456789", "what", "is", "+", "?"]
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
