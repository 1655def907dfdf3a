"""What one capture of a model assumed of its batch, and whether another batch is as assumed.

Terms
  plain      batch entries that are no tensors, as text
  values     of the entries that decide what the graph is: `.tolist()`, an `if`, a size
  decisions  what the model's code asked of its batch alone, with the answers (csc.ir.asked)
  flags      the frozen set, where that code asks for requires_grad (csc.ir.flags)
  calls      what that code called: where it calls the same for other values, the graph is the same (csc.ir.calls)
  name       a hash of the assumptions: the same in all processes

    guards.match(tensors, plain, calls, frozen) -> tensors as the capture takes them, or the Miss: the first assumption
                                                   that does not hold
    capture_guards(sizes, values, decisions, plain, calls, flags) -> CaptureGuards
    to_tree(guards) -> JSON            Unstorable for sizes that have no form in text
    from_tree(tree) -> CaptureGuards   ValueError, KeyError or TypeError for a tree that is none

A model's code is the same up to its first question, and after the same answers up to the next. So a capture whose
questions have the same answers for a batch is what the code does with that batch. The questions are evaluated on the
host, on the batch as it comes, before the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from csc.ir import asked, calls, flags, sizes
from csc.ir.asked import Decision
from csc.ir.calls import Call, alike
from csc.ir.flags import FlagsAsked
from csc.ir.miss import Miss
from csc.ir.sizes import SizeGuards

Tensors = Mapping[str, torch.Tensor]
LONGEST = 60  # characters of a value in a sentence


@dataclass(frozen=True)
class CaptureGuards:
    """calls: None: the capture is for its own values alone. flags: None: the capture is for every frozen set."""

    name: str
    sizes: SizeGuards
    values: Tensors
    decisions: tuple[Decision, ...]
    plain: Mapping[str, str]
    calls: tuple[Call, ...] | None = None
    flags: FlagsAsked | None = None

    @property
    def answers(self) -> tuple[str, ...]:
        """The decisions as texts."""
        return tuple(decision.text() for decision in self.decisions)

    @cached_property
    def kind(self) -> str:
        """A hash of what it assumed but for sizes as such: captures of one kind differ in sizes alone."""
        values, relations = _values_tree(self.values), map(str, self.sizes.relations)
        parts = sorted(self.sizes.entries), sorted(relations), sorted(values.items()), self.answers, sorted(self.plain)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def match(
        self,
        tensors: Tensors,
        plain: Mapping[str, str],
        calls: tuple[Call, ...] | None,
        frozen: Set[str] = frozenset(),
    ) -> Tensors | Miss:
        """Entries of a completed microbatch as the capture takes them: with its values, where the model's code calls
        the same for both. calls: of that code for this microbatch; None: not known. frozen: names of the model's
        parameters that do not train, wanted where `flags` is something.
        """
        other = self.flags.miss(frozen) if self.flags is not None else None
        if other is not None:
            return other
        miss = self._miss(tensors, plain)
        if miss is None or calls is None or self.calls is None or plain != self.plain:
            return tensors if miss is None else miss
        replaced = {**tensors, **self.values}
        symbols = self.sizes.match(replaced)
        return replaced if not isinstance(symbols, Miss) and alike(self.calls, calls, symbols) else miss

    def _miss(self, tensors: Tensors, plain: Mapping[str, str]) -> Miss | None:
        """Each question may rest on the answers before it, so the first other answer ends it."""
        if plain != self.plain:
            name = next(name for name in {**plain, **self.plain} if plain.get(name) != self.plain.get(name))
            return Miss(name, self.plain.get(name, "absent"), plain.get(name, "absent"))
        symbols = self.sizes.match(tensors)
        if isinstance(symbols, Miss):
            return symbols
        for name, values in self.values.items():
            if not torch.equal(values, tensors[name].to(values.device)):
                return Miss(name, short(values), short(tensors[name]))
        return next(filter(None, (decision.miss(tensors) for decision in self.decisions)), None)


def capture_guards(
    sizes: SizeGuards,
    values: Tensors,
    decisions: tuple[Decision, ...],
    plain: Mapping[str, str],
    calls: tuple[Call, ...] | None,
    flags_asked: FlagsAsked | None = None,
) -> CaptureGuards:
    """Named by what they assume."""
    entries = [(name, dtype, list(map(str, shape))) for name, (dtype, shape) in sorted(sizes.entries.items())]
    parts = (
        entries, sorted(sizes.ranges.items()), sorted(map(str, sizes.relations)), sorted(_values_tree(values).items()),
        [(asked.to_tree(one.expression), one.answer) for one in decisions], sorted(plain.items()),
        *([flags.to_tree(flags_asked)] if flags_asked is not None else ()),
    )  # fmt: skip
    name = hashlib.sha256(repr(parts).encode()).hexdigest()
    return CaptureGuards(name, sizes, values, decisions, plain, calls, flags_asked)


def to_tree(guards: CaptureGuards) -> Any:
    """Plain JSON."""
    made = None if guards.calls is None else calls.to_tree(guards.calls)
    return {
        "name": guards.name, "sizes": sizes.to_tree(guards.sizes), "values": _values_tree(guards.values), "calls": made,
        "decisions": [[asked.to_tree(one.expression), one.answer] for one in guards.decisions],
        "plain": dict(guards.plain), "flags": flags.to_tree(guards.flags),
    }  # fmt: skip


def from_tree(tree: Any) -> CaptureGuards:
    """The inverse."""
    decisions = tuple(Decision(asked.from_tree(question), answer) for question, answer in tree["decisions"])
    made = None if tree["calls"] is None else calls.from_tree(tree["calls"])
    values = {
        name: torch.tensor(values, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (dtype, values) in tree["values"].items()
    }
    known = sizes.from_tree(tree["sizes"])
    asked_flags = flags.from_tree(tree["flags"])
    return CaptureGuards(tree["name"], known, values, decisions, dict(tree["plain"]), made, asked_flags)


def _values_tree(values: Tensors) -> dict[str, Any]:
    return {name: [str(tensor.dtype), tensor.tolist()] for name, tensor in values.items()}


def short(tensor: torch.Tensor) -> str:
    """Its values, in a sentence."""
    text = str(tensor.tolist())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
