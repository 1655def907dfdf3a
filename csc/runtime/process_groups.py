"""The process groups of a program's ranks: made by all of them in one order, let go of, and made again.

Terms: one group carries F messages, another one B messages, so that the two directions between a pair of ranks never
share a queue; a *set* of ranks sums something together; the ranks of a *layer* meet within F and B.

    groups = Groups(manifest, rank, timeout)     .messages["F"], .sums[ranks], .layer
    groups.close()                               peers that wait for this rank are freed, with an error
    rank_sets(manifest)                          the sets
"""

from __future__ import annotations

import gc
from datetime import timedelta

import torch.distributed as dist

from csc import devices
from csc.ir.groups import Group
from csc.runtime.specs import Manifest


def rank_sets(manifest: Manifest) -> list[tuple[int, ...]]:
    """Sets of two or more ranks, each ascending: those that add up gradients or counts, holders of a tied parameter,
    all. No set twice.
    """
    mesh, trained = manifest.mesh, [p for p in manifest.parameters if p.trainable]
    kinds = dict.fromkeys([Group.DATA, *(p.gradient.parts for p in trained if p.gradient.parts is not None)])
    sets = [ranks for kind in kinds for ranks in mesh.groups(kind)]
    if manifest.loss.weight == "mean" or manifest.loss.summed:
        sets += mesh.groups(Group.SAMPLES)
    tied = sorted({tuple(sorted(p.ranks)) for p in trained})
    sets += [ranks for holders in tied for ranks in mesh.groups(Group.PIPELINE, holders)]
    sets += mesh.groups(Group.WORLD)
    return [ranks for ranks in dict.fromkeys(sets) if len(ranks) > 1]


class ProcessGroups:
    """Made at once, or by `open` after `close`. timeout: seconds until a silent peer counts as lost; new groups do not
    inherit the default group's.
    """

    def __init__(self, manifest: Manifest, rank: int, timeout: float) -> None:
        self._manifest, self._rank, self._wait = manifest, rank, timedelta(seconds=timeout)
        self.open()

    def open(self) -> None:
        """All ranks call it."""
        (everyone,) = self._manifest.mesh.groups(Group.WORLD)
        self.messages = {kind: self._new(everyone) for kind in ("F", "B")}
        self.sums = {ranks: self._new(ranks) for ranks in rank_sets(self._manifest)}
        self.layer = self._layer()

    def _new(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        return dist.new_group(list(ranks), timeout=self._wait)

    def _layer(self) -> dist.ProcessGroup | None:
        """The group of the ranks that share sequences, or the work of layers, with this one."""
        own, mesh = None, self._manifest.mesh
        if not self._manifest.contexts and mesh.sizes(Group.TENSOR) == (1,):
            return None
        for ranks in mesh.groups(Group.LAYER):
            group = self._new(ranks)
            own = group if self._rank in ranks else own
        return own

    def close(self) -> None:
        """Whoever waits for this rank gets an error within milliseconds over gloo, as soon as nothing refers to the
        groups any more: operations that are under way must have been let go of before.
        """
        own = [*self.messages.values(), *(group for ranks, group in self.sums.items() if self._rank in ranks)]
        own += [self.layer] if self.layer is not None else []
        self.messages, self.sums, self.layer = {}, {}, None
        while own:
            if devices.aborts(dist.get_backend(own[-1])):
                own[-1].abort()  # what runs on the device would be waited for
            dist.destroy_process_group(own.pop())
        gc.collect()
