"""A recipe as the text of a Python file: the model, its batches, how it is compiled.

The file defines make() -> model, batch(seed, samples, tokens) -> batch, and SETTINGS.
"""

from __future__ import annotations

from textwrap import indent

from tests.fuzz.kinds import ENCODERS, LAYERS, LOSSES, USES
from tests.fuzz.recipe import Recipe

HEAD = """import collections
import dataclasses
import functools
import itertools
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

D, V = 16, 30
"""
BATCH = """
def batch(seed, samples, tokens):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, V, (samples, tokens), generator=generator)
    ids[:, 1:{first}] = 1
    keep = torch.arange(tokens) < tokens - torch.arange(samples)[:, None] % 3
    labels = torch.randint(0, V, (samples, tokens), generator=generator).masked_fill(~keep, -100)
    return {entries}
"""
ENTRIES = {
    "ids": "ids", "labels": "labels", "keep": "keep",
    "group": "(torch.arange(tokens) * 2 // tokens).expand(samples, -1).contiguous()",
    "weight": "torch.rand(samples, generator=generator) + 0.5",
    "pixels": "torch.randn(samples, 4, 6, generator=generator)",
}  # fmt: skip


def source(recipe: Recipe) -> str:
    """The file's text."""
    kinds = list(dict.fromkeys(part.kind for part in recipe.parts))
    names = {kind: "".join(word.title() for word in kind.split("_")) + "Layer" for kind in kinds}
    above = list(dict.fromkeys(LAYERS[kind].above for kind in kinds if LAYERS[kind].above))
    layers = [_layer(names[kind], kind) for kind in kinds]
    used = _used(recipe)
    entries = "{" + ", ".join(f'"{name}": {ENTRIES[name]}' for name in used) + "}"
    settings = ",\n".join(f"    {setting.changed!r}" for setting in recipe.settings)
    text = [
        HEAD,
        *above,
        *layers,
        _model(recipe, names, used),
        BATCH.format(entries=entries, first=5 if recipe.encoder == "scattered" else 2),
    ]
    text.append(f"\n\ndef make():\n    torch.manual_seed({recipe.seed})\n    return Model().train()\n")
    return "\n\n".join(part.strip("\n") + "\n" for part in text) + f"\n\nSETTINGS = [\n{settings},\n]\n".replace(
        "Setting(", "dict("
    )


def _used(recipe: Recipe) -> list[str]:
    """The batch's entries that the model's text mentions."""
    texts = [LAYERS[part.kind].forward for part in recipe.parts] + [USES[part.use].forward for part in recipe.parts]
    text = "\n".join([*texts, LOSSES[recipe.loss].forward, ENCODERS[recipe.encoder].forward])
    return ["ids", "labels", "keep"] + [name for name in ("group", "weight", "pixels") if name in text]


def _layer(name: str, kind: str) -> str:
    lines = [f"class {name}(nn.Module):", "    def __init__(self, n):", "        super().__init__()"]
    lines += [indent(LAYERS[kind].init, " " * 8), "", "    def forward(self, x, more):"]
    given = [word for word in ("ids", "keep", "group") if word in LAYERS[kind].forward]
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
    body.append("more = {" + ", ".join(f"'{name}': {name}" for name in ("ids", "keep", "group") if name in used) + "}")
    for place, part in enumerate(recipe.parts):
        init.append(f"{home}.part{place} = nn.ModuleList({names[part.kind]}(n) for n in range({part.layers}))")
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
    lines += [indent("\n".join(init), " " * 8), "", f"    def forward(self, {', '.join(used)}):"]
    return "\n".join([*lines, indent("\n".join(body), " " * 8)])
