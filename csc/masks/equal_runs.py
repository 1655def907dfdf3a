"""Runs of equal numbers along rows: where each begins and ends, and whether a number comes back.

Terms: a *run* is a longest stretch of equal numbers in a row; a number is *whole* in a row if it has one run there.

    begins(values) -> bool [B, T]                       a run begins here
    bounds(values) -> (lo, hi) int64 [B, T]             the run that a position is in: [lo, hi)
    returns(values) -> bool [B, T]                      a run begins here whose number had an earlier run
    few(values) -> int64 [n]                            the different numbers, ascending; cheap if runs are long

All of it is O(B T) without a loop over positions.
"""

from __future__ import annotations

import torch


def begins(values: torch.Tensor) -> torch.Tensor:
    """bool [B, T]: the number differs from the one before it, or is the first."""
    first = torch.ones_like(values[:, :1], dtype=torch.bool)
    return torch.cat([first, values[:, 1:] != values[:, :-1]], 1)


def bounds(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [B, T] each: the first position of the run that a position is in, and the one behind its last."""
    return bounds_of(begins(values))


def bounds_of(start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from bool [B, T], True where a run begins (position 0 always is one)."""
    length = start.shape[1]
    slot = torch.arange(length, device=start.device)
    lo = torch.where(start, slot, 0).cummax(1).values
    # The end of a run is the next beginning: look from the back.
    end = torch.where(start, slot, length).roll(-1, 1)
    end[:, -1] = length
    hi = end.flip(1).cummin(1).values.flip(1)
    return lo, hi


def returns(values: torch.Tensor) -> torch.Tensor:
    """bool [B, T]: True at the beginning of every run whose number already had a run in this row."""
    found = torch.zeros_like(values, dtype=torch.bool)
    row, position = begins(values).nonzero(as_tuple=True)  # as many as there are runs
    pairs = torch.stack([row, values[row, position]], 1)
    _, which = pairs.unique(dim=0, return_inverse=True)
    first = torch.full((int(which.max()) + 1,), len(which), device=values.device)
    first.scatter_reduce_(0, which, torch.arange(len(which), device=values.device), "amin")
    again = first[which] != torch.arange(len(which), device=values.device)
    found[row[again], position[again]] = True
    return found


def few(values: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the different numbers of [B, T], ascending. Neighbours are mostly equal, so few are left to sort."""
    return values[begins(values)].unique()
