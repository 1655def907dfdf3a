"""The c10d transport: one process per rank, torch.distributed moves the tensors (gloo or NCCL)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from csc import devices
from csc.errors import InputError, RankLost
from csc.ir.groups import Group
from csc.ir.schedule import Action, Message
from csc.ir.strides import dense
from csc.runtime.consistency import Shared, agree, agree_on_values
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.meeting import Meeting, cannot, destroy, first_line, is_lost, is_silence, let_go
from csc.runtime.specs import Manifest, MessageSpec
from csc.runtime.transport import Recent, Work, finished, in_layout, laid_out, summed

# --- The process groups of a program's ranks: made by all of them in one order, let go of, and made again ------------
#
# Terms: one group carries F messages, another one B messages, so that the two directions between a pair of ranks never
# share a queue; a *set* of ranks sums something together; the ranks of a *layer* meet within F and B.


def rank_sets(manifest: Manifest) -> list[tuple[int, ...]]:
    """Sets of two or more ranks, each ascending: those that add up gradients or counts, holders of a tied parameter,
    all. No set twice.
    """
    mesh, trained = manifest.mesh, [p for p in manifest.parameters if p.trainable]
    kinds = dict.fromkeys([Group.DATA, *(p.gradient.parts for p in trained if p.gradient.parts is not None)])
    sets = [ranks for kind in kinds for ranks in mesh.groups(kind)]
    if manifest.loss.weight == "mean" or manifest.loss.summed:
        sets += mesh.groups(Group.SAMPLES)
    if manifest.contexts:
        sets += mesh.groups(Group.CONTEXT)  # where ranks may die, labels are counted within replicas
    tied = sorted({tuple(sorted(p.ranks)) for p in trained})
    sets += [ranks for holders in tied for ranks in mesh.groups(Group.PIPELINE, holders)]
    sets += mesh.groups(Group.WORLD)
    return [ranks for ranks in dict.fromkeys(sets) if len(ranks) > 1]


class ProcessGroups:
    """The groups of a rank: `messages` by kind, `sums` by ranks, and `layer`. They are made at once, or by `open` after
    `close`. timeout: seconds until a silent peer counts as lost; new groups do not inherit the default group's.
    """

    def __init__(self, manifest: Manifest, rank: int, timeout: float) -> None:
        self._manifest, self._rank, self._wait = manifest, rank, timedelta(seconds=timeout)
        self.open()

    def open(self) -> None:
        """All ranks call it."""
        (everyone,) = self._manifest.mesh.groups(Group.WORLD)
        self.messages = {kind: self._new(everyone) for kind in ("F", "B")}
        self.sums = {ranks: self._new(ranks) for ranks in rank_sets(self._manifest)}
        self.layer = self._layer()

    def _new(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        return dist.new_group(list(ranks), timeout=self._wait)

    def _layer(self) -> dist.ProcessGroup | None:
        """The group of the ranks that share sequences, or the work of layers, with this one."""
        layer, mesh = None, self._manifest.mesh
        if not self._manifest.contexts and mesh.sizes(Group.TENSOR) == (1,):
            return None
        for ranks in mesh.groups(Group.LAYER):
            group = self._new(ranks)
            layer = group if self._rank in ranks else layer
        return layer

    def close(self) -> None:
        """Whoever waits for this rank gets an error within milliseconds over gloo, as soon as nothing refers to the
        groups any more: operations that are under way must have been let go of before.
        """
        groups = [*self.messages.values(), *self._own_sums()]
        groups += [self.layer] if self.layer is not None else []
        self.messages, self.sums, self.layer = {}, {}, None
        destroy(groups)

    @property
    def exchanges(self) -> dist.ProcessGroup:
        """Over which ranks exchange what is no message: those of a layer, or, where that is one rank, all of them."""
        everyone = self._manifest.mesh.group(Group.WORLD, self._rank)
        return self.layer if self.layer is not None else self.sums[everyone]

    def close_sums(self) -> None:
        """As `close`, but messages of this rank's pipeline still pass."""
        sums, self.sums = self._own_sums(), {}
        destroy(sums)

    def _own_sums(self) -> list[dist.ProcessGroup]:
        return [group for ranks, group in self.sums.items() if self._rank in ranks]


# --- The c10d transport: one process per rank, torch.distributed moves the tensors (gloo or NCCL) --------------------
#
# Terms: see csc.runtime.transport. Values travel as the bytes of their memory, in memory order, without being made
# contiguous: the receiver's tensor has the same strides. With gloo, tensors of a GPU pass through CPU memory.
#
# gloo cannot tell whether a send is done without waiting for it. So its buffers are freed when an answer proves that
# the receiver had them (B of a microbatch comes after its F), and the rest at the end of the step.
#
# A rank that fails in the middle of a step lets go of its groups: whoever waits for it gets an error and does the
# same. So all meet, say what happened, and make the groups anew (`failed`). Nothing of the step is left under way.


UNDER_WAY = 2  # exchanges whose sends need not be done yet


@dataclass
class _Sending:
    """A message on its way; the buffers must live until `works` are done."""

    microbatch: int
    works: list[tuple[int, dist.Work]]  # each with who receives
    buffers: list[torch.Tensor] = field(default_factory=list)


@dataclass
class _Summing:
    work: dist.Work
    tensor: torch.Tensor
    buffer: torch.Tensor
    parts: dict[int, torch.Tensor]
    why: str


@dataclass
class _Gathering:
    work: dist.Work
    rows: torch.Tensor
    buffer: torch.Tensor
    why: str


@dataclass
class _Exchanging:
    """Tensors on their way between ranks that meet within a layer. Works: with the peer, if it is one."""

    coming: dict[int, list[torch.Tensor]]
    leaving: dict[int, list[torch.Tensor]]
    why: str
    receiving: list[tuple[int | None, dist.Work]] = field(default_factory=list)
    sending: list[tuple[int | None, dist.Work]] = field(default_factory=list)


class Distributed:
    """This process' rank in the default process group.

    timeout: seconds without an answer until a peer counts as lost. meeting: where ranks agree on what they do; None:
    one of its own. InputError if the size of the group is not that of the mesh.
    """

    def __init__(
        self, program: LoadedProgram, device: torch.device, timeout: float = 600.0, meeting: Meeting | None = None
    ) -> None:
        manifest = program.manifest
        world, size = dist.get_world_size(), manifest.mesh.size
        if world != size:
            raise InputError(
                f"the program is for {size} ranks ({manifest.mesh}), the process group has {world}",
                manifest.name,
                f"Start {size} processes: nodes x --nproc-per-node; or compile for a mesh of {world} ranks",
            )
        self.rank = dist.get_rank()
        self.ranks = (self.rank,)
        self._manifest, self._timeout = manifest, timeout
        self._device = device
        self._wire = devices.wire(device, str(dist.get_backend_config()))
        self._pollable = self._wire.type != "cpu"
        self.meeting = meeting or Meeting.of_all(timeout)
        self.compare_programs(program)
        self._groups = ProcessGroups(manifest, self.rank, timeout)
        self.meeting.closing(self._close)
        self._meet_first()
        self.recent = Recent()
        self.begin_step()

    def endpoint(self, rank: int) -> Distributed:
        assert rank == self.rank
        return self

    def begin_step(self) -> None:
        self._posted: dict[tuple[Message, int], list[tuple[dist.Work | None, torch.Tensor, torch.Tensor]]] = {}
        self._sending: dict[Message, list[_Sending]] = {}
        self._left: list[_Exchanging] = []
        self.under_way: dict[int, Any] = {}

    def run(self, works: Mapping[int, Work[Any]]) -> dict[int, Any]:
        return {rank: finished(work) for rank, work in works.items()}

    def failed(self, error: BaseException) -> BaseException:
        self.meeting.positions.failure = error
        let_go(error)
        self._close()
        try:
            failure = self.meeting.failed(error)
            if not self.meeting.broken:
                self._groups.open()
                self._meet_first()
        except BaseException as stopped:
            self.meeting.give_up(f"rank {self.rank} was stopped before the ranks had come together again")
            return stopped
        self.meeting.positions.failure = failure if self.meeting.broken else None
        return failure

    def _close(self) -> None:
        """Free those who wait for this rank."""
        self.begin_step()
        self._groups.close()

    def leave(self, messages: bool = True) -> None:
        """Free those who wait for this rank; with messages=False those alone who are not in its replica."""
        if messages:
            self._close()
        else:
            self._groups.close_sums()
            self.meeting.leave()

    def regroup(self, manifest: Manifest, rank: int) -> None:
        """The rank that it is from now on, in new groups. All that are left call it, after `leave`."""
        self._manifest, self.rank, self.ranks = manifest, rank, (rank,)
        self._groups = ProcessGroups(manifest, rank, self._timeout)
        self.recent = Recent(self.recent.most)
        self.begin_step()

    def at(self, place: Action | str) -> None:
        self.meeting.positions.moved(place)

    # messages

    def send(self, message: MessageSpec, microbatch: int, values: Mapping[str, torch.Tensor]) -> None:
        peers = self._receivers(message.destination, microbatch)
        if not peers:
            return
        action = str(Action.send(message.channel, microbatch))
        sending = _Sending(microbatch, [])
        for spec, tensor in zip(message.values, laid_out(message, values, self.rank), strict=True):
            if tensor.numel() == 0:
                continue
            data = _bytes(tensor if dense(spec.shape, spec.stride) else tensor.contiguous()).to(self._wire)
            for peer in peers:
                work = self._guard(partial(dist.isend, data, peer, self._groups.messages[message.kind]), action, peer)
                sending.works.append((peer, work))
            sending.buffers.append(data)
        queue = self._sending.setdefault(message.channel, [])
        while self._pollable and queue and all(work.is_completed() for _, work in queue[0].works):
            queue.pop(0)
        queue.append(sending)

    def post(self, message: MessageSpec, microbatch: int) -> None:
        peer = self._sender(message.source, microbatch)
        action = str(Action.recv(message.channel, microbatch))
        receipts: list[tuple[dist.Work | None, torch.Tensor, torch.Tensor]] = []
        for spec in message.values:
            stride = spec.stride if dense(spec.shape, spec.stride) else torch.empty(spec.shape, device="meta").stride()
            tensor = torch.empty_strided(spec.shape, stride, dtype=spec.dtype, device=self._device)
            if spec.numel == 0:
                receipts.append((None, tensor, tensor))
                continue
            buffer = _bytes(tensor)
            data = buffer if buffer.device == self._wire else torch.empty_like(buffer, device=self._wire)
            work = self._guard(partial(dist.irecv, data, peer, self._groups.messages[message.kind]), action, peer)
            receipts.append((work, data, tensor))
        self._posted[message.channel, microbatch] = receipts

    def arrived(self, message: MessageSpec, microbatch: int) -> bool:
        return True

    def receive(self, message: MessageSpec, microbatch: int) -> dict[str, torch.Tensor]:
        if (message.channel, microbatch) not in self._posted:
            self.post(message, microbatch)
        peer = self._sender(message.source, microbatch)
        action = str(Action.recv(message.channel, microbatch))
        waits = ", ".join(spec.name for spec in message.values)
        values = {}
        for spec, (work, data, tensor) in zip(
            message.values, self._posted.pop((message.channel, microbatch)), strict=True
        ):
            if work is not None:
                self._guard(work.wait, action, peer, f"the gradient of {waits}" if message.kind == "B" else waits)
                if data.device != tensor.device:
                    _bytes(tensor).copy_(data)
            values[spec.name] = in_layout(spec, tensor)
        if message.kind == "B":  # the peer ran B, so it has had the F message of the same microbatch
            self._release(("F", message.destination, message.source), microbatch)
        return values

    def drain(self) -> None:
        while self._left:
            self._await_sends(self._left.pop(0))
        for channel, queue in self._sending.items():
            while queue:
                self._release(channel, queue[-1].microbatch)

    def _release(self, channel: Message, microbatch: int) -> None:
        """Wait for the sends of a replica's microbatches up to this one, which its rank has taken by now."""
        queue, replica = self._sending.get(channel, []), self._replica(microbatch)
        for sending in [s for s in queue if s.microbatch <= microbatch and self._replica(s.microbatch) == replica]:
            for peer, work in sending.works:
                self._guard(work.wait, str(Action.send(channel, sending.microbatch)), peer)
            queue.remove(sending)

    # exchanges

    def _meet_first(self) -> None:
        """NCCL: a first exchange among some members only would not be defined."""
        if self._pollable and self._groups.layer is not None:
            met, group = torch.zeros(1, device=self._wire), self._groups.layer
            self._guard(lambda: dist.all_reduce(met, group=group), "the first meeting of the ranks of a layer")

    def start_exchange(
        self, sends: Mapping[int, Sequence[torch.Tensor]], receives: Mapping[int, Sequence[torch.Tensor]], why: str
    ) -> _Exchanging:
        """NCCL gets all operations at once: one after the other, two ranks could each wait in its receive.

        Without NCCL only receives are waited for: a peer that is behind takes what it is sent when it gets there. The
        buffers of the last exchanges live until then.
        """
        while len(self._left) > UNDER_WAY:
            self._await_sends(self._left.pop(0))
        coming = {peer: [self._buffer(tensor) for tensor in tensors] for peer, tensors in receives.items()}
        leaving = {peer: [tensor.contiguous().to(self._wire) for tensor in tensors] for peer, tensors in sends.items()}
        arriving = [(peer, tensor) for peer, tensors in coming.items() for tensor in tensors]
        departing = [(peer, tensor) for peer, tensors in leaving.items() for tensor in tensors]
        group, exchange = self._groups.exchanges, _Exchanging(coming, leaving, why)
        if self._pollable and arriving + departing:
            batch = [dist.P2POp(dist.irecv, tensor, peer, group) for peer, tensor in arriving]
            batch += [dist.P2POp(dist.isend, tensor, peer, group) for peer, tensor in departing]
            works = self._guard(lambda: dist.batch_isend_irecv(batch), why)
            exchange.receiving = [(None, work) for work in works]
            return exchange
        for peer, tensor in arriving:
            exchange.receiving.append((peer, self._guard(partial(dist.irecv, tensor, peer, group), why, peer)))
        for peer, tensor in departing:
            exchange.sending.append((peer, self._guard(partial(dist.isend, tensor, peer, group), why, peer)))
        return exchange

    def finish_exchange(self, ticket: _Exchanging) -> dict[int, Sequence[torch.Tensor]]:
        for peer, work in ticket.receiving:
            self._guard(work.wait, ticket.why, peer)
        if ticket.sending:
            self._left.append(ticket)
        return {peer: [tensor.to(self._device) for tensor in tensors] for peer, tensors in ticket.coming.items()}

    def _await_sends(self, exchange: _Exchanging) -> None:
        for peer, work in exchange.sending:
            self._guard(work.wait, exchange.why, peer)

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a receive can write to: the tensor itself if it is dense and where the wire is."""
        if tensor.device == self._wire and tensor.is_contiguous():
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._wire)

    # sums

    def ready(self, ticket: Any) -> bool:
        return True

    def start_sum(
        self, tensor: torch.Tensor, ranks: tuple[int, ...], why: str, ordered: bool = False
    ) -> _Summing | None:
        if len(ranks) == 1:
            return None
        group = self._groups.sums[tuple(sorted(ranks))]
        buffer = tensor.detach().to(self._wire)
        parts: dict[int, torch.Tensor] = {}
        if ordered and len(ranks) > 2:  # two numbers have one sum; more depend on the order
            parts = {rank: torch.empty_like(buffer) for rank in sorted(ranks)}
            work = self._guard(lambda: dist.all_gather(list(parts.values()), buffer, group=group, async_op=True), why)
        else:
            work = self._guard(lambda: dist.all_reduce(buffer, group=group, async_op=True), why)
        return _Summing(work, tensor, buffer, parts, why)

    def finish_sum(self, ticket: _Summing | None) -> None:
        if ticket is not None:
            self._guard(ticket.work.wait, ticket.why)
            total = summed(ticket.parts) if ticket.parts else ticket.buffer
            if total.data_ptr() != ticket.tensor.data_ptr():
                ticket.tensor.copy_(total)

    def start_scatter(self, rows: torch.Tensor, ranks: tuple[int, ...], why: str) -> _Summing:
        buffer = rows.detach().to(self._wire)
        summed, group = torch.empty_like(buffer), self._groups.sums[tuple(sorted(ranks))]
        work = self._guard(lambda: dist.all_to_all_single(summed, buffer, group=group, async_op=True), why)
        return _Summing(work, summed, buffer, dict(zip(ranks, summed)), why)

    def finish_scatter(self, ticket: _Summing) -> torch.Tensor:
        self._guard(ticket.work.wait, ticket.why)
        return summed(ticket.parts).to(self._device)

    def start_gather(self, flat: torch.Tensor, ranks: tuple[int, ...], why: str) -> _Gathering:
        buffer, group = flat.detach().to(self._wire).contiguous(), self._groups.sums[tuple(sorted(ranks))]
        rows = buffer.new_empty(len(ranks), buffer.numel())
        call = partial(dist.all_gather, list(map(_bytes, rows)), _bytes(buffer), group=group, async_op=True)
        return _Gathering(self._guard(call, why), rows, buffer, why)

    def finish_gather(self, ticket: _Gathering) -> torch.Tensor:
        self._guard(ticket.work.wait, ticket.why)
        return ticket.rows.to(self._device)

    def sum_over_processes(self, tensor: torch.Tensor, why: str) -> None:
        self.finish_sum(self.start_sum(tensor, self._manifest.mesh.group(Group.WORLD, self.rank), why))

    def gathered(self, tensor: torch.Tensor, ranks: tuple[int, ...], why: str) -> list[torch.Tensor]:
        group, buffer = self._groups.sums[tuple(sorted(ranks))], tensor.detach().to(self._wire).contiguous()
        parts = [torch.empty_like(buffer) for _ in ranks]
        self._guard(lambda: dist.all_gather(list(map(_bytes, parts)), _bytes(buffer), group=group), why)
        return [part.to(self._device) for part in parts]

    def compare_programs(self, program: LoadedProgram) -> None:
        self._guard(lambda: agree(program, self._wire), "the comparison of programs before the first step")

    def compare_values(self, shared: Sequence[Shared], values: Mapping[str, torch.Tensor]) -> None:
        compare = partial(agree_on_values, self._manifest.mesh, shared, values, self.rank, self._wire)
        self._guard(compare, "the comparison of weights and constants")

    # peers

    def _receivers(self, stage: int, microbatch: int) -> tuple[int, ...]:
        return self._manifest.mesh.receivers(self.rank, self._manifest.stages[stage].rank, self._replica(microbatch))

    def _sender(self, stage: int, microbatch: int) -> int:
        return self._manifest.mesh.sender(self.rank, self._manifest.stages[stage].rank, self._replica(microbatch))

    def _replica(self, microbatch: int) -> int:
        """Whose a microbatch of this rank's step is."""
        return self._manifest.mesh.served(self.rank, microbatch)[0]

    def _guard(self, call: Callable[[], Any], doing: str, peer: int | None = None, waits: str = "") -> Any:
        """Run a call of torch.distributed; a peer that is gone or silent becomes a RankLost, what the backend does not
        do a CscError. waits: what for, in words; "": for `doing`.
        """
        positions = self.meeting.positions
        positions.waits = (waits or doing, peer)
        try:
            result = call()
        except RuntimeError as error:
            if not is_lost(error):
                raise cannot(error, doing, f"rank {self.rank} {self._place(self.rank)}") from error
            lost = "another rank" if peer is None else f"rank {peer} {self._place(peer)}"
            reason = first_line(error)
            silent = is_silence(reason)
            happened = "did not answer in time (or waits itself)" if silent else "went away"
            raise RankLost(
                f"{lost} {happened} while this rank was at '{doing}' ({reason}){positions.told() if silent else ''}",
                f"rank {self.rank} {self._place(self.rank)}",
                "Look at that rank's own output for the cause, then start again from saved weights",
            ) from error
        positions.waits = None
        return result

    def _place(self, rank: int) -> str:
        coordinates = self._manifest.mesh.coordinates(rank)
        stages = [stage.stage for stage in self._manifest.stages_of(coordinates.pp)]
        named = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        return f"({named}, replica {coordinates.dp})" if self._manifest.mesh.dp > 1 else f"({named})"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as flat bytes, sharing it."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)
