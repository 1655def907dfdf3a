"""The eleven masks that csc's tables and pictures use, by name, for any number of tokens.

Terms
  media lengths   images 256, 576, 1024 or 2048 tokens; audio 150, 375, 750 or 1500; two images per clip
  text lengths    lognormal around a median, sigma 0.8, from 16 to 2400
  example         a mask with what its tokens are: for pictures, and to build the same batch again

    NAMES                                    in the order of the tables
    example(name, tokens, seed) -> Example
    Example(mask, types, span_ids, documents)        types, span_ids and documents int64 [1, T]; IMAGE, AUDIO, NOISED

Equal arguments give equal masks (a torch.Generator of the seed). The last run is cut where the tokens end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from csc.errors import InputError
from csc.kernels.mask import Mask
from csc.masks.checks import positive
from csc.masks.documents import documents, ids_of_lengths
from csc.masks.plain import causal, prefix
from csc.masks.spans import TEXT, Sees, spans, tokens_of

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
    at = turn = 0
    while at < tokens:
        kind = (IMAGE, IMAGE, AUDIO)[turn % 3]
        at += dice.text(median)
        end = min(at + dice.one_of(AUDIO_LENGTHS if kind == AUDIO else IMAGE_LENGTHS), tokens)
        if at < end:
            placed.append((start + at, start + end, kind))
        at, turn = end, turn + 1
    return placed


def _cut(lengths: Iterator[int], tokens: int) -> list[int]:
    found: list[int] = []
    left = tokens
    while left:
        found.append(min(max(1, next(lengths)), left))
        left -= found[-1]
    return found


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
    at = 0
    for length in lengths:
        placed += _interleaved(length, dice, 200.0, at)
        at += length
    return _of_spans(tokens, placed, _all(Sees("span")), lengths)


def _audio_visual(tokens: int, dice: _Dice) -> Example:
    """Text to 0.05 T, groups of video and sound that see themselves and the past to 0.90 T, text."""
    start, end = int(0.05 * tokens), int(0.90 * tokens)
    placed = [(at, min(at + GROUP, end), IMAGE) for at in range(start, end, GROUP)]
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
    at = 0
    while at < tokens:
        at += dice.text()
        end = min(at + dice.one_of(IMAGE_LENGTHS), tokens)
        kind = NOISED if dice.share() < GENERATED else IMAGE
        if at < end:
            placed.append((at, end, kind))
        at = end
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
