"""What a capture was made for, beside sizes and values: the decisions that the model took by its batch.

Terms
  guard    of one capture: the sizes that it allows, the values that it holds for, and its decisions with their answers
  decided  the answers of a capture as texts; in a completed microbatch, which has them too, they are a plain entry

A model's code is the same up to its first question, and after the same answers up to the next. So a capture whose
questions have the same answers for a batch is what the code does with that batch. The questions are evaluated on the
host, on the batch as it comes, before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from csc.ir.asked import Decision
from csc.ir.sizes import SizeGuards

DECIDED = "what the batch decides"  # of a completed microbatch; no name of an argument
UNDECIDED = ("nobody knows yet",)


@dataclass(frozen=True)
class Guard:
    """fixed: values of batch entries by name."""

    sizes: SizeGuards
    fixed: Mapping[str, torch.Tensor]
    decisions: tuple[Decision, ...]

    @property
    def decided(self) -> tuple[str, ...]:
        """The answers as texts."""
        return tuple(decision.text() for decision in self.decisions)

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a completed microbatch is one that the capture was made for. Each question may rest on the answers
        before it, so the first other answer ends it.
        """
        if not self.sizes.allow(tensors) or not equal(self.fixed, tensors):
            return False
        return all(decision.holds(tensors) for decision in self.decisions)


def equal(fixed: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether entries have these values."""
    return all(torch.equal(values, tensors[name].to(values.device)) for name, values in fixed.items())


def decided_by(guards: Iterable[Guard], tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """What a microbatch decides; UNDECIDED if no guard holds for it."""
    return next((guard.decided for guard in guards if guard.holds(tensors)), UNDECIDED)


def decided(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """What a completed microbatch decides, of its entries that are no tensors."""
    return tuple(extra.get(DECIDED, ()))
