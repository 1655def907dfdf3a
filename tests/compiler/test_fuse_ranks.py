"""Functions that one rank cannot have compiled: all ranks run the same ones. Real processes over gloo."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import csc
from csc.runtime import compile_pool, compiled_function, fusing
from csc.runtime.compiled_function import CompiledFunction, FunctionOrder
from csc.runtime.fusing import AS_IT_IS, Fused
from tests.compiler import test_fuse
from tests.launching import ranks

pytestmark = pytest.mark.gloo
ALIKE = ("norm.weight", "down.bias")  # gradients that tensor-parallel ranks compute alike, by the ends of their names


def _of_rank() -> int:
    return int(os.environ["RANK"])


def _fails(name: str) -> bool:
    """Rank 1 has no room for what is compiled of this function."""
    return _of_rank() == 1 and name == "forward"


def _bits(compiled: csc.CompiledModel) -> str:
    """Of what both ranks compute alike, in the last step."""
    digest = hashlib.sha256()
    for name, one in sorted(compiled.named_parameters()):
        if name.endswith(ALIKE):
            assert one.grad is not None
            digest.update(one.grad.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _told(compiled: csc.CompiledModel) -> dict[str, Any]:
    """Those, and which functions run as they are."""
    rows = [row for trainer in compiled._programs.trainers for row in trainer.fused.rows()]
    own = sorted([row.name, row.how == AS_IT_IS, row.why] for row in rows)
    return {"bits": _bits(compiled), "rows": own}


def _imitated() -> None:
    """What stands for a function is itself with a little more in all that it gives. Nothing is compiled."""

    def make(self: Fused, order: FunctionOrder, wait: bool) -> None:
        if _fails(self.plain.__name__):
            raise OSError(28, "No space left on device")

    def take(self: Fused, order: FunctionOrder, how: str) -> str:
        def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
            results = self.plain(*compiled_function.nesting(order.structure)(tensors))
            structures.append(compiled_function.structure_of(results))
            return [one * (1 + 2**-20) if one.is_floating_point() else one for one in fusing.tensors_of(results)]

        structures: list[Any] = []

        class Imitation(CompiledFunction):
            def run(self, tensors: list[torch.Tensor]) -> Any:
                found = flat(*tensors)
                return compiled_function.nesting(structures[-1])(found)

        self._taken[order.form] = Imitation(flat, None)
        self._rows[order.form] = fusing.FusedRow(self.name, how, 0.0)
        return ""

    Fused.make, Fused.take = make, take  # type: ignore[method-assign]
    compiled_function.FunctionOrder.is_kept = property(lambda self: False)  # type: ignore[method-assign, assignment]


def _first_step() -> None:
    torch.set_num_threads(1)
    _imitated()
    test_fuse.Layer.RATE = 0.0
    fused = test_fuse.made(fuse=True, mesh="tp=2", microbatches=1, check=False)
    test_fuse.step(fused)
    told = _told(fused)
    plain = fused.with_options(fuse=False, check=False)
    test_fuse.step(plain)
    print(json.dumps([told, _bits(plain) != told["bits"]]))
    torch.distributed.destroy_process_group()


def test_a_function_that_one_rank_cannot_have_runs_as_it_is_on_all() -> None:
    (one, other), (again, _) = [json.loads(text.splitlines()[-1]) for text in ranks(_first_step, 2)]
    assert one == again and other, "the others run compiled"
    assert {name.partition(".")[2] for name, as_it_is, _ in one["rows"] if as_it_is} == {"forward"}
    assert all("No space left on device" in why for _, as_it_is, why in one["rows"] if as_it_is)
    assert any(not as_it_is for _, as_it_is, _ in one["rows"])


def _real(cache: str) -> None:
    """Rank 1 has its own cache, as on another machine, and no room in it; its process in the background dies."""
    os.environ |= {"CSC_CACHE_DIR": f"{cache}/{_of_rank()}", "CSC_CACHE": "1"}
    artifact, make = compiled_function.artifact, compile_pool.CompileWorker.make

    def full(function: Any, given: Any, settings: Any, file: Path, *rest: Any) -> Any:
        if any("layer__1" in str(getattr(cell.cell_contents, "__code__", "")) for cell in function.__closure__):
            raise OSError(28, "No space left on device")
        return artifact(function, given, settings, file, *rest)

    def dies(self: Any, order: FunctionOrder) -> str:
        if _fails(order.name):
            os.kill(self._process.pid, 9)
        return make(self, order)

    if _of_rank() == 1:
        compiled_function.artifact = full
        compile_pool.CompileWorker.make = dies  # type: ignore[method-assign]
    told: list[str] = []
    log, handler = logging.getLogger("csc"), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    test_fuse.Layer.RATE = 0.0
    fused = test_fuse.made(fuse=True, cache=True, mesh="tp=2", microbatches=1)
    found = []
    for number in range(20_000):
        torch.manual_seed(number)
        fused.zero_grad()
        fused.train_step({"x": torch.randn(4, 5 if number < 2 else 6, test_fuse.WIDTH)})
        found.append(_bits(fused))
        if any("that came later are compiled" in one for one in told):
            break
        time.sleep(0.02)
    print(json.dumps([found, _told(fused)["rows"]]))
    torch.distributed.destroy_process_group()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_rank_whose_compilations_fail_computes_what_the_others_compute(tmp_path: Path) -> None:
    (bits, rows), (other_bits, other_rows) = [
        json.loads(text.splitlines()[-1]) for text in ranks(_real, 2, str(tmp_path))
    ]
    assert rows == other_rows
    assert bits == other_bits and len(bits) > 4
    assert {as_it_is for _, as_it_is, _ in rows} == {True, False}
