"""Quantised weights of bitsandbytes and torchao: as csc has them, a packed tensor and its scales, all of them frozen.

Such a weight is one tensor of a class of its own, with its scales as attributes, which a trace cannot go through. So
while csc looks at a model each linear layer that has one is replaced by a QuantisedLinear, which registers the same
tensors under names of their own: `weight`, and `weight_absmax` and so on beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from csc.errors import InputError
from csc.kernels import quantised

LIBRARIES = ("bitsandbytes", "torchao")
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
         "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks")  # fmt: skip
LEFT_OUT = "leave that module out when you quantise (llm_int8_skip_modules, modules_to_not_convert, filter_fn)"
LEFT_LOW = ("int8", "intx")  # schemes whose result torch.autocast leaves in its dtype; others give that of x
SAFE = (torch.float32, torch.bfloat16)  # what bitsandbytes computes in as it comes, if it is told nothing


@dataclass(frozen=True)
class Layout:
    """A weight in its parts, in the order of the operator (csc.kernels.quantised), without those that it lacks."""

    parts: Mapping[str, torch.Tensor]
    scheme: str
    rows: int
    columns: int
    block: int
    dtype: torch.dtype
    threshold: float = 0.0
    compute: torch.dtype | None = None  # in which the layer computes; None: in that of what it is given
    safe: bool = False  # and not in that, unless it is one of SAFE


HELD = ("absmax", "offset", "CB", "SCB", "qdata", "scale", "zero_point")  # by weights and by their states
ORDER = ("weight", "scale", "second", "code", "offset")


class QuantisedLinear(nn.Module):
    """A linear layer with a quantised weight, as csc traces it. In torch.autocast the library's product is one of its
    matrices, whatever `compute` is.
    """

    def __init__(self, layout: Layout, names: Mapping[str, str], bias: nn.Parameter | None) -> None:
        super().__init__()
        for part, tensor in layout.parts.items():
            plain = tensor if type(tensor) is nn.Parameter else nn.Parameter(tensor.detach(), requires_grad=False)
            self.register_parameter(names[part], plain)
        self.register_parameter("bias", bias)
        self.places = tuple(names[part] if part in layout.parts else "" for part in ORDER)
        self.in_features, self.out_features = layout.columns, layout.rows
        self.fixed = (layout.scheme, layout.rows, layout.columns, layout.block, layout.dtype, layout.threshold)
        self.compute, self.safe = layout.compute, layout.safe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., features in] to [.., features out]."""
        compute = x.dtype if self.compute is None or (self.safe and x.dtype in SAFE) else self.compute
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            compute = torch.get_autocast_dtype(x.device.type)
            dtype = compute if self.fixed[0] in LEFT_LOW else dtype
        parts = [getattr(self, name) if name else None for name in self.places]
        product = torch.ops.csc.quantised_linear(x.to(compute), *parts, self.bias, *self.fixed)
        return product.to(dtype)


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """InputError for a quantised weight that csc does not know how to compute with."""
    modules = dict(_quantised(model))
    stand_ins_made: dict[int, nn.Module] = {}
    plain: dict[int, nn.Parameter] = {}
    for path, module in modules.items():
        stand_ins_made[id(module)] = _standing_for(module, path, plain)
    replaced = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and id(child) in stand_ins_made
    ]
    try:
        for parent, name, child in replaced:
            parent._modules[name] = stand_ins_made[id(child)]
        yield
    finally:
        for parent, name, child in replaced:
            parent._modules[name] = child


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter once, under the names that a capture of the model gives them."""
    with stand_ins(model):
        return dict(model.named_parameters())


class QuantisedValues:
    """Which tensors the quantised weights of a model consist of. A library may give one others: at a move, or to pack
    it for inference.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = [
            (f"{path}.{name}".lstrip("."), owner)
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if is_quantised(parameter)
            for owner in (parameter, getattr(parameter, "quant_state", None), getattr(module, "state", None))
            if owner is not None
        ]
        self._before = self._now()

    def _now(self) -> list[list[int]]:
        return [_places(owner) for _, owner in self._owners]

    def hold(self) -> bool:
        """Whether they consist of the same."""
        return self._now() == self._before

    def changed(self) -> list[str]:
        """The weights that do not, in words."""
        several = zip(self._owners, self._now(), self._before, strict=True)
        return list(dict.fromkeys(f"the quantised values of {name}" for (name, _), now, was in several if now != was))


def _places(owner: Any) -> list[int]:
    """Where the tensors lie that a weight, or what it has beside it, holds."""
    held = [getattr(owner, name, None) for name in HELD]
    plain = [owner] if isinstance(owner, torch.Tensor) and not hasattr(owner, "qdata") else []
    return [tensor.data_ptr() for tensor in (*plain, *held) if isinstance(tensor, torch.Tensor)]


def is_quantised(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor is of a class of one of LIBRARIES."""
    return tensor is not None and type(tensor).__module__.partition(".")[0] in LIBRARIES


def entries(tensor: torch.Tensor) -> int:
    """Numbers that a parameter stands for: of two that share a byte both."""
    state = getattr(tensor, "quant_state", None)
    return int(torch.Size(state.shape).numel()) if state is not None else tensor.numel()


def refuse_on_disk(model: nn.Module, operation: str) -> None:
    """InputError for a model with quantised weights, whose files are the matter of its library."""
    name = next((name for name, parameter in model.named_parameters() if is_quantised(parameter)), None)
    if name is not None:
        raise InputError(
            f"{name!r} is quantised, and csc does not write or read the files of such weights", operation,
            "save_adapter(directory) writes the adapters, compiled.gather().save_pretrained(directory) the base; read "
            "both before csc.compile",
        )  # fmt: skip


def _quantised(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers with a quantised weight. InputError where something else than a linear layer's weight is one."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not is_quantised(parameter):
                continue
            full = f"{path}.{name}".lstrip(".")
            if parameter.requires_grad:
                raise InputError(
                    f"it is a quantised weight ({type(parameter).__name__}) that is to train, and csc gives such a "
                    "weight no gradient", full,
                    "call requires_grad_(False) on it, and train adapters (peft.get_peft_model)",
                )  # fmt: skip
            if not isinstance(module, nn.Linear) or name != "weight" or module is model:
                raise InputError(
                    f"it is a quantised weight ({type(parameter).__name__}) of a {type(module).__name__}, and csc "
                    "knows those of linear layers alone", full, LEFT_OUT,
                )  # fmt: skip
            yield path, module


def _standing_for(module: nn.Module, path: str, plain: dict[int, nn.Parameter]) -> nn.Module:
    """plain: what stands for a tensor that several layers share."""
    weight = module._parameters["weight"]
    assert weight is not None
    forward = type(module).forward
    if forward.__module__.partition(".")[0] not in (*LIBRARIES, "torch") or "forward" in vars(module):
        raise InputError(
            f"its class {type(module).__name__} computes with a quantised weight by a forward of its own, which csc "
            "would not run", path, "wrap the quantised layer in a module of yours, and compute around its call",
        )  # fmt: skip
    layout, names = _layout(module, weight, f"{path}.weight")
    shared = {}
    for part, tensor in layout.parts.items():
        if id(tensor) not in plain:
            plain[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
        shared[part] = plain[id(tensor)]
    standing = QuantisedLinear(Layout(**{**vars(layout), "parts": shared}), names, module._parameters.get("bias"))
    for name in HOOKS:
        setattr(standing, name, getattr(module, name))
    standing.training = module.training
    return standing


def _layout(module: Any, weight: Any, where: str) -> tuple[Layout, dict[str, str]]:
    """The parts of a weight, and the names that they get."""
    kinds = {
        "Params4bit": _four_bits, "Int8Params": _eight_bits, "Int8Tensor": _torchao,
        "IntxUnpackedToInt8Tensor": _torchao,
    }  # fmt: skip
    name = next((cls.__name__ for cls in type(weight).__mro__ if cls.__name__ in kinds), "")
    if not name:
        raise InputError(
            f"it is a {type(weight).__name__}, a quantised weight that csc does not know", where,
            "quantise by bitsandbytes (4 bits or 8), or by torchao's Int8WeightOnlyConfig or IntxWeightOnlyConfig",
        )  # fmt: skip
    return kinds[name](module, weight, where)


def _four_bits(module: Any, weight: Any, where: str) -> tuple[Layout, dict[str, str]]:
    state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
    if state is None:
        raise InputError(
            "its values are not quantised yet, which bitsandbytes does when a layer is moved to its device", where,
            "call model.to(device) before csc.compile, also for device='cpu'",
        )  # fmt: skip
    if getattr(state, "packing_format_for_cpu", False):
        raise InputError(
            "bitsandbytes has packed it for inference (a forward in eval mode on this processor does that), and there "
            "is no gradient through it", where, "call model.state_dict() once, which brings the weights back",
        )  # fmt: skip
    rows, columns = module.out_features, module.in_features
    if tuple(state.shape) != (rows, columns):
        raise InputError(
            f"it was quantised from a tensor {list(state.shape)}, and the layer has {[rows, columns]}", where,
            "quantise the weight as [features out, features in]",
        )  # fmt: skip
    parts = {"weight": weight, "scale": state.absmax}
    names = {"weight": "weight", "scale": "weight_absmax"}
    if state.nested:
        if state.state2.blocksize != quantised.NESTED_BLOCK:
            raise InputError(
                f"its scales are quantised in blocks of {state.state2.blocksize}, and bitsandbytes computes with "
                f"blocks of {quantised.NESTED_BLOCK}", where, "quantise again without a block size for the scales",
            )  # fmt: skip
        parts |= {"second": state.state2.absmax, "code": state.state2.code, "offset": state.offset}
        names |= {"second": "weight_nested_absmax", "code": "weight_nested_quant_map", "offset": "weight_nested_offset"}
    layout = Layout(
        parts, state.quant_type, rows, columns, state.blocksize, state.dtype, compute=module.compute_dtype,
        safe=not module.compute_type_is_set,
    )  # fmt: skip
    return layout, names


def _eight_bits(module: Any, weight: Any, where: str) -> tuple[Layout, dict[str, str]]:
    state = module.state
    if weight.has_fp16_weights or state.has_fp16_weights:
        raise InputError(
            "it is kept in floating point, and rounded to integers in every forward (has_fp16_weights=True)", where,
            "make the layer with has_fp16_weights=False",
        )  # fmt: skip
    if weight.CB is not None:
        module.init_8bit_state()  # as its first forward does
    if state.CB is None or state.SCB is None or weight.dtype != torch.int8:
        raise InputError(
            "its values are not quantised yet, which bitsandbytes does when a layer is moved to its device", where,
            "call model.to(device) before csc.compile, also for device='cpu'",
        )  # fmt: skip
    parts = {"weight": state.CB, "scale": state.SCB}
    rows, columns = state.CB.shape
    layout = Layout(parts, "int8", rows, columns, columns, torch.float16, threshold=float(state.threshold))
    return layout, {"weight": "weight", "scale": "weight_scb"}


def _torchao(module: Any, weight: Any, where: str) -> tuple[Layout, dict[str, str]]:
    active = ("act_quant_kwargs", "act_quant_scale", "act_pre_scale", "activation_quantization")
    rounded = [name for name in active if getattr(weight, name, None) is not None]
    rows, columns = weight.shape
    across, block = (int(size) for size in weight.block_size)
    if rounded or across != 1:
        fault = f"has {', '.join(rounded)}" if rounded else f"has scales for blocks of {across} rows"
        raise InputError(
            f"it {fault}, and csc computes with weights that are rounded alone, in blocks of a row", where,
            "quantise by Int8WeightOnlyConfig or IntxWeightOnlyConfig, for rows or groups of them",
        )  # fmt: skip
    parts = {"weight": weight.qdata, "scale": weight.scale}
    names = {"weight": "weight", "scale": "weight_scale", "second": "weight_zero_point"}
    if weight.zero_point is not None:
        parts["second"] = weight.zero_point
    scheme = "intx" if type(weight).__name__.startswith("Intx") else "int8_rows" if block >= columns else "int8_groups"
    return Layout(parts, scheme, rows, columns, block, weight.dtype), names
