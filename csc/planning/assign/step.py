"""One step's samples against one pipeline: what an assignment of them takes.

Terms
  sample     what a data loader's dataset gives for one index; features of a microbatch are sums over its samples
  group      the samples of one microbatch; groups[replica][position], positions in the order in which they are run
  multiple   features are rounded up to multiples of these, as batches are padded, so that few programs are compiled
  layout     how samples lie in a microbatch, where its features are no sums over them (csc.planning.assign.layout)

    Step(samples, pipeline, placement, orders, replicas, microbatches, multiple, layout)
    step.seconds(groups) -> seconds of each replica         step.features(groups) -> [microbatch][feature]
    step.peaks(groups) -> bytes by rank, the largest of any replica
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from csc.planning.assign.layout import BatchLayout, Floats
from csc.planning.schedules.work import FixedOrders, WorkTables, growth, makespan
from csc.simulation.pipeline import FIGURES, Loads, Pipeline, taken

Groups = Sequence[Sequence[int]]
FEW = 4  # ways that are timed one by one
MANY = 64  # that are timed in one walk: of more the rows do not stay in the processor's cache


@dataclass(frozen=True)
class SampleCosts:
    """samples: [sample][feature], without the constant one, which every microbatch has once. pipeline: with the rates
    of (1, *features) in its loads, whose own features are not read. orders: of each rank, over positions.
    multiple: by feature; 1 or 0 rounds nothing. layout: None: features are sums, rounded.
    """

    samples: Floats
    pipeline: Pipeline
    placement: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    replicas: int
    microbatches: int
    multiple: tuple[float, ...]
    layout: BatchLayout | None = None

    def features(self, groups: Groups) -> Floats:
        """[microbatch][feature] of a replica's groups, the constant one first."""
        if self.layout is not None:
            return self.layout.features(groups)
        members = np.fromiter(chain.from_iterable(groups), np.int64)
        sizes = np.array([len(group) for group in groups])
        rows = np.vstack(
            [self.samples[members], np.zeros((1, self.samples.shape[1]))]
        )  # where an empty last one begins
        sums = np.add.reduceat(rows, np.cumsum(sizes) - sizes, axis=0) * (sizes > 0)[:, None]
        return np.hstack([np.ones((len(groups), 1)), rounded(sums, self.multiple)])

    def work(self, features: Floats) -> WorkTables:
        """The tables of microbatches with these features."""
        each = Loads(tuple(map(tuple, features.tolist())), self._loads.stages, self._loads.messages)
        return WorkTables.of(replace(self.pipeline, loads=each), self.placement, self.microbatches)

    def seconds_of(self, features: Floats) -> float:
        """Seconds of a replica whose microbatches have these features."""
        return makespan(self.work(features), self.orders)

    def seconds_of_ways(self, ways: Sequence[Groups]) -> list[float]:
        """What `seconds_of` says of each of these ways to fill a replica's microbatches, all in one walk over the
        orders: for more than a few that takes a fraction of the time.
        """
        if len(ways) < FEW:
            return [self.seconds_of(self.features(groups)) for groups in ways]
        if len(ways) > MANY:
            return [*self.seconds_of_ways(ways[:MANY]), *self.seconds_of_ways(ways[MANY:])]
        counts = self.features(list(chain.from_iterable(ways)))
        three = [self._by_position(taken(self._rates[figure], counts), len(ways)) for figure in FIGURES[:3]]
        lanes = np.stack(three, axis=1).reshape(-1, self.microbatches, len(ways))
        seconds = np.concatenate([lanes, three[1] + three[2]])
        return self.fixed_orders.makespans(seconds, self.wires(counts, len(ways))).tolist()

    def wires(self, features: Floats, ways: int = 1) -> Floats:
        """[channel in its order][position][way]: seconds of messages on the wire, of microbatches of these features,
        those of each way behind those of the one before.
        """
        rates, speeds = self._sent
        return self._by_position(taken(rates, features), ways) / speeds[:, None, None]

    @property
    def _loads(self) -> Loads:
        loads = self.pipeline.loads
        assert loads is not None
        return loads

    @cached_property
    def _rates(self) -> dict[str, Floats]:
        """By figure [stage][feature]."""
        return {figure: self._loads.rates(figure) for figure in FIGURES}

    @cached_property
    def _sent(self) -> tuple[Floats, Floats]:
        """[channel in its order][feature]: bytes; [channel]: bytes a second."""
        channels = sorted(self.pipeline.messages)
        ends = [(self.placement[source], self.placement[end]) for _, source, end in channels]
        speeds = np.array([self.pipeline.network.link(*pair).bandwidth for pair in ends])
        return self._loads.sent(channels), speeds

    def _by_position(self, rows: Floats, ways: int) -> Floats:
        return rows.reshape(-1, ways, self.microbatches).transpose(0, 2, 1)

    @cached_property
    def fixed_orders(self) -> FixedOrders:
        """The orders, to be timed for many microbatches."""
        ones = np.ones((self.microbatches, self.samples.shape[1] + 1))
        return FixedOrders(self.work(ones), self.orders)

    def activations(self, features: Floats) -> list[float]:
        """By rank the most bytes of activations of a replica whose microbatches have these features."""
        saved, stashed, moment = (taken(self._rates[figure], features) for figure in ("saved", "stashed", "fused"))
        return self.fixed_orders.peaks(growth(self.pipeline.stages, saved, stashed), moment)

    def seconds(self, replicas: Sequence[Groups]) -> list[float]:
        """Of each replica."""
        return [self.seconds_of(self.features(groups)) for groups in replicas]

    def peaks(self, replicas: Sequence[Groups]) -> list[float]:
        """For each rank the most bytes of activations, of any replica."""
        each = [self.activations(self.features(groups)) for groups in replicas]
        return [max(rank) for rank in zip(*each)]

    @cached_property
    def rank_rates(self) -> Floats:
        """[feature][rank]: seconds that one of each feature adds to a rank's work, the constant one first."""
        ranks = 1 + max(self.placement)
        found = np.zeros((len(self.multiple) + 1, ranks))
        for rates, rank in zip(self._loads.stages, self.placement):
            found[:, rank] += [sum(getattr(rate, name) for name in FIGURES[:3]) for rate in rates]
        return found

    @cached_property
    def shares(self) -> Floats:
        """[sample][rank]: what a sample takes of the rank's work for all samples."""
        seconds = self.samples @ self.rank_rates[1:]
        whole = seconds.sum(axis=0)
        return np.divide(seconds, whole, out=np.zeros_like(seconds), where=whole > 0)


def rounded(sums: Floats, multiple: Sequence[float]) -> Floats:
    """Features as batches have them once they are padded."""
    steps = np.array([one or 1.0 for one in multiple])
    return np.where(steps > 1, np.ceil(sums / steps) * steps, sums)
