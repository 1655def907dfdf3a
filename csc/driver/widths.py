"""Microbatches of many widths, padded to a few: each size of microbatches is a program, and compiled once.

Terms
  width      the length of the rows of token ids, which `attention_mask` and `labels` have, too
  padded     to the right: with a token that is no placeholder, the mask 0 and the label -100
  step       between widths: 8, and an eighth of the power of two below a width from 128 on (16, 32, ...): at most an
             eighth of the places are padding
  trial      of one microbatch: eager PyTorch's loss and gradients padded and not, with one token and with the batch's
             own in disorder: the same to rounding, as far as csc's check allows for it

    widths = Widths(wanted, example_widths)       wanted: None, True, False or the widths, as `csc.compile` is told
    widths.padded(microbatch, trials) -> microbatch
    widths.untried(microbatches, trials) -> [(microbatch, width)]
    trials.learn(microbatch, width, answer)
    tried(model, microbatch, width, trainable) -> SAME, or why not             a trial

Where nobody says anything, the example's widths stay as they are, and others are padded where the graph shows that the
loss is a mean over targets and that tokens are added up, never chosen by what they are (csc.analysis.tokens), and where
a trial of that width has gone well: padding is no target then, and what would read it would do so in each batch. The
rule looks at a microbatch alone: a run that is taken up pads as it did before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from csc.capture.batch import split_batch
from csc.check.eager import IN_HALF, EagerStep
from csc.check.first import EXACT, too_much
from csc.check.judge import LOSS, Reference, judge
from csc.driver.belonging import kind_of, token_ids
from csc.driver.options import shown
from csc.errors import InputError

log = logging.getLogger("csc")

IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"
TYPES = ("token_type_ids", "mm_token_type_ids")  # of which 0 is text
COUNTING = ("tokens", "terms")  # of csc.runtime.specs.LossSpec: weights of losses that are means over targets
IGNORED = -100  # the label that is none
LEAST, PARTS = 8, 8  # the smallest step between widths, and how many there are to the next power of two
SAME = ""

Batch = Mapping[str, Any]
Key = tuple[frozenset[str], int]  # the names of a microbatch's tensors, and a width


@dataclass
class Trials:
    """Of a model as it is. answers: by entries and width, why it is not to be padded to that width, or SAME."""

    answers: dict[Key, str] = field(default_factory=dict)

    def learn(self, microbatch: Batch, width: int, answer: str) -> None:
        """What a trial gave."""
        self.answers[_entries(microbatch), width] = answer

    def answer(self, microbatch: Batch, width: int) -> str | None:
        """None: nobody has tried."""
        return self.answers.get((_entries(microbatch), width))


@dataclass(frozen=True)
class Widths:
    """wanted: as `csc.compile` is told; None: where a trial allows it."""

    wanted: bool | tuple[int, ...] | None = None

    @classmethod
    def of(cls, given: Any) -> Widths:
        """InputError for what says no widths."""
        if given is None or isinstance(given, bool):
            return cls(given)
        listed = list(given) if isinstance(given, (list, tuple, range)) else []
        if not listed or not all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in listed):
            raise InputError(
                f"widths is {shown(given)}", "compile",
                "pass a list of widths such as [512, 1024, 2048], True for csc's own, False for none, or nothing",
            )  # fmt: skip
        return cls(tuple(sorted(set(listed))))

    def target(self, microbatch: Batch, example: Set[int]) -> int | None:
        """The width that a microbatch is to have; None: its own. example: the widths of the example."""
        width = _width(microbatch)
        if width is None or self.wanted is False:
            return None
        if isinstance(self.wanted, tuple):
            found = next((one for one in self.wanted if one >= width), width)
        elif self.wanted is None:
            known = [one for one in example if width <= one <= rounded(width)]
            found = min(known, default=rounded(width))
        else:
            found = rounded(width)
        return found if found != width else None

    def padded(self, microbatch: Batch, example: Set[int], trials: Trials, model: nn.Module) -> dict[str, Any]:
        """A microbatch as programs are made for it. InputError: it is to be padded, and nobody knows with what."""
        target = self.target(microbatch, example)
        if target is None:
            return dict(microbatch)
        unknown = unfit(microbatch)
        if self.wanted is not None and unknown:
            raise InputError(
                f"widths= pads microbatches, and this one cannot be: {unknown}", "batch",
                "pad in the loader, and leave widths= out",
            )  # fmt: skip
        if unknown or (self.wanted is None and trials.answer(microbatch, target) != SAME):
            return dict(microbatch)
        return pad(microbatch, target, filling(microbatch, model)[0])

    def untried(self, microbatches: Sequence[Batch], example: Set[int], trials: Trials) -> list[tuple[Batch, int]]:
        """Microbatches, and widths, of which a trial would tell whether they may be padded so: one for each width."""
        found: dict[Key, tuple[Batch, int]] = {}
        for microbatch in microbatches if self.wanted is None else ():
            target = self.target(microbatch, example)
            if target is not None and not unfit(microbatch) and trials.answer(microbatch, target) is None:
                found.setdefault((_entries(microbatch), target), (microbatch, target))
        return list(found.values())


def rounded(width: int) -> int:
    """The width that one is padded to."""
    step = max(LEAST, 2 ** (width.bit_length() - 1) // PARTS)
    return -(-width // step) * step


def widths_of(batch: Any) -> frozenset[int]:
    """Of a batch, or of listed microbatches."""
    listed = batch if isinstance(batch, (list, tuple)) else [batch]
    return frozenset(width for one in listed if (width := _width(one)) is not None)


def pad(microbatch: Batch, width: int, token: int) -> dict[str, Any]:
    """A microbatch that is `unfit` for no reason, with rows of this width."""
    values = {IDS: token, MASK: 0, LABELS: IGNORED} | dict.fromkeys(TYPES, 0)
    more = width - microbatch[IDS].shape[1]
    return {
        name: nn.functional.pad(entry, (0, more), value=values[name]) if name in values else entry
        for name, entry in microbatch.items()
    }


def unfit(microbatch: Batch) -> str:
    """Why nobody knows how a microbatch is padded; "" if it is known."""
    tensors = split_batch(microbatch)[0]
    for name in (IDS, MASK, LABELS):
        entry = tensors.get(name)
        if entry is None or entry.dim() != 2 or entry.shape != tensors[IDS].shape or entry.is_floating_point():
            return f"it takes {IDS}, {MASK} and {LABELS}, whole numbers by row and place"
    width = tensors[IDS].shape[1]
    for name, entry in tensors.items():
        beside = name in TYPES and entry.shape == tensors[IDS].shape
        if name not in (IDS, MASK, LABELS) and not beside and kind_of(name) is None and width in entry.shape[1:]:
            return f"the entry {name!r} has a value for each token"
    return ""


def filling(microbatch: Batch, model: nn.Module) -> list[int]:
    """Tokens to pad with, no placeholders: what pads the microbatch already, what the model's config names, any."""
    ids, mask = microbatch[IDS], microbatch[MASK]
    config = getattr(model, "config", None)
    named = [getattr(one, "pad_token_id", None) for one in (config, getattr(config, "text_config", None))]
    held = [] if ids.is_meta else [*ids[mask == 0][:1].tolist(), *(one for one in named if isinstance(one, int)), 0]
    others = [] if ids.is_meta else ids.flatten().unique().tolist()
    placeholders = set(token_ids(model).values())
    return [token for token in dict.fromkeys([*held, *others]) if token >= 0 and token not in placeholders] or [0]


def tried(model: nn.Module, microbatch: Batch, width: int, trainable: Set[str]) -> str:
    """Whether padding to a width leaves eager PyTorch's loss and gradients as they are: SAME, or why not. trainable:
    as csc.check.eager has it.
    """
    if too_much(model):
        return too_much(model)
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in microbatch.values()):
        return "the batch has no values here"
    if any(parameter.dtype in IN_HALF for parameter in model.parameters()):
        return "it computes in 16 bits, where a difference cannot be told from rounding"
    tokens = filling(microbatch, model)
    try:
        right = Reference(model, microbatch, trainable, "auto")
        step = right.step()
        padded = pad(microbatch, width, tokens[0])
        others = _disordered(padded, tokens, microbatch[IDS].shape[1])
        found = [Reference(model, one, trainable, "auto").step() for one in (padded, others)]
    except Exception as error:  # of the user's model: a table of positions may end
        log.info("a trial with padding to %d failed: %s: %s", width, type(error).__name__, error)
        return f"it fails then ({type(error).__name__})"
    if not _same_bits(*found):
        return "its loss or gradients depend on the token that it is padded with"
    return SAME if all(_alike(right, step, one) for one in found) else "its loss or gradients are others then"


def _disordered(padded: Batch, tokens: Sequence[int], width: int) -> dict[str, Any]:
    """With any of the tokens from a width on."""
    ids, other = padded[IDS].clone(), torch.Generator().manual_seed(0)
    behind = ids[:, width:]
    behind.copy_(torch.tensor(tokens)[torch.randint(len(tokens), behind.shape, generator=other)])
    return {**padded, IDS: ids}


def _same_bits(one: EagerStep, other: EagerStep) -> bool:
    """What nothing reads is multiplied by 0: to the bit, where nothing is added up in an order of its own."""
    exact = all(gradient.is_cpu for gradient in one.gradients.values())
    return one.loss == other.loss and (
        not exact or all(torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items())
    )


def _alike(eager: Reference, right: EagerStep, found: EagerStep) -> bool:
    """Whether two steps are the same to rounding, in float32."""

    def rounding() -> Mapping[str, float]:
        if eager.in_half():
            return dict.fromkeys([LOSS, *right.gradients], 0.0)
        return eager.moved(right, torch.finfo(torch.float32).eps / 2)

    drawn = right.unknown | found.unknown
    return not drawn and judge(right, found.loss, found.gradients, [EXACT], rounding).good


def _width(microbatch: Batch) -> int | None:
    ids = microbatch.get(IDS) if hasattr(microbatch, "get") else None
    return ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None


def _entries(microbatch: Batch) -> frozenset[str]:
    return frozenset(name for name, value in microbatch.items() if isinstance(value, torch.Tensor))
