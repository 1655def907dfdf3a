"""What waits for what in a step, whatever its actions take: the graph whose longest path is the step.

Terms: see csc.ir.schedule and csc.simulation.simulate. A *node* is the start of a compute, or a moment that is none: a
message leaves behind others on its link, or parameters are whole. An *edge* (before, after, delay) says that `after`
comes no earlier than the end of `before` plus delay; a node that is no compute ends as it starts.

The simulator's times are these for any seconds of at least `least`: where the seconds between two messages of a link
may be fewer than the first of them takes, the second's departure is a node of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from csc.ir.schedule import Action, Message, Schedule
from csc.simulation.pipeline import Pipeline

Edge = tuple[int, int, float]


@dataclass(frozen=True)
class Waits:
    """computes: the action of each compute node, which come first; rank_of: its rank. nodes: of all kinds. edges: see
    above. earliest[n]: seconds before which node n never starts.
    """

    computes: tuple[Action, ...]
    rank_of: tuple[int, ...]
    nodes: int
    edges: tuple[Edge, ...]
    earliest: tuple[float, ...]

    @cached_property
    def after(self) -> list[list[tuple[int, float]]]:
        """[node]: what waits for it, and the delay."""
        successors: list[list[tuple[int, float]]] = [[] for _ in range(self.nodes)]
        for before, after, delay in self.edges:
            successors[before].append((after, delay))
        return successors

    @cached_property
    def before(self) -> list[list[tuple[int, float]]]:
        """[node]: what it waits for, and the delay."""
        predecessors: list[list[tuple[int, float]]] = [[] for _ in range(self.nodes)]
        for before, after, delay in self.edges:
            predecessors[after].append((before, delay))
        return predecessors

    @cached_property
    def order(self) -> list[int]:
        """Nodes such that none comes before what it waits for."""
        missing = [len(edges) for edges in self.before]
        ordered = [node for node, count in enumerate(missing) if not count]
        for node in ordered:
            for after, _ in self.after[node]:
                missing[after] -= 1
                if not missing[after]:
                    ordered.append(after)
        return ordered

    def starts(self, seconds: Sequence[float]) -> list[float]:
        """The earliest start of each node, if computes take so many seconds."""
        start = list(self.earliest)
        computes = len(self.computes)
        for node in self.order:
            end = start[node] + (seconds[node] if node < computes else 0.0)
            for after, delay in self.after[node]:
                if end + delay > start[after]:
                    start[after] = end + delay
        return start

    def latest(self, seconds: Sequence[float], limit: float) -> list[float]:
        """The latest start of each node with which the step takes no more than `limit`."""
        computes = len(self.computes)
        latest = [limit - (seconds[node] if node < computes else 0.0) for node in range(self.nodes)]
        for node in reversed(self.order):
            duration = seconds[node] if node < computes else 0.0
            for after, delay in self.after[node]:
                if latest[after] - delay - duration < latest[node]:
                    latest[node] = latest[after] - delay - duration
        return latest

    def step(self, seconds: Sequence[float]) -> float:
        """Seconds until the last compute ends."""
        start = self.starts(seconds)
        return max((start[node] + seconds[node] for node in range(len(self.computes))), default=0.0)


Held = list[tuple["int | tuple[Message, int]", float]]  # nodes and messages that a rank waits for next, with delays


class _Building:
    """Nodes and edges, rank by rank. A message stands for its departure until all ranks have been gone through."""

    def __init__(self, pipeline: Pipeline, schedule: Schedule, least: Sequence[Sequence[float]]) -> None:
        self.pipeline, self.home = pipeline, schedule.placement
        self.total = sum(map(len, least))
        self.earliest = [0.0] * self.total
        self.computes: list[Action] = []
        self.rank_of: list[int] = []
        self.edges: list[tuple[int | tuple[Message, int], int, float]] = []
        self.arrivals: dict[tuple[Message, int], tuple[int, float]] = {}  # what a message comes after, and the delay
        for rank, actions in enumerate(schedule.ranks):
            self._rank(rank, actions, iter(least[rank]))

    def _moment(self, held: Held, delay: float) -> int:
        """A new node, so much after all of these."""
        self.earliest.append(delay)
        node = len(self.earliest) - 1
        self.edges += [(before, node, held_seconds + delay) for before, held_seconds in held]
        return node

    def _rank(self, rank: int, actions: Sequence[Action], least: Iterator[float]) -> None:
        held: Held = []
        gathered_at: dict[int, int] = {}  # by stage, when its parameters are whole
        gathered: Held = []  # the rank's last gather
        links: dict[int, tuple[int, float, float]] = {}  # by target: last departure, its seconds there, computed since
        for action in actions:
            if action.computes:
                node = len(self.computes)
                self.computes.append(action)
                self.rank_of.append(rank)
                seconds = next(least)
                links = {target: (last, busy, since + seconds) for target, (last, busy, since) in links.items()}
                self.edges += [(before, node, delay) for before, delay in held]
                self.edges += [(gathered_at[action.stage], node, 0.0)] if action.stage in gathered_at else []
                held = [(node, 0.0)]
            elif action.kind == "RECV":
                held.append(((action.channel, action.microbatch), 0.0))
            elif action.kind == "SEND":
                self._send(rank, action, held, links)
            elif action.kind == "GATHER":
                node = self._moment([*held, *gathered], self.pipeline.stages[action.stage].gather)
                gathered_at[action.stage] = node
                gathered = [(node, 0.0)]

    def _send(self, rank: int, action: Action, held: Held, links: dict[int, tuple[int, float, float]]) -> None:
        target = self.home[action.destination]
        link = self.pipeline.network.link(rank, target)
        busy = self.pipeline.size(action.channel, action.microbatch) / link.bandwidth
        last, taken, since = links.get(target, (-1, 0.0, 0.0))
        maker = len(self.computes) - 1
        if held == [(maker, 0.0)] and last < self.total and since >= taken:
            node = maker
        else:
            node = self._moment(held, 0.0)
            self.edges += [(last, node, taken)] if last >= 0 else []
        links[target] = (node, busy, 0.0)
        self.arrivals[action.channel, action.microbatch] = (node, busy + link.latency)


def waits(pipeline: Pipeline, schedule: Schedule, least: Sequence[Sequence[float]]) -> Waits:
    """Of a schedule that the simulator runs. least: see above."""
    built = _Building(pipeline, schedule, least)
    edges: dict[tuple[int, int], float] = {}
    for before, after, delay in built.edges:
        if not isinstance(before, int):
            before, more = built.arrivals[before]
            delay += more
        edges[before, after] = max(delay, edges.get((before, after), 0.0))
    listed = tuple((before, after, delay) for (before, after), delay in edges.items())
    return Waits(tuple(built.computes), tuple(built.rank_of), len(built.earliest), listed, tuple(built.earliest))
