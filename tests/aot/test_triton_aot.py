"""The default configurations, compiled ahead of time: no spills but where an H100 showed that they do not matter,
shared memory within the limit, tensor cores at work.

A few of each architecture are compiled always. For all head dims, rules and soft caps what was recorded counts as long
as kernels, configurations and Triton are those of the record; else they are compiled, a second or two each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

import triton
from csc.kernels import triton_kernels
from csc.kernels.triton_launch import choose

from tests.aot import building
from tests.aot.building import SHARED_BYTES, Case, Resources, build, kernels, key
from tests.aot.recorded import recorded, resources
from tests.tiers import long

MASKS = {"no mask": (0, False), "one rule": (1, False), "kinds": (1, True), "two rules": (2, True)}


def cases(architecture: str, head_dim: int, rules: int, kinds: bool, softcap: bool = False) -> list[Case]:
    names = kernels(choose(architecture, head_dim, torch.bfloat16), softcap)
    return [Case(name, architecture, head_dim, rules, kinds, softcap) for name in names]


COMPILED = [
    *(case for head_dim in (64, 128, 256) for case in cases("sm_90", head_dim, 1, True)),
    *(case for name in ("sm_80", "sm_100", "gfx942") for case in cases(name, 128, 1, True)),
]
FAST = [
    *cases("sm_90", 128, 1, True),
    *(cases(name, 128, 1, True)[which] for which, name in enumerate(("sm_80", "sm_100", "gfx942"))),
]
ALL = [
    case
    for architecture in SHARED_BYTES
    for head_dim in (64, 128, 256)
    for rules, kinds in MASKS.values()
    for softcap in (False, True)
    if not softcap or (rules, kinds) == (1, False)
    for case in cases(architecture, head_dim, rules, kinds, softcap)
]


CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"

# Bytes that may be spilled where what is faster was measured, on an H100 with Triton 3.6: docs/attention-kernels.md
OLDER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
SPILLED = {("forward", "sm_90", 128): 200 if OLDER else 64, ("dkv", "sm_90", 128): 56 if OLDER else 8}


def check(case: Case, found: Resources) -> None:
    assert found.spilled <= SPILLED.get((case.kernel, case.architecture, case.head_dim), 0), found
    assert found.shared <= SHARED_BYTES[case.architecture], found
    assert found.tensor_cores > 0, found
    assert (found.tma > 0) == case.config.descriptors, found


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.mark.parametrize("case", [case if case in FAST else long(case) for case in COMPILED], ids=str)
def test_resources(case: Case, update: bool) -> None:
    """Compiled always, and what is recorded is what the compiler gives."""
    found = resources(case, True) if update else build(case)
    check(case, found)
    assert recorded(case) in (None, found)


@pytest.mark.parametrize("case", [case for case in ALL if case not in COMPILED], ids=str)
def test_all_resources(case: Case, update: bool) -> None:
    check(case, resources(case, update))


@pytest.mark.skipif(f"triton=={triton.__version__}" not in CONSTRAINTS.read_text(), reason="recorded with another")
def test_the_record_is_of_these_kernels(update: bool) -> None:
    """Else each run compiles them all, for minutes: `pytest tests/aot --update-golden`."""
    assert update or [str(case) for case in ALL if recorded(case) is None] == []


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("architecture", list(SHARED_BYTES))
def test_many_rules_fit(architecture: str, head_dim: int, update: bool) -> None:
    """Rows of rules are buffered beside K and V: five rules with kinds may spill, but have to fit."""
    for case in cases(architecture, head_dim, 5, True):
        found = resources(case, update)
        assert found.shared <= SHARED_BYTES[architecture], (case, found)


@pytest.mark.parametrize("head_dim", [16, 36, 72, 96])
@pytest.mark.parametrize("architecture", list(SHARED_BYTES))
def test_other_head_dims(architecture: str, head_dim: int, update: bool) -> None:
    for case in cases(architecture, head_dim, 1, False):
        found = resources(case, update)
        assert found.shared <= SHARED_BYTES[architecture] and found.tensor_cores > 0, (case, found)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("architecture", list(SHARED_BYTES))
def test_float32(architecture: str, head_dim: int, update: bool) -> None:
    """Compiles and fits; true float32 has no tensor cores on NVIDIA."""
    for name in kernels(choose(architecture, head_dim, torch.float32)):
        case = Case(name, architecture, head_dim, 1, False, dtype=torch.float32)
        found = resources(case, update)
        assert found.shared <= SHARED_BYTES[architecture], (case, found)


def test_another_source_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of other kernels, blocks or another Triton counts no more; one of other comments and lines does."""
    case, text = FAST[0], Path(triton_kernels.__file__).read_text()
    before, file = key(case), tmp_path / "kernels.py"
    for source, is_other in ((text.replace("RULES > 0", "RULES >= 1"), True), (f"# One line more\n{text}", False)):
        assert source != text
        file.write_text(source)
        with monkeypatch.context() as patch:
            patch.setattr(triton_kernels, "__file__", str(file))
            building.code.cache_clear()
            assert (key(case) != before, recorded(case) is None) == (is_other, is_other)
        building.code.cache_clear()
    assert key(replace(case, softcap=True)) != before
    assert key(case) == before
