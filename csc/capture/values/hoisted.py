"""Tensors that a model makes of its batch alone, computed before the step instead, outside the graph.

hoisted.entries(model, batch) -> {name: tensor}       as of csc.capture.values.hoist.HostCall
hoisted.stand_in(example, batch)                      the same while tracing, of the traced batch
unused(name, earlier) -> prefix                       of the names of batch entries
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Protocol

import torch
from torch import nn

from csc.ir.capture_guards import Expression
from csc.torch_private.traces import pytree


class _Named(Protocol):
    @property
    def prefix(self) -> str: ...


@dataclass(frozen=True)
class Hoisted:
    """Tensors that a model makes of its batch alone, as many as its values say (`(ids == 7).nonzero()`), or that it
    gives a function which runs on the host. prefix: of the names of the entries.
    """

    expression: Expression
    prefix: str

    @property
    def arguments(self) -> tuple[tuple[str, str], ...]:
        """As those of a HostCall."""
        return tuple((entry, entry) for entry in self.expression.entries)

    def is_for(self, batch: Mapping[str, Any]) -> bool:
        """Whether a batch has the entries that it is made of."""
        return all(entry in batch for entry in self.expression.entries)

    def entries(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors, named, for a real microbatch; none if they cannot be made of it: then no program wants them."""
        try:
            found = self.expression.of(batch)
        except Exception:  # the model's own calls: this microbatch may lack what they read
            return {}
        return {f"{self.prefix}_{place}": leaf for place, leaf in enumerate(pytree.tree_leaves(found))}

    def stand_in(self, example: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> Any:
        """What it gives, its tensors taken from the traced batch."""
        leaves, structure = pytree.tree_flatten(self.expression.of(example))
        return pytree.tree_unflatten([batch[f"{self.prefix}_{i}"] for i in range(len(leaves))], structure)


def unused(name: str, earlier: Sequence[_Named]) -> str:
    """A prefix after a name that none of these has."""
    taken = {one.prefix for one in earlier}
    return next(one for one in chain([name], (f"{name}_call{n}" for n in count(2))) if one not in taken)
