"""What a frozen encoder makes of the batch to come, made in the step before, where ranks would wait.

Terms: see csc.driver.frozen_encoders.
  key    of a microbatch: a digest of the encoder's identity and of the values of what it takes

    ahead = FeaturesAhead()                             a source of features (csc.driver.frozen_encoders)
    ahead.encoding(encoders, matches, trainer)          for the step before that of these microbatches; None: not there
    ahead.keep(encoding)                                after that step

What was made serves microbatches with its key and no others. So a batch that is not the one announced, a weight that
was written since, ranks that were told of different batches: each finds nothing, and is encoded when its step begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from csc.capture.guards import Match
from csc.driver.feature_units import whole
from csc.driver.frozen_encoders import Asked, FrozenEncoder, FrozenEncoders
from csc.runtime.executor import Encoding, Made, Place, orders
from csc.runtime.trainer import Trainer

Entries = Mapping[str, torch.Tensor]


class FeaturesAhead:
    """Of one model. It holds what was made for one step."""

    option = "encode_ahead"

    def __init__(self) -> None:
        self._there: dict[bytes, Entries] = {}
        self._ahead = self._made = 0

    def counts(self) -> dict[str, float]:
        """As metrics of a step, from 0 again: microbatches encoded before their step, and at its beginning."""
        found = {"features_ahead": float(self._ahead), "features_made": float(self._made)}
        self._ahead = self._made = 0
        return found

    def features(self, asked: Sequence[Asked]) -> list[Entries]:
        """What was made ahead, or is made now."""
        return [self._features(*one) for one in asked]

    def _features(self, one: FrozenEncoder, match: Match, identity: str) -> Entries:
        entries = one.entries(match)
        found = self._there.get(_key(one, entries, identity))
        self._ahead, self._made = self._ahead + (found is not None), self._made + (found is None)
        return one.encode(entries) if found is None else found

    def encoding(self, encoders: FrozenEncoders, matches: Sequence[Match], trainer: Trainer) -> Encoding | None:
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
            if place[0] in trainer.replicas and (one := encoders.of(match)) is not None
        }
        if any(entry.is_meta for _, entries in found.values() for entry in entries.values()):
            return None

        def make(place: Place) -> Made:
            one, entries = found[place]
            return Made(_key(one, entries, encoders.identity(one)), one.encode(entries))

        return Encoding(manifest, order, {place: one.spec.values for place, (one, _) in found.items()}, make)

    def keep(self, encoding: Encoding | None) -> None:
        """What was made in the step that is over, in place of what was made for it."""
        arrived = encoding.arrived if encoding is not None else {}
        self._there = {made.key: made.values for made in arrived.values()}


def _key(one: FrozenEncoder, entries: Entries, identity: str) -> bytes:
    (key,) = whole(entries, one.spec.values).keys(identity, entries)
    return bytes.fromhex(key)
