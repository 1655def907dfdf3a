"""Random damage to files, the same for the same seed.

Terms: *bytes* are changed, removed, doubled or put in; in a *tree* of JSON one value is replaced or removed.

    changed_bytes(draw, content) -> bytes        changed_tree(draw, tree) -> tree
"""

from __future__ import annotations

import json
import random
from typing import Any

FAST, SLOW = 20, 250  # mutations of each kind of file, in the fast and in the long tier


def changed_bytes(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content))
    end = min(len(content), start + draw.choice([0, 1, 1, 2, 8, 40]))
    put = draw.choice(
        [b"", b"\xff\xfe", b"\0", b"9" * 5000, b"[" * 100_000, b"NaN", b"-1", content[start:end] * 2, draw.randbytes(3)]
    )
    return content[:start] + put + content[end:] if draw.random() < 0.9 else content[:start]


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


NASTY: list[Any] = [
    None, -1, 0, 1, 10**9, 10**30, 2**63, 1.5, float("nan"), float("inf"), "", "x", "\0",
    "../../etc/passwd", "/dev/zero", [], {}, True, nested(200), nested(900), [0] * 1000, [1, 2, 3], {"x": 1},
    "float32", "cuda:99", "\ud800",
]  # fmt: skip


def changed_tree(draw: random.Random, tree: Any) -> Any:
    """With one value, anywhere in it, replaced or removed."""
    tree = json.loads(json.dumps(tree))
    holder, key = [tree], 0
    while isinstance(holder[key], (dict, list)) and holder[key] and (holder[key] is tree or draw.random() < 0.8):
        holder = holder[key]
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    if draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice(NASTY)
    return tree
