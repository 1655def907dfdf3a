"""Blocks of tokens that the ranks of a context-parallel group send each other.

Terms
  blocks   a tensor [n, B, block, H, D], one entry for each block of tokens: what is dispatched as a whole moves as a
           whole, in long copies. The sequence's last block may be short; the rest of it is padding that no query sees.
  places   which blocks: a slice where they follow each other, else int64 [n]

    Group(endpoint, index, members)          .start(sends, receives, why) -> ticket, .finish(ticket) -> what came
    places(indices, device) -> Places        count(places), taken(blocks, places), put(..), added(..), room(..)
    in_blocks(x, block)                      [B, H, t, D] as blocks: a view
    in_heads(empty_blocks(..))               and back
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from csc.runtime.transport import Endpoint

Places = slice | torch.Tensor
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Membership:
    """One rank's side of a group. index: its index in it; members: the ranks by index."""

    endpoint: Endpoint
    index: int
    members: tuple[int, ...]

    @property
    def others(self) -> tuple[int, ...]:
        """The other indices, ascending."""
        return tuple(index for index in range(len(self.members)) if index != self.index)

    def start(self, sends: Mapping[int, Tensors], receives: Mapping[int, Tensors], why: str) -> Any:
        """Send tensors to other members, announce some from them: what comes may be written into `receives`."""
        ranks = self.members
        return self.endpoint.start_exchange(
            {ranks[index]: tensors for index, tensors in sends.items()},
            {ranks[index]: tensors for index, tensors in receives.items()},
            why,
        )

    def finish(self, ticket: Any) -> dict[int, Tensors]:
        """What came, by index. It is to be read only: in one process it is the sender's."""
        found = self.endpoint.finish_exchange(ticket)
        return {index: found[rank] for index, rank in enumerate(self.members) if rank in found}


def places(indices: torch.Tensor, device: torch.device) -> Places:
    """int64 [n] on the CPU as a slice if it counts up by one, else on a device."""
    first = int(indices[0]) if len(indices) else 0
    if torch.equal(indices, torch.arange(first, first + len(indices))):
        return slice(first, first + len(indices))
    return indices.to(device)


def count(chosen: Places) -> int:
    """How many there are."""
    return chosen.stop - chosen.start if isinstance(chosen, slice) else len(chosen)


def taken(blocks: torch.Tensor, chosen: Places) -> torch.Tensor:
    """The chosen blocks; a view if they follow each other."""
    return blocks[chosen] if isinstance(chosen, slice) else blocks.index_select(0, chosen)


def put(blocks: torch.Tensor, chosen: Places, given: torch.Tensor) -> None:
    """Write given blocks to their places."""
    if not isinstance(chosen, slice):
        blocks.index_copy_(0, chosen, given)
    elif blocks[chosen].data_ptr() != given.data_ptr():  # else they have been received there
        blocks[chosen] = given


def added(blocks: torch.Tensor, chosen: Places, given: torch.Tensor) -> None:
    """Add given blocks to those at their places, each of which comes once."""
    if isinstance(chosen, slice):
        blocks[chosen] += given
    else:
        blocks.index_add_(0, chosen, given.to(blocks.dtype))


def in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """[B, H, t, ...] as blocks [t / block, B, block, H, ...]: a view."""
    return x.transpose(1, 2).unflatten(1, (-1, block)).transpose(0, 1)


def empty_blocks(like: torch.Tensor, blocks: int, block: int) -> torch.Tensor:
    """[blocks, B, block, H, D] that `in_heads` can view."""
    batch, heads, _, width = like.shape
    return like.new_empty((batch, blocks, block, heads, width)).transpose(0, 1)


def in_heads(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks of `empty_blocks` as [B, H, t, D]: a view."""
    return blocks.transpose(0, 1).flatten(1, 2).transpose(1, 2)


def room(into: torch.Tensor, chosen: Places) -> torch.Tensor:
    """Where blocks for these places may be received: there, if that is one stretch of memory."""
    if isinstance(chosen, slice) and into.shape[1] == 1:
        return into[chosen]
    return into.new_empty((count(chosen), *into.shape[1:]))
