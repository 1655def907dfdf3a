"""Models whose forward writes to the model: what it only remembers is harmless, what it computes with is refused."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import InputError
from csc.reports.verification import verify
from tests.compiler import small


class Changing(small.TextModel):
    """`before(hidden)` is part of the model, `after` runs when all is computed."""

    def __init__(self, start: Any, change: Callable[[Any], Any], use: Callable[[Any], float], buffer: bool) -> None:
        super().__init__(1)
        self.change, self.use = change, use
        if buffer:
            self.register_buffer("kept", start)
        else:
            self.kept = start

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens) * self.use(self.kept)
        self.kept = self.change(self.kept)
        return F.cross_entropy(self.lm_head(hidden).flatten(0, 1), labels.flatten())


def _longer(one: list) -> list:
    one.append(1)
    return one


def _raised(one: dict) -> dict:
    one["n"] += 1
    return one


def _shifted(one: torch.Tensor) -> torch.Tensor:
    return one * 0.9 + 0.1


def _nothing(one: Any) -> float:
    return 1.0


START: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any], bool]] = {
    "number": (lambda: 1, lambda n: n + 1, lambda n: n, False),
    "number from the hundredth step on": (lambda: 0, lambda n: n + 1, lambda n: 1.0 + n // 100, False),
    "fraction": (lambda: 1.0, lambda n: 0.99 * n, lambda n: n, False),
    "switch": (lambda: True, lambda on: not on, lambda on: 2.0 if on else 1.0, False),
    "text": (lambda: "warm", lambda _: "hot", lambda text: 2.0 if text == "hot" else 1.0, False),
    "list": (list, _longer, lambda one: 1.0 + len(one), False),
    "mapping": (lambda: {"n": 1}, _raised, lambda one: one["n"], False),
    "buffer": (lambda: torch.ones(()), lambda n: n + 1, lambda n: n, True),
    "mean in a buffer": (lambda: torch.zeros(()), _shifted, lambda n: 1.0 + n, True),
    "tensor": (lambda: torch.ones(()), lambda n: n + 1, lambda n: n, False),
}


@pytest.mark.parametrize("case", START)
def test_what_is_computed_with_is_refused(case: str) -> None:
    start, change, use, buffer = START[case]
    with pytest.raises(InputError, match="changes kept and computes with it"):
        csc.compile(Changing(start(), change, use, buffer), example=small.text_batch(2), cache=False)


@pytest.mark.parametrize("case", ["number", "text", "list", "buffer", "tensor"])
def test_what_is_only_remembered_is_not(case: str) -> None:
    start, change, _, buffer = START[case]
    model = Changing(start(), change, _nothing, buffer)
    compiled = csc.compile(model, example=small.text_batch(2), cache=False)
    assert verify(compiled).good(1e-6)
    assert str(model.kept) == str(start()), "no trace of the trace"


class Table(small.TextModel):
    """Makes a table when it is needed first, a larger one when it is too small, as rotary embeddings do."""

    longest = 0
    table: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] > self.longest:
            self.longest = tokens.shape[1]
            self.table = torch.linspace(0.5, 1.5, 16)
        assert self.table is not None
        hidden = self.embed_tokens(tokens) * self.table
        return F.cross_entropy(self.lm_head(hidden).flatten(0, 1), labels.flatten())


def test_a_table_that_is_made_on_demand() -> None:
    compiled = csc.compile(Table(1), example=small.text_batch(2), cache=False)
    assert verify(compiled).good(1e-6)
    assert verify(compiled, small.text_batch(2, 12)).good(1e-6)


@pytest.mark.parametrize("case", ["number", "number from the hundredth step on", "buffer"])
@pytest.mark.long_cases("number from the hundredth step on")
def test_without_weights_the_graph_is_asked(case: str) -> None:
    start, change, use, buffer = START[case]
    with csc.meta_init():
        computed, remembered = (Changing(start(), change, one, buffer) for one in (use, _nothing))
    assert csc.compile(remembered, example=small.text_batch(2), cache=False).program.regions
    with pytest.raises(InputError, match="changes kept and computes with it"):
        csc.compile(computed, example=small.text_batch(2), cache=False)


TURNS = [1.0, 0.5, 0.25]
TENSORS = [torch.full((16,), 0.5), torch.full((16,), 1.5)]  # two: every second step is alike


class Held:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.calls = 0

    def next(self) -> float:
        self.calls += 1
        return 1.0 / self.calls


def _global_turned() -> float:
    TURNS.append(TURNS.pop(0))
    return TURNS[0]


def _tensors_turned() -> torch.Tensor:
    TENSORS.append(TENSORS.pop(0))
    return TENSORS[0]


class Deep:
    """A list in a list."""

    kept = ([1.0],)

    def next(self) -> float:
        self.kept[0].append(self.kept[0][-1] / 2)
        return self.kept[0][-1]


SCALES: dict[str, Callable[[], Any]] = {
    "iterator": itertools.cycle(TURNS).__next__,
    "iterator over two": itertools.cycle(TURNS[:2]).__next__,
    "global": _global_turned,
    "global tensors": _tensors_turned,
    "object": Held().next,
    "nested": Deep().next,
}


@pytest.mark.parametrize("case", SCALES)
def test_what_changes_beside_the_model_is_refused(case: str) -> None:
    model = Changing(None, lambda kept: kept, lambda _: SCALES[case](), False)
    with pytest.raises(
        InputError, match=r"computes with it|the same batch has another loss each time.*forward changes"
    ):
        csc.compile(model, example=small.text_batch(2), cache=False).train_step(small.text_batch(2))


@pytest.mark.parametrize("case", ["global", "global tensors"])
def test_a_global_that_is_computed_with_is_refused_without_the_check(case: str) -> None:
    model = Changing(None, lambda kept: kept, lambda _: SCALES[case](), False)
    with pytest.raises(InputError, match=r"changes .*T\w+S.* and computes with it"):
        csc.compile(model, example=small.text_batch(2), cache=False, check=False)


TABLES: dict[Any, Any] = {}
KNOT: list[Any] = []
KNOT.append(KNOT)  # holds itself


class Shelf:
    """Beside any model."""

    table: Any = None
    __slots__ = ("own",)


SHELF = Shelf()


def by_size(rows: int) -> torch.Tensor:
    if rows not in TABLES and KNOT:
        TABLES[rows] = {"table": torch.arange(rows) / rows}
    found: torch.Tensor = TABLES[rows]["table"]
    return found


def of_an_object(rows: int) -> torch.Tensor:
    if not hasattr(SHELF, "own"):
        SHELF.own = torch.arange(rows) / rows
    return SHELF.own


def of_a_class(rows: int) -> torch.Tensor:
    if Shelf.table is None:
        Shelf.table = torch.arange(rows) / rows
    found: torch.Tensor = Shelf.table
    return found


@functools.lru_cache
def of_a_cache(rows: int) -> torch.Tensor:
    return torch.arange(rows) / rows


def of_a_closure() -> Callable[[int], torch.Tensor]:
    table: torch.Tensor | None = None

    def of(rows: int) -> torch.Tensor:
        nonlocal table
        if table is None:
            table = torch.arange(rows) / rows
        return table

    return of


class WithTable(nn.Module):
    """Multiplies features by a table that is made on demand and kept beside the model."""

    def __init__(self, table: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.table, self.layer = table, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * (1 + self.table(6))).square().mean()


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("table", [by_size, of_an_object, of_a_class, of_a_cache, of_a_closure()])
def test_tables_beside_the_model_hold_nothing_of_a_trace(table: Callable[[int], torch.Tensor], check: bool) -> None:
    """Eager PyTorch finds what it would find: nothing, or tensors with data."""
    TABLES.clear()
    of_a_cache.cache_clear()
    Shelf.table = None
    if hasattr(SHELF, "own"):
        del SHELF.own
    torch.manual_seed(0)
    model = WithTable(table)
    x = torch.randn(4, 6)
    compiled = csc.compile(model, example={"x": x}, cache=False, check=check)
    loss = compiled.train_step({"x": x})
    mine = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    right = model(x)
    assert type(right) is torch.Tensor
    right.backward()
    torch.testing.assert_close(loss, right.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad)
    torch.testing.assert_close(compiled.train_step({"x": x}), right.detach())


def test_a_length_is_no_key_of_a_cache() -> None:
    class ByLength(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(input_ids) * (1 + of_a_cache(input_ids.shape[1]))[:, None]
            return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    ids = torch.randint(0, 11, (2, 5))
    with pytest.raises(InputError, match=r"looks up a size of its batch by its hash.*__wrapped__") as caught:
        csc.compile(ByLength(), example={"input_ids": ids, "labels": ids}, cache=False)
    assert "test_own_changes.py" in caught.value.where
