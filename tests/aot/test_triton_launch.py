"""Launches as Triton's just-in-time compiler binds them, up to the point where a GPU would be needed.

A driver that only names its target lets the launch code run with CPU tensors: arguments are bound, specialised and
compiled, nothing is started.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from csc.kernels import triton_kernels, triton_launch
from csc.kernels.mask import Mask, tiles
from csc.kernels.triton_launch import choose
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.aot.building import TARGETS
from tests.kernels import triton_cases as t
from tests.tiers import long

ARCHITECTURE = "sm_90"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names and keys of the kernels that are launched, instead of the launches."""
    keys: list[str] = []
    target = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_current_target=lambda: TARGETS[ARCHITECTURE],
    )
    bound = JITFunction.run

    def run(self: JITFunction, *args: object, grid: tuple[int, ...], warmup: bool, **constants: object) -> object:
        assert all(size > 0 for size in grid)
        compiled = bound(self, *args, grid=grid, warmup=True, **constants)
        keys.append(f"{self.fn.__name__} {compiled.hash}")
        return compiled

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(triton_launch, "architecture", lambda device: ARCHITECTURE)
    monkeypatch.setattr(driver, "_active", target)
    return keys


def both(mask: Mask | None, sizes: t.Sizes, dtype: torch.dtype, softcap: float = 0.0) -> None:
    q, k, v, d_out = t.inputs(sizes, dtype, "cpu")
    lists = None if mask is None else tiles(mask, *choose(ARCHITECTURE, sizes.width, dtype).tile)
    out, lse = triton_launch.forward(q, k, v, mask, lists, 0.1, softcap)
    triton_launch.backward(d_out, q, k, v, out, lse, mask, lists, 0.1, softcap)


def test_lengths_and_masks_compile_nothing_new(launches: list[str]) -> None:
    seen = []
    for length in (256, 257, 600, 1000, 1024):
        launches.clear()
        both(t.generation(length, 100), t.Sizes(2, 8, 2, length, length, 64), torch.bfloat16)
        seen.append(sorted(launches))
    assert [name.split()[0] for name in seen[0]] == ["dkv_kernel", "dq_kernel", "forward_kernel", "rows_kernel"]
    assert all(keys == seen[0] for keys in seen)


def test_tile_lists_of_other_lengths_compile_nothing_new(launches: list[str]) -> None:
    seen = []
    for length in (256, 257, 600, 1024):
        launches.clear()
        triton_kernels.tiles(t.generation(length, 100), 128, 128)
        seen.append(list(launches))
    assert [name.split()[0] for name in seen[0]] == ["count_kernel", "list_kernel"]
    assert all(keys == seen[0] for keys in seen)


def test_rules_that_take_registers_have_a_forward_of_their_own(launches: list[str]) -> None:
    """Kinds, several rules and soft caps spill with the blocks that are the fastest for plain masks."""
    sizes, choice = t.Sizes(1, 2, 1, 200, 200, 128), choose(ARCHITECTURE, 128, torch.bfloat16)
    assert choice.plain is not None and choice.plain != choice.forward
    q, k, v, _ = t.inputs(sizes, torch.bfloat16, "cpu")
    seen = {}
    for name, mask, softcap in (
        ("no mask", None, 0.0), ("plain", t.causal(200), 0.0), ("capped", t.causal(200), 5.0),
        ("kinds and two rules", t.generation(200, 30), 0.0),
    ):  # fmt: skip
        for what, given in (("chosen", choice), ("plain", replace(choice, forward=choice.plain))):
            launches.clear()
            triton_launch.forward(q, k, v, mask, mask and tiles(mask, *choice.tile), 0.1, softcap, given)
            seen[name, what] = list(launches)
    differing = [name for name, what in seen if what == "plain" and seen[name, "chosen"] != seen[name, what]]
    assert differing == ["capped", "kinds and two rules"]


@pytest.mark.parametrize("width", [36, long(72)])
def test_odd_head_dims_and_no_mask(launches: list[str], width: int) -> None:
    both(None, t.Sizes(1, 4, 4, 300, 200, width), torch.float16)
    assert len(launches) == 4


@pytest.mark.long
def test_wide_heads_take_two_runs_for_dk_and_dv(launches: list[str]) -> None:
    both(t.causal(200), t.Sizes(1, 2, 1, 200, 200, 256), torch.bfloat16, 5.0)
    assert sum(name.startswith("dkv_kernel") for name in launches) == 2
