"""A loss over the whole batch: values of all microbatches and replicas brought together, the loss, its gradients."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod

import torch

from csc.errors import CscError
from csc.ir.groups import Group
from csc.kernels.batch_loss import Meeting
from csc.runtime.gradients import wait_sum
from csc.runtime.loaded_program import batch_loss
from csc.runtime.rank import Rank
from csc.runtime.specs import BatchLossSpec, BatchValueSpec

# Terms: what a microbatch *hands over* are the values of F (csc.kernels.batch_loss), in the order of the loss'
# arguments, then its parameters. A microbatch's *place* is its number in the global batch, replica after replica.
#
# Every replica computes the loss of the whole batch: its rank of the loss' stage has all values then, and needs the
# gradients of its own. Parameters that the loss reads itself get their gradients once, with the first microbatch.
#
# Ranks first tell each other the sizes of their values, in one small sum; the values go as bytes in one all-gather.


WHY = "values of the whole batch, for the loss"
WORD = 2**62


def computed(
    rank: Rank,
    ranks: Sequence[Rank],
    meetings: Sequence[Meeting],
    weights: Mapping[str, torch.Tensor],
    trains: bool,
) -> Generator[str, None, torch.Tensor | None]:
    """Give each microbatch's meeting its gradients.

    ranks: this rank in the program of each of its microbatches. weights: those of the loss' stage, whole.
    trains: False: no gradients are wanted.

    Returns:
        What the loss adds to that of the first microbatch of all, on the rank that has it; None elsewhere.

    Raises:
        CscError: Microbatches whose values cannot be put one behind the other.
    """
    spec = rank.program.manifest.loss.over_batch
    assert spec is not None
    places = [_place(rank, number) for number in range(len(meetings))]
    own = [[meeting.values[index] for index in range(len(spec.values))] for meeting in meetings]
    table = yield from _sizes(rank, ranks, own, places)
    shapes, samples, sizes = _read(spec, table)
    parts = yield from _gathered(rank, own, shapes)
    shares = [_shares(one, [row[index] for row in samples]) for index, one in enumerate(spec.values)]
    values = [
        _joined(one, [part[i] for part in parts], share) for i, (one, share) in enumerate(zip(spec.values, shares))
    ]
    loss, gradients = _differentiated(rank, spec, values, weights, _whole(spec, sizes), trains)
    if trains:
        _hand_back(spec, shapes, shares, gradients, meetings, places)
    return loss * spec.factor if 0 in places else None


def _place(rank: Rank, number: int) -> int:
    replica, microbatch = rank.served(number)
    return replica * rank.program.manifest.microbatches + microbatch


# --- What all ranks have ---------------------------------------------------------------------------------------------


def _sizes(
    rank: Rank, ranks: Sequence[Rank], own: Sequence[Sequence[torch.Tensor]], places: Sequence[int]
) -> Generator[str, None, list[list[int]]]:
    """For each microbatch of all replicas what its loss is, the shapes of its values, how many samples a mean is over,
    the sizes that the loss asks for.
    """
    manifest = rank.program.manifest
    rows = [
        [
            _word(one), *(size for value in values for size in value.shape),
            *(value.samples for value in _spec(one).values), *(size for size, _ in _spec(one).sizes),
        ]
        for one, values in zip(ranks, own, strict=True)
    ]  # fmt: skip
    table = torch.zeros(manifest.mesh.dp * manifest.microbatches, len(rows[0]), dtype=torch.int64)
    for place, row in zip(places, rows):
        if len(row) != len(rows[0]):
            raise _other_losses()
        table[place] = torch.tensor(row)
    table = table.to(rank.device)
    yield from wait_sum(rank.endpoint, table, rank.group(Group.SAMPLES), WHY)
    found: list[list[int]] = table.tolist()
    if len({row[0] for row in found}) > 1:
        raise _other_losses()
    return found


def _spec(rank: Rank) -> BatchLossSpec:
    found = rank.program.manifest.loss.over_batch
    if found is None:
        raise _other_losses()
    return found


def _word(rank: Rank) -> int:
    """What tells one loss from another."""
    return int(rank.program.manifest.files["batch_loss.py"], 16) % WORD


def _other_losses() -> CscError:
    return CscError(
        "the loss is over the whole batch, and not the same code for all of its microbatches", "step",
        "put samples that take the same branch of the model into one step, or use microbatches=1 and dp=1",
    )  # fmt: skip


def _read(
    spec: BatchLossSpec, table: Sequence[Sequence[int]]
) -> tuple[list[list[tuple[int, ...]]], list[list[int]], list[list[int]]]:
    """Of each microbatch the shapes of its values, their samples, and its sizes. CscError if values do not fit
    together.
    """
    shapes: list[list[tuple[int, ...]]] = []
    ends = list(accumulate((one.dims for one in spec.values), initial=0))
    for _, *row in table:
        shapes.append([tuple(row[start:end]) for start, end in pairwise(ends)])
    for index, one in enumerate(spec.values):
        listed = [shape[index] for shape in shapes]
        rest = {shape[: one.dim] + shape[one.dim + 1 :] if one.kind == "rows" else shape for shape in listed}
        if len(rest) > 1:
            sizes = " and ".join(str(list(shape)) for shape in dict.fromkeys(listed))
            raise CscError(
                f"the loss is over the whole batch, and {one.name} has the sizes {sizes} in its microbatches, which do "
                "not fit together", "step", "give all samples of a step the same width (pad them in the data loader)",
            )  # fmt: skip
    start = 1 + ends[-1]
    middle = start + len(spec.values)
    return shapes, [list(row[start:middle]) for row in table], [list(row[middle:]) for row in table]


def _whole(spec: BatchLossSpec, sizes: Sequence[Sequence[int]]) -> list[int]:
    """The sizes of the whole batch. CscError if one is another in each microbatch, and does not add up."""
    found = []
    for index, (_, adds) in enumerate(spec.sizes):
        column = [row[index] for row in sizes]
        if not adds and len(set(column)) > 1:
            raise CscError(
                f"the loss is over the whole batch, and reads a size that is {' and '.join(map(str, set(column)))} in "
                "its microbatches", "step", "give all samples of a step the same width (pad them in the data loader)",
            )  # fmt: skip
        found.append(sum(column) if adds else column[0])
    return found


def _gathered(
    rank: Rank, own: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> Generator[str, None, list[list[torch.Tensor]]]:
    """The values of every microbatch, in order of places."""
    group, count = rank.group(Group.SAMPLES), rank.program.manifest.microbatches
    if len(group) == 1:
        return [list(values) for _, values in sorted(zip((_place(rank, n) for n in range(len(own))), own))]
    mesh = rank.program.manifest.mesh
    placed = {
        one: [r * count + m for r, m in (mesh.served(one, n) for n in range(len(mesh.replicas_of(one)) * count))]
        for one in group
    }
    dtypes = [value.dtype for value in own[0]]
    widths = [[prod(shape) * dtype.itemsize for shape, dtype in zip(row, dtypes)] for row in shapes]
    most = max(sum(sum(widths[place]) for place in places) for places in placed.values())
    flat = torch.cat([value.contiguous().flatten().view(torch.uint8) for values in own for value in values])
    flat = torch.nn.functional.pad(flat, (0, most - flat.numel()))
    ticket = rank.endpoint.start_gather(flat, group, WHY)
    while (rows := rank.endpoint.finish_gather(ticket)) is None:
        yield WHY
    found: dict[int, list[torch.Tensor]] = {}
    for one, row in zip(group, rows):
        start = 0
        for place in placed[one]:
            found[place] = []
            for shape, dtype, width in zip(shapes[place], dtypes, widths[place]):
                piece = row[start : start + width].clone()  # aligned for its dtype
                found[place].append(piece.view(dtype).reshape(shape))
                start += width
    return [found[place] for place in sorted(found)]


# --- The loss and its gradients --------------------------------------------------------------------------------------


def _shares(spec: BatchValueSpec, samples: Sequence[int]) -> list[float]:
    """What microbatches weigh in a sum or mean of theirs."""
    return [own / sum(samples) for own in samples] if spec.kind == "mean" else [1.0] * len(samples)


def _joined(spec: BatchValueSpec, parts: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """One behind the other, in each of the groups along the dimension; or their weighted sum."""
    if spec.kind != "rows":
        first, *rest = (part * share for part, share in zip(parts, shares))
        return sum(rest, first).to(spec.dtype)
    apart = [_apart(spec, part) for part in parts]
    return torch.cat(apart, spec.dim + 1).flatten(spec.dim, spec.dim + 1).to(spec.dtype)


def _apart(spec: BatchValueSpec, value: torch.Tensor) -> torch.Tensor:
    return value.unflatten(spec.dim, (spec.groups, value.shape[spec.dim] // spec.groups))


def _differentiated(
    rank: Rank,
    spec: BatchLossSpec,
    values: Sequence[torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    sizes: Sequence[int],
    trains: bool,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The loss, and the gradients of the values and of the parameters, None for what has none."""
    trainable = {one.name for one in rank.program.manifest.parameters if one.trainable}
    with torch.enable_grad() if trains else torch.no_grad():
        own = [one.detach().requires_grad_(one.is_floating_point() and trains) for one in values]
        read = {
            name: weights[name].detach().to(_dtype(rank, name)).requires_grad_(trains and name in trainable)
            for name in spec.parameters
        }
        loss = batch_loss(rank.program)(own, read, rank.constants, sizes)
        asked = [one for one in (*own, *read.values()) if one.requires_grad]
        made = torch.autograd.grad(loss, asked, allow_unused=True) if loss.requires_grad and asked else ()
    gradients = dict(zip(map(id, asked), made))
    return loss.detach(), [gradients.get(id(one)) for one in (*own, *read.values())]


def _dtype(rank: Rank, name: str) -> torch.dtype:
    """In which the model has a parameter: the loss is computed as the model computes it."""
    return next(one.dtype for one in rank.program.manifest.parameters if one.name == name)


def _hand_back(
    spec: BatchLossSpec,
    shapes: Sequence[Sequence[tuple[int, ...]]],
    shares: Sequence[Sequence[float]],
    gradients: Sequence[torch.Tensor | None],
    meetings: Sequence[Meeting],
    places: Sequence[int],
) -> None:
    """Each microbatch its part of the values' gradients; the first of all those of the parameters."""
    own: list[list[torch.Tensor | None]] = [[] for _ in meetings]
    for index, (one, gradient) in enumerate(zip(spec.values, gradients)):
        listed = [shape[index] for shape in shapes]
        for given, place in zip(own, places):
            if gradient is None or one.kind != "rows":
                given.append(None if gradient is None else gradient * shares[index][place])
            else:
                given.append(_part(one, gradient, listed, place))
    for given, place, meeting in zip(own, places, meetings):
        given += [one if place == 0 else None for one in gradients[len(spec.values) :]]
        meeting.gradients = given
        meeting.values.clear()


def _part(spec: BatchValueSpec, gradient: torch.Tensor, shapes: Sequence[tuple[int, ...]], place: int) -> torch.Tensor:
    """A microbatch's rows of the gradient of all."""
    rows = [shape[spec.dim] // spec.groups for shape in shapes]
    own = _apart(spec, gradient).narrow(spec.dim + 1, sum(rows[:place]), rows[place])
    return own.reshape(shapes[place])
