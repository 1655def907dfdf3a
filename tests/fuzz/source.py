"""A recipe as the text of a Python file: the model, its batches, how it is compiled.

The file defines make() -> model, batch(seed, samples, tokens, form) -> batch, CHANGES (what is written outside of the
model between steps), DIVIDE (whose rows are whose) and SETTINGS.
"""

from __future__ import annotations

import re
from textwrap import indent

from tests.fuzz.kinds import ENCODERS, LAYERS, LOSSES, USES
from tests.fuzz.recipe import Recipe

HEAD = """import array
import collections
import configparser
import contextvars
import dataclasses
import decimal
import enum
import fractions
import functools
import io
import itertools
import logging
import multiprocessing
import os
import queue
import random
import threading
import types
import weakref

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

D, V = 16, 30
CHANGES = []
"""
# A form says of which of two kinds each sample is: long, with two topics and without pictures, or short. Samples stand
# in pairs of unequal ones, so that microbatches of one kind are alike, and half of the batch is some of them.
BATCH = """
def batch(seed, samples, tokens, form="plain"):
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(samples)
    half = place < samples // 2
    other = {{"first": place < 0, "both": half, "turned": ~half, "single": place == 0}}.get(form, place >= 0)
    length, topic, count = tokens - place % 3, place % 3, torch.ones_like(place)
    if form != "plain":
        length = torch.where(place % 2 == 0, torch.where(other, tokens, tokens - 2), 2)
        topic, count = torch.where(other & (place % 2 == 1), 1, 2), (~other).long()
    if form == "hollow":
        length[-1] = 0
    ids = torch.randint(2, V, (samples, tokens), generator=generator)
    {written}
    keep = torch.arange(tokens) < length[:, None]
    labels = torch.randint(0, V, (samples, tokens), generator=generator).masked_fill(~keep, -100)
    if form == "ignored":
        labels[~half], topic[~half] = -100, 0
    return {entries}
"""
WRITTEN = "ids[:, 1:{first}] = 1"
PICTURED = "ids[:, 1] = torch.where(count > 0, 1, ids[:, 1])"
ENTRIES = {
    "ids": "ids", "labels": "labels", "keep": "keep",
    "group": "(torch.arange(tokens) * 2 // tokens).expand(samples, -1).contiguous()",
    "weight": "torch.rand(samples, generator=generator) + 0.5",
    "pixels": "torch.randn(samples, 4, 6, generator=generator)",
    "length": "length", "topic": "topic",
}  # fmt: skip
GIVEN = ("ids", "keep", "group", "length", "topic")  # what layers are given of the batch
PICTURES = '({"pictures": torch.randn(int(count.sum()), 6, generator=generator)} if count.any() else {})'
DIVIDE = '{"pictures": lambda batch: (batch["ids"] == 1).sum(1)}'
JOINED = {
    "siblings": "list({part})",
    "scales": "{{layer: 1.0 + place for place, layer in enumerate({part})}}",
    "numbers": "{{id(layer): 1.0 + place for place, layer in enumerate({part})}}",
}


def source(recipe: Recipe) -> str:
    """The file's text."""
    kinds = list(dict.fromkeys(part.kind for part in recipe.parts))
    names = {kind: "".join(word.title() for word in kind.split("_")) + "Layer" for kind in kinds}
    above = list(dict.fromkeys(LAYERS[kind].above for kind in kinds if LAYERS[kind].above))
    layers = [_layer(names[kind], kind) for kind in kinds]
    used = _used(recipe)
    entries = "{" + ", ".join(f'"{name}": {ENTRIES[name]}' for name in used if name in ENTRIES) + "}"
    pictured = "pictures" in used
    written = PICTURED if pictured else WRITTEN.format(first=5 if recipe.encoder == "scattered" else 2)
    settings = ",\n".join(f"    {setting.changed!r}" for setting in recipe.settings)
    text = [
        HEAD,
        *above,
        *layers,
        _model(recipe, names, used),
        BATCH.format(entries=f"{entries} | {PICTURES}" if pictured else entries, written=written),
        f"\n\ndef make():\n    torch.manual_seed({recipe.seed})\n    return Model().train()\n",
        f"\nDIVIDE = {DIVIDE if pictured else None}",
    ]
    return "\n\n".join(part.strip("\n") + "\n" for part in text) + f"\n\nSETTINGS = [\n{settings},\n]\n".replace(
        "Setting(", "dict("
    )


def _used(recipe: Recipe) -> list[str]:
    """The batch's entries that the model's text mentions."""
    texts = [LAYERS[part.kind].forward for part in recipe.parts] + [USES[part.use].forward for part in recipe.parts]
    text = "\n".join([*texts, LOSSES[recipe.loss].forward, ENCODERS[recipe.encoder].forward])
    asked = ("group", "weight", "pixels", "length", "topic", "pictures")
    return ["ids", "labels", "keep"] + [name for name in asked if _mentions(text, name)]


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<![.\w]){name}\b", text) is not None


def _layer(name: str, kind: str) -> str:
    lines = [f"class {name}(nn.Module):", "    def __init__(self, n):", "        super().__init__()"]
    lines += [indent(LAYERS[kind].init, " " * 8), "", "    def forward(self, x, more):"]
    given = [word for word in GIVEN if _mentions(LAYERS[kind].forward, word)]
    lines += [f"        {word} = more['{word}']" for word in given]
    return "\n".join([*lines, indent(LAYERS[kind].forward, " " * 8)])


def _model(recipe: Recipe, names: dict[str, str], used: list[str]) -> str:
    init = ["self.embed = nn.Embedding(V, D)"]
    home = "self" if recipe.flat else "self.body"
    if not recipe.flat:
        init.append("self.body = nn.Module()")
    init += [line for line in (ENCODERS[recipe.encoder].init, LOSSES[recipe.loss].init) if line]
    body = ["x = self.embed(ids)"]
    body += [ENCODERS[recipe.encoder].forward] if recipe.encoder != "none" else []
    body.append("more = {" + ", ".join(f"'{name}': {name}" for name in GIVEN if name in used) + "}")
    for place, part in enumerate(recipe.parts):
        init.append(f"{home}.part{place} = nn.ModuleList({names[part.kind]}(n) for n in range({part.layers}))")
        init += _joined(f"{home}.part{place}", LAYERS[part.kind].forward)
        body += [f"skipped{place} = x"] if part.skip else []
        body.append(USES[part.use].forward.replace("layers", f"{home}.part{place}"))
    body += [f"x = x + skipped{place}" for place, part in enumerate(recipe.parts) if part.skip]
    if recipe.norm:
        init.append("self.norm = nn.LayerNorm(D)")
        body.append("x = self.norm(x)")
    init.append("self.head = nn.Linear(D, V)")
    init += ["self.head.weight = self.embed.weight"] if recipe.tied else []
    body += ["logits = self.head(x)", LOSSES[recipe.loss].forward]
    lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    arguments = ", ".join(f"{name}=None" if name == "pictures" else name for name in used)
    lines += [indent("\n".join(init), " " * 8), "", f"    def forward(self, {arguments}):"]
    return "\n".join([*lines, indent("\n".join(body), " " * 8)])


def _joined(part: str, forward: str) -> list[str]:
    """What layers of a list hold of each other, where they read it."""
    return [
        f"shared = {text.format(part=part)}\nfor layer in {part}:\n    layer.{word} = shared"
        for word, text in JOINED.items()
        if f"self.{word}" in forward
    ]
