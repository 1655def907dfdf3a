"""Models whose linear layers are quantised by bitsandbytes or torchao, small, with adapters that are not zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

KINDS = ("nf4", "fp4", "nf4 nested", "int8", "torchao int8", "torchao int8 groups", "torchao int4")


def library(kind: str) -> Any:
    """The one that makes such weights; the test is skipped without it."""
    name = "torchao" if kind.startswith("torchao") else "bitsandbytes"
    return pytest.importorskip(name, reason=f"{name} is not installed (pip install 'csc-compiler[quantised]')")


def quantised(linear: nn.Linear, kind: str, **options: Any) -> nn.Linear:
    """A layer with the same weight, quantised."""
    made = library(kind)
    if kind.startswith("torchao"):
        from torchao import quantization as q

        config = {
            "torchao int8": q.Int8WeightOnlyConfig,
            "torchao int8 groups": lambda: q.Int8WeightOnlyConfig(granularity=q.PerGroup(16)),
            "torchao int4": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=q.PerGroup(16)),
        }[kind]()
        q.quantize_(linear, config)
        return linear
    bias = linear.bias is not None
    size = (linear.in_features, linear.out_features, bias)
    if kind == "int8":
        layer = made.nn.Linear8bitLt(*size, has_fp16_weights=False, **options)
        layer.weight = made.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    else:
        layer = made.nn.Linear4bit(
            *size, quant_type=kind.split()[0], compress_statistics=kind.endswith("nested"),
            compute_dtype=options.pop("compute_dtype", linear.weight.dtype),
        )  # fmt: skip
        layer.weight = made.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type=kind.split()[0],
            compress_statistics=kind.endswith("nested"), module=layer, **options,
        )  # fmt: skip
    if bias:
        layer.bias = nn.Parameter(linear.bias.data.clone(), requires_grad=False)
    return layer.to("cpu")


def quantise(model: nn.Module, kind: str, wanted: Callable[[str], bool] = lambda _: True, **options: Any) -> nn.Module:
    """The model with all its linear layers quantised whose paths are wanted; nothing of it trains."""
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and wanted(path):
            parent = model.get_submodule(path.rpartition(".")[0])
            setattr(parent, path.rpartition(".")[2], quantised(module, kind, **options))
    return model


class Adapted(nn.Module):
    """A frozen layer, and a product of low rank that trains beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        dtype = torch.float32 if base.bias is None else base.bias.dtype
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Layer(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width, bias=bias)
        self.outer = nn.Linear(2 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Words(nn.Module):
    """A table, layers of linear maps, a head. All linear maps of layers are quantised, the inner ones adapted."""

    def __init__(self, kind: str, width: int = 32, layers: int = 3, bias: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        dtype = options.pop("dtype", torch.float32)
        self.table = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Layer(width, bias) for _ in range(layers))
        self.head = nn.Linear(width, 20)
        self.to(dtype)
        quantise(self, kind, lambda path: path.startswith("layers"), **options)
        for layer in self.layers:
            layer.inner = Adapted(layer.inner).to(dtype)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def words(samples: int = 4, length: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.arange(samples * length).view(samples, length) * 7 % 19
    return {"ids": ids, "labels": (ids + 1) % 20}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """By name; and none is left."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def eager(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    result = model(**batch)
    loss = result if isinstance(result, torch.Tensor) else result.loss
    loss.backward()
    return loss.detach(), gradients(model)
