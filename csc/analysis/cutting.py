"""Which region each node of the forward graph belongs to.

Terms
  shared   a node that depends on the batch and constants alone; draws no random numbers
  run      consecutive nodes of one label, in order of execution: a region in the making
  glue     a run of a container's own code, between the parts below it
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from csc.analysis.operators.execution import draws
from csc.ir import graph as g
from csc.ir.program import ModuleInfo


@dataclass
class Run:
    """module: path of the layer, part or container; role as in ModuleInfo."""

    module: str
    role: str
    nodes: list[fx.Node] = field(default_factory=list)


def shared_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Calls that every stage can compute from the batch by itself."""
    local: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.meta["role"][0] in ("parameter", "random"):  # each region has a seed of its own
                local.add(node)
        elif draws(node) or any(used in local for used in node.all_input_nodes):
            local.add(node)
    return {node for node in g.calls(graph) if node not in local}


def cut(graph: fx.Graph, modules: Mapping[str, ModuleInfo], shared: set[fx.Node]) -> list[Run]:
    """The runs of the graph's unshared nodes, glue joined to its neighbours where it has one input only."""
    runs: list[Run] = []
    belongs: dict[fx.Node, Run] = {}
    for node in g.calls(graph):
        if node in shared:
            continue
        if node.target is operator.getitem and node.args[0] in belongs:
            run = belongs[node.all_input_nodes[0]]  # the items of a tuple stay with the op that makes it
        else:
            path, role = label(node.meta.get("module", ""), modules)
            if not runs or (runs[-1].module, runs[-1].role) != (path, role):
                runs.append(Run(path, role))
            run = runs[-1]
        run.nodes.append(node)
        belongs[node] = run
    return _join_glue(runs, shared)


def label(module: str, modules: Mapping[str, ModuleInfo]) -> tuple[str, str]:
    """(path, role) of the outermost layer or part around a module, else of the container itself."""
    parts = module.split(".") if module else []
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        if path in modules and modules[path].role in ("layer", "part"):
            return path, modules[path].role
    return module, "container"


def _join_glue(runs: list[Run], shared: set[fx.Node]) -> list[Run]:
    """The runs, plain glue with the part next to it that reads it, or else that it reads: no other, since whoever reads
    a region waits for all of it.
    """
    joined: list[Run] = []
    for position, run in enumerate(runs):
        following = runs[position + 1] if position + 1 < len(runs) else None
        if run.role == "container" and _is_plain_glue(run, shared):
            if following is not None and following.role == "part" and _reads(following, run):
                following.nodes[:0] = run.nodes
                continue
            if joined and joined[-1].role == "part" and _reads(run, joined[-1]):
                joined[-1].nodes.extend(run.nodes)
                continue
        joined.append(run)
    return joined


def _reads(run: Run, other: Run) -> bool:
    made = set(other.nodes)
    return any(used in made for node in run.nodes for used in node.all_input_nodes)


def _is_plain_glue(run: Run, shared: set[fx.Node]) -> bool:
    """No parameters, and at most one value from outside that is no batch input or constant."""
    inside = set(run.nodes)
    outside: set[fx.Node] = set()
    for node in run.nodes:
        for used in node.all_input_nodes:
            if used in inside:
                continue
            if used.op == "placeholder":
                if used.meta["role"][0] == "parameter":
                    return False
                continue
            if used not in shared:
                outside.add(used)
    return len(outside) <= 1
