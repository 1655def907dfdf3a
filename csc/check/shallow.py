"""A model with one layer of each kind: the others hand on what they are given, and have no weights.

Terms
  kept         a layer that runs as it is; the first of its kind
  left out     a layer of the same kind: it returns what the kept one returned, but for each tensor of it that is like
               one of its own arguments in shape and dtype, that argument

    kinds(program) -> {path of a layer left out: path of the kept one}
    shallow(model, left_out, trainable)         context: the model is so; parameters without data get random values
    bytes_of(model, left_out) -> int            of the weights that are left
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from csc.capture.batch import device_of
from csc.ir.program import Program
from csc.torch_private.traces import pytree

META = torch.device("meta")


def kinds(program: Program) -> dict[str, str]:
    """Of a planned Program: layers of which each is one region, by what they run and which gradients they need."""
    regions = [region.module for region in program.regions]
    first: dict[str, str] = {}
    found = {}
    for region in program.regions:
        info = program.modules.get(region.module)
        if info is None or info.role != "layer" or regions.count(region.module) > 1:
            continue
        kept = first.setdefault(region.variant or region.template, region.module)
        if kept != region.module:
            found[region.module] = kept
    return found


def bytes_of(model: nn.Module, left_out: Mapping[str, str]) -> int:
    """The weights of the model without these layers; tied ones count once."""
    without = _below(model, left_out)
    sizes = {id(p): p.numel() * p.element_size() for p in model.parameters() if id(p) not in without}
    return sum(sizes.values())


@contextmanager
def shallow(model: nn.Module, left_out: Mapping[str, str], trainable: Set[str]) -> Iterator[None]:
    """trainable: names of the parameters that train meanwhile. Afterwards everything is as before, weights too."""
    layers = {path: model.get_submodule(path) for path in (*left_out, *left_out.values())}
    forwards = {layer: layer.__dict__.get("forward") for layer in layers.values()}
    without = _below(model, left_out)
    held = [(m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    flags = [(p, p.requires_grad) for p in model.parameters()]
    device, generator = device_of(model), torch.Generator().manual_seed(0)
    made: dict[int, nn.Parameter] = {}
    returned: dict[str, Any] = {}
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trainable)
            if id(parameter) in without:
                made[id(parameter)] = nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
            elif parameter.is_meta:
                values = _random(name, parameter, generator).to(device)
                made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
        for own, name, parameter in held:
            own[name] = made.get(id(parameter), parameter)
        for path in dict.fromkeys(left_out.values()):
            layers[path].__dict__["forward"] = _noting(path, layers[path].forward, returned)
        for path, kept in left_out.items():
            layers[path].__dict__["forward"] = _handing_on(kept, layers[path].forward, returned)
        yield
    finally:
        for layer, before in forwards.items():
            if before is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = before
        for own, name, parameter in held:
            own[name] = parameter
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _below(model: nn.Module, left_out: Mapping[str, str]) -> set[int]:
    """Identities of the parameters that these layers alone hold."""
    inside = {id(module) for path in left_out for module in model.get_submodule(path).modules()}
    modules = list(model.modules())
    elsewhere = {id(p) for m in modules if id(m) not in inside for p in m._parameters.values()}
    return {id(p) for m in modules if id(m) in inside for p in m._parameters.values()} - elsewhere


def _random(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values as a trained model may have them: factors about 1, biases about 0, matrices that keep a vector's size."""
    values = torch.empty(parameter.shape, dtype=parameter.dtype).normal_(generator=generator)
    if parameter.dim() > 1:
        return values.mul_(1 / math.sqrt(max(parameter[0].numel(), 1)))
    return values.mul_(0.1).add_(1.0 if name.endswith("weight") else 0.0)


def _noting(path: str, real: Callable[..., Any], returned: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def forward(*args: Any, **kwargs: Any) -> Any:
        returned[path] = real(*args, **kwargs)
        return returned[path]

    return forward


def _handing_on(kept: str, real: Callable[..., Any], returned: Mapping[str, Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        leaves, structure = pytree.tree_flatten(returned[kept])
        return pytree.tree_unflatten([_like(leaf, given) for leaf in leaves], structure)

    return forward


def _like(leaf: Any, given: list[torch.Tensor]) -> Any:
    """The first tensor given that is like this one, else this one."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return next((one for one in given if one.dtype == leaf.dtype and one.shape == leaf.shape), leaf)
