"""One compiler for many divisions of a model: what it takes up from another is what it would make by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import csc
from csc.driver.compiler import Compiler
from csc.ir.mesh import Mesh
from csc.ir.printer import program_text
from csc.ir.program import Options
from tests.compiler.tensor_models import BATCHES, MODELS
from tests.tiers import long

OWN = "vision_tower"
DIVISIONS = {
    "llama": ["tp=2", "pp=1"],
    "qwen3": ["pp=1", "tp=2", "tp=4", "cp=2", "cp=2,tp=2"],
    "llava": [
        "tp=2", "pp=1", f"tp=2,{OWN}.tp=1", f"cp=2,{OWN}.cp=1", f"cp=2,tp=2,{OWN}.cp=1", "cp=2,tp=2", "tp=4",
        f"cp=2,tp=2,{OWN}.tp=1,{OWN}.cp=1", f"tp=4,{OWN}.tp=2",
        f"pp=2,{OWN}.pp=1,{OWN}.dp=4", f"tp=2,pp=2,{OWN}.pp=1,{OWN}.dp=2",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", long("qwen3"), long("llava")])
def test_every_graph_is_that_of_a_compiler_that_has_made_nothing_else(name: str) -> None:
    """With tokens between products shared out and not."""
    model, batch = MODELS[name](), BATCHES[name](4)
    options = csc.compile(model, example=batch, check=False).options
    meshes = [(Mesh.parse(text), sequence) for text in DIVISIONS[name] for sequence in {False, Mesh.parse(text).tp > 1}]
    listed = [replace(options, mesh=mesh, sequence_parallel=sequence) for mesh, sequence in meshes]
    alone = [texts(Compiler(model), batch, each) for each in listed]
    one = Compiler(model)
    assert [texts(one, batch, each) for each in listed] == alone
    assert len(one.shared.cut) < len({options.mesh for options in listed})


def texts(compiler: Compiler, batch: Mapping[str, Any], options: Options) -> list[str]:
    _, traced = compiler.trace(batch, options, whole=True)
    return [program_text(program) for program in traced.history]
