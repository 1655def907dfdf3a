"""Rerouting: the microbatches of a lost rank run on the ranks that hold its stage in other replicas.

Terms
  template     of all replicas that take part, see csc.planning.survive.templates
  lost         (replica, stage) of the ranks that are gone
  peers        of a lost rank: those of its stage in other replicas; they share its microbatches out in turn
  guest        a stage of a lost rank as one of its peers runs it; it has no state, as the peer has the same parameters

No parameter moves. B and W are apart and W waits until a rank has nothing else to do, so that guests find bubbles to
run in (ReCycle, Gandhi et al. 2024, arXiv 2405.14009).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush

from csc.ir.schedule import Action, Kind, Message, Schedule, with_messages
from csc.planning.survive.templates import PipelineTemplate
from csc.simulation.pipeline import Network, Pipeline, RankNodes, StageWork, peak_memory
from csc.simulation.simulate import makespan

AHEAD = (1.0, 1.5, 2.0, 3.0, math.inf)  # times what 1F1B has in flight on a rank, and its guests as much
NEAR = 1e-3  # of its bound: an order that is good enough
Task = tuple[str, int, int]  # kind, stage, microbatch


@dataclass(frozen=True)
class Rerouted:
    """What all replicas of a template run without the lost ranks.

    ranks: the (replica, stage) of each rank of the schedule. stages: of each stage of the schedule the (replica, stage)
    whose microbatches it runs; those of a guest stand on a rank of another replica. Replicas number their microbatches
    from 0 each. seconds: of a step; peaks: bytes of each rank.
    """

    ranks: tuple[tuple[int, int], ...]
    stages: tuple[tuple[int, int], ...]
    pipeline: Pipeline
    schedule: Schedule
    seconds: float
    peaks: tuple[float, ...]


def rerouted(
    template: PipelineTemplate, microbatches: Sequence[int], lost: Collection[tuple[int, int]], apart: bool = True
) -> Rerouted | None:  # fmt: skip
    """The schedule of least simulated seconds among orders with more or fewer microbatches in flight.

    Args:
        template: Of all replicas.
        microbatches: Of each replica, those of a replica that lost ranks among them.
        lost: (replica, stage) of each lost rank.
        apart: Whether B and W are apart; else W follows its B.
    """
    work = _ReplicaWork.of(template, microbatches, lost)
    if work is None:
        return None
    best: Rerouted | None = None
    enough = work.bound * (1 + NEAR)
    for ahead in AHEAD:
        for guests_first in (True, False):
            if best is not None and best.seconds <= enough:
                return best
            order = _dispatched(work, ahead, guests_first, apart)
            if order is None:
                continue
            schedule = _schedule(work, order)
            peaks = tuple(peak_memory(work.pipeline, schedule))
            if template.memory is not None and max(peaks) > template.memory * (1 + 1e-9):
                continue
            seconds = makespan(work.pipeline, schedule)
            if best is None or seconds < best.seconds * (1 - 1e-9):
                best = Rerouted(work.ranks, work.logical, work.pipeline, schedule, seconds, peaks)
    return best


@dataclass(frozen=True)
class _ReplicaWork:
    """The replicas as one pipeline. logical[stage]: its (replica, stage); home[stage]: its rank; own[stage]: its
    microbatches; guest[stage]: whether it stands on a peer's rank.
    """

    depth: int
    ranks: tuple[tuple[int, int], ...]
    logical: tuple[tuple[int, int], ...]
    home: tuple[int, ...]
    own: tuple[tuple[int, ...], ...]
    guest: tuple[bool, ...]
    pipeline: Pipeline
    memory: float | None
    stage_of: Mapping[tuple[int, int, int], int] = field(repr=False)  # of (replica, stage, microbatch)

    @classmethod
    def of(
        cls, template: PipelineTemplate, microbatches: Sequence[int], lost: Collection[tuple[int, int]]
    ) -> _ReplicaWork | None:  # fmt: skip
        """None if a stage that has microbatches has no rank left."""
        depth, replicas = template.depth, range(len(microbatches))
        ranks = tuple((r, s) for r in replicas for s in range(depth) if (r, s) not in lost)
        number = {place: rank for rank, place in enumerate(ranks)}
        logical, home, own_microbatches, guest = [], [], [], []
        for r in replicas:
            for s in range(depth):
                peers = [(r, s)] if (r, s) in number else [(q, s) for q in replicas if (q, s) in number]
                if not peers:
                    return None
                for i, peer in enumerate(peers):
                    turn = (i + r) % len(peers)  # so that several lost ranks do not all begin with the same peer
                    if turn < microbatches[r]:
                        logical.append((r, s))
                        home.append(number[peer])
                        own_microbatches.append(tuple(range(turn, microbatches[r], len(peers))))
                        guest.append(peer != (r, s))
        stage_of = {(*place, mb): stage for stage, place in enumerate(logical) for mb in own_microbatches[stage]}
        stages = tuple(
            replace(template.pipeline.stages[s], state=0.0) if away else template.pipeline.stages[s]
            for (_, s), away in zip(logical, guest)
        )
        numbers = Pipeline(
            stages, _messages(template.pipeline, logical), _network(template.pipeline.network, ranks)
        )  # fmt: skip
        return cls(
            depth,
            ranks,
            tuple(logical),
            tuple(home),
            tuple(own_microbatches),
            tuple(guest),
            numbers,
            template.memory,
            stage_of,
        )

    @cached_property
    def bound(self) -> float:
        """No order takes fewer seconds: a rank's own work, behind the forwards that lead to its first stage."""
        stages = self.pipeline.stages
        first = [0.0] * len(stages)
        for _, source, target in sorted(channel for channel in self.pipeline.messages if channel[0] == "F"):
            # Of guests the one that is there first will do.
            place = self.logical[source]
            earlier = [s for s, other in enumerate(self.logical) if other == place]
            first[target] = max(first[target], min(first[s] + stages[s].forward for s in earlier))
        work, ramp = [0.0] * len(self.ranks), [math.inf] * len(self.ranks)
        for stage, rank in enumerate(self.home):
            work[rank] += len(self.own[stage]) * stages[stage].work
            if self.own[stage]:
                ramp[rank] = min(ramp[rank], first[stage])
        return max((w + r for w, r in zip(work, ramp) if w), default=0.0)

    @cached_property
    def before(self) -> dict[Task, list[tuple[Task, Message | None]]]:
        """By task, what it waits for, and the channel of the message in between."""
        waits: dict[Task, list[tuple[Task, Message | None]]] = {}
        for stage, work in enumerate(self.pipeline.stages):
            for mb in self.own[stage]:
                waits["F", stage, mb] = []
                if work.has_b:
                    waits["B", stage, mb] = [(("F", stage, mb), None)]
                if work.has_w:
                    waits["W", stage, mb] = [(("B" if work.has_b else "F", stage, mb), None)]
        for channel in self.pipeline.messages:
            kind, source, target = channel
            for mb in set(self.own[source]) & set(self.own[target]):
                waits[kind, target, mb].append(((kind, source, mb), channel))
        return waits


def _messages(numbers: Pipeline, logical: Sequence[tuple[int, int]]) -> dict[Message, float]:
    """Channels between stages of one replica, guests among them."""
    stages: dict[tuple[int, int], list[int]] = {}
    for stage, place in enumerate(logical):
        stages.setdefault(place, []).append(stage)
    return {
        (kind, source, target): size
        for (kind, a, b), size in numbers.messages.items()
        for replica in {r for r, _ in logical}
        for source in stages.get((replica, a), ())
        for target in stages.get((replica, b), ())
    }


def _network(network: Network, ranks: Sequence[tuple[int, int]]) -> Network:
    """Ranks of one replica reach each other as in the template, those of two as between nodes, if there are nodes."""
    if network.ranks_per_node is None and not network.places:
        return network
    size = network.ranks_per_node or 1
    places = network.places or tuple(
        RankNodes((stage // size,), network.within, network.between) for stage in range(1 + max(s for _, s in ranks))
    )
    return replace(
        network, ranks_per_node=None, places=tuple(replace(places[s], nodes=(r, *places[s].nodes)) for r, s in ranks)
    )


def _dispatched(work: _ReplicaWork, ahead: float, guests_first: bool, apart: bool) -> list[list[Task]] | None:
    """For each rank its tasks, as it runs them if it always takes what is ready: B, then F, then W, each by microbatch.

    A stage has at most `ahead` times as many microbatches in flight as 1F1B has, a guest one at least. None if bytes
    leave a rank with nothing that it may start.
    """
    stages, home = work.pipeline.stages, work.home
    waits = {task: len(before) for task, before in work.before.items()}
    feeds: dict[Task, list[tuple[Task, Message | None]]] = {}
    for task, before in work.before.items():
        for earlier, channel in before:
            feeds.setdefault(earlier, []).append((task, channel))
    held = _Held(work, ahead)
    ready: list[list[tuple[float, Task]]] = [[] for _ in work.ranks]
    came = dict.fromkeys(waits, 0.0)
    for task, count in waits.items():
        if not count:
            ready[home[task[1]]].append((0.0, task))
    busy = [0.0] * len(work.ranks)
    wire: dict[tuple[int, int], float] = {}
    orders: list[list[Task]] = [[] for _ in work.ranks]
    heap = [(0.0, rank) for rank in range(len(work.ranks))]
    left = len(waits)

    def urgency(task: Task) -> tuple[int, int, bool]:
        kind, stage, mb = task
        return ("BFW".index(kind), mb, work.guest[stage] != guests_first)

    def start(rank: int, now: float, task: Task) -> None:
        kind, stage, _ = task
        end = now + stages[stage].seconds(kind)
        held.started(task)
        orders[rank].append(task)
        busy[rank] = end
        heappush(heap, (end, rank))
        for later, channel in feeds.get(task, ()):
            moment, to = end, home[later[1]]
            if channel is not None and to != rank:
                link = work.pipeline.network.link(rank, to)
                moment = max(moment, wire.get((rank, to), 0.0)) + work.pipeline.messages[channel] / link.bandwidth
                wire[rank, to] = moment
                moment += link.latency
            came[later] = max(came[later], moment)
            waits[later] -= 1
            if not waits[later]:
                ready[to].append((came[later], later))
                heappush(heap, (max(came[later], now), to))

    while heap:
        now, rank = heappop(heap)
        if now < busy[rank]:
            continue
        candidates = [task for moment, task in ready[rank] if moment <= now and held.admits(task)]
        if not candidates:
            continue
        task = min(candidates, key=urgency)
        if not apart and task[0] != "W":
            owed = [other for other in candidates if other[0] == "W"]
            task = min(owed, key=urgency) if owed else task
        ready[rank] = [entry for entry in ready[rank] if entry[1] != task]
        left -= 1
        start(rank, now, task)
    return orders if not left else None


class _Held:
    """What ranks hold as tasks start, and which they may start."""

    def __init__(self, work: _ReplicaWork, ahead: float) -> None:
        self._work = work
        self._bytes = [0.0] * len(work.ranks)
        self._flying = [0] * len(work.logical)
        self._most = [
            math.inf if math.isinf(ahead) else max(1, math.ceil(ahead * _share(work, stage) - 1e-9))
            for stage in range(len(work.logical))
        ]
        state, working = [0.0] * len(work.ranks), [0.0] * len(work.ranks)
        for stage, rank in enumerate(work.home):
            state[rank] += work.pipeline.stages[stage].state
            working[rank] = max(working[rank], work.pipeline.stages[stage].working)
        limit = math.inf if work.memory is None else work.memory
        self._room = [limit - bytes_used - other for bytes_used, other in zip(state, working)]
        self._reserve = [0.0] * len(work.ranks)  # what B of a microbatch leaves beyond what F saved
        for stage, rank in enumerate(work.home):
            self._reserve[rank] = max(self._reserve[rank], _grows(work.pipeline.stages[stage], "B"))

    def admits(self, task: Task) -> bool:
        """B and W always but for bytes; F while there are few in flight and room for what B needs beside it."""
        kind, stage, _ = task
        work, rank = self._work.pipeline.stages[stage], self._work.home[stage]
        after = self._bytes[rank] + _grows(work, kind)
        if kind == "F":
            if (work.has_b or work.has_w) and self._flying[stage] >= self._most[stage]:
                return False
            after += self._reserve[rank]
        return after <= self._room[rank] * (1 + 1e-9)

    def started(self, task: Task) -> None:
        kind, stage, _ = task
        work = self._work.pipeline.stages[stage]
        self._bytes[self._work.home[stage]] += _grows(work, kind)
        if kind == "F":
            self._flying[stage] += 1
        elif kind == ("B" if work.has_b else "W"):
            self._flying[stage] -= 1


def _share(work: _ReplicaWork, stage: int) -> float:
    """Of what 1F1B has in flight at this stage, the part that stands on one rank."""
    replica, place = work.logical[stage]
    return (work.depth - place) / sum(other == (replica, place) for other in work.logical)


def _grows(stage: StageWork, kind: str) -> float:
    """By how many bytes a task makes its rank's activations grow, see csc.simulation.pipeline."""
    saved = stage.saved if stage.has_b or stage.has_w else 0.0
    stashed = (stage.stashed if stage.has_b else saved) if stage.has_w else 0.0
    if kind == "F":
        return saved
    return (stashed - saved if stage.has_b else 0.0) if kind == "B" else -stashed


def _schedule(work: _ReplicaWork, orders: Sequence[Sequence[Task]]) -> Schedule:
    """With the messages that a stage's microbatches need, and no others."""
    kinds: dict[str, Kind] = {"F": "F", "B": "B", "W": "W"}
    listed = [[Action(kinds[kind], stage, mb) for kind, stage, mb in order] for order in orders]
    messaged = with_messages("rerouted", listed, work.pipeline.messages)
    own_sets = [set(microbatches) for microbatches in work.own]

    def needed(actions: Sequence[Action]) -> Iterator[Action]:
        for action in actions:
            if action.kind not in ("SEND", "RECV") or action.microbatch in own_sets[action.destination]:
                yield action

    return Schedule("rerouted", tuple(tuple(needed(actions)) for actions in messaged.ranks))
