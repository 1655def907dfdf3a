"""A compiled function beside the one that it is to stand for: both are called once with the same tensors.

Terms: an *own operator* is one of csc's that layer files call (attention, collectives, what runs a module of the
user's): both functions call the same kernels, which may meet other ranks, draw, or change a module. So the plain
function alone calls them; the compiled one is handed copies of what came of that, and what it gives them is compared
as its results are.

How far two results may be apart is told by the coarsest dtype of the tensors that a function takes and returns: NEAR
times what it rounds by, of the norm of all entries (float32: 1e-5, docs/fusing.md); of gradients of parameters that
are no more than noise, such as those of biases of keys, of NOISE of the largest one. Whole numbers are the same
ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from csc.kernels.onednn import PRODUCT
from csc.runtime.flat_tensors import tensors_of

NEAR = 84.0  # times 2**-23 is 1e-5
HALF = 4.0  # of what keeps fewer digits: operators round each result, kernels the last one alone
NOISE = 1e-2
Given = tuple[str, list[torch.Tensor]]


class _DiffersError(Exception):
    """The compiled function goes another way."""


def tried(
    plain: Callable[..., Any], given: tuple[Any, ...], compiled: Callable[[Sequence[torch.Tensor]], Any],
    tensors: Sequence[torch.Tensor],
) -> tuple[Any, str]:  # fmt: skip
    """tensors: those of `given`, in order. What the plain function raises is raised; what the other does, differs."""
    calls: list[tuple[Given, Any]] = []
    with _own_operators(lambda call, run: _noted(calls, call, run())):
        results = plain(*given)
    wanted = tensors_of(results)
    near = _near([*tensors, *wanted])
    left: dict[str, list[tuple[Given, Any]]] = defaultdict(list)
    for call in calls:
        left[call[0][0]].append(call)
    try:
        with _own_operators(lambda call, _: _again(left, call, near)):
            actual = tensors_of(compiled(tensors))
    except Exception as error:
        return results, str(error) if isinstance(error, _DiffersError) else f"{type(error).__name__}: {error}"
    largest = max(map(_norm, wanted), default=0.0) if isinstance(results, dict) else 0.0
    return results, _difference(actual, wanted, near, "result", NOISE * largest)


def apart(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str:
    """Returns in what results are too far from those of a function that rounds otherwise; "" where they are near
    enough.
    """
    return _difference(found, wanted, _near(wanted), "result")


def _noted(calls: list[tuple[Given, Any]], call: Given, results: Any) -> Any:
    calls.append((call, results))
    return results


def _again(left: dict[str, list[tuple[Given, Any]]], call: Given, near: float) -> Any:
    """What came of the first call of the operator that is left."""
    name, tensors = call
    if not left[name]:
        raise _DiffersError(f"it calls {name} more often")
    (_, wanted), results = left[name].pop(0)
    why = _difference(tensors, wanted, near, f"argument of {name}")
    if why:
        raise _DiffersError(why)
    copies = (part.clone() if isinstance(part, torch.Tensor) else part for part in _listed(results))
    return next(copies) if isinstance(results, torch.Tensor) else type(results)(copies)


def _own_operators(call: Callable[[Given, Callable[[], Any]], Any]) -> Any:
    """A context in which each call of one of csc's operators gives what call((its name, its tensors), run) gives."""
    from csc.torch_private.traces import TorchDispatchMode

    class OwnOperators(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if getattr(operator, "namespace", "") != "csc" or operator is PRODUCT:
                return operator(*args, **kwargs)
            tensors = [item for value in (*args, *kwargs.values()) for item in _listed(value) if torch.is_tensor(item)]
            return call((str(operator), tensors), lambda: operator(*args, **kwargs))

    return OwnOperators()


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _near(tensors: Iterable[torch.Tensor]) -> float:
    rounds = [torch.finfo(tensor.dtype).eps for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    coarsest = max(rounds, default=0.0)
    return coarsest * (NEAR if coarsest <= torch.finfo(torch.float32).eps else HALF)


def _difference(
    actual: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], near: float, named: str, least: float = 0.0
) -> str:
    """The first tensor that is too far from the one that it should be, in words. least: of a norm."""
    if len(actual) != len(wanted):
        return f"{len(actual)} in place of {len(wanted)} of {named}"
    for number, (value, other) in enumerate(zip(actual, wanted)):
        if (value.shape, value.dtype) != (other.shape, other.dtype):
            return f"{named} {number} is {value.dtype} {list(value.shape)}, not {other.dtype} {list(other.shape)}"
        far = _far(value, other, least)
        if not far <= (near if other.is_floating_point() or other.is_complex() else 0.0):
            return f"{named} {number} differs by {far:.1e}, more than {near:.1e}"
    return ""


def _far(actual: torch.Tensor, wanted: torch.Tensor, least: float) -> float:
    """The norm of the difference over that of what is wanted; what is infinite, or no number, has to be so in both."""
    same = (actual == wanted) | ((actual != actual) & (wanted != wanted))
    apart = _norm(torch.where(same, 0, _wide(actual) - _wide(wanted)))
    largest = max(_norm(torch.where(wanted.isfinite(), wanted, 0)), least)
    return apart / largest if apart and largest else apart and math.inf


def _norm(tensor: torch.Tensor) -> float:
    return float(_wide(tensor).norm())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
