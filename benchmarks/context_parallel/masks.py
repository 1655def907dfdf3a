"""The eleven masks of the tables, as rules over ranges and kinds of keys; numpy only.

Terms: a *rule* of a query admits the keys of one range whose kind it names; a query sees what any of its rules
admits. A *span* is the tokens of one image or one audio clip. *kinds* are bits. The form is that of
csc.kernels.mask.Mask with batch 1.

    Rules: lo, hi int32 [R, T]; admits int64 [R, T]; kinds int64 [T]
    MASKS: name -> builder(T, rng) -> Rules
    build(name, T, seed) -> Rules
    dense(rules) -> bool [T, T]: the definition itself, for small T
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

TEXT, IMAGE, AUDIO, NOISED = 1, 2, 4, 8
EVERYTHING = TEXT | IMAGE | AUDIO | NOISED
CLEAN = EVERYTHING & ~NOISED

IMAGE_LENGTHS = (256, 576, 1024, 2048)
AUDIO_LENGTHS = (150, 375, 750, 1500)
GROUP = 562  # tokens of one second of video and its sound in audio_visual
SEEN = 8  # one image in so many is an input, the others are generated: .19 of the pairs are visible then

Spans = list[tuple[int, int, int]]  # (kind, first token, end), in order, without gaps


@dataclass(frozen=True)
class Rules:
    """Query q sees key k iff for some rule r: lo[r, q] <= k < hi[r, q] and admits[r, q] & kinds[k] != 0."""

    lo: np.ndarray  # int32 [R, T]
    hi: np.ndarray  # int32 [R, T]
    admits: np.ndarray  # int64 [R, T]
    kinds: np.ndarray  # int64 [T]


def dense(rules: Rules) -> np.ndarray:
    """bool [T, T]: which query sees which key. For tests and small T."""
    key = np.arange(len(rules.kinds))
    inside = (rules.lo[..., None] <= key) & (key < rules.hi[..., None])
    return (inside & ((rules.admits[..., None] & rules.kinds) != 0)).any(axis=0)


def _rules(lo: np.ndarray, hi: np.ndarray, admits: np.ndarray | int, kinds: np.ndarray) -> Rules:
    lo, hi = np.atleast_2d(lo).astype(np.int32), np.atleast_2d(hi).astype(np.int32)
    return Rules(lo, hi, np.broadcast_to(np.int64(admits), lo.shape).copy(), kinds)


def _causal(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """lo, hi and kinds of causal text."""
    return np.zeros(tokens, np.int32), np.arange(1, tokens + 1, dtype=np.int32), np.full(tokens, TEXT, np.int64)


def _text_length(rng: np.random.Generator, median: float = 300.0) -> int:
    return int(np.clip(rng.lognormal(np.log(median), 0.8), 16, 2400))


def _interleaved(tokens: int, rng: np.random.Generator, median: float = 300.0) -> Spans:
    """Text, image, text, image, text, audio, and so on; the last piece is cut off at the end."""
    spans: Spans = []
    at, turn = 0, 0
    while at < tokens:
        media = (IMAGE, IMAGE, AUDIO)[turn % 3]
        text, span = _text_length(rng, median), int(rng.choice(AUDIO_LENGTHS if media == AUDIO else IMAGE_LENGTHS))
        for kind, length in ((TEXT, text), (media, span)):
            end = min(at + length, tokens)
            if end > at:
                spans.append((kind, at, end))
            at = end
        turn += 1
    return spans


def _own_spans(tokens: int, spans: Spans) -> Rules:
    lo, hi, kinds = _causal(tokens)
    for kind, start, end in spans:
        kinds[start:end] = kind
        if kind != TEXT:
            lo[start:end], hi[start:end] = start, end
    return _rules(lo, hi, EVERYTHING, kinds)


def _documents(lengths: Iterator[int], tokens: int) -> Iterator[tuple[int, int]]:
    at = 0
    while at < tokens:
        end = min(at + max(1, next(lengths)), tokens)
        yield at, end
        at = end


def causal(tokens: int, rng: np.random.Generator) -> Rules:
    """Text alone."""
    lo, hi, kinds = _causal(tokens)
    return _rules(lo, hi, EVERYTHING, kinds)


def prefix_lm(tokens: int, rng: np.random.Generator) -> Rules:
    """The first 3T/8 tokens see each other, the rest is causal."""
    lo, hi, kinds = _causal(tokens)
    return _rules(lo, np.maximum(hi, 3 * tokens // 8), EVERYTHING, kinds)


def encoder_prepended(tokens: int, rng: np.random.Generator) -> Rules:
    """Vision sees itself, audio sees itself, the text behind them is causal over all."""
    vision, audio = int(0.40 * tokens), int(0.55 * tokens)
    return _own_spans(tokens, [(IMAGE, 0, vision), (AUDIO, vision, audio), (TEXT, audio, tokens)])


def interleaved_modality(tokens: int, rng: np.random.Generator) -> Rules:
    """Every image sees every image, every clip every clip, text is causal over all."""
    lo, hi, kinds = _causal(tokens)
    admits = np.full(tokens, EVERYTHING, np.int64)
    for kind, start, end in _interleaved(tokens, rng):
        kinds[start:end] = kind
        if kind != TEXT:
            hi[start:end], admits[start:end] = tokens, kind
    return _rules(lo, hi, admits, kinds)


def interleaved_span(tokens: int, rng: np.random.Generator) -> Rules:
    """Every image or clip sees itself alone, text is causal over all."""
    return _own_spans(tokens, _interleaved(tokens, rng))


def interleaved_prefix(tokens: int, rng: np.random.Generator) -> Rules:
    """Every image or clip sees itself and all that is earlier, text is causal."""
    lo, hi, kinds = _causal(tokens)
    for kind, start, end in _interleaved(tokens, rng):
        kinds[start:end] = kind
        if kind != TEXT:
            hi[start:end] = end
    return _rules(lo, hi, EVERYTHING, kinds)


def packed(tokens: int, rng: np.random.Generator) -> Rules:
    """Documents, each with images and clips that see themselves alone and causal text."""
    spans: Spans = []
    first = np.zeros(tokens, np.int32)
    lengths = (int(min(rng.lognormal(np.log(2500), 1.0), tokens / 4)) for _ in iter(int, 1))
    for start, end in _documents(lengths, tokens):
        first[start:end] = start
        spans += [(k, start + a, start + b) for k, a, b in _interleaved(end - start, rng, median=200.0)]
    rules = _own_spans(tokens, spans)
    return Rules(np.maximum(rules.lo, first), rules.hi, rules.admits, rules.kinds)


def audio_visual(tokens: int, rng: np.random.Generator) -> Rules:
    """Text, then groups of video and sound that see themselves and all that is earlier, then text."""
    lo, hi, kinds = _causal(tokens)
    start, end = int(0.05 * tokens), int(0.90 * tokens)
    at = np.arange(start, end)
    hi[start:end] = np.minimum(start + ((at - start) // GROUP + 1) * GROUP, end)
    kinds[start:end] = IMAGE
    return _rules(lo, hi, EVERYTHING, kinds)


def _causal_documents(tokens: int, lengths: Iterator[int]) -> Rules:
    lo, hi, kinds = _causal(tokens)
    for start, end in _documents(lengths, tokens):
        lo[start:end] = start
    return _rules(lo, hi, EVERYTHING, kinds)


def long_tail(tokens: int, rng: np.random.Generator) -> Rules:
    """Causal documents of 64 (1 + Pareto(.9)) tokens, at most half of all."""
    return _causal_documents(tokens, (int(min(64 * (1 + rng.pareto(0.9)), tokens / 2)) for _ in iter(int, 1)))


def giant(tokens: int, rng: np.random.Generator) -> Rules:
    """One causal document of half the tokens somewhere among documents of 256 to 1500."""
    lengths: list[int] = []
    while sum(lengths) < tokens - tokens // 2:
        lengths.append(int(rng.integers(256, 1501)))
    lengths.insert(int(rng.integers(len(lengths))), tokens // 2)
    return _causal_documents(tokens, iter([*lengths, tokens]))


def generation(tokens: int, rng: np.random.Generator) -> Rules:
    """Text is causal; images see themselves and the past; so do generated (noised) ones, which nothing later sees."""
    lo, hi, kinds = _causal(tokens)
    own_lo, own_hi = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
    at, turn = 0, 0
    while at < tokens:
        start = min(at + _text_length(rng), tokens)
        end = min(start + int(rng.choice(IMAGE_LENGTHS)), tokens)
        turn += 1
        if turn % SEEN:
            kinds[start:end], hi[start:end] = NOISED, start
            own_lo[start:end], own_hi[start:end] = start, end
        else:
            kinds[start:end], hi[start:end] = IMAGE, end
        at = end
    admits = np.stack([np.full(tokens, CLEAN, np.int64), np.full(tokens, NOISED, np.int64)])
    return Rules(np.stack([lo, own_lo]), np.stack([hi, own_hi]), admits, kinds)


MASKS: dict[str, Callable[[int, np.random.Generator], Rules]] = {
    builder.__name__: builder
    for builder in (
        causal, prefix_lm, encoder_prepended, interleaved_modality, interleaved_span, interleaved_prefix, packed,
        audio_visual, long_tail, giant, generation,
    )
}  # fmt: skip


def build(name: str, tokens: int, seed: int) -> Rules:
    """The mask of that name; equal arguments give equal masks."""
    return MASKS[name](tokens, np.random.default_rng(seed))
