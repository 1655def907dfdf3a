"""Functions that one rank cannot have compiled: all ranks run the same ones. Real processes over gloo."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import csc
from csc.runtime import compiled_function, fusing
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


def _imitated(wrong: int = 0) -> None:
    """What stands for a function is itself with a little more in all that it gives. Nothing is compiled. wrong: on rank
    1 it gives far too much for samples of so many tokens.
    """

    def make(self: Fused, order: FunctionOrder, wait: bool) -> None:
        if not wrong and _fails(self.plain.__name__):
            raise OSError(28, "No space left on device")

    def take(self: Fused, order: FunctionOrder, how: str) -> str:
        far = wrong and _of_rank() == 1 and any(wrong in sizes for _, _, sizes, _ in order.layouts)
        more = 1 + (2**-8 if far else 2**-20)

        def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
            results = self.plain(*compiled_function.nesting(order.structure)(tensors))
            structures.append(compiled_function.structure_of(results))
            return [one * more if one.is_floating_point() else one for one in fusing.tensors_of(results)]

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


def _differing(mesh: str, wrong: int) -> None:
    """Prints how many steps were right, what the next three raised, and whether anything is left of these."""
    torch.set_num_threads(1)
    _imitated(wrong)
    test_fuse.Layer.RATE = 0.0
    fused = test_fuse.made(fuse=True, mesh=mesh, microbatches=2, check=False)
    raised: list[str] = []
    steps, left = 0, False
    while len(raised) < 3 and steps < 20:
        torch.manual_seed(steps)
        fused.zero_grad()
        try:
            fused.train_step({"x": torch.randn(4, 5 if steps < 2 else 6, test_fuse.WIDTH)})
            steps += not raised
        except csc.DifferenceError as error:
            raised.append(str(error))
            left = left or any(parameter.grad is not None for parameter in fused.parameters())
    print(json.dumps([steps, raised, left]))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("mesh", "wrong"), [("tp=2", 5), ("pp=2", 6), ("dp=2", 6)])
def test_what_one_rank_finds_wrong_is_an_error_on_all(mesh: str, wrong: int) -> None:
    """At the first call of a function, for the sizes that a run begins with and for later ones; then and from then on.
    No gradient is touched.
    """
    one, other = [json.loads(text.splitlines()[-1]) for text in ranks(_differing, 2, mesh, wrong)]
    assert one == other
    steps, raised, left = one
    assert steps == (0 if wrong == 5 else 2 + fusing.MET) and not left and len(raised) == 3
    for text in raised:
        assert "compiled by Inductor, does not compute what the layer file says for microbatches of x [" in text
        assert f", {wrong}, {test_fuse.WIDTH}]: " in text and "Train with fuse=False" in text


def _real(cache: str) -> None:
    """Rank 1 has its own cache, as on another machine, and no room in it. Prints bits, of five tokens and of six."""
    os.environ |= {"CSC_CACHE_DIR": f"{cache}/{_of_rank()}", "CSC_CACHE": "1"}
    artifact = compiled_function.artifact

    def full(function: Any, given: Any, settings: Any, file: Path, *rest: Any) -> Any:
        if any("layer__1" in str(getattr(cell.cell_contents, "__code__", "")) for cell in function.__closure__):
            raise OSError(28, "No space left on device")
        return artifact(function, given, settings, file, *rest)

    if _of_rank() == 1:
        compiled_function.artifact = full
    test_fuse.Layer.RATE = 0.0
    fused = test_fuse.made(fuse=True, cache=True, mesh="tp=2", microbatches=1)
    found = []
    for number in range(2 + fusing.MET + 2):
        torch.manual_seed(number)
        fused.zero_grad()
        fused.train_step({"x": torch.randn(4, 5 if number < 2 else 6, test_fuse.WIDTH)})
        found.append(_bits(fused))
    assert test_fuse.settled(fused) == [True, True]
    print(json.dumps([found, _told(fused)["rows"]]))
    torch.distributed.destroy_process_group()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_rank_whose_compilations_fail_computes_what_the_others_compute(tmp_path: Path) -> None:
    (bits, rows), (other_bits, other_rows) = [
        json.loads(text.splitlines()[-1]) for text in ranks(_real, 2, str(tmp_path))
    ]
    assert rows == other_rows
    assert bits == other_bits
    assert {as_it_is for _, as_it_is, _ in rows} == {True, False}
