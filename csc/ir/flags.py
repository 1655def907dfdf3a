"""What a capture assumed of the parameters' `requires_grad`, where the model's forward asks for it.

Most models never ask: then one capture serves every frozen set. A forward that asks (`if weight.requires_grad: ...`,
also of a value that it computed) is another graph for another frozen set.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from csc.ir.miss import Miss


@dataclass(frozen=True)
class FlagsAsked:
    """where: the line that asked first. frozen: names of the parameters whose requires_grad was False."""

    where: str
    frozen: frozenset[str]

    def miss(self, frozen: Set[str]) -> Miss | None:
        """The first parameter by name that is frozen in one of both sets alone; None where there is none."""
        name = min(self.frozen ^ frozen, default=None)
        if name is None:
            return None
        return Miss(f"requires_grad of {name}", str(name not in self.frozen), str(name not in frozen))


def to_tree(flags: FlagsAsked | None) -> Any:
    """Plain JSON."""
    return None if flags is None else {"where": flags.where, "frozen": sorted(flags.frozen)}


def from_tree(tree: Any) -> FlagsAsked | None:
    """The inverse. KeyError or TypeError for a tree that is none."""
    return None if tree is None else FlagsAsked(str(tree["where"]), frozenset(map(str, tree["frozen"])))
