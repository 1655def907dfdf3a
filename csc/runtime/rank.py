"""A rank: one position of the mesh with what it needs to run its part of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.profiler import record_function

from csc.ir.groups import Group
from csc.ir.mesh import Coordinates
from csc.ir.schedule import Action
from csc.runtime.loaded_program import LoadedProgram, StageFunctions, Visibility
from csc.runtime.made_once import Constants
from csc.runtime.specs import ContextSpec, StageSpec
from csc.runtime.transport import Endpoint, Met

# --- Ranges for torch.profiler (and NVTX through it): what a rank runs, by action, stage, microbatch and region ------
#
#     ranges = Ranges(stages)
#     weights = ranges.over(weights)     # they tell which region reads them
#     with ranges.of(action): ...        # "F stage 2 microbatch 5 [layers.4 ... layers.7]", and in it "layers.4"


class Ranges(Mapping[str, torch.Tensor]):
    """The weights of a rank. A region's functions are called with those below its name, which is when it begins."""

    def __init__(self, stages: Mapping[int, StageSpec]) -> None:
        self._weights: Mapping[str, torch.Tensor] = {}
        self._stages = stages
        self._region: record_function | None = None

    def over(self, weights: Mapping[str, torch.Tensor]) -> Ranges:
        """Those that the next action reads."""
        self._weights = weights
        return self

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    @contextmanager
    def of(self, action: Action) -> Iterator[None]:
        """While an action runs."""
        with record_function(self._name(action)):
            try:
                yield
            finally:
                self._leave()

    def enters(self, region: str) -> None:
        """A region begins, and the one before it is done."""
        self._leave()
        self._region = record_function(region)
        self._region.__enter__()

    def _leave(self) -> None:
        if self._region is not None:
            self._region.__exit__(None, None, None)
            self._region = None

    def _name(self, action: Action) -> str:
        if not action.computes:
            return str(action)
        regions = self._stages[action.stage].regions
        named = regions[0] if len(regions) == 1 else " ... ".join((regions[0], regions[-1])) if regions else "nothing"
        return f"{action.kind} stage {action.stage} microbatch {action.microbatch} [{named}]"


# --- The actions of a rank that several replicas share: those of the schedule, for a microbatch of each --------------
#
# Terms: a *turn* is one F, B, W or BW with the messages of its microbatch that come right before it and right behind
# it.
#
# Whatever order of actions is free of deadlock for one replica is so for several, turn by turn: the events of the
# schedule have an order in which each comes after those that it waits for, and each stands there once for every
# replica. Nothing but the rank itself waits for what comes before its compute, and no message behind it waits for
# anything. A turn with two computes would not do: what the second waits for may need the first of another replica.
# With one stage on a rank there is one channel for each kind between two ranks, whose messages of several replicas
# come in turns on both.


def repeated(actions: Sequence[Action], replicas: int) -> tuple[Action, ...]:
    """Microbatch m of replica r is number `m * replicas + r`: gradients of each are added in the order of numbers. What
    is of no microbatch is done once.
    """
    if replicas == 1:
        return tuple(actions)
    return tuple(
        action if action.microbatch < 0 else action._replace(microbatch=action.microbatch * replicas + replica)
        for turn in _turns(actions)
        for replica in range(replicas if turn[0].microbatch >= 0 else 1)
        for action in turn
    )


def _turns(actions: Sequence[Action]) -> Iterator[list[Action]]:
    turn: list[Action] = []
    for action in actions:
        computed = any(action.computes for action in turn)
        if turn and (action.microbatch != turn[0].microbatch or (computed and action.kind != "SEND")):
            yield turn
            turn = []
        turn.append(action)
        if action.microbatch < 0:
            yield turn
            turn = []
    if turn:
        yield turn


# --- A rank: one position of the mesh with what it needs to run its part of a program --------------------------------
#
# Terms: a rank's *position* is its index on the pp axis, its *cp rank* and *tp rank* those on the cp and the tp axis,
# its *replicas* those whose samples it works on. They are one, but at a position that replicas share: there the rank
# does each action of the schedule for all of them, and numbers their microbatches in turns.


@dataclass(frozen=True)
class Rank:
    """One rank of a program, ready to run. `functions` are those of its stages."""

    program: LoadedProgram
    rank: int
    functions: Mapping[int, StageFunctions]
    endpoint: Endpoint
    constants: Constants
    device: torch.device
    visibility: Mapping[str, Visibility] = field(default_factory=dict)  # by component: what masks are made of
    met: Mapping[str, Met] = field(default_factory=dict)  # with tp > 1: where collectives meet, by the batch's names
    _groups: dict[Any, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _at(self) -> Coordinates:
        return self.program.manifest.mesh.coordinates(self.rank)

    @property
    def position(self) -> int:
        """Index on the pp axis."""
        return self._at.pp

    @cached_property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages that it runs, in order."""
        return self.program.manifest.stages_of(self.position)

    @cached_property
    def replicas(self) -> range:
        """Whose samples it works on."""
        return self.program.manifest.mesh.replicas_of(self.rank)

    def served(self, number: int) -> tuple[int, int]:
        """The replica, and its microbatch, of a microbatch of this rank's step."""
        return self.program.manifest.mesh.served(self.rank, number)

    def named(self, action: Action) -> str:
        """An action as the schedule has it, and for which of several replicas it is done."""
        if len(self.replicas) == 1 or action.microbatch < 0:
            return f"'{action}'"
        replica, microbatch = self.served(action.microbatch)
        return f"'{action._replace(microbatch=microbatch)}' of replica {replica}"

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """What it does in a step."""
        return repeated(self.program.schedule.ranks[self.position], len(self.replicas))

    @property
    def cp_rank(self) -> int:
        """Index on the cp axis."""
        return self._at.cp

    @property
    def tp_rank(self) -> int:
        """Index on the tp axis."""
        return self._at.tp

    def group(self, what: Group, positions: Sequence[int] | None = None) -> tuple[int, ...]:
        """As `Mesh.group`, of this rank."""
        key = what, None if positions is None else tuple(positions)
        members = self._groups.get(key)
        if members is None:
            members = self._groups[key] = self.program.manifest.mesh.group(what, self.rank, positions)
        return members

    def sharing(self, spec: ContextSpec) -> tuple[int, ...]:
        """The ranks among which a component's tokens are, itself included."""
        group = self.group(spec.group)
        first = group.index(self.rank) // spec.ranks * spec.ranks
        return group[first : first + spec.ranks]
