"""Whether an optimizer works entry by entry, so that steps on shards of a tensor are steps on the tensor.

It is tried, not looked up: the optimizer steps tensors whole, and a second time cut in three, each shard with an
optimizer of its own as each rank has one. Gradients of the shards differ up to 900-fold, so that norms, means over rows
or columns, blocks and counts of all entries show.

    check(make, groups, device)        InputError that names the optimizer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from csc import devices
from csc.errors import InputError

Make = Callable[..., torch.optim.Optimizer]

SHAPES = ((129, 128), (4099,))  # cut in three: above and below the sizes from which 8-bit states are blocks of 256
SHARDS, STEPS, RATE = 3, 3, 1e-2
APART = 1e-3  # of the largest move within a shard: kernels round the end of a tensor in another way


@torch.no_grad()
def check(make: Make, groups: Sequence[Mapping[str, Any]], device: torch.device) -> None:
    """make: takes parameters as torch.optim does. groups: options of its groups of parameters. InputError for an
    optimizer that looks at more than an entry, or takes none of these steps.
    """
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in SHAPES]
    gradients = [[_uneven(torch.randn(shape, generator=generator)) for shape in SHAPES] for _ in range(STEPS)]
    with devices.forked(device):  # what it draws is no draw of the user's
        whole = [starts, *gradients]
        moved = [_stepped(make, group, whole, device) for group in groups]
        for shard in range(SHARDS):
            cut = [[one.tensor_split(SHARDS)[shard] for one in tensors] for tensors in whole]
            for group, expected in zip(groups, moved, strict=True):
                found = _stepped(make, group, cut, device)
                if not all(map(_same, found, (one.tensor_split(SHARDS)[shard] for one in expected))):
                    raise InputError(
                        f"{_name(make)} steps a shard of a parameter in another way than the whole: it does not work "
                        "entry by entry",
                        "optimizer",
                        "use one that does (AdamW, Adam, SGD, ...), or leave the parameters whole: zero=0 and tp=1",
                    )


def _uneven(gradient: torch.Tensor) -> torch.Tensor:
    """Gradients of the three shards differ in size."""
    parts = gradient.tensor_split(SHARDS)
    return torch.cat([part * 30.0 ** (number - 1) for number, part in enumerate(parts)])


def _stepped(
    make: Make, group: Mapping[str, Any], tensors: Sequence[Sequence[torch.Tensor]], device: torch.device
) -> list[torch.Tensor]:
    """By how much parameters move. tensors: these, and their gradients of each step."""
    own = [nn.Parameter(one.clone().to(device)) for one in tensors[0]]
    try:
        optimizer = make([{**group, "params": own}] if group else own)
        for one in optimizer.param_groups:
            _set_rate(one)
        for gradients in tensors[1:]:
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient.clone().to(device)
            optimizer.step()
    except Exception as error:
        raise InputError(
            f"{_name(make)} takes no step of parameters that ranks divide: {type(error).__name__}: {error}",
            "optimizer",
            "use an optimizer that works entry by entry and asks for no closure (AdamW, Adam, SGD, ...)",
        ) from error
    return [parameter - start.to(device) for parameter, start in zip(own, tensors[0], strict=True)]


def _set_rate(group: dict[str, Any]) -> None:
    """A rate that shows what it does: a warm-up starts with none."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        group["lr"] = torch.full_like(rate, RATE)
    elif rate is not None:
        group["lr"] = RATE


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    room = APART * float(expected.abs().max())
    return bool(((found - expected).abs() <= room).all())


def _name(make: Make) -> str:
    return str(getattr(make, "__name__", type(make).__name__))
