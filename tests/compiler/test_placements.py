"""A sum between ranks that is lost, doubled or taken for another exchange is an error that names the value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from csc.kernels.collectives import ALL_REDUCE, OWN_PART, REDUCE_SCATTER, SHARE
from torch import fx

import csc
from csc.analysis.placement_check import verify_placements
from csc.ir import graph as g
from csc.ir.program import Program
from csc.ir.rewrite import add_call
from csc.ir.verifier import VerificationError
from tests.compiler.tensor_models import BATCHES, MODELS
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")


def broken(program: Program) -> Iterator[tuple[str, Program]]:
    """The program with one sum of one template changed, in its forward and in its joint graph, and how."""
    for name, template in program.templates.items():
        for which in ("graph", "joint"):
            graph = getattr(template, which)
            for place, node in enumerate(g.calls(graph)):
                for how in HOW.get(node.target, ()):
                    changed = change(graph, place, how)
                    templates = {**program.templates, name: replace(template, **{which: changed})}
                    regions = tuple(replace(region, variant="") for region in program.regions)
                    named = f"{which} of {name}: {node.name} {how}"
                    yield named, replace(program, templates=templates, regions=regions, variants={})


HOW = {ALL_REDUCE: ("lost", "doubled", "swapped"), REDUCE_SCATTER: ("swapped",)}


def change(graph: fx.Graph, place: int, how: str) -> fx.Graph:
    """A copy in which a sum is lost, doubled, or another exchange of the same sizes."""
    copied, _ = g.copy_graph(graph)
    node = g.calls(copied)[place]
    if how == "lost":
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        copied.erase_node(node)
    elif how == "swapped":
        node.target = SHARE if node.target is ALL_REDUCE else OWN_PART
    else:
        users = list(node.users)
        with copied.inserting_after(node):
            again = add_call(copied, ALL_REDUCE, (node, node.args[1]), val=node.meta["val"], like=node)
        for user in users:
            user.replace_input_with(node, again)
    return copied


@pytest.mark.parametrize(
    ("name", "shards", "changes"),
    [("llama", False, 27), ("llama", True, 9), long("gpt2", False, 18), long("lora", True, 9)],
)
def test_sums_are_there_once(name: str, shards: bool, changes: int) -> None:
    compiled = csc.compile(MODELS[name](), example=BATCHES[name](4), mesh="tp=2", sequence_parallel=shards)
    program = next(one for one in compiled.history() if one.history and one.history[-1].name == "differentiate")
    verify_placements(program, "differentiate", set())
    found = 0
    for how, wrong in broken(program):
        with pytest.raises(VerificationError, match=r"after pass differentiate: invariant 6: .*(sum|equal|whole)"):
            verify_placements(wrong, "differentiate", set())
            pytest.fail(how)
        found += 1
    assert found >= changes
