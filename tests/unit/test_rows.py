"""Rows that are only moved are known by their numbers: whatever a model's code does to them, the rows taken by number
are what it would have made of the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from csc.capture.values.row_index import RowIndices

Step = tuple[str, tuple[Any, ...]]


def rows_of(*parameters: torch.Tensor) -> RowIndices:
    """Of a replay whose tensors have values, so that what it makes can be looked at."""
    return RowIndices(parameters, None, lambda func, name, args, kwargs: func(*args, **kwargs))


def called(rows: RowIndices, name: str, *args: Any, **kwargs: Any) -> Any:
    """What a call gives a model that is watched."""
    func = getattr(torch, name, None) if name in ("cat", "stack") else getattr(torch.Tensor, name)
    found = rows.call(func, name, args, kwargs)
    assert found is not NotImplemented, name
    return found


@st.composite
def steps(draw: Callable[..., Any], shape: tuple[int, ...]) -> list[Step]:
    """Moves of a tensor of this shape, one after the other."""
    tensor, found = torch.empty(shape), []
    for _ in range(draw(st.integers(0, 5))):
        dims = st.integers(0, max(tensor.dim() - 1, 0))
        kind = draw(st.sampled_from(("permute", "index", "flatten", "unsqueeze", "contiguous", "view", "narrow")))
        if kind == "permute":
            step: Step = ("permute", tuple(draw(st.permutations(range(tensor.dim())))))
        elif kind == "index":
            dim = draw(dims)
            one = draw(st.one_of(st.none(), st.integers(0, tensor.shape[dim] - 1), st.just(slice(1, None))))
            step = ("__getitem__", ((*[slice(None)] * dim, one) if draw(st.booleans()) else (..., one),))
        elif kind == "flatten":
            dim = draw(dims)
            step = ("flatten", (dim, draw(st.integers(dim, tensor.dim() - 1))))
        elif kind == "unsqueeze":
            step = ("unsqueeze", (draw(dims),))
        elif kind == "view":
            step = ("reshape", (*tensor.shape[: draw(dims)], -1))
        elif kind == "narrow":
            dim = draw(dims)
            step = ("narrow", (dim, 0, draw(st.integers(1, tensor.shape[dim]))))
        else:
            step = ("contiguous", ())
        try:
            new = getattr(torch.Tensor, step[0])(tensor, *step[1])
        except (IndexError, RuntimeError):
            continue
        if new.dim() and new.numel():
            found.append(step)
            tensor = new
    return found


@given(st.data())
def test_rows_taken_by_number_are_those_that_were_moved(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(2, 4)), *data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    table = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    rows, parts = rows_of(), []
    for piece, real in zip(called(rows, "unbind", table), table.unbind()):
        for name, arguments in data.draw(steps(tuple(real.shape))):
            piece, real = called(rows, name, piece, *arguments), getattr(torch.Tensor, name)(real, *arguments)
            assert called(rows, "size", piece) == real.shape
        parts.append((called(rows, "reshape", piece, -1), real.reshape(-1)))
    whole = called(rows, "cat", [piece for piece, _ in parts])
    expected = torch.cat([real for _, real in parts])
    for name, arguments in data.draw(steps(tuple(expected.shape))):
        whole, expected = called(rows, name, whole, *arguments), getattr(torch.Tensor, name)(expected, *arguments)
    assert torch.equal(rows.real(whole), expected)
    assert len(rows.made) == 1


@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 5), st.booleans())
def test_lines_that_end_with_a_parameter(height: int, width: int, size: int, back: bool) -> None:
    """As LLaVA-NeXT ends each line of an image."""
    table = torch.randn(2, height * width, size)
    newline = torch.nn.Parameter(torch.randn(size))
    rows = rows_of(newline)

    def laid_out(call: Callable[..., Any], image: Any) -> Any:
        lines = call("permute", call("view", image, height, width, size), 2, 0, 1)
        ends = call("expand", call("__getitem__", newline, (slice(None), None, None)), size, height, 1)
        lines = call("cat", [lines, ends], -1)
        return call("transpose", call("flatten", lines, 1, 2), 0, 1)

    def plainly(name: str, *args: Any) -> Any:
        return (torch.cat if name == "cat" else getattr(torch.Tensor, name))(*args)

    def numbered(name: str, *args: Any) -> Any:
        return called(rows, name, *args)

    images = list(zip(called(rows, "unbind", table), table.unbind()))[:: -1 if back else 1]
    found = numbered("cat", [laid_out(numbered, piece) for piece, _ in images])
    assert torch.equal(rows.real(found), torch.cat([laid_out(plainly, image) for _, image in images]))
    (numbers,) = rows.made.values()
    assert numbers.shape == (2 * height * (width + 1),)  # of rows, not of what is in them


def test_units_stay_whole() -> None:
    table = torch.randn(3, 4, 5, 6)
    rows = rows_of()
    pieces = called(rows, "split", table, [1, 2])
    joined = called(rows, "cat", [called(rows, "__getitem__", pieces[1], slice(1, None)), pieces[0]])
    assert torch.equal(rows.real(joined), table[[2, 0]])
    assert rows.made["row_numbers_0"].tolist() == [2, 0]


def test_stand_ins_that_were_not_joined_are_made_by_the_same_calls() -> None:
    table = torch.randn(3, 4)
    rows = rows_of()
    query, _, _ = called(rows, "unbind", table)
    assert torch.equal(rows.real(called(rows, "unsqueeze", query, 0)), table[0][None])
    assert not rows.made


@pytest.mark.parametrize(
    ("name", "arguments"), [("sum", ()), ("mul", (2,)), ("__getitem__", (torch.tensor([0]),)), ("to", (torch.float64,))]
)
def test_other_calls_are_none_of_its_own(name: str, arguments: tuple[Any, ...]) -> None:
    rows = rows_of()
    piece, _ = called(rows, "unbind", torch.randn(2, 3))
    assert rows.call(getattr(torch.Tensor, name), name, (piece, *arguments), {}) is NotImplemented


def test_tensors_beside_stand_ins_end_the_moving() -> None:
    rows = rows_of()
    piece, _ = called(rows, "unbind", torch.randn(2, 3))
    assert rows.call(torch.cat, "cat", ([piece, torch.randn(3)],), {}) is NotImplemented


def test_a_parameter_alone_is_not_numbered() -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    rows = rows_of(weight)
    column = called(rows, "__getitem__", weight, (slice(None), None))
    assert rows.call(torch.cat, "cat", ([column, column],), {}) is NotImplemented
    assert torch.equal(rows.real(column), weight[:, None])
