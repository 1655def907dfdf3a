"""Fine-tuning a LLaVA, read from a checkpoint on disk, on a JSON file of conversations about images.

    python examples/conversations.py --eager                   # the script as it was, in plain PyTorch
    python examples/conversations.py                           # the same steps, compiled; both ranks in this process
    torchrun --nproc-per-node 2 examples/conversations.py      # one process for each stage
    python examples/conversations.py --data my.json            # conversations of one's own

`pip install -e ".[hf]"` brings all that is imported here; a CPU will do. Without `--data` the script writes eight
pictures of one colour and conversations about them, and without a checkpoint one with random weights.

The file is what LLaMA-Factory calls ShareGPT: a list of

    {"conversations": [{"from": "human", "value": "<image> what colour is it ?"}, {"from": "gpt", "value": "red"}],
     "images": ["red.png"], "system": "answer in a word"}

with paths from the file's folder, one for each `<image>`; `system` and `images` may be left out. Labels are what `gpt`
says. A batch is padded to its longest conversation: csc compiles each length once, from one trace.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

import csc

COLOURS = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (40, 60, 200), "white": (240, 240, 240)}
WORDS = [
    "<pad>", "<end>", "<unknown>", "<image>", "system", "human", "gpt", *COLOURS,
    *["what", "colour", "is", "it", "?", "the", "picture", "and", "of", "which", "a", "word", "answer", "in"],
]  # fmt: skip
ROLES = ("human", "gpt")
SIZE, PATCHES, STEPS, SAMPLES = 16, 4, 6, 4
BASE, DATA = "build/conversations_base", "build/conversations/data.json"
Turns = list[tuple[str, str]]  # who says what


# --- What stands for a pretrained model and for data of one's own ----------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>")


def base() -> str:
    """The path of a checkpoint with random weights. It is written if it is not there."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=SIZE, patch_size=8,
        initializer_factor=4.0,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=len(WORDS),
        initializer_range=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=WORDS.index("<image>"), vision_feature_layer=-1
    )
    return once(BASE, lambda folder: LlavaForConditionalGeneration(config).save_pretrained(folder))


def written() -> Path:
    """The path of a file of conversations. It is written if it is not there, with its pictures."""

    def write(folder: str) -> None:
        os.makedirs(folder)
        rows: list[dict[str, Any]] = []
        for number, (name, colour) in enumerate([*COLOURS.items()] * 2):
            picture, other = f"{number}.png", list(COLOURS)[(number + 1) % len(COLOURS)]
            Image.new("RGB", (40 + number, 30), colour).save(f"{folder}/{picture}")
            turns = [("human", "<image> what colour is the picture ?"), ("gpt", name)]
            if number % 2:
                turns += [("human", f"and is it {other} ?"), ("gpt", f"it is {name}")]
            rows.append({"conversations": [{"from": who, "value": text} for who, text in turns], "images": [picture]})
            if number % 3 == 0:
                rows[-1]["system"] = "answer in a word"
        Path(folder, "data.json").write_text(json.dumps(rows, indent=1))

    return Path(once(str(Path(DATA).parent), write)) / Path(DATA).name


def once(path: str, write: Callable[[str], None]) -> str:
    """A folder that is written whole or not at all: under torchrun every process writes one, and the first is kept."""
    if not os.path.exists(path):
        building = f"{path}.{os.getpid()}"
        write(building)
        try:
            os.rename(building, path)
        except OSError:
            shutil.rmtree(building)
    return path


# --- A file of conversations as batches ------------------------------------------------------------------------------


def conversations(file: Path) -> list[tuple[Turns, list[Path]]]:
    """The turns and the pictures of each conversation. ValueError for one that is none, with its number."""
    read = []
    for number, row in enumerate(json.loads(file.read_text())):
        where = f"{file}, conversation {number}"
        turns = [(turn["from"], turn["value"]) for turn in row["conversations"]]
        strangers = {who for who, _ in turns} - {*ROLES}
        if strangers or not any(who == "gpt" for who, _ in turns):
            raise ValueError(f"{where}: turns are from {', '.join(ROLES)}, and gpt says something; here {turns}")
        images = [file.parent / name for name in row.get("images", ())]
        asked = sum(text.split().count("<image>") for _, text in turns)
        if asked != len(images):
            raise ValueError(f"{where}: it says <image> {asked} times and lists {len(images)} images")
        first = [("system", row["system"])] if "system" in row else []
        read.append((first + turns, images))
    return read


class Collator:
    """Makes a batch of conversations: tokens, their labels, and the pictures in the order of the text."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer()

    def __call__(self, samples: Sequence[tuple[Turns, list[Path]]]) -> dict[str, torch.Tensor]:
        rows = [self.tokens(turns) for turns, _ in samples]
        longest = max(len(ids) for ids, _ in rows)
        pictures = [self.pixels(path) for _, images in samples for path in images]
        return {
            "input_ids": torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
            "labels": torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
            **({"pixel_values": torch.stack(pictures)} if pictures else {}),
        }

    def tokens(self, turns: Turns) -> tuple[list[int], list[int]]:
        """Of a conversation, and their labels: what gpt says, and that it ends."""
        ids: list[int] = []
        labels: list[int] = []
        for who, text in turns:
            head = self.tokenizer.encode(who, add_special_tokens=False)
            said = self.tokenizer.encode(
                f"{text.replace('<image>', '<image> ' * PATCHES)} <end>", add_special_tokens=False
            )
            ids += head + said
            labels += [-100] * len(head) + (said if who == "gpt" else [-100] * len(said))
        return ids, labels

    def pixels(self, path: Path) -> torch.Tensor:
        with Image.open(path) as image:
            small = image.convert("RGB").resize((SIZE, SIZE))
        return (
            torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(SIZE, SIZE, 3).permute(2, 0, 1) / 127.5
            - 1
        )


def batches(samples: Sequence[tuple[Turns, list[Path]]], collator: Collator) -> Iterator[dict[str, torch.Tensor]]:
    """STEPS of them, of SAMPLES conversations each, in an order that is new in each epoch."""
    loader = torch.utils.data.DataLoader(
        samples, batch_size=SAMPLES, shuffle=True, drop_last=True, collate_fn=collator,  # type: ignore[arg-type]
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    left = STEPS
    while left:
        for batch in loader:
            yield batch
            left -= 1
            if not left:
                return


# --- The script ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a small LLaVA on conversations about images.")
    parser.add_argument("--eager", action="store_true", help="plain PyTorch, without csc")
    parser.add_argument("--data", type=Path, help="a JSON file of conversations (default: one about colours)")
    parser.add_argument(
        "--output", default="build/conversations_tuned", help="where the model goes (default: %(default)s)"
    )
    given = parser.parse_args()
    samples = conversations(given.data or written())
    if len(samples) < SAMPLES:
        parser.error(f"a batch takes {SAMPLES} conversations, and the file has {len(samples)}")
    collator = Collator()
    model = LlavaForConditionalGeneration.from_pretrained(base())
    model.model.vision_tower.requires_grad_(False)
    compiled = None
    if not given.eager:
        compiled = csc.compile(model, mesh="pp=2", microbatches=2, example=collator(samples[:SAMPLES]))
    trained = compiled.parameters() if compiled is not None else model.parameters()
    optimizer = torch.optim.AdamW([parameter for parameter in trained if parameter.requires_grad], lr=3e-3)
    for step, batch in enumerate(batches(samples, collator)):
        if compiled is not None:
            loss = compiled.train_step(batch)
        else:
            loss = model(**batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step}: loss {loss:.4f}")
    if compiled is not None:
        compiled.gather()
    if os.environ.get("RANK", "0") == "0":
        model.save_pretrained(given.output)
        collator.tokenizer.save_pretrained(given.output)


if __name__ == "__main__":
    main()
