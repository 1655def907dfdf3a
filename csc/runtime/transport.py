"""Transports: how ranks exchange values. Here what one must do, and one with all ranks in this process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from csc import devices
from csc.errors import CscError, ProgramError
from csc.ir.groups import Group
from csc.ir.schedule import Action, Message
from csc.kernels import packing
from csc.kernels.collectives import numbered
from csc.kernels.mask import Mask, counts
from csc.kernels.packing import Form
from csc.planning.dispatch import EMPTY, FULL, PARTIAL, Dispatch, LayerMask, Rates, Workload, plan
from csc.runtime.consistency import Shared
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.meeting import Meeting
from csc.runtime.specs import ContextSpec, Manifest, MessageSpec, ValueSpec

if TYPE_CHECKING:
    from csc.torch_private.process_state import ThreadState

# --- Where the tokens of one microbatch are: dispatched in blocks to the ranks of a context-parallel group -----------
#
# Terms
#   slot     a place in a rank's tensors; slots beyond the rank's tokens are padding
#   part     keys that a rank's queries see: its own, or those that come from the other ranks (foreign)
#
# A plan is made for one mask or several (layers may differ), for all samples of the microbatch together.


@dataclass(frozen=True, eq=False)
class Spread:
    """tokens[r]: int64, the tokens of rank r, ascending. needs[m][r]: bool [blocks], the key blocks it needs of mask m.

    dispatch: which rank each block is on, and what that takes by the model.
    """

    block: int
    tokens: tuple[torch.Tensor, ...]
    needs: tuple[np.ndarray, ...]
    dispatch: Dispatch

    def blocks(self, rank: int) -> torch.Tensor:
        """int64: the blocks of a rank, ascending. They fill its slots from the first on, each `block` of them."""
        return torch.from_numpy(np.flatnonzero(self.dispatch.ranks_of_blocks == rank))

    def held(self, mask: int | None, rank: int, owner: int) -> torch.Tensor:
        """int64: the blocks of `owner` whose keys `rank` needs under a mask, ascending; all of them without one."""
        if mask is None:
            return self.blocks(owner)
        needed = self.needs[mask][rank] & (self.dispatch.ranks_of_blocks == owner)
        return torch.from_numpy(np.flatnonzero(needed))

    def collective(self, heads: int, kv_heads: int) -> str:
        """The cheapest way by the model to bring queries and keys of so many heads together."""
        prepared = self.dispatch.prepared
        work = replace(prepared.workload, heads=heads, kv_heads=kv_heads)
        return replace(self.dispatch, prepared=replace(prepared, workload=work)).collective


def spread(spec: ContextSpec, masks: Sequence[Mask]) -> Spread:
    """Dispatch the blocks of a sequence so that the ranks' attention takes least time by the model."""
    tables = [_tiles(mask, spec) for mask in masks]
    layers = tuple(
        LayerMask(tile, layers=kind.layers / len(table)) for kind, table in zip(spec.masks, tables) for tile in table
    )
    rates = Rates(spec.tile_seconds, spec.block_seconds)
    dispatch = plan(Workload(layers, spec.tokens, spec.block, spec.ranks, rates))
    owner = dispatch.ranks_of_blocks
    tokens = torch.arange(spec.tokens)
    of_token = torch.from_numpy(owner)[tokens // spec.block]
    seen = [(table != EMPTY).any(0) for table in tables]
    needs = tuple(np.stack([mask[owner == rank].any(0) for rank in range(spec.ranks)]) for mask in seen)
    return Spread(spec.block, tuple(tokens[of_token == rank] for rank in range(spec.ranks)), needs, dispatch)


def _tiles(mask: Mask, spec: ContextSpec) -> np.ndarray:
    """int8 [B, blocks, blocks]: EMPTY, PARTIAL or FULL."""
    visible = counts(mask, spec.block, spec.block)
    sizes = torch.full((visible.shape[1],), spec.block)
    sizes[-1] = spec.tokens - spec.block * (len(sizes) - 1)
    full = visible == sizes[:, None] * sizes[None, :]
    kinds = torch.where(full, FULL, torch.where(visible > 0, PARTIAL, EMPTY))
    return kinds.to(torch.int8).numpy()


@dataclass(frozen=True, eq=False)
class Known:
    """Masks, how their tokens are spread, and what each rank has planned for them (csc.runtime.context)."""

    spec: ContextSpec
    masks: tuple[Mask, ...]
    spread: Spread
    plans: dict[int, Any] = field(default_factory=dict)


@dataclass
class Recent:
    """The last few spreads: microbatches and steps often have equal masks. The ranks of a process share them.

    asked: of each spec, the ways of attention that plans were asked for: what the next plan will be asked for too.
    """

    most: int = 8
    known: list[Known] = field(default_factory=list)
    asked: dict[ContextSpec, set[Any]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, spec: ContextSpec, masks: Sequence[Mask]) -> Known:
        """How these masks' tokens are spread. Masks are compared element by element."""
        with self.lock:
            plan = self._latest(spec, masks)
        if plan is None:  # planned without the lock: another thread may plan the next batch meanwhile
            kept = tuple(_copy(mask) for mask in masks)  # a caller may write the next batch into the same memory
            planned = Known(spec, kept, spread(spec, kept))
            with self.lock:
                plan = self._latest(spec, masks) or planned
                if plan is planned:
                    del self.known[: max(0, len(self.known) + 1 - self.most)]
                    self.known.append(planned)
        return plan

    def keep(self, most: int) -> None:
        """Keep at least so many from now on."""
        self.most = max(self.most, most)

    def _latest(self, spec: ContextSpec, masks: Sequence[Mask]) -> Known | None:
        """What is known of equal masks, which thereby are the latest that were asked for."""
        plan = next((plan for plan in self.known if plan.spec == spec and _equal(plan.masks, masks)), None)
        if plan is not None:
            self.known.remove(plan)
            self.known.append(plan)
        return plan


def _tensors(mask: Mask) -> list[torch.Tensor]:
    return [part for part in (mask.ranges, mask.admits, mask.kinds) if part is not None]


def _equal(some: Sequence[Mask], more: Sequence[Mask]) -> bool:
    pairs = [(_tensors(mask), _tensors(other)) for mask, other in zip(some, more, strict=True)]
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in pairs)


def _copy(mask: Mask) -> Mask:
    admits, kinds = (None if part is None else part.clone() for part in (mask.admits, mask.kinds))
    return Mask(mask.ranges.clone(), admits, kinds, mask.keys)


@dataclass(frozen=True)
class AttentionPart:
    """One part of a rank's attention. keys: the tokens of its first slots of keys; packed, form: its mask."""

    keys: torch.Tensor
    packed: torch.Tensor
    form: Form

    @property
    def numbers(self) -> tuple[int, bool, int, int]:
        """What csc::attention takes behind a packed mask."""
        return self.form.rules, self.form.kinds, self.form.block_q, self.form.block_k


def parts(
    mask: Mask, where: Spread, number: int, rank: int, shard: int, blocks: tuple[int, int], device: torch.device,
    everything: bool = False,
) -> tuple[AttentionPart | None, AttentionPart | None]:  # fmt: skip
    """A rank's attention under the mask of this number, to its own keys as they are and to whole foreign blocks in
    ascending order; None for a part that none of its queries sees, unless `everything` is brought to all.

    mask: of the whole sequence, on the CPU. shard: slots of a rank. blocks: see csc.kernels.attention.blocks.
    """
    tokens, other_ranks = where.tokens[rank], [owner for owner in range(len(where.tokens)) if owner != rank]
    lent = [where.held(None if everything else number, rank, owner) for owner in other_ranks]
    blocks_of = torch.cat(lent).sort().values
    foreign = (blocks_of[:, None] * where.block + torch.arange(where.block)).flatten()
    width = len(foreign)
    foreign = foreign[foreign < mask.keys]
    sees_own = len(where.held(number, rank, rank)) > 0
    return (
        attention_part(mask, tokens, shard, tokens, shard, blocks, device) if sees_own else None,
        attention_part(mask, foreign, width, tokens, shard, blocks, device) if width else None,
    )


def attention_part(
    mask: Mask, keys: torch.Tensor, width: int, own: torch.Tensor, shard: int, blocks: tuple[int, int],
    device: torch.device,
) -> AttentionPart:  # fmt: skip
    """The mask between tokens `own`, then padding up to `shard`, and tokens `keys`, then padding up to `width`."""
    rows = mask.ranges[:, :, own].long()
    ranges = torch.zeros(mask.batch, mask.rules, shard, 2, dtype=torch.int32)
    ranges[:, :, : len(own)] = torch.searchsorted(keys, rows.contiguous())
    admits = kinds = None
    if mask.admits is not None and mask.kinds is not None:
        admits = torch.zeros(mask.batch, mask.rules, shard, dtype=torch.int64)
        admits[:, :, : len(own)] = mask.admits[:, :, own]
        kinds = torch.zeros(mask.batch, width, dtype=torch.int64)
        kinds[:, : len(keys)] = mask.kinds[:, keys]
    local = Mask(ranges, admits, kinds, width)
    form = Form(mask.rules, kinds is not None, shard, width, *blocks)
    return AttentionPart(keys, packing.pack(local, *blocks).to(device), form)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, one: AttentionPart, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """csc::attention of a part."""
    return torch.ops.csc.attention(q, k, v, one.packed, *one.numbers, scale, softcap)


def backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    one: AttentionPart, scale: float, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """csc::attention_backward of a part; out and lse may be those of all parts together."""
    return torch.ops.csc.attention_backward(d_out, q, k, v, out, lse, one.packed, *one.numbers, scale, softcap)


# --- The ranks of one process take turns -----------------------------------------------------------------------------
#
# Terms: a rank's *work* is a generator that yields a `Wait` where the rank cannot go on, and returns its result. Over a
# transport that blocks it yields nothing.
#
# One rank runs at a time, as far as it gets, in the order of the ranks. All of them run in the caller's thread, so that
# its profilers, debuggers and modes see them, and Ctrl-C stops them where they are (docs/decisions/turns.md).
#
# Ranks that meet within F and B, for context or tensor parallelism, wait in the middle of an operator, where a
# generator cannot yield. Each of these has a thread as its stack, with what torch has on in the caller's thread, which
# sleeps meanwhile.


@dataclass(frozen=True)
class Wait:
    """What a rank cannot go on without, in words, and whether it is there, where it stays until the rank takes it."""

    what: str
    ready: Callable[[], bool]


Result = TypeVar("Result")
Work = Generator[Wait, None, Result]


def until(ready: Callable[[], bool], what: str) -> Work[None]:
    """Let other ranks run until it is ready; not at all if it is."""
    if not ready():
        yield Wait(what, ready)


def finished(work: Work[Result]) -> Result:
    """The result of a rank over a transport that blocks."""
    try:
        wait = next(work)
    except StopIteration as end:
        result: Result = end.value
        return result
    raise AssertionError(f"it waits for {wait.what}")


def take_turns(works: Mapping[int, Work[Any] | WorkOnThread]) -> dict[int, Any]:
    """Run ranks to their ends. Returns their results, by rank.

    Raises:
        CscError: None of them can go on. It names what each waits for.
        BaseException: What a rank raises, or Ctrl-C. The other ranks are closed where they wait.
    """
    running, waits, results = dict(works), dict[int, Wait](), dict[int, Any]()
    with ExitStack() as closing:
        for work in works.values():
            closing.callback(work.close)
        while running:
            progress = False
            for rank, work in list(running.items()):
                if rank in waits and not waits[rank].ready():
                    continue
                progress = True
                try:
                    waits[rank] = next(work)
                except StopIteration as end:
                    results[rank] = end.value
                    del running[rank]
            if not progress:
                listed = "; ".join(f"rank {rank} waits at '{waits[rank].what}'" for rank in running)
                raise CscError(f"no rank can go on: {listed}", "executor", "Check schedule.txt")
    return results


class _Stopped(BaseException):
    """Raised in a rank that is closed while it waits."""


class WorkOnThread:
    """A rank's work on a thread of its own, where it can also wait in the middle of a call. It runs while the caller is
    in `next`. state: what torch has on in the thread.
    """

    def __init__(self, rank: int, work: Work[Any], state: ThreadState) -> None:
        self._work, self._state, self._stream = work, state, devices.stream()
        self._turn, self._rest = threading.Lock(), threading.Lock()  # held by the thread, by the caller
        self._turn.acquire()
        self._rest.acquire()
        self._wait: Wait | None = None
        self._end: BaseException | None = None  # what it has raised; at its end StopIteration with its result
        self._closed = False
        run = partial(copy_context().run, self._run)
        self._thread = threading.Thread(target=run, name=f"rank {rank}", daemon=True)

    def __next__(self) -> Wait:
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._rest.acquire()
        if self._end is None:
            assert self._wait is not None
            return self._wait
        self._thread.join()
        raise self._end

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Called by the rank: let others run until it is ready; not at all if it is."""
        if self._closed:
            raise _Stopped
        if not ready():
            self._wait = Wait(what, ready)
            self._rest.release()
            self._turn.acquire()
            if self._closed:
                raise _Stopped

    def close(self) -> None:
        """Stop it where it waits; where it runs, since Ctrl-C came meanwhile, at its next wait."""
        self._closed = True
        if self._thread.is_alive():
            self._turn.release()
            self._thread.join()
        self._work.close()
        self._end = None  # it holds on to what its frames hold

    def _run(self) -> None:
        try:
            with self._stream, self._state.on():
                while True:
                    wait = next(self._work)
                    self.wait(wait.ready, wait.what)
        except _Stopped:
            return
        except BaseException as error:
            self._end = error
        if not self._closed:
            self._rest.release()


# --- Transports: how ranks exchange values. Here what one must do, and one with all ranks in this process ------------
#
# Terms: an *endpoint* is one rank's side of a transport. A *ticket* stands for a sum over ranks that has been started.
# Messages of a channel arrive in the order in which they were sent.
#
# The c10d transport is in csc.runtime.c10d.


class Endpoint(Protocol):
    """One rank's side. Everything is done in the order in which the rank asks for it. What ends something that was
    begun (`receive`, `finish_*`) blocks between processes; among ranks of one process it is called once `arrived` or
    `ready` says so, but for an exchange.

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

    def arrived(self, message: MessageSpec, microbatch: int) -> bool:
        """Whether `receive` may be called."""

    def receive(self, message: MessageSpec, microbatch: int) -> dict[str, torch.Tensor]:
        """The values, by name, with the strides of the message."""

    def ready(self, ticket: Any) -> bool:
        """Whether what was begun, but an exchange, may be finished."""

    def start_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...], why: str, ordered: bool = False) -> Any:
        """Begin to sum `tensor` over these ranks, in place. All of them call it, in the same order.

        ordered: add the highest rank first, whatever the backend would do. Returns a ticket.
        """

    def finish_sum(self, ticket: Any) -> None:
        """The tensor holds the sum from now on, the same bits on every rank."""

    def start_scatter(self, rows: torch.Tensor, ranks: tuple[int, ...], why: str) -> Any:
        """Begin to sum `rows`, of which each of these ranks gets one, in their order. All of them call it, in the same
        order. Returns a ticket.
        """

    def finish_scatter(self, ticket: Any) -> torch.Tensor:
        """This rank's row of the sum, the highest rank added first."""

    def start_gather(self, flat: torch.Tensor, ranks: tuple[int, ...], why: str) -> Any:
        """Begin to bring together what these ranks give, all of one size and one dimension. All of them call it, in the
        same order. Returns a ticket.
        """

    def finish_gather(self, ticket: Any) -> torch.Tensor:
        """A row of each rank, in their order, dense."""

    def start_exchange(
        self, sends: Mapping[int, Sequence[torch.Tensor]], receives: Mapping[int, Sequence[torch.Tensor]], why: str
    ) -> Any:
        """Send tensors to each rank of `sends`, and announce some like those of `receives` from each of its ranks.
        Both ends know what they exchange. Returns a ticket.
        """

    def finish_exchange(self, ticket: Any) -> dict[int, Sequence[torch.Tensor]]:
        """What came, by rank: in the tensors of `receives`, or in others. With all ranks in one process it lets the
        others run.
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

    def run(self, works: Mapping[int, Work[Any]]) -> dict[int, Any]:
        """What this process' ranks do, by rank, to its end. Returns their results."""

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
class _Joint:
    """What each of some ranks gives, by rank. total: the sum of it, where that is asked for, once all have."""

    ranks: tuple[int, ...]
    given: dict[int, torch.Tensor] = field(default_factory=dict)
    total: torch.Tensor | None = None

    @property
    def complete(self) -> bool:
        return len(self.given) == len(self.ranks)


class _Hub:
    """Mailboxes and open sums that the endpoints of one process share."""

    def __init__(self) -> None:
        self.mail: dict[tuple[int, Message, tuple[int, int]], dict[str, torch.Tensor]] = {}  # to whom, channel, whose
        self.parcels: dict[tuple[int, int, int], Sequence[torch.Tensor]] = {}  # by (from, to, how many before)
        self.parted: Counter[tuple[int, int]] = Counter()  # parcels that left, by (from, to)
        self.awaited: Counter[tuple[int, int]] = Counter()  # and those that were announced
        self.joints: dict[tuple[str, tuple[int, ...], int], _Joint] = {}  # (sum or gather, ranks, number)
        self.joined: Counter[tuple[str, tuple[int, ...], int]] = Counter()  # how many, by kind, ranks and rank
        self.threads: dict[int, WorkOnThread] = {}  # of ranks that meet within actions
        self.recent = Recent()

    def clear(self) -> None:
        """Nothing is under way."""
        for held in (self.mail, self.parcels, self.parted, self.awaited, self.joints, self.joined):
            held.clear()


class InProcess:
    """All ranks of the mesh in this process, on one device. Tensors are handed over without copying."""

    def __init__(self, program: LoadedProgram) -> None:
        self._mesh = program.manifest.mesh
        self.meeting = Meeting()
        self.ranks = tuple(range(self._mesh.size))
        self._hub = _Hub()
        self._meet_within = max(map(len, self._mesh.groups(Group.LAYER))) > 1
        self._endpoints = [_Local(self._hub, rank, program.manifest) for rank in self.ranks]

    def failed(self, error: BaseException) -> BaseException:
        """There is nobody to tell."""
        return error

    def begin_step(self) -> None:
        self._hub.clear()
        for endpoint in self._endpoints:
            endpoint.under_way.clear()

    def run(self, works: Mapping[int, Work[Any]]) -> dict[int, Any]:
        if not self._meet_within:
            return take_turns(works)
        from csc.torch_private.process_state import ThreadState  # which only ranks on threads need

        state = ThreadState()
        self._hub.threads = {rank: WorkOnThread(rank, work, state) for rank, work in works.items()}
        try:
            return take_turns(self._hub.threads)
        finally:
            self._hub.threads = {}

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
        mesh, position = self._manifest.mesh, self._manifest.stages[message.destination].rank
        place = mesh.served(self.rank, microbatch)
        for peer in mesh.receivers(self.rank, position, place[0]):
            self._hub.mail[peer, message.channel, place] = dict(zip(names, tensors, strict=True))

    def post(self, message: MessageSpec, microbatch: int) -> None:
        """Nothing to announce: the sender's tensor itself will be the receiver's."""

    def arrived(self, message: MessageSpec, microbatch: int) -> bool:
        return self._mail(message, microbatch) in self._hub.mail

    def receive(self, message: MessageSpec, microbatch: int) -> dict[str, torch.Tensor]:
        return self._hub.mail.pop(self._mail(message, microbatch))

    def _mail(self, message: MessageSpec, microbatch: int) -> tuple[int, Message, tuple[int, int]]:
        return self.rank, message.channel, self._manifest.mesh.served(self.rank, microbatch)

    def start_exchange(
        self, sends: Mapping[int, Sequence[torch.Tensor]], receives: Mapping[int, Sequence[torch.Tensor]], why: str
    ) -> tuple[list[tuple[int, int, int]], str]:
        for peer, tensors in sends.items():
            self._hub.parcels[self.rank, peer, self._hub.parted[self.rank, peer]] = tensors
            self._hub.parted[self.rank, peer] += 1
        coming = [(peer, self.rank, self._hub.awaited[peer, self.rank]) for peer in receives]
        self._hub.awaited.update((peer, self.rank) for peer in receives)
        return coming, why

    def finish_exchange(self, ticket: tuple[list[tuple[int, int, int]], str]) -> dict[int, Sequence[torch.Tensor]]:
        coming, why = ticket
        arrived = {}
        for key in coming:
            if key not in self._hub.parcels:
                self._hub.threads[self.rank].wait(
                    partial(self._hub.parcels.__contains__, key), f"{why} of rank {key[0]}"
                )
            arrived[key[0]] = self._hub.parcels.pop(key)
        return arrived

    def ready(self, ticket: tuple[_Joint, torch.Tensor]) -> bool:
        return ticket[0].complete

    def start_sum(
        self, tensor: torch.Tensor, ranks: tuple[int, ...], why: str, ordered: bool = False
    ) -> tuple[_Joint, torch.Tensor]:
        joint = self._join("sum", ranks, tensor)
        if joint.complete:
            joint.total = summed(joint.given)
        return joint, tensor

    def finish_sum(self, ticket: tuple[_Joint, torch.Tensor]) -> None:
        joint, tensor = ticket
        assert joint.total is not None
        tensor.copy_(joint.total)

    def start_scatter(self, rows: torch.Tensor, ranks: tuple[int, ...], why: str) -> tuple[_Joint, torch.Tensor]:
        return self.start_sum(rows, ranks, why)

    def finish_scatter(self, ticket: tuple[_Joint, torch.Tensor]) -> torch.Tensor:
        joint, _ = ticket
        assert joint.total is not None
        return joint.total[joint.ranks.index(self.rank)]

    def start_gather(self, flat: torch.Tensor, ranks: tuple[int, ...], why: str) -> tuple[_Joint, torch.Tensor]:
        return self._join("gather", ranks, flat), flat

    def finish_gather(self, ticket: tuple[_Joint, torch.Tensor]) -> torch.Tensor:
        joint, _ = ticket
        return torch.stack([joint.given[rank] for rank in joint.ranks])

    def _join(self, kind: str, ranks: tuple[int, ...], tensor: torch.Tensor) -> _Joint:
        number = self._hub.joined[kind, ranks, self.rank]
        self._hub.joined[kind, ranks, self.rank] += 1
        joint = self._hub.joints.setdefault((kind, ranks, number), _Joint(ranks))
        joint.given[self.rank] = tensor
        if joint.complete:
            del self._hub.joints[kind, ranks, number]
        return joint

    def drain(self) -> None:
        """Nothing is under way."""


# --- Blocks of tokens that the ranks of a context-parallel group send each other -------------------------------------
#
# Terms
#   blocks   a tensor [n, B, block, H, D], one entry for each block of tokens: what is dispatched as a whole moves as a
#            whole, in long copies. The sequence's last block may be short; the rest of it is padding that no query
#            sees.
#   places   which blocks: a slice where they follow each other, else int64 [n]


Places = slice | torch.Tensor
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Membership:
    """One rank's side of a group. index: its index in it; members: the ranks by index."""

    endpoint: Endpoint
    index: int
    members: tuple[int, ...]

    @property
    def others(self) -> tuple[int, ...]:
        """The other indices, ascending."""
        return tuple(index for index in range(len(self.members)) if index != self.index)

    def start(self, sends: Mapping[int, Tensors], receives: Mapping[int, Tensors], why: str) -> Any:
        """Send tensors to other members, announce some from them: what comes may be written into `receives`."""
        ranks = self.members
        return self.endpoint.start_exchange(
            {ranks[index]: tensors for index, tensors in sends.items()},
            {ranks[index]: tensors for index, tensors in receives.items()},
            why,
        )

    def finish(self, ticket: Any) -> dict[int, Tensors]:
        """What came, by index. It is to be read only: in one process it is the sender's."""
        arrived = self.endpoint.finish_exchange(ticket)
        return {index: arrived[rank] for index, rank in enumerate(self.members) if rank in arrived}


def places(indices: torch.Tensor, device: torch.device) -> Places:
    """int64 [n] on the CPU as a slice if it counts up by one, else on a device."""
    first = int(indices[0]) if len(indices) else 0
    if torch.equal(indices, torch.arange(first, first + len(indices))):
        return slice(first, first + len(indices))
    return indices.to(device)


def count(chosen: Places) -> int:
    """How many there are."""
    return chosen.stop - chosen.start if isinstance(chosen, slice) else len(chosen)


def taken(blocks: torch.Tensor, chosen: Places) -> torch.Tensor:
    """The chosen blocks; a view if they follow each other."""
    return blocks[chosen] if isinstance(chosen, slice) else blocks.index_select(0, chosen)


def put(blocks: torch.Tensor, chosen: Places, given: torch.Tensor) -> None:
    """Write given blocks to their places."""
    if not isinstance(chosen, slice):
        blocks.index_copy_(0, chosen, given)
    elif blocks[chosen].data_ptr() != given.data_ptr():  # else they have been received there
        blocks[chosen] = given


def added(blocks: torch.Tensor, chosen: Places, given: torch.Tensor) -> None:
    """Add given blocks to those at their places, each of which comes once."""
    if isinstance(chosen, slice):
        blocks[chosen] += given
    else:
        blocks.index_add_(0, chosen, given.to(blocks.dtype))


def in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """[B, H, t, ...] as blocks [t / block, B, block, H, ...]: a view."""
    return x.transpose(1, 2).unflatten(1, (-1, block)).transpose(0, 1)


def empty_blocks(like: torch.Tensor, blocks: int, block: int) -> torch.Tensor:
    """[blocks, B, block, H, D] that `in_heads` can view."""
    batch, heads, _, width = like.shape
    return like.new_empty((batch, blocks, block, heads, width)).transpose(0, 1)


def in_heads(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks of `empty_blocks` as [B, H, t, D]: a view."""
    return blocks.transpose(0, 1).flatten(1, 2).transpose(1, 2)


def room(into: torch.Tensor, chosen: Places) -> torch.Tensor:
    """Where blocks for these places may be received: there, if that is one stretch of memory."""
    if isinstance(chosen, slice) and into.shape[1] == 1:
        return into[chosen]
    return into.new_empty((count(chosen), *into.shape[1:]))


# --- Where the operators of csc.kernels.collectives meet the other ranks ---------------------------------------------


class Met:
    """Over the endpoint of a rank: between processes, or among threads that take turns.

    copies: what leaves is a copy: whoever calls writes over its tensors, as compiled functions do, while others may
    not have read them yet.
    """

    def __init__(self, group: Membership, copies: bool = False) -> None:
        self._group, self._copies = group, copies
        self.ranks, self.index = len(group.members), group.index
        self.number = numbered(self)
        self._among: dict[int, Met] = {}

    def among(self, each: int) -> Met:
        """With the neighbours of this rank; see csc.kernels.collectives.GroupExchange."""
        if each not in self._among:
            first = self.index // each * each
            members = self._group.members[first : first + each]
            self._among[each] = Met(Membership(self._group.endpoint, self.index - first, members), self._copies)
        return self._among[each]

    def exchange(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What each rank of the group has for this one; see csc.kernels.collectives.GroupExchange."""
        return self._finished(*self._started(tensors))

    def start(self, tensors: Sequence[torch.Tensor]) -> int:
        """See csc.kernels.collectives.GroupExchange. What is under way is the endpoint's, which lets go of it where a
        step fails.
        """
        under_way = self._group.endpoint.under_way
        number = max(under_way, default=-1) + 1
        under_way[number] = self._started(tensors)
        return number

    def finish(self, ticket: int) -> list[torch.Tensor]:
        """See csc.kernels.collectives.GroupExchange."""
        begun = self._group.endpoint.under_way.pop(ticket, None)
        if begun is None:
            raise RuntimeError(f"no collective is under way by the ticket {ticket}")
        return self._finished(*begun)

    def _started(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor]:
        me, other_ranks = self._group.index, self._group.others
        copies = {id(tensor): tensor.clone() if self._copies else tensor for tensor in tensors}
        sends = {rank: [copies[id(tensors[rank])]] for rank in other_ranks}
        receives = {rank: [torch.empty_like(tensors[me])] for rank in other_ranks}
        return self._group.start(sends, receives, "a collective of a layer"), copies[id(tensors[me])]

    def _finished(self, ticket: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
        arrived = self._group.finish(ticket)
        return [tensor if rank == self._group.index else arrived[rank][0] for rank in range(self.ranks)]
