"""Transports: how ranks exchange values. Here what one must do, and one with all ranks in this process.

Terms: an *endpoint* is one rank's side of a transport. A *ticket* stands for a sum over ranks that has been
started. Messages of a channel arrive in the order in which they were sent.

    Transport                  the ranks of this process, their endpoints, sums over processes
    Endpoint                   send, post, receive, drain, and start_ and finish_ of sum, scatter, gather, exchange
    InProcess(program)         mailboxes; a receive that is not there yet returns None
    laid_out(message, values)  the values of a message, checked and brought to its strides

The c10d transport is in csc.runtime.c10d.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from csc.errors import ProgramError
from csc.ir.groups import Group
from csc.ir.schedule import Action, Message
from csc.runtime.consistency import Shared
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.meeting import Meeting
from csc.runtime.specs import Manifest, MessageSpec, ValueSpec
from csc.runtime.spread import Recent
from csc.runtime.threads import Turns


class Endpoint(Protocol):
    """One rank's side. Everything is done in the order in which the rank asks for it.

    recent: how tokens of the last microbatches were spread over ranks. under_way: what a layer's operators have begun
    and not finished, by ticket; nothing at the start of a step.
    """

    rank: int
    recent: Recent
    under_way: dict[int, Any]

    def at(self, place: Action | str) -> None:
        """The rank is at this action now."""

    def send(self, message: MessageSpec, microbatch: int, values: Mapping[str, torch.Tensor]) -> None:
        """Send a message's values. Never waits for the receiver."""

    def post(self, message: MessageSpec, microbatch: int) -> None:
        """Announce a receive, so that the data can arrive while something else is computed."""

    def receive(self, message: MessageSpec, microbatch: int) -> dict[str, torch.Tensor] | None:
        """The values, by name, with the strides of the message; None if they are not there and waiting is no
        use.
        """

    def start_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...], why: str, ordered: bool = False) -> Any:
        """Begin to sum `tensor` over these ranks, in place. All of them call it, in the same order.

        ordered: add the highest rank first, whatever the backend would do. Returns a ticket.
        """

    def finish_sum(self, ticket: Any) -> bool:
        """True once the tensor holds the sum, the same bits on every rank; False: ask again later."""

    def start_scatter(self, rows: torch.Tensor, ranks: tuple[int, ...], why: str) -> Any:
        """Begin to sum `rows`, of which each of these ranks gets one, in their order. All of them call it, in the same
        order. Returns a ticket.
        """

    def finish_scatter(self, ticket: Any) -> torch.Tensor | None:
        """This rank's row of the sum, the highest rank added first; None: ask again later."""

    def start_gather(self, flat: torch.Tensor, ranks: tuple[int, ...], why: str) -> Any:
        """Begin to bring together what these ranks give, all of one size and one dimension. All of them call it, in the
        same order. Returns a ticket.
        """

    def finish_gather(self, ticket: Any) -> torch.Tensor | None:
        """A row of each rank, in their order, dense; None: ask again later."""

    def start_exchange(
        self, sends: Mapping[int, Sequence[torch.Tensor]], receives: Mapping[int, Sequence[torch.Tensor]], why: str
    ) -> Any:
        """Send tensors to each rank of `sends`, and announce some like those of `receives` from each of its ranks.
        Both ends know what they exchange. Returns a ticket.
        """

    def finish_exchange(self, ticket: Any) -> dict[int, Sequence[torch.Tensor]]:
        """What came, by rank: in the tensors of `receives`, or in others. Blocks; with all ranks in one process, lets
        the others run.
        """

    def drain(self) -> None:
        """End of a step: all that was sent has left."""


class Transport(Protocol):
    """What a Trainer needs to know of the other ranks."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that this process runs."""

    def endpoint(self, rank: int) -> Endpoint:
        """The side of one of `ranks`."""

    @property
    def meeting(self) -> Meeting:
        """Where the processes agree on what they do next."""

    def begin_step(self) -> None:
        """Forget what a step that failed may have left behind."""

    def failed(self, error: BaseException) -> BaseException:
        """A step failed before its end: bring the processes together again. Returns what this one is to raise."""

    def sum_over_processes(self, tensor: torch.Tensor, why: str) -> None:
        """Sum a tensor over all processes, in place."""

    def gathered(self, tensor: torch.Tensor, ranks: tuple[int, ...], why: str) -> list[torch.Tensor]:
        """The tensors that these processes give, all of one size, in the order of their ranks."""

    def compare_programs(self, program: LoadedProgram) -> None:
        """ProgramError unless all processes have this program."""

    def compare_values(self, shared: Sequence[Shared], values: Mapping[str, torch.Tensor]) -> None:
        """InputError unless all processes that hold one of `shared` hold the same values. `values` may lack some."""


def laid_out(message: MessageSpec, values: Mapping[str, torch.Tensor], rank: int) -> list[torch.Tensor]:
    """The message's values in order, each with exactly the shape, dtype and stride that both ends agreed on.

    ProgramError, before anything moves, for a value that is absent or of another shape or dtype. A tensor
    with other strides is copied; codegen declares the strides that come out, so this happens only after an
    edit.
    """
    tensors = []
    where = f"rank {rank}, message {message.kind} {message.source}>{message.destination}"
    for spec in message.values:
        tensor = values.get(spec.name)
        if tensor is None:
            raise ProgramError(
                f"the rank's function returned no value {spec.name!r} to send", where, "Mend the rank file"
            )
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise ProgramError(
                f"value {spec.name!r} is {list(tensor.shape)} {tensor.dtype}, the message says "
                f"{list(spec.shape)} {spec.dtype}",
                where,
                "Mend the rank file or program.json",
            )
        if tensor.stride() != spec.stride:
            matters = [i for i, size in enumerate(spec.shape) if size > 1]
            if all(tensor.stride(i) == spec.stride[i] for i in matters):
                tensor = tensor.as_strided(spec.shape, spec.stride)
            else:
                tensor = in_layout(spec, tensor)
        tensors.append(tensor)
    return tensors


def in_layout(spec: ValueSpec, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides of the message; itself if it has them already."""
    if tensor.stride() == spec.stride:
        return tensor
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=tensor.device).copy_(tensor)


def summed(tensors: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Sum by rank, highest first: the order in which autograd meets the stages of one replica."""
    ranks = sorted(tensors, reverse=True)
    total = tensors[ranks[0]].clone()
    for rank in ranks[1:]:
        total += tensors[rank]
    return total


@dataclass
class _JoinedSum:
    """A sum that some ranks have joined."""

    ranks: tuple[int, ...]
    joined: dict[int, torch.Tensor] = field(default_factory=dict)
    total: torch.Tensor | None = None


class _Hub:
    """Mailboxes and open sums that the endpoints of one process share."""

    def __init__(self) -> None:
        self.mail: dict[tuple[int, Message, tuple[int, int]], dict[str, torch.Tensor]] = {}  # to whom, channel, whose
        self.parcels: dict[tuple[int, int, int], Sequence[torch.Tensor]] = {}  # by (from, to, how many before)
        self.parted: Counter[tuple[int, int]] = Counter()  # parcels that left, by (from, to)
        self.awaited: Counter[tuple[int, int]] = Counter()  # and those that were announced
        self.sums: dict[tuple[tuple[int, ...], int], _JoinedSum] = {}  # (ranks, how many before it)
        self.gathers: dict[tuple[tuple[int, ...], int], dict[int, torch.Tensor]] = {}  # the same
        self.counts: dict[tuple[int, tuple[int, ...]], int] = {}  # sums that (a rank, with ranks) has joined
        self.gathered: dict[tuple[int, tuple[int, ...]], int] = {}  # and gathers
        self.turns: Turns | None = None  # if the ranks are threads
        self.recent = Recent()

    def changed(self) -> None:
        """Wake the ranks that wait for something."""
        if self.turns is not None:
            self.turns.changed()


class InProcess:
    """All ranks of the mesh in this process, on one device. Tensors are handed over without copying."""

    def __init__(self, program: LoadedProgram) -> None:
        self._mesh = program.manifest.mesh
        self.meeting = Meeting()
        self.ranks = tuple(range(self._mesh.size))
        self._hub = _Hub()
        if max(map(len, self._mesh.groups(Group.LAYER))) > 1:
            self._hub.turns = Turns()
        self._endpoints = [_Local(self._hub, rank, program.manifest) for rank in self.ranks]

    def failed(self, error: BaseException) -> BaseException:
        """There is nobody to tell."""
        return error

    @property
    def turns(self) -> Turns | None:
        """With what the ranks take turns as threads; None if no rank waits within an action."""
        return self._hub.turns

    def begin_step(self) -> None:
        self._hub.mail.clear()
        self._hub.parcels.clear()
        self._hub.parted.clear()
        self._hub.awaited.clear()
        for endpoint in self._endpoints:
            endpoint.under_way.clear()
        self._hub.sums.clear()
        self._hub.counts.clear()
        self._hub.gathers.clear()
        self._hub.gathered.clear()

    def endpoint(self, rank: int) -> Endpoint:
        return self._endpoints[rank]

    def sum_over_processes(self, tensor: torch.Tensor, why: str) -> None:
        """Nothing to do: there is one process."""

    def gathered(self, tensor: torch.Tensor, ranks: tuple[int, ...], why: str) -> list[torch.Tensor]:
        """There is one process."""
        return [tensor]

    def compare_programs(self, program: LoadedProgram) -> None:
        """Nothing to do: the ranks share it."""

    def compare_values(self, shared: Sequence[Shared], values: Mapping[str, torch.Tensor]) -> None:
        """Nothing to do: the ranks share them."""


class _Local:
    """Endpoint of the in-process transport."""

    def __init__(self, hub: _Hub, rank: int, manifest: Manifest) -> None:
        self.rank = rank
        self.recent = hub.recent
        self.under_way: dict[int, Any] = {}
        self._hub = hub
        self._manifest = manifest

    def at(self, place: Action | str) -> None:
        """Nobody has to be told: the ranks are one process."""

    def send(self, message: MessageSpec, microbatch: int, values: Mapping[str, torch.Tensor]) -> None:
        tensors = laid_out(message, values, self.rank)
        names = [spec.name for spec in message.values]
        mesh, there = self._manifest.mesh, self._manifest.stages[message.destination].rank
        place = mesh.served(self.rank, microbatch)
        for peer in mesh.receivers(self.rank, there, place[0]):
            self._hub.mail[peer, message.channel, place] = dict(zip(names, tensors, strict=True))
        self._hub.changed()

    def post(self, message: MessageSpec, microbatch: int) -> None:
        """Nothing to announce: the sender's tensor itself will be the receiver's."""

    def receive(self, message: MessageSpec, microbatch: int) -> dict[str, torch.Tensor] | None:
        place = self._manifest.mesh.served(self.rank, microbatch)
        return self._hub.mail.pop((self.rank, message.channel, place), None)

    def start_exchange(
        self, sends: Mapping[int, Sequence[torch.Tensor]], receives: Mapping[int, Sequence[torch.Tensor]], why: str
    ) -> tuple[list[tuple[int, int, int]], str]:
        for peer, tensors in sends.items():
            self._hub.parcels[self.rank, peer, self._hub.parted[self.rank, peer]] = tensors
            self._hub.parted[self.rank, peer] += 1
        if sends:
            self._hub.changed()
        coming = [(peer, self.rank, self._hub.awaited[peer, self.rank]) for peer in receives]
        self._hub.awaited.update((peer, self.rank) for peer in receives)
        return coming, why

    def finish_exchange(self, ticket: tuple[list[tuple[int, int, int]], str]) -> dict[int, Sequence[torch.Tensor]]:
        coming, why = ticket
        arrived = {}
        for key in coming:
            while key not in self._hub.parcels:
                assert self._hub.turns is not None
                self._hub.turns.wait(f"{why} of rank {key[0]}")
            arrived[key[0]] = self._hub.parcels.pop(key)
        return arrived

    def start_sum(
        self, tensor: torch.Tensor, ranks: Sequence[int], why: str, ordered: bool = False
    ) -> tuple[_JoinedSum, torch.Tensor]:
        members = tuple(ranks)
        number = self._hub.counts.get((self.rank, members), 0)
        self._hub.counts[self.rank, members] = number + 1
        open_sum = self._hub.sums.setdefault((members, number), _JoinedSum(members))
        open_sum.joined[self.rank] = tensor
        if len(open_sum.joined) == len(members):
            del self._hub.sums[members, number]
            open_sum.total = summed(open_sum.joined)
            self._hub.changed()
        return open_sum, tensor

    def finish_sum(self, ticket: tuple[_JoinedSum, torch.Tensor]) -> bool:
        open_sum, tensor = ticket
        if open_sum.total is None:
            return False
        tensor.copy_(open_sum.total)
        return True

    def start_scatter(
        self, rows: torch.Tensor, ranks: tuple[int, ...], why: str
    ) -> tuple[tuple[_JoinedSum, torch.Tensor], int]:
        return self.start_sum(rows, ranks, why), ranks.index(self.rank)

    def finish_scatter(self, ticket: tuple[tuple[_JoinedSum, torch.Tensor], int]) -> torch.Tensor | None:
        (open_sum, _), row = ticket
        return None if open_sum.total is None else open_sum.total[row]

    def start_gather(
        self, flat: torch.Tensor, ranks: tuple[int, ...], why: str
    ) -> tuple[dict[int, torch.Tensor], tuple[int, ...]]:
        number = self._hub.gathered.get((self.rank, ranks), 0)
        self._hub.gathered[self.rank, ranks] = number + 1
        given = self._hub.gathers.setdefault((ranks, number), {})
        given[self.rank] = flat
        if len(given) == len(ranks):
            del self._hub.gathers[ranks, number]
            self._hub.changed()
        return given, ranks

    def finish_gather(self, ticket: tuple[dict[int, torch.Tensor], tuple[int, ...]]) -> torch.Tensor | None:
        given, ranks = ticket
        return torch.stack([given[rank] for rank in ranks]) if len(given) == len(ranks) else None

    def drain(self) -> None:
        """Nothing is under way."""
