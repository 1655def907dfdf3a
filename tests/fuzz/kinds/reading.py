"""Kinds as source text, in files: what a random model is put together from.

    read(name) -> {name of the kind: Kind}

In a file each kind begins with `=== name`; `---` parts what stands above the class from its `__init__`, and that from
its `forward`. One part alone is `forward`, two are `__init__` and `forward`. Terms in the text: D is the width, x the
features (samples, tokens, D), ids the tokens, keep the mask of those that are no padding, group the number of each
token's document (all three (samples, tokens)), length and topic a number of each sample, pictures a row for each token
of number 1 or None, n the place of a layer in its list, self.siblings that list, self.scales and self.numbers what
layers are by themselves and by their id. CHANGES holds functions of a step's number and the model, which write what
forward reads from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Kind:
    """The statements of one class' methods, and what stands above it."""

    init: str
    forward: str
    above: str = ""


def read(name: str) -> dict[str, Kind]:
    """The kinds of one file of this folder."""
    text = (Path(__file__).parent / f"{name}.txt").read_text("utf-8")
    found = {}
    for entry in text.split("=== ")[1:]:
        kind, body = entry.split("\n", 1)
        parts = [part.strip("\n") for part in body.split("\n---\n")]
        found[kind] = Kind("", parts[0]) if len(parts) == 1 else Kind(parts[-2], parts[-1], "\n---\n".join(parts[:-2]))
    return found
