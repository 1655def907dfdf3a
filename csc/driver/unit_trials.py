"""Whether units of features may be kept apart, as tried on noise; what was tried is remembered on disk.

Terms
  trial      of the units of one microbatch: they do not meet (csc.driver.apart), and their probes are those that units
             with the same label have elsewhere, to rounding
  elsewhere  among other units, in number or in size: a trial that compared with one of these has shown something
  relied on  after TRIALS that have shown something, units of the encoder are not tried any more in programs that had
             a trial; with grids that differ within a microbatch only after as many such trials

    trials = UnitTrials(cache)
    trials.allow(units, identity, encode, entries) -> bool
    trials.place_is_free(units, identity, encode, entries) -> bool      to the bit, of units with the same label
    trials.meet(identity)                           it has come out that they do: from now on they are kept together
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field

import torch

from csc.cache.feature_entries import FeatureCache
from csc.driver.apart import Encode, Entries, are_apart, close, probes
from csc.driver.feature_units import Units

TRIALS = 4
SAMPLED = 64  # numbers of a probe that are kept
AMONG = "among"


@dataclass
class UnitTrials:
    """Of all encoders that keep features in a directory. identity: of one of them, with its weights."""

    cache: FeatureCache
    _meeting: set[str] = field(default_factory=set)
    _tried: dict[str, bool] = field(default_factory=dict)
    _shown: Counter[tuple[str, bool]] = field(default_factory=Counter)
    _programs: set[tuple[str, str]] = field(default_factory=set)
    _probes: dict[str, Entries] = field(default_factory=dict)
    _places: dict[str, bool] = field(default_factory=dict)  # whether they are free, by microbatch
    _free: dict[str, list[bool]] = field(default_factory=dict)  # the same by identity

    def allow(self, units: Units, identity: str, encode: Encode, entries: Entries) -> bool:
        """Whether these units of a microbatch may be kept apart."""
        if self.meets(identity):
            return False
        sizes = json.dumps([(name, list(entry.shape)) for name, entry in sorted(entries.items())])
        packed, mixed = bool(units.beside), len(set(units.labels)) > 1
        if packed and (identity, sizes) in self._programs and self._shown[identity, mixed] >= TRIALS:
            return True
        key = _hash("apart", identity, sizes, *units.labels)
        if key not in self._tried:
            self._tried[key] = self._remembered(key, units, identity, encode, entries, mixed)
        if self._tried[key]:
            self._programs.add((identity, sizes))
        elif packed:
            self.meet(identity)
        return self._tried[key]

    def place_is_free(self, units: Units, identity: str, encode: Encode, entries: Entries) -> bool:
        """Whether units with the same label have the same bits in each other's place: shown by the probes of a
        microbatch that has several of one label, and relied on after as many trials as above. Once it is not so, never.
        """
        known, labels = self._free.setdefault(identity, []), units.labels
        if all(known) and len(known) >= TRIALS:
            return True
        if not all(known) or len(set(labels)) == len(labels):
            return False
        key = _hash("free", identity, json.dumps([(n, list(e.shape)) for n, e in sorted(entries.items())]), *labels)
        if key not in self._places:
            first: dict[str, Entries] = {}
            found = zip(labels, probes(encode, entries, units.cut), strict=True)
            self._places[key] = all(_identical(first.setdefault(label, probe), probe) for label, probe in found)
            known.append(self._places[key])
        return self._places[key]

    def meets(self, identity: str) -> bool:
        """Whether a trial, here or in another process, has shown that images of different size meet."""
        if identity not in self._meeting and self.cache.read(_hash("meet", identity)) is not None:
            self._meeting.add(identity)
        return identity in self._meeting

    def meet(self, identity: str) -> None:
        """Units of this encoder are kept together from now on."""
        self._meeting.add(identity)
        self.cache.write(_hash("meet", identity), {"meet": torch.tensor(True)})

    def _remembered(self, key: str, units: Units, identity: str, encode: Encode, entries: Entries, mixed: bool) -> bool:
        known = self.cache.read(key)
        if known is not None and known.keys() >= {"apart", "shown"}:
            apart, shown = bool(known["apart"]), bool(known["shown"])
        else:
            apart, shown = self._trial(units, identity, encode, entries)
            self.cache.write(key, {"apart": torch.tensor(apart), "shown": torch.tensor(shown)})
        self._shown[identity, mixed] += apart and shown
        return apart

    def _trial(self, units: Units, identity: str, encode: Encode, entries: Entries) -> tuple[bool, bool]:
        """Whether they are apart, and whether a probe from elsewhere says so."""
        if units.cut.count > 1 and not are_apart(encode, entries, units.cut):
            return False, False
        among, shown = _hash(*sorted(units.labels)), False
        beyond = str([(name, list(entries[name].shape[1:])) for name in sorted(units.cut.entries)])
        for label, probe in zip(units.labels, probes(encode, entries, units.cut), strict=True):
            here = {name: _sampled(value) for name, value in probe.items()}
            there = self._probe(_hash("probe", identity, beyond, label), here, among)
            if there.keys() != {*here, AMONG} or any(not _alike(there[name], here[name]) for name in here):
                self.meet(identity)  # elsewhere it is another: what lies beside a unit counts
                return False, False
            shown = shown or not torch.equal(there[AMONG], _number(among))
        return True, shown

    def _probe(self, key: str, here: Entries, among: str) -> Entries:
        """The first probe with a label; this one if there was none. The disk's, so that processes agree."""
        if key not in self._probes:
            if self.cache.read(key) is None:
                self.cache.write(key, {**here, AMONG: _number(among)})
            self._probes[key] = self.cache.read(key) or {**here, AMONG: _number(among)}
        return self._probes[key]


def _alike(there: torch.Tensor, here: torch.Tensor) -> bool:
    return there.shape == here.shape and there.dtype == here.dtype and close(there, here)


def _identical(one: Entries, other: Entries) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def _sampled(value: torch.Tensor) -> torch.Tensor:
    """Evenly spaced numbers of it."""
    flat = value.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].cpu().clone()


def _number(text: str) -> torch.Tensor:
    return torch.tensor(int(text[:15], 16))


def _hash(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
