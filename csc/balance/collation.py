"""Groups of samples as microbatches, and whether they are what their lengths say.

Terms
  packed    a microbatch has one row with all its samples; else a row for each, padded
  width     of a microbatch: the length of its rows, as the assignment counted on it
  counted   an entry whose first dimension is a multiple of the units of a kind: pixels by tiles, patches, frames

    collation = Collation(dataset, collate)
    collation.batch(indices) -> microbatch                 as it comes
    collation.checked(indices, lengths, layout, width)     InputError names the sample whose lengths are others
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from csc.balance.lengths import Lengths
from csc.errors import InputError

TOKENS = ("input_ids", "labels", "decoder_input_ids", "attention_mask")  # whose second dimension is positions


@dataclass(frozen=True)
class Counted:
    """An entry that has `factor` rows for each unit of a kind."""

    entry: str
    kind: int
    factor: int


class Collation:
    """collate: from a list of samples to a batch, and if it takes a second argument, of the width that this says."""

    def __init__(self, dataset: Any, collate: Callable[..., Any]) -> None:
        self._dataset = dataset
        self._collate = collate
        self.takes_width = _takes_two(collate)

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Of the dataset, by its `__getitems__` if it has one (as Hugging Face's do)."""
        many = getattr(self._dataset, "__getitems__", None)
        return list(many(list(indices))) if callable(many) else [self._dataset[index] for index in indices]

    def batch(self, indices: Sequence[int], width: int | None = None) -> dict[str, Any]:
        """A microbatch of these samples. InputError if collate makes none."""
        return self._made(indices, self.samples(indices), width)

    def _made(self, indices: Sequence[int], samples: list[Any], width: int | None) -> dict[str, Any]:
        made = self._collate(samples, width) if self.takes_width else self._collate(samples)
        if not isinstance(made, Mapping) and not hasattr(made, "items"):
            raise InputError(
                f"collate gave a {type(made).__name__} for samples {_listed(indices)}", "collate",
                "return a mapping with the model's entries",
            )  # fmt: skip
        return dict(made.items())

    def is_packed(self, indices: Sequence[int], width: int) -> bool:
        """Whether these two samples share a row."""
        rows, _ = shape_of(self.batch(indices, width))
        if rows not in (1, len(indices)):
            raise InputError(
                f"collate gave {rows} rows of tokens for {len(indices)} samples", "collate",
                "give each sample a row, or all of them one",
            )  # fmt: skip
        return rows == 1

    def checked(
        self, indices: Sequence[int], lengths: Lengths, packed: bool, width: int, counted: Sequence[Counted]
    ) -> dict[str, Any]:
        """The microbatch of these samples, `width` wide. InputError for a sample that is not as long as it should be or
        has not as many units.
        """
        samples = self.samples(indices)
        self._refuse_longer(indices, samples, lengths)
        made = self._made(indices, samples, width)
        if shape_of(made) != (1 if packed else len(indices), width):
            raise self._wrong(indices, lengths, packed, width, shape_of(made))
        for one in counted:
            expected = one.factor * int(lengths.units[list(indices), one.kind].sum())
            rows = len(made[one.entry]) if one.entry in made else expected  # a rank may leave out what it does not read
            if rows != expected:
                raise InputError(
                    f"samples {_listed(indices)} make {rows} rows of {one.entry!r}, and {expected} by their "
                    f"{lengths.names[one.kind]}{self._whose(indices, lengths, one)}", "lengths",
                    "let lengths say what the dataset has; an order or a preprocessing may have changed since",
                )  # fmt: skip
        return made

    def _whose(self, indices: Sequence[int], lengths: Lengths, one: Counted) -> str:
        """The sample that has other units than it should."""
        for index in indices:
            alone = self.batch([index], int(lengths.tokens[index]))
            rows = len(alone[one.entry]) if one.entry in alone else 0
            if rows != one.factor * int(lengths.units[index, one.kind]):
                return f" (sample {index} has {rows} rows for {lengths.units[index, one.kind]:g})"
        return ""

    def _wrong(
        self, indices: Sequence[int], lengths: Lengths, packed: bool, width: int, found: tuple[int, int]
    ) -> InputError:
        """What to say of a microbatch of another size: which of its samples is to blame."""
        for index in indices:
            own = int(lengths.tokens[index])
            _, alone = shape_of(self.batch([index], own))
            if alone < own or (self.takes_width and alone != own):
                return _other_length(index, alone, own)
        rows = 1 if packed else len(indices)
        return InputError(
            f"collate made {found[0]} x {found[1]} tokens of samples {_listed(indices)}, and {rows} x {width} were "
            "expected from their lengths", "collate",
            "let collate take the width as its second argument and pad to that, or pad to `multiple` itself, or pass "
            "multiple=1",
        )  # fmt: skip

    def _refuse_longer(self, indices: Sequence[int], samples: Sequence[Any], lengths: Lengths) -> None:
        """InputError for a sample that shows more tokens than it should have: a collate might cut it in silence."""
        for index, sample in zip(indices, samples):
            ids: Any = sample.get("input_ids") if isinstance(sample, Mapping) else None
            if hasattr(ids, "__len__") and getattr(ids, "ndim", 1) == 1 and len(ids) > lengths.tokens[index]:
                raise _other_length(index, len(ids), int(lengths.tokens[index]))


def _other_length(index: int, found: int, told: int) -> InputError:
    return InputError(
        f"sample {index} has {found} tokens, and {told} by its lengths", "lengths",
        "let lengths say how many positions a sample takes in the language model, its images' among them",
    )  # fmt: skip


def shape_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and width of a batch's tokens. InputError if it has none."""
    named = [batch[name] for name in TOKENS if isinstance(batch.get(name), torch.Tensor)]
    others = [one for one in batch.values() if isinstance(one, torch.Tensor) and not one.is_floating_point()]
    for one in (*named, *others):
        if one.dim() == 2:
            return one.shape[0], one.shape[1]
    raise InputError(
        "the batch that collate makes has no entry of tokens, whole numbers by row and position", "collate",
        "name the token ids input_ids, or pass a list of microbatches to train_step yourself",
    )  # fmt: skip


def counted_entries(
    batches: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[int]], lengths: Lengths
) -> tuple[Counted, ...]:
    """The entries of these batches that count units, as all of them show."""
    found = []
    for name in batches[0]:
        sizes = [len(b[name]) for b in batches if isinstance(b.get(name), torch.Tensor) and b[name].dim()]
        if len(sizes) < len(batches) or not batches[0][name].is_floating_point():
            continue
        for kind in range(lengths.units.shape[1]):
            units = [int(lengths.units[list(group), kind].sum()) for group in groups]
            factors = {size // unit if unit and not size % unit else 0 for size, unit in zip(sizes, units)}
            if len(factors) == 1 and 0 not in factors:
                found.append(Counted(name, kind, factors.pop()))
    return tuple(found)


def _takes_two(collate: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(collate).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and one.default is inspect.Parameter.empty for one in parameters) > 1


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
