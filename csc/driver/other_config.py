"""What a model's configuration says otherwise than the one beside a checkpoint: shapes may agree all the same.

differences(model, folder) -> ["num_attention_heads is 4 there, and 2 in the model", ...]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from csc.checkpoints.writing import CONFIGS
from csc.driver.checkpoint import is_pretrained

OF_NO_MODEL = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")  # what it is run with


def differences(model: nn.Module, folder: Path) -> list[str]:
    """None for a model that is not of transformers, and where no configuration can be read."""
    file = folder / CONFIGS[0]
    if not is_pretrained(model) or not file.is_file():
        return []
    config: Any = model.config
    try:
        then, now = json.loads(file.read_text()), json.loads(config.to_json_string())
    except (OSError, ValueError):
        return []
    return list(_of(then, now, "")) if isinstance(then, dict) else []


def _of(then: Mapping[str, Any], now: Mapping[str, Any], within: str) -> Iterator[str]:
    for name in dict.fromkeys([*then, *now]):
        if name in OF_NO_MODEL or name.startswith("_"):
            continue
        one, other = then.get(name), now.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _of(one, other, f"{within}{name}.")
        elif one != other:
            yield f"{within}{name} is {_told(one)} there, and {_told(other)} in the model"


def _told(value: Any) -> str:
    return "its default" if value is None else str(value)
