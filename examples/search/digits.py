"""The best of 24 pairs: six vision encoders that were trained to different degrees, and four tiny decoders.

csc search examples/search/digits.py --directory digits-search --page digits-search.html
csc search examples/search/digits.py --directory digits-search --mesh pp=2        and what each pair's step would take
csc search examples/search/digits.py --directory grid --strategy grid             every pair to the end, to compare
torchrun --nproc-per-node 2 --no-python csc search examples/search/digits.py --directory digits-search

A sample is a row of three of scikit-learn's handwritten digits; the answer spells them: `t w o s i x o n e`, three
letters each. Encoders are ViTs that have learnt to name digits for 0 to 250 steps, decoders Llamas that have learnt to
spell digits given as text, or nothing. The score is the mean probability that a pair gives to the right letters of rows
of scans that no training row shows. What to look at: which pair is first, and why the others were dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

DIGITS = ("zer", "one", "two", "thr", "fou", "fiv", "six", "sev", "eig", "nin")
LETTERS = sorted(set("".join(DIGITS)))
WORDS = ("<pad>", "<image>", "spell", *"0123456789", *LETTERS)
IMAGE = WORDS.index("<image>")
ROW, SIDE = 3, 8
SEED = 0  # of the parts' first weights
ROWS, HELD_OUT, SCORED = 8192, 300, 128  # training rows; scans, and rows of them, that are scored
PARTS = Path("digits-parts")  # weights of the parts, so that they are trained once
SPELLED = torch.tensor([[WORDS.index(letter) for letter in digit] for digit in DIGITS])

# By name: width, and for how many steps it has learnt.
ENCODERS = {
    "vit-untrained": (32, 0), "vit-10": (32, 10), "vit-30": (32, 30), "vit-80": (32, 80), "vit-250": (32, 250),
    "wide-80": (64, 80),
}  # fmt: skip
# By name: width, layers, and steps.
DECODERS = {"small": (32, 1, 0), "small-text": (32, 1, 150), "deep": (32, 3, 0), "deep-text": (32, 3, 150)}


def scans() -> tuple[Tensor, Tensor]:
    """(scans, 8, 8) from -1 to 1, and the digits."""
    source = load_digits()
    return torch.tensor(source.images, dtype=torch.float32) / 8 - 1, torch.tensor(source.target)


SCANS, NAMES = scans()


def rows(count: int, seed: int, held_out: bool = False) -> Tensor:
    """(count, 3) numbers of scans."""
    chance = torch.Generator().manual_seed(seed)
    among = torch.arange(len(NAMES))[-HELD_OUT:] if held_out else torch.arange(len(NAMES) - HELD_OUT)
    return among[torch.randint(len(among), (count, ROW), generator=chance)]


def pixels(chosen: Tensor) -> Tensor:
    """(rows, 3, 8, 24): scans side by side, a patch each."""
    return SCANS[chosen].transpose(1, 2).reshape(len(chosen), 1, SIDE, ROW * SIDE).repeat(1, 3, 1, 1)


def text(read: Tensor, digits: Tensor) -> dict[str, Tensor]:
    """read: (rows, 3), the tokens that are read. The answer's letters alone have labels."""
    spelled = SPELLED[digits].flatten(1)
    prompt = torch.cat([read, torch.full((len(read), 1), WORDS.index("spell"))], 1)
    labels = torch.cat([torch.full_like(prompt, -100), spelled], 1)
    ids = torch.cat([prompt, spelled], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def batch(candidate: Any, chosen: list[Tensor]) -> dict[str, Tensor]:
    """Rows as any of the pairs takes them: all have the same words."""
    stacked = torch.stack(chosen)
    return {**text(torch.full_like(stacked, IMAGE), NAMES[stacked]), "pixel_values": pixels(stacked)}


def score(candidate: Any) -> Tensor:
    """For each held-out row the mean probability of its right letters."""
    given = batch(candidate, list(rows(SCORED, seed=1, held_out=True)))
    labels = given.pop("labels")[:, 1:]
    chances = candidate.model(**given).logits[:, :-1].softmax(-1).gather(2, labels.clamp(min=0).unsqueeze(2))
    return chances.squeeze(2)[:, -ROW * 3 :].mean(1)


# --- parts ------------------------------------------------------------------------------------------------------------


def encoder(name: str) -> ViTModel:
    """A ViT that has learnt to name each patch's digit."""
    width, steps = ENCODERS[name]
    torch.manual_seed(SEED + len(name))
    config = ViTConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4,
        image_size=(SIDE, ROW * SIDE), patch_size=(SIDE, SIDE), initializer_range=0.1, hidden_dropout_prob=0.0,
    )  # fmt: skip
    model, head = ViTModel(config, add_pooling_layer=False), nn.Linear(width, 10)

    def loss(step: int) -> Tensor:
        chosen = rows(32, seed=1000 + step)
        return F.cross_entropy(
            head(model(pixels(chosen)).last_hidden_state[:, 1:]).flatten(0, 1), NAMES[chosen].flatten()
        )

    return learnt(name, model, steps, loss, [*model.parameters(), *head.parameters()])


def decoder(name: str) -> LlamaForCausalLM:
    """A Llama that has learnt to spell digits that it reads as text."""
    width, layers, steps = DECODERS[name]
    torch.manual_seed(SEED + len(name))
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, initializer_range=0.1, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)

    def loss(step: int) -> Tensor:
        digits = torch.randint(10, (32, ROW), generator=torch.Generator().manual_seed(step))
        return model(**text(digits + WORDS.index("0"), digits)).loss

    return learnt(name, model, steps, loss, list(model.parameters()))


def learnt(name: str, model: Any, steps: int, loss: Callable[[int], Tensor], parameters: list[Any]) -> Any:
    """The model after so many steps, from the disk if it was made before."""
    file = PARTS / f"{name}.safetensors"
    if file.is_file():
        model.load_state_dict(load_file(file))
        return model
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    for step in range(steps):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    PARTS.mkdir(parents=True, exist_ok=True)
    building = file.with_suffix(f".{torch.initial_seed()}")
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, building)
    building.replace(file)
    return model


def search() -> dict[str, Any]:
    """The arguments of csc.search."""
    return {
        "encoders": {name: partial(encoder, name) for name in ENCODERS},
        "llms": {name: partial(decoder, name) for name in DECODERS},
        "data": list(rows(ROWS, seed=0)),
        "score": score,
        "batch": batch,
        "placeholders": IMAGE,
        "batch_size": 8,
        "optimizer": partial(torch.optim.AdamW, lr=1e-3),
    }
