"""Orders of ranks on nodes: the same plan priced for each, and what stands within a node counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import csc
from csc.analysis.hardware import Wire, hardware, toml_text
from csc.commands.plan_command import order_sentences
from csc.driver.compiled import CompiledModel
from csc.driver.mesh_search import Ordered, priced_orders
from csc.reports.advice import now_of
from tests.compiler.tensor_models import BATCHES, MODELS


def orders_of(compiled: CompiledModel) -> list[Ordered]:
    now = now_of(compiled.program, compiled.options)
    return priced_orders(
        compiled.program, compiled.options, now.problem, now.stages, now.placement, now.whole
    )  # fmt: skip


@pytest.fixture(scope="module")
def small() -> CompiledModel:
    return csc.compile(MODELS["llama"](), example=BATCHES["llama"](4), cache=False, check=False)


def compiled_on(
    small: CompiledModel, path: Path, mesh: str, within: Wire, between: Wire, node: int = 2
) -> CompiledModel:  # fmt: skip
    profile = replace(hardware("a100"), within=within, between=between, ranks_per_node=node)
    path.write_text(toml_text(profile))
    return small.with_options(mesh=mesh, hardware=str(path), schedule="1f1b", microbatches=2)


def test_sums_of_gradients_or_messages_stay_within_a_node(small: CompiledModel, tmp_path: Path) -> None:
    """Two nodes of two: the usual order has a replica's stages in a node, the other one the replicas of a stage."""
    file = tmp_path / "nodes.toml"
    slow_sums = compiled_on(small, file, "dp=2,pp=2", Wire(0.0, 1e12), Wire(0.0, 1e6))
    own, other = orders_of(slow_sums)
    assert str(own.mesh) == "dp=2,pp=2" and str(other.mesh) == "dp=2,pp=2,order=pp-dp"
    assert own.problem.network.link(0, 1).bandwidth == 1e12 and other.problem.network.link(0, 1).bandwidth == 1e6
    plan = slow_sums.program.plan
    assert plan is not None and own.seconds > plan.makespan
    trained = max(
        sum(p.numel() * 4 for n, p in slow_sums.model.named_parameters() if any(n.startswith(r) for r in stage.regions))
        for stage in slow_sums.program.stages
    )
    assert own.seconds - plan.makespan == pytest.approx(trained / 1e6, rel=0.01)  # a ring of two: all of it, once
    assert other.seconds < own.seconds, "gradients are more than messages here"
    assert order_sentences([(str(each.mesh), each.seconds) for each in (own, other)])[0].endswith("times as fast\n")
    said = order_sentences([("a", 2.0), ("b", 3.0)])
    assert said == ["ranks stand on several nodes; the step takes 2.00 s, 3.00 s with --mesh b: none is faster\n"]
    assert order_sentences([("a", 1.0)]) == []


def test_there_is_one_order_within_a_node(small: CompiledModel, tmp_path: Path) -> None:
    one = compiled_on(small, tmp_path / "node.toml", "dp=2,pp=2", Wire(0.0, 1e12), Wire(0.0, 1e6), node=4)
    assert [str(each.mesh) for each in orders_of(one)] == ["dp=2,pp=2"]


def test_the_order_that_is_asked_for_is_planned(small: CompiledModel, tmp_path: Path) -> None:
    """A plan under the other order is priced on that order's own links, and trains."""
    asked = compiled_on(small, tmp_path / "nodes.toml", "dp=2,pp=2,order=pp-dp", Wire(0.0, 1e12), Wire(0.0, 1e9))
    own, other = orders_of(asked)
    assert str(own.mesh) == "dp=2,pp=2,order=pp-dp" and str(other.mesh) == "dp=2,pp=2"
    assert asked.program.plan is not None
    network = asked.program.plan.pipeline["network"]
    assert [place["nodes"] for place in network["places"]] == [[0, 0], [1, 1]]
