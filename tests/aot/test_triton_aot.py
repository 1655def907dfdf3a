"""The default configurations, compiled ahead of time: no spills, shared memory within the limit, tensor cores at work.

A few of each architecture run always; all head dims, rules and soft caps are in the slow tier (a second or two each).
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from csc.kernels.triton_configs import choose

from tests.aot.building import SHARED_BYTES, Case, build, kernels

MASKS = {"no mask": (0, False), "one rule": (1, False), "kinds": (1, True), "two rules": (2, True)}


def cases(architecture: str, head_dim: int, rules: int, kinds: bool, softcap: bool = False) -> list[Case]:
    names = kernels(choose(architecture, head_dim, torch.bfloat16), softcap)
    return [Case(name, architecture, head_dim, rules, kinds, softcap) for name in names]


FAST = [
    *(case for head_dim in (64, 128, 256) for case in cases("sm_90", head_dim, 1, True)),
    *(case for name in ("sm_80", "sm_100", "gfx942") for case in cases(name, 128, 1, True)),
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


def check(case: Case) -> None:
    found = build(case)
    assert found.spilled == 0, found
    assert found.shared <= SHARED_BYTES[case.architecture], found
    assert found.tensor_cores > 0, found
    assert (found.tma > 0) == case.config.descriptors, found


@pytest.mark.parametrize("case", FAST, ids=str)
def test_resources(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case not in FAST], ids=str)
def test_all_resources(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("architecture", list(SHARED_BYTES))
def test_many_rules_fit(architecture: str, head_dim: int) -> None:
    """Rows of rules are buffered beside K and V: five rules with kinds may spill, but have to fit."""
    for case in cases(architecture, head_dim, 5, True):
        found = build(case)
        assert found.shared <= SHARED_BYTES[architecture], (case, found)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [16, 36, 72, 96])
@pytest.mark.parametrize("architecture", list(SHARED_BYTES))
def test_other_head_dims(architecture: str, head_dim: int) -> None:
    for case in cases(architecture, head_dim, 1, False):
        found = build(case)
        assert found.shared <= SHARED_BYTES[architecture] and found.tensor_cores > 0, (case, found)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("architecture", list(SHARED_BYTES))
def test_float32(architecture: str, head_dim: int) -> None:
    """Compiles and fits; true float32 has no tensor cores on NVIDIA."""
    for name in kernels(choose(architecture, head_dim, torch.float32)):
        found = build(Case(name, architecture, head_dim, 1, False, dtype=torch.float32))
        assert found.shared <= SHARED_BYTES[architecture], (name, found)
