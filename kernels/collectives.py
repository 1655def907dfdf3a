"""Collectives of a group of ranks, as operators that a graph can hold, whole or in two calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from csc.kernels.operators import Numbered, exact

# --- Collectives of a group of ranks, as operators that a graph can hold ---------------------------------------------
#
# Their gradients are those that their types ask for.
#
# A shard has the entries of some of the samples that the outermost factor of dimension `dim` counts, as many on each
# rank: where they do not divide, the last slots repeat the last sample (zeros without `repeat`); no gather takes them.
#
# Terms: see csc.ir.groups; *shared* is equal, but read by calls that differ from rank to rank, so that its gradient is
# parts. Parts are added in the order of the ranks, in float32 or float64: every rank has the same bits. group: the
# number of a `GroupExchange`.
#
# An all-reduce is one exchange in which each rank sends all it has to each other, or *two*: each sums a piece for all,
# which all then gather. Two take one latency more and `2 / ranks` of the bytes. The bits are the same.


class GroupExchange(Protocol):
    """One rank's place in a group of `ranks` ranks, over whatever its transport is. index: which of them it is."""

    ranks: int
    index: int

    def exchange(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """tensors: contiguous, one for each rank of the group, this one included, all of one shape. Returns what each
        has for this one, in the same order: to be read only.
        """

    def start(self, tensors: Sequence[torch.Tensor]) -> int:
        """Begin such an exchange. All ranks begin, and finish, theirs in one order. Returns a ticket."""

    def finish(self, ticket: int) -> Sequence[torch.Tensor]:
        """What `exchange` would have returned, once. RuntimeError if there is no such ticket."""

    def among(self, each: int) -> GroupExchange:
        """The exchange of this rank with its neighbours: of the first `each` ranks, or of the next so many."""


_MEETINGS: Numbered[GroupExchange] = Numbered("a collective runs on the ranks of a compiled program only")
numbered = _MEETINGS.number
meeting_of = _MEETINGS.find
csc = torch.ops.csc
WORTH_A_LATENCY = 2**20  # bytes: in the latency of a message some .75 MB go between nodes, 4 MB over NVLink


def summed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *rest = parts
    total = first.to(exact(first.dtype) if first.is_floating_point() else first.dtype, copy=True)
    for part in rest:
        total += part
    return total.to(first.dtype)


def arriving(size: int, ranks: int) -> tuple[int, float]:
    """Of an all-reduce of `size` bytes. The same on all ranks, whatever wires are between them."""
    all_at_once, pieces = size * (ranks - 1), 2 * size * (ranks - 1) / ranks
    return (2, pieces) if all_at_once - pieces >= WORTH_A_LATENCY else (1, all_at_once)


def sent(x: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """What the first exchange of an all-reduce brings to each rank: all of x, or a piece of it, in one dimension."""
    if arriving(x.nbytes, ranks)[0] == 1:
        return [x.contiguous()] * ranks
    piece_size = -(-x.numel() // ranks)
    return list(torch.nn.functional.pad(x.flatten(), (0, piece_size * ranks - x.numel())).chunk(ranks))


def reduced(arrived: Sequence[torch.Tensor], x: torch.Tensor, meeting: GroupExchange) -> torch.Tensor:
    """What is left of the all-reduce of x once its first exchange is over."""
    total = summed(arrived)
    if arriving(x.nbytes, meeting.ranks)[0] == 2:
        total = torch.cat(list(meeting.exchange([total] * meeting.ranks)))[: x.numel()]
    return total.view(x.shape)


@torch.library.custom_op("csc::all_reduce", mutates_args=())
def _all_reduce(x: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    meeting = _MEETINGS.find(group)
    return reduced(meeting.exchange(sent(x, meeting.ranks)), x, meeting)


@torch.library.custom_op("csc::share", mutates_args=())
def _share(x: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("csc::gather_pieces", mutates_args=())
def _gather_pieces(x: torch.Tensor, group: torch.Tensor, dim: int, each: int) -> torch.Tensor:
    return torch.cat(list(_MEETINGS.find(group).among(each).exchange([x.contiguous()] * each)), dim)


@_gather_pieces.register_fake
def _(x: Any, group: Any, dim: int, each: int) -> Any:
    return x.new_empty([size * each if place == dim else size for place, size in enumerate(x.shape)])


@torch.library.custom_op("csc::scatter_pieces", mutates_args=())
def _scatter_pieces(d: torch.Tensor, group: torch.Tensor, dim: int, each: int) -> torch.Tensor:
    pieces = [part.contiguous() for part in d.chunk(each, dim)]
    return summed(_MEETINGS.find(group).among(each).exchange(pieces))


@_scatter_pieces.register_fake
def _(d: Any, group: Any, dim: int, each: int) -> Any:
    return d.new_empty([size // each if place == dim else size for place, size in enumerate(d.shape)])


@_all_reduce.register_fake
@_share.register_fake
def _(x: Any, group: Any) -> Any:
    return x.new_empty(x.shape)


def slots(samples: int, ranks: int) -> int:
    """Of a shard."""
    return -(-samples // ranks)


@torch.library.custom_op("csc::own_part", mutates_args=())
def _own_part(x: torch.Tensor, dim: int, samples: int, ranks: int, repeat: bool, group: torch.Tensor) -> torch.Tensor:
    return piece(x, dim, samples, ranks, repeat, _MEETINGS.find(group).index)


def piece(x: torch.Tensor, dim: int, samples: int, ranks: int, repeat: bool, index: int) -> torch.Tensor:
    """What the rank of this index has in its slots."""
    size, rows = slots(samples, ranks), x.shape[dim] // samples
    start = min(index * size, samples)
    own_rows = x.narrow(dim, start * rows, min(size, samples - start) * rows)
    missing = size - own_rows.shape[dim] // rows
    last = x.narrow(dim, (samples - 1) * rows, rows)
    padding = [last if repeat else torch.zeros_like(last)] * missing
    return torch.cat([own_rows, *padding], dim).contiguous()


@torch.library.custom_op("csc::reduce_scatter", mutates_args=())
def _reduce_scatter(
    x: torch.Tensor, dim: int, samples: int, ranks: int, repeat: bool, group: torch.Tensor
) -> torch.Tensor:
    pieces = [piece(x, dim, samples, ranks, repeat, index) for index in range(ranks)]
    return summed(_MEETINGS.find(group).exchange(pieces))


@torch.library.custom_op("csc::all_gather", mutates_args=())
def _all_gather(x: torch.Tensor, dim: int, samples: int, ranks: int, group: torch.Tensor) -> torch.Tensor:
    gathered = torch.cat(list(_MEETINGS.find(group).exchange([x.contiguous()] * ranks)), dim)
    return gathered.narrow(dim, 0, x.shape[dim] // slots(samples, ranks) * samples).contiguous()


@torch.library.custom_op("csc::gather_shared", mutates_args=())
def _gather_shared(x: torch.Tensor, dim: int, samples: int, ranks: int, group: torch.Tensor) -> torch.Tensor:
    return _all_gather(x, dim, samples, ranks, group)


@_reduce_scatter.register_fake
@_own_part.register_fake
def _(x: Any, dim: int, samples: int, ranks: int, repeat: bool, group: Any) -> Any:
    return x.new_empty(_resized(x, dim, samples, slots(samples, ranks)))


@_all_gather.register_fake
@_gather_shared.register_fake
def _(x: Any, dim: int, samples: int, ranks: int, group: Any) -> Any:
    return x.new_empty(_resized(x, dim, slots(samples, ranks), samples))


def _resized(x: torch.Tensor, dim: int, before: int, after: int) -> list[int]:
    return [size // before * after if place == dim else size for place, size in enumerate(x.shape)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


_all_reduce.register_autograd(lambda ctx, d: (csc.share(d, *ctx.saved_tensors), None), setup_context=_remember)
_share.register_autograd(lambda ctx, d: (csc.all_reduce(d, *ctx.saved_tensors), None), setup_context=_remember)


def _remember_shard(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.dim, ctx.samples, ctx.ranks, *_, group = inputs
    ctx.save_for_backward(group)


def _gathered(ctx: Any, d: torch.Tensor) -> tuple[Any, ...]:
    return csc.all_gather(d, ctx.dim, ctx.samples, ctx.ranks, *ctx.saved_tensors), None, None, None, None, None


def _parted(ctx: Any, d: torch.Tensor) -> tuple[Any, ...]:
    return csc.own_part(d, ctx.dim, ctx.samples, ctx.ranks, False, *ctx.saved_tensors), None, None, None, None


def _scattered(ctx: Any, d: torch.Tensor) -> tuple[Any, ...]:
    d_x = csc.reduce_scatter(d, ctx.dim, ctx.samples, ctx.ranks, False, *ctx.saved_tensors)
    return d_x, None, None, None, None


_own_part.register_autograd(_gathered, setup_context=_remember_shard)
_reduce_scatter.register_autograd(_gathered, setup_context=_remember_shard)
_all_gather.register_autograd(_parted, setup_context=_remember_shard)
_gather_shared.register_autograd(_scattered, setup_context=_remember_shard)


def _remember_pieces(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, group, ctx.dim, ctx.each = inputs
    ctx.save_for_backward(group)


def _of_pieces(ctx: Any, d: torch.Tensor) -> tuple[Any, ...]:
    return csc.scatter_pieces(d, *ctx.saved_tensors, ctx.dim, ctx.each), None, None, None


_gather_pieces.register_autograd(_of_pieces, setup_context=_remember_pieces)

ALL_GATHER = torch.ops.csc.all_gather.default
ALL_REDUCE = torch.ops.csc.all_reduce.default
GATHER_SHARED = torch.ops.csc.gather_shared.default
OWN_PART = torch.ops.csc.own_part.default
REDUCE_SCATTER = torch.ops.csc.reduce_scatter.default
SHARE = torch.ops.csc.share.default
GATHER_PIECES = torch.ops.csc.gather_pieces.default


# --- Collectives in two calls: one that begins, one that waits -------------------------------------------------------
#
# What stands between them runs while the ranks meet.
#
#     csc::start_all_reduce(x, group) -> ticket
#     csc::finish_all_reduce(x, ticket, group) -> what csc::all_reduce(x, group) gives, bit for bit
#
# and so `all_gather`, `reduce_scatter` and `scatter_pieces`, with all that those of csc.kernels.collectives take.
#
# Terms: a *ticket* is an int64 without dimensions on the CPU, which stands for what is under way. x: the same for
# both. All ranks of a group begin in one order, and each finishes what it began, once. The second exchange of an
# all-reduce begins where the first is finished.


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
    gathered = torch.cat(list(_arrived(group, ticket)), dim)
    return gathered.narrow(dim, 0, x.shape[dim] // slots(samples, ranks) * samples).contiguous()


def _among(group: torch.Tensor, each: int) -> GroupExchange:
    return meeting_of(group).among(each)


@torch.library.custom_op("csc::start_scatter_pieces", mutates_args=())
def _start_scatter_pieces(d: torch.Tensor, group: torch.Tensor, dim: int, each: int) -> torch.Tensor:
    return _ticket(_among(group, each).start([part.contiguous() for part in d.chunk(each, dim)]))


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

    operators = {}
    for name, (start, finish) in pairs.items():
        start.register_fake(_no_ticket_yet)
        finish.register_fake(sized_by(getattr(ops, name)))
        operators[getattr(ops, name).default] = tuple(
            getattr(ops, f"{end}_{name}").default for end in ("start", "finish")
        )
    return operators


APART = _registered()
