"""A program beside eager PyTorch before it is handed out, on the batch that it was compiled for.

    check(compiler, own_step, trainable, batch, ready, options) -> Checked      DifferenceError if they differ
    too_much(model) -> str                              why it cannot be done with the whole model

Costs one of eager PyTorch's steps, once for a model one more forward, and what waiting for `own_step` takes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from csc import devices
from csc.capture.batch import device_of
from csc.check.compiling import Compiles
from csc.check.eager import EagerStep, loss_again
from csc.check.judge import Judgement, judge
from csc.check.locate import locate
from csc.check.numbers import IN_HALF
from csc.check.reference import Reference
from csc.check.same_masks import SameMasks
from csc.errors import DifferenceError, InputError
from csc.ir.groups import Group
from csc.ir.program import Options

log = logging.getLogger("csc")

# What is put down to rounding without asking: in float32 sums in another order, more so over several ranks of a layer.
EXACT, SPREAD, HALF = 1e-5, 1e-4, 0.05
ROOM = 0.5  # of a device's memory
WRONG = "what csc would train is not what eager PyTorch trains"
OTHERS = "eager PyTorch draws other random numbers than the program lists"
BUG = (
    "is a bug of csc: please report it with the model; `csc verify` shows every gradient. check=False trains all the "
    "same"
)
TOGETHER = (
    "What the model's code makes of the whole batch (the longest length, a number of classes, whether there are "
    "images) each microbatch has of its own: make it before the step, as an entry of the batch, or use microbatches=1 "
    "and dp=1"
)


@dataclass(frozen=True)
class Checked:
    """gradients: how many were compared; largest: the largest relative difference; loss: that of the loss; seconds:
    what the check took, own_step: of these, for the program's step. skipped: why nothing was compared, or "". what:
    what was, if not all of the model. allowed: what rounding in 16 bits may make of the largest difference; 0: nothing
    is computed in 16 bits. kept: the program's step was kept as the training step that it is.
    """

    gradients: int = 0
    largest: float = 0.0
    loss: float = 0.0
    seconds: float = 0.0
    own_step: float = 0.0
    skipped: str = ""
    what: str = ""
    kept: bool = False
    allowed: float = 0.0

    def __str__(self) -> str:
        if self.skipped:
            return f"not checked against eager PyTorch: {self.skipped}"
        found = f"loss to {self.loss:.1e}, {self.gradients} gradients to {self.largest:.1e}"
        if not self.gradients:
            found = f"loss only, to {self.loss:.1e}"
        elif self.allowed:
            found += f" (rounding in 16 bits may make {self.allowed:.1e})"
        what = f" {self.what}" if self.what else ""
        took = f"{self.seconds:.2f} s"
        if self.kept:
            took = f"{self.seconds - self.own_step:.2f} s beside the step itself"
        return f"checked against eager PyTorch{what}: {found}, in {took}"


def check(
    compiler: Compiles,
    own_step: Callable[[], EagerStep],
    trainable: Set[str],
    batch: Any,
    ready: Sequence[Mapping[str, Any]],
    options: Options,
    steady: bool = False,
    masks: SameMasks | None = None,
    draws: bool = True,
    apart: str = "",
) -> Checked:
    """Compare loss and every gradient of one step on a batch.

    own_step: what the program makes of the batch with the model's weights; asked for after eager PyTorch has run.
    trainable: the parameters that train. batch: as the user gives it; ready: its microbatches. steady: it is known that
    the model's forward does the same each time. masks: of the dropout in own_step; None: nothing is left to chance
    there. Where eager PyTorch cannot take them, or may have had them in other places, nothing is compared. draws:
    whether the program draws anything. apart: how microbatches differ that were right in steps of their own; "": not
    all were. DifferenceError that names the region where both part, InputError if the model is another function in each
    step; the model and its gradients are as before in any case.
    """
    start = time.perf_counter()
    model = compiler.model
    rule = options.loss_weight
    try:
        eager = Reference(model, batch if rule == "auto" else ready, trainable, rule, masks, draws)
        right = eager.step()
    except torch.OutOfMemoryError:
        return Checked(skipped="a step of the whole batch in one process takes more memory than there is")
    except Exception as error:  # the user's model, on the user's batch
        return Checked(skipped=f"eager PyTorch fails on the whole batch: {type(error).__name__}: {_first_line(error)}")
    taken = eager.masks
    if taken is not None and not taken.fit:
        return Checked(skipped=OTHERS)
    if rule != "auto" and len(ready) > 1:
        _compare_with_whole(model, batch, trainable, right.loss, rule)
    if not steady:  # at once: what goes round returns to where it was
        _refuse_unsteady(model, right.loss, eager.again())
    began = time.perf_counter()
    found = own_step()
    own = time.perf_counter() - began
    eager.look_again()
    drawn = right.unknown | found.unknown
    if drawn:
        return Checked(skipped=f"random numbers are drawn by {', '.join(sorted(drawn))}")
    precision = _Precision(eager, right, options)
    result = precision.judge(right, found)
    if not result.good and eager.less_sparing():
        right, taken = eager.step(), eager.masks
        if taken is not None and not taken.fit:
            return Checked(skipped=OTHERS)
        result = precision.judge(right, found)
    if not result.good and taken is not None:
        if result.loss_wrong or taken.microbatches > 1:  # masks may lie otherwise in eager's tensors
            return Checked(skipped=f"with dropout as the program lists it, {_told(result)}")
        told = f"with the same dropout, {_told(result)}; the loss is right"
        raise DifferenceError(f"{WRONG}: {told}", type(model).__name__, f"It {BUG}")
    if steady and not result.good:
        _refuse_unsteady(model, right.loss, eager.again())
    seconds = time.perf_counter() - start
    if result.good or not right.sure:
        if not result.good:
            return Checked(skipped="the microbatches differ in length, and how their losses combine was not seen")
        allowed = result.allowed if precision.half else 0.0
        return Checked(len(result.grad_rel), result.largest, result.loss_rel, seconds, own, allowed=allowed)
    if apart:
        raise DifferenceError(f"{WRONG}: {_told(result)}; {apart}", type(model).__name__, TOGETHER)
    raise _difference(compiler, ready[0], options, result, precision.tolerance)


def _refuse_unsteady(model: nn.Module, loss: float, again: float) -> None:
    if abs(again - loss) > EXACT * abs(loss):
        raise InputError(
            f"the same batch has another loss each time, {loss:.7g} and then {again:.7g}: the model computes with "
            "something that its forward changes (an iterator, a global, an object of its own)",
            type(model).__name__,
            "pass what changes from step to step as an entry of the batch, a tensor; or keep the module out of the "
            "trace with csc.opaque(module)",
        )


def _compare_with_whole(model: nn.Module, batch: Any, trainable: Set[str], loss: float, rule: str) -> None:
    """Say so if the user has losses combined into another one than that of the whole batch."""
    try:
        whole = loss_again(model, batch, trainable)
    except Exception:  # a batch that the model cannot take at once has no such loss
        return
    if abs(whole - loss) > EXACT * abs(whole):
        log.warning("loss_weight=%r makes a loss of %.7g of this batch; that of the whole is %.7g", rule, loss, whole)


def _difference(
    compiler: Compiles, microbatch: Mapping[str, Any], options: Options, result: Judgement, tolerance: float
) -> DifferenceError:
    try:
        place = locate(compiler, microbatch, options, tolerance)
        what, where, whole = place.what, place.where, place.whole
    except Exception as error:  # the difference is what matters
        log.info("where the program differs from eager PyTorch could not be found: %s", error)
        what, where, whole = "", "", False
    name = type(compiler.model).__name__
    mesh = options.mesh
    remedy = f"It {BUG}"
    if options.precision != "model":
        part = f"[{worst.rpartition('.')[0]!r}]" if (worst := _worst(result)) else "[...]"
        remedy = (
            f"Is bfloat16 too coarse for what makes that (a sum that all but cancels)? Then let it compute in float32, "
            f"keep_fp32={part}; `csc verify --float64` shows how far eager PyTorch itself is from the exact gradients. "
            f"Else it {BUG}"
        )
    if whole and options.microbatches * mesh.dp > 1:
        what += f", and the {options.microbatches * mesh.dp} microbatches together are not"
        remedy = (
            "Do the loss or a layer mix samples (a norm, a mean, a product over them), or is the loss no mean or sum "
            "over samples? Then use microbatches=1 and dp=1, or say with loss_weight= how losses of microbatches "
            f"combine. Else it {BUG}"
        )
    elif whole:
        what += f", and on this mesh ({mesh}) it is not"
    told = "; ".join(filter(None, (_told(result), what)))
    return DifferenceError(f"{WRONG}: {told}", where or name, remedy)


def _told(result: Judgement) -> str:
    """What differs, in a clause."""
    parts = []
    if result.loss_wrong:
        parts.append(f"the loss is {result.loss:.7g}, eager's {result.loss_eager:.7g}")
    if result.missing:
        parts.append(f"{len(result.missing)} parameters get no gradient, {result.missing[0]!r} for one")
    if result.unexpected:
        count, first = len(result.unexpected), result.unexpected[0]
        parts.append(f"{count} parameters get a gradient where eager gives none, {first!r} for one")
    if result.wrong:
        worst = _worst(result)
        count, most = len(result.wrong), result.grad_rel[worst]
        parts.append(f"{count} of {len(result.grad_rel)} gradients differ, that of {worst!r} by {most:.2g} of its norm")
    return ", ".join(parts)


def _worst(result: Judgement) -> str:
    """The parameter whose gradient differs most, or ""."""
    return max(result.wrong, key=lambda name: result.grad_rel[name], default="")


class _Precision:
    """What is put down to rounding. tolerance: the relative difference that passes without asking; epsilon: the
    relative size of a last bit; both as far as is known.
    """

    def __init__(self, eager: Reference, right: EagerStep, options: Options) -> None:
        self._eager = eager
        self._half = options.precision != "model" or any(one.dtype in IN_HALF for one in right.gradients.values())
        self._exact = EXACT if math.prod(options.mesh.sizes(Group.LAYER)) == 1 else SPREAD

    def judge(self, right: EagerStep, found: EagerStep) -> Judgement:
        return judge(
            right, found.loss, found.gradients, self._tolerances(), lambda: self._eager.moved(right, self.epsilon)
        )

    def _tolerances(self) -> Iterator[float]:
        """One after the other; whether anything is computed in 16 bits takes another step to find out."""
        if not self._half:
            yield self._exact
            self._half = self._eager.in_half()
        if self._half:
            yield HALF

    @property
    def half(self) -> bool:
        """Whether 16 bits are known to be computed in."""
        return self._half

    @property
    def tolerance(self) -> float:
        return HALF if self._half else self._exact

    @property
    def epsilon(self) -> float:
        return torch.finfo(torch.bfloat16 if self._half else torch.float32).eps / 2


def too_much(model: nn.Module) -> str:
    """Why the whole model cannot run here beside the program; "" if it can."""
    parameters = list(model.parameters())
    if any(tensor.is_meta for tensor in chain(parameters, model.buffers())):
        return "the model has no weights here"
    held = sum(parameter.nbytes for parameter in parameters)
    if 3 * held > ROOM * room_of(model):  # weights, and two sets of gradients
        return f"weights and two sets of gradients of the whole model are {3 * held / 1e9:.0f} GB"
    return ""


def room_of(model: nn.Module) -> int:
    """Bytes that the model's device has."""
    return devices.memory(device_of(model))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
