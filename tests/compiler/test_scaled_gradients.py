"""torch's own clipping over a part of the model: said once, and nothing of csc's, or where a process has all."""

from __future__ import annotations

import pytest
import torch

import csc
from tests import launching
from tests.compiler.tensor_models import BATCHES, MODELS

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("traces")]
SAID = "changed in place"


def rank(mesh: str, clip: str) -> None:
    compiled = csc.compile(MODELS["llama"](), mesh=mesh, example=BATCHES["llama"](2), check=False)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(3):
        compiled.train_step(BATCHES["llama"](2))
        if clip == "torch":
            matrices = [one for one in compiled.parameters() if one.ndim == 2]  # without the smallest, those of norms
            torch.nn.utils.clip_grad_norm_(matrices, 1e-3)
        elif clip == "csc":
            compiled.clip_grad_norm_(1e-3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=clip == "torch")


@pytest.mark.parametrize(
    ("mesh", "clip", "times"),
    [("pp=2", "torch", 1), pytest.param("pp=2", "csc", 0, marks=pytest.mark.long),
     pytest.param("tp=2", "torch", 1, marks=pytest.mark.long), pytest.param("dp=2", "torch", 0, marks=pytest.mark.long),
     pytest.param("pp=2", "not at all", 0, marks=pytest.mark.long)],
)  # fmt: skip
def test_clipping(mesh: str, clip: str, times: int) -> None:
    assert [said.count(SAID) for said in launching.ranks(rank, 2, mesh, clip)] == [times, times]
