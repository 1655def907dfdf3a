"""Capture: a PyTorch model and one example microbatch become a Program with the whole forward graph."""

from __future__ import annotations

from typing import Any

from torch import nn

from csc.capture.batch import device_of, dynamic_dimensions, microbatch, placed, split_batch
from csc.capture.export import export, loss_of, training, untraceable, without_kv_cache
from csc.capture.modules import describe
from csc.capture.normalise import flatten
from csc.errors import CscError
from csc.ir import graph as g
from csc.ir.program import Input, Parameter, Program

__all__ = [
    "capture",
    "device_of",
    "dynamic_dimensions",
    "loss_of",
    "microbatch",
    "placed",
    "split_batch",
    "training",
    "without_kv_cache",
]


def capture(model: nn.Module, example: Any) -> Program:
    """Trace `loss = model(**example)` in training mode, sequence dimensions symbolic.

    model: any module whose forward takes the batch's entries as keyword arguments and returns a loss.
    example: one microbatch, a mapping; its tensors are traced, other values are baked in.
    Raises CscError (a sentence with the source line) if the model cannot be traced.
    """
    tensors, extra = split_batch(example)
    device = device_of(model)
    exported = export(model, placed(tensors, device), extra)
    try:
        graph, constants = flatten(exported, model)
    except CscError:
        raise
    except Exception as error:
        raise untraceable(error) from error
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    parameters = tuple(
        Parameter(name, tuple(p.shape), p.dtype, p.requires_grad, tuple(a for a in aliases[id(p)] if a != name))
        for name, p in model.named_parameters()
    )
    used = {node.meta["role"] for node in g.placeholders(graph)}
    inputs = tuple(
        Input(name, tuple(tensor.shape), tensor.dtype, dynamic_dimensions(tensor))
        for name, tensor in tensors.items()
        if ("input", name) in used
    )
    loss = g.outputs(graph)[0]
    return Program(
        name=type(model).__name__,
        inputs=inputs,
        parameters=parameters,
        constants=constants,
        modules=describe(model),
        device=device.type,
        graph=graph,
        fake_mode=loss.meta["val"].fake_mode,
    )
