"""One function compiled by Inductor for tensors of certain layouts, and kept on disk as text and torch's own artifact.

Terms: a *structure* is that of csc.runtime.flat_tensors. A *key* is a hash of the text of the function's file, of the
layouts, and of all settings that Inductor looks at; of the machine and of csc the folder is.

    compiled_function(function, text, given, folder) -> (CompiledFunction | None, was kept)     None: nothing to compute
    CompiledFunction(tensors) -> what the function returns

Of several processes that need a function the first one makes it, the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from csc.runtime.flat_tensors import nested_as, structure_of, tensors_of
from csc.torch_private.artifacts import artifact, artifact_of, inductor_settings, vector_sets_are_proven

FOLDER, SETS_BUILD = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_VEC_ISA_OK"
PROVEN = "vector-sets-build"  # a file of the folder: see `_settings`
NOTHING = False  # in place of a structure


@dataclass(frozen=True)
class CompiledFunction:
    """artifact: takes and returns flat tensors; structure: of what the function returns."""

    artifact: Callable[..., Sequence[torch.Tensor]]
    structure: Any

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        return nested_as(self.structure, iter(self.artifact(*tensors)))


def compiled_function(
    function: Callable[..., Any], text: str, given: tuple[Any, ...], folder: Path | None
) -> tuple[CompiledFunction | None, bool]:
    """given: nested tuples and dicts of tensors. Any error of the trace or the compiler; TypeError for other values."""
    tensors = tensors_of(given)
    with _kept_in(folder):
        if folder is None:
            return _made(function, given, tensors, {}, None), False
        settings = _settings(folder)
        file = folder / "functions" / f"{_key(function, text, given, tensors, settings)}.bin"
        file.parent.mkdir(exist_ok=True)
        with _alone(file):
            structure = _read(file.with_suffix(".json"))
            if structure is NOTHING:
                return None, True
            found = None if structure is ... else artifact_of(file, settings)
            if found is not None:
                return CompiledFunction(found, structure), True
            return _made(function, given, tensors, settings, file), False


def _made(
    function: Callable[..., Any], given: tuple[Any, ...], tensors: Sequence[torch.Tensor], settings: Mapping[str, Any],
    file: Path | None,
) -> CompiledFunction | None:  # fmt: skip
    structure, found = structure_of(given), []

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        results = function(*nested_as(structure, iter(tensors)))
        found.append(structure_of(results))
        return tensors_of(results)

    made = artifact(flat, tensors, settings, file)
    if file is not None:
        file.with_suffix(".json").write_text(json.dumps(NOTHING if made is None else found[-1]))
    return None if made is None else CompiledFunction(made, found[-1])


def _read(file: Path) -> Any:
    """The structure in a file; `...` if there is none."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return ...


def _key(
    function: Callable[..., Any], text: str, given: Any, tensors: Sequence[torch.Tensor], settings: Mapping[str, Any]
) -> str:
    layouts = [[str(one.dtype), str(one.device), [*one.shape], [*one.stride()]] for one in tensors]
    of_torch = [
        torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        str(torch.get_default_dtype()), inductor_settings(), os.environ.get("ATEN_CPU_CAPABILITY"),
    ]  # fmt: skip
    told = [text, function.__name__, layouts, structure_of(given), of_torch, {**settings}]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _settings(folder: Path) -> dict[str, Any]:
    """For Inductor. Which vector instructions can be built for is found out once for a folder, which is of one CPU,
    compiler and torch: else each process asks.
    """
    if platform.machine() not in ("x86_64", "AMD64") or os.environ.get(SETS_BUILD):
        return {}
    file = folder / PROVEN
    if not file.exists() and vector_sets_are_proven():
        file.touch()
    return {"cpp.vec_isa_ok": True} if file.exists() else {}


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """No other process does this for the file meanwhile; one that ends lets go of it."""
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _kept_in(folder: Path | None) -> Iterator[None]:
    """What torch compiles meanwhile is kept there. The user's own compilations stay where they are."""
    before = os.environ.get(FOLDER)
    if folder is not None:
        os.environ[FOLDER] = str(folder)
    try:
        yield
    finally:
        if folder is not None and before is None:
            os.environ.pop(FOLDER, None)
        elif before is not None:
            os.environ[FOLDER] = before
