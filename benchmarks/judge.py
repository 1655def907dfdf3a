"""Eager PyTorch and csc on the same model and batches. Shares nothing with `csc verify`.

    judge(module, setting) -> Outcome      module: make() -> model, batch(seed, samples, tokens) -> batch
    setting: what differs from PLAIN. freeze: globs over parameter names; off: they are frozen by requires_grad, before
    compilation; steps: train three steps with SGD instead of one, the second on a batch of another size; accumulate:
    how many steps before the optimizer's one; replaced: the weights have new memory (`p.data = ...`) before each step
    but the first; evaluate: behind the last step the loss in eval mode too; own: what the mesh has for components, as
    (("encoder.dp", 1), ("encoder.pp", 1)).

The reference is the loss of the whole batch through the model as it is, and `.grad` by named_parameters(). What differs
is measured against what eager itself gives for weights that are moved by their last bit, so that neither a sum in
another order nor a rounding counts as wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import csc

TOLERANCE = 2e-5
COARSE = 0.1  # of bfloat16, which has 8 bits
CASTS = 0.02  # of a model that casts a part of itself: microbatches round there, where the whole batch rounds once
LOW = (torch.bfloat16, torch.float16)
SLACK = 20  # times eager's own difference for moved weights
PLAIN: Mapping[str, Any] = {
    "pp": 1, "dp": 1, "cp": 1, "tp": 1, "microbatches": 1, "schedule": "auto", "recompute": None, "precision": None,
    "freeze": (), "off": False, "steps": False, "accumulate": 1, "replaced": False,
    "evaluate": False, "loss_chunk": 0, "own": (), "forms": (), "written": "", "moved": False, "listed": False,
    "zero": 0, "ahead": False,
}  # fmt: skip
LARGEST = 1e15  # a norm; larger numbers overflow in sums that eager PyTorch and csc make in another order
TOGETHER = ("its microbatches were right in steps", "each microbatch alone is right")  # what csc says of a step of them
Values = dict[str, torch.Tensor | None]


class Module(Protocol):
    """A file that `source` wrote."""

    make: Callable[[], nn.Module]
    batch: Callable[..., dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Outcome:
    """kind: right, refused (by a csc sentence), mixed (refused by csc's own check in the first step of microbatches
    that are right alone and not together), caught (wrong, and the check said so), crash, wrong (in silence), or eager
    (which does not run). differences: of what is wrong, by parameter: eager's and csc's norm, and the relative
    difference.
    """

    kind: str
    reason: str = ""
    differences: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    seconds: float = 0.0


def loss_of(result: Any) -> torch.Tensor:
    """The loss in what forward returned."""
    if isinstance(result, Mapping):
        return result["loss"]
    result = getattr(result, "loss", result)
    return result[0] if isinstance(result, (tuple, list)) else result


def sizes(setting: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """(seed, samples, tokens) of the batches to train on, and their form if it is asked for: two samples a microbatch,
    another size in the second step.
    """
    samples = 2 * setting["microbatches"] * setting["dp"]
    samples = max(4, samples)
    forms = setting["forms"]
    found = [(number, samples, 6) for number in range(max(len(forms), 3 if setting["steps"] else 1))]
    if setting["steps"]:
        found[1] = (1, samples * 2, 8)
    return [(*size, form) for size, form in zip(found, forms, strict=True)] if forms else found


def pieces(batch: dict[str, Any], setting: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A batch as microbatches of two samples or more, each as long as its longest row."""
    number = setting["microbatches"] * setting["dp"]
    found = []
    for place in range(number):
        rows = slice(*(len(batch["ids"]) * end // number for end in (place, place + 1)))
        longest = int(batch["keep"][rows].sum(1).max())
        found.append({n: t[rows, :longest] if t.shape == batch["ids"].shape else t[rows] for n, t in batch.items()})
    return found


def labelled(batch: dict[str, Any]) -> int:
    """How many labels a batch has."""
    return int((batch["labels"] != -100).sum())


def _scaled(tensors: list[torch.Tensor], by: float = 1.1) -> None:
    for tensor in tensors:
        tensor.data.mul_(by)


def _added(tensors: list[torch.Tensor], place: Any) -> None:
    for tensor in tensors:
        if tensor.dim() == 2:
            tensor.data[place] += 0.25


def _of_place(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.data.flatten()[: tensor.numel() // 2 + 1][-1:].add_(0.5)


def _without_grad(tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(1.1)


def _replaced(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.data = tensor.data * 1.1


WRITTEN: Mapping[str, tuple[str, Callable[[list[torch.Tensor]], None]]] = {
    "weights": ("weights", _scaled),
    "frozen": ("frozen", _scaled),
    "trained": ("trained", _scaled),
    "buffers": ("buffers", _scaled),
    "row": ("weights", lambda tensors: _added(tensors, 1)),
    "column": ("weights", lambda tensors: _added(tensors, (slice(None), 1))),
    "frozen row": ("frozen", lambda tensors: _added(tensors, 1)),
    "frozen column": ("frozen", lambda tensors: _added(tensors, (slice(None), 1))),
    "entry": ("weights", _of_place),
    "one": ("weights", lambda tensors: _scaled(tensors[len(tensors) // 2 :][:1], 1.5)),
    "without grad": ("weights", _without_grad),
    "frozen without grad": ("frozen", _without_grad),
    "memory": ("frozen", _replaced),
    "buffers' memory": ("buffers", _replaced),
}


def write(model: nn.Module, setting: Mapping[str, Any]) -> None:
    """Write to the model what the setting asks for."""
    whose, how = WRITTEN[setting["written"]]
    every = dict(model.named_parameters())
    frozen = [
        name for name, p in every.items()
        if not p.requires_grad or any(fnmatchcase(name, pattern) for pattern in freeze(model, setting["freeze"]))
    ]  # fmt: skip
    tensors: dict[str, list[torch.Tensor]] = {
        "weights": list(every.values()),
        "frozen": [every[name] for name in frozen],
        "trained": [p for name, p in every.items() if name not in frozen],
        "buffers": [buffer for buffer in model.buffers() if buffer.is_floating_point()],
    }
    how(tensors[whose])


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """The patterns that match a parameter, none if nothing were left to train."""
    every = list(model.named_parameters(remove_duplicate=False))
    names = [name for name, p in every if p.requires_grad]
    found = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]
    frozen = {id(p) for n, p in every if any(fnmatchcase(n, pattern) for pattern in found)}
    return found if any(p.requires_grad and id(p) not in frozen for _, p in every) else []


def apply(model: nn.Module, patterns: list[str]) -> None:
    """Freeze by requires_grad. A tied parameter is frozen by each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def train(
    model: nn.Module,
    batches: list[dict[str, Any]],
    step: Callable[[int], torch.Tensor],
    evaluate: Callable[[dict[str, Any]], torch.Tensor],
    setting: Mapping[str, Any],
    change: Callable[[int], None],
) -> Values:
    """Losses and gradients of one step, or of three steps the losses, parameters and buffers behind them. step: of a
    batch by its number.
    """
    found: Values = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number in range(len(batches)):
        if number and setting["written"]:
            write(model, setting)
        if setting["moved"]:
            change(number)
        if number and setting["replaced"]:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        model.zero_grad(set_to_none=True)
        for _ in range(setting["accumulate"]):
            loss = step(number)
        found[f"loss {number}"] = loss.detach().clone().reshape(())
        if len(batches) > 1:
            optimizer.step()
    if setting["evaluate"]:
        found["loss in eval mode"] = evaluate(batches[0]).detach().clone().reshape(())
    if len(batches) == 1:
        return found | {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    found |= {name: p.detach().clone() for name, p in model.named_parameters()}
    kept = model.state_dict()  # what is in no checkpoint is the model's scratch paper
    return found | {name: b.detach().clone() for name, b in model.named_buffers() if name in kept}


def eager(module: Module, setting: Mapping[str, Any], moved: int = 0, dtype: torch.dtype | None = None) -> Values:
    """What eager PyTorch gives. moved: by how many steps of random last bits its weights are off; dtype: that of what
    is float32 otherwise.
    """
    model = module.make()
    apply(model, freeze(model, setting["freeze"]))
    if dtype is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.to(dtype) if tensor.dtype is torch.float32 else tensor.data
    if moved:
        generator = torch.Generator().manual_seed(moved)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.mul_(1 + torch.finfo(parameter.dtype).eps * noise)

    def step(number: int) -> torch.Tensor:
        batch = batches[number]
        if setting["listed"]:
            parts = [one for one in pieces(batch, setting) if labelled(one)]
            loss = torch.stack([loss_of(model(**one)) * (labelled(one) / labelled(batch)) for one in parts]).sum()
        else:
            loss = loss_of(model(**batch))
        loss.backward()
        return loss

    def evaluate(batch: dict[str, Any]) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            return loss_of(model(**batch))

    batches = [module.batch(*size) for size in sizes(setting)]
    if dtype is not None:
        batches = [{n: t.to(dtype) if t.dtype is torch.float32 else t for n, t in batch.items()} for batch in batches]
    with outside(module, model) as change:
        return train(model, batches, step, evaluate, setting, change)


@contextmanager
def outside(module: Module, model: nn.Module) -> Iterator[Callable[[int], None]]:
    """What makes the module's CHANGES for a step; behind the block all is as for the first one."""

    def change(number: int) -> None:
        for write_outside in getattr(module, "CHANGES", ()):
            write_outside(number, model)

    change(0)
    try:
        yield change
    finally:
        change(0)


def norm(value: torch.Tensor) -> float:
    """2-norm; of sparse gradients and complex ones too."""
    value = value.to_dense() if value.is_sparse else value
    return float(torch.linalg.vector_norm(value.to(torch.complex128 if value.is_complex() else torch.float64)))


def apart(left: Values, right: Values, share: float) -> dict[str, float]:
    """Relative differences by name; `share` of the largest gradient is the least that one is measured against."""
    floor = share * max((norm(v) for n, v in left.items() if v is not None and not n.startswith("loss")), default=0.0)
    found = {}
    for name, value in left.items():
        other = right.get(name)
        if value is None or other is None:
            found[name] = 0.0 if value is other else float("inf")
            continue
        value, other = (t.to_dense() if t.is_sparse else t for t in (value, other))
        if value.shape != other.shape:
            found[name] = float("inf")
            continue
        least = 1e-3 if name.startswith("loss") else floor
        found[name] = norm(value.double() - other.double()) / max(norm(value), least, 1e-30)
    return found


def judge(module: Module, setting: Mapping[str, Any], compiled: csc.CompiledModel | None = None) -> Outcome:
    """Compare one setting. compiled: from the same module, to take traces from; None: compile anew."""
    setting, start = {**PLAIN, **setting}, time.perf_counter()
    try:
        reference = eager(module, setting)
    except Exception as error:
        return Outcome("eager", f"{type(error).__name__}: {error}")
    if not all(v is None or bool(torch.isfinite(v.to_dense() if v.is_sparse else v).all()) for v in reference.values()):
        return Outcome("eager", "its numbers are not finite")
    if any(v is not None and norm(v) > LARGEST for v in reference.values()):
        return Outcome("eager", f"a norm above {LARGEST:.0e}: in float32 its square is not finite")
    try:
        own = ours(module, setting, compiled)
    except csc.DifferenceError as error:
        kind = "mixed" if any(text in str(error) for text in TOGETHER) else "caught"
        return Outcome(kind, str(error), seconds=time.perf_counter() - start)
    except csc.CscError as error:
        return Outcome("refused", str(error), seconds=time.perf_counter() - start)
    except Exception as error:
        return Outcome("crash", f"{type(error).__name__}: {error}", seconds=time.perf_counter() - start)
    wrong = compare(module, setting, reference, own)
    reason = f"{len(wrong)} of {len(reference)} differ" if wrong else ""
    return Outcome("wrong" if wrong else "right", reason, wrong, time.perf_counter() - start)


def ours(module: Module, setting: Mapping[str, Any], compiled: csc.CompiledModel | None = None) -> Values:
    """What csc gives, all ranks in this process."""
    model = module.make() if compiled is None else compiled.model
    patterns = freeze(model, setting["freeze"])
    batches = [module.batch(*size) for size in sizes(setting)]
    options = asked(setting, module)
    if setting["off"]:
        apply(model, patterns)
    elif patterns:
        options["freeze"] = patterns
    with outside(module, model) as change:
        if compiled is None:
            compiled = csc.compile(model, example=batches[0], cache=False, **options)
        else:
            compiled = compiled.with_options(**{name: value for name, value in options.items() if name != "divide"})
        trained = compiled

        def step(number: int) -> torch.Tensor:
            batch = pieces(batches[number], setting) if setting["listed"] else batches[number]
            ahead = batches[number + 1] if setting["ahead"] and number + 1 < len(batches) else None
            return trained.train_step(batch, ahead=ahead) if ahead is not None else trained.train_step(batch)

        return train(model, batches, step, compiled.eval_step, setting, change)


def asked(setting: Mapping[str, Any], module: Module | None = None) -> dict[str, Any]:
    """What csc.compile takes, but for `freeze`."""
    mesh = {axis: setting[axis] for axis in ("dp", "pp", "cp", "tp")} | dict(setting["own"])
    named = {name: setting[name] for name in ("microbatches", "schedule", "loss_chunk")}
    named |= {"recompute": setting["recompute"] or "none", "precision": setting["precision"] or "model"}
    named |= {"zero": setting["zero"]} if setting["zero"] else {}
    named |= {"encode_ahead": True} if setting["ahead"] else {}
    divide = getattr(module, "DIVIDE", None)
    return {"mesh": mesh} | named | ({"divide": divide} if divide is not None else {})


def compare(
    module: Module, setting: Mapping[str, Any], reference: Values, own: Values
) -> dict[str, tuple[float, float, float]]:
    """(eager's norm, csc's norm, relative difference) of what differs by more than rounding."""
    share = 1e-2 if setting["precision"] else 1e-4
    found = apart(reference, own, share)
    if all(value <= TOLERANCE for value in found.values()):  # false for what is no number
        return {}
    noise = dict.fromkeys(found, 0.0)
    for other in others(module, setting):
        noise = {name: max(value, noise[name]) for name, value in apart(reference, other, share).items()}
    least = COARSE if setting["precision"] else CASTS if casts(module, setting) else TOLERANCE
    slack = 4 if setting["precision"] else SLACK
    wrong = [name for name, value in found.items() if not value <= max(least, slack * noise[name])]
    return {name: (_norm(reference[name]), _norm(own.get(name)), found[name]) for name in wrong}


def others(module: Module, setting: Mapping[str, Any]) -> list[Values]:
    """Eager's results that are as right as its own: of moved weights, and in bfloat16 if csc computes in that, where a
    last bit decides which side of zero a relu sees.
    """
    found = [eager(module, setting, moved) for moved in (1, 2, 3)]
    if setting["precision"]:
        with suppress(RuntimeError, TypeError):  # a model that mixes dtypes by itself may not run so
            found += [eager(module, setting, moved, torch.bfloat16) for moved in (0, 1, 2)]
    return found


class _Low(TorchDispatchMode):
    """any: whether something in 16 bits was computed in it."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.any |= any(getattr(one, "dtype", None) in LOW for one in pytree.tree_leaves(result))
        return result


def casts(module: Module, setting: Mapping[str, Any]) -> bool:
    """Whether the model, in float32, computes with 16 bits somewhere."""
    with torch.no_grad(), _Low() as low:
        module.make()(**module.batch(*sizes(setting)[0]))
    return low.any


def _norm(value: torch.Tensor | None) -> float:
    return float("nan") if value is None else norm(value)
