"""Token dispatch of context parallelism: which rank computes which block of queries (docs/dispatch.md)."""

from csc.planning.dispatch.planner import Dispatch, evaluate, plan
from csc.planning.dispatch.workload import EMPTY, FULL, PARTIAL, LayerMask, Rates, Workload

__all__ = ["EMPTY", "FULL", "PARTIAL", "Dispatch", "LayerMask", "Rates", "Workload", "evaluate", "plan"]
