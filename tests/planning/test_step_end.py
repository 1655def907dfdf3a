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


@pytest.mark.parametrize("own", [1, long(2)])
def test_gradients_of_ranks_that_share_out_samples_are_added(own: int) -> None:
    """Nothing else trains, and there is one replica: all that is moved goes over tp, or over the copies within it."""
    compiled = csc.compile(
        hf.llava(), mesh=f"tp={2 * own},vision_tower.tp={own}", example=hf.llava_batch(4), hardware="a100",
        freeze=["multi_modal_projector", "language_model"], check=False,
    )  # fmt: skip
    a100 = hardware("a100")
    (end,) = step_ends(compiled.program, compiled.options)
    trained = sum(p.numel() * 4 for n, p in compiled.model.named_parameters() if "vision_tower" in n)
    most = 2 * a100.within.latency + trained / a100.within.bandwidth
    assert most / own * 0.9 < end.reduce <= most
