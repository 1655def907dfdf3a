"""`csc verify`: the compiled program against eager PyTorch, on the same batch and the same parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from csc.analysis.operators.execution import draws
from csc.capture.trace.meta_init import with_weights
from csc.check.certificate import Fingerprint, fingerprint
from csc.check.eager import eager_step
from csc.check.first import locate, trained_by_eager, trained_by_program
from csc.check.judge import LOSS, ROUNDING, relative
from csc.check.judge import moved as moved_by_rounding
from csc.driver.compiled import CompiledModel
from csc.ir import graph as g
from csc.ir.groups import Group
from csc.ir.program import Options
from csc.torch_private.traces import pytree

# As far from the gradient in float64 as this many times eager's own is as exact as eager.
AS_EXACT = 2.0


@dataclass(frozen=True)
class Verification:
    """loss_rel: relative difference of the loss. grad_rel: per parameter, |g - eager|_2 / |eager|_2, small ones by
    their module's (csc.check.judge). missing: parameters that eager gives a gradient and the program does not;
    unexpected: the reverse. random_ops: calls that draw random numbers, which were the same constants for both;
    unknown: what draws others. from_float64: if asked for, how far eager's and the
    program's gradient are from eager PyTorch's in float64, in the same measure. trained_rel: if asked for, how far
    parameters are from eager's after several steps of an optimizer, as a share of how far these have moved. rounding:
    if asked for, how far a changed last bit of every weight moves eager's own gradients, and under LOSS its loss.
    in_half: the same of a last bit of bfloat16, in which the program computes; it is shown, and lets nothing pass.
    fingerprints: if asked for, of the program's gradients (csc.check.certificate).
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
    unknown: tuple[str, ...] = ()
    trained_rel: Mapping[str, float] = field(default_factory=dict)
    rounding: Mapping[str, float] = field(default_factory=dict)
    in_half: Mapping[str, float] = field(default_factory=dict)
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)

    def good(self, tolerance: float) -> bool:
        """Whether the program trains what eager PyTorch trains, to this relative difference."""
        return (
            not self.params_missing
            and not self.params_unexpected
            and not self.differing(tolerance)
            and self.loss_rel <= self._allowed(LOSS, tolerance)
            and all(  # several steps add up
                value <= 10 * self._allowed(name, tolerance) for name, value in self.trained_rel.items()
            )
        )

    def differing(self, tolerance: float) -> dict[str, float]:
        """The entries of grad_rel above a tolerance, those left out for which the program is as exact as eager."""
        return {
            name: value
            for name, value in self.grad_rel.items()
            if not value <= self._allowed(name, tolerance) and not self._as_exact(name, tolerance)
        }

    def _allowed(self, name: str, tolerance: float) -> float:
        return max(tolerance, ROUNDING * self.rounding.get(name, 0.0))

    def _as_exact(self, name: str, tolerance: float) -> bool:
        eager, from_exact = self.from_float64.get(name, (0.0, math.inf))
        return from_exact <= max(tolerance, AS_EXACT * eager)

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
    so where several ranks add up parts of attention or of a layer; bfloat16 has 8 bits and is compared with float32.
    """
    if options.precision != "model":
        return 0.1
    return 1e-6 if math.prod(options.mesh.sizes(Group.LAYER)) == 1 else 1e-5


def verify(
    compiled: CompiledModel,
    batch: Any = None,
    float64: bool = False,
    steps: int = 0,
    rounding: bool = False,
    certify: bool = False,
) -> Verification:
    """Run eager and compiled on the example (or a given) batch, in this process. Parameters and `.grad` stay.

    Eager PyTorch takes the whole batch at once, whatever `loss_weight` says; of a list each microbatch, which counts as
    it does in one batch of all.
    float64: also eager in float64, on a copy of the model: it tells what is rounding. steps: also train both for so
    many steps of SGD with momentum, and compare the parameters. rounding: where they differ by more than
    `default_tolerance`, ask eager PyTorch how far rounding alone moves it, and let that pass. With a precision of its
    own the program is shown beside what a last bit of that makes of eager PyTorch. certify: make what a certificate
    holds, fingerprints and how far rounding moves eager PyTorch (csc.reports.certifying).
    """
    batch = compiled.example if batch is None else batch
    model = with_weights(compiled.model, "verify")
    program = compiled.program
    trainable = {p.name for p in program.parameters if p.trainable}
    axes = compiled.inspected.axes
    right = eager_step(model, batch, trainable, axes=axes)
    step = compiled.inspected.step_without_chance(batch)
    exact = None
    if float64:
        exact = eager_step(deepcopy(model).double(), pytree.tree_map(_doubled, batch), trainable, axes=axes).gradients
    drawing = sum(map(draws, g.calls(program.graph)))
    result = compared(step.loss, right.loss, right.gradients, step.gradients, drawing, exact)
    trained = {}
    if steps:
        moved = trained_by_eager(model, batch, trainable, steps, axes)
        trained = relative(
            moved, trained_by_program(compiled.trainer(batch, check=False), compiled.inspected.complete(batch), steps)
        )
    result = replace(result, unknown=tuple(sorted(right.unknown | step.unknown)), trained_rel=trained)
    if certify:
        result = replace(result, fingerprints={name: fingerprint(name, g) for name, g in step.gradients.items()})
    if certify or (rounding and not result.good(default_tolerance(compiled.options))):
        epsilon = torch.finfo(torch.float32).eps / 2
        result = replace(result, rounding=moved_by_rounding(model, batch, trainable, "auto", right, epsilon, axes=axes))
    if compiled.options.precision != "model":
        epsilon = torch.finfo(torch.bfloat16).eps / 2
        result = replace(result, in_half=moved_by_rounding(model, batch, trainable, "auto", right, epsilon, axes=axes))
    return result


def parting(compiled: CompiledModel, tolerance: float) -> str:
    """Where a program and eager PyTorch part, as a sentence: the first region whose values or gradients differ."""
    first = compiled.inspected.microbatches(compiled.example)[0]
    place = locate(compiled.compiler, first, compiled.options, tolerance)
    return ": ".join(filter(None, (place.where, place.what)))


def _doubled(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def compared(
    loss: float,
    loss_eager: float,
    eager: Mapping[str, Any],
    found: Mapping[str, Any],
    random_ops: int,
    exact: Mapping[str, Any] | None = None,
) -> Verification:
    """Two losses, and two sets of gradients by the parameters' names; exact: a third one, in float64."""
    differences = relative(eager, found)
    from_float64 = {}
    if exact is not None:
        of_eager, of_csc = relative(exact, eager), relative(exact, found)
        from_float64 = {name: (of_eager[name], of_csc[name]) for name in of_eager.keys() & of_csc.keys()}
    return Verification(
        loss=loss,
        loss_eager=loss_eager,
        loss_rel=abs(loss - loss_eager) / max(abs(loss_eager), torch.finfo(torch.float32).tiny),
        grad_rel=dict(sorted(differences.items())),
        bit_equal=sum(torch.equal(found[name], eager[name]) for name in differences),
        params_missing=tuple(sorted(eager.keys() - found.keys())),
        params_unexpected=tuple(sorted(found.keys() - eager.keys())),
        random_ops=random_ops,
        from_float64=from_float64,
    )
