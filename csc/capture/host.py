"""Functions of a model that are run for every batch before the step, outside the graph.

Some models take Python decisions from the tokens themselves (Qwen-VL counts positions image by image). The function
that does so is found while tracing: the outermost one around the decision whose tensors are batch entries as they are.
It is then run on the real batch, and what it returns enters the graph as further batch entries.

    find(model, entries, frame) -> HostCall | None        while tracing: the function around a frame
    patched(model, calls, batch)                          context: these functions return entries of a traced batch
    call.entries(model, batch) -> {name: tensor}          what it makes of a real batch
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from csc.errors import InputError
from csc.torch_private import outside_tracing, pytree


@dataclass(frozen=True)
class HostCall:
    """A method of a module of the model, and what it is called with.

    module: path of the module. arguments: (parameter, batch entry); plain: (parameter, value) for the others: plain
    values or objects of the model (configurations). taken: the parameters that must be given a batch entry or None.
    """

    module: str
    function: str
    arguments: tuple[tuple[str, str], ...]
    plain: tuple[tuple[str, Any], ...] = field(compare=False)

    @property
    def name(self) -> str:
        """`model.get_rope_index`."""
        return f"{self.module}.{self.function}" if self.module else self.function

    def gives_tensors(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> bool:
        """Whether it runs on a batch and returns tensors, and nothing that would have to be traced for its value."""
        try:
            leaves = pytree.tree_leaves(self._results(model, batch))
        except Exception:
            return False
        return all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves)

    def _results(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        module = model.get_submodule(self.module)
        given = {parameter: batch[entry] for parameter, entry in self.arguments}
        with outside_tracing():
            return getattr(type(module), self.function)(module, **given, **dict(self.plain))

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

    def stand_in(self, model: nn.Module, example: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> Any:
        """Called in its place while tracing: the same structure, its tensors taken from the traced batch."""
        leaves, structure = pytree.tree_flatten(self._results(model, example))

        def replacement(*_: Any, **__: Any) -> Any:
            return pytree.tree_unflatten(
                [batch[f"{self.function}_{i}"] if isinstance(leaf, torch.Tensor) else leaf
                 for i, leaf in enumerate(leaves)], structure,
            )  # fmt: skip

        return replacement


def find(model: nn.Module, entries: Mapping[int, str], frame: FrameType | None) -> HostCall | None:
    """The outermost method around `frame`, below the model's own forward, whose tensors are all batch entries.

    entries: names of the traced batch entries by `id`.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found: HostCall | None = None
    while frame is not None:
        call = _host_call(frame, paths, entries)
        if call is not None:
            found = call
        if frame.f_locals.get("self") is model and frame.f_code.co_name == "forward":
            break
        frame = frame.f_back
    return found


def _host_call(frame: FrameType, paths: Mapping[int, str], entries: Mapping[int, str]) -> HostCall | None:
    module = frame.f_locals.get("self")
    if not isinstance(module, nn.Module) or id(module) not in paths or frame.f_code.co_name == "forward":
        return None
    function = inspect.unwrap(getattr(type(module), frame.f_code.co_name, None) or _host_call)
    if not isinstance(function, FunctionType) or function.__code__ is not frame.f_code:
        return None
    named: list[tuple[str, str]] = []
    plain: list[tuple[str, Any]] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        value = frame.f_locals.get(parameter.name)
        if parameter.kind is parameter.VAR_KEYWORD or parameter.kind is parameter.VAR_POSITIONAL:
            if value:
                return None
        elif isinstance(value, torch.Tensor):
            if id(value) not in entries:
                return None
            named.append((parameter.name, entries[id(value)]))
        elif any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
            return None
        else:
            plain.append((parameter.name, value))
    return HostCall(paths[id(module)], frame.f_code.co_name, tuple(named), tuple(plain)) if named else None


def caller() -> FrameType:
    """The frame that called the function that calls this one."""
    return sys._getframe(2)


@contextmanager
def patched(
    model: nn.Module,
    calls: Sequence[HostCall],
    example: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
) -> Iterator[None]:
    """The model with these methods replaced by what they return for `example`, as entries of the traced `batch`."""
    owners = [(model.get_submodule(call.module), call) for call in calls]
    for module, call in owners:
        module.__dict__[call.function] = call.stand_in(model, example, batch)
    try:
        yield
    finally:
        for module, call in owners:
            del module.__dict__[call.function]
