"""Collectives in two calls: one that begins, one that waits. What stands between them runs while the ranks meet.

    csc::start_all_reduce(x, group) -> ticket
    csc::finish_all_reduce(x, ticket, group) -> what csc::all_reduce(x, group) gives, bit for bit

and so `all_gather`, `reduce_scatter` and `scatter_pieces`, with all that those of csc.kernels.collectives take.

Terms: a *ticket* is an int64 without dimensions on the CPU, which stands for what is under way. x: the same for both.
All ranks of a group begin in one order, and each finishes what it began, once. The second exchange of an all-reduce
begins where the first is finished.

    APART = {collective: (start, finish)}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from csc.kernels.collectives import GroupExchange, meeting_of, piece, reduced, sent, slots, summed


def _ticket(number: int) -> torch.Tensor:
    return torch.tensor(number)


def _no_ticket_yet(x: Any, *rest: Any) -> Any:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _arrived(group: torch.Tensor, ticket: torch.Tensor) -> Sequence[torch.Tensor]:
    return meeting_of(group).finish(int(ticket))


@torch.library.custom_op("csc::start_all_reduce", mutates_args=())
def _start_all_reduce(x: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    meeting = meeting_of(group)
    return _ticket(meeting.start(sent(x, meeting.ranks)))


@torch.library.custom_op("csc::finish_all_reduce", mutates_args=())
def _finish_all_reduce(x: torch.Tensor, ticket: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    return reduced(_arrived(group, ticket), x, meeting_of(group))


@torch.library.custom_op("csc::start_reduce_scatter", mutates_args=())
def _start_reduce_scatter(
    x: torch.Tensor, dim: int, samples: int, ranks: int, repeat: bool, group: torch.Tensor
) -> torch.Tensor:
    pieces = [piece(x, dim, samples, ranks, repeat, index) for index in range(ranks)]
    return _ticket(meeting_of(group).start(pieces))


@torch.library.custom_op("csc::finish_reduce_scatter", mutates_args=())
def _finish_reduce_scatter(
    x: torch.Tensor, ticket: torch.Tensor, dim: int, samples: int, ranks: int, repeat: bool, group: torch.Tensor
) -> torch.Tensor:
    return summed(_arrived(group, ticket))


@torch.library.custom_op("csc::start_all_gather", mutates_args=())
def _start_all_gather(x: torch.Tensor, dim: int, samples: int, ranks: int, group: torch.Tensor) -> torch.Tensor:
    return _ticket(meeting_of(group).start([x.contiguous()] * ranks))


@torch.library.custom_op("csc::finish_all_gather", mutates_args=())
def _finish_all_gather(
    x: torch.Tensor, ticket: torch.Tensor, dim: int, samples: int, ranks: int, group: torch.Tensor
) -> torch.Tensor:
    whole = torch.cat(list(_arrived(group, ticket)), dim)
    return whole.narrow(dim, 0, x.shape[dim] // slots(samples, ranks) * samples).contiguous()


def _among(group: torch.Tensor, each: int) -> GroupExchange:
    return meeting_of(group).among(each)


@torch.library.custom_op("csc::start_scatter_pieces", mutates_args=())
def _start_scatter_pieces(d: torch.Tensor, group: torch.Tensor, dim: int, each: int) -> torch.Tensor:
    return _ticket(_among(group, each).start([one.contiguous() for one in d.chunk(each, dim)]))


@torch.library.custom_op("csc::finish_scatter_pieces", mutates_args=())
def _finish_scatter_pieces(
    d: torch.Tensor, ticket: torch.Tensor, group: torch.Tensor, dim: int, each: int
) -> torch.Tensor:
    return summed(_among(group, each).finish(int(ticket)))


def _registered() -> dict[Any, tuple[Any, Any]]:
    """Both calls of each collective; what they give in traces follows from the collective's own."""
    pairs = {
        "all_reduce": (_start_all_reduce, _finish_all_reduce),
        "reduce_scatter": (_start_reduce_scatter, _finish_reduce_scatter),
        "all_gather": (_start_all_gather, _finish_all_gather),
        "scatter_pieces": (_start_scatter_pieces, _finish_scatter_pieces),
    }
    ops = torch.ops.csc

    def sized_by(whole: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, ticket, *rest: whole(x, *rest)

    found = {}
    for name, (start, finish) in pairs.items():
        start.register_fake(_no_ticket_yet)
        finish.register_fake(sized_by(getattr(ops, name)))
        found[getattr(ops, name).default] = tuple(getattr(ops, f"{end}_{name}").default for end in ("start", "finish"))
    return found


APART = _registered()
