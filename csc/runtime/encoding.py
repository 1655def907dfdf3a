"""Encoding for the step to come, in the middle of a step: what a rank makes there, and who is given it.

Terms
  made     of a microbatch of the next step: what the encoder makes of it, and a key of all that decides that
  readers  positions whose stages read what is made; only they need it
  orders   of each position: how many of its computes come before it encodes which microbatches

    encoding = Encoding(manifest, orders, values, make)    of one step, as far as this process' ranks run it
    encoding.of(rank) -> RankEncoding                      .run(computes)  .exchange()
    encoding.arrived                                       what this process' readers have, after the step
    orders(manifest) -> Orders | None                      None: nothing is encoded
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from csc.runtime.rank import Rank
from csc.runtime.specs import Manifest, MessageSpec, ValueSpec

DIGEST = 32  # bytes of a key
KEY = ValueSpec("key", (DIGEST,), (1,), torch.uint8)
Place = tuple[int, int]  # replica, microbatch
Orders = Sequence[Mapping[int, Sequence[int]]]


@dataclass(frozen=True)
class Made:
    """values: by name. key: a digest."""

    key: bytes
    values: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Encoding:
    """values: of each microbatch of the next step what is made of it; those of which nothing is are left out. make: to
    be called for these.
    """

    manifest: Manifest
    orders: Orders
    values: Mapping[Place, tuple[ValueSpec, ...]]
    make: Callable[[Place], Made]
    arrived: dict[Place, Made] = field(default_factory=dict)

    def of(self, rank: Rank) -> RankEncoding:
        """What a rank does of it."""
        return RankEncoding(self, rank)


@dataclass
class RankEncoding:
    """Of one rank in one step."""

    whole: Encoding
    rank: Rank
    made: dict[Place, Made] = field(default_factory=dict)

    def run(self, computes: int) -> None:
        """What it encodes after so many F, B and W of its own."""
        (replica,) = self.rank.replicas  # programs whose replicas share ranks encode nothing ahead
        for mb in self.whole.orders[self.rank.position].get(computes, ()):
            place = (replica, mb)
            if place in self.whole.values:
                self.made[place] = self.whole.make(place)

    def exchange(self) -> Generator[str, None, None]:
        """At the end of a step: give readers what they are to have, and take what others made."""
        here, manifest, endpoint = self.rank.position, self.whole.manifest, self.rank.endpoint
        readers = reading(manifest)
        for place, made in self.made.items():
            for reader in readers:
                if reader != here:
                    sent = torch.frombuffer(bytearray(made.key), dtype=torch.uint8).to(self.rank.device)
                    message = self._message(place, here, reader)
                    endpoint.send(message, manifest.microbatches + place[1], {**made.values, KEY.name: sent})
        if here not in readers:
            return
        self.whole.arrived.update(self.made)
        (replica,) = self.rank.replicas
        coming = [
            ((replica, mb), self._message((replica, mb), maker, here))
            for mb, maker in sorted(_makers(self.whole.orders).items())
            if maker != here and (replica, mb) in self.whole.values
        ]
        for place, message in coming:
            endpoint.post(message, manifest.microbatches + place[1])
        for place, message in coming:
            while (found := endpoint.receive(message, manifest.microbatches + place[1])) is None:
                yield f"features of microbatch {place[1]} of the next step"
            key = bytes(found.pop(KEY.name).cpu().numpy().tobytes())
            self.whole.arrived[place] = Made(key, found)

    def _message(self, place: Place, maker: int, reader: int) -> MessageSpec:
        """Between a stage of either. Its microbatches are numbered behind those of the step."""
        first = [self.whole.manifest.stages_of(position)[0].stage for position in (maker, reader)]
        return MessageSpec("F", first[0], first[1], (*self.whole.values[place], KEY))


def _makers(orders: Orders) -> dict[int, int]:
    """The position that encodes a microbatch."""
    return {mb: position for position, order in enumerate(orders) for own in order.values() for mb in own}


def reading(manifest: Manifest) -> list[int]:
    """The positions on the pp axis whose stages read what encoders make."""
    entries = set(manifest.features.entries) if manifest.features is not None else set[str]()
    return sorted({stage.rank for stage in manifest.stages if entries.intersection(stage.inputs)})


def orders(manifest: Manifest) -> Orders | None:
    """Where in its step each position encodes for the next one; None: nothing is encoded."""
    listed = manifest.plan.get("ahead")
    if listed is None or manifest.features is None:
        return None
    return [{place: tuple(own) for place, own in order} for order in listed]
