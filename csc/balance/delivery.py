"""What a DataLoader's worker does for a step: decide, load this replica's samples, collate them.

Terms
  ticket      a step's number and its samples, which travel to the worker
  delivered   what comes back: the microbatches of a replica, and in words what the whole step was divided into
  failed      what went wrong there, in its place: an error that is made again in the process that trains

    Delivery(collation, decider, replicas, counted)[ticket] -> Delivered | Failed
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from csc.balance.collation import Collation, Counted
from csc.balance.decision import Decider, StepAssignment
from csc.errors import CscError, InputError, user_line
from csc.planning.assign.step import Size
from csc.runtime.meeting import digest


class Ticket(NamedTuple):
    epoch: int
    step: int
    samples: tuple[int, ...]


class Delivered(NamedTuple):
    """said: the same on all ranks, or they have not divided the step alike. A tuple, so that its tensors are pinned."""

    microbatches: list[dict[str, Any]]
    said: str
    seconds: float


@dataclass(frozen=True)
class Failed:
    """error: as csc says it; trace: where it came from, as text."""

    error: CscError
    trace: str


class Delivery:
    """A dataset whose items are steps. replicas: whose microbatches are loaded here."""

    def __init__(
        self, collation: Collation, decider: Decider, replicas: Sequence[int], counted: Sequence[Counted]
    ) -> None:
        self._collation, self._replicas, self._counted = collation, list(replicas), list(counted)
        self.decider = decider

    def __getitem__(self, ticket: Ticket) -> Delivered | Failed:
        try:
            return self._delivered(ticket)
        except CscError as error:
            return Failed(error, traceback.format_exc())

    def examples(self) -> Iterator[tuple[Size, list[dict[str, Any]]]]:
        """Of each known size a step of this process, all of whose microbatches have it."""
        count = self.decider.microbatches * len(self._replicas)
        for size, group in sorted(self.decider.examples.items()):
            yield size, [self._microbatch(Ticket(0, 0, group), group, size[-1])] * count

    def _delivered(self, ticket: Ticket) -> Delivered:
        decided = self.decider.decide(ticket.samples)
        made = [
            self._microbatch(ticket, group, size[-1])
            for replica in self._replicas
            for group, size in zip(decided.groups[replica], decided.sizes[replica])
        ]
        return Delivered(made, _said(ticket, decided), decided.seconds)

    def _microbatch(self, ticket: Ticket, group: Sequence[int], width: int) -> dict[str, Any]:
        decider = self.decider
        try:
            return self._collation.checked(group, decider.lengths, decider.packed, width, self._counted)
        except CscError:
            raise
        except Exception as error:  # of the user's dataset or collate
            raise InputError(
                f"{type(error).__name__} while samples {', '.join(map(str, group))} were loaded for step {ticket.step} "
                f"of epoch {ticket.epoch}: {error}", user_line(error) or "dataset",
                "mend the dataset or collate; going on with the loader takes the step up again",
            ) from error  # fmt: skip


def _said(ticket: Ticket, decided: StepAssignment) -> str:
    return f"step {ticket.step} of epoch {ticket.epoch}, divided as {digest(repr(decided.groups)) & 0xFFFFFFFF:08x}"
