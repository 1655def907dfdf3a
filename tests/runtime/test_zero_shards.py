"""Shards of parameters that data-parallel ranks step, and optimizers that may step them."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from csc.errors import InputError
from csc.runtime import optimizer
from csc.runtime.gradients import seen, shard_of
from csc.runtime.specs import cut, overlap, part_in_box, put, whole_box

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@given(shape=SHAPES, ranks=st.integers(1, 6))
def test_shards_are_all_of_it_once(shape: list[int], ranks: int) -> None:
    whole = torch.zeros(shape)
    sizes = []
    for index in range(ranks):
        own = seen(whole, shard_of(shape, ranks, index))
        assert own.dim() == whole.dim()
        own += 1
        sizes.append(own.numel())
    assert torch.equal(whole, torch.ones(shape))
    assert max(sizes) - min(sizes) <= whole.numel() // shape[shard_of(shape, ranks, 0).dimension]


@given(shape=SHAPES, before=st.integers(1, 5), after=st.integers(1, 5))
def test_what_was_written_in_shards_is_read_in_others(shape: list[int], before: int, after: int) -> None:
    """As the state of an optimizer is, from one mesh to another."""
    whole = torch.randn(shape)
    written = [part_in_box(whole_box(shape), *shard_of(shape, before, index)) for index in range(before)]
    for index in range(after):
        shard = shard_of(shape, after, index)
        box = part_in_box(whole_box(shape), *shard)
        found = torch.full_like(seen(whole, shard), torch.nan)
        for one in written:
            for here, there in overlap(box, one):
                found[here] = cut(whole, one)[there]
        assert torch.equal(found, seen(whole, shard))


def test_a_shard_of_a_fused_box() -> None:
    """Entries of a box with several stretches are those that the rank's shard has."""
    box = (((2, 4), (6, 9), (12, 13)), ((0, 3),))
    whole, again = torch.randn(14, 3), torch.zeros(14, 3)
    local = cut(whole, box)
    for index in range(4):
        shard = shard_of(local.shape, 4, index)
        inner = part_in_box(box, *shard)
        assert torch.equal(cut(whole, inner), seen(local, shard))
        put(again, inner, seen(local, shard))
    assert torch.equal(cut(again, box), local)


@pytest.mark.parametrize(
    ("name", "options"),
    [("Adam", {}), ("AdamW", {"fused": True}), ("AdamW", {"amsgrad": True, "lr": 0.0}), ("SGD", {"momentum": 0.9}),
     ("RMSprop", {"centered": True}), ("Adagrad", {}), ("NAdam", {}), ("Rprop", {})],
)  # fmt: skip
def test_what_works_entry_by_entry(name: str, options: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    optimizer.check(functools.partial(getattr(torch.optim, name), **options), [{}], torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state())


class Normed(torch.optim.SGD):
    """Divides gradients by their norm, as LAMB does in other words."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        super().step(closure)


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn_like(parameter.grad)
        super().step(closure)


class Blocks(torch.optim.SGD):
    """Steps by the largest of 256 entries, in parameters of 4,096 or more, as 8-bit states do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel() >= 4096:
                    rest = parameter.numel() // 256 * 256
                    flat = parameter.grad.view(-1)[:rest].view(-1, 256)
                    flat /= flat.abs().amax(1, keepdim=True)
        super().step(closure)


class Counting(torch.optim.SGD):
    """Its rate depends on all parameters together."""

    def step(self, closure: Any = None) -> None:
        total = sum(float(p.grad.abs().sum()) for group in self.param_groups for p in group["params"])
        for group in self.param_groups:
            group["lr"] = 1.0 / total
        super().step(closure)


@pytest.mark.parametrize("make", [Normed, Noisy, Blocks, Counting, torch.optim.Adafactor])
def test_what_does_not(make: Any) -> None:
    with pytest.raises(InputError, match=f"{make.__name__} steps a shard of a parameter in another way"):
        optimizer.check(make, [{}], torch.device("cpu"))


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SparseAdam, lambda parameters: 3])
def test_what_takes_no_step(make: Any) -> None:
    with pytest.raises(InputError, match="takes no step of parameters that ranks divide"):
        optimizer.check(make, [{}], torch.device("cpu"))


def test_options_of_one_group_are_tried_too() -> None:
    class Some(Normed):
        def step(self, closure: Any = None) -> None:
            (Normed if self.param_groups[0].get("normed") else torch.optim.SGD).step(self, closure)

    optimizer.check(Some, [{"weight_decay": 0.1}], torch.device("cpu"))
    with pytest.raises(InputError, match="Some steps a shard"):
        optimizer.check(Some, [{"weight_decay": 0.1}, {"normed": True}], torch.device("cpu"))
