"""Whose samples a process brings to a step, and what ranks tell each other of them before it.

Terms
  own     the batch has the samples of this process' replica alone; else it is the global batch, the same on every rank,
          as it always is where replicas share ranks
  parts   into how many microbatches the batch is divided

    share = Share(mesh, microbatches, meeting, local)      .own   .parts
    share.agree(operation, divide, prepare) -> (ready, what `prepare` returned, heard)
    share.waits(ready, changed), .known(ready, said, decides), .first(ready, said, decides) -> Said
    share.served(heard) -> bool         share.flags(heard) -> those of any rank, for the trainer
    share.meets(heard) -> what meets in the step, of the microbatches of replicas that this rank does not have
    share.of_all(ready) -> microbatches of all replicas    after a meeting

    Divided(microbatches, said)                            ready ones of a replica, of a step that was divided for all
    place(mesh) -> (dp_rank, dp_size)                      which share of the samples a process loads
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any, TypeVar

import torch.distributed as dist

from csc.ir.mesh import Mesh
from csc.runtime import batches
from csc.runtime.batches import sizes
from csc.runtime.launch import several_processes
from csc.runtime.meeting import CHANGED, OWN_SAMPLES, Heard, Meeting, Said, digest
from csc.runtime.trainer import SAID

Ready = list[dict[str, Any]]
Result = TypeVar("Result")
# Bits of what ranks say: those of csc.runtime.trainer below SAID; from FLAGS on a digest of what replicas share.
UNSERVED = SAID
FLAGS = 2 * UNSERVED
HALF, LOW = 32, 0xFFFFFFFF  # of 64 bits


class ReplicaShare(list[dict[str, Any]]):
    """The microbatches of one replica. said: what the step was divided into, for all replicas: ranks compare it."""

    def __init__(self, microbatches: Iterable[dict[str, Any]] = (), said: tuple[str, ...] = ()) -> None:
        super().__init__(microbatches)
        self.said = said


def place(mesh: Mesh) -> tuple[int, int]:
    """(dp_rank, dp_size): under torchrun the replica of this process. One process alone runs all of them; and where
    replicas share ranks no process has the samples of one alone, so that each loads all.
    """
    if not several_processes() or mesh.own_replicas:
        return 0, 1
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    return mesh.replicas_of(rank)[0], mesh.dp


class Share:
    """Of one step."""

    def __init__(
        self, mesh: Mesh, microbatches: int, meeting: Meeting, local: bool, said: tuple[str, ...] = ()
    ) -> None:
        self._meeting = meeting
        self._said = said
        self.own = local and meeting.group is not None and not mesh.own_replicas
        self._replicas = [mesh.replicas_of(rank)[0] for rank in range(mesh.size)]
        self.parts = microbatches * (1 if self.own else mesh.dp)

    @property
    def _replica(self) -> int:
        return self._replicas[dist.get_rank()] if self.own else 0

    def agree(
        self, operation: str, divide: Callable[[], Ready], prepare: Callable[[Ready], tuple[Said, Result]]
    ) -> tuple[Ready, Result, list[Heard]]:
        """Divide the batch and prepare its step on every rank, with one meeting; with two where each has its own
        samples: the first completes what ranks of a replica leave out.
        """
        if not self.own:

            def both() -> tuple[Said, tuple[Ready, Result]]:
                ready = divide()
                said, result = prepare(ready)
                return said, (ready, result)

            (ready, result), heard = self._meeting.heard(operation, both)
            return ready, result, heard

        def samples() -> tuple[Said, Ready]:
            ready = divide()
            content = digest("\n".join(sizes(ready)))  # compared below, within replicas
            return Said((f"{len(ready)} microbatches of a replica", *self._said), dist.get_rank(), content), ready

        ready, heard = self._meeting.heard(operation, samples)
        if len({(replica, one.content) for replica, one in zip(self._replicas, heard)}) > len(set(self._replicas)):
            texts = self._meeting.texts(OWN_SAMPLES, batches.told(ready))
            self._meeting.began()  # if it is refused now, it is on every rank
            ready = batches.completed(ready, texts, self._replicas, dist.get_rank())
        result, heard = self._meeting.heard(OWN_SAMPLES, lambda: prepare(ready))
        return ready, result, heard

    def waits(self, ready: Ready, changed: bool) -> Said:
        """Said by a rank without a program for its microbatches. changed: it had one, for the model as it was."""
        value = float(UNSERVED)
        if self.own:
            return Said((CHANGED,) * changed, self._replica, value=value, shared=sizes(ready))
        return Said((*sizes(ready), CHANGED if changed else "no program yet"), value=value)

    def known(self, ready: Ready, said: Said, decides: Sequence[str], meets: Set[str]) -> Said:
        """Said by a rank with one. said: what its runtime says; decides: what the microbatches decide; meets: what
        meets in them (csc.driver.checking).
        """
        if not self.own:
            return replace(said, signature=sizes(ready))
        common = digest("\n".join((*said.signature, *decides))) & 0xFFFFFFFF
        value = said.value + FLAGS * common
        return replace(said, signature=(), shared=sizes(ready), value=value, meets=_meets(ready, meets))

    def first(self, ready: Ready, said: Said, decides: Sequence[str], meets: Set[str]) -> Said:
        """Said once all have one."""
        if not self.own:
            return replace(said, signature=sizes(ready))
        signature = (*said.signature, *decides)
        return replace(said, signature=signature, shared=sizes(ready), meets=_meets(ready, meets))

    def served(self, heard: Sequence[Heard]) -> bool:
        """Whether every rank has a program, and what replicas must have in common is so as far as anybody can tell."""
        found = {int(one.value) // FLAGS for one in heard}
        return len(found) == 1 and not any(int(one.value) & UNSERVED for one in heard)

    def meets(self, heard: Sequence[Heard]) -> frozenset[str]:
        """What meets in the step where ranks have samples of their own: the kinds of their shares, and whether the
        sizes of these differ.
        """
        if not self.own:
            return frozenset()
        kinds = {f"replicas of kind {one.meets >> HALF}" for one in heard}
        uneven = len({one.meets & LOW for one in heard}) > 1
        return frozenset(kinds | {"replicas of other sizes"} if uneven else kinds)

    def flags(self, heard: Sequence[Heard]) -> int:
        """What any rank's trainer said."""
        return reduce(or_, (int(one.value) % UNSERVED for one in heard), 0)

    def of_all(self, ready: Ready) -> Ready:
        """The microbatches of all replicas. All ranks call it, right after a meeting."""
        return batches.of_all(self._meeting, self._replicas, ready) if self.own else ready


def _meets(ready: Ready, meets: Set[str]) -> int:
    """The kind of a replica's share in the upper half, its sizes in the lower."""
    return (digest("\n".join(sorted(meets))) >> HALF << HALF) | (digest("\n".join(sizes(ready))) & LOW)
