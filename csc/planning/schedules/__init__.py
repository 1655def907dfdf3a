"""Schedules: in which order the ranks of a pipeline run F, B and W.

Terms: see csc.ir.schedule; `placement[s]` is the rank of stage s, `memory` the bytes that a rank has for state and
activations (one number for all ranks, or one for each).

Every schedule is valid for any stages (csc.ir.schedule): heterogeneous, frozen, a DAG. All stages run F, B and
W in one order of microbatches: 0, 1, ..., so that all schedules sum gradients in the same order. Only `auto` chooses
another where microbatches differ in size, unless it is told not to.
"""

from csc.planning.schedules.auto import auto, lower_bound
from csc.planning.schedules.by_name import SCHEDULES, placement, stages_per_rank, timed

__all__ = ["SCHEDULES", "auto", "lower_bound", "placement", "stages_per_rank", "timed"]
