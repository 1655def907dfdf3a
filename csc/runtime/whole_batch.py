"""A loss over the whole batch: values of all microbatches and replicas brought together, the loss, its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import prod

import torch

from csc.errors import CscError
from csc.ir.groups import Group
from csc.kernels.batch_loss import HandedOver
from csc.runtime.gradients import wait_sum
from csc.runtime.loaded_program import batch_loss
from csc.runtime.rank import Rank
from csc.runtime.specs import BatchLossSpec, BatchValueSpec
from csc.runtime.transport import Work, until

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
    handed_over: Sequence[HandedOver],
    weights: Mapping[str, torch.Tensor],
    trains: bool,
) -> Work[torch.Tensor | None]:
    """Give each microbatch its gradients.

    ranks: this rank in the program of each of its microbatches. weights: those of the loss' stage, whole.
    trains: False: no gradients are wanted.

    Returns:
        What the loss adds to that of the first microbatch of all, on the rank that has it; None elsewhere.

    Raises:
        CscError: Microbatches whose values cannot be put one behind the other.
    """
    spec = rank.program.manifest.loss.over_batch
    assert spec is not None
    places = [_place(rank, number) for number in range(len(handed_over))]
    handed = [[microbatch.values[index] for index in range(len(spec.values))] for microbatch in handed_over]
    table = yield from _sizes(rank, ranks, handed, places)
    shapes, samples, sizes = _read(spec, table)
    parts = yield from _gathered(rank, handed, shapes)
    shares = [_shares(value, [row[index] for row in samples]) for index, value in enumerate(spec.values)]
    values = [
        _joined(value, [part[i] for part in parts], share) for i, (value, share) in enumerate(zip(spec.values, shares))
    ]
    loss, gradients = _differentiated(rank, spec, values, weights, _whole(spec, sizes), trains)
    if trains:
        _hand_back(spec, shapes, shares, gradients, handed_over, places)
    return loss * spec.factor if 0 in places else None


def _place(rank: Rank, number: int) -> int:
    replica, microbatch = rank.served(number)
    return replica * rank.program.manifest.microbatches + microbatch


# --- What all ranks have ---------------------------------------------------------------------------------------------


def _sizes(
    rank: Rank, ranks: Sequence[Rank], handed: Sequence[Sequence[torch.Tensor]], places: Sequence[int]
) -> Work[list[list[int]]]:
    """For each microbatch of all replicas what its loss is, the shapes of its values, how many samples a mean is over,
    the sizes that the loss asks for.
    """
    manifest = rank.program.manifest
    rows = [
        [
            _word(member), *(size for value in values for size in value.shape),
            *(value.samples for value in _spec(member).values), *(size for size, _ in _spec(member).sizes),
        ]
        for member, values in zip(ranks, handed, strict=True)
    ]  # fmt: skip
    table = torch.zeros(manifest.mesh.dp * manifest.microbatches, len(rows[0]), dtype=torch.int64)
    for place, row in zip(places, rows):
        if len(row) != len(rows[0]):
            raise _other_losses()
        table[place] = torch.tensor(row)
    table = table.to(rank.device)
    yield from wait_sum(rank.endpoint, table, rank.group(Group.SAMPLES), WHY)
    rows_of_all: list[list[int]] = table.tolist()
    if len({row[0] for row in rows_of_all}) > 1:
        raise _other_losses()
    return rows_of_all


def _spec(rank: Rank) -> BatchLossSpec:
    loss = rank.program.manifest.loss.over_batch
    if loss is None:
        raise _other_losses()
    return loss


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
    ends = list(accumulate((value.dims for value in spec.values), initial=0))
    for _, *row in table:
        shapes.append([tuple(row[start:end]) for start, end in pairwise(ends)])
    for index, value in enumerate(spec.values):
        listed = [shape[index] for shape in shapes]
        rest = {shape[: value.dim] + shape[value.dim + 1 :] if value.kind == "rows" else shape for shape in listed}
        if len(rest) > 1:
            sizes = " and ".join(str(list(shape)) for shape in dict.fromkeys(listed))
            raise CscError(
                f"the loss is over the whole batch, and {value.name} has the sizes {sizes} in its microbatches, which "
                "do not fit together",
                "step", "give all samples of a step the same width (pad them in the data loader)",
            )  # fmt: skip
    start = 1 + ends[-1]
    middle = start + len(spec.values)
    return shapes, [list(row[start:middle]) for row in table], [list(row[middle:]) for row in table]


def _whole(spec: BatchLossSpec, sizes: Sequence[Sequence[int]]) -> list[int]:
    """The sizes of the whole batch. CscError if one is another in each microbatch, and does not add up."""
    whole_sizes = []
    for index, (_, adds) in enumerate(spec.sizes):
        column = [row[index] for row in sizes]
        if not adds and len(set(column)) > 1:
            raise CscError(
                f"the loss is over the whole batch, and reads a size that is {' and '.join(map(str, set(column)))} in "
                "its microbatches", "step", "give all samples of a step the same width (pad them in the data loader)",
            )  # fmt: skip
        whole_sizes.append(sum(column) if adds else column[0])
    return whole_sizes


def _gathered(
    rank: Rank, handed: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> Work[list[list[torch.Tensor]]]:
    """The values of every microbatch, in order of places."""
    group, count = rank.group(Group.SAMPLES), rank.program.manifest.microbatches
    if len(group) == 1:
        return [list(values) for _, values in sorted(zip((_place(rank, n) for n in range(len(handed))), handed))]
    mesh = rank.program.manifest.mesh
    placed = {
        member: [
            r * count + m for r, m in (mesh.served(member, n) for n in range(len(mesh.replicas_of(member)) * count))
        ]
        for member in group
    }
    dtypes = [value.dtype for value in handed[0]]
    widths = [[prod(shape) * dtype.itemsize for shape, dtype in zip(row, dtypes)] for row in shapes]
    most = max(sum(sum(widths[place]) for place in places) for places in placed.values())
    flat = torch.cat([value.contiguous().flatten().view(torch.uint8) for values in handed for value in values])
    flat = torch.nn.functional.pad(flat, (0, most - flat.numel()))
    ticket = rank.endpoint.start_gather(flat, group, WHY)
    yield from until(partial(rank.endpoint.ready, ticket), WHY)
    rows = rank.endpoint.finish_gather(ticket)
    values_of: dict[int, list[torch.Tensor]] = {}
    for member, row in zip(group, rows):
        start = 0
        for place in placed[member]:
            values_of[place] = []
            for shape, dtype, width in zip(shapes[place], dtypes, widths[place]):
                piece = row[start : start + width].clone()  # aligned for its dtype
                values_of[place].append(piece.view(dtype).reshape(shape))
                start += width
    return [values_of[place] for place in sorted(values_of)]


# --- The loss and its gradients --------------------------------------------------------------------------------------


def _shares(spec: BatchValueSpec, samples: Sequence[int]) -> list[float]:
    """What microbatches weigh in a sum or mean of theirs."""
    return [count / sum(samples) for count in samples] if spec.kind == "mean" else [1.0] * len(samples)


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
    trainable = {parameter.name for parameter in rank.program.manifest.parameters if parameter.trainable}
    with torch.enable_grad() if trains else torch.no_grad():
        inputs = [value.detach().requires_grad_(value.is_floating_point() and trains) for value in values]
        read = {
            name: weights[name].detach().to(_dtype(rank, name)).requires_grad_(trains and name in trainable)
            for name in spec.parameters
        }
        loss = batch_loss(rank.program)(inputs, read, rank.constants, sizes)
        differentiated = [tensor for tensor in (*inputs, *read.values()) if tensor.requires_grad]
        found_gradients = (
            torch.autograd.grad(loss, differentiated, allow_unused=True)
            if loss.requires_grad and differentiated
            else ()
        )
    gradients = dict(zip(map(id, differentiated), found_gradients))
    return loss.detach(), [gradients.get(id(tensor)) for tensor in (*inputs, *read.values())]


def _dtype(rank: Rank, name: str) -> torch.dtype:
    """In which the model has a parameter: the loss is computed as the model computes it."""
    return next(parameter.dtype for parameter in rank.program.manifest.parameters if parameter.name == name)


def _hand_back(
    spec: BatchLossSpec,
    shapes: Sequence[Sequence[tuple[int, ...]]],
    shares: Sequence[Sequence[float]],
    gradients: Sequence[torch.Tensor | None],
    handed_over: Sequence[HandedOver],
    places: Sequence[int],
) -> None:
    """Each microbatch its part of the values' gradients; the first of all those of the parameters."""
    gradients_of: list[list[torch.Tensor | None]] = [[] for _ in handed_over]
    for index, (value, gradient) in enumerate(zip(spec.values, gradients)):
        rows = value.kind == "rows"
        parts = _split(value, gradient, [shape[index] for shape in shapes]) if rows and gradient is not None else ()
        for of_microbatch, place in zip(gradients_of, places):
            if gradient is None or not rows:
                of_microbatch.append(None if gradient is None else gradient * shares[index][place])
            else:
                of_microbatch.append(parts[place].reshape(shapes[place][index]))
    for of_microbatch, place, microbatch in zip(gradients_of, places, handed_over):
        of_microbatch += [gradient if place == 0 else None for gradient in gradients[len(spec.values) :]]
        microbatch.gradients = of_microbatch
        microbatch.values.clear()


def _split(spec: BatchValueSpec, gradient: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[torch.Tensor]:
    """The rows of each microbatch in the gradient of all."""
    return _apart(spec, gradient).split([shape[spec.dim] // spec.groups for shape in shapes], spec.dim + 1)
