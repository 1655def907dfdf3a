"""One function compiled by Inductor for tensors of certain layouts, kept on disk, and tried beside what it stands
for.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from csc import devices
from csc.kernels.onednn import PRODUCT, is_worth, least_multiplications
from csc.runtime.flat_tensors import Layout, empty_as, nesting, structure_of, tensors_of
from csc.torch_private.artifacts import (
    Unwrapped,
    artifact,
    artifact_of,
    inductor_is_imported,
    inductor_settings,
    vector_sets_are_proven,
)

# --- The precision of float32 in matrix products and convolutions, as torch has it set -------------------------------
#
# Torch has two ways to set it: by one word for products, and by library. Where one was set in the second way, the word
# that is left from the first may no longer hold, and torch refuses to tell it: then it is "". What the libraries tell
# holds in both ways.


def float32_precision() -> list[str]:
    """The word for products, then the precision of each library in csc.devices.LIBRARIES."""
    return [_word(), *(library.fp32_precision for library in devices.LIBRARIES)]


def set_float32_precision(told: Sequence[str]) -> None:
    """Make it what `float32_precision` has told, in another process, too."""
    word, *libraries = told
    torch.set_float32_matmul_precision(word or "highest")  # before the libraries: it sets some of theirs
    for library, precision in zip(devices.LIBRARIES, libraries, strict=True):
        library.fp32_precision = precision


def _word() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""


# --- The products of a function that is to be compiled, computed by oneDNN where that is the faster library ----------


aten = torch.ops.aten
LARGE = 2**16  # entries of a transposed matrix, from which on a kernel of Inductor's is worth the compiler's time


@dataclass
class Replaced:
    """made: products that were put in the place of others."""

    made: int = 0


@contextmanager
def products_by_onednn() -> Iterator[Replaced]:
    """A large transposed left matrix is copied first, by a kernel that Inductor makes, part of the one that computes
    the matrix: oneDNN's call has it copied by one of ATen's, which takes several times as long.
    """
    count = Replaced()
    if not least_multiplications():
        yield count
        return
    from csc.torch_private.traces import TorchDispatchMode

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            matrices = _matrices(operator, args, kwargs)
            if not matrices or not _gains(*matrices):
                return operator(*args, **(kwargs or {}))
            left, *rest = matrices
            if left.numel() >= LARGE and not left.is_contiguous():
                left = left.clone(memory_format=torch.contiguous_format)
            count.made += 1
            return PRODUCT(left, *rest)

    with Products():
        yield count


def _matrices(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[torch.Tensor, ...]:
    """Of a product of two matrices: both, and a row that is added to it; empty for any other call."""
    if kwargs:  # alpha, or beta
        return ()
    if operator is aten.mm.default:
        return args
    if operator is aten.addmm.default:
        added, *matrices = args
        return (*matrices, added)
    return ()


def _gains(left: torch.Tensor, right: torch.Tensor, row: torch.Tensor | None = None) -> bool:
    if left.dtype is not torch.float32 or left.device.type != "cpu":
        return False
    if row is not None and row.shape != right.shape[1:]:  # a number, or other rows for each token
        return False
    return is_worth(*left.shape, right.shape[1])


# --- One function compiled by Inductor for tensors of certain layouts ------------------------------------------------
#
# It is kept on disk as text and torch's own artifact.
#
# Terms: a *structure* is that of csc.runtime.compiled_function. A *key* is a hash of the text of the function's file,
# of the layouts, and of all settings that Inductor looks at; of the machine and of csc the folder is.
#
# Of several processes that need a function the first one makes it, the others wait for it, or turn to another one
# first.


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
        identity = [self.text, self.name, self.layouts, self.structure, of_torch, self._settings]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def read(self) -> CompiledFunction | Missing | None:
        """Returns what is kept; None for a function that computes nothing, MISSING where nothing is kept. Never an
        error of what is kept: damaged files count as missing.
        """
        with _kept_in(self.folder):
            return self._read()

    def made(
        self, function: Callable[..., Any], given: tuple[Any, ...], wait: bool = True
    ) -> tuple[CompiledFunction | None, bool]:
        """given: of these layouts. wait: for another process that makes it, else BeingMadeError. Any error of the trace
        or the compiler.
        """
        with _kept_in(self.folder), _alone(self._file, wait):
            kept = self._read()
            return (self._make(function, given), False) if isinstance(kept, Missing) else (kept, True)

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
            about = json.loads(self._file.with_suffix(".json").read_text())
            if about["empty"]:
                return None
            found = artifact_of(self._file, self._settings)
            if found is None:
                return MISSING
            return CompiledFunction(found, about["structure"], about["seconds"], about["products"])
        except (OSError, ValueError, KeyError, TypeError):
            return MISSING

    def _make(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> CompiledFunction | None:
        traces: list[Any] = []
        start, nested = time.perf_counter(), nesting(self.structure)

        def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
            with products_by_onednn() as count:
                results = function(*nested(tensors))
            traces.append((structure_of(results), count.made))
            return tensors_of(results)

        compiled = artifact(flat, tensors_of(arguments), self._settings, self._file, (PRODUCT,))
        structure, products = traces[-1]
        about = {"structure": structure, "seconds": round(time.perf_counter() - start, 2), "products": products}
        write_whole(self._file.with_suffix(".json"), json.dumps(about | {"empty": compiled is None}))
        return None if compiled is None else CompiledFunction(compiled, **about)


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


# --- What another process has to know to compile a function of a layer file: text, and no tensor ---------------------
#
# Tensors are told by their layouts; what stands for them where they are compiled has memory, and no values.


@dataclass(frozen=True)
class TorchState:
    """Switches that stand in a function's key."""

    threads: int
    precision: list[str]
    deterministic: bool
    dtype: str
    onednn: bool

    @classmethod
    def now(cls) -> TorchState:
        """Those of this process."""
        dtype = str(torch.get_default_dtype()).removeprefix("torch.")
        deterministic = torch.are_deterministic_algorithms_enabled()
        onednn = bool(torch.backends.mkldnn.enabled)
        return cls(torch.get_num_threads(), float32_precision(), deterministic, dtype, onednn)

    def set(self) -> None:
        """Make them this process'."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        set_float32_precision(self.precision)
        torch.use_deterministic_algorithms(self.deterministic)
        torch.set_default_dtype(getattr(torch, self.dtype))
        torch.backends.mkldnn.set_flags(_enabled=self.onednn, _fp32_precision=None)


@dataclass(frozen=True)
class FunctionOrder:
    """file, name: of the function. text: of the file, as `code` gives it. key: of what is to be kept."""

    file: str
    name: str
    text: str
    key: str
    structure: Any
    layouts: list[Layout]
    folder: str

    @classmethod
    def of(cls, function: Callable[..., Any], kept: KeptFunction) -> FunctionOrder:
        """Of a function of a layer file, and what is to be kept of it."""
        file = function.__code__.co_filename
        return cls(file, kept.name, kept.text, kept.key, kept.structure, kept.layouts, str(kept.folder))

    @classmethod
    def read(cls, line: str) -> FunctionOrder:
        """Of `line`."""
        return cls(**json.loads(line))

    @property
    def form(self) -> str:
        """Of its arguments."""
        return form_of(self.structure, self.layouts)

    def make(self) -> None:
        """Compile it, unless it is kept, in another process than the one that ordered it. ValueError if what this
        process finds is not what was ordered; any error of importing the file, or of the compilation.
        """
        if code(Path(self.file).read_text()) != self.text:
            raise ValueError(f"{self.file} has changed")
        kept = KeptFunction(self.name, self.text, self.structure, self.layouts, Path(self.folder))
        if kept.key != self.key:
            raise ValueError("torch's or Inductor's settings are others here")
        kept.made(self._imported(), nesting(self.structure)(empty_as(self.layouts)))

    @property
    def is_kept(self) -> bool:
        """Whether the folder has it, as far as names say."""
        return function_file(Path(self.folder), self.key).with_suffix(".json").is_file()

    @property
    def shown(self) -> str:
        """What the log calls it."""
        return f"{Path(self.file).stem}.{self.name}"

    def line(self) -> str:
        """All of it."""
        return json.dumps(asdict(self))

    def _imported(self) -> Callable[..., Any]:
        spec = importlib.util.spec_from_file_location(f"csc_ordered_{uuid.uuid4().hex}", self.file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, self.name)
        return function


def prepare(folder: Path) -> None:
    """What is the same for every function that this process is going to make there. Any error of the compiler."""
    inductor_is_imported()
    settings(folder)


def form_of(structure: Any, layouts: Sequence[Layout]) -> str:
    """Returns a hash of the structure and the layouts of arguments: the same on all ranks, whatever the index of a
    device is.
    """
    of_all = [[dtype, device.partition(":")[0], sizes, strides] for dtype, device, sizes, strides in layouts]
    return hashlib.sha256(json.dumps([structure, of_all]).encode()).hexdigest()[:32]


def code(text: str) -> str:
    """A file's Python without comments and what its docstring says of a program: the same for any number of layers."""
    tree = ast.parse(text)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return ast.dump(tree)
