"""Text with images, audio and other media in it: who sees whom, said once per type of token.

Terms
  type        what a token is: 0 text, 1 to 62 media of some modality; negative: padding
  span        tokens of one type and one span number, which lie together: one image, one clip
  earlier     everything of the same document before a token (text) or before its span (media)

    Sees(own, earlier, hidden)                              what tokens of one type see
    spans(types, span_ids, sees, documents) -> Mask
    tokens_of(tokens, placed) -> (types, span_ids)          int64 [B, T] each, from lists of (start, end, type)
    TEXT = 0

Two rules at most: earlier tokens, and the own ones. Types are kinds only where a type is hidden or asked for by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from csc.errors import InputError
from csc.kernels.mask import EVERYTHING, Mask
from csc.masks.checks import Numbers, refuse_where, row_major, same_shape
from csc.masks.combine import compact
from csc.masks.documents import checked_ids
from csc.masks.equal_runs import begins, bounds, bounds_of, returns

TEXT = 0
MOST_TYPES = 63


@dataclass(frozen=True)
class Sees:
    """What tokens of one type see.

    Attributes:
        own: "span": all of their own span; "modality": all tokens of their type in the document, later ones too;
            "causal": their own span up to themselves.
        earlier: "nothing", "text", "everything" (but hidden types), or the types that they see, hidden ones too.
        hidden: Tokens outside of the span do not see these, unless they name the type.
    """

    own: Literal["span", "modality", "causal"] = "span"
    earlier: Literal["nothing", "text", "everything"] | tuple[int, ...] = "nothing"
    hidden: bool = False


WORDS = Sees("causal", "everything")  # text, unless told otherwise


def spans(
    types: Numbers,
    span_ids: Numbers | None = None,
    sees: Mapping[int, Sees] | None = None,
    documents: Numbers | None = None,
) -> Mask:
    """The mask of typed tokens [B, T].

    Args:
        types: Int [B, T]: 0 is text, 1 to 62 are media, negative numbers padding.
        span_ids: [B, T], tells neighbouring spans of one type apart (text: any number); None: a run of a type is one
            span.
        sees: By type; media that are not named see their own span only, text all that is earlier and not hidden.
        documents: Document ids [B, T]; nothing sees beyond its document.

    Raises:
        InputError: A span is torn, or a type is too large.
    """
    table = row_major(types, "types")
    refuse_where(
        table >= MOST_TYPES, "types", lambda b, t: f"type {int(table[b, t])}, and the largest is {MOST_TYPES - 1}"
    )
    numbers = torch.zeros_like(table) if span_ids is None else row_major(span_ids, "span_ids")
    ids = torch.zeros_like(table) if documents is None else checked_ids(documents, "documents")
    same_shape("types", table, "span_ids", numbers)
    same_shape("types", table, "documents", ids)
    table, numbers, ids = torch.broadcast_tensors(table, numbers, ids)
    padding = (table < 0) | (ids < 0)
    table = table.masked_fill(padding, -1)
    inside = ids.masked_fill(padding, -1)
    if not bool((returns(inside) & ~padding).any()):  # padding at the ends of documents: ranges leave it out
        ids = inside
    media = table > TEXT
    start = begins(table) | begins(ids) | (media & begins(numbers))
    if span_ids is not None:
        _whole(table, numbers, ids, start)
    rules = _rules(sees or {}, [int(v) for v in table.unique() if v >= TEXT])
    span_lo, span_hi = bounds_of(start)
    lo, hi = bounds(ids)
    slot = torch.arange(table.shape[1], device=table.device)
    # By type: (admitted before, admitted of its own, how far the own rule reaches); one table lookup a tensor.
    before, own, reach = (torch.tensor(column, device=table.device)[table + 1] for column in zip(*rules))
    span_lo = torch.where(media, span_lo, slot)  # a text token is a span of its own
    span_hi = torch.where(media, span_hi, slot + 1)
    earlier = torch.stack([lo, torch.where(padding, lo, span_lo)], -1)
    own_lo = torch.where(reach == _MODALITY, lo, span_lo)
    own_hi = torch.where(reach == _MODALITY, hi, torch.where(reach == _CAUSAL, slot + 1, span_hi))
    ranges = torch.stack([earlier, torch.stack([own_lo, torch.where(padding, own_lo, own_hi)], -1)], 1)
    kinds = (torch.ones_like(table) << table.clamp(min=0)).masked_fill(padding, 0)
    return compact(ranges, torch.stack([before, own], 1), kinds, table.shape[1])


_SPAN, _CAUSAL, _MODALITY = 0, 1, 2


def _rules(sees: Mapping[int, Sees], present: Sequence[int]) -> list[tuple[int, int, int]]:
    """For padding and then every type up to the largest present: admitted earlier, admitted of the own, reach."""
    for key, value in sees.items():
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < MOST_TYPES:
            raise InputError(f"{key!r} is no type", "sees", f"Types are 0 (text) to {MOST_TYPES - 1}")
        if not isinstance(value, Sees):
            raise InputError(f"type {key} has {value!r}", "sees", "Give a csc.masks.Sees")
        if value.own not in ("span", "modality", "causal"):
            raise InputError(f"type {key} sees {value.own!r} of its own, not span, modality or causal", "sees")
    shown = sum(1 << t for t in present if not sees.get(t, WORDS).hidden)
    found = [(0, 0, _SPAN)]
    for t in range(max(present, default=0) + 1):
        rule = sees.get(t, WORDS if t == TEXT else Sees())
        if t == TEXT and rule.own != "causal":
            raise InputError(
                f"text sees {rule.own!r} of its own", "sees", "Text is causal: give it Sees('causal', ...)"
            )
        if t == TEXT and rule.hidden:
            raise InputError("text is hidden", "sees", "Only media can be")
        if isinstance(rule.earlier, tuple):
            if any(isinstance(other, bool) or other not in range(MOST_TYPES) for other in rule.earlier):
                raise InputError(f"type {t} sees {rule.earlier!r} before it", "sees", "Types are 0 (text) to 62")
            earlier = sum({1 << other for other in rule.earlier})
        elif rule.earlier in ("nothing", "text", "everything"):
            earlier = {"nothing": 0, "text": 1 << TEXT, "everything": shown}[rule.earlier]
        else:
            raise InputError(f"type {t} sees {rule.earlier!r} before it", "sees", "nothing, text, everything or types")
        if rule.own == "modality":
            found.append((earlier, 1 << t, _MODALITY))
            continue
        # All that the own range holds is of this type: what else is admitted there is free to equal the first rule.
        own = earlier if earlier >> t & 1 else EVERYTHING if not earlier else 1 << t
        found.append((earlier, own, _CAUSAL if rule.own == "causal" else _SPAN))
    return found


def _whole(table: torch.Tensor, numbers: torch.Tensor, ids: torch.Tensor, start: torch.Tensor) -> None:
    """InputError if a span goes on after something else, or over the end of its document."""
    run = start.cumsum(1)
    # A span's number and type as one number; text and padding get numbers of their own, one per run.
    label = torch.where(table > TEXT, numbers * MOST_TYPES + table, -run)
    refuse_where(
        returns(label) & (table > TEXT),
        "span_ids",
        lambda b, t: f"span {int(numbers[b, t])} of type {int(table[b, t])} goes on after something else",
        "The tokens of a span lie together, and spans of one type have different numbers in a row",
    )
    # `returns` looks at runs of labels, and a document may end inside of one.
    refuse_where(
        begins(ids) & ~begins(label) & (table > TEXT),
        "span_ids",
        lambda b, t: f"a new document starts inside of span {int(numbers[b, t])} of type {int(table[b, t])}",
    )


def tokens_of(tokens: int, placed: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Types and span numbers of spans that lie in text.

    Args:
        tokens: T.
        placed: Spans (start, end, type) of one row, or a list of them for every row; the rest is text.

    Returns:
        (types, span_ids), int64 [B, T] each; span numbers count up from 1.

    Raises:
        InputError: Spans overlap or leave the row.
    """
    single = all(len(item) == 3 and isinstance(item[0], int) for item in placed)
    rows = [placed] if single else placed
    types = torch.zeros(len(rows), tokens, dtype=torch.int64)
    numbers = torch.zeros_like(types)
    for b, row in enumerate(rows):
        behind, last = 0, None
        for i, (start, end, kind) in sorted(enumerate(row), key=lambda item: item[1]):
            where = f"row {b}, span {i} at [{start}, {end})"
            if not 0 <= start < end <= tokens:
                raise InputError(f"it is empty or outside of the {tokens} tokens", where)
            if not TEXT < kind < MOST_TYPES:
                raise InputError(f"type {kind} is no media", where, f"Types of media are 1 to {MOST_TYPES - 1}")
            if start < behind:
                raise InputError(f"it overlaps span {last}, which ends at {behind}", where)
            types[b, start:end], numbers[b, start:end] = kind, i + 1
            behind, last = end, i
    return types, numbers
