"""What is compared with eager PyTorch is a step's combination: programs that are right alone may be wrong together."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import csc
from csc.errors import DifferenceError, InputError
from tests import launching
from tests.compiler import mixed_steps, small
from tests.compiler.mixed_steps import images_batch, lengths_batch

Batch = dict[str, torch.Tensor]


def compiled(model: nn.Module, example: Any, **options: Any) -> csc.CompiledModel:
    return csc.compile(model, example=example, **{"microbatches": 2, "cache": False, **options})


def comparisons(caplog: pytest.LogCaptureFixture) -> int:
    return sum("checked against eager" in record.message for record in caplog.records)


def is_eagers(model: csc.CompiledModel, batch: Batch) -> bool:
    """Whether a step has eager PyTorch's loss and gradients."""
    parameters = dict(model.model.named_parameters())
    model.model.zero_grad()
    right = model.model(**batch)
    right.backward()
    expected = {name: None if one.grad is None else one.grad.clone() for name, one in parameters.items()}
    model.model.zero_grad()
    loss = model.train_step(batch)
    same = [
        one.grad is expected[name] if expected[name] is None or one.grad is None
        else torch.allclose(one.grad, expected[name], atol=1e-6)
        for name, one in parameters.items()
    ]  # fmt: skip
    return all(same) and torch.allclose(loss, right.detach())


@pytest.fixture
def cache_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSC_CACHE", "1")
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path))


def images_of(batch: Batch) -> torch.Tensor:
    return (batch["input_ids"] == 0).sum(1)


@pytest.mark.parametrize(
    ("make", "batch", "steps", "told"),
    [
        (mixed_steps.DividedByLongest, lengths_batch, [(3, 2, 3, 2), (5, 2, 5, 2), (5, 2, 3, 2)], "reads of 'lengths'"),
        (mixed_steps.ThresholdOfLongest, lengths_batch, [(5, 2, 4, 2), (3, 2, 3, 2), (5, 2, 3, 2)], "of 'lengths'"),
        (mixed_steps.PositionsOfLongest, lengths_batch, [(3, 2, 3, 2), (5, 2, 5, 2), (3, 2, 5, 2)], "of 'lengths'"),
        (mixed_steps.PenaltyOfImages, images_batch, [(1, 1, 1, 1), (0, 0, 0, 0), (1, 1, 0, 0)], "have 'pixel_values'"),
    ],
)  # fmt: skip
@pytest.mark.long_cases(
    "PositionsOfLongest-lengths_batch-steps2-of 'lengths'",
    "DividedByLongest-lengths_batch-steps0-reads of 'lengths'",
    "ThresholdOfLongest-lengths_batch-steps1-of 'lengths'",
)
def test_programs_that_are_right_alone_and_wrong_together_are_an_error(
    make: Callable[[], nn.Module], batch: Callable[..., Batch], steps: Sequence[Sequence[int]], told: str
) -> None:
    """Each is compared before: the step that mixes them is another one."""
    options = {"divide": {"pixel_values": images_of}} if batch is images_batch else {}
    model = compiled(make(), batch(*steps[0]), **options)
    assert is_eagers(model, batch(*steps[0])) and is_eagers(model, batch(*steps[1]))
    for _ in range(2):
        with pytest.raises(DifferenceError, match=f"right in steps of their own, and meet first.* {told}"):
            model.train_step(batch(*steps[2]))


def test_a_first_step_of_two_kinds_says_in_what_they_differ() -> None:
    """The loss's table is called as a function of Python is, which graphs name otherwise."""
    batch = lengths_batch(5, 2, 3, 2)
    with pytest.raises(DifferenceError, match=r"microbatches together are not; they differ in what .* of 'lengths'"):
        compiled(mixed_steps.SumOfLongest(), batch).train_step(batch)


@pytest.mark.parametrize(("mesh", "precision"), [("pp=1", "bf16"), ("pp=2,dp=2", "bf16"), ("pp=1", "model")])
def test_in_bfloat16_programs_that_are_wrong_together_by_less_than_rounding_are_an_error(
    mesh: str, precision: str
) -> None:
    """Computed with by csc alone, or the model's own."""
    module = mixed_steps.SlightlyOfLongest()
    module = module.bfloat16() if precision == "model" else module
    model = compiled(module, lengths_batch(3, 2, 3, 2), precision=precision, mesh=mesh)
    replicas = 2 if "dp" in mesh else 1
    for lengths in ((3, 2), (5, 2)):
        model.train_step(lengths_batch(*lengths * 2 * replicas))
    with pytest.raises(DifferenceError, match=r"right in steps of their own, and meet first.* reads of 'lengths'"):
        model.train_step(lengths_batch(*(5, 2, 3, 2) * replicas))


@pytest.mark.parametrize("options", [{}, {"mesh": "dp=2", "microbatches": 1}, {"precision": "model"}])
def test_in_bfloat16_a_few_percent_that_samples_share_are_an_error(options: dict[str, Any]) -> None:
    batch = lengths_batch(3, 2, 3, 2)
    given = {"precision": "bf16", "loss_weight": "mean", **options}
    module = mixed_steps.SlightlyOfAll()
    module = module.bfloat16() if given["precision"] == "model" else module
    with pytest.raises(DifferenceError, match="'mean' does not make of the microbatches"):
        compiled(module, batch, **given).train_step(batch)
    right = {**given, "microbatches": 1, "mesh": "pp=1"}
    assert compiled(module, batch, **right).train_step(batch).isfinite()
    assert {parameter.dtype for parameter in module.parameters()} == {next(module.parameters()).dtype}


def test_in_bfloat16_what_is_right_in_float32_trains(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled(mixed_steps.EitherWay(), lengths_batch(3, 2, 3, 2), precision="bf16", mesh="pp=2")
    with caplog.at_level(logging.INFO, "csc"):
        for lengths in ((3, 2, 3, 2), (5, 2, 5, 2), (5, 2, 3, 2), (3, 2, 5, 2)):
            model.train_step(lengths_batch(*lengths))
    assert comparisons(caplog) == 3


def test_a_step_in_which_a_microbatch_has_no_labels_compares_nothing_of_it() -> None:
    """Whatever its program makes of others, the whole batch is the same: kinds that met there meet again."""

    def batch(*lengths: int, labelled: int) -> Batch:
        found = lengths_batch(*lengths)
        labels = found["ids"].masked_fill(torch.arange(len(lengths))[:, None] >= labelled, -100)
        return found | {"labels": labels}

    model = compiled(mixed_steps.LabelsOfLongest(), batch(5, 2, 3, 2, labelled=2))
    assert is_eagers(model, batch(5, 2, 3, 2, labelled=2)) and is_eagers(model, batch(5, 2, 3, 2, labelled=2))
    with pytest.raises(DifferenceError, match="2 microbatches together are not"):
        model.train_step(batch(5, 2, 3, 2, labelled=4))


def test_two_kinds_that_are_right_together_are_compared_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = compiled(mixed_steps.EitherWay(), lengths_batch(3, 2, 3, 2))
    with caplog.at_level(logging.INFO, "csc"):
        for lengths in ((3, 2, 3, 2), (5, 2, 5, 2), (5, 2, 3, 2), (3, 2, 5, 2), (5, 2, 3, 2)):
            assert is_eagers(model, lengths_batch(*lengths))
    assert comparisons(caplog) == 3


def test_ragged_steps_are_compared_once_and_not_for_each_tuple_of_sizes(caplog: pytest.LogCaptureFixture) -> None:
    """Sizes that differ within a step are a kind of their own; which sizes they are is none."""
    steps = [(2, 2), (1, 3), (3, 1), (2, 1), (1, 1), (3, 2)]
    model = compiled(small.text(1), [small.text_batch(2), small.text_batch(2)])
    with caplog.at_level(logging.INFO, "csc"):
        for sizes in steps:
            model.train_step([small.text_batch(size) for size in sizes])
        before = comparisons(caplog)
        for sizes in [(1, 2), (2, 3), (3, 3), (1, 3)]:
            model.train_step([small.text_batch(size) for size in sizes])
    assert comparisons(caplog) == before <= 4


def test_the_cache_remembers_what_met(cache_here: None, caplog: pytest.LogCaptureFixture) -> None:
    for first in (True, False):
        caplog.clear()
        model = compiled(mixed_steps.EitherWay(), lengths_batch(3, 2, 3, 2), cache=True)
        with caplog.at_level(logging.INFO, "csc"):
            for lengths in ((3, 2, 3, 2), (5, 2, 5, 2), (5, 2, 3, 2)):
                model.train_step(lengths_batch(*lengths))
        assert comparisons(caplog) == (3 if first else 0)


def test_without_a_check_a_warning_says_that_nobody_compared_what_meets(caplog: pytest.LogCaptureFixture) -> None:
    """Listed microbatches are no whole batch, of which to see what the model does with it."""
    model = compiled(mixed_steps.EitherWay(), lengths_batch(3, 2, 3, 2), check=False)
    for lengths in ((3, 2, 3, 2), (5, 2, 3, 2), (5, 2, 3, 2), (3, 2, 5, 2)):
        model.train_step([lengths_batch(*lengths[:2]), lengths_batch(*lengths[2:])])
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1 and "what Python reads of 'lengths', and check=False" in said[0]


class DividedByKinds(mixed_steps.Scored):
    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.loss(self.embed(ids), ids) / len(set(lengths.tolist()))


class SlicedToLongest(mixed_steps.Scored):
    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = max(lengths.tolist())
        return self.loss(self.embed(ids)[:, :longest], ids[:, :longest])


class OtherBuffer(mixed_steps.Scored):
    low: torch.Tensor
    high: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.ones(4))
        self.register_buffer("high", torch.full((4,), 2.0))

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.loss(self.embed(ids) * (self.high if max(lengths.tolist()) > 3 else self.low), ids)


class OtherOrder(mixed_steps.Scored):
    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        both = self.embed(ids), self.hidden(self.embed(ids))
        one, other = both if lengths.max().item() > 3 else both[::-1]
        return self.loss(one - other, ids)


class Smoothed(mixed_steps.Scored):
    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        logits, smoothing = self.out(torch.tanh(self.hidden(self.embed(ids)))), max(lengths.tolist()) / 10
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), label_smoothing=smoothing)


class Doubled(mixed_steps.Scored):
    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        states = self.embed(ids)
        for _ in range(max(lengths.tolist())):
            states = states + states
        return self.loss(states, ids)


class Dropped(mixed_steps.Scored):
    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.loss(nn.functional.dropout(self.embed(ids), 0.0) * max(lengths.tolist()), ids)


@pytest.mark.parametrize(
    ("make", "right", "wrong", "numbers"),
    [
        (mixed_steps.DividedByLongest, (5, 2, 5, 1), (5, 2, 3, 2), "with 3 for a microbatch and with 5"),
        (mixed_steps.ThresholdOfLongest, (5, 2, 5, 2), (5, 2, 3, 2), "with 1.0 for a microbatch and with 2.5"),
        (DividedByKinds, (5, 3, 5, 3), (5, 3, 4, 2), "with 2 for a microbatch and with 4"),  # microbatches alike
        (mixed_steps.EitherWay, (5, 2, 5, 2), (5, 2, 3, 2), "add is called once for a microbatch and never"),
        (SlicedToLongest, (5, 2, 5, 2), (5, 2, 3, 2), "__getitem__ computes with 3 for a microbatch and with 5"),
        (OtherBuffer, (5, 2, 5, 2), (5, 2, 3, 2), "mul computes with low for a microbatch and with high"),
        (OtherOrder, (5, 2, 5, 2), (5, 2, 3, 2), "sub computes with another value for a microbatch than"),
        (Smoothed, (5, 2, 5, 2), (5, 2, 3, 2), "cross_entropy computes with 0.3 for a microbatch and with 0.5"),
        (Doubled, (5, 2, 5, 2), (5, 2, 3, 2), "add is called 3 times for a microbatch and 5 times"),
        (Dropped, (5, 2, 5, 2), (5, 2, 3, 2), "mul computes with 3 for a microbatch and with 5"),
    ],
)
def test_without_a_check_what_is_done_otherwise_with_the_whole_batch_is_refused(
    make: Callable[[], nn.Module], right: Sequence[int], wrong: Sequence[int], numbers: str
) -> None:
    model = compiled(make(), lengths_batch(*right), check=False)
    assert is_eagers(model, lengths_batch(*right))
    with pytest.raises(InputError, match=f"{numbers} for the whole batch: .*of the values of 'lengths'") as raised:
        model.train_step(lengths_batch(*wrong))
    assert ".py:" in raised.value.where and "lengths" in raised.value.where
    assert is_eagers(model, lengths_batch(*right))


@pytest.mark.gloo
def test_kinds_that_meet_over_replicas_with_samples_of_their_own_are_compared(tmp_path: Path) -> None:
    launching.ranks(mixed_steps.main, 2, tmp_path)
    first, second = (json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(2))
    assert first == second and all(isinstance(said, float) for said in first[:2])
    assert first[2].startswith("DifferenceError") and "in steps of their own" in first[2]


class Ways(nn.Module):
    """Long samples go through a layer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, states: torch.Tensor, long: bool) -> torch.Tensor:
        return (self.long if long else self.short)(states)


class Branching(mixed_steps.Scored):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Ways()])

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layers[0](self.embed(ids), max(lengths.tolist()) > 3), ids)


class Fallback(mixed_steps.Scored):
    """Samples without images have a parameter for that."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.randn(4))

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None = None) -> torch.Tensor:
        states = self.embed(input_ids)
        if pixel_values is None:
            return self.loss(states + self.nothing, input_ids)
        return self.loss(states.masked_scatter((input_ids == 0)[..., None], self.images(pixel_values)), input_ids)


@pytest.mark.parametrize(
    ("make", "batch", "first", "second", "told"),
    [
        (Branching, lengths_batch, (3, 2), (5, 2), r"'layers\.0\.long"),
        (Fallback, images_batch, (1, 1), (0, 0), "'images.bias' and 2 more"),
    ],
)
@pytest.mark.long_cases(r"Branching-lengths_batch-first0-second0-'layers\\.0\\.long")
def test_branches_that_use_other_parameters_do_not_meet_in_one_step(
    make: Callable[[], nn.Module], batch: Callable[..., Batch], first: Sequence[int], second: Sequence[int], told: str
) -> None:
    model = compiled(make(), batch(*first, *first), check=False)
    assert is_eagers(model, batch(*first, *first)) and is_eagers(model, batch(*second, *second))
    with pytest.raises(InputError, match=f"decide differently: .*only one of them uses the parameter {told}"):
        model.train_step([batch(*first), batch(*second)])
    assert is_eagers(model, batch(*first, *first))


class CountedInPython(mixed_steps.Scored):
    """Divides by a number of classes that Python takes of the labels."""

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        states = self.out(torch.tanh(self.hidden(self.embed(ids).mean(1))))
        return nn.functional.cross_entropy(states, kinds, reduction="sum") / len(set(kinds.tolist()))


def test_labels_that_python_reads_are_refused_where_nothing_is_compared() -> None:
    batches = [
        {"ids": torch.arange(20).view(4, 5) % 9, "kinds": torch.tensor(kinds)}
        for kinds in ([2, 2, 2, 2], [2, 1, 2, 1], [2, 2, 2, 1])
    ]
    with pytest.raises(
        InputError, match=r"reads the values of 'kinds' in Python, which are labels.*check=False"
    ) as raised:
        compiled(CountedInPython(), batches[0], check=False)
    assert "test_mixed_steps.py:" in raised.value.where and "set(kinds.tolist())" in raised.value.where
    model = compiled(CountedInPython(), batches[0])
    assert is_eagers(model, batches[0]) and is_eagers(model, batches[1])
    with pytest.raises(DifferenceError, match="right in steps of their own"):
        model.train_step(batches[2])
