"""Which processes of a job have died: seen within milliseconds, by whoever is left.

Terms
  death    the connection to a process ended without a word: it was killed, or its machine's kernel closed it
  leaving  a process says so before it ends by itself, also with an error: that is no death
  silent   a process that is stopped, or cut off from the network, is neither: its connection lasts

Each process has a connection to each other one, over which nothing is sent, and one thread that looks at all of them. A
backend tells of a death only those that wait for the dead one; here all learn of it, whatever they wait for.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence, Set
from multiprocessing.util import Finalize

from csc.errors import RankLost

BYE = b"b"
HELLO = struct.Struct("!i")
Address = tuple[str, int]


class Deaths:
    """As one process sees them. dead: when each was seen, in seconds of time.time()."""

    def __init__(self, rank: int, ranks: int, host: str) -> None:
        self.rank, self._ranks = rank, ranks
        self.dead: dict[int, float] = {}
        self.left: set[int] = set()
        self._news = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1" if host == "127.0.0.1" else "", 0), backlog=ranks)
        self.address: Address = host, self._listener.getsockname()[1]
        self._of: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._closed = False
        os.register_at_fork(after_in_child=self._forked)

    def connect(self, addresses: Sequence[Address], seconds: float) -> None:
        """To all others; addresses: of all ranks, in order. RankLost if one cannot be reached."""
        for rank in range(self.rank):
            try:
                connection = socket.create_connection(addresses[rank], timeout=seconds)
                connection.sendall(HELLO.pack(self.rank))
            except OSError as error:
                raise RankLost(
                    f"rank {rank} cannot be reached at {addresses[rank][0]} ({error})", f"rank {self.rank}",
                    "survive= needs connections between all processes: open the ports between the machines",
                ) from error  # fmt: skip
            self._add(rank, connection)
        self._listener.settimeout(seconds)
        for _ in range(self.rank + 1, self._ranks):
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(seconds)
                (rank,) = HELLO.unpack(connection.recv(HELLO.size, socket.MSG_WAITALL))
            except (OSError, struct.error) as error:
                raise RankLost(
                    f"not all ranks came together ({error})", f"rank {self.rank}",
                    "Check that every process was started, and that they reach each other",
                ) from error  # fmt: skip
            self._add(rank, connection)
        threading.Thread(target=self._watch, name="csc-deaths", daemon=True).start()
        Finalize(self, self.close, exitpriority=0)

    def _add(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._of[rank] = connection
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def _watch(self) -> None:
        while not self._closed and self._of:
            for key, _ in self._selector.select(timeout=1.0):
                try:
                    message = key.fileobj.recv(16)  # type: ignore[union-attr]
                except BlockingIOError:
                    continue
                except OSError:
                    message = b""
                with self._news:
                    if message:
                        self.left.add(key.data)
                    else:
                        if key.data not in self.left and not self._closed:
                            self.dead[key.data] = time.time()
                        self._selector.unregister(key.fileobj)
                        self._of.pop(key.data).close()
                    self._news.notify_all()

    def wait(self, among: Set[int], seconds: float) -> bool:
        """Whether one of these ranks has died or left by now, or does within so many seconds."""
        with self._news:
            return self._news.wait_for(lambda: bool((self.dead.keys() | self.left) & among), seconds)

    def close(self) -> None:
        """Say that this process leaves."""
        if self._closed:
            return
        self._closed = True
        for connection in list(self._of.values()):
            with contextlib.suppress(OSError):
                connection.send(BYE)

    def end_as_dead(self) -> None:
        """Have the others see this process' end as a death, now: it says nothing."""
        self._closed = True
        for connection in list(self._of.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _forked(self) -> None:
        """In a process that this one forks: its copies of the connections would outlive this one."""
        self._closed = True
        for connection in (*self._of.values(), self._listener):
            with contextlib.suppress(OSError):
                os.close(connection.detach())


def own_host() -> str:
    """By the address of the process where all meet (MASTER_ADDR)."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(os.environ.get("MASTER_PORT", "0") or 0) or 9))  # nothing is sent
        return str(probe.getsockname()[0])
    return "127.0.0.1"
