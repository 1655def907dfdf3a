"""The masks that csc's tables and pictures use, by name, and masks as short texts, for commands and notes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from csc.errors import InputError
from csc.kernels.mask import Mask
from csc.masks.builders import (
    LABEL,
    TEXT,
    Sees,
    bidirectional,
    bitfields,
    causal,
    documents,
    ids_of_lengths,
    ids_of_positions,
    padding,
    positive,
    prefix,
    spans,
    tokens_of,
    window,
    within,
)
from csc.masks.combine import few

# --- The eleven masks that csc's tables and pictures use, by name, for any number of tokens --------------------------
#
# Terms
#   media lengths   images 256, 576, 1024 or 2048 tokens; audio 150, 375, 750 or 1500; two images per clip
#   text lengths    lognormal around a median, sigma 0.8, from 16 to 2400
#   example         a mask with what its tokens are: for pictures, and to build the same batch again
#
# Equal arguments give equal masks (a torch.Generator of the seed). The last run is cut where the tokens end.


IMAGE, AUDIO, NOISED = 1, 2, 3
IMAGE_LENGTHS = (256, 576, 1024, 2048)
AUDIO_LENGTHS = (150, 375, 750, 1500)
GROUP = 562  # a second of video with its sound
GENERATED = 7 / 8  # share of images that are being generated

Placed = list[tuple[int, int, int]]  # spans (start, end, type), the rest is text


@dataclass(frozen=True)
class Example:
    """A mask of one row and what its tokens are."""

    mask: Mask
    types: torch.Tensor
    span_ids: torch.Tensor
    documents: torch.Tensor


class _Dice:
    """Lengths, one after the other, from one generator."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self) -> float:
        return float(torch.randn((), generator=self._generator, dtype=torch.float64))

    def share(self) -> float:
        """In [0, 1)."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def one_of(self, lengths: tuple[int, ...]) -> int:
        return lengths[int(self.share() * len(lengths))]

    def text(self, median: float = 300.0) -> int:
        return int(min(max(median * math.exp(0.8 * self.normal()), 16), 2400))


def example(name: str, tokens: int, seed: int = 0) -> Example:
    """The mask of that name. InputError for a name that is none of NAMES."""
    if name not in _BUILDERS:
        raise InputError(f"{name!r} is no named mask", remedy=f"There are {', '.join(NAMES)}")
    return _BUILDERS[name](positive(tokens, "tokens"), _Dice(seed))


def _interleaved(tokens: int, dice: _Dice, median: float = 300.0, start: int = 0) -> Placed:
    """Text, image, text, image, text, audio, and so on, from `start` on."""
    placed: Placed = []
    place = turn = 0
    while place < tokens:
        kind = (IMAGE, IMAGE, AUDIO)[turn % 3]
        place += dice.text(median)
        end = min(place + dice.one_of(AUDIO_LENGTHS if kind == AUDIO else IMAGE_LENGTHS), tokens)
        if place < end:
            placed.append((start + place, start + end, kind))
        place, turn = end, turn + 1
    return placed


def _cut(lengths: Iterator[int], tokens: int) -> list[int]:
    lengths_cut: list[int] = []
    left = tokens
    while left:
        lengths_cut.append(min(max(1, next(lengths)), left))
        left -= lengths_cut[-1]
    return lengths_cut


def _of_spans(tokens: int, placed: Placed, sees: dict[int, Sees], lengths: list[int] | None = None) -> Example:
    types, numbers = tokens_of(tokens, placed)
    ids = ids_of_lengths(lengths or [tokens])
    return Example(spans(types, numbers, sees, ids), types, numbers, ids)


def _of_text(mask: Mask, ids: torch.Tensor | None = None) -> Example:
    nothing = torch.zeros(1, mask.queries, dtype=torch.int64)
    return Example(mask, nothing, nothing, nothing if ids is None else ids)


def _all(sees: Sees) -> dict[int, Sees]:
    return {IMAGE: sees, AUDIO: sees}


def _causal(tokens: int, dice: _Dice) -> Example:
    return _of_text(causal(tokens))


def _prefix_lm(tokens: int, dice: _Dice) -> Example:
    """The first 3T/8 tokens are seen by all."""
    return _of_text(prefix(tokens, 3 * tokens // 8))


def _encoder_prepended(tokens: int, dice: _Dice) -> Example:
    """Vision to 0.40 T and audio to 0.55 T see themselves, text sees all before it."""
    vision, audio = int(0.40 * tokens), int(0.55 * tokens)
    placed = [(0, vision, IMAGE), (vision, audio, AUDIO)]
    return _of_spans(tokens, [run for run in placed if run[0] < run[1]], {})


def _interleaved_modality(tokens: int, dice: _Dice) -> Example:
    """All images see all images, all audio all audio."""
    return _of_spans(tokens, _interleaved(tokens, dice), _all(Sees("modality")))


def _interleaved_span(tokens: int, dice: _Dice) -> Example:
    """An image or clip sees itself."""
    return _of_spans(tokens, _interleaved(tokens, dice), _all(Sees("span")))


def _interleaved_prefix(tokens: int, dice: _Dice) -> Example:
    """An image or clip sees itself and all that is earlier."""
    return _of_spans(tokens, _interleaved(tokens, dice), _all(Sees("span", "everything")))


def _packed(tokens: int, dice: _Dice) -> Example:
    """Documents of lognormal length with images and clips that see themselves."""
    lengths = _cut((int(min(2500 * math.exp(dice.normal()), tokens / 4)) for _ in iter(int, 1)), tokens)
    placed: Placed = []
    place = 0
    for length in lengths:
        placed += _interleaved(length, dice, 200.0, place)
        place += length
    return _of_spans(tokens, placed, _all(Sees("span")), lengths)


def _audio_visual(tokens: int, dice: _Dice) -> Example:
    """Text to 0.05 T, groups of video and sound that see themselves and the past to 0.90 T, text."""
    start, end = int(0.05 * tokens), int(0.90 * tokens)
    placed = [(start_of_group, min(start_of_group + GROUP, end), IMAGE) for start_of_group in range(start, end, GROUP)]
    return _of_spans(tokens, placed, _all(Sees("span", "everything")))


def _of_documents(lengths: list[int]) -> Example:
    ids = ids_of_lengths(lengths)
    return _of_text(documents(ids), ids)


def _long_tail(tokens: int, dice: _Dice) -> Example:
    """Causal documents of 64 (1 + Pareto(.9)) tokens, at most half of all."""
    lengths = (int(min(64 * (1 - dice.share()) ** (-1 / 0.9), tokens / 2)) for _ in iter(int, 1))
    return _of_documents(_cut(lengths, tokens))


def _giant(tokens: int, dice: _Dice) -> Example:
    """A causal document of T/2 among documents of 256 to 1500."""
    lengths = _cut((256 + int(dice.share() * 1245) for _ in iter(int, 1)), max(tokens - tokens // 2, 1))
    if tokens > 1:
        lengths.insert(int(dice.share() * len(lengths)), tokens // 2)
    return _of_documents(lengths)


def _generation(tokens: int, dice: _Dice) -> Example:
    """Images see themselves and the past; those that are being generated (noised) are not seen later."""
    placed: Placed = []
    place = 0
    while place < tokens:
        place += dice.text()
        end = min(place + dice.one_of(IMAGE_LENGTHS), tokens)
        kind = NOISED if dice.share() < GENERATED else IMAGE
        if place < end:
            placed.append((place, end, kind))
        place = end
    return _of_spans(tokens, placed, {IMAGE: Sees("span", "everything"), NOISED: Sees("span", "everything", True)})


_BUILDERS: dict[str, Callable[[int, _Dice], Example]] = {
    builder.__name__[1:]: builder
    for builder in (
        _causal, _prefix_lm, _encoder_prepended, _interleaved_modality, _interleaved_span, _interleaved_prefix, _packed,
        _audio_visual, _long_tail, _giant, _generation,
    )
}  # fmt: skip
NAMES = tuple(_BUILDERS)

__all__ = ["AUDIO", "IMAGE", "NAMES", "NOISED", "TEXT", "Example", "example"]


# --- Masks as short texts, for commands and notes --------------------------------------------------------------------
#
#     SPEC     = NAME ":" SIZE { "," KEY "=" VALUE | "," FLAG }
#     SIZE     = tokens, or documents that are packed: 500+700+300
#     NAME     = one of the eleven of csc.masks.gallery (seed=N), or
#                bidirectional            every token of a document
#                window                   width=N and, if wanted, the flag symmetric
#                prefix                   length=N
#                spans                    image=40..296+600..856, audio=.., noised=.., and who sees whom:
#                                         own=span|modality|causal, earlier=nothing|text|everything; noised is hidden
#
#     causal:4096   window:8192,width=1024   causal:500+700+300   spans:1500,image=100..356+600..856,earlier=text
#
# or the path of a JSON file with one row of a batch: {"types": [..], "spans": [..], "documents": [..], "sees": {"1":
# {"own": "span", "earlier": "text", "hidden": true}}}, {"bitfields": [..]}, {"attention_mask": [..]} or
# {"position_ids": [..]}.


TYPES = {"image": IMAGE, "audio": AUDIO, "noised": NOISED}
OPTIONS = {
    "bidirectional": set[str](),
    "window": {"width", "symmetric"},
    "prefix": {"length"},
    "spans": {*TYPES, "own", "earlier"},
    **{name: {"seed"} for name in NAMES},
}
REMEDY = "Write NAME:TOKENS,key=value, for example causal:4096 or window:8192,width=1024; docs/masks.md has the names"


def parse(spec: str) -> Example:
    """The mask that a text or a JSON file says, of one row. InputError that quotes the part which is not understood."""
    if spec.endswith(".json"):
        return _of_file(Path(spec))
    name, colon, rest = spec.partition(":")
    if not colon or name not in OPTIONS:
        raise InputError(f"{name!r} is no mask", spec, f"There are {', '.join(sorted(OPTIONS))}. {REMEDY}")
    size, *options = rest.split(",")
    lengths = [_number(part, spec) for part in size.split("+")]
    values: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in OPTIONS[name] or key in values:
            allowed = ", ".join(sorted(OPTIONS[name])) or "nothing"
            raise InputError(f"{option!r} is not understood", spec, f"{name} takes {allowed}, each once")
        values[key] = value
    tokens = sum(lengths)
    if name in NAMES:
        mask_found = example(name, tokens, _number(values.get("seed", "0"), spec, least=0))
    elif name == "spans":
        mask_found = _spans_of_spec(tokens, values, spec)
    else:
        mask_found = _plain(_sized(name, tokens, values, spec))
    if len(lengths) == 1:
        return mask_found
    if name in NAMES and bool((mask_found.documents > 0).any()):
        raise InputError(f"{name} makes documents of its own", spec, "Give it a number of tokens")
    ids = ids_of_lengths(lengths)
    return Example(within(mask_found.mask, ids), mask_found.types, mask_found.span_ids, ids)


def _sized(name: str, tokens: int, values: dict[str, str], spec: str) -> Mask:
    if name == "bidirectional":
        return bidirectional(tokens)
    needed = {"window": "width", "prefix": "length"}[name]
    if needed not in values:
        raise InputError(f"{name} needs {needed}=N", spec)
    if name == "prefix":
        return prefix(tokens, _number(values[needed], spec, least=0))
    return window(tokens, _number(values[needed], spec), "symmetric" in values)


def _spans_of_spec(tokens: int, values: dict[str, str], spec: str) -> Example:
    placed = []
    for key in TYPES.keys() & values.keys():
        for part in values[key].split("+"):
            start, dots, end = part.partition("..")
            if not dots:
                raise InputError(f"{part!r} is no span", spec, "Write START..END, the end is not part of it")
            placed.append((_number(start, spec, least=0), _number(end, spec), TYPES[key]))
    own_rule, earlier = values.get("own", "span"), values.get("earlier", "nothing")
    sees = {kind: Sees(own_rule, earlier, hidden=name == "noised") for name, kind in TYPES.items()}  # type: ignore[arg-type]
    types, numbers = tokens_of(tokens, placed)
    return Example(spans(types, numbers, sees), types, numbers, torch.zeros_like(types))


def _plain(mask: Mask, types: torch.Tensor | None = None, ids: torch.Tensor | None = None) -> Example:
    nothing = torch.zeros(1, mask.queries, dtype=torch.int64)
    return Example(mask, nothing if types is None else types, nothing, nothing if ids is None else ids)


def _of_file(path: Path) -> Example:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"it cannot be read as JSON: {error}", str(path)) from error
    if not isinstance(content, dict):
        raise InputError("it is not a JSON object", str(path), "docs/masks.md shows the keys")
    first = next((key for key in ("types", "bitfields", "attention_mask", "position_ids") if key in content), None)
    allowed = {"types", "spans", "documents", "sees"} if first == "types" else {first}
    if first is None or content.keys() - allowed:
        raise InputError(
            f"its keys are {', '.join(content)}",
            str(path),
            "Give types (with spans, documents, sees), bitfields, attention_mask or position_ids",
        )
    row = torch.tensor(content[first])[None]
    if first == "bitfields":
        labels = (row & LABEL).masked_fill((row & 1) != 0, 0).masked_fill((row & LABEL) == 0, -1)
        return _plain(bitfields(row), torch.searchsorted(few(labels.clamp(min=0)), labels) - (labels < 0).long())
    if first == "attention_mask":
        return _plain(padding(row), row.long() - 1)
    if first == "position_ids":
        ids = ids_of_positions(row)
        return _plain(documents(ids), ids=ids)
    nothing = torch.zeros_like(row)
    numbers = torch.tensor(content["spans"])[None] if "spans" in content else None
    ids = torch.tensor(content["documents"])[None] if "documents" in content else nothing
    try:
        sees = {int(kind): Sees(**value) for kind, value in content.get("sees", {}).items()}
    except (TypeError, ValueError) as error:
        raise InputError(f"sees is not understood: {error}", str(path)) from error
    return Example(spans(row, numbers, sees, ids), row, nothing if numbers is None else numbers, ids)


def _number(text: str, spec: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"{text!r} is no whole number of at least {least}", spec, REMEDY)
    return int(text)
