"""Masks as short texts, for commands and notes.

    SPEC     = NAME ":" SIZE { "," KEY "=" VALUE | "," FLAG }
    SIZE     = tokens, or documents that are packed: 500+700+300
    NAME     = one of the eleven of csc.masks.gallery (seed=N), or
               bidirectional            every token of a document
               window                   width=N and, if wanted, the flag symmetric
               prefix                   length=N
               spans                    image=40..296+600..856, audio=.., noised=.., and who sees whom:
                                        own=span|modality|causal, earlier=nothing|text|everything; noised is hidden

    causal:4096   window:8192,width=1024   causal:500+700+300   spans:1500,image=100..356+600..856,earlier=text

or the path of a JSON file with one row of a batch: {"types": [..], "spans": [..], "documents": [..], "sees": {"1":
{"own": "span", "earlier": "text", "hidden": true}}}, {"bitfields": [..]}, {"attention_mask": [..]} or
{"position_ids": [..]}.

    parse(spec) -> Example
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from csc.errors import InputError
from csc.kernels.mask import Mask
from csc.masks.bitfields import LABEL, bitfields
from csc.masks.documents import documents, ids_of_lengths, ids_of_positions, padding, within
from csc.masks.equal_runs import few
from csc.masks.gallery import AUDIO, IMAGE, NAMES, NOISED, Example, example
from csc.masks.plain import bidirectional, prefix, window
from csc.masks.spans import Sees, spans, tokens_of

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
        found = example(name, tokens, _number(values.get("seed", "0"), spec, least=0))
    elif name == "spans":
        found = _of_spans(tokens, values, spec)
    else:
        found = _plain(_sized(name, tokens, values, spec))
    if len(lengths) == 1:
        return found
    if name in NAMES and bool((found.documents > 0).any()):
        raise InputError(f"{name} makes documents of its own", spec, "Give it a number of tokens")
    ids = ids_of_lengths(lengths)
    return Example(within(found.mask, ids), found.types, found.span_ids, ids)


def _sized(name: str, tokens: int, values: dict[str, str], spec: str) -> Mask:
    if name == "bidirectional":
        return bidirectional(tokens)
    needed = {"window": "width", "prefix": "length"}[name]
    if needed not in values:
        raise InputError(f"{name} needs {needed}=N", spec)
    if name == "prefix":
        return prefix(tokens, _number(values[needed], spec, least=0))
    return window(tokens, _number(values[needed], spec), "symmetric" in values)


def _of_spans(tokens: int, values: dict[str, str], spec: str) -> Example:
    placed = []
    for key in TYPES.keys() & values.keys():
        for part in values[key].split("+"):
            start, dots, end = part.partition("..")
            if not dots:
                raise InputError(f"{part!r} is no span", spec, "Write START..END, the end is not part of it")
            placed.append((_number(start, spec, least=0), _number(end, spec), TYPES[key]))
    own, earlier = values.get("own", "span"), values.get("earlier", "nothing")
    sees = {kind: Sees(own, earlier, hidden=name == "noised") for name, kind in TYPES.items()}  # type: ignore[arg-type]
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
