"""Where every rank stands, for what a timeout says.

Terms
  place      what a rank is doing: an action of its schedule, a meeting; None: between steps, in code of the user
  waits      what for, and the rank that it comes from (None: from any of several)
  failure    what went wrong on this rank, while it meets the others over it
  tell       write into the store of the process group. A rank begins once it has stood at a place for a while, so that
             nothing is written while all is well, and tells at every look from then on: one that has become silent is
             stopped

    positions = Positions(store, rank, ranks, seconds)      starts a thread that tells; .close()
    positions.moved(action)                                 positions.waits = ("layers.7", 2), or None
    store_of_processes(name) -> Store or None
    positions.told() -> "rank 3, before F of stage 2, microbatch 5, waits for layers.7 from rank 2; rank 2, ..."
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from csc.ir.schedule import WHOLE, Action

SHOWN = 8  # ranks that a sentence names
TICKS, SHORTEST, LONGEST = 20, 0.05, 5.0  # of a timeout; seconds
CONNECTING = 10  # seconds
STALE = 2  # a part of a timeout after which a rank that has told nothing more is stopped; at least 5 s

Place = Action | str | None
Waits = tuple[str, int | None]


def store_of_processes(name: str) -> dist.Store | None:
    """A connection of its own to the store where the processes found each other, and in it what is said under a name;
    None if the environment does not say where it is (MASTER_ADDR, MASTER_PORT).
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        return None
    try:
        store = dist.TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=CONNECTING))
    except dist.DistError:
        return None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"csc/positions/{attempt}/{name}", store)


@dataclass(frozen=True)
class Standing:
    """Of one rank, as it told. silent: seconds since then, if that is long; 0: it stands there now."""

    place: str
    waits: str = ""
    peer: int | None = None
    silent: float = 0.0

    def text(self, rank: int) -> str:
        """In a clause."""
        source = "" if self.peer is None else f" from rank {self.peer}"
        stands = f"rank {rank}, {self.place}" + (f", waits for {self.waits}{source}" if self.waits else "")
        if not self.silent:
            return stands
        return (
            f"{stands} (said {self.silent:.0f} s ago and nothing since: stopped, or in a call that holds Python's lock)"
        )


class Positions:
    """One rank's. store: None: nobody is told. seconds: after which a silent rank counts as lost."""

    def __init__(self, store: dist.Store | None, rank: int, ranks: int, seconds: float) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._patience = max(LONGEST, seconds / STALE)
        self.place: Place = None
        self.waits: Waits | None = None
        self.failure: BaseException | None = None  # which this rank is about to raise, and first tells the others
        self._done = threading.Event()
        if store is not None:
            every = min(LONGEST, max(SHORTEST, seconds / TICKS))
            arguments = (weakref.ref(self), self._done, every)
            threading.Thread(target=_watch, args=arguments, name="csc-positions", daemon=True).start()
            weakref.finalize(self, self._done.set)

    def moved(self, place: Place) -> None:
        """It is there now, and waits for nothing."""
        self.place, self.waits = place, None

    def close(self) -> None:
        """Tell nobody any more."""
        self._done.set()

    @property
    def now(self) -> Standing:
        """Where this rank stands."""
        waits = self.waits
        return Standing(_words(self.place), *(waits if waits is not None else ()))

    def tell(self, standing: Standing) -> bool:
        """False if the store is gone."""
        assert self._store is not None
        try:
            told = [standing.place, standing.waits, standing.peer, time.time()]
            self._store.set(str(self._rank), json.dumps(told))
        except RuntimeError:
            return False
        return True

    def told(self) -> str:
        """To be added to a sentence: this rank's place, and those of the ranks that it waits for, each for the next;
        where it waits for any of several, those that wait for nobody. "" if nobody can be asked.
        """
        if self._store is None:
            return ""
        try:
            own = self.now
            found = {self._rank: own.text(self._rank)}
            if own.peer is None:
                found |= self._idle()
            else:
                peer: int | None = own.peer
                while peer is not None and peer not in found and len(found) < SHOWN:
                    standing = self._of(peer)
                    found[peer] = standing.text(peer) if standing else f"rank {peer} has not said where it is"
                    peer = standing.peer if standing else None
            return f". Where they stand: {'; '.join(found.values())}"
        except RuntimeError:  # the store is gone as well
            return ""

    def _idle(self) -> dict[int, str]:
        """Other ranks that wait for nobody."""
        found: dict[int, str] = {}
        for rank in range(self._ranks):
            standing = self._of(rank) if rank != self._rank else None
            if rank != self._rank and len(found) < SHOWN - 1 and (standing is None or not standing.waits):
                found[rank] = standing.text(rank) if standing else f"rank {rank} has not said where it is"
        return found

    def _of(self, rank: int) -> Standing | None:
        assert self._store is not None
        if not self._store.check([str(rank)]):
            return None
        place, waits, peer, when = json.loads(self._store.get(str(rank)))
        ago = time.time() - when  # by the clocks of two machines, which differ by less than a rank is waited for
        return Standing(place, waits, peer, ago if ago > self._patience else 0.0)


def _words(place: Place) -> str:
    if place is None:
        return "between steps"
    if isinstance(place, str):
        return f"at {place}"
    if place.kind == "REDUCE":
        return "at REDUCE, the sum of gradients"
    if place.kind in WHOLE:
        return f"at {place}"
    which = {"SEND": "after", "RECV": "before"}.get(place.kind, "at")
    kind = place.message or place.kind
    return f"{which} {kind} of stage {place.stage}, microbatch {place.microbatch}"


def _watch(positions: weakref.ref[Positions], done: threading.Event, every: float) -> None:
    """Tell a place that the rank has stood at since the last look, and at every look from then on where it is."""
    before, speaks = None, False
    while not done.wait(every):
        one = positions()
        if one is None:
            return
        now = one.now
        speaks = speaks or now == before
        if speaks and not one.tell(now):
            return
        before = now
        del one
