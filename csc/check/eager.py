"""One training step as eager PyTorch makes it: the reference that programs are held against.

Terms: a batch goes through the model *whole*, as it is, once. Listed microbatches go through it one by one; how they
count is seen by the targets that the loss is a mean over, and by the loss of all of them as one batch where they fit.

    eager_step(model, batch, trainable, rule, chance) -> EagerStep
    loss_again(model, batch, trainable, rule, chance) -> loss   of another forward
    joined(microbatches) -> batch            None if they do not fit together
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from csc import devices
from csc.capture.batch import device_of, sample_axis
from csc.check.chance import Chance
from csc.check.numbers import WithoutChance
from csc.check.undisturbed import Snapshot

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
) -> EagerStep:
    """Loss and gradients of a batch, or of a list of microbatches. The model is left as it was; one that stands is so
    before, and need not be looked at again.

    trainable: names of the parameters that train; of none, the loss alone, under no_grad. rule: how the losses of
    listed microbatches combine: "mean", "sum", "tokens" (counted targets of the loss), or "auto", as in one batch of
    all of them. chance: what stands for random numbers, if not constants.
    """
    standing = model if isinstance(model, Snapshot) else Snapshot(model)
    with _as_in_training(standing, trainable, chance) as mode:
        for name, parameter in standing.parameters.items():
            if parameter.requires_grad is not (name in trainable):
                parameter.requires_grad_(name in trainable)
            parameter.grad = None
        loss, sure = _loss(standing.model, batch, rule)
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
) -> float:
    """The loss of one more forward of a batch: another than that of `eager_step` if the model computes with something
    that it changes itself where nobody puts it back (an iterator, a global, an object of its own).
    """
    standing = model if isinstance(model, Snapshot) else Snapshot(model)
    with _as_in_training(standing, trainable, chance):
        return float(_loss(standing.model, batch, rule)[0].detach())


@contextmanager
def _as_in_training(standing: Snapshot, trainable: Set[str], chance: Chance | None) -> Iterator[Chance]:
    """What is afterwards as before, and draws the same each time."""
    with torch.set_grad_enabled(bool(trainable)), standing.in_training():
        devices.seed(standing.device, 0)
        with chance or WithoutChance() as mode:
            yield mode


def _loss(model: nn.Module, batch: Batch | Sequence[Batch], rule: str) -> tuple[torch.Tensor, bool]:
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
    weights = {"mean": [1 / len(batch)] * len(batch), "sum": [1.0] * len(batch)}
    if all(count is not None for count in counts):
        weights["tokens"] = _shares([count or 0 for count in counts])
    if rule != "auto":
        return _weighted(losses, weights[rule]), True
    weights["samples"] = _shares([_samples(microbatch) for microbatch in batch])
    together = joined(batch)
    whole = _seen(model, together)
    for found in ("tokens", "samples", "sum"):
        if found in weights:
            loss = _weighted(losses, weights[found])
            if whole is not None and abs(float(loss.detach()) - whole) <= ALIKE * abs(whole):
                return loss, True
    if together is not None and whole is not None:  # a sum of terms, each of which weighs otherwise
        return _of_one(model, together), True
    return _weighted(losses, weights.get("tokens", weights["samples"])), "tokens" in weights


def _shares(counts: Sequence[float]) -> list[float]:
    whole = sum(counts)
    return [count / whole if whole else 0.0 for count in counts]


def _weighted(losses: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    return torch.stack([loss * weight for loss, weight in zip(losses, weights) if weight]).sum()


def _samples(microbatch: Batch) -> int:
    tensors = [value for value in microbatch.values() if isinstance(value, torch.Tensor) and value.dim()]
    known = [microbatch[name] for name in ("labels", "input_ids") if isinstance(microbatch.get(name), torch.Tensor)]
    return len((known or tensors)[0])


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


def joined(microbatches: Sequence[Batch]) -> dict[str, Any] | None:
    """Microbatches as one batch; None if their entries do not fit together."""
    whole: dict[str, Any] = {}
    if any(microbatch.keys() != microbatches[0].keys() for microbatch in microbatches):
        return None
    tensors = {name: value for name, value in microbatches[0].items() if isinstance(value, torch.Tensor)}
    for name, first in microbatches[0].items():
        values: list[Any] = [microbatch.get(name) for microbatch in microbatches]
        if isinstance(first, torch.Tensor):
            axis = sample_axis(name, tensors) if name in tensors else 0
            if first.dim() == 0 or not all(
                isinstance(v, torch.Tensor) and v.movedim(axis, 0).shape[1:] == first.movedim(axis, 0).shape[1:]
                for v in values
            ):
                return None
            whole[name] = torch.cat(values, axis)
        elif any(repr(value) != repr(first) for value in values):
            return None
        else:
            whole[name] = first
    return whole


class _Counting(TorchFunctionMode):
    """Counts the targets that each mean of cross entropies is over, each by the weight of its class."""

    def __init__(self) -> None:
        super().__init__()
        self._means: list[tuple[torch.Tensor, float]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (functional.cross_entropy, functional.nll_loss) and kwargs.get("reduction", "mean") == "mean":
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
