"""Parameters and buffers that a trace would take for others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import InputError
from tests.compiler.eager import WIDTH, Stack, batch, stack


class Doubling(torch.Tensor):
    """Twice what torch.nn.functional.linear gives: eager PyTorch's loss is another than that of plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is F.linear else result


class Named(torch.Tensor):
    """No more than a name."""


def model(kind: str) -> Stack:
    kinds: dict[str, Any] = {"doubling": Doubling, "named": Named}
    made = stack(lambda x, layer: x.sin() * layer.scale)
    weight = made.head.weight.detach()
    if kind == "lazy":
        made.head = nn.LazyLinear(5)
    elif kind == "inference":
        with torch.inference_mode():
            made.register_buffer("shift", torch.ones(WIDTH))
    elif kind == "buffer":
        made.register_buffer("shift", torch.ones(WIDTH).as_subclass(Doubling))
    else:
        made.head.weight = nn.Parameter(weight.as_subclass(kinds[kind]))
    return made


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("lazy", "head.weight: it has no size yet"),
        ("inference", "shift: it was made in torch.inference_mode"),
        ("buffer", "shift: it is a Doubling"),
        ("doubling", "head.weight: it is a Doubling, a class of tensors that computes by code of its own"),
    ],
)
def test_refused(kind: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        csc.compile(model(kind), example=batch(), cache=False, check=False).train_step(batch())


def test_a_class_without_code_of_its_own_and_a_later_one_with_it() -> None:
    made = model("named")
    compiled = csc.compile(made, example=batch(), cache=False)
    compiled.train_step(batch())
    made.head.weight = nn.Parameter(made.head.weight.detach().as_subclass(Doubling))
    with pytest.raises(InputError, match=r"head\.weight: it is a Doubling"):
        compiled.train_step(batch())
