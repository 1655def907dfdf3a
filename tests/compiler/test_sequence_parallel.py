"""Tokens shared out among tensor-parallel ranks between their products: eager PyTorch's loss and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import csc
from csc.errors import InputError
from csc.ir import graph as g
from csc.reports.forecast import memory_forecast
from csc.reports.verification import verify
from tests import launching
from tests.compiler import tensor_worker
from tests.compiler.tensor_models import BATCHES, MODELS, text
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")

FLOAT32 = 1e-5  # what is promised; 8.6e-7 is the most that was seen
MET = ("all_reduce", "reduce_scatter", "gather_shared", "all_gather", "own_part")


BETWEEN_PRODUCTS = [{"reduce_scatter": 2, "gather_shared": 2}, {"reduce_scatter": 2, "all_gather": 2}, {}]


def compiled_of(name: str, length: int = 12, **options: Any) -> csc.CompiledModel:
    batch = text(8, length) if BATCHES[name] is text else BATCHES[name](8)
    return csc.compile(MODELS[name](), example=batch, sequence_parallel=True, **options)


def parity(compiled: csc.CompiledModel, gradients: int) -> csc.CompiledModel:
    result = verify(compiled)
    assert (result.params_missing, result.params_unexpected) == ((), ())
    assert len(result.grad_rel) == gradients
    assert max(result.loss_rel, result.grad_rel_max) <= FLOAT32
    return compiled


def met(compiled: csc.CompiledModel, layer: str) -> list[dict[str, int]]:
    """How often F, B and W of a layer meet other ranks, by collective."""
    variant = next(one for name, one in compiled.history()[-1].variants.items() if layer in name)
    parts = (variant.forward, variant.backward_input, variant.backward_weight)
    called = [[g.short_op(node) for node in g.calls(part)] if part is not None else [] for part in parts]
    return [{name: ops.count(name) for name in MET if name in ops} for ops in called]


CASES = [
    ("llama", 13, 21, {"mesh": "tp=2,pp=2", "microbatches": 2}),  # 13 tokens: the last slot repeats the last token
    ("dropped", 12, 28, {"mesh": "tp=2,cp=2"}),
    long("llama", 12, 21, {"mesh": "tp=2,dp=2", "zero": 3}), long("llama", 12, 21, {"mesh": "tp=4,cp=2"}),
    long("llama", 12, 21, {"mesh": "tp=2", "recompute": "full"}),
    long("llama", 12, 21, {"mesh": "tp=2", "recompute": "selective"}),
    long("llama", 12, 21, {"mesh": "tp=2", "fuse": True}),
    long("llama", 12, 2, {"mesh": "tp=2", "freeze": ["model.embed_tokens", "model.layers.*"]}),
    long("tied", 12, 20, {"mesh": "tp=2"}), long("biases", 12, 35, {"mesh": "tp=2"}),
    long("qwen3", 12, 25, {"mesh": "tp=2"}), long("olmo2", 12, 25, {"mesh": "tp=2,pp=2"}),
    long("phi3", 12, 15, {"mesh": "tp=2"}), long("gpt2", 12, 28, {"mesh": "tp=2"}),
    long("dropped", 13, 28, {"mesh": "tp=4"}), long("mixtral", 12, 21, {"mesh": "tp=2"}),
    long("lora", 12, 20, {"mesh": "tp=2,pp=2", "microbatches": 2}), long("llava", 12, 80, {"mesh": "tp=2"}),
    long("few", 13, 21, {"mesh": "tp=4"}), long("qwen3few", 12, 25, {"mesh": "tp=4"}),
    long("gemma2few", 12, 24, {"mesh": "tp=4"}),
    # Whose projector meets the ranks of tp and those of cp: its sums are of the former.
    ("llava", 12, 80, {"mesh": "tp=2,cp=2,vision_tower.tp=1,vision_tower.cp=1"}),
    long("llava", 12, 80, {"mesh": "tp=4,cp=2,vision_tower.tp=2,vision_tower.cp=1"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "length", "gradients", "options"), CASES)
@pytest.mark.long_cases("llava-12-80-options21", "llama-13-21-options0")
def test_models(name: str, length: int, gradients: int, options: dict[str, Any]) -> None:
    parity(compiled_of(name, length, **options), gradients)


def test_what_a_layer_exchanges_and_keeps() -> None:
    """No whole sum is left; what regions hand on, and what norms keep for B, is a rank's share of it."""
    compiled = compiled_of("llama", mesh="tp=2,pp=2", microbatches=2)
    assert met(compiled, "decoder_layer") == BETWEEN_PRODUCTS
    assert met(compiled, "rms_norm") == [{}, {}, {}]
    program = compiled.history()[-1]
    layer = next(one for name, one in program.templates.items() if "decoder_layer" in name)
    assert [list(node.meta["val"].shape) for node in g.outputs(layer.graph)] == [[4, 6, 48]]
    assert {p.name for p in program.parameters if p.parts} == {p.name for p in program.parameters if "norm" in p.name}
    plain = csc.compile(MODELS["llama"](), example=text(8), mesh="tp=2,pp=2", microbatches=2)
    with_shards, without = (memory_forecast(one.program, one.options) for one in (compiled, plain))
    assert max(row.activations for row in with_shards) < 0.85 * max(row.activations for row in without)


def test_what_is_looked_at_for_its_type_alone_keeps_nothing_whole() -> None:
    """Gemma's norms end in type_as, of shards too."""
    assert met(compiled_of("gemma2few", mesh="tp=2"), "decoder_layer") == BETWEEN_PRODUCTS


def test_one_rank_has_nobody_to_share_with() -> None:
    with pytest.raises(InputError, match="shares tokens out among tensor-parallel ranks, and the mesh has tp=1"):
        compiled_of("llama", mesh="pp=2").trainer()


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize("mesh", ["tp=2,pp=2", "tp=2,cp=2"])
def test_in_processes(mesh: str, tmp_path: Path) -> None:
    """Losses and norms of three steps are those of one process, to the bit those of ranks within one."""
    case = {"model": "qwen3", "mesh": mesh, "samples": 4, "microbatches": 2, "sequence_parallel": True}
    launching.ranks(tensor_worker.main, 4, case, tmp_path)
    batch = text(4)
    alone = csc.compile(MODELS["qwen3"](), example=batch, microbatches=2)
    together = csc.compile(MODELS["qwen3"](), example=batch, microbatches=2, mesh=mesh, sequence_parallel=True)
    expected, same = (tensor_worker.steps(one, batch) for one in (alone, together))
    for rank in range(4):
        result = json.loads((tmp_path / f"result_{rank}.json").read_text())
        assert result["losses"] == same["losses"] == pytest.approx(expected["losses"], rel=FLOAT32)
        assert result["norms"] == pytest.approx(expected["norms"], rel=FLOAT32)
        assert result["later"] == result["again"], "what was loaded is what was saved"
