"""Collectives within a stage cost what their bytes take on the wire between the ranks that meet."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import csc
from csc.analysis.costs import Exchange, exchange, region_costs, wire_seconds, wires_between, within_division
from csc.analysis.hardware import Wire, hardware
from csc.ir import graph as g
from csc.ir.mesh import Axes, Mesh
from csc.ir.program import Program

pytestmark = pytest.mark.usefixtures("traces")

TOKENS, WIDTH, KEYS = 64, 32, 16
KNOWN = {"tp": (4, Wire(1.0, 10.0)), "cp": (2, Wire(0.5, 5.0))}


@pytest.mark.parametrize(
    ("met", "expected"),
    [
        (Exchange("tp", 100, 0, False, False), 1 + 300 / 10),  # everyone's whole, of the axis' four
        (Exchange("tp", 100, 0, False, False, True), 1 + 300 / 10),  # it is small: the same
        (Exchange("tp", 2**20, 0, False, False, True), 2 + 2**20 * 1.5 / 10),  # each sums a quarter
        (Exchange("tp", 2**20, 2, False, False, True), 1 + 2**20 / 10),
        (Exchange("tp", 100, 2, False, False), 1 + 100 / 10),
        (Exchange("tp", 100, 4, True, False), 1 + 75 / 10),
        (Exchange("cp", 100, 1, False, True), 0.0),  # an encoder that context parallelism leaves alone
        (Exchange("cp", 100, 2, False, True), 0.5 + 100 / 5),
    ],
)
def test_seconds_on_the_wire(met: Exchange, expected: float) -> None:
    assert wire_seconds(met, KNOWN) == pytest.approx(expected)
    assert wire_seconds(met, {}) == 0.0


def test_wires_are_those_between_the_nodes_where_a_group_is_on_several() -> None:
    h100 = hardware("h100")
    assert wires_between(Mesh(pp=4), h100) == {}
    assert wires_between(Mesh(pp=2, tp=8), h100) == {"tp": (8, h100.within)}
    assert wires_between(Mesh(cp=2, tp=8), h100) == {"tp": (8, h100.within), "cp": (2, h100.between)}
    assert wires_between(Mesh(dp=5, tp=3), h100) == {"tp": (3, h100.between)}  # ranks 6 to 8 stand on two nodes
    shared = Mesh(tp=8, components={"visual": Axes(tp=1)})  # whose ranks share tokens, as those of cp do
    assert wires_between(shared, h100) == {"tp": (8, h100.within), "cp": (8, h100.within)}
    visual = Mesh(
        tp=16, components={"visual": Axes(tp=4), "audio": Axes(tp=8)}
    )  # over two nodes, each with two copies of it
    copies, audio = wires_between(visual, h100, "visual"), wires_between(visual, h100, "audio")
    assert "division" not in wires_between(visual, h100) and audio["division"] == (8, h100.within)
    assert copies["tp"] == (16, h100.between) and within_division(copies)["tp"] == copies["division"] == (
        4,
        h100.within,
    )
    wide = Mesh(tp=2, pp=2, components={"eye": Axes(dp=16, pp=1, tp=1)})
    assert wires_between(wide, h100)["tp"] == (2, h100.within) and wires_between(wide, h100, "eye")["tp"] == (
        16,
        h100.between,
    )
    alone = Mesh(pp=2, components={"eye": Axes(dp=4, pp=1, tp=1)})
    assert wires_between(alone, h100) == {} and wires_between(alone, h100, "eye")["cp"] == (4, h100.within)
    total = Exchange("tp", 100, 0, False, False, True)
    assert wire_seconds(total, within_division(copies)) == pytest.approx(
        h100.within.latency + 300 / h100.within.bandwidth
    )


def program(**mesh: int) -> Program:
    config = LlamaConfig(
        vocab_size=40, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    ids = torch.arange(TOKENS).remainder(40)[None]
    compiled = csc.compile(
        LlamaForCausalLM(config), mesh=mesh, example={"input_ids": ids, "labels": ids}, microbatches=1, check=False
    )
    return compiled.program


def met_in(whole: Program, region: str) -> Counter[Exchange]:
    """What F of a layer gets from others."""
    variant = whole.variants[next(one.variant for one in whole.regions if one.name.endswith(region))]
    assert variant.forward is not None
    return Counter(met for node in g.calls(variant.forward) if (met := exchange(node)) is not None)


def test_a_layer_divided_by_tensor_adds_two_all_reduces() -> None:
    whole, h100 = program(tp=2), hardware("h100")
    assert met_in(whole, "layers.1") == {Exchange("tp", TOKENS * WIDTH * 4, 0, False, False, True): 2}
    place = next(i for i, region in enumerate(whole.regions) if region.name.endswith("layers.1"))
    alone, beside = (region_costs(whole, h100, mesh=mesh)[place] for mesh in (None, Mesh(tp=2)))
    wire = h100.within
    each = wire.latency + TOKENS * WIDTH * 4 / wire.bandwidth
    assert beside.forward - alone.forward == pytest.approx(2 * each)
    assert beside.backward_input - alone.backward_input == pytest.approx(2 * each)  # of what `share` read twice
    assert beside.backward_weight == alone.backward_weight


def test_ranks_that_share_a_key_head_gather_it_and_the_loss_takes_three_numbers_a_label() -> None:
    """Keys and values, a piece of half a head each."""
    whole = program(tp=4)
    summed, gathered = (
        Exchange("tp", TOKENS * WIDTH * 4, 0, False, False, True),
        Exchange("tp", TOKENS * 4 * 4, 2, False, False),
    )
    assert met_in(whole, "layers.1") == {summed: 2, gathered: 2}
    assert met_in(whole, "lm_head") == {Exchange("tp", 3 * TOKENS * 4, 0, False, False): 1}


def test_context_parallel_attention_takes_the_longer_of_work_and_keys() -> None:
    whole, h100 = program(cp=2), hardware("h100")
    assert met_in(whole, "layers.1") == {Exchange("cp", 2 * TOKENS // 2 * KEYS * 4, 2, False, True): 1}
    place = next(i for i, region in enumerate(whole.regions) if region.name.endswith("layers.1"))
    alone, beside = (region_costs(whole, h100, mesh=mesh)[place] for mesh in (None, Mesh(cp=2)))
    assert 0 < beside.forward - alone.forward < h100.within.latency + TOKENS * KEYS * 4 / h100.within.bandwidth


def test_wires_of_collectives_are_their_own_where_the_profile_has_one() -> None:
    own = replace(hardware("h100"), collective=Wire(1e-3, 1e9))
    assert wires_between(Mesh(cp=2, tp=8), own) == {"tp": (8, Wire(1e-3, 1e9)), "cp": (2, own.between)}
