"""What is kept, as named bytes: for the disk, and for other ranks.

Terms
  Packed     a finished program: the files of its directory but for the example, and what a batch is asked before it
  Traced     a Program after the passes that trace (csc.passes.runner.TRACING), from which planning starts
  Captured   a Program as it was traced, for all sizes that its trace allows; it can be lowered, not shown
  guards     all carry what the captures of the model assumed (csc.capture.guards)

    packed_bytes(packed, model) -> {name: bytes}          packed_from(files, model) -> Packed
    traced_bytes(traced, model) -> {name: bytes}          traced_from(files, model) -> Traced
    captured_bytes(captured, model) -> {name: bytes}      captured_from(files, model) -> Captured
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from csc.analysis import batch_limits
from csc.analysis.batch_limits import Places
from csc.cache import stored_guards
from csc.capture.guards import Guards
from csc.ir import stored
from csc.ir.capture_guards import Unstorable
from csc.ir.program import Program
from csc.runtime.weights import with_own_memory

PREFIX = "program/"
Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Packed:
    """files: text and tensors by path in the program directory; the example batch is the user's data, not in it.

    bound: why it means something in this process alone; "": it does not.
    """

    files: Files
    places: Places
    guards: Guards
    bound: str = ""


@dataclass(frozen=True)
class TracedProgram:
    """history: the Programs after capture and each pass, if it was traced in this process."""

    program: Program
    places: Places
    guards: Guards
    history: tuple[Program, ...] = ()


@dataclass(frozen=True)
class Captured:
    """A capture, and what it and those before it assumed."""

    program: Program
    guards: Guards


def packed_bytes(packed: Packed, model: nn.Module) -> dict[str, bytes]:
    """Unstorable if something in it has no form in text, or means something in this process alone."""
    if packed.bound:
        raise Unstorable(packed.bound)
    files = {PREFIX + name: content for name, content in packed.files.items()}
    return files | _common(packed.places, packed.guards, model)


def packed_from(files: Files, model: nn.Module) -> Packed:
    """The inverse. An exception of csc.cache.model_entries.DAMAGE for bytes that are none."""
    own = {name.removeprefix(PREFIX): content for name, content in files.items() if name.startswith(PREFIX)}
    return Packed(own, *_common_from(files, model))


def traced_bytes(traced: TracedProgram, model: nn.Module) -> dict[str, bytes]:
    """Unstorable if something in it has no form in text. The history is left out."""
    tree, tensors = stored.to_tree(traced.program)
    files = {"trace.json": text_of(tree), "trace.safetensors": _saved(tensors)}
    return files | _common(traced.places, traced.guards, model)


def traced_from(files: Files, model: nn.Module) -> TracedProgram:
    """The inverse. An exception of csc.cache.model_entries.DAMAGE for bytes that are none."""
    program = stored.from_tree(json.loads(files["trace.json"]), load_tensors(files["trace.safetensors"]))
    history = tuple(replace(one, seconds=0.0, summary=f"{one.summary} (cache)") for one in program.history)
    return TracedProgram(replace(program, history=history), *_common_from(files, model))


def captured_bytes(captured: Captured, model: nn.Module) -> dict[str, bytes]:
    """Unstorable if something in it has no form in text, or means something in this process alone."""
    if reason := stored.bound(captured.program):
        raise Unstorable(reason)
    tree, tensors = stored.to_tree(captured.program, captured=True)
    return {
        "capture.json": text_of(tree),
        "capture.safetensors": _saved(tensors),
        "guards.json": text_of(stored_guards.to_tree(captured.guards, model)),
    }


def captured_from(files: Files, model: nn.Module) -> Captured:
    """The inverse. An exception of csc.cache.model_entries.DAMAGE for bytes that are none."""
    program = stored.from_tree(json.loads(files["capture.json"]), load_tensors(files["capture.safetensors"]))
    history = tuple(replace(one, seconds=0.0, summary=f"{one.summary} (cache)") for one in program.history)
    return Captured(replace(program, history=history), guards_from(files, model))


def guards_from(files: Files, model: nn.Module) -> Guards:
    """An exception of csc.cache.model_entries.DAMAGE for bytes that are none."""
    return stored_guards.from_tree(json.loads(files["guards.json"]), model)


def _common(places: Places, guards: Guards, model: nn.Module) -> dict[str, bytes]:
    tree, constants = batch_limits.to_tree(places)
    return {
        "places.json": text_of(tree),
        "places.safetensors": _saved(constants),
        "guards.json": text_of(stored_guards.to_tree(guards, model)),
    }


def _common_from(files: Files, model: nn.Module) -> tuple[Places, Guards]:
    constants = load_tensors(files["places.safetensors"])
    places = batch_limits.from_tree(json.loads(files["places.json"]), constants)
    return places, guards_from(files, model)


def text_of(tree: Any) -> bytes:
    """JSON."""
    return json.dumps(tree, separators=(",", ":")).encode()


def _saved(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return save_tensors({name: with_own_memory(tensor) for name, tensor in tensors.items()})
