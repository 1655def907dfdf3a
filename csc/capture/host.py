"""Functions of a model that are run for every batch before the step, outside the graph.

Some models take Python decisions from the tokens themselves (Qwen-VL counts positions image by image). The function
that does so is found while tracing: the outermost one around the decision whose tensors are batch entries as they are.
It is then run on the real batch, and what it returns enters the graph as further batch entries.

    find(model, entries, frame) -> Method | None          while tracing: the method around a frame
    recorded(model, method, entries, found)               context: the method's next call ends in found(HostCall)
    patched(model, calls, example, batch)                 context: these methods return entries of a traced batch
    call.entries(model, batch) -> {name: tensor}          what it makes of a real batch
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from csc.errors import InputError
from csc.torch_private import outside_tracing, pytree


@dataclass(frozen=True)
class Method:
    """A method of the module at a path."""

    module: str
    function: str

    def of(self, model: nn.Module) -> Callable[..., Any]:
        """The method, bound, as its class has it."""
        module = model.get_submodule(self.module)
        return getattr(type(module), self.function).__get__(module)


@dataclass(frozen=True)
class HostCall:
    """A method, and what it is called with: (parameter, batch entry), and (parameter, value) where that is no tensor
    (plain values, configurations of the model).
    """

    method: Method
    arguments: tuple[tuple[str, str], ...]
    plain: tuple[tuple[str, Any], ...] = field(compare=False)

    @property
    def name(self) -> str:
        """`model.get_rope_index`."""
        return f"{self.method.module}.{self.function}" if self.method.module else self.function

    @property
    def function(self) -> str:
        """`get_rope_index`."""
        return self.method.function

    def gives_tensors(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> bool:
        """Whether it runs on a batch and returns tensors, and nothing that would have to be traced for its value."""
        try:
            leaves = pytree.tree_leaves(self._results(model, batch))
        except Exception:
            return False
        return all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves)

    def _results(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        given = {parameter: batch[entry] for parameter, entry in self.arguments}
        with outside_tracing():
            return self.method.of(model)(**given, **dict(self.plain))

    def entries(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors it returns, named after it, for a real microbatch. InputError if it raises."""
        try:
            results = self._results(model, batch)
        except Exception as error:
            raise InputError(
                f"{self.name} refuses the batch: {error}",
                ", ".join(entry for _, entry in self.arguments),
                "check these entries: placeholders in the text, image sizes and masks have to fit each other",
            ) from error
        return {
            f"{self.function}_{place}": leaf
            for place, leaf in enumerate(pytree.tree_leaves(results))
            if isinstance(leaf, torch.Tensor)
        }

    def stand_in(
        self, model: nn.Module, example: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """What is called in its place while tracing: with the arguments of this call it gives what the real one gives,
        its tensors taken from the traced batch; with others it is the real one.
        """
        leaves, structure = pytree.tree_flatten(self._results(model, example))
        entries = {id(tensor): name for name, tensor in batch.items()}
        real = self.method.of(model)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = _bound(self.method, real, args, kwargs, entries)
            if call != self or not _alike(call.plain, self.plain):
                return real(*args, **kwargs)
            return pytree.tree_unflatten(
                [batch[f"{self.function}_{i}"] if isinstance(leaf, torch.Tensor) else leaf
                 for i, leaf in enumerate(leaves)], structure,
            )  # fmt: skip

        return replacement


def _alike(one: Sequence[tuple[str, Any]], other: Sequence[tuple[str, Any]]) -> bool:
    """Whether two calls have the same plain values."""
    if [name for name, _ in one] != [name for name, _ in other]:
        return False
    return all(a is b or bool(a == b) for (_, a), (_, b) in zip(one, other))


def _bound(
    method: Method, function: Callable[..., Any], args: Any, kwargs: Any, entries: Mapping[int, str]
) -> HostCall | None:
    """A call with these arguments; None if a tensor among them is no batch entry, or a value belongs to the trace.

    entries: names of the traced batch entries by `id`.
    """
    arguments: list[tuple[str, str]] = []
    plain: list[tuple[str, Any]] = []
    bound = inspect.signature(function).bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        if isinstance(value, torch.Tensor):
            if id(value) not in entries:
                return None
            arguments.append((name, entries[id(value)]))
        elif not _plain(value):
            return None
        elif inspect.signature(function).parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            plain += value.items()
        elif inspect.signature(function).parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            return None
        else:
            plain.append((name, value))
    return HostCall(method, tuple(arguments), tuple(plain)) if arguments else None


def _plain(value: Any) -> bool:
    traced = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return not any(isinstance(leaf, traced) for leaf in pytree.tree_leaves(value))


def find(model: nn.Module, entries: Mapping[int, str], frame: FrameType | None) -> Method | None:
    """The outermost method around `frame`, below the model's own forward, whose tensors are all batch entries, as far
    as its local names still show (see `recorded`).
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found: Method | None = None
    while frame is not None:
        found = _method(frame, paths, entries) or found
        if frame.f_locals.get("self") is model and frame.f_code.co_name == "forward":
            break
        frame = frame.f_back
    return found


def _method(frame: FrameType, paths: Mapping[int, str], entries: Mapping[int, str]) -> Method | None:
    module = frame.f_locals.get("self")
    if not isinstance(module, nn.Module) or id(module) not in paths or frame.f_code.co_name == "forward":
        return None
    function = inspect.unwrap(getattr(type(module), frame.f_code.co_name, None) or _method)
    if not isinstance(function, FunctionType) or function.__code__ is not frame.f_code:
        return None
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    values = [frame.f_locals.get(name) for name in names]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    others = [value for value in values if not isinstance(value, torch.Tensor)]
    if not tensors or any(id(tensor) not in entries for tensor in tensors) or not all(map(_plain, others)):
        return None
    return Method(paths[id(module)], frame.f_code.co_name)


@contextmanager
def recorded(
    model: nn.Module, method: Method | None, entries: Mapping[int, str], found: Callable[[HostCall], None]
) -> Iterator[None]:
    """The model with a method that first tells `found` how it is called, if it could run on the host; None: as it is.

    What a frame shows of a function's arguments may have been replaced in its body, so they are taken as they come.
    """
    if method is None:
        yield
        return
    module, real = model.get_submodule(method.module), method.of(model)

    def asking(*args: Any, **kwargs: Any) -> Any:
        call = _bound(method, real, args, kwargs, entries)
        if call is not None:
            found(call)
        return real(*args, **kwargs)

    module.__dict__[method.function] = asking
    try:
        yield
    finally:
        del module.__dict__[method.function]


@contextmanager
def patched(
    model: nn.Module,
    calls: Sequence[HostCall],
    example: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
) -> Iterator[None]:
    """The model with these methods replaced by what they return for `example`, as entries of the traced `batch`."""
    owners = [(model.get_submodule(call.method.module), call) for call in calls]
    for module, call in owners:
        module.__dict__[call.function] = call.stand_in(model, example, batch)
    try:
        yield
    finally:
        for module, call in owners:
            del module.__dict__[call.function]
