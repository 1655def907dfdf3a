"""Training runs that are saved at one mesh and frozen set, and taken up at another, by one process or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import csc
from csc.checkpoints import files
from tests import launching
from tests.compiler import checkpoint_worker
from tests.compiler.checkpoint_worker import Run
from tests.exactness import FLOAT32
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")

DIVIDED = {"model": "gpt2_dropped", "mesh": "dp=2,tp=2", "samples": 4, "zero": 3}
EIGHT = {"model": "gpt2_dropped", "mesh": "dp=2,pp=2,tp=2", "samples": 4, "zero": 3}
# Masks of dropout are those of a microbatch: as many in the global batch, so as many with fewer replicas.
OTHERS = [
    (DIVIDED, {"mesh": "pp=2", "zero": 0, "microbatches": 2}),
    long(EIGHT, {"mesh": "pp=4", "zero": 0, "microbatches": 2}),
    long({**DIVIDED, "mesh": "dp=2", "zero": 1}, {"mesh": "tp=2", "zero": 0, "microbatches": 2}),
    long({**DIVIDED, "mesh": "pp=2", "zero": 0, "microbatches": 2}, {"mesh": "dp=2", "zero": 2, "microbatches": 1}),
    long({**DIVIDED, "model": "llama", "mesh": "dp=2,cp=2", "zero": 2}, {"mesh": "dp=2,pp=2", "zero": 3}),
]


@pytest.mark.gloo
@pytest.mark.parametrize(("case", "change"), OTHERS)
def test_a_run_goes_on_at_another_mesh(case: dict[str, Any], change: dict[str, Any], tmp_path: Path) -> None:
    """With dropout, fused projections and tied embeddings: saved while training goes on, by ranks that hold shards."""
    launching.ranks(checkpoint_worker.first, csc.Mesh.of(case["mesh"]).size, case, tmp_path)
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("first_*.json"))]
    for result in results:
        assert result["later"] == result["again"] == results[0]["later"], "the same mesh gives the same bits"
    [folder] = files.saved(tmp_path / "run").values()
    found = files.read(folder)
    assert all(not one.missing() for _, one in found.tensors())
    whole = sum(p.numel() * p.element_size() for p in checkpoint_worker.MODELS[case["model"]]().parameters())
    copied = [result["copied"] for result in results]
    of_a_stage = len(copied) / csc.Mesh.of(case["mesh"]).pp  # one stage may have nearly all
    assert sum(copied) == 3 * whole and max(copied) < 2 * sum(copied) / of_a_stage, "each writes its part"
    launching.ranks(checkpoint_worker.again, csc.Mesh.of(change["mesh"]).size, case | change, tmp_path, "moved")
    moved = json.loads((tmp_path / "moved_0.json").read_text())
    assert moved == pytest.approx(results[0]["later"], rel=FLOAT32)
    alone = Run(case | {"mesh": "pp=2", "zero": 0, "microbatches": 2}, tmp_path)
    alone.checkpoints.load()
    tensors: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "weights").glob("*.safetensors"):
        tensors |= load_file(file)
    for name, parameter in alone.compiled.model.named_parameters():
        assert torch.equal(parameter, tensors[name]), name
    assert alone.steps(3) == pytest.approx(results[0]["later"], rel=FLOAT32)


@pytest.mark.gloo
def test_a_rank_that_cannot_write(tmp_path: Path) -> None:
    """All ranks are told, also where one is killed in the middle of it, and the checkpoint before is taken up."""
    with pytest.raises(AssertionError, match="rank 1 ended with -9"):
        launching.ranks(checkpoint_worker.failing, 2, tmp_path)
    assert "rank 1 failed" in (tmp_path / "said_0.txt").read_text()
    assert "no space left" in (tmp_path / "said_0.txt").read_text()
    assert "no space left" in (tmp_path / "said_1.txt").read_text()
    assert sorted(files.saved(tmp_path / "run")) == [1, 3]
    assert [folder.name for folder in files.cut_off(tmp_path / "run")] == ["step-00000002", "step-00000004"]
    alone = Run({"model": "small", "mesh": "pp=2", "samples": 4}, tmp_path)
    assert alone.checkpoints.load(1).step == 1  # type: ignore[union-attr]
    assert alone.steps(1) == json.loads((tmp_path / "later_0.json").read_text())
