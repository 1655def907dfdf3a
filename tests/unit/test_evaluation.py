"""Types of values: equal calls are run once, values are no types."""

from __future__ import annotations

import torch

from csc.ir.graph import Evaluation
from csc.torch_private.traces import FakeTensorMode

aten = torch.ops.aten


def test_equal_calls_are_run_once() -> None:
    mode = FakeTensorMode()
    evaluate = Evaluation(mode)
    with mode:
        one, same, other = torch.empty(2, 3), torch.empty(2, 3), torch.empty(2, 3, dtype=torch.bfloat16)
    first = evaluate(aten.mul.Tensor, (one, 2), {})
    assert evaluate(aten.mul.Tensor, (same, 2), {}) is first
    assert first.shape == (2, 3) and first.dtype == torch.float32
    assert evaluate(aten.mul.Tensor, (other, 2), {}).dtype == torch.bfloat16
    with mode:
        whole = torch.empty(2, 3, dtype=torch.int64)
    dtypes = [evaluate(aten.mul.Tensor, (whole, factor), {}).dtype for factor in (1, 1.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.int64]


def test_results_with_a_known_value_are_not_shared() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    evaluate = Evaluation(mode)
    with mode:
        found = [evaluate(aten.mul.Tensor, (aten.lift_fresh_copy(torch.tensor(value)), 2), {}) for value in (3, 4)]
        assert [int(each) for each in found] == [6, 8]
