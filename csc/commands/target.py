"""`path.py:name` on the command line: load the user's file and find the compiled model in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from csc.api import compile
from csc.driver.compiled import CompiledModel
from csc.driver.new_model import compiled_model
from csc.driver.user_files import attribute, load_file
from csc.errors import InputError


def load_target(target: str, example: str | None = None) -> CompiledModel:
    """The CompiledModel named by `path.py:name`: decorated, made by csc.compile, a plain module, or a factory of one.

    example: name of the example batch (or a function that makes it) in the same file, for targets that have none.
    Raises InputError if there is no such file or name, or the file itself fails (with the user's line).
    """
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise InputError(f"{target!r} names no model", "target", "write path.py:name, for example train.py:llava")
    module = load_file(Path(path))
    value = attribute(module, name, path)
    if isinstance(value, CompiledModel):
        compiled = value
    elif isinstance(value, nn.Module) or callable(value):
        compiled = compiled_model(value, compile(lambda: nn.Module()).options, None)
    else:
        raise InputError(
            f"{name} is a {type(value).__name__}",
            target,
            "name a compiled model, an nn.Module or a function that makes one",
        )
    if example is not None:
        batch = attribute(module, example, path)
        compiled = compiled.with_example(batch() if callable(batch) else batch)
    return compiled


def overridden(compiled: CompiledModel, overrides: Mapping[str, Any]) -> CompiledModel:
    """With the options that the command line gives (those that are not None)."""
    changes = {name: value for name, value in overrides.items() if value is not None}
    return compiled.with_options(**changes) if changes else compiled
