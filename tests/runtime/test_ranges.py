"""Ranges of torch.profiler: every action with its stage and microbatch, and in it every region."""

from __future__ import annotations

import torch

import csc
from tests.compiler import small


def test_ranges_carry_stage_action_and_region() -> None:
    batch = small.text_batch(2)
    compiled = csc.compile(
        small.text(3), mesh="pp=2", example=batch, microbatches=2, cuts=["layers.1"], schedule="1f1b", check=False
    )
    loss = compiled.train_step(batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert torch.equal(compiled.train_step(batch), loss)
    found = {(event.name, event.cpu_parent.name if event.cpu_parent else "") for event in profile.events()}
    names = [event.name for event in profile.events()]
    first, last = "[embed_tokens ... layers.0]", "[layers.1 ... lm_head]"
    for microbatch in range(2):
        assert names.count(f"F stage 0 microbatch {microbatch} {first}") == 1
        assert names.count(f"F stage 1 microbatch {microbatch} {last}") == 1
        assert ("layers.2", f"F stage 1 microbatch {microbatch} {last}") in found
        assert any(name == "layers.2" and "stage 1" in parent and parent[0] in "BW" for name, parent in found)
    assert all("stage" in parent for name, parent in found if name == "layers.0")


def test_ranks_on_threads_have_ranges_where_all_threads_are_profiled() -> None:
    batch = small.text_batch(2)
    compiled = csc.compile(small.text(1), mesh="cp=2", example=batch, microbatches=2, check=False)
    loss = compiled.train_step(batch)
    everywhere = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=everywhere
    ) as profile:
        assert torch.equal(compiled.train_step(batch), loss)
    names = [event.name.partition(" [")[0] for event in profile.events()]
    assert names.count("F stage 0 microbatch 0") == names.count("F stage 0 microbatch 1") == 2, "one of each rank"
