"""What follows the last action: counted by hand."""

from __future__ import annotations

import pytest
from csc.passes.step_end import step_ends

import csc
from csc.analysis.hardware import hardware
from tests.models import hf
from tests.tiers import long


@pytest.mark.parametrize(("zero", "rounds", "share"), [long(0, 2, 1), (2, 2, 2), long(3, 1, 2)])
def test_gradients_are_added_and_the_optimizer_steps(zero: int, rounds: int, share: int) -> None:
    compiled = csc.compile(
        hf.llava(), mesh="dp=2,pp=2", example=hf.llava_batch(4), freeze=["vision_tower"], hardware="a100", zero=zero,
        schedule="1f1b", cuts=["model.language_model.layers.1"], check=False,
    )  # fmt: skip
    a100 = hardware("a100")
    ends = step_ends(compiled.program, compiled.options)
    trained = sum(p.numel() * 4 for n, p in compiled.model.named_parameters() if "vision_tower" not in n)
    moved = sum(end.reduce for end in ends) - 2 * rounds * a100.within.latency
    assert moved == pytest.approx(rounds * trained / 2 / a100.within.bandwidth)
    assert sum(end.optimizer for end in ends) == pytest.approx(7 * trained / share / a100.reached_bandwidth)
