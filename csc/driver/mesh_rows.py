"""What a search for a mesh is asked, and what it finds. Terms: see csc.driver.mesh_search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from csc.ir.program import Options, Program

WAYS = ((1, "none"), (1, "full"), (3, "none"), (3, "full"))  # zero, recompute


@dataclass(frozen=True)
class DividedModel:
    """A model that csc divides. sizes: samples that a microbatch may have, ascending. divided(options, samples): the
    Program after pass `split`, of microbatches of so many; CscError where csc cannot divide it so.
    """

    options: Options
    sizes: tuple[int, ...]
    divided: Callable[[Options, int], Program]


@dataclass(frozen=True)
class MeshRow:
    """seconds: of a step, its end included. peak_memory: of the fullest rank. fits: within the limit. context: ranks
    that share out the tokens of components, as the option has it.
    """

    mesh: str
    microbatches: int
    samples: int
    zero: int
    recompute: str
    seconds: float
    idle: float
    peak_memory: float
    fits: bool
    sequence_parallel: bool = False
    context: Mapping[str, int] = field(default_factory=dict)

    @property
    def how(self) -> str:
        return _how(self)


@dataclass(frozen=True)
class MeshIfRoom:
    """What memory keeps from being chosen. seconds: that it takes at least; peak_memory: that it needs at least."""

    mesh: str
    microbatches: int
    zero: int
    recompute: str
    seconds: float
    peak_memory: float
    sequence_parallel: bool = False
    context: Mapping[str, int] = field(default_factory=dict)

    @property
    def how(self) -> str:
        return _how(self)


def _how(one: MeshRow | MeshIfRoom) -> str:
    """What it takes besides the mesh, in words."""
    extras = [f"{one.microbatches} microbatches", f"zero={one.zero}", f"recompute={one.recompute}"]
    if one.context:
        extras.append(f"context={dict(one.context)}")
    return ", ".join([*extras, "sequence_parallel=True"] if one.sequence_parallel else extras)


@dataclass(frozen=True)
class MeshChoice:
    """rows: the fastest first, those that do not fit behind all others. slower: layouts that were left out, as nothing
    on them can be faster than the best. large: those on which no plan was found that fits. refused: why there is none,
    by division. left: layouts there was no time for, all of which take at least so many seconds. room: faster ones with
    more memory, the least of that first. far: layouts left out as they were expected, not shown, to be far behind.
    """

    devices: int
    step: int
    memory: float | None
    rows: tuple[MeshRow, ...]
    slower: int
    large: int
    refused: Mapping[str, str]
    left: int
    room: tuple[MeshIfRoom, ...] = ()
    left_seconds: float = math.inf
    far: int = 0

    @property
    def gap(self) -> float:
        """How much faster, as a part of the best, what was left can be at most; 0: it cannot."""
        return max(0.0, 1 - self.left_seconds / self.rows[0].seconds)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it, which knows no infinity."""
        return {**asdict(self), "left_seconds": self.left_seconds if self.left else None, "gap": self.gap}


@dataclass(frozen=True)
class FixedChoices:
    """What is not chosen, but given. None: it is chosen."""

    microbatches: int | None = None
    zero: int | None = None
    recompute: Any = None

    def ways(self) -> list[tuple[int, Any]]:
        """(zero, recompute), in the order in which they are tried."""
        found = [
            (zero if self.zero is None else self.zero, recompute if self.recompute is None else self.recompute)
            for zero, recompute in WAYS
        ]
        return [way for number, way in enumerate(found) if way not in found[:number]]


NOTHING_FIXED = FixedChoices()
