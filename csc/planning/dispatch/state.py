"""One mask under a dispatch that changes: how many blocks of each rank need each block of keys, and what follows.

Terms: *freed* keys are those that only the leaving block needed, *added* ones those that nobody on the rank needed
before; with counts of needs both are sums over bits. In self-attention a block's own keys count as needed by it, so
what a rank owns is never foreign, and swaps stay additive although keys move with their blocks. *Hidden*
communication: even all keys to all ranks take less time than the mean load, so that volumes change no time.

    MaskState(prepared, number, ranks_of_blocks)
    .times() -> float64 [P];   .seconds() -> float;   .pairs(a, mine, theirs, owner) -> Pairs
    .swap(a, b, i, j), then .refresh(ranks_of_blocks);   .keep() and .restore(kept)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from csc.planning.dispatch import bits
from csc.planning.dispatch.evaluate import Prepared, volumes
from csc.planning.dispatch.workload import Rates


class Pairs(NamedTuple):
    """What a swap would lead to, for every pair of a block of rank a and one of another; float32 [mine, theirs]."""

    time_a: np.ndarray
    time_b: np.ndarray
    added: np.ndarray


class Undo(NamedTuple):
    """What `restore` needs besides the swaps taken back."""

    received: np.ndarray
    sent: np.ndarray
    readers: np.ndarray


def seconds(rates: Rates, load: np.ndarray, volume: np.ndarray) -> np.ndarray:
    """Rates.seconds for arrays; the arguments stay as they are."""
    compute, communication = load * rates.tile_seconds, volume * rates.block_seconds
    forward = np.maximum(compute, communication)
    compute *= rates.backward_compute
    communication *= rates.backward_communication
    forward += np.maximum(compute, communication, out=compute)
    return forward


class MaskState:
    """Counts, loads and volumes of one mask, by rank."""

    def __init__(self, prepared: Prepared, number: int, ranks_of_blocks: np.ndarray) -> None:
        mask, n = prepared.masks[number], len(ranks_of_blocks)
        self.layers, self.loads, self.shares, self.fixed = mask.layers, mask.loads, mask.shares, mask.owners
        self.rates, self.ranks = prepared.workload.rates, prepared.workload.ranks
        self.needs, self.sets = mask.reach, mask.closed
        self.factor = self.layers * self.rates.seconds(1.0, 0.0)  # of a full tile, where communication is hidden
        chosen = np.zeros((self.ranks, n), np.float32)
        chosen[ranks_of_blocks, np.arange(n)] = 1
        self.counts = (chosen @ mask.reach_float).astype(np.int16)
        self.load = np.bincount(ranks_of_blocks, weights=mask.loads, minlength=self.ranks)
        self.received = self.sent = self.readers = np.zeros(self.ranks)
        owners = ranks_of_blocks if self.fixed is None else self.fixed
        mean, most = mask.loads.sum() / self.ranks, np.bincount(owners, minlength=self.ranks).max() * (self.ranks - 1)
        self.hidden = self.rates.seconds(mean, max(most, len(mask.shares))) == self.rates.seconds(mean, 0)
        self.refresh(ranks_of_blocks)

    def refresh(self, ranks_of_blocks: np.ndarray) -> None:
        """Volumes after swaps."""
        if self.hidden:
            return
        owners = ranks_of_blocks if self.fixed is None else self.fixed
        self.received, self.sent = volumes(self.counts > 0, owners, self.shares)
        self.readers = np.count_nonzero(self.counts, axis=0) - (1 if self.fixed is None else 0)

    def keep(self) -> Undo:
        return Undo(self.received, self.sent, self.readers)

    def restore(self, kept: Undo) -> None:
        self.received, self.sent, self.readers = kept

    def times(self) -> np.ndarray:
        """Seconds of each rank, if it ran alone."""
        return self.layers * seconds(self.rates, self.load, np.maximum(self.received, self.sent))

    def seconds(self) -> float:
        """Of all layers with this mask."""
        volume = max(self.received.max(), self.sent.max())
        return self.layers * self.rates.seconds(float(self.load.max()), float(volume))

    def swap(self, a: int, b: int, i: int, j: int) -> None:
        """Block i of a and block j of b change places; volumes are stale until `refresh`."""
        change = self.needs[j] - self.needs[i]
        self.counts[a] += change
        self.counts[b] -= change
        shift = self.loads[i] - self.loads[j]
        self.load[a] -= shift
        self.load[b] += shift

    def pairs(self, a: int, mine: np.ndarray, theirs: np.ndarray, owner: np.ndarray) -> Pairs:
        """All swaps of one of `mine`, blocks of a, with one of `theirs`, blocks of the ranks `owner`.

        As if the two blocks had no key in common and a short block were whole: close, not exact.
        """
        there = np.zeros(self.ranks, bool)
        there[owner] = True
        partners, place = np.flatnonzero(there), (np.cumsum(there) - 1)[owner]
        zero, one = self._foreign(np.concatenate([[a], partners]))
        sets_mine, sets_theirs = self.sets[:, mine], self.sets[:, theirs]
        freed_a = bits.size(sets_mine & one[:, 0, None]).astype(np.float32)
        added_a = bits.size(sets_theirs & zero[:, 0, None]).astype(np.float32)
        freed_b = bits.size(sets_theirs & one[:, 1 + place]).astype(np.float32)
        added_b = bits.size(sets_mine[:, None] & zero[:, 1:, None]).astype(np.float32)  # [partners, mine]
        received_a = added_a - freed_a[:, None]
        received_b = (added_b.T if len(partners) == 1 else added_b[place].T) - freed_b
        added = received_a + received_b
        unit = self.factor if self.hidden else 1.0  # seconds at once where loads alone decide
        shift = (unit * self.loads[mine]).astype(np.float32)[:, None] - (unit * self.loads[theirs]).astype(np.float32)
        load_a = np.float32(unit * self.load[a]) - shift
        load_b = np.add(shift, (unit * self.load[owner]).astype(np.float32), out=shift)
        if self.hidden:
            return Pairs(load_a, load_b, added)
        received_a += np.float32(self.received[a])
        received_b += self.received[owner].astype(np.float32)
        sent_a, sent_b = self._sent(a, mine, theirs, owner, partners, place)
        volume_a = np.maximum(received_a, sent_a, out=received_a)
        volume_b = np.maximum(received_b, sent_b, out=received_b)
        layers = np.float32(self.layers)
        time_a, time_b = seconds(self.rates, load_a, volume_a), seconds(self.rates, load_b, volume_b)
        return Pairs(np.multiply(layers, time_a, out=time_a), np.multiply(layers, time_b, out=time_b), added)

    def _sent(
        self, a: int, mine: np.ndarray, theirs: np.ndarray, owner: np.ndarray, partners: np.ndarray, place: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What a and the others would send. A block's keys move with it: to its readers less the new owner, plus the
        old one if that still reads them."""
        sent_a, sent_b = np.float32(self.sent[a]), self.sent[owner].astype(np.float32)
        if self.fixed is not None:
            return np.asarray(sent_a), sent_b
        readers, counts = self.readers, self.counts
        mine_b = readers[mine] - (counts[partners][:, mine] > 0) + (counts[a, mine] > 1)  # [partners, mine]
        theirs_a = readers[theirs] - (counts[a, theirs] > 0) + (counts[owner, theirs] > 1)
        sent_a = sent_a - readers[mine].astype(np.float32)[:, None] + theirs_a.astype(np.float32)
        sent_b = (sent_b - readers[theirs].astype(np.float32)) + mine_b.astype(np.float32)[place].T
        return sent_a, sent_b

    def _foreign(self, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Columns of the keys that none, and that exactly one of these ranks' blocks needs, owned ones left out."""
        counts = self.counts[ranks]
        if self.fixed is not None:
            counts[self.fixed == ranks[:, None]] = 2
        return bits.pack(counts == 0), bits.pack(counts == 1)
