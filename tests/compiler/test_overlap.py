"""BW in which sums between ranks run beside W: the bits of B and W apart, and what stands between a sum's two ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from csc.kernels.collectives import APART
from torch import fx

import csc
from csc.ir import graph as g
from csc.ir.program import Variant
from tests.compiler.tensor_models import BATCHES, MODELS
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")

ORDERS = (
    "rank 0: F 0 0 | BW 0 0 | F 0 1 | BW 0 1 | REDUCE",
    "rank 0: F 0 0 | B 0 0 | W 0 0 | F 0 1 | B 0 1 | W 0 1 | REDUCE",
)
STARTS = dict(APART.values())


def compiled_of(name: str, **options: Any) -> csc.CompiledModel:
    return csc.compile(MODELS[name](), example=BATCHES[name](8), microbatches=2, **options)


def ordered(name: str, file: Path, order: str, options: dict[str, Any]) -> csc.CompiledModel:
    """With this schedule."""
    file.write_text(f"# by hand, 1 ranks, 2 microbatches\n{order}\n")
    return compiled_of(name, schedule=str(file), **options)


def gradients(compiled: csc.CompiledModel, name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)  # of dropout
    compiled.train_step(BATCHES[name](8))
    return {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}


def both(compiled: csc.CompiledModel) -> list[Variant]:
    """The variants whose BW is one function."""
    return [one for one in compiled.history()[-1].variants.values() if one.backward is not None]


def beside(graph: fx.Graph) -> list[set[str]]:
    """For each exchange in two calls, the operators of the calls between them."""
    calls = g.calls(graph)
    found = []
    for i, node in enumerate(calls):
        if node.target in STARTS:
            (end,) = (user for user in node.users if user.target is STARTS[node.target])
            found.append({g.op_name(one) for one in calls[i + 1 : calls.index(end)]})
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"mesh": "tp=2", "sequence_parallel": True}), ("few", {"mesh": "tp=4"}),
        long("llama", {"mesh": "tp=2"}), long("gpt2", {"mesh": "tp=2"}), long("lora", {"mesh": "tp=2"}),
        long("llama", {"mesh": "tp=2", "recompute": "full"}),
        long("llama", {"mesh": "tp=2,cp=2"}), long("dropped", {"mesh": "tp=2"}),
        long("llama", {"mesh": "tp=2", "precision": "bf16"}),
        long("llama", {"mesh": "tp=2", "freeze": ["*embed*", "model.layers.0.*"]}),
    ],
)  # fmt: skip
@pytest.mark.long_cases("few-options1")
def test_bits_are_those_of_b_and_w_apart(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Only the order differs: the same calls of the same operands."""
    together, apart = (ordered(name, tmp_path / f"{len(text)}.txt", text, options) for text in ORDERS)
    assert both(together)
    one, other = gradients(together, name), gradients(apart, name)
    assert one.keys() == other.keys() and one
    for parameter, gradient in one.items():
        assert torch.equal(gradient, other[parameter]), parameter


def test_each_sum_of_a_layer_runs_beside_products_of_w() -> None:
    """Beside that in front of the MLP its three, beside that in front of attention its four."""
    compiled = compiled_of("llama", mesh="tp=2")
    layer = next(one for one in both(compiled) if "layer" in one.name)
    assert layer.backward is not None and layer.backward_input is not None
    products = [ops for ops in beside(layer.backward) if "aten::mm" in ops]
    assert len(products) == sum(node.target in APART for node in g.calls(layer.backward_input)) == 2
    apart = [node.name for part in (layer.backward_input, layer.backward_weight) for node in g.calls(part)]  # type: ignore[arg-type]
    joined = [node.name for node in g.calls(layer.backward) if node.target not in STARTS]
    assert sorted(joined) == sorted(set(apart))  # each call once, under its name


def test_a_layer_that_hands_no_gradient_on_sums_in_w_beside_other_products() -> None:
    """Nothing is trained below: all of its chain is W, and its ranks run it at one place of their schedule."""
    compiled = compiled_of("llama", mesh="tp=2,pp=2", freeze=["*embed*"])
    variants = compiled.history()[-1].variants.values()
    (first,) = (one for one in variants if "layer" in one.name and one.backward_weight and not any(one.dx))
    assert sum(node.target in APART for node in g.calls(first.backward_weight)) == 2  # type: ignore[arg-type]
    assert first.backward is not None and any("aten::mm" in ops for ops in beside(first.backward))
    program = compiled.trainer().program
    for rank in range(4):
        group = program.manifest.mesh.group(csc.ir.groups.Group.TENSOR, rank)
        positions = {program.manifest.mesh.coordinates(one).pp for one in group}
        assert len(group) == 2 and len(positions) == 1  # one list of actions for both
