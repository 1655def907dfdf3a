"""What a model is fed: an example batch, split into tensors (traced) and plain values (baked in)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from csc import devices
from csc.errors import InputError
from csc.ir.groups import OWN
from csc.ir.program import TOKENS, speaks_of_beginnings

# --- The hooks with which models of transformers keep what their layers return ---------------------------------------
#
# The first forward that is asked for hidden states puts them in place; they look at what passes and compute nothing.


MODULES = {"transformers.utils.output_capturing"}  # whose functions record
INSTALLED = "_output_capturing_hooks_installed"  # the attribute that says that they are in place


def is_recorder(hook: Any) -> bool:
    """Returns whether a hook is one of those with which transformers keeps what layers return."""
    return getattr(hook, "__module__", "") in MODULES


def only_records(name: str, before: Any, after: Any) -> bool:
    """Returns whether an attribute of a module has changed by such hooks alone. before, after: the values of the
    attribute.
    """
    if name == INSTALLED:
        return True
    if name != "_forward_hooks" or not isinstance(before, dict) or not isinstance(after, dict):
        return False
    kept = all(after.get(key) is hook for key, hook in before.items())
    return kept and all(is_recorder(hook) for key, hook in after.items() if key not in before)


# --- Where packed sequences begin: `cu_seqlens`, and the length of the longest of them, for flash kernels ------------


LONGEST = ("max_length", "max_seqlen")  # beside these, another number in each batch


def is_beginnings(name: str, tensor: torch.Tensor) -> bool:
    """Whether an entry says where sequences begin that lie one behind the other, from 0 to where the last one ends."""
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    if not speaks_of_beginnings(name) or tensor.is_meta or tensor.dim() != 1 or len(tensor) < 2 or not whole:
        return False
    return int(tensor[0]) == 0 and bool((tensor[1:] >= tensor[:-1]).all())


def is_longest(name: str, batch: Iterable[str]) -> bool:
    """Whether an entry is the length of the longest sequence. batch: the names of all entries."""
    return name.startswith(LONGEST) and any(map(speaks_of_beginnings, batch))


def _times(name: str, tensor: torch.Tensor, times: int, axis: int) -> torch.Tensor:
    """All rows of an entry so many times; sequences begin behind those that were before."""
    if not is_beginnings(name, tensor):
        return torch.cat([tensor] * times, axis)
    return torch.cat([tensor[:1], *(tensor[1:] + turn * tensor[-1] for turn in range(times))])


# --- What a model is fed: an example batch, split into tensors (traced) and plain values (baked in) ------------------


NOTHING_TOLD: Mapping[str, int] = MappingProxyType({})
LARGEST = 2**26  # bytes of a batch that is made of a microbatch


def split_batch(batch: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, other values) of a batch: any mapping of keyword arguments, HF's BatchEncoding included. The length of
    the longest packed sequence is a tensor, whatever it came as: it is another number in each batch.

    Raises InputError if it is not a mapping, has no tensor, or has one that asks for a gradient or is not dense.
    """
    if batch is None:
        raise InputError(
            "the batch holds nothing", "batch", "pass a dict of tensors, or a list with a microbatch at least"
        )
    if not isinstance(batch, Mapping) and not hasattr(batch, "items"):
        raise InputError(
            f"the example batch is a {type(batch).__name__}, not a mapping of keyword arguments",
            "example batch",
            "pass a dict such as {'input_ids': ..., 'labels': ...}; each entry becomes a keyword argument of the model",
        )
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in batch.items():
        if str(name).startswith(OWN):
            raise InputError(
                f"the batch has an entry {name!r}: what begins with {OWN!r} is what csc's programs add to a batch",
                "example batch", "rename it",
            )  # fmt: skip
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                raise InputError(
                    f"the batch entry {name!r} asks for a gradient",
                    "example batch",
                    "detach it: csc trains parameters, and a batch entry is data",
                )
            if value.is_nested or value.layout is not torch.strided:
                kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.").lstrip("_")
                raise InputError(
                    f"the batch entry {name!r} is a {kind} tensor, and csc traces dense ones",
                    "batch",
                    "give its parts as entries (values, indices, lengths), and put them together in forward; or pad it",
                )
            tensors[str(name)] = value.contiguous()  # as the trace takes every batch to lie in memory
        elif isinstance(value, int) and not isinstance(value, bool) and is_longest(str(name), map(str, batch.keys())):
            tensors[str(name)] = torch.tensor(value)
        elif value is not None:
            extra[str(name)] = value
    if not tensors:
        raise InputError("the example batch holds no tensor", "example batch", "pass one real batch of your data")
    return tensors, extra


def placed(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors on a device; a batch may come from a data loader on the CPU while the model is on a GPU."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def another(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch of the same sizes, other in what the model computes with first: in numbers with a fraction, or else in
    the order of tokens.
    """
    if any(tensor.is_floating_point() for tensor in tensors.values()):
        return {n: tensor * 1.5 + 0.25 if tensor.is_floating_point() else tensor for n, tensor in tensors.items()}
    return {name: tensor.flip(-1) if tensor.dim() else tensor for name, tensor in tensors.items()}


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters, the CPU if it has none; where they have no data, the one to train on."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type != "meta":
        return device
    return devices.default()


def sample_axis(name: str, batch: Mapping[str, torch.Tensor], told: Mapping[str, int] = NOTHING_TOLD) -> int:
    """The dimension of an entry along which its samples lie: what is told, else the first; the second of whole numbers
    for each token several times over, such as the position ids of M-RoPE, (3, samples, length).

    Where both could be (three samples) the name decides: of positions it is the second.
    """
    if name in told:
        return told[name]
    tensor = batch[name]
    text = next((batch[entry] for entry in TOKENS if entry in batch and batch[entry].dim() == 2), None)
    exact = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    if text is None or not exact or tensor.dim() != 3 or tensor.shape[1:] != text.shape:
        return 0
    return int(len(tensor) != len(text) or "position" in name)


def dynamic_dimensions(tensor: torch.Tensor, samples: int = 0) -> tuple[int, ...]:
    """The dimensions that are lengths: those of token-like tensors after the one of the samples."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return ()
    return tuple(dim for dim in range(samples + 1, tensor.dim()) if tensor.shape[dim] > 1)


def symbolic_dimensions(tensor: torch.Tensor, samples: int = 0) -> tuple[int, ...]:
    """The dimensions captured symbolically: lengths, and that of samples (images, patches). Of pixels all before
    channels, height and width: samples, images, tiles, frames.

    A size of 0 or 1 says nothing about others, and one that the model counts with in Python cannot be symbolic.
    """
    counted: Collection[int] = range(max(1, tensor.dim() - 3) if tensor.is_floating_point() else min(1, tensor.dim()))
    counted = [samples] if samples else counted
    return (*(dim for dim in counted if tensor.shape[dim] > 1), *dynamic_dimensions(tensor, samples))


def twice(
    tensors: Mapping[str, torch.Tensor], told: Mapping[str, int] = NOTHING_TOLD
) -> dict[str, torch.Tensor] | None:
    """A batch with all rows twice, if some entry has only one: from one alone nobody can tell what is done for each.
    None if no entry has. told: see `sample_axis`.
    """
    axes = {name: sample_axis(name, tensors, told) for name, tensor in tensors.items() if tensor.dim()}
    if not any(tensors[name].shape[axis] == 1 for name, axis in axes.items()):
        return None
    return {**tensors, **{name: _times(name, tensors[name], 2, axis) for name, axis in axes.items()}}


def repeated(
    batch: Mapping[str, Any], parts: int, whole: Collection[str], told: Mapping[str, int] = NOTHING_TOLD
) -> tuple[dict[str, Any], int]:
    """(a batch with all rows so many times, how many): `parts` times, unless that takes more than LARGEST bytes; then
    as often as fits, and twice at least. whole: entries that stay as they are; told: see `sample_axis`.
    """
    tensors, extra = split_batch(batch)
    size = sum(tensor.nbytes for tensor in tensors.values())
    times = max(2, min(parts, LARGEST // max(size, 1)))
    rows = {
        name: tensor
        if name in whole or not tensor.dim()
        else _times(name, tensor, times, sample_axis(name, tensors, told))
        for name, tensor in tensors.items()
    }
    return {**rows, **extra}, times


def is_metadata(tensor: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> bool:
    """Whether an entry describes others (image sizes, grids, lengths): whole numbers, and not one for each token."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return False
    tokens = next((batch[name] for name in ("input_ids", "labels", "decoder_input_ids") if name in batch), None)
    if tokens is None:
        return tensor.dim() < 2
    return tensor.shape[:2] != tokens.shape[:2] and tensor.shape[-2:] != tokens.shape[:2]


def doubtful(tensors: Mapping[str, torch.Tensor], parts: int) -> frozenset[str]:
    """Entries that may not count samples: those with one dimension, and those that cannot be cut in so many parts."""
    return frozenset(
        name for name, tensor in tensors.items() if tensor.dim() == 1 or (tensor.dim() and tensor.shape[0] % parts)
    )


def check_lists(others: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """InputError for a list that is as long as the batch: its values would be the same in every microbatch."""
    rows = {tensor.shape[0] for tensor in tensors.values() if tensor.dim()}
    for name, value in others.items():
        if isinstance(value, list) and len(value) in rows and len(value) > 1:
            raise InputError(
                f"the batch entry {name!r} is a list of {len(value)} values, as many as there are samples, and a list "
                "is not cut into microbatches",
                "batch",
                "make it a tensor, or a tuple if it is no value for each sample; or use one microbatch and dp=1",
            )


def slices(
    tensors: Mapping[str, torch.Tensor], parts: int, whole: Collection[str] = ()
) -> list[dict[str, torch.Tensor]]:
    """`parts` equal slices along dimension 0; entries without one, and those named, whole in each. InputError for an
    entry whose rows do not divide.
    """
    sliced: dict[str, Sequence[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or name in whole:
            sliced[name] = [tensor] * parts
        elif tensor.shape[0] % parts:
            raise does_not_divide(name, tensor.shape[0], parts)
        else:
            sliced[name] = tensor.chunk(parts) if tensor.shape[0] else [tensor] * parts
    return [{name: parts_of[i] for name, parts_of in sliced.items()} for i in range(parts)]


def does_not_divide(name: str, rows: int, parts: int) -> InputError:
    """What to say of an entry whose rows are not a multiple of `parts`."""
    return InputError(
        f"the batch entry {name!r} has {rows} rows; {parts} microbatches x replicas do not fit",
        "batch",
        f"make its first dimension a multiple of {parts}, say with csc.compile(divide={{{name!r}: ...}}) how many rows "
        f"each sample has, give a list of {parts} ready microbatches, or change microbatches or the mesh's dp",
    )
