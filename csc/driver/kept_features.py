"""What a frozen encoder makes, taken from disk, or made and kept there, before a step.

Terms: see csc.driver.frozen_encoders.
  unit       what one entry on disk is of: an image's rows of the encoder's entries, where images do not meet in the
             encoder and their place does not count (csc.driver.unit_trials); else a microbatch

    kept = KeptFeatures(cache, made_by_host)           a source of features (csc.driver.frozen_encoders)
    kept.features(encoder, match, identity) -> {value: features}
    kept.counts() -> {features_read, features_made}

A microbatch of which a unit is missing is encoded whole, by the calls that a step without kept features makes: its
features are those of that step, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from csc.cache.feature_entries import FeatureCache
from csc.capture.guards import Match
from csc.driver.apart import close
from csc.driver.feature_units import Units, are_made_of_images, equal, packed, whole
from csc.driver.frozen_encoders import FrozenEncoder
from csc.driver.unit_trials import UnitTrials
from csc.runtime.specs import ValueSpec

log = logging.getLogger("csc")

Entries = Mapping[str, torch.Tensor]


@dataclass
class KeptFeatures:
    """Of one model. made_by_host: what its functions on the host make of entries. read, made: units taken from disk,
    and units encoded, by this process, until `counts` is asked.
    """

    cache: FeatureCache
    made_by_host: Callable[[Entries], Entries]
    read: int = 0
    made: int = 0
    option: str = "cache_features"
    _units_of: dict[Any, Units] = field(default_factory=dict)  # by the key of microbatches, where they are not packed
    _of_images: dict[Any, bool] = field(default_factory=dict)  # whether what is not packed is made of packed images

    def __post_init__(self) -> None:
        self._trials = UnitTrials(self.cache)

    def counts(self) -> dict[str, float]:
        """As metrics of a step, from 0 again."""
        found = {"features_read": float(self.read), "features_made": float(self.made)}
        self.read = self.made = 0
        return found

    @torch.no_grad()
    def features(self, one: FrozenEncoder, match: Match, identity: str) -> Entries:
        """From disk, or encoded and kept there."""
        entries = one.entries(match)
        units = self._units(one, identity, match, entries)
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

    def _units(self, one: FrozenEncoder, identity: str, match: Match, entries: Entries) -> Units:
        """Those of a microbatch: packed images, or as many equal ones as do not meet; else the whole of it."""
        key, values, images = match.key, one.spec.values, packed(match.given, entries, one.spec.values)
        if images is not None and key not in self._of_images:
            self._of_images[key] = are_made_of_images(match.given, entries, self.made_by_host)
        images = images if self._of_images.get(key) else None
        if images is not None and self._trials.allow(images, identity, one.encode, entries):
            return images
        said = self._units_of.get(key)
        if said is None or self._trials.meets(identity):
            tried = equal(entries, values) if images is None else []
            best = next((u for u in tried if self._trials.allow(u, identity, one.encode, entries)), None)
            self._units_of[key] = best or whole(entries, values)
            if said != self._units_of[key]:
                log.info("features: %s", _said(self._units_of[key], images is not None))
        return self._units_of[key]


def _said(units: Units, images: bool) -> str:
    if units.cut.count > 1:
        return f"microbatches of {units.cut.count} units"
    meet = "images meet in the encoder, or their place counts" if images else "nothing divides its rows"
    return f"a microbatch is one unit ({meet}): its features serve where the same microbatch comes again"


def _laid_out(value: ValueSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The units one behind the other, in memory as the encoder leaves them: kernels may go another way otherwise."""
    made = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
    return torch.cat(list(parts), out=made) if len(parts) > 1 else made.copy_(parts[0])
