"""The entries of a batch beside those of the example that a model was compiled for.

check_entries(example, batch, model)        InputError for other keys, dtypes or plain values
fullest(microbatches), fullest_first(...)   by their numbers of entries
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from csc.capture.batch import split_batch
from csc.driver.belonging import kind_of, token_ids
from csc.errors import InputError

Batch = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def check_entries(example: Batch, batch: Batch, model: nn.Module) -> None:
    """Each microbatch of a list, or the batch. What the model's own `check_batch` raises is raised."""
    expected, extra = split_batch(fullest(example) if isinstance(example, (list, tuple)) else example)
    for microbatch in batch if isinstance(batch, (list, tuple)) else [batch]:
        found, other = split_batch(microbatch)
        for name in expected.keys() | found.keys():
            if name not in found and not _may_lack(found, expected, name):
                raise InputError(f"the batch has no entry {name!r}", "batch", _keys_remedy(expected))
            if name not in expected:
                raise InputError(
                    f"the batch has an entry {name!r} that the example had not", "batch", _keys_remedy(expected)
                )
            if name in found and found[name].dtype != expected[name].dtype:
                raise InputError(
                    f"the batch entry {name!r} is {found[name].dtype}, the example's was {expected[name].dtype}",
                    "batch", f"convert it with .to({expected[name].dtype}), or compile with such an example",
                )  # fmt: skip
        if other.keys() != extra.keys() or any(repr(other[name]) != repr(extra[name]) for name in extra):
            changed = [name for name in extra if name in other and _is_number(other[name]) and _is_number(extra[name])]
            changed = [name for name in changed if repr(other[name]) != repr(extra[name])]
            as_tensors = ", ".join(f"{name!r}: torch.tensor({other[name]!r})" for name in changed)
            raise InputError(
                f"the batch's plain values are {other!r}, the example's were {extra!r}", "batch",
                "values that are no tensors are compiled in: "
                + (f"give a number that changes from batch to batch as a tensor, {{{as_tensors}}}, in the example too "
                   "(one program serves all its values); or " if changed else "")
                + "compile again with an example that has these",
            )  # fmt: skip
        _check_lacking(expected.keys() - found.keys(), found, model)
        own = getattr(model, "check_batch", None)
        if callable(own):
            own({**found, **other})


def fullest_first(microbatches: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those with the most entries first: a program for the others runs beside one for them."""
    return sorted(microbatches, key=lambda one: -len(one))


def fullest(microbatches: Sequence[Any]) -> Any:
    """The first one with the most entries."""
    return max(microbatches, key=len)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _may_lack(found: Mapping[str, Any], expected: Mapping[str, Any], name: str) -> bool:
    """Whether an entry may be absent: of images, videos or sounds, of which the batch has no entry at all."""
    kind = kind_of(name)
    return kind is not None and not any(other in found and kind_of(other) == kind for other in expected)


def _check_lacking(names: Set[str], found: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """InputError if the text has places for what a batch lacks: the model would read them as words."""
    ids = found.get("input_ids")
    tokens = token_ids(model)
    for name in sorted(names):
        token = tokens.get(kind_of(name) or "")
        places = 0 if ids is None or token is None else int((ids == token).sum())
        if places:
            raise InputError(
                f"the batch has no entry {name!r}, and the text has {places} placeholders for it", "batch",
                f"add it, or leave out the placeholders (token {token})",
            )  # fmt: skip


def _keys_remedy(expected: Mapping[str, Any]) -> str:
    return f"give the entries of the example: {', '.join(sorted(expected))}; or compile with another example"
