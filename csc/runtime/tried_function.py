"""A compiled function beside the one that it stands for: both are called once with the same tensors.

Terms: an *own operator* is one of csc's that layer files call (attention, collectives, what runs a module of the
user's): both functions call the same kernels, which may meet other ranks, draw, or change a module. So the compiled
function alone calls them; the plain one is handed copies of what came of that, and what it gives them is compared as
its results are. What the compiled function gives has the bits that it has in every later call.

How far two results may be apart is told by the coarsest dtype of the tensors that a function takes and returns: NEAR
times what it rounds by, of the norm of all entries (float32: 1e-5, docs/fusing.md); of gradients of parameters that
are no more than noise, such as those of biases of keys, of NOISE of the largest one. Where that is not enough (sums
that all but cancel), the plain function is called once more with the last bit changed at random of all that it is
given: MOVED times what that makes is rounding, too, as in the check against eager PyTorch (docs/check.md). Whole
numbers are the same ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from csc import devices
from csc.errors import CscError
from csc.kernels.onednn import PRODUCT
from csc.runtime.flat_tensors import nesting, structure_of, tensors_of

log = logging.getLogger("csc")

NEAR = 84.0  # times 2**-23 is 1e-5
HALF = 4.0  # of what keeps fewer digits: operators round each result, kernels the last one alone
NOISE = 1e-2
MOVED = HALF  # so that where nothing cancels it allows no more
CHUNK = 2**22  # entries that are compared at once, in float64


class _DiffersError(Exception):
    """One function goes another way than the other."""


@dataclass(eq=False)
class _Call:
    """Of an own operator. rest: its arguments that are no tensors. results: None while it runs."""

    name: str
    tensors: list[torch.Tensor]
    rest: list[Any]
    results: Any = None

    def is_like(self, other: _Call) -> bool:
        """Whether both are of one operator, and all but tensors is the same."""
        return (self.name, self.rest) == (other.name, other.rest)

    def copies(self) -> Any:
        copies = (part.clone() if isinstance(part, torch.Tensor) else part for part in _listed(self.results))
        return next(copies) if isinstance(self.results, torch.Tensor) else type(self.results)(copies)


@dataclass(frozen=True)
class _Pair:
    """What both functions have made in one place. least: of a norm."""

    named: str
    compiled: torch.Tensor
    plain: torch.Tensor
    least: float = 0.0


def tried(
    plain: Callable[..., Any], given: tuple[Any, ...], compiled: Callable[[Sequence[torch.Tensor]], Any],
    tensors: Sequence[torch.Tensor],
) -> tuple[Any, str]:  # fmt: skip
    """Returns what the compiled function gives, and in what it differs from what the plain one gives; "" where they are
    near enough, or where there is no memory for both, which the log says. tensors: those of `given`, in order. What an
    own operator raises is raised, and what the plain function does.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    rewind = partial(devices.set_generator, device, devices.generator(device))
    calls: list[_Call] = []
    try:
        with _own_operators(lambda call, run: _noted(calls, call, run)):
            results = compiled(tensors)
    except Exception as error:
        own = bool(calls) and calls[-1].results is None
        if own or isinstance(error, (CscError, torch.OutOfMemoryError)):
            raise
        return None, f"{type(error).__name__}: {error}"
    try:
        with devices.forked(device):
            return results, _difference(_Plain(plain, given, tensors, calls, rewind), results)
    except torch.OutOfMemoryError:
        log.warning("fuse: %s is not compared with what it stands for: there is no memory for both", plain.__name__)
        return results, ""
    except _DiffersError as error:
        return results, str(error)


def apart(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str:
    """Returns in what results are too far from those of a function that rounds otherwise; "" where they are near
    enough.
    """
    return next(filter(None, (_far_apart(pair, _near(wanted)) for pair in _pairs("result", found, wanted))), "")


@dataclass
class _Plain:
    """The plain function, its arguments, and what answers the own operators that it calls. rewind: puts torch's
    generators to where the compiled function has found them.
    """

    function: Callable[..., Any]
    given: tuple[Any, ...]
    tensors: Sequence[torch.Tensor]
    calls: list[_Call]
    rewind: Callable[[], None]

    def run(self, near: float) -> tuple[Any, list[tuple[_Call, list[torch.Tensor]]]]:
        """Returns its results, and each call of an own operator with what it gave that. Of calls of one operator, which
        kernels may make in another order, the first takes the first that had such arguments.
        """
        left, asked = [*self.calls], list[tuple[_Call, list[torch.Tensor]]]()

        def answer(call: _Call, _: Any) -> Any:
            alike = list(filter(call.is_like, left))
            if not alike:
                raise _DiffersError(f"it calls {call.name} less often")
            fitting = (other for other in alike if _are_near(other.tensors, call.tensors, near))
            chosen = next(fitting, alike[0]) if len(alike) > 1 else alike[0]
            left.remove(chosen)
            asked.append((chosen, call.tensors))
            return chosen.copies()

        results = self._called(self.given, answer)
        if left:
            raise _DiffersError(f"it calls {left[0].name} more often")
        return results, asked

    def moved(self, asked: Sequence[tuple[_Call, list[torch.Tensor]]]) -> list[torch.Tensor]:
        """What it makes of arguments whose last bits are others: what it gives own operators, in order, and its
        results.
        """
        made: list[torch.Tensor] = []
        left = iter(asked)

        def answer(call: _Call, _: Any) -> Any:
            made.extend(call.tensors)
            return next(left)[0].copies()

        nested = nesting(structure_of(self.given))
        generator = torch.Generator(self.tensors[0].device).manual_seed(0) if self.tensors else None
        results = self._called(nested([_other_bits(tensor, generator) for tensor in self.tensors]), answer)
        return [*made, *tensors_of(results)]

    def _called(self, given: tuple[Any, ...], answer: Callable[[_Call, Any], Any]) -> Any:
        self.rewind()
        with _own_operators(answer):
            return self.function(*given)


def _difference(plain: _Plain, results: Any) -> str:
    """In what results of the compiled function, and what it gave own operators, are too far from the plain one's."""
    actual = tensors_of(results)
    near = _near([*plain.tensors, *actual])
    wanted, asked = plain.run(near)
    if structure_of(results) != structure_of(wanted):
        return "it returns another structure"
    pairs = [
        pair
        for call, tensors in asked
        for pair in _pairs(f"argument of {call.name}", call.tensors, tensors)
    ]  # fmt: skip
    tensors = tensors_of(wanted)
    largest = max(map(_norm, tensors), default=0.0) if isinstance(wanted, dict) else 0.0
    pairs += _pairs("result", actual, tensors, NOISE * largest)
    if not any(_far_apart(pair, near) for pair in pairs):
        return ""
    rounding = (MOVED * _apart(other, pair.plain) for pair, other in zip(pairs, plain.moved(asked), strict=True))
    return next(filter(None, (_far_apart(pair, near, norm) for pair, norm in zip(pairs, rounding))), "")


def _other_bits(tensor: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """The tensor, laid out as it is, each entry up or down by what its dtype rounds by."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor
    if 0 in tensor.stride():  # an entry stands in several places
        return tensor
    up = torch.randint(0, 2, tensor.shape, generator=generator, device=tensor.device) * 2.0 - 1
    moved = _wide(tensor) * (1 + torch.finfo(tensor.dtype).eps * up)
    other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return other.copy_(moved)


def _noted(calls: list[_Call], call: _Call, run: Callable[[], Any]) -> Any:
    calls.append(call)
    results = call.results = run()
    call.results = call.copies()
    return results


def _own_operators(answer: Callable[[_Call, Callable[[], Any]], Any]) -> Any:
    """A context in which each call of one of csc's operators gives what answer(it, run) gives. Of its tensors there are
    copies: kernels take over memory of what nothing reads any more.
    """
    from csc.torch_private.traces import TorchDispatchMode

    class OwnOperators(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if getattr(operator, "namespace", "") != "csc" or operator is PRODUCT:
                return operator(*args, **kwargs)
            given = [item for value in (*args, *kwargs.values()) for item in _listed(value)]
            tensors = [item.clone() for item in given if torch.is_tensor(item)]
            rest = [item for item in given if not torch.is_tensor(item)]
            return answer(_Call(str(operator), tensors, rest), lambda: operator(*args, **kwargs))

    return OwnOperators()


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _near(tensors: Iterable[torch.Tensor]) -> float:
    rounds = [torch.finfo(tensor.dtype).eps for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    coarsest = max(rounds, default=0.0)
    return coarsest * (NEAR if coarsest <= torch.finfo(torch.float32).eps else HALF)


def _pairs(
    named: str, compiled: Sequence[torch.Tensor], plain: Sequence[torch.Tensor], least: float = 0.0
) -> list[_Pair]:
    if len(compiled) != len(plain):
        raise _DiffersError(f"{len(compiled)} in place of {len(plain)} of {named}")
    return [
        _Pair(f"{named} {number}", value, other, least) for number, (value, other) in enumerate(zip(compiled, plain))
    ]


def _are_near(compiled: Sequence[torch.Tensor], plain: Sequence[torch.Tensor], near: float) -> bool:
    alike = len(compiled) == len(plain)
    return alike and not any(_far_apart(_Pair("", *pair), near) for pair in zip(compiled, plain))


def _far_apart(pair: _Pair, near: float, rounding: float = 0.0) -> str:
    """In words; "" if they are near enough. rounding: the norm of a difference that is that."""
    value, other = pair.compiled, pair.plain
    if (value.shape, value.dtype) != (other.shape, other.dtype):
        return f"{pair.named} is {value.dtype} {list(value.shape)}, not {other.dtype} {list(other.shape)}"
    rounds = other.is_floating_point() or other.is_complex()
    apart, largest = _apart(value, other), max(_norm(other), pair.least)
    far = apart / largest if apart and largest else apart and math.inf
    if far <= (near if rounds else 0.0) or (rounds and apart <= rounding):
        return ""
    return f"{pair.named} differs by {far:.1e}, more than {near:.1e}"


def _apart(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference; what is infinite, or no number, has to be so in both."""
    norms = []
    for value, other in zip(_chunks(actual), _chunks(wanted), strict=True):
        same = (value == other) | ((value != value) & (other != other))
        norms.append(float(torch.where(same, 0, value - other).norm()))
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)


def _norm(tensor: torch.Tensor) -> float:
    """Of what is finite."""
    return math.hypot(*(float(torch.where(part.isfinite(), part, 0).norm()) for part in _chunks(tensor)))


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its entries in float64, so many at once as there is sure to be memory for."""
    return map(_wide, tensor.reshape(-1).split(CHUNK))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
