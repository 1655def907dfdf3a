"""Where pipeline ranks stand: which of them share a node, and over which links they reach each other."""

from __future__ import annotations

from csc.passes.pipeline_problem import links

from csc.analysis.hardware import hardware
from csc.ir.mesh import Mesh
from csc.simulation.pipeline import Link, Network, Pipeline, from_json, to_json

H100, A100 = hardware("h100"), hardware("a100")
NEAR, FAR = Link(*H100.within), Link(*H100.between)


def test_ranks_in_a_row_fill_nodes() -> None:
    network = links((H100,) * 16, Mesh(pp=16))
    assert not network.places
    assert network.link(0, 7) == NEAR and network.link(7, 8) == FAR


def test_context_parallel_ranks_beside_push_neighbours_to_other_nodes() -> None:
    """With cp=8 on nodes of 8 a position fills a node; with cp=4 two of them do."""
    assert links((H100,) * 4, Mesh(pp=4, cp=8)).link(0, 1) == FAR
    four = links((H100,) * 4, Mesh(pp=4, cp=4))
    assert four.link(0, 1) == four.link(2, 3) == NEAR and four.link(1, 2) == FAR


def test_the_worst_replica_counts() -> None:
    """pp=3 with dp=3: the second replica stands on ranks 3, 4, 5, the third on 6, 7 and, on the next node, 8."""
    network = links((H100,) * 3, Mesh(dp=3, pp=3))
    assert network.link(0, 1) == NEAR and network.link(1, 2) == FAR


def test_a_node_has_devices_of_one_profile() -> None:
    network = links((H100, H100, A100, A100), Mesh(pp=4))
    assert network.link(0, 1) == NEAR and network.link(2, 3) == Link(*A100.within)
    assert network.link(1, 2) == Link(15e-6, 25e9)


def test_places_survive_a_file() -> None:
    network = links((H100, A100), Mesh(pp=2, cp=2))
    numbers = Pipeline((), {}, network)
    assert from_json(to_json(numbers)).network == network
    assert "places" not in to_json(Pipeline((), {}, Network()))["network"]
