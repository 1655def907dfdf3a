"""Names, among the entries of a microbatch, of what the runtime adds for a rank. No entry of a batch begins as they do:
a model may well have an argument `context` or `tp`.

    OWN                       how they begin
    RANDOM, CONTEXT           the seed of its random numbers; by component, how tokens are spread
    MEETINGS                  {Group: name}: the numbers of the groups within which collectives of layers meet
"""

from __future__ import annotations

from collections.abc import Mapping

from csc.ir.groups import Group

OWN = "csc."
RANDOM, CONTEXT = "csc.random", "csc.context"
MEETINGS: Mapping[Group, str] = {
    Group.TENSOR: "csc.tp", Group.COPIES: "csc.tp_copies", Group.DIVISION: "csc.tp_division", Group.CONTEXT: "csc.cp",
}  # fmt: skip
