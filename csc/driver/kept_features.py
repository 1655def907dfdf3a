"""What a frozen encoder makes, taken from disk, or made and kept there, before a step.

Terms
  encoder    of a program what no step runs (csc.ir.program.Features): features.py
  unit       what one entry on disk is of: an image's rows of the encoder's entries, where images do not meet in the
             encoder and their place does not count (csc.driver.unit_trials); else a microbatch
  identity   all that decides what an encoder makes of its entries: the model's code and configuration, what of it is
             computed, in which dtypes, and the weights

    kept = KeptFeatures(cache, model, made_by_host)
    kept.add(match, program)                   the program of microbatches like the one matched
    kept.complete(match, here) -> microbatch   as its program takes it; here: with values, else on the meta device
    kept.counts() -> {features_read, features_made}
    kept.inputs -> names                       the entries of batches that encoders read

A microbatch of which a unit is missing is encoded whole, by the calls that a step without kept features makes: its
features are those of that step, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from csc.cache.feature_entries import FeatureCache
from csc.cache.keys import Opaque, model_key
from csc.capture.batch import device_of, split_batch
from csc.capture.guards import Match
from csc.driver.apart import close
from csc.driver.feature_units import Units, are_made_of_images, equal, packed, whole
from csc.driver.unit_trials import UnitTrials
from csc.errors import InputError
from csc.runtime.loaded_program import LoadedProgram, encoder
from csc.runtime.specs import FeatureSpec, ValueSpec
from csc.runtime.weights import bytes_of

log = logging.getLogger("csc")

Entries = Mapping[str, torch.Tensor]


@dataclass
class KeptFeatures:
    """Of one model. made_by_host: what its functions on the host make of entries. read, made: units taken from disk,
    and units encoded, by this process, until `counts` is asked.
    """

    cache: FeatureCache
    model: nn.Module
    made_by_host: Callable[[Entries], Entries]
    read: int = 0
    made: int = 0
    _encoders: dict[Any, _Encoder] = field(default_factory=dict)  # by the key of microbatches
    _identities: dict[Any, tuple[Any, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trials = UnitTrials(self.cache)

    def add(self, match: Match, program: LoadedProgram) -> None:
        """The program of microbatches like this one. InputError if the encoder has no weights here."""
        spec = program.manifest.features
        if spec is None and not self._encoders:
            raise InputError(
                "the example has no entry of floating point, so nothing is encoded", "cache_features",
                "compile with an example that has images or sounds, or leave cache_features out",
            )  # fmt: skip
        if spec is None:
            return
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        without = next((name for name in spec.parameters if parameters[name].is_meta), None)
        if without is not None:
            raise InputError(
                f"{without!r} of the frozen encoder has no values here, the model is on the meta device",
                "cache_features",
                "make the model with its weights in every process, or leave cache_features out",
            )
        device = device_of(self.model)
        constants = program.named_constants(spec.constants, device)
        own = {name: parameters[name] for name in spec.parameters}
        self._encoders[match.key] = _Encoder(
            spec, encoder(program), own, constants, device, _code(self.model, match, program)
        )

    def counts(self) -> dict[str, float]:
        """As metrics of a step, from 0 again."""
        found = {"features_read": float(self.read), "features_made": float(self.made)}
        self.read = self.made = 0
        return found

    @property
    def inputs(self) -> frozenset[str]:
        """The entries of batches that encoders read."""
        return frozenset(name for one in self._encoders.values() for name in one.spec.inputs)

    def complete(self, match: Match, here: bool) -> dict[str, Any]:
        """The microbatch with its features. here: this process reads them."""
        one = self._encoders.get(match.key)
        if one is None:
            return dict(match.batch)
        named = zip(one.spec.entries, one.spec.values, strict=True)
        if not here:
            return {**match.batch, **{e: torch.empty(v.shape, dtype=v.dtype, device="meta") for e, v in named}}
        features = self._features(one, match)
        return {**match.batch, **{entry: features[value.name] for entry, value in named}}

    @torch.no_grad()
    def _features(self, one: _Encoder, match: Match) -> Entries:
        entries = {name: match.batch[name] for name in one.spec.inputs}
        identity = self._identity(one)
        units = self._units(one, identity, match.given, entries)
        keys = units.keys(identity, entries)
        found = [self._read(key, one.spec.values, units, number) for number, key in enumerate(keys)]
        there = [unit for unit in found if unit is not None]
        if len(there) == len(keys):
            self.read += len(keys)
            return {v.name: _laid_out(v, [unit[v.name] for unit in there]) for v in one.spec.values}
        made = one.encode(entries)
        for key, kept, unit in zip(keys, found, units.cut.parts(made), strict=True):
            if kept is None:
                self.cache.write(key, unit)
            elif any(not close(kept[name], unit[name].cpu()) for name in unit) and not self._trials.meets(identity):
                log.warning(
                    "features: what is kept of an image is not what the encoder makes of it among others; features "
                    "serve whole microbatches alone from now on, and steps that read some of them had wrong ones"
                )
                self._trials.meet(identity)
        self.made += len(keys)
        return made

    def _read(self, key: str, values: Sequence[ValueSpec], units: Units, number: int) -> Entries | None:
        """What is kept of a unit. One of another program that happens to have the key is not."""
        unit = self.cache.read(key)
        fits = unit is not None and all(
            value.name in unit
            and unit[value.name].dtype == value.dtype
            and tuple(unit[value.name].shape) == units.shape(value, number)
            for value in values
        )
        return unit if fits else None

    def _identity(self, one: _Encoder) -> str:
        """Hashed anew where a weight was written, or is another tensor."""
        now = tuple((weight.data_ptr(), weight._version) for weight in one.weights.values())
        known = self._identities.get((one.code, *one.weights))
        if known is None or known[0] != now:
            digest = hashlib.sha256(one.code.encode())
            for name, weight in one.weights.items():
                digest.update(f"{name} {weight.dtype} {list(weight.shape)} {one.spec.parameters[name]}\n".encode())
                digest.update(bytes_of(weight.detach().cpu().contiguous()))
            known = self._identities[(one.code, *one.weights)] = (now, digest.hexdigest())
        return known[1]

    def _units(self, one: _Encoder, identity: str, given: Mapping[str, Any], entries: Entries) -> Units:
        """Those of a microbatch: packed images, or as many equal ones as do not meet; else the whole of it."""
        values, images = one.spec.values, packed(given, entries, one.spec.values)
        if images is not None and one.of_images is None:
            one.of_images = are_made_of_images(given, entries, self.made_by_host)
        images = images if one.of_images else None
        if images is not None and self._trials.allow(images, identity, one.encode, entries):
            return images
        if one.units is None or self._trials.meets(identity):
            tried = equal(entries, values) if images is None else []
            best = next((u for u in tried if self._trials.allow(u, identity, one.encode, entries)), None)
            said, one.units = one.units, best or whole(entries, values)
            if said != one.units:
                log.info("features: %s", _said(one.units, images is not None))
        return one.units


@dataclass
class _Encoder:
    """Of one program. code: a hash of what decides its features, but for the weights. units: of its
    microbatches, where they are no packed images. of_images: whether what it takes beside packed images is made of
    these.
    """

    spec: FeatureSpec
    forward: Callable[..., Any]
    weights: Mapping[str, nn.Parameter]
    constants: Mapping[str, torch.Tensor]
    device: torch.device
    code: str
    units: Units | None = None
    of_images: bool | None = None

    def encode(self, entries: Entries) -> dict[str, torch.Tensor]:
        """The features by value, on the encoder's device."""
        weights = {name: weight.detach().to(self.spec.parameters[name]) for name, weight in self.weights.items()}
        given = {name: entry.to(self.device) for name, entry in entries.items()}
        made, _ = self.forward(given, {}, weights, self.constants)
        return {value.name: made[value.name] for value in self.spec.values}


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


def _said(units: Units, images: bool) -> str:
    if units.cut.count > 1:
        return f"microbatches of {units.cut.count} units"
    meet = "images meet in the encoder, or their place counts" if images else "nothing divides its rows"
    return f"a microbatch is one unit ({meet}): its features serve where the same microbatch comes again"


def _laid_out(value: ValueSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The units one behind the other, in memory as the encoder leaves them: kernels may go another way otherwise."""
    made = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
    return torch.cat(list(parts), out=made) if len(parts) > 1 else made.copy_(parts[0])
