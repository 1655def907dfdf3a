"""What a region's stage holds besides where its parts are recorded (csc.runtime.graphed_stage).

    recorded_bytes(variant, stored) -> bytes       stored: dtypes of its parameters

Its gradients have places of their own, from which they are taken; a parameter that is computed with in another dtype is
there once more. What F works with is there for each microbatch in flight, not once: that is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from csc.analysis.costs import dense_bytes, variant_cost
from csc.ir import graph as g
from csc.ir.program import Variant


def recorded_bytes(variant: Variant, stored: Sequence[torch.dtype]) -> int:
    """See the module."""
    read = [node for node in g.placeholders(variant.pruned) if node.meta["role"][0] == "parameter"]
    copies = sum(dense_bytes(node) for node, dtype in zip(read, stored) if node.meta["val"].dtype != dtype)
    return variant_cost(variant, False, stored).gradients + copies
