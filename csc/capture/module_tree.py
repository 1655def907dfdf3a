"""Facts of the module tree that name and cut the graph: layers, parts, components.

Terms
  layer list   a ModuleList or Sequential of two or more modules of one class with parameters, or a ModuleList of
               several classes that come again (layers of self- and cross-attention); the outermost counts
  layer        an element of a layer list
  container    a module with a layer list below it
  part         a module with parameters that is no container, directly below one
  component    what a user calls a part of the model: the largest module around one layer list (or around several that
               are its own, as an encoder has blocks and what it hands out of their middle), or a part outside them
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

from csc.ir.program import ModuleInfo


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_layer_list(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
        return False
    children = list(module.children())
    kinds = {type(child) for child in children}
    alike = len(kinds) == 1 or (isinstance(module, nn.ModuleList) and 2 * len(kinds) <= len(children))
    return alike and all(_has_parameters(child) and any(True for _ in child.children()) for child in children)


def _outermost_layer_lists(module: nn.Module, path: str = "") -> Iterator[str]:
    if _is_layer_list(module):
        yield path
        return
    for name, child in module.named_children():
        yield from _outermost_layer_lists(child, f"{path}.{name}" if path else name)


def _ancestors(path: str) -> list[str]:
    """Paths around `path` from the root ("") down to itself."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def _first_argument(module: type[nn.Module]) -> str:
    names = [name for name in list(inspect.signature(module.forward).parameters)[1:] if name.isidentifier()]
    generic = {"args", "kwargs", "input", "x", "self"}
    return names[0] if names and names[0] not in generic else "x"


def describe(model: nn.Module) -> dict[str, ModuleInfo]:
    """ModuleInfo by path for every module of the model (the root's path is "")."""
    layer_lists = list(dict.fromkeys(_outermost_layer_lists(model)))
    containers = {around for path in layer_lists for around in _ancestors(path)}
    below: dict[str, int] = {}
    for path in layer_lists:
        for around in _ancestors(path):
            below[around] = below.get(around, 0) + 1
    lists: dict[str, int] = {}  # layer lists directly below
    for path in layer_lists:
        lists[path.rpartition(".")[0]] = lists.get(path.rpartition(".")[0], 0) + 1

    def is_tower(around: str) -> bool:
        return below[around] == 1 or below[around] == lists.get(around, 0) < len(layer_lists)

    towers = {next(filter(is_tower, _ancestors(path))) for path in layer_lists}

    def component(path: str) -> str:
        for around in _ancestors(path):
            if around in towers:
                return around.split(".")[-1] if around else type(model).__name__
            if around and around not in containers:
                return around.split(".")[-1]
        return type(model).__name__

    firsts: dict[type, str] = {}  # by class: reading a signature takes long
    infos: dict[str, ModuleInfo] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parent = path.rpartition(".")[0]
        if path and parent in layer_lists:
            role = "layer"
        elif path in containers or not path:
            role = "container"
        else:
            role = "part" if parent in containers or not parent else ""
        if type(module) not in firsts:
            firsts[type(module)] = _first_argument(type(module))
        infos[path] = ModuleInfo(path, type(module).__name__, component(path), firsts[type(module)], role)
    _join_output_embedding(model, infos)
    return infos


def _join_output_embedding(model: nn.Module, infos: dict[str, ModuleInfo]) -> None:
    """The output embedding joins the component of the input embedding (HF keeps lm_head outside language_model)."""
    head, embedding = embedding_of(model, "output"), embedding_of(model, "input")
    paths = {id(module): path for path, module in model.named_modules()}
    if id(head) in paths and id(embedding) in paths:
        path, component = paths[id(head)], infos[paths[id(embedding)]].component
        info = infos[path]
        infos[path] = ModuleInfo(path, info.kind, component, info.first_argument, info.role)


def embedding_of(model: nn.Module, side: str) -> nn.Module | None:
    """The embedding that a model of Hugging Face names.

    Args:
        model: Any module.
        side: "input" or "output".

    Returns:
        The module; None where the model names none: it says so by raising NotImplementedError, or by reading an
        attribute that it has not.
    """
    find = getattr(model, f"get_{side}_embeddings", None)
    if not callable(find):
        return None
    try:
        embedding = find()
    except (NotImplementedError, AttributeError):
        return None
    return embedding if isinstance(embedding, nn.Module) else None
