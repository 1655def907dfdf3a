"""Loops over the experts that some token chose: `for expert in hit.nonzero():`.

How many turns such a loop has depends on values. A trace goes through it for every expert, and what a turn writes stays
as it was unless the expert was hit:

    new = old.clone(); write(new); old.copy_(torch.where(hit[expert], new, old))

That is the same as long as nothing else of a turn is left behind: a tensor that one turn makes may not be read by
another or behind the loop, no local name may carry something from turn to turn, and turns that read parameters have to
read the same ones (eager PyTorch gives those of an expert that was not hit no gradient, where a trace gives zeros).
What does not keep to that is refused.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from csc.capture.values.call_log import writes
from csc.errors import InputError, calling_line
from csc.torch_private.traces import pytree

MOST = 1024  # turns
REMEDY = (
    "go through all experts (for expert in range(experts)), or keep the module out of the trace with csc.opaque(module)"
)


class HitLoops:
    """Of one run. parameters: names, by the identity of what they are in it."""

    def __init__(self, parameters: Mapping[int, str]) -> None:
        self._parameters = parameters
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what nonzero gave, and of what
        self._hit: torch.Tensor | None = None  # of the turn that is under way
        self._turn = 0  # its number, among all; 0 outside of loops
        self._turns = 0
        self._made_in: dict[int, tuple[torch.Tensor, int]] = {}
        self._read: dict[int, set[str]] = {}
        self._open: list[str] = []

    def call(self, name: str, args: Any, kwargs: Any) -> Any:
        """The result of a call that is part of such a loop; NotImplemented for any other."""
        if name == "unbind" and id(args[0]) in self._masks:  # what iterating over a tensor calls
            return self._each(self._masks[id(args[0])][1])
        if self._hit is None or not args or not isinstance(args[0], torch.Tensor) or "out" in kwargs:
            return NotImplemented
        return self._masked(name, args, kwargs) if writes(name) else NotImplemented

    def add(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """A call that was made, and what it returned."""
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for one in given if self._turns else ():
            self._check(one)
        if self._turn:
            for one in pytree.tree_leaves(result):
                if isinstance(one, torch.Tensor) and not any(one is other for other in given):
                    self._made_in[id(one)] = (one, self._turn)
            if "out" in kwargs:
                raise _refused("gives an operation a tensor for its result (out=)")
        if name in ("nonzero", "argwhere") and len(given) == 1 and not kwargs.get("as_tuple"):
            mask = given[0]
            if mask.dim() == 1 and mask.dtype is torch.bool and type(mask.shape[0]) is int and mask.shape[0] <= MOST:
                self._masks[id(result)] = (result, mask)

    def refuse_left(self) -> None:
        """InputError if a loop was left before its end."""
        if self._open:
            raise _refused("leaves such a loop before its end", self._open[0])

    def _check(self, tensor: torch.Tensor) -> None:
        made = self._made_in.get(id(tensor))
        if made is not None and made[1] != self._turn:
            raise _refused("reads outside of a turn what was made in it")
        if self._turn and id(tensor) in self._parameters:
            self._read[self._turn].add(self._parameters[id(tensor)])

    def _each(self, mask: torch.Tensor) -> Iterator[torch.Tensor]:
        line, frame = calling_line(), _model_frame()
        if self._turn:
            raise _refused("goes through such a loop inside of another", line)
        names = _carried(frame) if frame is not None else None
        if names is None or names:
            raise _refused(f"carries {', '.join(names or ('what it makes',))} from turn to turn", line)
        self._open.append(line)
        first = self._turns + 1
        for expert in range(mask.shape[0]):
            self._hit = None
            hit = mask[expert]
            self._turns += 1
            index = torch.tensor([expert])
            self._turn, self._hit, self._read[self._turns] = self._turns, hit, set()
            yield index
            self._hit, self._turn = None, 0
        self._open.remove(line)
        read = [found for turn in range(first, self._turns + 1) if (found := self._read[turn])]
        for other in read:
            for name in sorted(other ^ read[0])[:1]:
                raise _refused(f"reads {name} for some alone, which has no gradient where none of these is hit", line)

    def _masked(self, name: str, args: Any, kwargs: Any) -> Any:
        """A write that has no effect unless the expert was hit."""
        hit, target = self._hit, args[0]
        assert hit is not None
        self._hit = None
        try:
            new = torch.clone(target)
            getattr(torch.Tensor, name)(new, *args[1:], **kwargs)
            target.copy_(torch.where(hit, new, target))
        finally:
            self._hit = hit
        return None if name == "__setitem__" else target


def _model_frame() -> Any:
    """Of the code that loops."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("csc", "torch", "contextlib"):
        frame = frame.f_back
    return frame


def _carried(frame: FrameType) -> list[str] | None:
    """Local names that the loop which begins in a frame writes, and reads before; None if none begins. Not those of
    tensors: if they are others after a turn, reading them is noticed.
    """
    reads: dict[str, bool] = {}  # whether a name is read first
    written: set[str] = set()
    body = [one for one in dis.get_instructions(frame.f_code) if one.offset >= frame.f_lasti]
    if not body or body[0].opname != "FOR_ITER":
        return None
    for one in body[1:]:
        if one.offset >= body[0].argval:
            break
        if isinstance(one.argval, str) and ("_FAST" in one.opname or "_DEREF" in one.opname):
            writes_it = one.opname.startswith("STORE")
            reads.setdefault(one.argval, not writes_it)
            written |= {one.argval} if writes_it else set()
    known = frame.f_locals
    return sorted(name for name in written if reads[name] and not isinstance(known.get(name), torch.Tensor))


def _refused(what: str, line: str = "") -> InputError:
    return InputError(
        f"the model goes through the experts that were hit, of which only values tell, and {what}",
        line or calling_line() or "model",
        REMEDY,
    )
