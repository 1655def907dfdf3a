"""Keys: hashes of all that decides what csc makes of a model, and of nothing else."""

from __future__ import annotations

import builtins
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

import csc.codegen
import csc.kernels
import csc.passes
from csc import devices
from csc.cache.describe import Description, Opaque, refuse_asking
from csc.capture.batch import device_of
from csc.capture.reached import Reached
from csc.capture.sources import home_of, is_own, is_users
from csc.capture.trace.export import training, without_kv_cache
from csc.ir.program import Options
from csc.passes.pipeline import of_csc, traced_by_users
from csc.torch_private.hooks import hooks_of_tensor
from csc.torch_private.traces import modes_that_are_on

# --- Torch's own switches that decide what code computes: precision of products, kernels, dtypes, modes --------------


backends: Any = torch.backends
SWITCHES: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "inference": torch.is_inference_mode_enabled,
    "autocast": lambda: [[torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)] for d in devices.TYPES],
    "autocast cache": torch.is_autocast_cache_enabled,
    "deterministic": lambda: [
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
    ],
    "float32 products": torch.get_float32_matmul_precision,
    "float32 of all": lambda: backends.fp32_precision,
    "float32 of oneDNN": lambda: [backends.mkldnn.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision],
    "oneDNN": lambda: backends.mkldnn.enabled,
    "fast path of transformers": backends.mha.get_fastpath_enabled,
    **devices.SWITCHES,
}  # fmt: skip


def switches() -> list[Any]:
    """Each switch as it is now. Torch refuses to tell a float32 switch that was set in its newer way in the older one;
    then the newer tells.
    """
    return [[name, _state(read)] for name, read in SWITCHES.items()]


def tracing_switches() -> list[Any]:
    """Those that what is traced depends on, here. A compiled step is in no inference mode, wherever it is called."""
    left_out = devices.absent_switches()
    return [[name, _state(read)] for name, read in SWITCHES.items() if name != "inference" and name not in left_out]


def _state(read: Callable[[], Any]) -> str:
    try:
        return str(read())
    except RuntimeError:
        return "set in another way"


# --- Functions and classes of torch, of Python and of other distributions that somebody has put others in place of ---


SPACES: tuple[Any, ...] = (
    builtins, torch, torch.Tensor, torch.fft, torch.linalg, torch.special, torch.nn.attention, nn.functional, nn.init,
)  # fmt: skip


def replaced() -> Iterator[tuple[str, Any]]:
    """(place, value) of the user's functions and objects that stand in the place of functions of torch, of Python, of
    transformers or PEFT, and of his modes that are on.
    """
    for space in SPACES:
        for name, value in list(vars(space).items()):
            if is_own(_home(value)) and is_users(value):
                yield f"{space.__name__}.{name}", value
    for mode in modes_that_are_on():
        if is_users(type(mode)):
            yield "a mode that is on", mode
    for place in sorted(sys.modules):
        if place.partition(".")[0] in ("transformers", "peft"):
            for name, value in list(vars(sys.modules[place]).items()):
                if type(value) is FunctionType and is_own(_home(value)) and is_users(value):
                    yield f"{place}.{name}", value


def _home(value: Any) -> Any:
    return home_of(value) if isinstance(value, FunctionType) else type(value).__module__


def stand_ins() -> str:
    """A hash of the names in torch's own modules, and of what they stand for."""
    members = [(name, value) for space in SPACES for name, value in list(vars(space).items())]
    names = [f"{name} {named}" for name, one in members if isinstance(named := getattr(one, "__qualname__", None), str)]
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


# --- Keys: hashes of all that decides what csc makes of a model, and of nothing else ---------------------------------


FORMAT = 5
# Of the options; and the mesh within layers.
OF_TRACES = ("loss_weight", "context", "precision", "keep_fp32", "loss_chunk", "fuse", "sequence_parallel", "replicate")
DISTRIBUTIONS = ("torch", "transformers", "triton")

__all__ = ["Opaque", "function_key", "mesh_key", "model_key", "own_sources", "passes_key", "program_key", "trace_key"]


def model_key(model: nn.Module, extra: Mapping[str, Any]) -> str:
    """Of the model as it is traced, without tracing it: code, configuration, shapes, buffers; not its weights, nor
    what is frozen.

    extra: entries of the batch that are no tensors. Opaque, with the place, for what cannot be described.
    """
    device = device_of(model).type
    with training(model), without_kv_cache(model):
        hooks = [(f"hooks of {name}", hooks_of_tensor(one)) for name, one in model.named_parameters()]
        roots = [("batch", dict(sorted(extra.items()))), *hooks, *replaced()]
        tree = _described(Reached(model, roots, for_keys=True), model, device)
    return _hash([FORMAT, tree, _environment(model)])


def _described(reached: Reached, model: nn.Module | None = None, device: str = "cpu") -> Any:
    refuse_asking(reached)
    return [Description(reached, model, device).tree(), stand_ins()]


def trace_key(model: str, batch: Any, options: Options, passes: str = "") -> str:
    """model: its key; batch: the key of a match (csc.capture.guards); passes: that of the options' passes."""
    chosen = [getattr(options, name) for name in OF_TRACES]
    return _hash(
        [
            "trace",
            model,
            repr(batch),
            *options.mesh.graph_key,
            repr(chosen),
            passes,
        ]
    )


def passes_key(options: Options) -> str:
    """Of passes that are not csc's own: their code and options, and what else their code looks at; and of the order.

    Passes of a user that trace may look at all options. Opaque, with the place, for what cannot be described.
    """
    if options.passes is None:
        return ""
    own = [(f"pass {one.name}", one) for one in options.passes if not of_csc(one)]
    steps = [one.name if of_csc(one) else "" for one in options.passes]
    described = [steps, _described(Reached(roots=[*own, *replaced()], slots=False, for_keys=True))]
    return _hash([described, _chosen(options) if traced_by_users(options) else None])


def function_key(function: Callable[..., Any]) -> str:
    """Of what a function of a user does: its code, what it holds, and what else its code looks at; not of the rest of
    its file. Empty for one that cannot be described, as one that reads files.
    """
    reached = Reached(roots=[("function", function)], slots=False, for_keys=True)
    try:
        refuse_asking(reached)
        return _hash(Description(reached).tree())
    except Opaque:
        return ""


def program_key(trace: str, options: Options, trainable: Mapping[str, bool]) -> str:
    """trace: the key of what it is made from, the passes in it; trainable: `requires_grad` of the parameters."""
    chosen = _chosen(options)
    return _hash(["program", trace, chosen, sorted(trainable.items())])


def mesh_key(model: str, sizes: Any, options: Options, trainable: Mapping[str, bool]) -> str:
    """model: its key; sizes: of the tensors of the example; options: with the open mesh."""
    return _hash(["mesh", program_key(model, options, trainable), repr(sizes)])


def _chosen(options: Options) -> dict[str, str]:
    """Of all options but the passes, which have a key of their own."""
    names = [one.name for one in fields(Options) if one.name != "passes"]
    return {name: _option(name, getattr(options, name)) for name in names}


def _option(name: str, value: Any) -> str:
    """Of an option that names a file, or several, what is in it."""
    if name == "hardware" and isinstance(value, tuple):
        return repr([_option(name, item) for item in value])
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
    return [[name, importlib.metadata.version(name)] for name in DISTRIBUTIONS if importlib.util.find_spec(name)]


@cache
def own_sources() -> str:
    """A hash of csc's own files, as this process runs them: another csc, or an edited one, starts afresh."""
    digest = hashlib.sha256()
    packages = (csc, csc.codegen, csc.kernels, csc.passes)  # of a checkout, several folders
    for folder in dict.fromkeys(Path(package.__path__[0]).resolve() for package in packages):
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".py", ".toml") and file.is_file():
                digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _hash(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
