"""Attention masks as data: for every query a few ranges of keys, and the kinds of keys it admits there.

Terms
  rule     query q sees key k if lo <= k < hi and some kind of k is admitted; a query has R rules and sees their union
  kinds    a bitset per key: what the key is (text, image, ...); 0 is padding, which nobody sees
  admits   a bitset per query and rule: the kinds of keys that it lets through

    Mask(ranges, admits, kinds, keys)          int32 [B, R, Tq, 2], int64 [B, R, Tq], int64 [B, Tk], Tk
    mask.dense() -> bool [B, Tq, Tk]           for references and pictures of small masks only
    mask.hidden() -> bool [B, Tq]              queries that see nothing
    mask.union(other) -> Mask                  all rules of both

All heads share a mask; B is the batch, or 1 for a mask that holds for the whole batch. 63 kinds can be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

EVERYTHING = (1 << 63) - 1  # admits every kind; a key of kind 0 stays unseen
MOST_RULES = 8  # counting tiles looks at every subset of rules


@dataclass(frozen=True)
class Mask:
    """Who sees whom. `admits` and `kinds` are both None where ranges alone decide.

    ranges: int32 [B, R, Tq, 2], slots of K and V, lo and hi (hi <= keys; lo >= hi: the rule sees nothing).
    admits: int64 [B, R, Tq] or None.  kinds: int64 [B, Tk] or None.  keys: Tk.
    """

    ranges: torch.Tensor
    admits: torch.Tensor | None
    kinds: torch.Tensor | None
    keys: int
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # what kernels have made of it

    def __post_init__(self) -> None:
        """ValueError for tensors that do not fit together (shapes and dtypes only; values are not looked at)."""
        if self.ranges.dim() != 4 or self.ranges.shape[-1] != 2 or self.ranges.dtype != torch.int32:
            raise ValueError(f"ranges is {self.ranges.dtype} {list(self.ranges.shape)}, not int32 [B, R, Tq, 2]")
        if not 1 <= self.rules <= MOST_RULES:
            raise ValueError(f"a mask has 1 to {MOST_RULES} rules a query, this one {self.rules}")
        if (self.admits is None) != (self.kinds is None):
            raise ValueError("admits and kinds come together or not at all")
        if self.admits is not None and self.kinds is not None:
            if self.admits.shape != self.ranges.shape[:-1] or self.admits.dtype != torch.int64:
                raise ValueError(f"admits is {self.admits.dtype} {list(self.admits.shape)}, not int64 [B, R, Tq]")
            if tuple(self.kinds.shape) != (self.batch, self.keys) or self.kinds.dtype != torch.int64:
                raise ValueError(f"kinds is {self.kinds.dtype} {list(self.kinds.shape)}, not int64 [B, Tk]")

    def copied(self) -> Mask:
        """With values of its own, and what kernels have made of it."""
        admits = None if self.admits is None else self.admits.clone()
        kinds = None if self.kinds is None else self.kinds.clone()
        return Mask(self.ranges.clone(), admits, kinds, self.keys, dict(self.known))

    @property
    def batch(self) -> int:
        return self.ranges.shape[0]

    @property
    def rules(self) -> int:
        return self.ranges.shape[1]

    @property
    def queries(self) -> int:
        return self.ranges.shape[2]

    def dense(self) -> torch.Tensor:
        """bool [B, Tq, Tk]: the mask written out, Tq x Tk of it."""
        slot = torch.arange(self.keys, device=self.ranges.device)
        seen = (self.ranges[..., :1] <= slot) & (slot < self.ranges[..., 1:])
        if self.admits is not None and self.kinds is not None:
            seen &= (self.admits[..., None] & self.kinds[:, None, None, :]) != 0
        return seen.any(1) if self.rules > 1 else seen[:, 0]

    def hidden(self) -> torch.Tensor:
        """bool [B, Tq]: queries that see no key. Counts keys of each kind, so nothing of size Tq x Tk is made."""
        low, high = self.ranges.long().clamp(0, self.keys).unbind(-1)
        if self.kinds is None or self.admits is None:
            return (low >= high).all(1)
        seen = torch.zeros_like(low, dtype=torch.bool)
        for bit in range(int(self.kinds.max()).bit_length()):
            before = torch.nn.functional.pad((self.kinds >> bit & 1).cumsum(-1), (1, 0))[:, None].expand(
                -1, self.rules, -1
            )
            seen |= (before.gather(2, high) > before.gather(2, low)) & (self.admits >> bit & 1).bool()
        return ~seen.any(1)

    def union(self, other: Mask) -> Mask:
        """What either lets through. Kinds must mean the same in both. ValueError if the sizes differ."""
        if (self.queries, self.keys) != (other.queries, other.keys):
            raise ValueError(f"masks of {self.queries} x {self.keys} and {other.queries} x {other.keys} have no union")
        batch = max(self.batch, other.batch)
        ranges = torch.cat([one.ranges.expand(batch, -1, -1, -1) for one in (self, other)], dim=1)
        if self.kinds is None and other.kinds is None:
            return Mask(ranges, None, None, self.keys)
        kinds = [one.kinds for one in (self, other) if one.kinds is not None]
        if len(kinds) == 2 and not torch.equal(*torch.broadcast_tensors(*kinds)):
            raise ValueError("the kinds of keys differ between the two masks")
        admits = torch.cat([one.all_admits().expand(batch, -1, -1) for one in (self, other)], dim=1)
        if any(one.kinds is None for one in (self, other)) and bool((kinds[0] == 0).any()):
            raise ValueError("a mask without kinds sees keys that are padding in the other one")
        return Mask(ranges, admits, kinds[0].expand(batch, -1).contiguous(), self.keys)

    def all_admits(self) -> torch.Tensor:
        """int64 [B, R, Tq], written out where the mask has none."""
        if self.admits is not None:
            return self.admits
        return torch.full(self.ranges.shape[:-1], EVERYTHING, dtype=torch.int64, device=self.ranges.device)

    def all_kinds(self) -> torch.Tensor:
        """int64 [B, Tk], written out where the mask has none."""
        if self.kinds is not None:
            return self.kinds
        return torch.ones(self.batch, self.keys, dtype=torch.int64, device=self.ranges.device)

    def to(self, device: torch.device | str) -> Mask:
        """The mask on a device."""
        admits = None if self.admits is None else self.admits.to(device)
        kinds = None if self.kinds is None else self.kinds.to(device)
        return Mask(self.ranges.to(device), admits, kinds, self.keys)
