"""Masks by sizes, documents, media and bitfields: every builder returns a `csc.kernels.mask.Mask`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from csc.errors import InputError
from csc.kernels.mask import EVERYTHING, Mask
from csc.masks.combine import MOST_CLASSES, begins, bits, bounds, bounds_of, compact, few, returns

# --- What every builder asks of its inputs before it looks at them, and where in a batch something is wrong ----------
#
# Terms: a *row* is one entry of the batch, a *position* a token in it.


Numbers = torch.Tensor | Sequence[Any]  # a tensor, or lists of numbers
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def row_major(value: Numbers, name: str, what: str = "integers [B, T]") -> torch.Tensor:
    """int64 [B, T] of integers or bools. InputError for floats and other shapes."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"it is no table of {what}: {error}", name, "Rows must be equally long") from error
    if tensor.dtype not in INTEGERS:
        raise InputError(f"its dtype is {tensor.dtype}, not {what}", name, f"Convert it: {name}.long()")
    if tensor.dim() == 1:
        tensor = tensor[None]
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise InputError(f"its shape is {list(tensor.shape)}, not [B, T] with at least one token", name)
    return tensor.long()


def positive(value: int, name: str) -> int:
    """A size of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r}, not a whole number of at least 1")
    return value


def refuse_where(wrong: torch.Tensor, name: str, say: Callable[[int, int], str], remedy: str = "") -> None:
    """InputError at the first row and position where `wrong` bool [B, T] holds; `say(row, position)` is what."""
    if bool(wrong.any()):
        row, position = (int(i) for i in wrong.nonzero()[0])
        raise InputError(say(row, position), f"{name}, row {row}, position {position}", remedy)


def same_shape(name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """InputError unless both are [B, T] of the same sizes. A batch of 1 goes with any batch."""
    if value.shape[1] != other.shape[1] or len({*value.shape[:1], *other.shape[:1]} - {1}) > 1:
        raise InputError(
            f"{name} is {list(value.shape)} and {other_name} is {list(other.shape)}",
            remedy="Both have a number for every token of the same batch",
        )


# --- Masks that need sizes only: causal, bidirectional, prefix, sliding window ---------------------------------------
#
# All of one rule, without kinds.


def ranged(lo: torch.Tensor, hi: torch.Tensor, keys: int) -> Mask:
    """A mask of one rule: query q sees the keys [lo, hi).

    Args:
        lo: Integers that broadcast to [B, Tq].
        hi: The same.
        keys: How many there are.
    """
    lo, hi = torch.broadcast_tensors(lo, hi)
    return Mask(torch.stack([lo, hi], -1).to(torch.int32)[:, None], None, None, keys)


def causal(tokens: int) -> Mask:
    """Query q sees keys 0 to q.

    Args:
        tokens: T: queries, and keys.
    """
    slot = torch.arange(positive(tokens, "tokens"))[None]
    return ranged(torch.zeros_like(slot), slot + 1, tokens)


def bidirectional(queries: int, keys: int | None = None) -> Mask:
    """Every query sees every key.

    Args:
        queries: How many.
        keys: How many; None: as many as queries.
    """
    positive(queries, "queries")
    keys = queries if keys is None else positive(keys, "keys")
    zero = torch.zeros(1, queries, dtype=torch.int64)
    return ranged(zero, zero + keys, keys)


def prefix(tokens: int, lengths: int | Numbers) -> Mask:
    """Causal, and the first tokens are seen by all.

    Args:
        tokens: T.
        lengths: How many are seen by all: one number, or one for every row [B].

    Raises:
        InputError: A prefix is longer than the row.
    """
    slot = torch.arange(positive(tokens, "tokens"))[None]
    rows = row_major([lengths] if isinstance(lengths, int) else lengths, "lengths", "integers [B]").view(-1, 1)
    refuse_where(
        (rows < 0) | (rows > tokens), "lengths", lambda b, _: f"a prefix of {int(rows[b, 0])} in {tokens} tokens"
    )
    return ranged(torch.zeros_like(slot), torch.maximum(slot + 1, rows), tokens)


def window(tokens: int, width: int, symmetric: bool = False) -> Mask:
    """q - k < width and k <= q: a sliding window.

    Args:
        tokens: T.
        width: Keys, the token itself with them, as `sliding_window` of HF configurations counts.
        symmetric: |q - k| < width instead.

    Raises:
        InputError: width is less than 1.
    """
    slot = torch.arange(positive(tokens, "tokens"))[None]
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise InputError(f"a window of width {width!r}", remedy="1 is a token that sees itself only")
    ahead = width if symmetric else 1
    return ranged((slot - width + 1).clamp(min=0), (slot + ahead).clamp(max=tokens), tokens)


# --- Several documents in one row, and padding: who belongs together, and who is nobody ------------------------------
#
# Terms
#   document ids     int64 [B, T]: tokens with the same number are one document, which is contiguous; negative: padding
#   padding          tokens that nobody sees and that see nothing: what a model computes for them is ignored
#
# Documents only narrow ranges, so they cost neither rules nor kinds. Padding does the same where the tokens of every
# row lie together; elsewhere a key that is padding gets kind 0.


def ids_of_lengths(lengths: Sequence[Any] | torch.Tensor, tokens: int | None = None) -> torch.Tensor:
    """Document ids of lengths: 0, 0, .., 1, 1, ...

    Args:
        lengths: Of one row, or a list for every row.
        tokens: What every row sums to; None: what the first one sums to.

    Returns:
        int64 [B, T].

    Raises:
        InputError: A row sums to something else; it is named.
    """
    listed = lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths
    rows = [listed] if not listed or isinstance(listed[0], int) else listed
    rows_of_ids = []
    for b, row in enumerate(rows):
        sizes = torch.tensor([positive(int(n), f"row {b}: length {i}") for i, n in enumerate(row)])
        if tokens is None:
            tokens = int(sizes.sum())
        if int(sizes.sum()) != tokens:
            raise InputError(
                f"the lengths of documents sum to {int(sizes.sum())}, and the row has {tokens} tokens",
                f"lengths, row {b}",
                "Name padding at the end as a document of its own, or use document ids with -1 for padding",
            )
        rows_of_ids.append(torch.repeat_interleave(torch.arange(len(sizes)), sizes))
    if not tokens:
        raise InputError("there is no document", "lengths")
    return torch.stack(rows_of_ids)


def ids_of_positions(position_ids: Numbers) -> torch.Tensor:
    """Document ids of position ids that start again at 0, as HF packs documents.

    Args:
        position_ids: [B, T] or [T]; inside a document they go up by 1.

    Returns:
        int64 [B, T].

    Raises:
        InputError: A position neither follows the one before nor starts a document.
    """
    positions = row_major(position_ids, "position_ids")
    step = positions[:, 1:] - positions[:, :-1]
    restart = torch.cat([torch.ones_like(positions[:, :1], dtype=torch.bool), step != 1], 1)
    refuse_where(
        restart & (positions != 0),
        "position_ids",
        lambda b, t: f"{int(positions[b, t])} neither follows the position before it nor starts a document",
        "Documents start at 0 and go up by 1. Positions of another kind do not say where documents end: "
        "give document ids",
    )
    return restart.cumsum(1) - 1


def checked_ids(ids: Numbers, name: str = "document ids") -> torch.Tensor:
    """int64 [B, T]. InputError where a document goes on after another one has begun. Padding may come anywhere."""
    table = row_major(ids, name)
    refuse_where(
        returns(table) & (table >= 0),
        name,
        lambda b, t: f"document {int(table[b, t])} goes on after another one",
        "The tokens of a document lie together",
    )
    return table


def documents(ids: Numbers, bidirectional: bool = False) -> Mask:
    """Every token sees its own document.

    Args:
        ids: Document ids [B, T]; a document lies together, a negative number is padding.
        bidirectional: Later tokens too.

    Raises:
        InputError: A document goes on after another one has begun.
    """
    table = checked_ids(ids)
    lo, hi = bounds(table)
    slot = torch.arange(table.shape[1], device=table.device)
    return ranged(lo, torch.where(table < 0, lo, hi if bidirectional else slot + 1), table.shape[1])


def within(mask: Mask, ids: Numbers) -> Mask:
    """The part of a mask that stays inside documents.

    Args:
        mask: Over T x T.
        ids: Document ids [B, T].

    Raises:
        InputError: The sizes differ, or a document goes on after another one.
    """
    table = checked_ids(ids)
    _fits(mask, table, "document ids")
    lo, hi = bounds(table)
    return _narrowed(mask, lo, torch.where(table < 0, lo, hi))


def padding(attention_mask: Numbers, causal: bool = False) -> Mask:
    """Every token sees every token that is there.

    Args:
        attention_mask: [B, T], 0 where padding is, else 1.
        causal: Up to itself.

    Raises:
        InputError: A value is neither 0 nor 1.
    """
    present = row_major(attention_mask, "attention_mask")
    slot = torch.arange(present.shape[1], device=present.device)[None]
    hi = slot + 1 if causal else torch.full_like(slot, present.shape[1])
    return padded(ranged(torch.zeros_like(slot), hi, present.shape[1]), present)


def padded(mask: Mask, attention_mask: Numbers) -> Mask:
    """A mask without padding, which neither sees nor is seen.

    Args:
        mask: Over T x T.
        attention_mask: [B, T] of 0 and 1.

    Raises:
        InputError: A value is neither 0 nor 1, or the sizes differ.
    """
    table = row_major(attention_mask, "attention_mask")
    refuse_where(
        (table != 0) & (table != 1),
        "attention_mask",
        lambda b, t: f"{int(table[b, t])} says neither padding (0) nor token (1)",
        "A mask of document numbers goes to csc.masks.within",
    )
    _fits(mask, table, "attention_mask")
    present = table != 0
    if not bool((begins(table) & present).sum(1).gt(1).any()):  # the tokens of every row lie together
        lo, hi = bounds_of(begins(table))
        first = torch.where(present, lo, 0).amax(1, keepdim=True)
        behind = torch.where(present, hi, 0).amax(1, keepdim=True)
        return _narrowed(mask, first.expand_as(lo), torch.where(present, behind, first))
    batch = max(mask.batch, table.shape[0])
    narrowed = _narrowed(mask, torch.zeros_like(table), table * mask.keys)
    kinds = torch.where(present, mask.all_kinds(), 0).expand(batch, -1)
    return Mask(narrowed.ranges, narrowed.all_admits(), kinds, mask.keys)


def _fits(mask: Mask, table: torch.Tensor, name: str) -> None:
    if mask.queries != mask.keys:
        raise InputError(f"the mask is {mask.queries} x {mask.keys}, and {name} are of one sequence", name)
    same_shape("the mask", mask.ranges[:, 0, :, 0], name, table)


def _narrowed(mask: Mask, lo: torch.Tensor, hi: torch.Tensor) -> Mask:
    """Every rule cut to [lo, hi) of its query, int64 [B, T] each."""
    batch = max(mask.batch, lo.shape[0])
    ranges = torch.stack(
        [
            torch.maximum(mask.ranges[..., 0], lo[:, None].to(torch.int32)),
            torch.minimum(mask.ranges[..., 1], hi[:, None].to(torch.int32)),
        ],
        -1,
    )
    admits = None if mask.admits is None else mask.admits.expand(batch, -1, -1)
    kinds = None if mask.kinds is None else mask.kinds.expand(batch, -1)
    return Mask(ranges, admits, kinds, mask.keys)


# --- Cross-attention: queries of one sequence, keys of another (text over the features of images or audio) -----------


def cross(ranges: Numbers, keys: int) -> Mask:
    """Query q of row b sees the keys ranges[b, q] = [lo, hi).

    Args:
        ranges: Integers [B, Tq, 2] or [Tq, 2]; lo == hi: none.
        keys: How many there are.

    Raises:
        InputError: A range leaves the keys.
    """
    table = torch.as_tensor(ranges)
    table = table[None] if table.dim() == 2 else table
    if table.dtype not in INTEGERS or table.dim() != 3 or table.shape[-1] != 2 or 0 in table.shape:
        raise InputError(f"{table.dtype} {list(table.shape)} is not integers [B, Tq, 2]", "ranges of keys")
    lo, hi = table.long().unbind(-1)
    positive(keys, "keys")
    refuse_where(
        (lo < 0) | (lo > hi) | (hi > keys),
        "ranges of keys",
        lambda b, q: f"[{int(lo[b, q])}, {int(hi[b, q])}) is no range of the {keys} keys",
    )
    return ranged(lo, hi, keys)


def cross_documents(query_ids: Numbers, key_ids: Numbers) -> Mask:
    """A query sees the keys with its number.

    Args:
        query_ids: [B, Tq], in any order; a negative number, and one without keys, sees nothing.
        key_ids: [B, Tk]; the keys of a number lie together; negative ones are unseen.

    Raises:
        InputError: The keys of a number lie apart.
    """
    queries, table = torch.as_tensor(query_ids), checked_ids(key_ids, "key_ids")
    if queries.dtype not in INTEGERS or queries.dim() not in (1, 2) or 0 in queries.shape:
        raise InputError(f"{queries.dtype} {list(queries.shape)} is not integers [B, Tq]", "query_ids")
    queries = queries.long().view(-1, queries.shape[-1])
    same_shape("query_ids", queries[:, :1], "key_ids", table[:, :1])
    batch = max(len(queries), len(table))
    queries, table = queries.expand(batch, -1), table.expand(batch, -1)
    # Rows side by side: a number of row b becomes b * span + number, so one sorted table of runs serves all.
    low = min(int(queries.min()), int(table.min()))
    span = max(int(queries.max()), int(table.max())) - low + 1
    offset = torch.arange(batch, device=table.device)[:, None] * span - low
    first, behind = bounds(table)
    start = begins(table) & (table >= 0)
    numbers, order = (table + offset)[start].sort()
    lo, hi = first[start][order], behind[start][order]
    if not len(numbers):
        return ranged(torch.zeros_like(queries), torch.zeros_like(queries), table.shape[1])
    place = torch.searchsorted(numbers, queries + offset).clamp(max=len(numbers) - 1)
    inside = (numbers[place] == queries + offset) & (queries >= 0)
    return ranged(torch.where(inside, lo[place], 0), torch.where(inside, hi[place], 0), table.shape[1])


# --- Text with images, audio and other media in it: who sees whom, said once per type of token -----------------------
#
# Terms
#   type        what a token is: 0 text, 1 to 62 media of some modality; negative: padding
#   span        tokens of one type and one span number, which lie together: one image, one clip
#   earlier     everything of the same document before a token (text) or before its span (media)
#
# Two rules at most: earlier tokens, and the own ones. Types are kinds only where a type is hidden or asked for by
# name.


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
    before, own_kinds, reach = (torch.tensor(column, device=table.device)[table + 1] for column in zip(*rules))
    span_lo = torch.where(media, span_lo, slot)  # a text token is a span of its own
    span_hi = torch.where(media, span_hi, slot + 1)
    earlier = torch.stack([lo, torch.where(padding, lo, span_lo)], -1)
    own_lo = torch.where(reach == _MODALITY, lo, span_lo)
    own_hi = torch.where(reach == _MODALITY, hi, torch.where(reach == _CAUSAL, slot + 1, span_hi))
    ranges = torch.stack([earlier, torch.stack([own_lo, torch.where(padding, own_lo, own_hi)], -1)], 1)
    kinds = (torch.ones_like(table) << table.clamp(min=0)).masked_fill(padding, 0)
    return compact(ranges, torch.stack([before, own_kinds], 1), kinds, table.shape[1])


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
    rules_found = [(0, 0, _SPAN)]
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
            rules_found.append((earlier, 1 << t, _MODALITY))
            continue
        # All that the own range holds is of this type: what else is admitted there is free to equal the first rule.
        own_kinds = earlier if earlier >> t & 1 else EVERYTHING if not earlier else 1 << t
        rules_found.append((earlier, own_kinds, _CAUSAL if rule.own == "causal" else _SPAN))
    return rules_found


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


# --- Cornstarch's masks: one int64 per token (arXiv 2503.11367) ------------------------------------------------------
#
# Terms: L = x & (2^62 - 1). Bit 0 is text, bits 1..61 are modalities, 0 is padding. Query q attends key k iff
#   - q is text (bit 0):  k <= q and (L_q & L_k) != 0. A text token carries the bits of the modalities that it may see
#   - q is not text:      L_q == L_k and L_q > 0, wherever k is
#
# Equality and intersection are both asked of the same numbers, so a kind is a different number, up to 63 of them, and
# a query admits the set of numbers that it attends.


LABEL = (1 << 62) - 1
TEXT_BIT = 1


def bitfields(fields: Numbers) -> Mask:
    """The mask of bitfields [B, T], exactly. One rule. InputError for more than 63 different labels."""
    labels = row_major(fields, "bitfields", "int64 [B, T]") & LABEL
    different = few(labels)
    different = different[different != 0]
    if len(different) > MOST_CLASSES:
        raise InputError(
            f"{len(different)} different labels, and {MOST_CLASSES} is the limit",
            "bitfields",
            "Images that must not see each other need no label each: csc.masks.spans tells spans apart by position",
        )
    tokens = labels.shape[1]
    slot = torch.arange(tokens, device=labels.device)
    padded = torch.cat([different.new_zeros(1), different])  # class 0 is padding: of kind 0, it sees nothing
    number = torch.searchsorted(padded, labels)
    meets = torch.where(
        (different[:, None] & TEXT_BIT) != 0, (different[:, None] & different) != 0, different[:, None] == different
    )
    nobody = different.new_zeros(1)
    kinds = torch.cat([nobody, torch.ones_like(different) << torch.arange(len(different), device=labels.device)])
    admits = torch.cat([nobody, bits(meets)])[number]
    hi = torch.where((labels & TEXT_BIT) != 0, slot + 1, tokens)
    return compact(torch.stack([torch.zeros_like(hi), hi], -1)[:, None], admits[:, None], kinds[number], tokens)
