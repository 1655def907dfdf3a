"""What the runtime adds to a microbatch for a rank: roles of placeholders that stand for it in graphs, and its names
among the entries. No entry of a batch begins as they do: a model may well have an argument `context` or `tp`.

    OF_RANKS                  kinds of roles whose values ranks have of their own
    CONTEXT_GROUP             the role of the number of a rank's cp group; of one within that its text stands there
    OWN                       how names begin
    RANDOM, CONTEXT           the seed of its random numbers; by component, how tokens are spread
    LOSS_WEIGHTS, WEIGHTS     the role and the name of what the terms of its loss weigh
    meeting(group) -> name    the number of a group within which collectives of layers meet
"""

from __future__ import annotations

from csc.ir.groups import Group

OF_RANKS = ("context", "context group", "tensor")
CONTEXT_GROUP = ("context group", "number")
LOSS_WEIGHTS = ("loss", "loss_weights")
OWN = "csc."
RANDOM, CONTEXT, WEIGHTS = "csc.random", "csc.context", "csc.loss_weights"


def meeting(group: Group) -> str:
    """See the module. group: of tensor or context parallelism, or one within these."""
    known = {Group.TENSOR: "csc.tp", Group.CONTEXT: "csc.cp"}
    within = "cp" if group.kind == "sequences" else "tp"
    return known.get(group, f"csc.{within}_{group.kind}_{group.size}")
