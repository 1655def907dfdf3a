"""What a frozen encoder makes of the batch to come, made in the step before, where ranks would wait.

Terms: see csc.driver.frozen_encoders.
  key    of a microbatch: a digest of the encoder's identity and of the values of what it takes

    ahead = FeaturesAhead(model)                        add, complete, counts and inputs as of csc.driver.kept_features
    ahead.encoding(matches, trainer) -> Encoding        for the step before that of these microbatches; None: not there
    ahead.keep(encoding)                                after that step

What was made serves microbatches with its key and no others. So a batch that is not the one announced, a weight that
was written since, ranks that were told of different batches: each finds nothing, and is encoded when its step begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from csc.capture.guards import Match
from csc.driver.feature_units import whole
from csc.driver.frozen_encoders import FrozenEncoder, FrozenEncoders
from csc.runtime.encoding import Encoding, Made, Place, orders
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.trainer import Trainer

Entries = Mapping[str, torch.Tensor]


class FeaturesAhead:
    """Of one model. It holds what was made for one step."""

    def __init__(self, model: nn.Module) -> None:
        self._encoders = FrozenEncoders(model, "encode_ahead")
        self._there: dict[bytes, Entries] = {}
        self._ahead = self._made = 0

    def add(self, match: Match, program: LoadedProgram) -> None:
        """The program of microbatches like this one. InputError if the encoder has no weights here."""
        self._encoders.add(match, program)

    def counts(self) -> dict[str, float]:
        """As metrics of a step, from 0 again: microbatches encoded before their step, and at its beginning."""
        found = {"features_ahead": float(self._ahead), "features_made": float(self._made)}
        self._ahead = self._made = 0
        return found

    @property
    def inputs(self) -> frozenset[str]:
        """The entries of batches that encoders read."""
        return self._encoders.inputs

    def complete(self, match: Match, here: bool) -> dict[str, Any]:
        """The microbatch with its features. here: this process reads them."""
        return self._encoders.complete(match, self._features if here else None)

    def _features(self, one: FrozenEncoder, match: Match) -> Entries:
        entries = one.entries(match)
        found = self._there.get(self._key(one, entries))
        self._ahead, self._made = self._ahead + (found is not None), self._made + (found is None)
        return one.encode(entries) if found is None else found

    def _key(self, one: FrozenEncoder, entries: Entries) -> bytes:
        (key,) = whole(entries, one.spec.values).keys(self._encoders.identity(one), entries)
        return bytes.fromhex(key)

    def encoding(self, matches: Sequence[Match], trainer: Trainer) -> Encoding | None:
        """matches: of the microbatches of the next step, of all replicas or of this process' own. None: nothing is
        encoded, or this process lacks what encoders take.
        """
        manifest = trainer.program.manifest
        order, count = orders(manifest), manifest.microbatches
        if order is None:
            return None
        own = (
            sorted(trainer.replicas) if len(matches) == count * len(trainer.replicas) else list(manifest.mesh.replicas)
        )
        placed = {(replica, mb): matches[n * count + mb] for n, replica in enumerate(own) for mb in range(count)}
        found = {
            place: (one, one.entries(match))
            for place, match in placed.items()
            if place[0] in trainer.replicas and (one := self._encoders.of(match)) is not None
        }
        if any(entry.is_meta for _, entries in found.values() for entry in entries.values()):
            return None

        def make(place: Place) -> Made:
            one, entries = found[place]
            return Made(self._key(one, entries), one.encode(entries))

        return Encoding(manifest, order, {place: one.spec.values for place, (one, _) in found.items()}, make)

    def keep(self, encoding: Encoding | None) -> None:
        """What was made in the step that is over, in place of what was made for it."""
        arrived = encoding.arrived if encoding is not None else {}
        self._there = {made.key: made.values for made in arrived.values()}
