"""Dropout of what tensor-parallel ranks divide: hidden features, weights of heads. The masks are the whole's, whatever
divides the work: a step is that of one rank with the same seed, and eager PyTorch's with these masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

import csc
from csc.analysis.placements import CheckedGraphs, verify_placements
from csc.ir import graph as g
from csc.ir.program import Program
from csc.ir.verifier import VerificationError
from csc.reports.verification import verify
from tests.compiler.tensor_models import FEW, MODELS, SMALL, text
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")
FLOAT32, WIDTH = 2e-6, 48


class Dropped(nn.Module):
    """Dropout within the MLP and of what leaves it; attention without, so that its tokens can be spread."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100)
        self.layers = nn.ModuleList(DroppedLayer() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class DroppedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.inner, self.outer = nn.Dropout(0.3), nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(hidden).unflatten(-1, (4, 12)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.outer(self.down(self.inner(F.gelu(self.up(hidden)))))


def gpt2() -> nn.Module:
    """Dropout of attention weights, which is written out, and of all that layers hand on; a product for all heads."""
    torch.manual_seed(0)
    sizes = {"n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 16}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, attn_pdrop=0.2, bos_token_id=1, eos_token_id=2))


def qwen3() -> nn.Module:
    torch.manual_seed(0)
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL | FEW, head_dim=8, attention_dropout=0.2))


NAMES: dict[str, Callable[[], nn.Module]] = {
    "mlp": Dropped, "gpt2": gpt2, "few": MODELS["fewdropped"], "qwen3": qwen3,
}  # fmt: skip


def step(model: nn.Module, **options: Any) -> tuple[float, dict[str, torch.Tensor], csc.CompiledModel]:
    compiled = csc.compile(model, example=text(4), check=False, **options)
    torch.manual_seed(5)
    loss = float(compiled.train_step(text(4)))
    return loss, {n: p.grad for n, p in compiled.named_parameters() if p.grad is not None}, compiled


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("mlp", "tp=4,cp=2", {}),  # of both a rank has some of the tokens, and of the features
        ("few", "tp=4", {}),  # ranks that have a key head together
        long("mlp", "tp=2", {}), long("mlp", "tp=2,pp=2", {"microbatches": 2}),
        long("mlp", "tp=2", {"sequence_parallel": True}), long("mlp", "tp=2,cp=2", {"sequence_parallel": True}),
        long("mlp", "tp=2", {"fuse": True}), long("mlp", "tp=2,cp=2", {"recompute": "full"}),
        long("gpt2", "tp=2", {}), long("gpt2", "tp=4,pp=2", {"microbatches": 2, "recompute": "full"}),
        long("gpt2", "tp=2,dp=2", {"zero": 3}), long("few", "tp=2", {}), long("qwen3", "tp=4", {}),
        long("qwen3", "tp=2", {"sequence_parallel": True}),
    ],
)  # fmt: skip
@pytest.mark.long_cases("few-tp=4-options1")
def test_masks_are_those_of_the_whole(name: str, mesh: str, options: dict[str, Any]) -> None:
    parts = options.get("microbatches", 1) * csc.Mesh.of(mesh).dp
    expected, right, _ = step(NAMES[name](), microbatches=parts)
    loss, found, compiled = step(NAMES[name](), mesh=mesh, **options)
    assert loss == pytest.approx(expected, rel=FLOAT32) and found.keys() == right.keys()
    for key, gradient in found.items():
        assert (gradient - right[key]).abs().max() <= FLOAT32 * right[key].abs().max(), key
    divided = {one.name for one in compiled.program.parameters if one.boxes}
    wanted = ("up.weight", "down.weight") if name == "mlp" else ("attn.c_attn.weight", "self_attn.q_proj.weight")
    assert any(key.endswith(wanted) for key in divided), "kept whole"
    result = verify(compiled)
    assert (result.params_missing, result.params_unexpected) == ((), ())
    assert result.grad_rel_max <= 1e-5


def changed(program: Program) -> Iterator[Program]:
    """With one dropout that takes other entries than a rank has, or those of another dimension."""
    for name, template in program.templates.items():
        for place, node in enumerate(g.calls(template.graph)):
            if g.op_name(node) != "csc::dropout" or g.bind(node)["tokens"] is None:
                continue
            for how in ("everything", "another dimension"):
                graph, _ = g.copy_graph(template.graph)
                dropped = g.calls(graph)[place]
                x, p, seed, index, *own = dropped.args
                own[1] = 1 if how == "another dimension" else own[1]
                dropped.args = (x, p, seed, index, *(own if how == "another dimension" else []))
                yield replace(program, templates={**program.templates, name: replace(template, graph=graph)})


def test_another_part_of_the_mask_is_found() -> None:
    compiled = csc.compile(Dropped(), example=text(4), mesh="tp=2")
    program = next(one for one in compiled.history() if one.history and one.history[-1].name == "differentiate")
    verify_placements(program, "differentiate", CheckedGraphs())
    wrong = list(changed(program))
    assert len(wrong) >= 2
    for one in wrong:
        with pytest.raises(VerificationError, match=r"takes entries of a mask along dimensions \[.*which is"):
            verify_placements(one, "here", CheckedGraphs())
