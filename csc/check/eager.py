"""One training step as eager PyTorch makes it, without chance: the reference that programs are held against."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, compress, filterfalse
from operator import is_
from threading import get_ident
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from csc import devices
from csc.capture.batch import NOTHING_TOLD, device_of, sample_axis
from csc.capture.trace.export import caching, uncached
from csc.kernels.dropout import kept
from csc.runtime import executor
from csc.runtime.specs import DrawSpec
from csc.torch_private.dropped_attention import attention_that_drops
from csc.torch_private.traces import TorchDispatchMode

# --- The masks of a program's dropout, for eager PyTorch -------------------------------------------------------------
#
# With them a training step itself can be compared with eager's.
#
# Terms: a program lists what a microbatch draws in the order of the model's code, and each draw follows from a seed
# and the place of the draw (csc.kernels.dropout). Eager PyTorch runs the whole batch, so its mask is that of one
# microbatch after the other, along the first dimension.
#
# Of several microbatches that is a guess: samples need not stand together in what is dropped out. A step that differs
# from eager's then says nothing; one that does not says as much as with one microbatch.


ROUNDING = 1e-6  # between p and 1 - (1 - p)


class SameMasks:
    """draws: of a microbatch, all of them dropout; drawn: the seed of the step; microbatches: in the global batch."""

    def __init__(self, draws: Sequence[DrawSpec], drawn: int, microbatches: int) -> None:
        self.microbatches = microbatches
        self._asked = (draws, drawn, microbatches)
        self._made, self._left = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        self._draws = draws
        self._seeds = [executor.of_microbatch(drawn, index) for index in range(microbatches)]
        self._taken = 0
        self._strange = False

    def take(self, shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
        """What the program leaves, where eager's dropout has probability p; everything once they do not fit."""
        place, self._taken = self._taken, self._taken + 1
        draw = self._draws[place] if place < len(self._draws) else None
        parts = 1 if draw is not None and draw.once else self.microbatches
        if draw is None or draw.p is None or abs(draw.p - p) > ROUNDING or not shape or shape[0] % parts:
            self._strange = True
            return torch.ones(list(shape), dtype=torch.bool, device=device)
        mask = self._made.pop(place, None)
        if mask is None or mask.shape != shape:
            sizes = [shape[0] // parts, *shape[1:]]
            ours = [executor.seed_of(seed, f"{draw.region}.") for seed in self._seeds]
            if draw.once:
                ours = [seed[1:] for seed in ours[:1]]
            masks = [kept(sizes, draw.p, seed, draw.index, device) for seed in ours]
            mask = self._left[place] = masks[0] if parts == 1 else torch.cat(masks)
        return mask

    def once_more(self) -> SameMasks:
        """From the first one on."""
        again = SameMasks(*self._asked)
        again._made, self._left = self._left, {}
        return again

    def refuse(self) -> None:
        """Eager PyTorch draws something that is no dropout."""
        self._strange = True

    @property
    def fit(self) -> bool:
        """Whether each was taken once, and nothing else was drawn."""
        return not self._strange and self._taken == len(self._draws)


# --- Eager PyTorch without chance: every random number is the same one -----------------------------------------------
#
# Two programs that draw different numbers cannot be compared. Here every uniform number is UNIFORM and every normal
# one NORMAL, as a compiled program has them in a step whose seed is NO_CHANCE (csc.kernels.dropout); or dropout has
# the masks of a step of a program.


UNIFORM = 0.25
NORMAL = 0.5
IN_HALF = (torch.bfloat16, torch.float16)

aten = torch.ops.aten


class WithoutChance(TorchDispatchMode):
    """unknown: names of operations that drew from torch's generator all the same. half: whether any result has a
    floating dtype of 16 bits, as under torch.autocast. masks: of dropout, if it is to drop something.
    """

    def __init__(self, masks: SameMasks | None = None) -> None:
        super().__init__()
        self.masks = masks
        self.unknown: set[str] = set()
        self.half = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            result = func(*args, **kwargs)
            self.half |= isinstance(result, torch.Tensor) and result.dtype in IN_HALF
            return result
        packet = func.overloadpacket
        if self.masks is not None:
            dropped = self._masked(func, self.masks, *args)
            if dropped is not None:
                return dropped
            if not _draws_nothing(func, args, kwargs):
                self.masks.refuse()
        if packet is aten.bernoulli and func is aten.bernoulli.default:
            return (args[0] > UNIFORM).to(args[0].dtype)
        if packet is aten.bernoulli:
            return torch.full_like(args[0], float(args[1] > UNIFORM))
        if func is aten.bernoulli_.float:
            return args[0].fill_(float((args[1] if len(args) > 1 else 0.5) > UNIFORM))
        if func is aten.bernoulli_.Tensor:
            return args[0].copy_((args[1] > UNIFORM).to(args[0].dtype))
        if packet is aten.native_dropout:
            return _dropped(*args)
        if packet in _FILLED and kwargs.get("generator") is None:
            return args[0].copy_(_FILLED[packet](torch.full_like(args[0], UNIFORM), *args[1:]))
        if kwargs.get("generator") is None:
            named = {name: value for name, value in kwargs.items() if name != "generator"}
            if packet in (aten.rand, aten.randn):
                named["dtype"] = named.get("dtype") or torch.get_default_dtype()
                return torch.full(args[0], UNIFORM if packet is aten.rand else NORMAL, **named)
            if packet in (aten.rand_like, aten.randn_like):
                return torch.full_like(args[0], UNIFORM if packet is aten.rand_like else NORMAL, **named)
            if packet in (aten.randint, aten.randint_like):
                low, high = _ends(func, args)
                named["dtype"] = named.get("dtype") or (torch.int64 if packet is aten.randint else args[0].dtype)
                number = low + math.floor(UNIFORM * (high - low))
                if packet is aten.randint:
                    return torch.full(args[-1], number, **named)
                return torch.full_like(args[0], number, **named)
        result = func(*args, **kwargs)
        if not _draws_nothing(func, args, kwargs):
            self.unknown.add(str(func))
        return result

    @staticmethod
    def _masked(func: Any, masks: SameMasks, x: Any = None, p: Any = 0.5, train: Any = True, *_: Any) -> Any:
        """The result of an operation that dropout is made of; None if it is another."""
        if func is aten.bernoulli_.float:  # p: of what stays
            return x.copy_(masks.take(x.shape, 1 - p, x.device))
        if func is aten.native_dropout.default and train is not False and 0 < p < 1:
            mask = masks.take(x.shape, p, x.device)
            return x * mask / (1 - p), mask
        return None


# What operations that fill a tensor make of a uniform number, by their distribution.
_FILLED: dict[Any, Any] = {
    aten.uniform_: lambda u, low=0.0, high=1.0: u * (high - low) + low,
    aten.normal_: lambda u, mean=0.0, std=1.0: torch.full_like(u, NORMAL) * std + mean,
    aten.exponential_: lambda u, rate=1.0: -torch.log1p(-u) / rate,
    aten.cauchy_: lambda u, median=0.0, sigma=1.0: torch.tan((u - 0.5) * math.pi) * sigma + median,
    aten.log_normal_: lambda u, mean=1.0, std=2.0: torch.exp(torch.full_like(u, NORMAL) * std + mean),
}


def _ends(func: Any, args: Any) -> tuple[int, int]:
    """Between which whole numbers are drawn: the least, and the first that is too large."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args))
    return named.get("low", 0), named["high"]


def _dropped(x: torch.Tensor, p: float, train: bool | None = True) -> tuple[torch.Tensor, torch.Tensor]:
    kept = torch.full_like(x, not train or 1 - p > UNIFORM, dtype=torch.bool)
    return (x * kept / (1 - p) if train and p < 1 else x * kept), kept


def _draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw, as attention may, was called so that it does not."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout", "p"):
            argument_value = (
                args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            )
            return not argument_value
    return False


# --- A model that several steps run on, each of which finds it as the first one did ----------------------------------
#
# To look at a small model takes as long as a tenth of its step, so what is there is compared in loops of C, and
# written back where something has changed alone.


CONTAINERS = frozenset({list, dict, set, OrderedDict})  # the last one of hooks


class Snapshot:
    """A model as it is now, and its parameters by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = device_of(model)
        self.modules, self.parameters = list(model.modules()), dict(model.named_parameters())
        self._gradients = [(p, p.requires_grad, p.grad) for p in self.parameters.values()]
        attributes = list(map(vars, self.modules))
        held = list(chain.from_iterable(map(dict.values, attributes)))
        containers = list(compress(held, map(CONTAINERS.__contains__, map(type, held))))
        full = list(filter(None, containers))
        self._empty = list(filterfalse(None, containers))  # most are, and stay so
        self._others = [(item, item.copy()) for item in full if not isinstance(item, dict)]
        self._dicts = [*attributes, *(item for item in full if isinstance(item, dict))]
        self._before = [item.copy() for item in self._dicts]  # an OrderedDict in its own order
        self._sizes, self._names = list(map(len, self._before)), list(chain.from_iterable(self._before))
        self._values = list(chain.from_iterable(map(dict.values, self._before)))
        buffers = (buffer for module in attributes for buffer in module["_buffers"].values() if buffer is not None)
        self._buffers = [(buffer, buffer._version, buffer.clone()) for buffer in buffers]
        self._configurations = caching(self.modules)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What changes within is as it was afterwards; so are torch's generators."""
        try:
            with devices.forked(self.device):
                yield
        finally:
            self._put_back()

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """The same in training mode, as the user left it: see `training`; without what HF models cache."""
        with self.kept(), uncached(self._configurations):
            if not self.model.training:
                self.model.train()
            yield

    def _put_back(self) -> None:
        for parameter, trains, gradient in self._gradients:
            if parameter.requires_grad is not trains:
                parameter.requires_grad_(trains)
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, version, value in self._buffers:
                if buffer._version != version or not _is(buffer, value):  # batch norm counts no versions
                    buffer.copy_(value)
        if not self._dicts_hold():
            for attributes, before in zip(self._dicts, self._before):
                attributes.clear()
                attributes.update(before)
        for container, contents in self._others:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)
        for container in filter(None, self._empty):
            container.clear()

    def _dicts_hold(self) -> bool:
        return (
            list(map(len, self._dicts)) == self._sizes
            and all(map(is_, chain.from_iterable(self._dicts), self._names))
            and all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._values))
        )


def undisturbed(model: nn.Module) -> AbstractContextManager[None]:
    """What a step changes in a model is as it was afterwards; so are torch's generators."""
    return Snapshot(model).kept()


def _is(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor is this one, NaN included."""
    if tensor.layout == value.layout == torch.strided and torch.equal(tensor, value):
        return True
    return bool(((tensor == value) | ((tensor != tensor) & (value != value))).all())


# --- Eager PyTorch without chance at the price of eager PyTorch ------------------------------------------------------
#
# A step of a small model takes milliseconds, and as long again if each of its operations is looked at.
#
# Terms: *drawing* calls may draw random numbers. They alone run without chance; the generators tell afterwards whether
# anything was drawn elsewhere, and a step in which something was says nothing. (Nothing is seen of draws elsewhere
# after which a model puts the generators back: a step that differs says nothing either.)


# What models call; all else that draws is missed.
DRAWING = frozenset(
    {
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
        F.scaled_dot_product_attention, F.multi_head_attention_forward, F.gumbel_softmax, torch.dropout,
        torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.rand, torch.rand_like, torch.randn,
        torch.randn_like, torch.native_dropout, torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.exponential_,
        torch.Tensor.cauchy_, torch.Tensor.log_normal_,
    }
)  # fmt: skip
DROPOUT, ATTENTION = F.dropout, F.scaled_dot_product_attention  # by which nearly all dropout is made


class Sparing:
    """chance: what drawing calls run in; calls: the context that sees them (see `listening`). missed: whether anything
    was drawn elsewhere. unknown: see WithoutChance.
    """

    def __init__(self, chance: WithoutChance, device: torch.device, calls: AbstractContextManager[Any]) -> None:
        self.missed = False
        self.unknown = chance.unknown
        self._device, self._calls = device, calls

    def __enter__(self) -> Self:
        self._before = generators(self._device)
        self._calls.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._calls.__exit__(*error)
        self.missed = not torch.equal(self._before, generators(self._device))


Chance = WithoutChance | Sparing


def listening(chance: WithoutChance, draws: bool, model: nn.Module) -> AbstractContextManager[Any]:
    """Within it, drawing calls of the model run in `chance`. draws: whether there are such calls, as far as is known.

    A mode sees each call of torch, which costs a small model a third of its forward. Dropout that takes masks is nearly
    always called by name, as nn.Dropout does: then these names are other functions meanwhile.
    """
    if not draws:
        return nullcontext()
    drawing = _DrawingCalls(chance)
    if chance.masks is None or _holds_drawing(model):
        return _InDrawing(drawing)
    return _named(drawing)


class _DrawingCalls:
    """Drawing calls, as they run in `chance`."""

    def __init__(self, chance: WithoutChance) -> None:
        self._chance = chance

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What one gives. Most of dropout is computed as torch does on a CPU, in operations that nobody looks at."""
        if func is ATTENTION:
            if not _drops(*args, **kwargs):
                return func(*args, **kwargs)
            dropped = self._attention(*args, **kwargs)
        else:
            dropped = self._dropout(*args, **kwargs) if func is DROPOUT else None
        if dropped is not None:
            return dropped
        with self._chance:
            return func(*args, **kwargs)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor | None:
        masks = self._chance.masks
        if masks is None or inplace or not _is_plain(input, p) or not input.numel():
            return None
        if not training:
            return input
        return input * masks.take(input.shape, p, input.device).to(input.dtype).div_(1 - p)

    def _attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor | None:  # fmt: skip
        masks, operands = self._chance.masks, (query, key, value)
        if masks is None or not all(_is_plain(operand, dropout_p) for operand in operands) or query.dim() != 4:
            return None
        kept = masks.take((*query.shape[:-1], key.shape[-2]), dropout_p, query.device)
        return attention_that_drops(*operands, kept, dropout_p, attn_mask, is_causal, scale, enable_gqa)


def _is_plain(tensor: torch.Tensor, p: float) -> bool:
    """Whether torch drops elements of it as a CPU does."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu" and 0 < p < 1


class _InDrawing(TorchFunctionMode):
    """Each call is looked at."""

    def __init__(self, drawing: _DrawingCalls) -> None:
        super().__init__()
        self._drawing = drawing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._drawing.call(func, args, kwargs or {}) if func in DRAWING else func(*args, **(kwargs or {}))


@contextmanager
def _named(drawing: _DrawingCalls) -> Iterator[None]:
    """Dropout and attention are other functions by their names, for this thread."""
    here = get_ident()

    def another(func: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return drawing.call(func, args, kwargs) if get_ident() == here else func(*args, **kwargs)

        return call

    names = ("dropout", "scaled_dot_product_attention")
    with patch.multiple(F, **{name: another(getattr(F, name)) for name in names}):
        yield


def _holds_drawing(model: nn.Module) -> bool:
    """Whether a file that the model's classes stand in has drawing functions under names of its own."""
    drawing = set(map(id, DRAWING))
    homes = {kind.__module__ for kind in set(map(type, model.modules()))}
    spaces = [vars(sys.modules[home]) for home in homes if home in sys.modules and home.partition(".")[0] != "torch"]
    return any(not drawing.isdisjoint(map(id, space.values())) for space in spaces)


def _drops(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any) -> bool:
    """Whether attention that is called so drops weights."""
    return bool(dropout_p)


def generators(device: torch.device) -> torch.Tensor:
    """What torch's generators will draw next, on the CPU and on the device."""
    return torch.cat([torch.get_rng_state(), devices.generator(device)])


# --- One training step as eager PyTorch makes it: the reference that programs are held against -----------------------
#
# Terms: a batch goes through the model *whole*, as it is, once. Listed microbatches go through it one by one; how they
# count is seen by the targets that the loss is a mean over, and by the loss of all of them as one batch where they
# fit.


Batch = Mapping[str, Any]
ALIKE = 1e-4  # the relative difference of two losses that are the same


@dataclass(frozen=True)
class EagerStep:
    """loss: of the whole batch. gradients: by the parameters' names; those without one are left out. unknown: random
    operations that were not made the same for all. sure: False if how microbatches count had to be guessed.
    """

    loss: float
    gradients: Mapping[str, torch.Tensor]
    unknown: Set[str] = field(default_factory=frozenset)
    sure: bool = True


def eager_step(
    model: nn.Module | Snapshot,
    batch: Batch | Sequence[Batch],
    trainable: Set[str],
    rule: str = "auto",
    chance: Chance | None = None,
    axes: Mapping[str, int] = NOTHING_TOLD,
) -> EagerStep:
    """Loss and gradients of a batch, or of a list of microbatches. The model is left as it was; one that stands is so
    before, and need not be looked at again.

    trainable: names of the parameters that train; of none, the loss alone, under no_grad. rule: how the losses of
    listed microbatches combine: "mean" (by samples), "sum", "tokens" (counted targets of the loss), or "auto", as in
    one batch of all of them. chance: what stands for random numbers, if not constants. axes: along which dimension
    samples of an entry lie, where that is told (csc.capture.batch.sample_axis).
    """
    standing = model if isinstance(model, Snapshot) else Snapshot(model)
    with _as_in_training(standing, trainable, chance) as mode:
        for name, parameter in standing.parameters.items():
            if parameter.requires_grad is not (name in trainable):
                parameter.requires_grad_(name in trainable)
            parameter.grad = None
        loss, sure = _loss(standing.model, batch, rule, axes)
        if trainable:
            loss.backward()
        gradients = {name: p.grad for name, p in standing.parameters.items() if p.grad is not None}
    return EagerStep(float(loss.detach()), gradients, mode.unknown, sure)


def loss_again(
    model: nn.Module | Snapshot,
    batch: Batch | Sequence[Batch],
    trainable: Set[str],
    rule: str = "auto",
    chance: Chance | None = None,
    axes: Mapping[str, int] = NOTHING_TOLD,
) -> float:
    """The loss of one more forward of a batch: another than that of `eager_step` if the model computes with something
    that it changes itself where nobody puts it back (an iterator, a global, an object of its own).
    """
    standing = model if isinstance(model, Snapshot) else Snapshot(model)
    with _as_in_training(standing, trainable, chance):
        return float(_loss(standing.model, batch, rule, axes)[0].detach())


@contextmanager
def _as_in_training(standing: Snapshot, trainable: Set[str], chance: Chance | None) -> Iterator[Chance]:
    """What is afterwards as before, and draws the same each time."""
    with torch.set_grad_enabled(bool(trainable)), standing.in_training():
        devices.seed(standing.device, 0)
        with chance or WithoutChance() as mode:
            yield mode


def _loss(
    model: nn.Module, batch: Batch | Sequence[Batch], rule: str, axes: Mapping[str, int]
) -> tuple[torch.Tensor, bool]:
    """The loss, and whether it is sure how microbatches count in it."""
    if not isinstance(batch, (list, tuple)):
        return _of_one(model, batch), True  # type: ignore[arg-type]
    if len(batch) == 1:
        return _of_one(model, batch[0]), True
    losses, counts = [], []
    for microbatch in batch:
        with _Counting() as counting:
            losses.append(_of_one(model, microbatch))
        counts.append(counting.of(losses[-1]))
    weights = {"mean": _shares([_samples(microbatch, axes) for microbatch in batch]), "sum": [1.0] * len(batch)}
    if all(count is not None for count in counts):
        weights["tokens"] = _shares([count or 0 for count in counts])
    if rule != "auto":
        return _weighted(losses, weights[rule]), True
    weights["samples"] = weights["mean"]
    together = joined(batch, axes)
    whole_loss = _seen(model, together)
    for found in ("tokens", "samples", "sum"):
        if found in weights:
            loss = _weighted(losses, weights[found])
            if whole_loss is not None and abs(float(loss.detach()) - whole_loss) <= ALIKE * abs(whole_loss):
                return loss, True
    if together is not None and whole_loss is not None:  # a sum of terms, each of which weighs otherwise
        return _of_one(model, together), True
    return _weighted(losses, weights.get("tokens", weights["samples"])), "tokens" in weights


def _shares(counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def _weighted(losses: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    return torch.stack([loss * weight for loss, weight in zip(losses, weights) if weight]).sum()


def _samples(microbatch: Batch, axes: Mapping[str, int]) -> int:
    tensors = {name: value for name, value in microbatch.items() if isinstance(value, torch.Tensor) and value.dim()}
    name = next(name for name in ("labels", "input_ids", *tensors) if name in tensors)
    return tensors[name].shape[sample_axis(name, tensors, axes)]


@torch.no_grad()
def _seen(model: nn.Module, together: Batch | None) -> float | None:
    """The loss of microbatches as one batch, to see by it how they count; None if they cannot be one."""
    try:
        return None if together is None else float(_of_one(model, together))
    except Exception:  # models that are written for batches of a kind
        return None


def _of_one(model: nn.Module, batch: Batch) -> torch.Tensor:
    device = device_of(model)
    entries = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    result = model(**{name: value for name, value in entries.items() if value is not None})
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, Mapping):
        return result["loss"]
    return result.loss if hasattr(result, "loss") else result[0]


def joined(microbatches: Sequence[Batch], axes: Mapping[str, int] = NOTHING_TOLD) -> dict[str, Any] | None:
    """Microbatches as one batch; None if their entries do not fit together. axes: see `eager_step`."""
    batch: dict[str, Any] = {}
    if any(microbatch.keys() != microbatches[0].keys() for microbatch in microbatches):
        return None
    tensors = {name: value for name, value in microbatches[0].items() if isinstance(value, torch.Tensor)}
    for name, first in microbatches[0].items():
        values: list[Any] = [microbatch.get(name) for microbatch in microbatches]
        if isinstance(first, torch.Tensor):
            axis = sample_axis(name, tensors, axes)
            if not all(isinstance(value, torch.Tensor) and value.dim() == first.dim() > axis for value in values):
                return None
            if len({value.movedim(axis, 0).shape[1:] for value in values}) > 1:
                return None
            batch[name] = torch.cat(values, axis)
        elif any(repr(value) != repr(first) for value in values):
            return None
        else:
            batch[name] = first
    return batch


class _Counting(TorchFunctionMode):
    """Counts the targets that each mean of cross entropies is over, each by the weight of its class."""

    def __init__(self) -> None:
        super().__init__()
        self._means: list[tuple[torch.Tensor, float]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (F.cross_entropy, F.nll_loss) and kwargs.get("reduction", "mean") == "mean":
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            if isinstance(target, torch.Tensor) and not target.is_floating_point():
                counted = target[target != kwargs.get("ignore_index", -100)]
                weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
                count = counted.numel() if weight is None else float(weight.detach()[counted].sum())
                self._means.append((result, count))
        return result

    def of(self, loss: torch.Tensor) -> float | None:
        """The number of targets that this loss is a mean over; None if it is no such mean."""
        for mean, count in reversed(self._means):
            if count and bool((mean == loss).all()):
                return count
            if not count and bool(loss.isnan().all()):
                return 0
        return None
