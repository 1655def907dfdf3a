"""Adding up gradients: order, memory that is shared, buckets."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from csc.errors import ProgramError
from csc.ir.groups import Group, Placement
from csc.runtime.gradients import GradientSums, buckets
from csc.runtime.specs import ParameterSpec
from csc.runtime.weight_names import under


def spec(
    name: str,
    size: int = 4,
    stages: tuple[int, ...] = (0,),
    dtype: torch.dtype = torch.float32,
    trainable: bool = True,
) -> ParameterSpec:
    return ParameterSpec(name, (size,), dtype, trainable, stages, stages)


def merged(specs: list[ParameterSpec], *contributions: list[tuple[str, torch.Tensor]]) -> GradientSums:
    """The sums after one stage has added these, microbatch by microbatch."""
    sums = GradientSums(specs, [0])
    for microbatch, pairs in enumerate(contributions):
        sums.add(0, microbatch, pairs)
    sums.merge()
    return sums


def test_microbatches_are_added_in_order_whenever_they_come() -> None:
    parts = [torch.tensor([value]) for value in (1.0, 1e8, -1e8)]
    for order in itertools.permutations(range(3)):
        sums = GradientSums([spec("a", 1)], [0])
        for microbatch in order:
            sums.add(0, microbatch, [("a", parts[microbatch])])
        sums.merge()
        assert sums.buffers["a"] == (parts[0] + parts[1]) + parts[2] == 0, "another order would give 1"


def test_stages_of_one_rank_add_up_highest_first() -> None:
    sums = GradientSums([spec("tied", 1, stages=(0, 1, 2)), spec("alone", 1, stages=(1,))], [0, 1, 2])
    for stage, value in enumerate((1.0, 1e8, -1e8)):
        sums.add(stage, 0, [("tied", torch.tensor([value]))])
    sums.add(1, 1, [("alone", torch.ones(1))])
    sums.merge()
    assert sums.buffers["tied"] == 1, "only the highest stage first keeps the 1"
    assert sums.own == {"tied"} and sums.buffers["alone"] == 1


def test_contributions_do_not_touch_what_they_came_from() -> None:
    shared = torch.ones(4)
    once = merged([spec("a"), spec("b")], [("a", shared), ("b", shared)])
    assert once.buffers["a"] is shared and not once.own, "the first one is kept as it is"
    sums = merged([spec("a"), spec("b")], [("a", shared), ("b", shared)], *[[("a", torch.ones(1).expand(4))]] * 2)
    assert sums.own == {"a"} and shared.tolist() == [1] * 4
    assert sums.buffers["a"].tolist() == [3] * 4 and sums.buffers["b"].tolist() == [1] * 4


def test_a_region_s_gradients_are_gone_before_the_next_are_made() -> None:
    """As a rank file gives them, once there is a sum of its own: a head's may be the largest tensor of a step."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def region(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        assert not sums.own or not [one for one in alive if one() is not None], "the region before still has its own"
        made = {name: torch.ones(4) for name in names}
        alive[:] = [weakref.ref(gradient) for gradient in made.values()]
        return made

    def backward_weight() -> Iterator[tuple[str, torch.Tensor]]:
        w = under({}, "")
        yield from w.full_names(region(("a", "b")))
        yield from w.full_names(region(("c",)))

    sums = GradientSums([spec("a"), spec("b"), spec("c")], [0])
    for microbatch in range(3):
        alive.clear()  # those of the first are the sums
        sums.add(0, microbatch, backward_weight())
    sums.merge()
    assert {name: one.tolist() for name, one in sums.buffers.items()} == dict.fromkeys("abc", [3.0] * 4)


def test_gradients_take_the_dtype_of_the_parameter() -> None:
    sums = merged([spec("a", dtype=torch.bfloat16)], [("a", torch.ones(4))])
    assert sums.buffers["a"].dtype == torch.bfloat16


def test_gradients_that_cannot_be_right() -> None:
    specs = [spec("a"), spec("frozen", trainable=False), spec("b", stages=(1,))]
    for name, size, part in (
        ("b", 4, "not on stage 0"),
        ("c", 4, "not on stage 0"),
        ("frozen", 4, "is frozen"),
        ("a", 5, r"is \[5\]"),
    ):
        with pytest.raises(ProgramError, match=part):
            merged(specs, [(name, torch.zeros(size))])


def test_buckets_keep_dtypes_and_holders_apart() -> None:
    specs = [
        spec("a"),
        spec("tied", stages=(0, 2)),
        spec("b"),
        spec("half", dtype=torch.bfloat16),
        spec("big", 100),
        spec("c"),
        spec("unused"),
    ]
    sums = merged(specs, [(s.name, torch.zeros(s.shape)) for s in specs[:-1]])
    sums.specs["apart"] = replace(spec("apart"), gradient=Placement(parts=Group.POSITION))
    sums.buffers["apart"] = torch.zeros(4)
    found = [(parts, [s.name for s in listed]) for parts, listed in buckets(sums, limit=32)]
    lists = [["a", "b"], ["big"], ["c"], ["tied"], ["half"]]
    assert found == [*((Group.DATA, names) for names in lists), (Group.POSITION, ["apart"])]
