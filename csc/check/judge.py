"""The judge: a step of a program beside one of eager PyTorch, and how far rounding alone moves gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from csc.capture.batch import NOTHING_TOLD
from csc.capture.quantised_weights import is_quantised
from csc.check.eager import (
    Chance,
    EagerStep,
    SameMasks,
    Snapshot,
    Sparing,
    WithoutChance,
    eager_step,
    listening,
    loss_again,
)
from csc.kernels.opaque import is_opaque
from csc.torch_private.fast_guards import norms, norms_of_differences
from csc.torch_private.traces import TorchDispatchMode, pytree

# --- How far gradients are from others -------------------------------------------------------------------------------
#
# Terms: a gradient that is zero in exact arithmetic (a key's bias under softmax) is rounding noise in both runs. One
# smaller than NOISE of its module's whole gradient is taken for that: its difference is measured against the module's.


NOISE = 1e-4
# Elements: on a CPU what lies in a cache, and few enough that float32 adds up their squares to 1e-6.
CHUNK, LARGE_CHUNK = 1 << 16, 1 << 24
LEAST, MOST = 1e-6, 1e15  # norms between which squares of what counts in float32 neither vanish nor overflow

Gradients = Mapping[str, torch.Tensor]


def relative(right: Gradients, found: Gradients) -> dict[str, float]:
    """By parameter, how far gradients are from the right ones; NaN where one of both is no number."""
    differences = dict.fromkeys(right.keys() & found.keys(), 0.0)
    pairs = {name: (found[name].to(right[name].device), right[name]) for name in differences}
    unequal = {name: pair for name, pair in pairs.items() if not _equal(*pair)}
    modules = set(map(_module, unequal))
    module_norms = _norms({name: gradient for name, gradient in right.items() if _module(name) in modules})
    of_module: dict[str, float] = {}
    for name, norm in module_norms.items():
        of_module[_module(name)] = math.hypot(of_module.get(_module(name), 0.0), norm)
    scales = {}
    for name in unequal:
        module_norm = of_module[_module(name)]
        scales[name] = module_norms[name] if module_norms[name] >= NOISE * module_norm else module_norm
    for name, difference in _norms_of_differences(unequal, scales).items():
        differences[name] = difference / scales[name] if scales[name] else difference
    return differences


def _equal(left: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit, and without NaN: most gradients are, and need no norm."""
    return left.layout == other.layout and torch.equal(left, other)


def _norms(gradients: Gradients) -> dict[str, float]:
    together = [name for name, gradient in gradients.items() if _is_small(gradient)]
    norm_of = dict(zip(together, norms([gradients[name] for name in together]), strict=True))
    kept = {name: norm for name, norm in norm_of.items() if LEAST <= norm <= MOST}
    return {name: kept[name] if name in kept else _norm(gradient) for name, gradient in gradients.items()}


def _norms_of_differences(
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scales: Mapping[str, float]
) -> dict[str, float]:
    """scales: what each is to be divided by."""
    together = [n for n, pair in pairs.items() if all(map(_is_small, pair)) and LEAST <= scales[n] <= MOST]
    ones, others = ([pairs[name][place] for name in together] for place in (0, 1))
    norm_of = dict(zip(together, norms_of_differences(ones, others), strict=True))
    return {
        name: norm_of[name] if name in norm_of else _norm_of_difference(*pair, scales[name])
        for name, pair in pairs.items()
    }


def _is_small(gradient: torch.Tensor) -> bool:
    """Whether its norm is taken together with others', in float32."""
    return gradient.dtype is torch.float32 and gradient.layout is torch.strided and gradient.numel() <= CHUNK


def _norm(tensor: torch.Tensor) -> float:
    """In float64 where float32 might not do: that takes thirty times as long."""
    flat = _flat(tensor)
    if flat.dtype is torch.float32:
        norm = _hypot(_chunks(flat))
        if LEAST <= norm <= MOST:
            return norm
    return _hypot(chunk.to(_wide(chunk)) for chunk in _chunks(flat))


def _norm_of_difference(left: torch.Tensor, other: torch.Tensor, scale: float) -> float:
    """scale: what it is to be divided by."""
    pairs = zip(_chunks(_flat(left)), _chunks(_flat(other)), strict=True)
    if left.dtype is other.dtype is torch.float32 and LEAST <= scale <= MOST:
        return _hypot(a - b for a, b in pairs)
    return _hypot(a.to(_wide(a)) - b.to(_wide(b)) for a, b in pairs)


def _hypot(chunks: Iterable[torch.Tensor]) -> float:
    """The norm of all chunks together."""
    norms = [torch.linalg.vector_norm(chunk) for chunk in chunks]
    if len(norms) == 1:
        return float(norms[0])
    return float(torch.linalg.vector_norm(torch.stack(norms).double())) if norms else 0.0


def _chunks(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    most = CHUNK if flat.device.type == "cpu" else LARGE_CHUNK
    return (flat,) if flat.numel() <= most else flat.split(most)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return dense.detach().reshape(-1)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


# --- How far rounding alone moves gradients --------------------------------------------------------------------------
#
# Eager PyTorch runs again; its weights, and whatever is added up, are other numbers in the last bit. Programs add up
# in another order; what a model makes of that (differences of nearly equal sums) is its own.


LOSS = ""  # under this name stands how far the loss moves
# Operations that add up, by parts of their names. Others round too, but are the same operations in a program.
ADDING = ("mm", "convolution", "scaled_dot_product", "attention", "sum", "mean", "var", "norm", "softmax", "nll_loss")


def moved(
    model: nn.Module,
    batch: Any | Sequence[Any],
    trainable: Set[str],
    rule: str,
    right: EagerStep,
    epsilon: float,
    chance: Chance | None = None,
    axes: Mapping[str, int] = NOTHING_TOLD,
) -> Mapping[str, float]:
    """By parameter, and under LOSS. epsilon: the relative size of the change, that of a bit. right: made with such a
    `chance` and `axes` (see eager_step), too.
    """
    with _nudged(model, epsilon), _Perturbed(epsilon):
        other = eager_step(model, batch, trainable, rule, chance, axes)
    loss = abs(other.loss - right.loss) / max(abs(right.loss), torch.finfo(torch.float32).tiny)
    return {LOSS: loss, **relative(right.gradients, other.gradients)}


@contextmanager
@torch.no_grad()
def _nudged(model: nn.Module, epsilon: float) -> Iterator[None]:
    """Each floating-point parameter times 1 + epsilon or 1 - epsilon, at random; afterwards as before, to the bit."""
    generator = torch.Generator().manual_seed(0)
    before = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not is_quantised(parameter):
            before[name] = parameter.detach().clone()
            parameter.mul_(_last_bits(parameter.shape, epsilon, parameter.dtype, generator).to(parameter.device))
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            if name in before:
                parameter.copy_(before[name])


class _Perturbed(TorchDispatchMode):
    """What operations in it add up is multiplied by 1 + epsilon or 1 - epsilon, at random: Monte Carlo arithmetic
    (Parker, 1997).
    """

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self._epsilon = epsilon
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(part in func._schema.name for part in ADDING):
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                    self._perturb(leaf)
        return result

    def _perturb(self, tensor: torch.Tensor) -> None:
        if tensor.device not in self._generators:
            self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(0)
        tensor.mul_(_last_bits(tensor.shape, self._epsilon, tensor.dtype, self._generators[tensor.device]))


def _last_bits(shape: Sequence[int], epsilon: float, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """1 + epsilon and 1 - epsilon, at random."""
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device=generator.device)
    return signs.to(dtype).mul_(2).sub_(1).mul_(epsilon).add_(1)


# --- What eager PyTorch makes of a batch, each time with the same random numbers -------------------------------------


class Reference:
    """given, trainable, rule, axes: see csc.check.eager. masks: of dropout, if it is to drop something; None: nothing
    is left to chance. draws: whether the program draws anything; it says nothing of opaque modules.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Any,
        trainable: Set[str],
        rule: str,
        masks: SameMasks | None = None,
        draws: bool = True,
        axes: Mapping[str, int] = NOTHING_TOLD,
    ) -> None:
        self.masks = masks
        self._model, self._given = model, (given, trainable, rule)
        self._standing: Snapshot | None = None
        self._draws, self._axes = draws, axes
        self._everywhere = any(map(is_opaque, self._stands.modules))  # they may have generators of their own

    def step(self) -> EagerStep:
        """Loss and gradients. Where something was drawn that calls do not show, once more."""
        chance = self._chance()
        step = eager_step(self._stands, *self._given, chance, self._axes)
        if isinstance(chance, Sparing) and chance.missed:
            self._everywhere = True
            return eager_step(self._stands, *self._given, self._chance(), self._axes)
        return step

    def less_sparing(self) -> bool:
        """Look at each operation from now on. False: that was so before."""
        before, self._everywhere = self._everywhere, True
        return not before

    def again(self) -> float:
        """The loss of another forward."""
        return loss_again(self._stands, *self._given, self._chance(), self._axes)

    def look_again(self) -> None:
        """Put back, after each step, what is there now."""
        self._standing = None

    def moved(self, right: EagerStep, epsilon: float) -> Mapping[str, float]:
        """How far rounding moves gradients and the loss."""
        return moved(self._model, *self._given, right, epsilon, self._chance(), self._axes)

    def in_half(self) -> bool:
        """Whether any operation of a step has a result of 16 bits."""
        everywhere = self._without_chance()
        eager_step(self._stands, *self._given, everywhere, self._axes)
        return everywhere.half

    @property
    def _stands(self) -> Snapshot:
        if self._standing is None:
            self._standing = Snapshot(self._model)
        return self._standing

    def _without_chance(self) -> WithoutChance:
        self.masks = None if self.masks is None else self.masks.once_more()
        return WithoutChance(self.masks)

    def _chance(self) -> Chance:
        everywhere = self._without_chance()
        if self._everywhere:
            return everywhere
        return Sparing(everywhere, self._stands.device, listening(everywhere, self._draws, self._model))


# --- The judge: a step of a program beside one of eager PyTorch ------------------------------------------------------


# A difference of at most this many times what a changed last bit makes of eager's own gradients is rounding: programs
# add up in another order everywhere, the probe changes one bit of each weight.
ROUNDING = 16.0


@dataclass(frozen=True)
class Judgement:
    """loss_rel: relative difference of the loss. grad_rel: per parameter (see csc.check.judge). missing:
    parameters to which eager alone gives a gradient; unexpected: to which the program alone does.
    wrong: names of the parameters whose gradients are not eager's; loss_wrong: the loss is not. allowed: what is put
    down to rounding for the gradient that differs most.
    """

    loss: float
    loss_eager: float
    loss_rel: float
    grad_rel: Mapping[str, float]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong: tuple[str, ...]
    loss_wrong: bool
    allowed: float = 0.0

    @property
    def good(self) -> bool:
        return not (self.missing or self.unexpected or self.wrong or self.loss_wrong)

    @property
    def largest(self) -> float:
        """The largest entry of grad_rel; NaN if one is."""
        values = list(self.grad_rel.values())
        return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def judge(
    right: EagerStep,
    loss: float,
    gradients: Mapping[str, torch.Tensor],
    tolerances: Iterable[float],
    rounding: Callable[[], Mapping[str, float]],
) -> Judgement:
    """right: eager's step; loss, gradients: the program's. tolerances: that pass, each larger than the one before, the
    next one asked for only if something differs by more. rounding: how far a last bit moves eager's, asked for last.
    """
    differences = relative(right.gradients, gradients)
    loss_rel = abs(loss - right.loss) / max(abs(right.loss), torch.finfo(torch.float32).tiny)
    most = max(differences, key=lambda name: differences[name], default="")
    allowed: Mapping[str, float] = {}
    for tolerance in tolerances:
        apart = {name: value for name, value in differences.items() if not value <= tolerance}
        loss_apart = not loss_rel <= tolerance
        if not apart and not loss_apart:
            break
    else:
        allowed = rounding()
        apart = {name: value for name, value in apart.items() if not value <= ROUNDING * allowed[name]}
        loss_apart = loss_apart and not loss_rel <= ROUNDING * allowed[LOSS]
    return Judgement(
        loss=loss,
        loss_eager=right.loss,
        loss_rel=loss_rel,
        grad_rel=dict(sorted(differences.items())),
        missing=tuple(sorted(right.gradients.keys() - gradients.keys())),
        unexpected=tuple(sorted(gradients.keys() - right.gradients.keys())),
        wrong=tuple(sorted(apart)),
        loss_wrong=loss_apart,
        allowed=max(tolerance, ROUNDING * allowed.get(most, 0.0)),
    )
