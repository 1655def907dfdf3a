"""`csc verify`: the compiled program against eager PyTorch, on the same batch and the same parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from csc.api import CompiledModel
from csc.capture import device_of, loss_of, placed, split_batch, training, with_weights, without_kv_cache
from csc.ir import graph as g
from csc.ir.program import Options
from csc.torch_private import pytree

# A gradient that is zero in exact arithmetic (a key's bias under softmax) is rounding noise in both runs. One smaller
# than this share of its module's whole gradient is taken for that: its difference is measured against the module's.
NOISE = 1e-4
# As far from the gradient in float64 as this many times eager's own is as exact as eager.
AS_EXACT = 2.0


@dataclass(frozen=True)
class Verification:
    """loss_rel: relative difference of the loss. grad_rel: per parameter, |g - eager|_2 / |eager|_2 (see NOISE).
    missing: parameters that eager gives a gradient and the program does not; unexpected: the reverse. from_float64: if
    asked for, how far eager's and the program's gradient are from eager PyTorch's in float64, in the same measure.
    """

    loss: float
    loss_eager: float
    loss_rel: float
    grad_rel: Mapping[str, float]
    bit_equal: int
    params_missing: tuple[str, ...]
    params_unexpected: tuple[str, ...]
    random_ops: int
    from_float64: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def differing(self, tolerance: float) -> dict[str, float]:
        """The entries of grad_rel above a tolerance, those left out for which the program is as exact as eager."""
        return {
            name: value
            for name, value in self.grad_rel.items()
            if not value <= tolerance and not self._as_exact(name, tolerance)
        }

    def _as_exact(self, name: str, tolerance: float) -> bool:
        eager, own = self.from_float64.get(name, (0.0, math.inf))
        return own <= max(tolerance, AS_EXACT * eager)

    @property
    def grad_rel_max(self) -> float:
        """The largest entry of grad_rel; infinite if a gradient is missing or not a number."""
        if self.params_missing or any(value != value for value in self.grad_rel.values()):
            return float("inf")
        return max(self.grad_rel.values(), default=0.0)

    @property
    def params_checked(self) -> int:
        """How many gradients were compared."""
        return len(self.grad_rel)


def default_tolerance(options: Options) -> float:
    """The largest relative difference that is put down to rounding: in float32 only the order of sums differs, more
    so where attention over several ranks adds up its parts; bfloat16 has 8 bits and is compared with float32.
    """
    if options.precision != "model":
        return 0.1
    return 1e-6 if options.mesh.cp == 1 else 1e-5


def verify(compiled: CompiledModel, batch: Any = None, float64: bool = False) -> Verification:
    """Run eager and compiled on the example (or a given) batch, in this process. `.grad` is left as it was.

    float64: also eager in float64, on a copy of the model: it tells what is rounding.
    """
    batch = compiled.example if batch is None else batch
    model = with_weights(compiled.model, "verify")
    trainable = {p.name for p in compiled.program.parameters if p.trainable}
    weight = compiled.program.loss_weight
    with _gradients_of(model, trainable):
        eager_loss, eager = _eager(model, batch, weight)
        torch.manual_seed(0)
        loss = float(compiled.train_step(batch))
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        exact = None
        if float64:
            copy = deepcopy(model).double()
            _, exact = _eager(copy, pytree.tree_map(_doubled, batch), weight)
    return compared(loss, eager_loss, eager, found, _random_ops(compiled), exact)


@contextmanager
def _gradients_of(model: nn.Module, trainable: Set[str]) -> Iterator[None]:
    """These parameters alone are trainable and have no gradient; afterwards all is as it was."""
    kept = {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()}
    try:
        for name, p in model.named_parameters():
            p.requires_grad_(name in trainable)
            p.grad = None
        yield
    finally:
        for name, p in model.named_parameters():
            p.requires_grad_(kept[name][0])
            p.grad = kept[name][1]


def _eager(model: nn.Module, batch: Any, loss_weight: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and gradients by name; the model is left without any."""
    for p in model.parameters():
        p.grad = None
    torch.manual_seed(0)
    with training(model), without_kv_cache(model):
        loss = _eager_loss(model, batch, loss_weight)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return float(loss.detach()), found


def _doubled(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _eager_loss(model: nn.Module, batch: Any, loss_weight: str) -> torch.Tensor:
    """The loss of a batch; of a list of microbatches their losses combined as csc.runtime.losses says."""
    microbatches = batch if isinstance(batch, (list, tuple)) else [batch]
    losses, weights = [], []
    for microbatch in microbatches:
        tensors, extra = split_batch(microbatch)
        with _CountingTargets() as targets:
            losses.append(loss_of(model(**placed(tensors, device_of(model)), **extra)))
        weights.append({"tokens": targets.count, "mean": 1 / len(microbatches), "sum": 1}[loss_weight])
    if len(microbatches) == 1:
        return losses[0]
    whole = sum(weights) if loss_weight == "tokens" else 1
    return torch.stack([loss * (weight / whole) for loss, weight in zip(losses, weights)]).sum()


class _CountingTargets(TorchFunctionMode):
    """Counts what the last cross entropy is a mean over."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (functional.cross_entropy, functional.nll_loss):
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            self.count = int((target != kwargs.get("ignore_index", -100)).sum())
        return func(*args, **kwargs)


def compared(
    loss: float,
    loss_eager: float,
    eager: Mapping[str, Any],
    found: Mapping[str, Any],
    random_ops: int,
    exact: Mapping[str, Any] | None = None,
) -> Verification:
    """Two losses, and two sets of gradients by the parameters' names; exact: a third one, in float64."""
    relative = _relative(eager, found)
    from_float64 = {}
    if exact is not None:
        of_eager, own = _relative(exact, eager), _relative(exact, found)
        from_float64 = {name: (of_eager[name], own[name]) for name in of_eager.keys() & own.keys()}
    return Verification(
        loss=loss,
        loss_eager=loss_eager,
        loss_rel=abs(loss - loss_eager) / max(abs(loss_eager), torch.finfo(torch.float32).tiny),
        grad_rel=dict(sorted(relative.items())),
        bit_equal=sum(torch.equal(found[name], eager[name]) for name in relative),
        params_missing=tuple(sorted(eager.keys() - found.keys())),
        params_unexpected=tuple(sorted(found.keys() - eager.keys())),
        random_ops=random_ops,
        from_float64=from_float64,
    )


def _relative(right: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """How far gradients are from the right ones, as `Verification.grad_rel` says."""
    norms = {name: float(gradient.double().norm()) for name, gradient in right.items()}
    of_module: dict[str, float] = {}
    for name, norm in norms.items():
        of_module[_module(name)] = math.hypot(of_module.get(_module(name), 0.0), norm)
    relative = {}
    for name in right.keys() & found.keys():
        whole = of_module[_module(name)]
        scale = norms[name] if norms[name] >= NOISE * whole else whole
        difference = float((found[name].double() - right[name].double()).norm())
        relative[name] = difference / scale if scale else difference
    return relative


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _random_ops(compiled: CompiledModel) -> int:
    return sum(g.draws(node) for node in g.calls(compiled.program.graph))
