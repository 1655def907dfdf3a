"""Costs of work as it runs: tiles that a mask shows, kernels of fused calls, bytes that are alive at once; by hand."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from csc.analysis.costs import TILE, _share, call_of, fused, peak, within_kernels, working
from csc.analysis.hardware import hardware, toml_text
from csc.ir import graph as g
from csc.ir.program import Variant
from csc.torch_private.traces import make_fx


def graph_of(function: object, *inputs: torch.Tensor, role: str = "activation") -> fx.Graph:
    traced = make_fx(function, tracing_mode="fake")(*inputs)  # type: ignore[operator]
    for number, node in enumerate(g.placeholders(traced.graph)):
        node.meta["role"] = (role, str(number))
    return traced.graph


@pytest.mark.parametrize(
    ("window", "share"),
    [(10**9, (1 + 2 + 3 + 4) / 16), (TILE, (1 + 2 + 2 + 2) / 16), (1, 4 / 16)],
)
def test_a_mask_shows_some_tiles(window: int, share: float) -> None:
    """Causal with a window: four tiles of queries, each over the keys up to its own and back by the window."""
    place = torch.arange(4 * TILE)
    ranges = torch.stack([(place - window + 1).clamp(min=0), place + 1], -1)[None, None]
    assert _share(ranges, 4 * TILE) == pytest.approx(share)


def test_a_query_that_sees_nothing_costs_no_tile() -> None:
    assert _share(torch.zeros(2, 1, 100, 2, dtype=torch.int64), 300) == 0


def test_fused_calls_read_once_what_comes_from_outside() -> None:
    """(a * b + a).relu() is one kernel: reads a and b, writes the sum of it all; the product of matrices stays."""
    a, b = torch.zeros(8, 8), torch.zeros(8, 8)
    graph = graph_of(lambda a, b: torch.relu(a * b + a) @ b, a, b)
    calls = [(node, call) for node in g.calls(graph) if (call := call_of(node)) is not None]
    kernels = fused(graph, calls)
    assert [call.op for call in kernels.calls] == ["fused", "aten::mm"]
    assert kernels.calls[0].bytes == 3 * 8 * 8 * 4
    assert kernels.flops == 2 * 8**3


def test_what_is_alive_at_once() -> None:
    """An input that stays, a product that dies after its use, and a result: three blocks, a view none."""
    graph = graph_of(lambda a: (a * 2).t().contiguous() + 1, torch.zeros(16, 16))
    block = 16 * 16 * 4
    assert peak(graph) == 3 * block  # the input, what a call reads, what it writes
    saved = graph_of(lambda a: (a * 2) + 1, torch.zeros(16, 16), role="saved")
    assert peak(saved) == 2 * block  # what was saved is gone after its last use


def test_what_w_works_with_is_its_gradients_and_a_sum() -> None:
    """Two products of what was stashed; when they are added to those of the microbatch before, a third one is there."""
    grid = torch.zeros(4, 4)
    forward = graph_of(lambda x: ((x + 1,), (x * 2,)), grid)
    backward = graph_of(lambda d: ((d * 2,), (d + 1,)), grid, role="tangent")
    weight = graph_of(lambda kept: (kept.t() @ kept, kept @ kept), grid, role="saved")
    variant = Variant("a", "a", (True,), (True, True), (True,), forward, None, forward, backward, weight)
    assert working(variant) == (2 + 1 - 1) * 4 * 4 * 4  # of which one was counted as stashed


def test_profiles_say_what_attention_reaches() -> None:
    h100, cpu = hardware("h100"), hardware("cpu")
    assert h100.rate("bfloat16", "csc::attention") == pytest.approx(0.35 * 989.4e12)
    assert h100.rate("bfloat16", "aten::mm") == pytest.approx(0.65 * 989.4e12)
    assert cpu.rate("float32", "csc::attention") == cpu.rate("float32") and cpu.answered
    assert "[attention]" in toml_text(h100) and "reserved" in toml_text(h100)


def test_what_another_kernel_reads_is_in_memory() -> None:
    """A residual: (a + b) goes into the product and is added to what comes of it. It is written, and read again."""
    a, b = torch.zeros(8, 8), torch.zeros(8, 8)

    def residual(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        hidden = a + b
        return torch.relu(hidden * 2) @ b + hidden

    graph = graph_of(residual, a, b)
    calls = [(node, call) for node in g.calls(graph) if (call := call_of(node)) is not None]
    assert [call.op for call in fused(graph, calls).calls] == ["fused", "aten::mm", "fused"]
    assert [call.bytes // (8 * 8 * 4) for call in fused(graph, calls).calls] == [2 + 2, 3, 2 + 1]
    assert {node.name for node in within_kernels(graph)} == {"mul"}


def test_what_is_made_again_runs_with_its_reader() -> None:
    """As in a B that repeats an activation: its only reader stands behind a product, and so does it."""
    a, b = torch.zeros(8, 8), torch.zeros(8, 8)
    graph = graph_of(lambda a, b: torch.sigmoid(a) * (a @ b), a, b)
    calls = [(node, call) for node in g.calls(graph) if (call := call_of(node)) is not None]
    assert [call.bytes // (8 * 8 * 4) for call in fused(graph, calls).calls] == [3, 3]
    assert (peak(graph), peak(graph, fuse=True)) == (5 * 8 * 8 * 4, 4 * 8 * 8 * 4)
