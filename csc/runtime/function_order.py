"""What another process has to know to compile a function of a layer file: text, and no tensor.

    order = FunctionOrder.of(function, kept)
    order.make(wait)                                             in any process, unless it is kept
    order.line() -> str         FunctionOrder.read(line)         one line of JSON
    TorchState.now()            state.set()                      what of torch's switches a compilation depends on
    code(text) -> str                                            of a layer file, as it stands in keys
    form_of(structure, layouts) -> str                           of arguments: the same on all ranks

Tensors are told by their layouts; what stands for them where they are compiled has memory, and no values.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from csc.runtime.compiled_function import KeptFunction, function_file, settings
from csc.runtime.flat_tensors import Layout, empty_as, nesting
from csc.runtime.float32_precision import float32_precision, set_float32_precision
from csc.torch_private.artifacts import inductor_is_imported


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
        found: Callable[..., Any] = getattr(module, self.name)
        return found


def prepare(folder: Path) -> None:
    """What is the same for every function that this process is going to make there. Any error of the compiler."""
    inductor_is_imported()
    settings(folder)


def form_of(structure: Any, layouts: Sequence[Layout]) -> str:
    """Whatever the index of a device is."""
    of_all = [[dtype, device.partition(":")[0], sizes, strides] for dtype, device, sizes, strides in layouts]
    return hashlib.sha256(json.dumps([structure, of_all]).encode()).hexdigest()[:32]


def code(text: str) -> str:
    """A file's Python without comments and what its docstring says of a program: the same for any number of layers."""
    tree = ast.parse(text)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return ast.dump(tree)
