"""Where the operators of csc.kernels.collectives meet the other ranks.

met = Met(group, copies)        .number: what stands for it in a call        one rank's place in a group
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from csc.kernels.collectives import numbered
from csc.runtime.exchange import Membership


class Met:
    """Over the endpoint of a rank: between processes, or among threads that take turns.

    copies: what leaves is a copy: whoever calls writes over its tensors, as compiled functions do, while others may
    not have read them yet.
    """

    def __init__(self, group: Membership, copies: bool = False) -> None:
        self._group, self._copies = group, copies
        self.ranks, self.index = len(group.members), group.index
        self.number = numbered(self)
        self._among: dict[int, Met] = {}

    def among(self, each: int) -> Met:
        """With the neighbours of this rank; see csc.kernels.collectives.GroupExchange."""
        if each not in self._among:
            first = self.index // each * each
            members = self._group.members[first : first + each]
            self._among[each] = Met(Membership(self._group.endpoint, self.index - first, members), self._copies)
        return self._among[each]

    def exchange(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What each rank of the group has for this one; see csc.kernels.collectives.GroupExchange."""
        return self._finished(*self._started(tensors))

    def start(self, tensors: Sequence[torch.Tensor]) -> int:
        """See csc.kernels.collectives.GroupExchange. What is under way is the endpoint's, which lets go of it where a
        step fails.
        """
        under_way = self._group.endpoint.under_way
        number = max(under_way, default=-1) + 1
        under_way[number] = self._started(tensors)
        return number

    def finish(self, ticket: int) -> list[torch.Tensor]:
        """See csc.kernels.collectives.GroupExchange."""
        begun = self._group.endpoint.under_way.pop(ticket, None)
        if begun is None:
            raise RuntimeError(f"no collective is under way by the ticket {ticket}")
        return self._finished(*begun)

    def _started(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor]:
        me, others = self._group.index, self._group.others
        own = {id(tensor): tensor.clone() if self._copies else tensor for tensor in tensors}
        sends = {rank: [own[id(tensors[rank])]] for rank in others}
        receives = {rank: [torch.empty_like(tensors[me])] for rank in others}
        return self._group.start(sends, receives, "a collective of a layer"), own[id(tensors[me])]

    def _finished(self, ticket: Any, own: torch.Tensor) -> list[torch.Tensor]:
        arrived = self._group.finish(ticket)
        return [own if rank == self._group.index else arrived[rank][0] for rank in range(self.ranks)]
