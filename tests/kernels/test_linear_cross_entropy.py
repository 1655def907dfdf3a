"""A head and its loss in chunks equal the dense ones: the loss and every gradient, whatever the chunks are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from csc.kernels import linear_cross_entropy as head_sweep
from csc.kernels import onednn
from csc.kernels.linear_cross_entropy import (
    FEWEST,
    ROOM,
    ROOM_ON_CPU,
    Head,
    _in_cache,
    _Sweep,
    linear_cross_entropy,
    rows_of,
)
from csc.kernels.onednn import LEAST
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from csc.torch_private.traces import FakeTensorMode
from tests.kernels.dense_head import IGNORED, dense, in_float64, operands, results, sizes

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}  # relative, of a norm


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative, of norms; a gradient that cancels to nothing is measured by the operand's own size."""
    assert found.keys() == expected.keys()
    return {name: float((found[name] - one).norm() / one.norm().clamp(min=1e-3)) for name, one in expected.items()}


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(1, 40), classes=st.integers(1, 30), width=st.integers(1, 9), rows=st.integers(1, 45),
    dtype=st.sampled_from(list(TOLERANCE)), biased=st.booleans(), mean=st.booleans(), seed=st.integers(0, 99),
    scale=st.sampled_from([1.0, 0.3, -2.0]), softcap=st.sampled_from([0.0, 1.5, 30.0]),
)  # fmt: skip
def test_any_head(tokens, classes, width, rows, dtype, biased, mean, seed, scale, softcap) -> None:
    given = operands(tokens, classes, width, dtype, biased, seed)
    if (given["labels"] == IGNORED).all():
        given["labels"][0] = 0
    settings = {"mean": mean, "scale": scale, "softcap": softcap}
    found = results(linear_cross_entropy(**given, **settings, rows=rows, ignored=IGNORED), given)
    exact = in_float64(given)
    expected, terms = results(dense(**exact, **settings), exact), sizes(exact, scale, softcap, mean)
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        error = float((found[name] - one).norm() / max(one.norm(), terms[name]))
        assert error <= TOLERANCE[dtype], f"{name}: {error:.2e}"


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("rows", [8, 50, 200])
def test_bfloat16_is_as_near_to_float64_as_eager_is(softcap: float, rows: int) -> None:
    given = operands(200, 300, 32, torch.bfloat16, biased=True, seed=3)
    exact = in_float64(given)
    expected = results(dense(**exact, softcap=softcap), exact)
    eager = difference(results(dense(**given, softcap=softcap), given), expected)
    found = difference(
        results(linear_cross_entropy(**given, softcap=softcap, rows=rows, ignored=IGNORED), given), expected
    )
    for name, error in found.items():
        assert error <= 1.5 * eager[name] + 1e-5, f"{name}: {error:.2e}, eager {eager[name]:.2e}"


def test_tokens_may_lie_in_any_dimensions_and_strides() -> None:
    given = operands(24, 11, 6, torch.float64, biased=False, seed=0)
    x = given["x"].detach().view(2, 6, 2, 6).transpose(0, 2).requires_grad_(True)
    loss = linear_cross_entropy(x, given["weight"], given["labels"].view(2, 12), ignored=IGNORED, rows=5)
    flat = x.reshape(-1, 6)
    expected = dense(flat, given["weight"], given["labels"], None)
    (one,), (other,) = (torch.autograd.grad(value, [x]) for value in (loss, expected))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("prefers", [False, True], ids=["MKL", "oneDNN"])
@pytest.mark.parametrize("rows", [128, 1000])
@pytest.mark.parametrize(("biased", "softcap"), [(False, 0.0), (True, 5.0)])
def test_either_library_computes_its_products(
    prefers: bool, rows: int, biased: bool, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large enough for either; in one chunk and in several, whose gradients are added some classes at a time."""
    monkeypatch.setattr(onednn, "least_multiplications", lambda: LEAST if prefers else 0)
    monkeypatch.setattr(head_sweep, "IN_CACHE", 2**17)
    given = operands(700, 600, 96, torch.float32, biased, seed=2)
    exact = in_float64(given)
    expected = results(dense(**exact, softcap=softcap), exact)
    with profile(activities=[ProfilerActivity.CPU]) as ran:
        loss = linear_cross_entropy(**given, softcap=softcap, rows=rows, ignored=IGNORED)
    found = results(loss, given)
    for name, error in difference(found, expected).items():
        assert error <= 2e-6, f"{name}: {error:.2e}"
    assert any(event.key == "mkldnn::_linear_pointwise" for event in ran.key_averages()) is prefers


def call(given: dict[str, Any], output_mask: list[bool], rows: int = 7) -> tuple[torch.Tensor, ...]:
    values = [None if given[n] is None else given[n].detach() for n in ("x", "weight", "bias", "labels")]
    return torch.ops.csc.linear_cross_entropy(*values, 1.0, 0.0, IGNORED, True, rows, output_mask)


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True)])
def test_what_is_not_wanted_is_empty_and_changes_no_bit_of_the_rest(wanted: tuple[bool, bool]) -> None:
    given = operands(20, 13, 4, torch.float32, biased=True, seed=1)
    whole = call(given, [True, True, True, True])
    part = call(given, [True, *wanted, False])
    for one, other, there in zip(part, whole, (True, *wanted, False), strict=True):
        assert torch.equal(one, other) if there else one.numel() == 0


def test_without_labels_the_mean_is_no_number_and_the_gradients_are_zero() -> None:
    given = operands(9, 5, 3, torch.float32, biased=True, seed=0)
    given["labels"][:] = IGNORED
    found = results(linear_cross_entropy(**given, rows=2, ignored=IGNORED), given)
    expected = results(dense(**given), given)
    assert math.isnan(found.pop("loss")) and math.isnan(expected.pop("loss"))
    assert all(torch.equal(found[name], one) and not one.any() for name, one in expected.items())


def test_a_label_whose_chance_is_too_small_for_a_number_has_its_loss() -> None:
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    given = {"x": torch.tensor([[300.0], [-300.0], [0.5]], requires_grad=True), "weight": weight, "bias": None}
    given["labels"] = torch.tensor([2, 0, 1])  # of chances e**-600, e**-600 and a third or so
    found = results(linear_cross_entropy(**given, ignored=IGNORED), given)
    expected = results(dense(**given), given)
    assert expected["loss"] > 400
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [7, 64])
def test_a_few_rows_at_a_time_are_those_of_a_chunk(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from csc.kernels import linear_cross_entropy as head_sweep

    given = operands(40, 23, 5, torch.float32, biased=True, seed=2)
    whole = call(given, [True] * 4, rows)
    monkeypatch.setattr(head_sweep, "IN_CACHE", 3 * 23 * 4)  # three rows
    for one, other in zip(call(given, [True] * 4, rows), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("labels", [0, 1, 11, 40])
def test_tokens_without_labels_have_no_logits(labels: int) -> None:
    given = operands(40, 23, 5, torch.float32, biased=True, seed=2)
    given["labels"][:] = IGNORED
    given["labels"][torch.arange(labels) * 17 % 40] = 3
    with profile(record_shapes=True) as seen:
        loss = linear_cross_entropy(**given, rows=7, ignored=IGNORED)
    products = [event.input_shapes[:2] for event in seen.events() if event.name == "aten::mm"]
    assert sum(one[0] for one, other in products if other == [5, 23]) == labels
    expected = dense(**given)
    if labels:
        assert all(value < 1e-6 for value in difference(results(loss, given), results(expected, given)).values())


@pytest.mark.parametrize("mean", [True, False])
def test_a_sweep_over_all_tokens_gives_the_same(mean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it walks while a device records what it launches."""
    from csc.kernels import linear_cross_entropy as head_sweep

    given = operands(40, 23, 5, torch.float64, biased=True, seed=2)
    found = results(linear_cross_entropy(**given, rows=7, ignored=IGNORED, mean=mean), given)
    monkeypatch.setattr(head_sweep, "_labelled", lambda counts: None)
    again = results(linear_cross_entropy(**given, rows=7, ignored=IGNORED, mean=mean), given)
    assert all(value < 1e-12 for value in difference(again, found).values())


@pytest.mark.parametrize("label", [5, -1])
def test_a_label_that_is_no_class_is_refused(label: int) -> None:
    given = operands(9, 5, 3, torch.float32, biased=False, seed=0)
    given["labels"][4] = label
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(**given, ignored=IGNORED)


@pytest.mark.parametrize("change", [{"labels": torch.zeros(8, dtype=torch.int64)}, {"rows": -1},
                                    {"bias": torch.zeros(4)}, {"weight": torch.zeros(5, 4)}])  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sizes do not fit"):
        linear_cross_entropy(**{**operands(9, 5, 3, torch.float32, biased=True, seed=0), **change})


@pytest.mark.parametrize("biased", [False, True])
def test_it_is_an_operator_as_torch_wants_one(biased: bool) -> None:
    given = operands(9, 5, 3, torch.float32, biased=biased, seed=0)
    values = [given[name] for name in ("x", "weight", "bias", "labels")]
    mask = [True, True, True, biased]
    torch.library.opcheck(torch.ops.csc.linear_cross_entropy, (*values, 0.5, 2.0, IGNORED, True, 4, mask))


@pytest.mark.parametrize("classes", [10, 32_000, 150_000, 300_000])
@pytest.mark.parametrize("width", [64, 256, 4096])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_chunk_fills_its_room(classes: int, width: int, device: str) -> None:
    with FakeTensorMode():
        weight = torch.empty(classes, width, dtype=torch.bfloat16, device=device)
    rows, logit = rows_of(weight), 4 * classes
    room = max(ROOM_ON_CPU if device == "cpu" else ROOM, classes * width * 4 // 2)
    assert rows % FEWEST == 0 and rows >= FEWEST
    assert rows * logit <= room < (rows + FEWEST) * logit
    assert rows_of(weight.double()) in (rows // 2 // FEWEST * FEWEST, width // 2)


def test_no_value_of_a_sweep_is_larger_than_a_chunk_or_an_operand() -> None:
    given = operands(512, 400, 4, torch.float32, biased=False, seed=0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        linear_cross_entropy(**given, rows=16, ignored=IGNORED)
    moments = [event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for change in moments:
        held += change
        most = max(most, held)
    assert 0 < most < 512 * 400 * 4 / 4, f"{most} bytes at once"


def test_the_path_of_narrow_operands_on_a_gpu_fits_together() -> None:
    """Its product of bfloat16 in float32 runs on CUDA alone: shapes and dtypes, on meta tensors."""
    x, weight, bias = (torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((12, 8), (100, 8), (100,)))
    sweep = _Sweep(Head(x, weight, bias, 0.5, 2.0, IGNORED, True, 8, [True] * 4), _in_cache)
    sweep.sums_in_product = True
    for part in (slice(0, 8), slice(8, 12)):
        rows = part.stop - part.start
        classes = torch.zeros(rows, 1, dtype=torch.int64, device="meta")
        assert sweep.chunk(part, classes, torch.ones(rows, 1, device="meta")).shape == (rows,)
    for one, other in zip(sweep.gradients(), (x, weight, bias), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
