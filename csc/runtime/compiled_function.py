"""One function compiled by Inductor for tensors of certain layouts, and kept on disk as text and torch's own artifact.

Terms: a *structure* is that of csc.runtime.flat_tensors. A *key* is a hash of the text of the function's file, of the
layouts, and of all settings that Inductor looks at; of the machine and of csc the folder is.

    kept = KeptFunction(name, text, structure, layouts, folder)
    kept.read() -> CompiledFunction | None | MISSING        None: the function computes nothing
    kept.made(function, given, wait) -> (what `read` gives, was it there)    compiles it if it is not there
    CompiledFunction(tensors) -> what the function returns
    settings(folder, on_cpu) -> Inductor's, for what is kept there

Of several processes that need a function the first one makes it, the others wait for it, or turn to another one first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from csc.kernels.onednn import PRODUCT, least_multiplications
from csc.runtime.faster_products import products_by_onednn
from csc.runtime.flat_tensors import Layout, nesting, structure_of, tensors_of
from csc.runtime.float32_precision import float32_precision
from csc.torch_private.artifacts import Unwrapped, artifact, artifact_of, inductor_settings, vector_sets_are_proven

FOLDER, SETS_BUILD = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_VEC_ISA_OK"
PROVEN = "vector-sets-build"  # a file of the folder: see `_settings`


class Missing(Enum):
    """No function of this key is kept."""

    missing = 0


MISSING: Final = Missing.missing


class BeingMadeError(Exception):
    """Another process makes the function just now."""


@dataclass(frozen=True)
class CompiledFunction:
    """artifact: takes and returns flat tensors; structure: of what it returns; seconds: of its compilation; products:
    that oneDNN computes.
    """

    artifact: Callable[..., Sequence[torch.Tensor]]
    structure: Any
    seconds: float = 0.0
    products: int = 0

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.run([*tensors])

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """The same; the list may be empty afterwards."""
        return self.nested(self.unwrapped(tensors))

    @cached_property
    def unwrapped(self) -> Unwrapped:
        """Of flat tensors."""
        return Unwrapped(self.artifact)

    @cached_property
    def nested(self) -> Callable[[Sequence[torch.Tensor]], Any]:
        """What it returns, of flat tensors."""
        return nesting(self.structure)


@dataclass(frozen=True)
class KeptFunction:
    """A function for arguments of this structure and these layouts, and its place in a folder."""

    name: str
    text: str
    structure: Any
    layouts: list[Layout]
    folder: Path

    @cached_property
    def key(self) -> str:
        """Of its files."""
        of_torch = [
            torch.get_num_threads(), float32_precision(), torch.are_deterministic_algorithms_enabled(),
            str(torch.get_default_dtype()), inductor_settings(), os.environ.get("ATEN_CPU_CAPABILITY"),
            least_multiplications(),
        ]  # fmt: skip
        told = [self.text, self.name, self.layouts, self.structure, of_torch, self._settings]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def read(self) -> CompiledFunction | Missing | None:
        """Never an error of what is kept: damaged files count as missing."""
        with _kept_in(self.folder):
            return self._read()

    def made(
        self, function: Callable[..., Any], given: tuple[Any, ...], wait: bool = True
    ) -> tuple[CompiledFunction | None, bool]:
        """given: of these layouts. wait: for another process that makes it, else BeingMadeError. Any error of the trace
        or the compiler.
        """
        with _kept_in(self.folder), _alone(self._file, wait):
            found = self._read()
            return (self._make(function, given), False) if isinstance(found, Missing) else (found, True)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        on_cpu = any(device.startswith("cpu") for _, device, *_ in self.layouts) or not self.layouts
        return settings(self.folder, on_cpu)

    @cached_property
    def _file(self) -> Path:
        file = function_file(self.folder, self.key)
        file.parent.mkdir(exist_ok=True)
        return file

    def _read(self) -> CompiledFunction | Missing | None:
        try:
            told = json.loads(self._file.with_suffix(".json").read_text())
            if told["empty"]:
                return None
            found = artifact_of(self._file, self._settings)
            if found is None:
                return MISSING
            return CompiledFunction(found, told["structure"], told["seconds"], told["products"])
        except (OSError, ValueError, KeyError, TypeError):
            return MISSING

    def _make(self, function: Callable[..., Any], given: tuple[Any, ...]) -> CompiledFunction | None:
        found: list[Any] = []
        start, nested = time.perf_counter(), nesting(self.structure)

        def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
            with products_by_onednn() as count:
                results = function(*nested(tensors))
            found.append((structure_of(results), count.made))
            return tensors_of(results)

        made = artifact(flat, tensors_of(given), self._settings, self._file, (PRODUCT,))
        structure, products = found[-1]
        told = {"structure": structure, "seconds": round(time.perf_counter() - start, 2), "products": products}
        write_whole(self._file.with_suffix(".json"), json.dumps(told | {"empty": made is None}))
        return None if made is None else CompiledFunction(made, **told)


def function_file(folder: Path, key: str) -> Path:
    """Of torch's artifact; beside it .json says what it returns."""
    return folder / "functions" / f"{key}.bin"


def write_whole(file: Path, text: str) -> None:
    """A reader finds all of it, or what was there before."""
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(text)
    beside.replace(file)


def settings(folder: Path, on_cpu: bool = True) -> dict[str, Any]:
    """For Inductor, of what is kept in a folder. on_cpu: whether some of it runs there."""
    with _kept_in(folder):
        return _settings(folder, on_cpu)


def _settings(folder: Path, on_cpu: bool) -> dict[str, Any]:
    """What a text draws itself is what it draws as it is. Which vector instructions can be built for is
    found out once for a folder, which is of one CPU, compiler and torch: else each process asks.
    """
    drawn: dict[str, Any] = {"fallback_random": True}
    if not on_cpu or platform.machine() not in ("x86_64", "AMD64") or os.environ.get(SETS_BUILD):
        return drawn
    file = folder / PROVEN
    if not file.exists():
        with _alone(file):
            if not file.exists() and vector_sets_are_proven(drawn):
                file.touch()
    return drawn | {"cpp.vec_isa_ok": True} if file.exists() else drawn


@contextmanager
def _alone(file: Path, wait: bool = True) -> Iterator[None]:
    """No other process does this for the file meanwhile; one that ends lets go of it."""
    with file.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BeingMadeError from None
        yield


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """What torch compiles meanwhile is kept there. The user's own compilations stay where they are."""
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = str(folder)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(FOLDER, None)
        else:
            os.environ[FOLDER] = before
