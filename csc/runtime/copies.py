"""Copies of what a rank has computed, in the memory of another one: there if the first is killed.

Terms
  holder   who has the copies of a rank; each rank sends to one, and holds those of whoever sends to it
  copy     tensors under a key, with what is said about them; the newest whole one of each key is held

Copies go over connections of their own, by a thread: a holder that dies costs the sender nothing but its copies, and
what a killed rank has sent arrives.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

HEAD = struct.Struct("!iq")  # the sender, or the bytes of a text; and bytes of tensors
Address = tuple[str, int]


@dataclass(frozen=True)
class Copy:
    """about: what can be said in JSON."""

    about: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


@dataclass
class _Sender:
    """The copies of one rank, as its holder has them. done: nothing more comes."""

    copies: dict[str, Copy] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)


class Copies:
    """Of one process. seconds: for which a holder that takes nothing is waited for."""

    def __init__(self, rank: int, host: str, seconds: float) -> None:
        self._rank, self._seconds = rank, seconds
        self._listener = socket.create_server(("127.0.0.1" if host == "127.0.0.1" else "", 0))
        self.address: Address = host, self._listener.getsockname()[1]
        self._holder: socket.socket | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._senders: dict[int, _Sender] = {}
        self._sockets: list[socket.socket] = [self._listener]
        self.sent = 0  # bytes, in all
        os.register_at_fork(after_in_child=self._forked)
        threading.Thread(target=self._accept, name="csc-copies", daemon=True).start()

    @property
    def is_on(self) -> bool:
        """Whether there is a holder."""
        return self._holder is not None

    def to(self, address: Address | None) -> None:
        """Send to this process from now on."""
        self.wait()
        if self._holder is not None:
            self._holder.close()
            self._holder = None
        if address is not None:
            with contextlib.suppress(OSError):  # it has died meanwhile
                self._holder = socket.create_connection(address, timeout=self._seconds)
                self._holder.sendall(HEAD.pack(self._rank, 0))
                self._sockets.append(self._holder)

    def wait(self) -> None:
        """Until what was sent last is on its way, whatever becomes of this process. A holder that takes nothing is
        given up.
        """
        if not self._idle.wait(self._seconds) and self._holder is not None:
            self._holder.close()
            self._holder = None
            self._idle.set()

    def send(self, key: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """A copy of these. It waits for the one before."""
        self.wait()
        if self._holder is None:
            return
        listed = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()
        ]
        text = json.dumps({"key": key, "about": about, "tensors": listed}).encode()
        parts = [_bytes(tensor) for tensor in tensors.values()]
        payload = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        self.sent += payload.numel()
        self._idle.clear()
        threading.Thread(target=self._sending, args=(self._holder, text, payload), daemon=True).start()

    def _sending(self, holder: socket.socket, text: bytes, payload: torch.Tensor) -> None:
        try:
            holder.sendall(HEAD.pack(len(text), payload.numel()) + text)
            holder.sendall(payload.numpy().data)
        except OSError:
            if self._holder is holder:
                self._holder = None
        finally:
            self._idle.set()

    # as a holder

    def of(self, rank: int) -> dict[str, Copy]:
        """All that a rank has sent that is dead, or sends no more."""
        sender = self._senders.get(rank)
        if sender is None:
            return {}
        sender.done.wait(self._seconds)
        return dict(sender.copies)

    def drop(self, rank: int, key: str) -> None:
        """Hold one of a rank no more."""
        self._senders[rank].copies.pop(key)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(self._seconds)
                rank, _ = HEAD.unpack(_read(connection, HEAD.size))
                connection.settimeout(None)
            except (OSError, struct.error, EOFError):
                if self._listener.fileno() < 0:
                    return
                continue
            sender = self._senders[rank] = _Sender()
            self._sockets.append(connection)
            threading.Thread(target=self._receive, args=(connection, sender), name="csc-copies", daemon=True).start()

    def _receive(self, connection: socket.socket, sender: _Sender) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError), connection:
            while True:
                size, payload = HEAD.unpack(_read(connection, HEAD.size))
                header = json.loads(_read(connection, size))
                data, tensors, offset = (
                    torch.frombuffer(_read(connection, payload) or bytearray(1), dtype=torch.uint8),
                    {},
                    0,
                )
                for name, dtype, shape in header["tensors"]:
                    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                    count = tensor.numel() * tensor.element_size()
                    _bytes(tensor).copy_(data[offset : offset + count])
                    tensors[name], offset = tensor, offset + count
                sender.copies[header["key"]] = Copy(header["about"], tensors)
        sender.done.set()

    def _forked(self) -> None:
        """In a process that this one forks: its copies of the connections would outlive this one."""
        self._holder = None
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                os.close(connection.detach())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def _read(connection: socket.socket, size: int) -> bytearray:
    """EOFError if the other one is gone before."""
    buffer = bytearray(size)
    view, filled = memoryview(buffer), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if not count:
            raise EOFError
        filled += count
    return buffer
