"""Functions compiled by Inductor ahead of their calls, and kept in files, from which they run without a trace.

Nothing of Inductor is imported before something is compiled: it takes a second.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from importlib import import_module
from operator import is_
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, get_ident
from typing import Any
from unittest.mock import patch

import torch

Tensors = Sequence[torch.Tensor]
REPLACING = Lock()  # of who has put something in place of functions that compile and read
FUSED = 2  # calls that are worth the compiler's time
aten = torch.ops.aten
AS_THEY_ARE = frozenset({
    aten._unsafe_view, aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward,
})  # fmt: skip
COMPILES = "torch._inductor.compile_fx"
ASKING = Lock()  # the same of what calls compiled code, in which a thread may wait for another


def artifact(
    function: Callable[..., Tensors], given: Tensors, settings: Mapping[str, Any], file: Path,
    gains: Collection[Any] = (),
) -> Callable[..., Tensors] | None:  # fmt: skip
    """The function of these tensors, traced on fake ones and compiled for their sizes; kept in the file. It is for
    tensors laid out as these, and does not look. None if there is nothing in it to fuse: no two calls that Inductor
    makes kernels of, nor one of the operators `gains`. Any error of the trace, of Inductor, of the C++ compiler.
    """
    inductor_is_imported()
    from torch._inductor import standalone_compile

    from csc.torch_private.autograd import under_autograd
    from csc.torch_private.traces import make_fx

    with under_autograd(), torch.no_grad():  # a step runs below autograd; what traces does not
        graph = make_fx(function, tracing_mode="fake")(*given)
        targets = [node.target for node in graph.graph.nodes]
        if sum(map(_is_generated, targets)) < FUSED and not any(target in gains for target in targets):
            return None
        with REPLACING, _headers_noted(file.parent), _arguments_unasked():
            made = standalone_compile(
                graph, list(given), dynamic_shapes="from_example_inputs", options={"config_patches": dict(settings)}
            )
    with _written_whole(file) as beside:
        made.save(path=str(beside))
    return made


def _is_generated(target: Any) -> bool:
    """Whether Inductor makes a kernel of a call: not of a view, a product, or an operator that is not torch's own."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return not target.is_view and target.overloadpacket not in AS_THEY_ARE


def artifact_of(file: Path, settings: Mapping[str, Any]) -> Callable[..., Tensors] | None:
    """What `artifact` kept under these settings; None if it is not there, or not this torch's."""
    if not file.is_file():
        return None
    inductor_is_imported()
    from torch._inductor import CompiledArtifact, config

    try:
        with REPLACING, config.patch(dict(settings)), _headers_noted(file.parent, read=True):
            return CompiledArtifact.load(path=str(file))
    except Exception:  # damaged, of another torch, or kernels that are gone and cannot be made again
        return None


def inductor_is_imported() -> None:
    """Without the templates of kernels for GPUs, which take a third of it: each is parsed when it is used."""
    if COMPILES in sys.modules:
        return
    from torch._inductor.codegen.common import KernelTemplate

    own = KernelTemplate._template_from_string
    with REPLACING, patch.object(KernelTemplate, "_template_from_string", staticmethod(partial(_ParsedLater, own))):
        import_module(COMPILES)


class _ParsedLater:
    """A template of jinja, from its text."""

    def __init__(self, parse: Callable[[str], Any], text: str) -> None:
        self._parse, self._text = parse, text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # who copies it asks
            raise AttributeError(name)
        return getattr(self._parsed, name)

    @cached_property
    def _parsed(self) -> Any:
        return self._parse(self._text)


@contextmanager
def _headers_noted(folder: Path, read: bool = False) -> Iterator[None]:
    """Which precompiled header serves a kernel is noted in the folder meanwhile. read: what is noted is taken. Else
    Inductor has the C++ compiler go through all headers in each process, in case a kernel is to be made.
    """
    from torch._inductor import codecache

    own: Any = codecache._precompile_header

    def found(header: str, command: str, **of_compiler: Any) -> str:
        told = [header, command, sorted((name, str(value)) for name, value in of_compiler.items())]
        note = folder / f"{hashlib.sha256(repr(told).encode()).hexdigest()}.header"
        if read and note.is_file() and Path(before := note.read_text()).is_file():
            return before
        compiled = str(own(header, command, **of_compiler))
        with _written_whole(note) as beside:
            beside.write_text(compiled)
        return compiled

    with _in_this_thread(codecache, "_precompile_header", found):
        yield


@contextmanager
def _arguments_unasked() -> Iterator[None]:
    """What is compiled meanwhile does not ask again how its arguments are laid out: who calls it has."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    with _in_this_thread(PythonWrapperCodegen, "codegen_input_size_asserts", lambda _: None):
        yield


@contextmanager
def _in_this_thread(holder: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """`other` in place of one of Inductor's functions, called from this thread; under a lock of that function."""
    thread, own = get_ident(), getattr(holder, name)

    def called(*given: Any, **named: Any) -> Any:
        return (other if get_ident() == thread else own)(*given, **named)

    setattr(holder, name, called)
    try:
        yield
    finally:
        setattr(holder, name, own)


@contextmanager
def _written_whole(file: Path) -> Iterator[Path]:
    """Where to write it: a reader finds all of it or what was there before, whoever ends in the middle of it."""
    beside = file.with_suffix(f".{os.getpid()}")
    yield beside
    beside.replace(file)


class Unwrapped:
    """An artifact without what torch has around Inductor's code in it, once one call has shown that this hands on the
    very tensors that it is given, and returns the very ones that come of them. Where it does more (outputs that are
    views of arguments), or is none of Inductor's, it is called as it is.
    """

    def __init__(self, run: Callable[..., Tensors]) -> None:
        self._run, self._asked = run, False
        self.code: Callable[[list[torch.Tensor]], Tensors] | None = None  # what is called, once that has been shown

    def __call__(self, tensors: list[torch.Tensor]) -> Tensors:
        """Of tensors without gradients. The list may be empty afterwards: the code lets go of what it has read."""
        if self.code is not None:
            return self.code(tensors)
        if self._asked or not ASKING.acquire(blocking=False):  # a thread that waited here might be waited for
            return self._run(*tensors)
        try:
            with _graph_calls() as calls:
                found = self._run(*tensors)
        finally:
            ASKING.release()
        self._asked = True
        if len(calls) == 1 and _are(calls[0][1], tensors) and _are(calls[0][2], found):
            self.code = getattr(calls[0][0], "current_callable", None)
        return found


def _are(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


@contextmanager
def _graph_calls() -> Iterator[list[tuple[Any, list[Any], list[Any]]]]:
    """(compiled graph, its arguments, its results) of each call of one in this thread meanwhile."""
    from torch._inductor.output_code import CompiledFxGraph

    calls: list[tuple[Any, list[Any], list[Any]]] = []
    own = CompiledFxGraph.__call__

    def noted(graph: Any, inputs: Any) -> Any:
        given = list(inputs)  # the code empties its list
        found = own(graph, inputs)
        calls.append((graph, given, list(found)))
        return found

    with _in_this_thread(CompiledFxGraph, "__call__", noted):
        yield calls


def inductor_settings() -> str:
    """A hash of Inductor's settings as they are now."""
    from torch._inductor import config

    return hashlib.sha256(repr(sorted(config.save_config_portable().items())).encode()).hexdigest()


def vector_sets_are_proven(settings: Mapping[str, Any]) -> bool:
    """Whether the C++ compiler builds for the widest vector instruction set that the CPU names, which is the one that
    Inductor takes, and a process loads what it built: shown by a function that is compiled for it. Inductor asks that
    of every set in each process, without the precompiled header; a compiler that knows the widest knows those before
    it. False where the environment asks for another set.
    """
    if os.environ.get("ATEN_CPU_CAPABILITY"):
        return False
    widest = {**settings, "cpp.vec_isa_ok": True}
    try:
        with TemporaryDirectory() as folder:
            found = artifact(lambda x: [x.exp().sin()], [torch.empty(256)], widest, Path(folder) / "proof")
    except Exception:  # then each function says what the compiler does not do
        return False
    return found is not None
