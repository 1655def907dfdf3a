"""csc.balanced: a loader whose steps are divided by what each stage pays for their samples.

loader = csc.balanced(dataset, compiled, lengths="length", batch_size=128, collate=collate, shuffle=True)
for batch in loader:
    loss = compiled.train_step(batch)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from csc.balance import sample_costs
from csc.balance.loader import BalancedLoader, Collation, Counted, Decider, Delivery, EpochOrder, counted_entries
from csc.balance.sample_costs import Costs, Lengths, read
from csc.driver.compiled import CompiledModel
from csc.errors import InputError
from csc.planning.assign.portfolio import Shape
from csc.planning.assign.step import BatchLayout, Size

OWN = ("batch_sampler", "collate_fn", "in_order")  # of the DataLoader, and not to be given here


def balanced(
    dataset: Any,
    compiled: CompiledModel,
    *,
    lengths: Any,
    batch_size: int,
    collate: Callable[..., Mapping[str, Any]],
    multiple: int = 64,
    sampler: Iterable[int] | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> BalancedLoader:
    """A loader for `compiled.train_step` that divides the samples of each step so that the step is short.

    The sampler alone decides which samples a step has. csc decides from lengths which replica and microbatch gets each
    sample, and in which order. It does so in the DataLoader's workers, and equally on every rank; each process loads
    and collates the samples of its own replica. What samples cost each stage is measured once, by tracing a few of
    them: all ranks call this.

    Args:
        dataset: Has `len` and `dataset[i]`, as Hugging Face's data sets do.
        compiled: What `csc.compile` returned.
        lengths: For each sample its tokens (positions in the language model) and the units that encoders pay for
            (tiles, images, frames): a dict of columns, {"tokens": [...], "tiles": [...]}, or names of the data set's
            columns in their place; one column alone, of tokens; or a function from a sample's index to such a dict or a
            number.
        batch_size: Samples of a step, over all replicas and microbatches.
        collate: Makes a microbatch of a list of samples: one row for each, padded, or all in one row. A second
            parameter receives the width of the rows in tokens; without one it pads to `multiple` itself.
        multiple: Widths are multiples of this number of tokens. Each size of microbatches is a program.
        sampler: Yields the indices of the samples; None: in order, or as `shuffle` says.
        shuffle: Take another order in each epoch.
        seed: Decides the orders of `shuffle`.
        drop_last: Leave out a last step with fewer samples.
        **options: Options of torch's DataLoader: num_workers, pin_memory, prefetch_factor, ...

    Returns:
        A loader whose items are steps for `compiled.train_step`.

    Raises:
        InputError: Lengths are invalid or differ from those of the collated samples, or a step cannot fill all
            microbatches.
    """
    mesh, microbatches = compiled.options.mesh, compiled.options.microbatches
    count = _samples_of(dataset)
    table = read(lengths, dataset)
    _check_numbers(batch_size, multiple, mesh.dp * microbatches, options)
    batch_size, multiple = int(batch_size), int(multiple)
    order = EpochOrder(count, sampler, shuffle, seed)
    _check_last(order.length(), batch_size, drop_last, mesh.dp, microbatches)
    collation = Collation(dataset, collate)

    def make() -> dict[str, bytes]:
        return {"measured": json.dumps(_measured(compiled, table, collation, multiple, batch_size).to_json()).encode()}

    measured = _Measured.from_json(json.loads(compiled.inspected.of_first(make)["measured"]))
    decider = _decider(compiled, table, measured, multiple)
    replicas = [compiled.dp_rank] if compiled.dp_size > 1 else list(range(decider.replicas))
    return BalancedLoader(
        Delivery(collation, decider, replicas, measured.counted), order, batch_size, drop_last, options
    )


@dataclass(frozen=True)
class _Measured:
    """What the first rank finds out for all. examples, shapes: as a Decider has them."""

    costs: Costs
    packed: bool
    counted: tuple[Counted, ...]
    examples: Mapping[Size, tuple[int, ...]]
    shapes: tuple[Shape, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "costs": sample_costs.to_json(self.costs), "packed": self.packed,
            "counted": [vars(counted_entry) for counted_entry in self.counted],
            "examples": [[list(size), list(group)] for size, group in self.examples.items()],
            "shapes": [list(shape) for shape in self.shapes],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> _Measured:
        counted = tuple(Counted(**entry) for entry in data["counted"])
        examples = {tuple(size): tuple(group) for size, group in data["examples"]}
        shapes = tuple(map(tuple, data["shapes"]))
        return cls(sample_costs.from_json(data["costs"]), data["packed"], counted, examples, shapes)


def _measured(
    compiled: CompiledModel, table: Lengths, collation: Collation, multiple: int, batch_size: int
) -> _Measured:
    first = [0, 1] if len(table) > 1 else [0]
    packed = collation.is_packed(first, int(table.tokens[first].sum()))
    layout = BatchLayout(table.tokens, table.units, packed, multiple)
    batches: list[tuple[list[int], dict[str, Any]]] = []

    def collated(group: Any) -> dict[str, Any]:
        batch = collation.checked(group, table, packed, layout.size(group)[-1], ())
        batches.append((list(group), batch))
        return batch

    typical = batch_size / (compiled.options.mesh.dp * compiled.options.microbatches)
    costs = sample_costs.measured(compiled, layout, table.names, collated, typical)
    counted = counted_entries([batch for _, batch in batches], [group for group, _ in batches], table)
    measured = _Measured(costs, packed, counted, {}, ())
    decider = _decider(compiled, table, measured, multiple).with_shapes(batch_size).with_sizes(batch_size)
    return replace(measured, examples=decider.examples, shapes=decider.shapes)


def _decider(compiled: CompiledModel, table: Lengths, measured: _Measured, multiple: int) -> Decider:
    options = compiled.options
    return Decider(
        table,
        measured.costs,
        measured.packed,
        options.mesh.dp,
        options.microbatches,
        multiple,
        measured.examples,
        measured.shapes,
    )


def _samples_of(dataset: Any) -> int:
    """How many there are. InputError for what is no dataset with numbers."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InputError(
            f"a {type(dataset).__name__} cannot be asked for its samples by number", "csc.balanced",
            "give a dataset with __len__ and __getitem__; of a stream, balance what a buffer of it holds",
        )  # fmt: skip
    count = len(dataset)
    if not count:
        raise InputError("the dataset has no samples", "csc.balanced", "look at where it is read from")
    return count


def _check_numbers(batch_size: int, multiple: int, least: int, options: Mapping[str, Any]) -> None:
    for name, value in (("batch_size", batch_size), ("multiple", multiple)):
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name} is {value!r}", "csc.balanced", "pass a whole number of at least 1")
    if batch_size < least:
        raise InputError(
            f"batch_size is {batch_size}, and a step has {least} microbatches, of all replicas together",
            "csc.balanced", f"take {least} samples a step or more, or compile for fewer microbatches",
        )  # fmt: skip
    wrong = [name for name in OWN if name in options]
    if wrong:
        raise InputError(
            f"{wrong[0]} is given, and which samples make a batch is what csc.balanced decides", "csc.balanced",
            "say it with sampler=, shuffle=, batch_size= and collate=",
        )  # fmt: skip
    nothing: Any = [0]
    try:
        DataLoader(nothing, **options)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"torch's DataLoader takes no such options: {error}", "csc.balanced",
            f"look at {', '.join(options)}, which are handed on to it",
        ) from None  # fmt: skip


def _check_last(count: int, batch_size: int, drop_last: bool, replicas: int, microbatches: int) -> None:
    """InputError if an epoch has no step, or its last one does not fill its microbatches."""
    least = replicas * microbatches
    left = count % batch_size
    if drop_last and count < batch_size:
        raise InputError(
            f"an epoch has {count} samples, and a step {batch_size}: with drop_last there is none", "csc.balanced",
            "take smaller steps, or more samples",
        )  # fmt: skip
    if left and not drop_last and left < least:
        raise InputError(
            f"the last step of an epoch has {left} of {batch_size} samples, for {least} microbatches ({replicas} "
            f"replicas x {microbatches})", "csc.balanced", "pass drop_last=True, or another batch_size",
        )  # fmt: skip
