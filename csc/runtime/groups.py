"""The process groups of a program's ranks: made by all of them in one order, let go of, and made again.

Terms: one group carries F messages, another one B messages, so that the two directions between a pair of ranks never
share a queue; a *set* of ranks sums something together; a *context* group shares sequences.

    groups = Groups(manifest, rank, timeout)     .messages["F"], .sums[ranks], .context
    groups.close()                               peers that wait for this rank are freed, with an error
    rank_sets(manifest)                          the sets
"""

from __future__ import annotations

import gc
from datetime import timedelta
from itertools import product

import torch.distributed as dist

from csc.runtime.specs import Manifest


def rank_sets(manifest: Manifest) -> list[tuple[int, ...]]:
    """Sets of two or more ranks, each ascending: those that share a position's parameters, holders of a tied parameter,
    all. No set twice.
    """
    mesh = manifest.mesh
    sets = [mesh.sharing(s) for s in range(mesh.pp)]
    tied = sorted({tuple(sorted(p.ranks)) for p in manifest.parameters if p.trainable})
    pieces = [(d, c) for d in range(mesh.dp) for c in range(mesh.cp)]
    sets += [tuple(mesh.rank_of(dp=d, pp=r, cp=c) for r in holders) for holders in tied for d, c in pieces]
    sets.append(tuple(range(mesh.size)))
    return [ranks for ranks in dict.fromkeys(sets) if len(ranks) > 1]


class Groups:
    """Made at once, or by `open` after `close`. timeout: seconds until a silent peer counts as lost; new groups do not
    inherit the default group's.
    """

    def __init__(self, manifest: Manifest, rank: int, timeout: float) -> None:
        self._manifest, self._rank, self._wait = manifest, rank, timedelta(seconds=timeout)
        self.open()

    def open(self) -> None:
        """All ranks call it."""
        everyone = list(range(self._manifest.mesh.size))
        self.messages = {kind: self._new(everyone) for kind in ("F", "B")}
        self.sums = {ranks: self._new(list(ranks)) for ranks in rank_sets(self._manifest)}
        self.context = self._context()

    def _new(self, ranks: list[int]) -> dist.ProcessGroup:
        return dist.new_group(ranks, timeout=self._wait)

    def _context(self) -> dist.ProcessGroup | None:
        """The group of the ranks that share a sequence with this one."""
        mesh, own = self._manifest.mesh, None
        if not self._manifest.contexts:
            return None
        for d, p in product(range(mesh.dp), range(mesh.pp)):
            ranks = [mesh.rank_of(dp=d, pp=p, cp=c) for c in range(mesh.cp)]
            group = self._new(ranks)
            own = group if self._rank in ranks else own
        return own

    def close(self) -> None:
        """Whoever waits for this rank gets an error within milliseconds over gloo, as soon as nothing refers to the
        groups any more: operations that are under way must have been let go of before.
        """
        own = [*self.messages.values(), *(group for ranks, group in self.sums.items() if self._rank in ranks)]
        own += [self.context] if self.context is not None else []
        self.messages, self.sums, self.context = {}, {}, None
        while own:
            if dist.get_backend(own[-1]) == dist.Backend.NCCL:
                own[-1].abort()  # what runs on the GPU would be waited for
            dist.destroy_process_group(own.pop())
        gc.collect()
