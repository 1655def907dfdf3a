"""One step's samples divided: pure functions of lengths and costs, the same on every rank and in every worker.

    decider = Decider(lengths, costs, packed, replicas, microbatches, multiple)
    decider.decide(indices) -> StepAssignment              CPU seconds: a tenth of one for 128 samples
    decider.with_shapes(batch_size) -> Decider             that knows what shapes make such steps short, and
    decider.with_sizes(batch_size) -> Decider              that keeps to sizes of microbatches which it chose before

Without a limit of memory activations are held to ROOM times those of equal microbatches, or what equal loads take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import numpy as np

from csc.balance.lengths import Lengths
from csc.balance.sample_costs import Costs
from csc.planning.assign.portfolio import CHEAP, EVERY, ROUNDS, Effort, Shape, assign, even, learned, with_known_sizes
from csc.planning.assign.step import BatchLayout, Kind, SampleCosts, Size, widths_of
from csc.planning.schedules.work import peaks

ROOM = 1.5
SPARE = 1.1  # times that for microbatches whose size is known
DRAWS = 32  # steps of random samples whose sizes are known beforehand
LESSONS = 4  # that shapes are learned from
LONG, LONGEST = 4, 8  # of them have so many of the longest samples each


@dataclass(frozen=True)
class StepAssignment:
    """groups[replica][microbatch]: samples of the dataset; sizes: of each; seconds: of the slowest replica."""

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    sizes: tuple[tuple[Size, ...], ...]
    seconds: float


@dataclass(frozen=True)
class Decider:
    """examples: of each size of microbatches that steps keep to one that has it, as samples of the dataset. shapes:
    that microbatches are filled to. rounds: of local changes. efforts: to keep to the sizes.
    """

    lengths: Lengths
    costs: Costs
    packed: bool
    replicas: int
    microbatches: int
    multiple: int
    examples: Mapping[Size, tuple[int, ...]] = field(default_factory=dict)
    shapes: tuple[Shape, ...] = ()
    rounds: int = ROUNDS
    efforts: tuple[Effort, ...] = EVERY

    def decide(self, indices: Sequence[int]) -> StepAssignment:
        """InputError for a sample that no rank has room for: its number in the dataset and what would do."""
        step = self.step(indices)
        hard = self.costs.room
        room = hard or self._soft_room(step)
        found = assign(step, room, self.rounds, list(indices), self.shapes)
        found = with_known_sizes(step, found, hard or [SPARE * one for one in room], self.efforts)
        groups = tuple(tuple(tuple(int(indices[i]) for i in group) for group in own) for own in found.groups)
        layout = self._layout(indices)
        sizes = tuple(tuple(layout.sizes(own)) for own in found.groups)
        return StepAssignment(groups, sizes, found.seconds)

    def step(self, indices: Sequence[int]) -> SampleCosts:
        """These samples against the model's costs."""
        layout = self._layout(indices)
        kinds = layout.samples.shape[1]
        return SampleCosts(
            layout.samples, self.costs.pipeline, self.costs.placement, self.costs.orders, self.replicas,
            self.microbatches, (1.0,) * kinds, layout,
        )  # fmt: skip

    def _layout(self, indices: Sequence[int]) -> BatchLayout:
        own = list(indices)
        return BatchLayout(self.lengths.tokens[own], self.lengths.units[own], self.packed, self.multiple, self.known)

    def _soft_room(self, step: SampleCosts) -> list[float]:
        """Bytes by rank: what nobody limits, and is not to become much more than it was."""
        count = step.replicas * step.microbatches
        mean = np.concatenate([[1.0], step.samples.sum(axis=0) / count])
        equal = peaks(step.work(np.tile(mean, (step.microbatches, 1))), step.orders)
        return [max(ROOM * one, other) for one, other in zip(equal, step.peaks(even(step)))]

    def with_shapes(self, batch_size: int) -> Decider:
        """With shapes for steps of so many of the dataset's samples."""
        drawn = [self.step(indices) for _, indices in zip(range(LESSONS), self._draws(batch_size, longest=False))]
        room = self.costs.room or [min(each) for each in zip(*(self._soft_room(step) for step in drawn))]
        return replace(self, shapes=tuple(learned(drawn, room)))

    def with_sizes(self, batch_size: int) -> Decider:
        """Knowing the sizes of a few steps of random samples, each of which kept to those before where that was cheap;
        of some the longest samples are a part, which hardly any other sizes would have room for.
        """
        found = replace(self, rounds=0, efforts=CHEAP)
        for indices in self._draws(batch_size):
            decided = found.decide(indices)
            new = dict(zip(chain(*decided.sizes), chain(*decided.groups)))
            found = replace(found, examples={**new, **found.examples})
        return replace(found, rounds=self.rounds, efforts=self.efforts)

    def _draws(self, batch_size: int, longest: bool = True) -> Iterator[list[int]]:
        random, count = np.random.default_rng(0), min(batch_size, len(self.lengths))
        most = np.argsort(-self.lengths.tokens, kind="stable")[: LONG * LONGEST].tolist()
        for number in range(DRAWS):
            drawn = random.choice(len(self.lengths), count, replace=False).tolist()
            own = most[number::LONG][: count // 2] if longest and number < LONG else []
            yield [*own, *(one for one in drawn if one not in own)][:count]

    @cached_property
    def known(self) -> Mapping[Kind, tuple[int, ...]]:
        """By kind the widths of these sizes; see csc.planning.assign.step."""
        return widths_of(self.sizes)

    @property
    def sizes(self) -> list[Size]:
        """All known ones."""
        return sorted(self.examples)
