"""The frozen encoders of a model's programs, which no step runs: who reads features makes them before.

Terms
  encoder    of a program what no step runs (csc.ir.program.Features): features.py
  identity   all that decides what an encoder makes of its entries: the model's code and configuration, what of it is
             computed, in which dtypes, and the weights

    encoders = FrozenEncoders(model, source)          source: of features, csc.driver.kept_features or features_ahead
    encoders.add(match, program)                      the program of microbatches like the one matched
    encoders.of(match) -> FrozenEncoder | None        .entries(match)   .encode(entries) -> {value: features}
    encoders.identity(encoder) -> text
    encoders.complete(matches, here) -> microbatches  as their programs take them; here: those with the values
    encoders.inputs -> names                          the entries of batches that encoders read
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from csc.cache.keys import Opaque, model_key
from csc.capture.batch import device_of, split_batch
from csc.capture.guards import Match
from csc.errors import InputError
from csc.runtime.consistency import Sample, read
from csc.runtime.loaded_program import LoadedProgram, encoder
from csc.runtime.specs import FeatureSpec
from csc.runtime.weights import bytes_of

log = logging.getLogger("csc")

Entries = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class FrozenEncoder:
    """Of one program. code: a hash of what decides its features, but for the weights."""

    spec: FeatureSpec
    forward: Callable[..., Any]
    weights: Mapping[str, nn.Parameter]
    constants: Mapping[str, torch.Tensor]
    device: torch.device
    code: str

    def entries(self, match: Match) -> dict[str, torch.Tensor]:
        """What it takes of a microbatch."""
        return {name: match.batch[name] for name in self.spec.inputs}

    @torch.no_grad()
    def encode(self, entries: Entries) -> dict[str, torch.Tensor]:
        """The features by value, on the encoder's device."""
        weights = {name: weight.detach().to(self.spec.parameters[name]) for name, weight in self.weights.items()}
        given = {name: entry.to(self.device) for name, entry in entries.items()}
        made, _ = self.forward(given, {}, weights, self.constants)
        return {value.name: made[value.name] for value in self.spec.values}


Asked = tuple[FrozenEncoder, Match, str]  # what is made of a microbatch, and the encoder's identity


class FeatureSource(Protocol):
    """Where features come from. option: of csc.compile, which says so."""

    option: str

    def features(self, asked: Sequence[Asked]) -> list[Entries]:
        """Of microbatches, by value."""

    def counts(self) -> dict[str, float]:
        """As metrics of a step, from 0 again."""


class FrozenEncoders:
    """By the key of microbatches."""

    def __init__(self, model: nn.Module, source: FeatureSource) -> None:
        self._model, self.source = model, source
        self._of: dict[Any, FrozenEncoder] = {}
        self._identities: dict[Any, _Identity] = {}

    def add(self, match: Match, program: LoadedProgram) -> None:
        """InputError if the encoder has no weights here."""
        spec = program.manifest.features
        if spec is None and not self._of:
            raise InputError(
                "the example has no entry of floating point and no pictures of bytes, so nothing is encoded",
                self.source.option,
                f"compile with an example that has images or sounds, or leave {self.source.option} out",
            )  # fmt: skip
        if spec is None:
            return
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        without = next((name for name in spec.parameters if parameters[name].is_meta), None)
        if without is not None:
            raise InputError(
                f"{without!r} of the frozen encoder has no values here, the model is on the meta device",
                self.source.option,
                f"make the model with its weights in every process, or leave {self.source.option} out",
            )
        device = device_of(self._model)
        constants = program.named_constants(spec.constants, device)
        own = {name: parameters[name] for name in spec.parameters}
        code = _code(self._model, match, program)
        self._of[match.key] = FrozenEncoder(spec, encoder(program), own, constants, device, code)

    def of(self, match: Match) -> FrozenEncoder | None:
        """None: nothing of the microbatch is encoded."""
        return self._of.get(match.key)

    @property
    def inputs(self) -> frozenset[str]:
        """The entries of batches that encoders read."""
        return frozenset(name for one in self._of.values() for name in one.spec.inputs)

    def complete(self, matches: Sequence[Match], here: Sequence[bool]) -> list[Mapping[str, Any]]:
        """Microbatches with their features; those that only other processes read, on the meta device."""
        encoders = [self.of(match) for match in matches]
        read = [n for n, (one, own) in enumerate(zip(encoders, here, strict=True)) if one is not None and own]
        asked = [(one, matches[n], self.identity(one)) for n in read if (one := encoders[n]) is not None]
        made = dict(zip(read, self.source.features(asked) if asked else [], strict=True))
        return [{**match.batch, **_entries(one, made.get(n))} for n, (match, one) in enumerate(zip(matches, encoders))]

    def identity(self, one: FrozenEncoder) -> str:
        """Hashed anew where a weight was written, or is another tensor."""
        places = tuple((weight.data_ptr(), weight._version) for weight in one.weights.values())
        known = self._identities.get((one.code, *one.weights))
        if known is None or known.places != places or read(known.samples) != known.entries:
            samples = list(map(Sample, one.weights.values()))
            digest = hashlib.sha256(one.code.encode())
            for name, weight in one.weights.items():
                digest.update(f"{name} {weight.dtype} {list(weight.shape)} {one.spec.parameters[name]}\n".encode())
                digest.update(bytes_of(weight.detach().cpu().contiguous()))
            known = _Identity(places, samples, read(samples), digest.hexdigest())
            self._identities[(one.code, *one.weights)] = known
        return known.text


@dataclass(frozen=True)
class _Identity:
    """places: where weights lie, and how often torch has counted writes there; samples: of each, since writes to
    `weight.data` are not counted; entries: what these were.
    """

    places: tuple[tuple[int, int], ...]
    samples: list[Sample]
    entries: bytes
    text: str


def _entries(one: FrozenEncoder | None, features: Entries | None) -> dict[str, torch.Tensor]:
    """What a program takes in place of what is encoded; without features, only their sizes."""
    if one is None:
        return {}
    named = zip(one.spec.entries, one.spec.values, strict=True)
    if features is None:
        return {entry: torch.empty(value.shape, dtype=value.dtype, device="meta") for entry, value in named}
    return {entry: features[value.name] for entry, value in named}


def _code(model: nn.Module, match: Match, program: LoadedProgram) -> str:
    """Of the model as it is traced; of one that cannot be described, the program's files, which are for one size."""
    spec = program.manifest.features
    assert spec is not None
    try:
        what = model_key(model, split_batch(match.given)[1])
    except Opaque as reason:
        log.info("features are kept for each size of microbatches apart: the model holds %s", reason)
        what = json.dumps(sorted([*program.manifest.files.items(), *program.manifest.tensors.items()]))
    computed = [(name, str(dtype)) for name, dtype in spec.parameters.items()]
    values = [(value.name, str(value.dtype)) for value in spec.values]
    tree = [what, values, computed, program.manifest.device]
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()
