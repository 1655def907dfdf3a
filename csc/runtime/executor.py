"""The executor: runs one rank's list of actions for one step."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch

from csc.ir.groups import PLACE, RANDOM, Group
from csc.ir.schedule import WHOLE, Action, Kind, Message, doable
from csc.kernels.batch_loss import HandedOver, numbered
from csc.kernels.dropout import mixed
from csc.runtime import context, loss, whole_batch
from csc.runtime.gradients import Added, Gathered, GradientSums, Pair, Scattered, of_any, reduce, wait_sum
from csc.runtime.loaded_program import StageFunctions
from csc.runtime.rank import Ranges, Rank
from csc.runtime.specs import Manifest, MessageSpec, StepCounts, ValueSpec
from csc.runtime.transport import Work, laid_out, until

# --- The seeds of a step's random numbers: one for the step, one for each microbatch, one for each region in it ------
#
# Terms: the *step's seed* is drawn from torch's default generator by rank 0, once a step, and is the same on every
# rank. It is NO_CHANCE for a step that is compared with another program's (csc.kernels.dropout says what is drawn
# then).
#
# A microbatch is known by its place in the global batch (replica after replica), a region by its name: neither depends
# on stages, ranks, replicas or the order of work. What has rows for each sample is drawn for one sample after the
# other, by their places in the global batch, and what is for all of them from the step's seed, so that neither depends
# on the number of microbatches.


Batch = Mapping[str, Any]
NO_CHANCE = -1


def draw() -> int:
    """A number from torch's default generator: `torch.manual_seed` before a step repeats the step."""
    return int(torch.randint(2**62, (), dtype=torch.int64))


@dataclass(frozen=True)
class Seeds:
    """Of a microbatch: its own, and the step's for what is drawn sample by sample. first: its first sample's place in
    the step.
    """

    own: int
    step: int
    first: int


def attach(rank: Rank, ranks: Sequence[Rank], microbatches: Sequence[Batch], drawn: int) -> Work[list[Batch]]:
    """The microbatches of a rank's step, each with its seeds; as they are if the program draws nothing. ranks: for each
    the rank in its program.
    """
    manifest = rank.program.manifest
    if not manifest.random:
        return list(microbatches)
    places = [replica * manifest.microbatches + mb for replica, mb in map(rank.served, range(len(microbatches)))]
    known = torch.zeros(manifest.mesh.dp * manifest.microbatches, 2, dtype=torch.int64)  # samples, over how many ranks
    known[places] = torch.tensor([[member.program.manifest.samples_drawn, 1] for member in ranks])
    step = torch.cat([torch.tensor([drawn if rank.rank == 0 else 0]), known.flatten()]).to(rank.device)
    yield from wait_sum(rank.endpoint, step, rank.group(Group.WORLD), "seed of the step's random numbers")
    drawn = int(step[0])
    first = first_samples(total // count for total, count in step[1:].view(-1, 2).tolist())
    return [{**batch, RANDOM: of_microbatch(drawn, place, first[place])} for place, batch in zip(places, microbatches)]


def first_samples(counts: Iterable[int]) -> list[int]:
    """The place in the step of each microbatch's first sample. counts: of their samples that numbers are drawn for."""
    return list(accumulate(counts, initial=0))


def of_microbatch(drawn: int, index: int, first: int = 0) -> Seeds:
    """The seeds of a microbatch, by its index in the global batch. drawn: the step's seed; first: see Seeds."""
    return Seeds(_of(drawn, index), drawn, first)


def seed_of(random: Seeds, region: str) -> torch.Tensor:
    """The seed of a region, named as in the model with a dot at its end, in the microbatch whose seeds are `random`:
    see csc.kernels.dropout.
    """
    word = _word(region)
    return torch.tensor([_of(random.own, word), _of(random.step, word), random.first])


def _of(seed: int, place: int) -> int:
    return mixed(seed, place) if seed >= 0 else NO_CHANCE


@cache
def _word(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


# --- Encoding for the step to come, in the middle of a step: what a rank makes there, and who is given it ------------
#
#   made     of a microbatch of the next step: what the encoder makes of it, and a key of all that decides that
#   readers  positions whose stages read what is made; only they need it
#   orders   of each position: how many of its computes come before it encodes which microbatches


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

    def exchange(self) -> Work[None]:
        """At the end of a step: give readers what they are to have, and take what others made."""
        here, manifest, endpoint = self.rank.position, self.whole.manifest, self.rank.endpoint
        readers = reading(manifest)
        for place, value in self.made.items():
            for reader in readers:
                if reader != here:
                    sent = torch.frombuffer(bytearray(value.key), dtype=torch.uint8).to(self.rank.device)
                    message = self._message(place, here, reader)
                    endpoint.send(message, manifest.microbatches + place[1], {**value.values, KEY.name: sent})
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
            number = manifest.microbatches + place[1]
            why = f"features of microbatch {place[1]} of the next step"
            yield from until(partial(endpoint.arrived, message, number), why)
            received = endpoint.receive(message, number)
            key = bytes(received.pop(KEY.name).cpu().numpy().tobytes())
            self.whole.arrived[place] = Made(key, received)

    def _message(self, place: Place, maker: int, reader: int) -> MessageSpec:
        """Between a stage of either. Its microbatches are numbered behind those of the step."""
        first = [self.whole.manifest.stages_of(position)[0].stage for position in (maker, reader)]
        return MessageSpec("F", first[0], first[1], (*self.whole.values[place], KEY))


def _makers(orders: Orders) -> dict[int, int]:
    """The position that encodes a microbatch."""
    return {
        mb: position for position, order in enumerate(orders) for microbatches in order.values() for mb in microbatches
    }


def reading(manifest: Manifest) -> list[int]:
    """The positions on the pp axis whose stages read what encoders make."""
    entries = set(manifest.features.entries) if manifest.features is not None else set[str]()
    return sorted({stage.rank for stage in manifest.stages if entries.intersection(stage.inputs)})


def orders(manifest: Manifest) -> Orders | None:
    """Where in its step each position encodes for the next one; None: nothing is encoded."""
    listed = manifest.plan.get("ahead")
    if listed is None or manifest.features is None:
        return None
    return [{place: tuple(places) for place, places in order} for order in listed]


# --- The executor: runs one rank's list of actions for one step ------------------------------------------------------
#
# Terms: *saved* is what F leaves for B, *saved for weights* what B leaves for W; both are the rank module's own and
# opaque here. The *whole* program is the first one, which has all that a microbatch's own has; of its actions, those
# that a microbatch has nothing for are skipped. Where ranks share a process, a rank that cannot go on yields what it
# waits for (csc.runtime.transport).


Within = Callable[[], AbstractContextManager[Any]]
Ahead = Callable[[Action], None]  # called with a compute of the schedule before it runs


@dataclass(frozen=True)
class Timed:
    """When an action ran on this rank, in seconds of time.perf_counter. On a GPU: when it was launched."""

    action: Action
    start: float
    end: float


@dataclass
class StepResult:
    """What one rank knows after a step. `losses` is the same on every rank: see csc.runtime.loss."""

    gradients: GradientSums
    losses: loss.Losses
    trace: list[Timed] = field(default_factory=list)


@dataclass
class _Inbox:
    """Values that have come, by (F or B, stage, microbatch) and then by the stage that made them."""

    values: dict[tuple[str, int, int], dict[int, dict[str, torch.Tensor]]] = field(default_factory=dict)

    def put(self, message: MessageSpec, microbatch: int, values: dict[str, torch.Tensor]) -> None:
        key = (message.kind, message.destination, microbatch)
        self.values.setdefault(key, {})[message.source] = values

    def take(self, kind: str, stage: int, microbatch: int) -> dict[str, torch.Tensor]:
        """By name. A value that went to several stages gets its gradients summed, highest stage first, as
        autograd does.
        """
        taken: dict[str, torch.Tensor] = {}
        for _, values in sorted(self.values.pop((kind, stage, microbatch), {}).items(), reverse=True):
            for name, tensor in values.items():
                taken[name] = taken[name] + tensor if name in taken else tensor
        return taken


class _Routes:
    """Where the values of one program's microbatches go, seen from one rank."""

    def __init__(self, rank: Rank) -> None:
        manifest = rank.program.manifest
        stages_here = {stage.stage for stage in rank.stages}
        self.messages: dict[Message, MessageSpec] = {m.channel: m for m in manifest.messages}
        self.leaving: dict[tuple[str, int], list[MessageSpec]] = {}
        self.staying: dict[tuple[str, int], list[MessageSpec]] = {}
        for message in manifest.messages:
            kept = message.destination in stages_here
            (self.staying if kept else self.leaving).setdefault((message.kind, message.source), []).append(message)


class _Step:
    """The state of one rank within one step; everything is dropped as soon as its last reader is done."""

    def __init__(
        self,
        rank: Rank,
        ranks: Sequence[Rank],
        microbatches: Sequence[Batch],
        weights: Mapping[str, torch.Tensor],
        profiled: bool,
        within: Within,
        alone: Alone | None = None,
    ) -> None:
        manifest = rank.program.manifest
        self.rank = rank  # for all that is the same in every program
        self.ranks = ranks
        self.batches, self.within = microbatches, within
        stages = {stage.stage: stage for stage in rank.stages}
        self.ranges = Ranges(stages) if profiled else None
        self.stages = {
            stage.stage: [rank.program.manifest.stages[stage.stage] for rank in ranks] for stage in rank.stages
        }
        of_rank = {id(rank): _Routes(rank) for rank in ranks}
        self.routes = [of_rank[id(rank)] for rank in ranks]
        self.inbox = _Inbox()
        self.outbox: dict[tuple[str, int, int], dict[str, torch.Tensor]] = {}
        self.pending: dict[tuple[str, int, int], int] = {}  # messages that still have to be sent from an outbox
        self.saved: dict[tuple[int, int], Any] = {}
        self.saved_for_weights: dict[tuple[int, int], Any] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.loss_weights: dict[int, float] = {}
        here = manifest.loss.over_batch is not None and manifest.loss_rank == rank.position
        self.handed_over = [HandedOver() for _ in microbatches] if here else []
        if here:
            self.batches = [
                {**microbatch, PLACE: numbered(handed)} for microbatch, handed in zip(microbatches, self.handed_over)
            ]
        held = [p for p in manifest.parameters if rank.position in p.ranks]
        self.gathered = Gathered(rank, held, weights)
        if alone is not None:  # what replicas divide is divided when they meet
            self.gradients = GradientSums(held, self.stages, None, alone.adding(self.losses), alone.skips)
            return
        scatters = manifest.zero >= 2 and len(rank.group(Group.DATA)) > 1
        self.gradients = GradientSums(held, self.stages, Scattered(rank, held) if scatters else None)

    def weights(self, stage: int) -> Mapping[str, torch.Tensor]:
        """What a stage computes with; while a profiler is on, what tells it which region does."""
        weights = self.gathered.of(stage)
        return weights if self.ranges is None else self.ranges.over(weights)

    def compute(self, action: Action) -> None:
        """Run F, B, W or BW of one microbatch, under a profiler in a range of its own."""
        with self.within(), nullcontext() if self.ranges is None else self.ranges.of(action):
            self._compute(action)

    def _compute(self, action: Action) -> None:
        """Run F, B, W or BW of one microbatch, as far as its program has it."""
        mb, kind = action.microbatch, self.doable(action)
        stage = self.stages[action.stage][mb]
        if "W" in action.kind and not stage.backward_weight:
            self.gradients.add(stage.stage, mb, ())  # the sums wait for every microbatch's turn
        constants, functions = self.ranks[mb].constants, self.ranks[mb].functions[stage.stage]
        item = (stage.stage, mb)
        loss_here = self.rank.program.manifest.loss.stage == stage.stage
        if kind == "F":
            received = self.inbox.take("F", *item)
            sent, saved = functions.forward(self.batches[mb], received, self.weights(stage.stage), constants)
            if loss_here:
                sent = dict(sent)
                self.losses[mb] = sent.pop("loss")
            if stage.backward_input:
                self.saved[item] = saved
            self._hand_on("F", stage.stage, mb, sent)
        elif kind == "BW":
            self.gradients.add(stage.stage, mb, self._backward(functions, *item))
        elif kind == "B":
            assert functions.backward_input is not None
            received = self._gradients_for(*item)
            sent, saved = functions.backward_input(self.saved.pop(item), received, self.weights(stage.stage), constants)
            if self._counts_nothing(item):
                sent = {name: torch.zeros_like(gradient) for name, gradient in sent.items()}
            if stage.backward_weight:
                self.saved_for_weights[item] = saved
            self._hand_on("B", stage.stage, mb, sent)
        elif kind == "W":
            assert functions.backward_weight is not None
            pairs = functions.backward_weight(self.saved_for_weights.pop(item), self.weights(stage.stage), constants)
            self.gradients.add(stage.stage, mb, _zeros(iter(pairs)) if self._counts_nothing(item) else pairs)

    def is_last_forward(self, action: Action) -> bool:
        """Whether the losses of all microbatches are there now."""
        here = action.kind == "F" and action.stage == self.rank.program.manifest.loss.stage
        return here and len(self.losses) == len(self.handed_over)

    def over_batch(self) -> Work[None]:
        """What of the loss is computed once a step; it counts as one of the first microbatch."""
        stage = self.rank.program.manifest.loss.stage
        trains = any(stage_functions.backward_input for stage_functions in self.stages[stage])
        added = yield from whole_batch.computed(
            self.rank, self.ranks, self.handed_over, self.gathered.of(stage), trains
        )
        if added is not None:
            self.losses[0] = self.losses[0] + added

    def _gradients_for(self, stage: int, mb: int) -> dict[str, torch.Tensor]:
        """What B takes: the gradients that have come, and on the loss' stage that of the loss."""
        received = self.inbox.take("B", stage, mb)
        if self.rank.program.manifest.loss.stage == stage:
            loss = self.losses[mb]
            received["loss"] = torch.full((), self.loss_weights[mb], dtype=loss.dtype, device=loss.device)  # no wait
        return received

    def _backward(self, functions: StageFunctions, stage: int, mb: int) -> Iterator[Pair]:
        """BW as it goes: the gradients of a region are taken before the next region runs."""
        assert functions.backward is not None
        received = self._gradients_for(stage, mb)
        constants = self.ranks[mb].constants
        run = functions.backward(self.saved.pop((stage, mb)), received, self.weights(stage), constants)
        if self._counts_nothing((stage, mb)):
            sent = yield from _zeros(run)
            sent = {name: torch.zeros_like(gradient) for name, gradient in sent.items()}
        else:
            sent = yield from run
        self._hand_on("B", stage, mb, sent)

    def _counts_nothing(self, item: tuple[int, int]) -> bool:
        """Whether a stage's microbatch has nothing that the loss is a mean over. What B makes of 0 over 0 is NaN, the
        gradient of the whole batch is not. A rank whose tokens have no labels still has what others' tokens see of it.
        """
        stage, mb = item
        manifest = self.rank.program.manifest
        alike = manifest.mesh.cp == 1 or manifest.loss.summed
        return self.loss_weights.get(mb) == 0 and stage == manifest.loss.stage and alike

    def _hand_on(self, kind: str, stage: int, mb: int, sent: Mapping[str, torch.Tensor]) -> None:
        """Keep what has to be sent until its SEND; give the other stages of this rank what is theirs now."""
        for message in self.routes[mb].staying.get((kind, stage), ()):
            names = [spec.name for spec in message.values]
            values = laid_out(message, sent, self.rank.rank)
            self.inbox.put(message, mb, dict(zip(names, values, strict=True)))
        count = len(self.routes[mb].leaving.get((kind, stage), ()))
        if count:
            self.outbox[kind, stage, mb] = dict(sent)
            self.pending[kind, stage, mb] = count

    def doable(self, action: Action) -> Kind | None:
        """What of an action there is to do for its microbatch; None: nothing."""
        if action.kind in ("F", "REDUCE", *WHOLE):
            return action.kind
        if action.kind in ("SEND", "RECV"):
            return action.kind if action.channel in self.routes[action.microbatch].messages else None
        stage = self.stages[action.stage][action.microbatch]
        return doable(action.kind, stage.backward_input, stage.backward_weight)

    def message(self, action: Action) -> MessageSpec:
        """What a SEND or RECV carries, in the sizes of its microbatch."""
        return self.routes[action.microbatch].messages[action.channel]

    def send(self, action: Action) -> None:
        key = (action.message, action.source, action.microbatch)
        self.rank.endpoint.send(self.message(action), action.microbatch, self.outbox[key])
        self.pending[key] -= 1
        if not self.pending[key]:
            del self.pending[key], self.outbox[key]


def step(
    whole: Rank,
    ranks: Sequence[Rank],
    microbatches: Sequence[Batch],
    weights: Mapping[str, torch.Tensor],
    trace: bool = False,
    drawn: int = 0,
    uneven: bool = False,
    counts: StepCounts | None = None,
    profiled: bool = False,
    within: Within = nullcontext,
    encoding: RankEncoding | None = None,
    ahead: Ahead | None = None,
) -> Work[StepResult]:
    """One step of one rank: all its actions on its replicas' microbatches. `weights` are detached tensors by
    name, with zero=3 this rank's shards; `drawn`: see csc.runtime.executor.

    whole: the rank in the first program. ranks: for each microbatch the rank in the program of the microbatch's sizes;
    the same one where sizes are equal. uneven: whether any microbatch of any replica may leave parameters out. counts:
    of these microbatches. profiled: whether a profiler is on, which ranges are for. within: makes a context for what
    computes. encoding: what it does for the next step meanwhile; once its messages have left, since others wait for
    these. ahead: see Ahead.
    An error of the rank module keeps its type; a note says which rank and action raised it.
    """
    rank, manifest = whole, whole.program.manifest
    microbatches = [context.attach(rank, microbatch) for rank, microbatch in zip(ranks, microbatches, strict=True)]
    if rank.met:
        numbers = {name: met.number for name, met in rank.met.items()}
        microbatches = [{**microbatch, **numbers} for microbatch in microbatches]
    microbatches = yield from attach(rank, ranks, microbatches, drawn)
    microbatches, weighed = yield from loss.weighed(ranks, microbatches)
    state = _Step(whole, ranks, microbatches, weights, profiled, within)
    if manifest.loss_rank == rank.position:
        state.loss_weights = weighed
    timed = yield from _all(state, rank.actions, uneven, ahead, trace, encoding)
    rank.endpoint.at("the end of a step")
    rank.endpoint.drain()
    combined = yield from loss.combine(rank, state.losses, state.loss_weights, counts or StepCounts())
    return StepResult(state.gradients, combined, timed)


@dataclass
class Computed:
    """What some microbatches gave on one rank. losses: by microbatch, on the loss' rank."""

    gradients: GradientSums
    losses: dict[int, torch.Tensor]
    trace: list[Timed]


@dataclass(frozen=True)
class Alone:
    """Microbatches of one replica that meets no other. added: as that of GradientSums, with the losses that there are.
    skips: stages and microbatches whose gradients others have.
    """

    added: Callable[[int, int, Mapping[str, torch.Tensor], Mapping[int, torch.Tensor]], None] | None = None
    skips: frozenset[tuple[int, int]] = frozenset()

    def adding(self, losses: Mapping[int, torch.Tensor]) -> Added | None:
        """For sums. losses: which come meanwhile."""
        added = self.added
        return None if added is None else lambda stage, count, sums: added(stage, count, sums, losses)


def computed(
    whole: Rank,
    ranks: Sequence[Rank],
    microbatches: Sequence[Batch],
    weights: Mapping[str, torch.Tensor],
    loss_weights: Mapping[int, float],
    profiled: bool = False,
    within: Within = nullcontext,
    ahead: Ahead | None = None,
    alone: Alone | None = None,
) -> Work[Computed]:
    """F, B and W of as many microbatches as a step has at most, in the order of the schedule. They come with all that a
    step gives them (context, seeds, weights of terms). No other replica is met.
    """
    count = len(microbatches)
    actions = [action for action in whole.actions if action.kind != "REDUCE" and action.microbatch < count]
    state = _Step(whole, ranks, microbatches, weights, profiled, within, alone or Alone())
    if whole.program.manifest.loss_rank == whole.position:
        state.loss_weights = dict(loss_weights)
    timed = yield from _all(state, actions, False, ahead, True)
    whole.endpoint.drain()
    return Computed(state.gradients, state.losses, timed)


def _zeros(pairs: Iterator[Pair]) -> Generator[Pair, None, Any]:
    """Zeros for these gradients; returns what the pairs' generator does."""
    while True:
        try:
            name, gradient = next(pairs)
        except StopIteration as end:
            return end.value
        yield name, torch.zeros_like(gradient)


def _all(
    state: _Step, actions: Sequence[Action], uneven: bool, ahead: Ahead | None, trace: bool,
    encoding: RankEncoding | None = None,
) -> Work[list[Timed]]:  # fmt: skip
    """Do these actions, in order. Returns when each ran that had something to do, with `trace`."""
    timed: list[Timed] = []
    done, due = 0, encoding is not None  # computes, and whether there may be something to encode before the next
    try:
        for i, action in enumerate(actions):
            if i == 0 or action.computes:
                _post(state, actions, i)
            if due and encoding is not None and action.kind != "SEND":
                encoding.run(done)
                due = False
            start = time.perf_counter()
            yield from _act(state, action, uneven, ahead)
            if trace and state.doable(action) is not None:
                timed.append(Timed(action, start, time.perf_counter()))
            if action.computes:
                done, due = done + 1, encoding is not None
        if encoding is not None:
            if due:
                encoding.run(done)
            yield from encoding.exchange()
    except Exception as error:
        error.add_note(f"in rank {state.rank.rank} at {state.rank.named(action)}")
        raise
    return timed


def _act(state: _Step, action: Action, uneven: bool, ahead: Ahead | None) -> Work[None]:
    """Do one action, as far as its microbatch has something to do there."""
    rank = state.rank
    rank.endpoint.at(action)
    if action.computes:
        yield from state.gathered.ready(action.stage)
        if ahead is not None:
            ahead(action._replace(microbatch=rank.served(action.microbatch)[1]))
        state.compute(action)
        if state.handed_over and state.is_last_forward(action):
            yield from state.over_batch()
        if state.gradients.scattered is not None:
            yield from state.gradients.scattered.finish()
    elif state.doable(action) is None:
        return
    elif action.kind == "SEND":
        state.send(action)
    elif action.kind == "RECV":
        message = state.message(action)
        yield from until(partial(rank.endpoint.arrived, message, action.microbatch), str(action))
        state.inbox.put(message, action.microbatch, rank.endpoint.receive(message, action.microbatch))
    elif action.kind in WHOLE:
        state.gathered.act(action)
    else:
        reached = None
        if uneven:
            names = [spec.name for spec in rank.program.manifest.parameters]
            reached = yield from of_any(state.gradients, names, rank)
        yield from reduce(state.gradients, rank, reached)


def _post(state: _Step, actions: Sequence[Action], here: int) -> None:
    """Post the receives from `here` up to the next compute action: they arrive while this one computes."""
    for action in actions[here + actions[here].computes :]:
        if action.computes:
            return
        if action.kind == "RECV" and state.doable(action) is not None:
            state.rank.endpoint.post(state.message(action), action.microbatch)
