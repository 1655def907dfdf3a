"""F, B and W of a variant as Python, called with tensors by role; compiled by Inductor, if that is how they will run.

part_function(graph, folder) -> PartFunction | None       folder: where what Inductor makes is kept, if it compiles
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from csc.ir import graph as g
from csc.runtime.compile_pool import FunctionFolder
from csc.runtime.compiled_function import layouts_of, structure_of

log = logging.getLogger("csc")
Role = tuple[str, str]


@dataclass(frozen=True)
class PartFunction:
    """roles: of what it is called with."""

    call: Callable[..., Any]
    roles: tuple[Role, ...]


def part_function(graph: fx.Graph | None, folder: FunctionFolder | None = None) -> PartFunction | None:
    """Of a graph; None without one."""
    if graph is None:
        return None
    module = fx.GraphModule(nn.Module(), graph)
    call = module.forward if folder is None else _Compiled(module.forward, module.code, folder)
    return PartFunction(call, tuple(node.meta["role"] for node in g.placeholders(graph)))


@dataclass
class _Compiled:
    """A function that is compiled for the layouts that it is called with; what Inductor refuses runs as it is."""

    plain: Callable[..., Any]
    text: str
    folder: FunctionFolder
    known: dict[Any, Callable[..., Any] | None] = field(default_factory=dict)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        layouts = tuple((one.shape, one.stride(), one.dtype) for one in tensors)
        if layouts not in self.known:
            self.known[layouts] = self._made(tensors)
        made = self.known[layouts]
        return self.plain(*tensors) if made is None else made(tensors)

    def _made(self, tensors: tuple[torch.Tensor, ...]) -> Callable[..., Any] | None:
        from csc.runtime.compiled_function import KeptFunction  # which imports what only compilers need

        kept = KeptFunction("profiled", self.text, structure_of(tensors), layouts_of(tensors), self.folder.path)
        try:
            return kept.made(self.plain, tensors)[0]
        except Exception as error:  # of the compiler, of whatever kind
            reason = str(error).strip().partition("\n")[0]
            log.warning("profile: a function runs as it is: %s: %s", type(error).__name__, reason)
            return None
