"""A program beside eager PyTorch before it is handed out, on the batch that it was compiled for."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from csc import devices
from csc.capture.batch import NOTHING_TOLD, device_of
from csc.capture.quantised_weights import weights_of
from csc.capture.trace.export import training, without_kv_cache
from csc.check.compiling import Compiles
from csc.check.eager import IN_HALF, EagerStep, SameMasks, WithoutChance, eager_step, generators, joined, undisturbed
from csc.check.judge import Judgement, Reference, judge
from csc.errors import DifferenceError, InputError
from csc.ir import graph as g
from csc.ir.groups import BATCH_LOSS, LOSS_WEIGHTS, Group
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program, Region, compute_dtypes
from csc.kernels.batch_loss import STANDING_IN, numbered
from csc.runtime import executor
from csc.runtime.loaded_program import load
from csc.runtime.trainer import Trainer
from csc.runtime.transport import InProcess
from csc.temporary import TemporaryFolder
from csc.torch_private.traces import pytree

# --- One step of a program, for comparison: `.grad` as it was afterwards ---------------------------------------------


@dataclass(frozen=True)
class ComparedStep:
    """A step whose gradients are kept apart. loss: as `train_step` returned it. given: by place among what the trainer
    steps.
    """

    step: EagerStep
    loss: torch.Tensor
    given: Sequence[torch.Tensor | None]

    @torch.no_grad()
    def keep(self, trainer: Trainer) -> torch.Tensor:
        """Make it a training step of this trainer: its gradients go to `.grad` as `train_step` adds them. The loss."""
        for parameter, gradient in zip(trainer.parameters(), self.given, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return self.loss


def step_of(
    trainer: Trainer, microbatches: Sequence[Mapping[str, torch.Tensor]], drawn: int = executor.NO_CHANCE
) -> EagerStep:
    """The loss and gradients of all ranks, which run in this process. microbatches: complete ones.

    What the program draws from torch's generator all the same (in modules that it calls as they are) is `unknown`.
    """
    return compared_step(trainer, microbatches, drawn).step


def compared_step(
    trainer: Trainer, microbatches: Sequence[Mapping[str, torch.Tensor]], drawn: int | None = executor.NO_CHANCE
) -> ComparedStep:
    """The same, with the loss as a tensor. drawn: None for a seed that is drawn as in training; torch's generator goes
    on as it does there.
    """
    parameters = list(trainer.named_parameters())
    before = [parameter.grad for _, parameter in parameters]
    try:
        trainer.zero_grad()
        inputs = [trainer.reads(microbatch) for microbatch in microbatches]
        with nullcontext() if drawn is None else devices.forked(trainer.device):
            expected = _after_draw(trainer.device) if drawn is None else generators(trainer.device)
            loss = trainer.train_step(inputs, drawn=drawn)
            more = not torch.equal(expected, generators(trainer.device))
        given = [parameter.grad for _, parameter in parameters]
        gradients = {name: p.grad for name, p in reversed(parameters) if p.grad is not None}  # a rank's own go first
        unknown = frozenset({"modules that csc runs as they are"} if more else ())
        return ComparedStep(EagerStep(float(loss), gradients, unknown), loss, given)
    finally:
        for (_, parameter), gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _after_draw(device: torch.device) -> torch.Tensor:
    """What a step leaves of the generators if it draws its seed and no more."""
    with devices.forked(device):
        executor.draw()
        return generators(device)


# --- Where a program and eager PyTorch part --------------------------------------------------------------------------
#
# That is the first region whose values differ, else the last whose gradients do.
#
# Terms: the *plain* program is that of one microbatch on one rank, from the same capture. What differs there differs
# in the capture or in a region's backward; what does not, in how microbatches and ranks are put together.


NUMBERS = torch.tensor([-1, -1, 0])  # the seed of a microbatch that leaves nothing to chance


@dataclass(frozen=True)
class PartingPlace:
    """what: a clause that says what parts; where: the region and the line of the user's code; whole: one microbatch on
    one rank is right, and the difference comes from putting them together.
    """

    what: str
    where: str
    whole: bool = False


def locate(compiler: Compiles, microbatch: Mapping[str, Any], options: Options, tolerance: float) -> PartingPlace:
    """microbatch: one, as the user gives it; options: those of the program that differs."""
    plain = replace(
        options, mesh=Mesh(), microbatches=1, context=(), cuts=None, stages=None, placement=None, chunks=None,
        schedule="auto", memory=None, features=False,
    )  # fmt: skip
    program = compiler.finished(microbatch, plain)
    place = _values_part(program, compiler.model, compiler.complete(microbatch), microbatch, tolerance)
    if place is not None:
        return place
    trainable = {p.name for p in program.parameters if p.trainable}
    right = eager_step(compiler.model, microbatch, trainable)
    complete = compiler.complete(microbatch)
    with TemporaryFolder() as folder:
        compiler.emit(program, plain, Path(folder) / "program", complete)
        loaded = load(Path(folder) / "program")
        trainer = Trainer(loaded, weights_of(compiler.model), InProcess(loaded))
        step = step_of(trainer, [complete])
    return _gradients_part(program, right, step, tolerance)


def _gradients_part(program: Program, right: EagerStep, step: EagerStep, tolerance: float) -> PartingPlace:
    result = judge(right, step.loss, step.gradients, [tolerance], lambda: dict.fromkeys(["", *right.gradients], 0.0))
    apart = {*result.wrong, *result.missing, *result.unexpected}
    if result.loss_wrong:
        return PartingPlace(
            "each region's graph has the values of its module, and the program that was written has others", ""
        )
    for region in reversed(program.regions):
        names = sorted(apart & set(region.parameters))
        if names:
            return PartingPlace(
                f"its values are right, and the gradient of {names[0]!r} is not", _line(program, region)
            )
    if apart:
        return PartingPlace(f"no region holds {min(apart)!r}, whose gradient is not right", "")
    return PartingPlace("each microbatch alone is right on one rank", "", whole=True)


@torch.no_grad()
def _values_part(
    program: Program, model: nn.Module, complete: Mapping[str, Any], microbatch: Mapping[str, Any], tolerance: float
) -> PartingPlace | None:
    """The first region whose output is none of those of its module in eager PyTorch."""
    device = device_of(model)
    modules = {region.module for region in program.regions}
    with undisturbed(model), training(model), without_kv_cache(model), _watched(model, modules) as seen:
        inputs = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in microbatch.items() if v is not None}
        with WithoutChance():
            model(**inputs)
    for region, outputs in _run(program, model, {n: t for n, t in complete.items() if isinstance(t, torch.Tensor)}):
        for output in outputs:
            alike = [value for value in seen.get(region.module, ()) if value.shape == output.shape]
            if alike and not any(_close(value, output, tolerance) for value in alike):
                return PartingPlace("its values are not those of the module", _line(program, region))
    return None


def _close(right: torch.Tensor, output: torch.Tensor, tolerance: float) -> bool:
    wide = torch.complex128 if right.is_complex() else torch.float64
    exact, other = right.to(wide), output.to(wide)
    scale = float(torch.linalg.vector_norm(exact))
    return float(torch.linalg.vector_norm(other - exact)) <= 10 * tolerance * max(scale, 1e-12)


@contextmanager
def _watched(model: nn.Module, paths: set[str]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Inside, what these modules return is kept."""
    seen: dict[str, list[torch.Tensor]] = {}
    hooks = []
    for path, module in model.named_modules():
        if path in paths:

            def keep(_: nn.Module, __: Any, result: Any, path: str = path) -> None:
                tensors = [leaf.detach().clone() for leaf in pytree.tree_leaves(result) if torch.is_tensor(leaf)]
                seen.setdefault(path, []).extend(tensors)

            hooks.append(module.register_forward_hook(keep))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _run(
    program: Program, model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Region, list[torch.Tensor]]]:
    """Every region with its outputs, in order of execution."""
    device = device_of(model)
    dtypes = compute_dtypes(program)
    weights = {name: p.detach().to(dtypes.get(name, p.dtype)) for name, p in weights_of(model).items()}
    tables: dict[str, torch.Tensor] = {}
    if program.shared is not None:
        entries = {("input", n): t.to(device) for n, t in batch.items()}
        entries |= {("constant", n): t.to(device) for n, t in program.constants.items()}
        entries["random", "seed"] = NUMBERS
        entries[LOSS_WEIGHTS] = torch.ones(len(program.combination.divisors), dtype=torch.float64, device=device)
        entries[BATCH_LOSS] = numbered(STANDING_IN)
        inputs = [entries[node.meta["role"]] for node in g.placeholders(program.shared)]
        tables = dict(zip(program.shared.output_node().meta["names"], _results(program.shared, inputs)))
    activations: dict[str, torch.Tensor] = {}
    for region in program.regions:
        inputs = [activations[value] for value in region.activations]
        inputs += [tables[table] for table in region.shared]
        inputs += [weights[name] for name in region.parameters]
        outputs = list(_results(program.templates[region.template].graph, inputs))
        activations.update(zip(region.outputs, outputs))
        yield region, outputs


def _results(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> Any:
    return fx.Interpreter(nn.Module(), graph=graph).run(*inputs)


def _line(program: Program, region: Region) -> str:
    lines = [node.meta.get("source") for node in g.calls(program.templates[region.template].graph)]
    frame = next((line for line in reversed(lines) if line), "")
    return f"region {region.name} ({frame})" if frame else f"region {region.name}"


# --- A program beside eager PyTorch before it is handed out, on the batch that it was compiled for -------------------
#
# Costs one of eager PyTorch's steps, once for a model one more forward, and what waiting for `own_step` takes.


log = logging.getLogger("csc")

# What is put down to rounding without asking: in float32 sums in another order, more so over several ranks of a layer.
EXACT, SPREAD, HALF = 1e-5, 1e-4, 0.05
WEIGHTS = ("tokens", "mean", "sum")  # that a user may say
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
    is computed in 16 bits. kept: the program's step was kept as the training step that it is. in_float32: what the same
    program makes without 16 bits, where that was compared, too.
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
    in_float32: Checked | None = None

    def __str__(self) -> str:
        if self.skipped:
            return f"not checked against eager PyTorch: {self.skipped}"
        summary = f"loss to {self.loss:.1e}, {self.gradients} gradients to {self.largest:.1e}"
        if not self.gradients:
            summary = f"loss only, to {self.loss:.1e}"
        elif self.allowed:
            summary += f" (rounding in 16 bits may make {self.allowed:.1e})"
        if self.in_float32 is not None and not self.in_float32.skipped:
            summary += f", the same program in float32 to {self.in_float32.largest:.1e}"
        subject = f" {self.what}" if self.what else ""
        took = f"{self.seconds:.2f} s"
        if self.kept:
            took = f"{self.seconds - self.own_step:.2f} s beside the step itself"
        return f"checked against eager PyTorch{subject}: {summary}, in {took}"


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
    differ: str = "",
    alone: bool = False,
) -> Checked:
    """Compare loss and every gradient of one step on a batch.

    own_step: what the program makes of the batch with the model's weights; asked for after eager PyTorch has run.
    trainable: the parameters that train. batch: as the user gives it; ready: its microbatches. steady: it is known that
    the model's forward does the same each time. masks: of the dropout in own_step; None: nothing is left to chance
    there. Where eager PyTorch cannot take them, or may have had them in other places, nothing is compared. draws:
    whether the program draws anything. differ: in what the microbatches do, in a phrase, if csc has several kinds of
    them; alone: each kind was right in steps of its own. DifferenceError that names the region where both part,
    InputError if the model is another function in each step; the model and its gradients are as before in any case.
    """
    start = time.perf_counter()
    model = compiler.model
    rule = options.loss_weight
    try:
        eager, right, at_once = _reference(compiler, batch, ready, trainable, rule, masks, draws)
    except torch.OutOfMemoryError:
        return Checked(skipped="a step of the whole batch in one process takes more memory than there is")
    except Exception as error:  # the user's model, on the user's batch
        return Checked(skipped=f"eager PyTorch fails on the whole batch: {type(error).__name__}: {_first_line(error)}")
    taken = eager.masks
    if taken is not None and not taken.fit:
        return Checked(skipped=OTHERS)
    if not steady:  # at once: what goes round returns to where it was
        _refuse_unsteady(model, right.loss, eager.again())
    began = time.perf_counter()
    step = own_step()
    own_seconds = time.perf_counter() - began
    eager.look_again()
    drawn = right.unknown | step.unknown
    if drawn:
        return Checked(skipped=f"random numbers are drawn by {', '.join(sorted(drawn))}")
    precision = _Precision(eager, right, options)
    result = precision.judge(right, step)
    if not result.good and eager.less_sparing():
        right, taken = eager.step(), eager.masks
        if taken is not None and not taken.fit:
            return Checked(skipped=OTHERS)
        result = precision.judge(right, step)
    if not result.good and taken is not None:
        if result.loss_wrong or taken.microbatches > 1:  # masks may lie otherwise in eager's tensors
            return Checked(skipped=f"with dropout as the program lists it, {_told(result)}")
        difference = f"with the same dropout, {_told(result)}; the loss is right"
        raise DifferenceError(f"{WRONG}: {difference}", type(model).__name__, f"It {BUG}")
    if steady and not result.good:
        _refuse_unsteady(model, right.loss, eager.again())
    seconds = time.perf_counter() - start
    if result.good or not right.sure:
        if not result.good:
            return Checked(skipped="the microbatches differ in length, and how their losses combine was not seen")
        allowed = result.allowed if precision.half else 0.0
        return Checked(len(result.grad_rel), result.largest, result.loss_rel, seconds, own_seconds, allowed=allowed)
    if rule != "auto" and at_once and len(ready) > 1:
        _refuse_weight(compiler, ready, trainable, rule, right, step, precision)
    if alone:
        met = f"its microbatches were right in steps of their own, and meet first in this one; they differ in {differ}"
        raise DifferenceError(f"{WRONG}: {_told(result)}; {met}", type(model).__name__, TOGETHER)
    raise _difference(compiler, ready[0], options, result, precision.tolerance, differ)


def _reference(
    compiler: Compiles,
    batch: Any,
    ready: Sequence[Mapping[str, Any]],
    trainable: Set[str],
    rule: str,
    masks: SameMasks | None,
    draws: bool,
) -> tuple[Reference, EagerStep, bool]:
    """What eager PyTorch makes of the whole batch, and True; or, where the user says how losses combine and the model
    takes no such batch, of its microbatches as he says, and False.
    """
    model, axes = compiler.model, compiler.axes
    whole = batch if rule == "auto" or isinstance(batch, Mapping) else joined(batch, axes)
    if whole is not None:
        eager = Reference(model, whole, trainable, "auto", masks, draws, axes)
        try:
            return eager, eager.step(), True
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if rule == "auto":
                raise
    eager = Reference(model, ready, trainable, rule, masks, draws, axes)
    return eager, eager.step(), False


def _refuse_unsteady(model: nn.Module, loss: float, again: float) -> None:
    if abs(again - loss) > EXACT * abs(loss):
        raise InputError(
            f"the same batch has another loss each time, {loss:.7g} and then {again:.7g}: the model computes with "
            "something that its forward changes (an iterator, a global, an object of its own)",
            type(model).__name__,
            "pass what changes from step to step as an entry of the batch, a tensor; or keep the module out of the "
            "trace with csc.opaque(module)",
        )


def _refuse_weight(
    compiler: Compiles,
    ready: Sequence[Mapping[str, Any]],
    trainable: Set[str],
    rule: str,
    right: EagerStep,
    found: EagerStep,
    precision: _Precision,
) -> None:
    """DifferenceError if the program does what the user says, and that is not what the model does to the whole batch.

    right: of the whole batch; found: the program's.
    """

    def by(weight: str) -> EagerStep | None:
        try:
            return Reference(compiler.model, ready, trainable, weight, axes=compiler.axes).step()
        except Exception:  # what this weight counts eager PyTorch does not show
            return None

    weighed = by(rule)
    if weighed is None or not precision.judge(weighed, found).good:
        return
    result = precision.judge(right, found)
    fitting = [
        weight
        for weight in WEIGHTS
        if weight != rule and (step := by(weight)) is not None and precision.judge(right, step).good
    ]
    if fitting:
        remedy = f"loss_weight={fitting[0]!r} makes the loss and gradients of the whole batch: use it"
    else:
        remedy = (
            "No loss_weight makes them: the loss or a layer mixes samples (a norm, a mean, a product over them), or "
            "terms of the loss are divided by different numbers. Use microbatches=1 and dp=1, with which the step is "
            "the model's own"
        )
    raise DifferenceError(
        f"loss_weight={rule!r} does not make of the microbatches what eager PyTorch makes of the whole batch: "
        f"{_told(result)}",
        type(compiler.model).__name__,
        f"{remedy}. check=False trains by {rule!r} all the same",
    )


def _difference(
    compiler: Compiles,
    microbatch: Mapping[str, Any],
    options: Options,
    result: Judgement,
    tolerance: float,
    differ: str,
) -> DifferenceError:
    try:
        place = locate(compiler, microbatch, options, tolerance)
        fault, where, whole = place.what, place.where, place.whole
    except Exception as error:  # the difference is what matters
        log.info("where the program differs from eager PyTorch could not be found: %s", error)
        fault, where, whole = "", "", False
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
        fault += f", and the {options.microbatches * mesh.dp} microbatches together are not"
        fault += f"; they differ in {differ}" if differ else ""
        remedy = (
            "Do the loss or a layer mix samples (a norm, a mean, a product over them), or is the loss no mean or sum "
            "over samples? Then use microbatches=1 and dp=1, or say with loss_weight= how losses of microbatches "
            "combine"
        )
        remedy = f"{TOGETHER if differ else remedy}. Else it {BUG}"
    elif whole:
        fault += f", and on this mesh ({mesh}) it is not"
    difference = "; ".join(filter(None, (_told(result), fault)))
    return DifferenceError(f"{WRONG}: {difference}", where or name, remedy)


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
        self._half = options.precision != "model" or any(
            gradient.dtype in IN_HALF for gradient in right.gradients.values()
        )
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


# --- Where several steps of an optimizer lead: what a wrong state between steps would show in ------------------------
#
# The optimizer is SGD with momentum: it is linear in the gradients, so that rounding stays what it is. (Adam makes
# whole steps of gradients that are nothing but rounding.)


RATE, MOMENTUM = 1e-2, 0.9

Parameters = Mapping[str, torch.Tensor]


def trained_by_eager(
    model: nn.Module, batch: Any, trainable: Set[str], steps: int, axes: Mapping[str, int] = NOTHING_TOLD
) -> dict[str, torch.Tensor]:
    """By eager PyTorch; the model is as before afterwards. axes: see csc.check.eager."""
    parameters = {name: p for name, p in model.named_parameters() if name in trainable}
    with _put_back(parameters) as start:
        optimizer = torch.optim.SGD(parameters.values(), RATE, MOMENTUM)
        for _ in range(steps):
            _step(optimizer, parameters, eager_step(model, batch, trainable, axes=axes).gradients)
        return _moved(parameters, start)


def trained_by_program(
    trainer: Trainer, microbatches: Sequence[Mapping[str, torch.Tensor]], steps: int
) -> dict[str, torch.Tensor]:
    """By a program; its parameters are as before afterwards. microbatches: complete ones."""
    parameters = dict(trainer.named_parameters())
    with _put_back(parameters) as start:
        optimizer = torch.optim.SGD(parameters.values(), RATE, MOMENTUM)
        for _ in range(steps):
            _step(optimizer, parameters, step_of(trainer, microbatches).gradients)
        return _moved(parameters, start)


def _step(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], gradients: Parameters) -> None:
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad = gradients.get(name)
    optimizer.step()
    for name, parameter in parameters.items():
        parameter.grad = before[name]


def _moved(parameters: Parameters, start: Parameters) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() - start[name] for name, parameter in parameters.items()}


@contextmanager
@torch.no_grad()
def _put_back(parameters: Parameters) -> Iterator[Parameters]:
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        yield start
    finally:
        for name, parameter in parameters.items():
            parameter.copy_(start[name])
