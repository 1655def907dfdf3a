"""Keys: hashes of all that decides what csc makes of a model, and of nothing else.

model_key(model, extra) -> hex                    Opaque if something in it cannot be described
trace_key(model, batch, options) -> hex           the model's key, that of a match: its traced templates
program_key(trace, options, trainable) -> hex     and the frozen set, the mesh, ...: its program directory
own_sources() -> hex                              csc's own files
mesh_key(model, sizes, options, trainable) -> hex   and the sizes of its batch: the mesh that was chosen
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from csc import devices
from csc.cache.describe import Describer
from csc.cache.indescribable import Opaque
from csc.cache.origins import Origins, csc_folders, version
from csc.cache.patched import patched
from csc.cache.reads import reads
from csc.cache.switches import switches
from csc.capture.batch import device_of
from csc.capture.trace.export import training, without_kv_cache
from csc.ir.program import Options

FORMAT = 5
# Of the options; and the mesh within layers.
OF_TRACES = ("loss_weight", "context", "precision", "keep_fp32", "loss_chunk", "fuse", "sequence_parallel", "replicate")
DISTRIBUTIONS = ("torch", "transformers", "triton")

__all__ = ["Opaque", "mesh_key", "model_key", "own_sources", "program_key", "trace_key"]


def model_key(model: nn.Module, extra: Mapping[str, Any]) -> str:
    """Of the model as it is traced, without tracing it: code, configuration, shapes, buffers; not its weights, nor
    what is frozen.

    extra: entries of the batch that are no tensors. Opaque, with the place, for what cannot be described.
    """
    describer = Describer(Origins(), device_of(model).type)
    with training(model), without_kv_cache(model):
        entries = describer.tree(dict(sorted(extra.items())), "batch")
        described = [describer.model(model), describer.hooks_of_all(), entries]
        described += [patched(describer), reads(describer), describer.classes.tree()]
    return _hash([FORMAT, described, describer.origins.tree(), _environment(model)])


def trace_key(model: str, batch: Any, options: Options) -> str:
    """model: its key; batch: the key of a match (csc.capture.guards)."""
    chosen = [getattr(options, name) for name in OF_TRACES]
    return _hash(
        [
            "trace",
            model,
            repr(batch),
            (options.mesh.cp, options.mesh.tp),
            options.mesh.components,
            options.mesh.own_ranks,
            options.mesh.own_cp,
            repr(chosen),
        ]
    )


def program_key(trace: str, options: Options, trainable: Mapping[str, bool]) -> str:
    """trace: the key of what it is made from; trainable: `requires_grad` of the parameters."""
    chosen = {one.name: _option(one.name, getattr(options, one.name)) for one in fields(Options)}
    return _hash(["program", trace, chosen, sorted(trainable.items())])


def mesh_key(model: str, sizes: Any, options: Options, trainable: Mapping[str, bool]) -> str:
    """model: its key; sizes: of the tensors of the example; options: with the open mesh."""
    return _hash(["mesh", program_key(model, options, trainable), repr(sizes)])


def _option(name: str, value: Any) -> str:
    """Of an option that names a file, or several, what is in it."""
    if name == "hardware" and isinstance(value, tuple):
        return repr([_option(name, one) for one in value])
    if name in ("schedule", "hardware") and isinstance(value, str):
        path = Path(value)
        if path.suffix in (".txt", ".toml") and path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
        return value
    return str(value) if name == "schedule" else repr(value)


def _environment(model: nn.Module) -> Any:
    device = device_of(model)
    here = [device.type, devices.capability(device), switches()]
    return [platform.python_version(), _versions(), *here, own_sources()]


@cache
def _versions() -> list[list[str]]:
    return [[name, version(name)] for name in DISTRIBUTIONS if importlib.util.find_spec(name)]


@cache
def own_sources() -> str:
    """A hash of csc's own files, as this process runs them: another csc, or an edited one, starts afresh."""
    digest = hashlib.sha256()
    for folder in csc_folders():
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".py", ".toml") and file.is_file():
                digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _hash(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
