"""Which calls a device can record, to launch them again without the code that made them (csc.devices.DeviceGraphs).

Terms: an *unfit* call does more than launch work on the device's own tensors: it waits for values, draws, meets others.

tensors: its arguments. device: None where tensors have no values: then nothing is said of where they lie. What asks the
host in a way that no operator tells of shows when it is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

# Of csc's own operators those that launch kernels and wait for nobody, and nothing else.
LAUNCHING = frozenset({
    "csc::attention", "csc::attention_backward", "csc::linear_cross_entropy", "csc::masked_scatter_backward",
})  # fmt: skip
SEEDED = ("csc::dropout", "csc::uniform", "csc::normal")
OPAQUE = "csc::opaque"
HOST = ("csc::pack_mask", "csc::group_ranges", "csc::seeing_ranges")
MEETING = (
    "csc::all_", "csc::context_", "csc::divided_", "csc::finish_", "csc::gather_", "csc::reduce_", "csc::scatter_",
    "csc::start_",
)  # fmt: skip
ASKING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
DRAWS = "a replay would draw the same numbers again"
MEETS = "it meets other ranks"
WAITS = "the host waits for values"
GATHERED = "its parameters are made whole for each microbatch (zero=3)"


def unfit(operator: Any, tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> str:
    """Returns why a call cannot be recorded; "" where it can. operator: an OpOverload. tensors: its operands. device:
    where all of them have to be, if it is given.
    """
    name, space = operator._schema.name, operator.namespace
    if space == "csc":
        return "" if name in LAUNCHING else f"{name}: {_own(name)}"
    if space not in ("aten", "prims"):
        return f"{name}: it is an operator of neither torch nor csc, which may do more than launch kernels"
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return f"{name}: {DRAWS}"
    inputs = list(tensors)
    if any(argument.name == "indices" for argument in operator._schema.arguments):  # how many a mask selects, it counts
        asks = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in inputs[1:])
    else:
        asks = any(tag in operator.tags for tag in ASKING)
    if asks:
        return f"{name}: {WAITS}"
    if device is not None and any(tensor.device != device for tensor in inputs):
        return f"{name}: it has tensors of another device than {device}"
    return ""


def _own(name: str) -> str:
    """Of one of csc's operators."""
    if name in SEEDED:
        return DRAWS
    if name.startswith(OPAQUE):
        return "it runs code of the model's own"
    if name in HOST:
        return WAITS
    return MEETS if name.startswith(MEETING) else "it may do more than launch kernels"
