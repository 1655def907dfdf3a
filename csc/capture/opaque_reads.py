"""What the rest of a model reads of an opaque module, which runs as it is: a trace sees what was there, and no more.

hidden(model) -> {identity of a module: path}          opaque modules, and the modules in them
with opaque_reads(model) as read: ...                  fills read with {(path, attribute)}, of hidden modules
refuse_shared_tensors(model, {name: tensor})           InputError for one that an opaque module may change
namespaces(model, read) -> [(in words, attributes, names)]         of these attributes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from csc.capture.dedup.equality import attributes_read
from csc.capture.watches import ABSENT
from csc.errors import InputError
from csc.kernels.opaque import is_opaque

Slot = tuple[str, str]  # the path of a module, the name of an attribute
Namespace = tuple[str, dict[str, Any], list[str]]
OF_CALLS = frozenset({"forward", "training"})  # what calling a module reads, as it reads its hooks


def hidden(model: nn.Module) -> dict[int, str]:
    """Of these a trace sees nothing but the parameters, and what other modules read of them."""
    return {
        id(one): ".".join(filter(None, (path, inner)))
        for path, module in model.named_modules()
        if is_opaque(module)
        for inner, one in module.named_modules()
    }


@contextmanager
def opaque_reads(model: nn.Module) -> Iterator[set[Slot]]:
    """Attributes of opaque modules that a trace reads, which runs none of them. No tensors: those are in the graph."""
    read: set[Slot] = set()
    opaque = [(path, module) for path, module in model.named_modules() if is_opaque(module)]
    with ExitStack() as stack:
        seen = [(path, module, stack.enter_context(attributes_read(module))) for path, module in opaque]
        yield read
    for path, module, names in seen:
        for inner, name in names:
            value = vars(module.get_submodule(inner)).get(name, ABSENT)
            if value is not ABSENT and not (isinstance(value, torch.Tensor) or name in OF_CALLS or "_hooks" in name):
                read.add((".".join(filter(None, (path, inner))), name))


def refuse_shared_tensors(model: nn.Module, constants: Mapping[str, torch.Tensor]) -> None:
    """constants: the tensors, no parameters, that a graph reads. What an opaque module has in memory it may change in
    every step, before others read it or after.
    """
    inside = hidden(model)
    owners = {
        _address(tensor): f"{inside[id(module)]}.{name}"
        for module in model.modules()
        if id(module) in inside
        for name, tensor in (*module._buffers.items(), *vars(module).items())
        if isinstance(tensor, torch.Tensor)
    }
    for name, tensor in constants.items():
        if (owner := owners.get(_address(tensor))) is not None:
            raise InputError(
                f"the model reads {owner!r}, a tensor of an opaque module, outside of that module, which may change it "
                "in every step", name,
                "let the opaque module itself compute with it, or read a tensor of another module; or make opaque a "
                "module around both",
            )  # fmt: skip


def _address(tensor: torch.Tensor) -> int:
    """Of its memory; of a tensor without any its identity."""
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def namespaces(model: nn.Module, read: Set[Slot]) -> list[Namespace]:
    """Of the modules that these slots are of, each with the names that are read."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, Namespace] = {}
    for path, name in sorted(read):
        if path in modules:
            own: dict[str, Any] = modules[path].__dict__
            found.setdefault(id(own), (f"attribute {path}", own, []))[2].append(name)
    return list(found.values())
