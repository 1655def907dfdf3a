"""What a frozen encoder makes, taken from disk, or made and kept there, before a step.

Terms: see csc.driver.frozen_encoders.
  unit       what one entry on disk is of: an image's rows of the encoder's entries, where images do not meet in the
             encoder and their place does not count (csc.driver.unit_trials); else a microbatch

    kept = KeptFeatures(cache, made_by_host)           a source of features (csc.driver.frozen_encoders)
    kept.features(asked) -> [{value: features}]        of all microbatches of a step that this process reads
    kept.counts() -> {features_read, features_made}

A microbatch of which every unit is new is encoded as it is, by the calls that a step without kept features makes: its
features are those of that step, bit for bit. Where some are kept, new units of several microbatches share a run of the
encoder (csc.driver.new_units), once a unit's place there is known not to change a bit, and what is kept has been
compared with what the encoder makes of it among others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from csc.cache.feature_entries import FeatureCache
from csc.capture.guards import Match
from csc.driver.apart import close
from csc.driver.feature_units import Units, are_made_of_images, equal, packed, whole
from csc.driver.frozen_encoders import Asked, FrozenEncoder
from csc.driver.new_units import Partly, runs
from csc.driver.unit_trials import UnitTrials
from csc.runtime.specs import ValueSpec

log = logging.getLogger("csc")

Entries = Mapping[str, torch.Tensor]
COMPARED = 4  # units, each among others, until new ones share a run of the encoder


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
    _compared: Counter[str] = field(default_factory=Counter)  # by identity: kept units that were what was made of them
    _of_images: dict[Any, bool] = field(default_factory=dict)  # whether what is not packed is made of packed images

    def __post_init__(self) -> None:
        self._trials = UnitTrials(self.cache)

    def counts(self) -> dict[str, float]:
        """As metrics of a step, from 0 again."""
        found = {"features_read": float(self.read), "features_made": float(self.made)}
        self.read = self.made = 0
        return found

    @torch.no_grad()
    def features(self, asked: Sequence[Asked]) -> list[Entries]:
        """From disk, or encoded and kept there."""
        found: dict[int, Entries] = {}
        later: dict[tuple[Any, str], list[Partly]] = {}
        for number, (one, match, identity) in enumerate(asked):
            partly = self._partly(number, one, match, identity)
            if len(partly.kept) == len(set(partly.keys)):
                found[number] = self._laid_out(one, partly)
                self.read += len(partly.keys)
            elif partly.kept and self._may_move(partly, one, identity):
                later.setdefault((match.key, identity), []).append(partly)
            else:
                found[number] = self._whole(one, partly, identity)
        for own in later.values():
            one, _, identity = asked[own[0].number]
            found.update(self._together(one, own, identity))
        return [found[number] for number in range(len(asked))]

    def _partly(self, number: int, one: FrozenEncoder, match: Match, identity: str) -> Partly:
        entries = one.entries(match)
        units = self._units(one, identity, match, entries)
        keys = units.keys(identity, entries)
        kept = [self._read(key, one.spec.values, units, place) for place, key in enumerate(keys)]
        there = {key: unit for key, unit in zip(keys, kept) if unit is not None}
        return Partly(number, units, keys, entries, there)

    def _may_move(self, partly: Partly, one: FrozenEncoder, identity: str) -> bool:
        """Whether units may stand in each other's place."""
        enough = self._compared[identity] >= COMPARED and not self._trials.meets(identity)
        return enough and self._trials.place_is_free(partly.units, identity, one.encode, partly.entries)

    def _whole(self, one: FrozenEncoder, partly: Partly, identity: str) -> Entries:
        """Of a microbatch as it is; what is new in it is kept, what was kept is compared."""
        made = one.encode(partly.entries)
        self._keep(partly, partly.keys, partly.units.cut.parts(made), identity)
        return made

    def _together(self, one: FrozenEncoder, partly: Sequence[Partly], identity: str) -> dict[int, Entries]:
        """By number, of microbatches of one program."""
        found: dict[int, Entries] = {}
        made: dict[str, Entries] = {}
        there = {key: unit for other in partly for key, unit in other.kept.items()}  # what one has found serves all
        for run in runs(partly):
            if run.is_whole or self._trials.meets(identity):
                found[run.at.number] = self._whole(one, run.at, identity)
                made.update(zip(run.at.keys, run.at.units.cut.parts(found[run.at.number]), strict=True))
                continue
            parts = run.at.units.cut.parts(one.encode(run.entries()))
            self._keep(run.at, run.keys, parts, identity)
            made.update(zip(run.keys, parts, strict=True))
        for other in partly:
            if other.number in found:
                continue
            if self._trials.meets(identity):  # it has come out in between
                found[other.number] = self._whole(one, other, identity)
                continue
            self.read += sum(key in other.kept for key in other.keys)
            found[other.number] = self._laid_out(one, replace(other, kept={**there, **made, **other.kept}))
        return found

    def _keep(self, at: Partly, keys: Sequence[str], parts: Sequence[Entries], identity: str) -> None:
        """Of a run of the encoder at a microbatch's sizes."""
        for key, unit in zip(keys, parts, strict=True):
            kept = at.kept.get(key)
            if kept is None:
                self.cache.write(key, unit)
            elif all(close(kept[name], unit[name].cpu()) for name in unit):
                self._compared[identity] += 1
            elif not self._trials.meets(identity):
                log.warning(
                    "features: what is kept of an image is not what the encoder makes of it among others; features "
                    "serve whole microbatches alone from now on, and steps that read some of them had wrong ones"
                )
                self._trials.meet(identity)
        self.made += len(keys)

    def _laid_out(self, one: FrozenEncoder, partly: Partly) -> Entries:
        units = [partly.kept[key] for key in partly.keys]
        return {value.name: _laid_out(value, [unit[value.name] for unit in units]) for value in one.spec.values}

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
    return torch.cat([part.cpu() for part in parts], out=made) if len(parts) > 1 else made.copy_(parts[0])
