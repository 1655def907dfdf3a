"""Values that decide: a capture serves all with which the model's code does the same, and no other."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import CscError
from csc.reports.verification import verify
from tests.exactness import FLOAT32
from tests.tiers import long

WORDS, WIDTH = 40, 8
Batch = dict[str, torch.Tensor]


class Halved(torch.autograd.Function):
    """A call that nobody sees."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss / 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


class Deciding(nn.Module):
    """Rows of several things, `counts` of each, whose numbers decide what is done to them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.row, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WORDS)
        self.scales = nn.ParameterList(torch.full((WIDTH,), 0.5 + place) for place in range(8))
        self.shifts = [torch.full((WIDTH,), 0.1 * place) for place in range(8)]
        self.end = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, labels: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        hidden = self.row(rows)
        numbers = counts.tolist()
        if self.kind == "moved":
            hidden = torch.cat(list(reversed(torch.split(hidden, numbers))))
        elif self.kind == "ended":  # a learned row in the place of each one's first
            parts = [torch.cat((self.end[None], part[1:])) for part in torch.split(hidden, numbers)]
            hidden = torch.cat(parts)
        elif self.kind == "unused":
            torch.tensor([3 * number for number in numbers])
        elif self.kind == "branch":
            hidden = hidden * 2 if numbers[0] > 2 else hidden + 1
        elif self.kind == "detached":
            with torch.set_grad_enabled(numbers[0] > 2):
                more = self.row(rows)
            hidden = hidden + more
        elif self.kind == "number":
            hidden = hidden * numbers[0]
        elif self.kind == "sum":  # which is a size as well
            hidden = hidden / sum(numbers)
        elif self.kind == "size":
            hidden = hidden / hidden.shape[0] + (numbers[0] > 100)
        elif self.kind == "parameter":
            hidden = hidden * self.scales[numbers[0]] + 0.1 * sum(self.scales)
        elif self.kind == "tensor":
            hidden = hidden + self.shifts[numbers[0]]
        elif self.kind == "edited":  # a part is written to, and another one's whole after it was joined
            parts = [part.clone() for part in torch.split(hidden, numbers)]
            parts[0][1] = self.end
            hidden = torch.cat(parts)
        elif self.kind == "overwritten":
            whole = hidden.clone()
            hidden = torch.cat(torch.split(whole, numbers)[::-1])
            whole *= 0
        elif self.kind == "increased":
            hidden = hidden.clone()
            hidden += numbers[0]
        elif self.kind == "upstream":  # of pieces whose sizes only tokens tell
            sizes = torch.stack([(labels < 3).sum(), (labels >= 3).sum()]).tolist()
            parts = torch.split((hidden * numbers[0])[:, None], sizes)
            hidden = torch.cat([part.reshape(-1, WIDTH) for part in parts])
        elif self.kind == "unknown":  # a known value, to which something is written that only tokens tell
            counts = counts.clone()
            first = counts[:1]
            counts |= (labels > 2).sum()
            hidden = hidden * first.tolist()[0]
        elif self.kind == "written":
            hidden = hidden.clone()
            hidden[: numbers[0]] = 0
        elif self.kind == "unseen":
            return Halved.apply(F.cross_entropy(self.head(hidden.tanh() * numbers[0]), labels))
        return F.cross_entropy(self.head(hidden.tanh()), labels)


def batch(*counts: int) -> Batch:
    rows = torch.sin(torch.arange(sum(counts) * 3.0)).view(-1, 3)
    return {"labels": torch.arange(sum(counts)) % WORDS, "rows": rows, "counts": torch.tensor(counts)}


def close(compiled: csc.CompiledModel, given: Batch) -> None:
    result = verify(compiled, given)
    assert result.params_missing == () and result.params_unexpected == ()
    assert result.loss_rel <= FLOAT32 and result.grad_rel_max <= FLOAT32


def captures(compiled: csc.CompiledModel) -> int:
    return len(compiled.compiler.captures)


BATCHES = ((2, 3), (3, 2), (2, 4), (4, 2, 5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        ("moved", 1), long("ended", 1), ("unused", 1), long("size", 1), ("overwritten", 1), ("branch", 2),
        long("detached", 2), ("number", 3), long("sum", 3), ("parameter", 3), long("tensor", 3), ("written", 3),
        long("upstream", 3), ("unseen", 3), ("edited", 4), long("increased", 3),
    ],
)  # fmt: skip
@pytest.mark.long_cases("edited-4", "number-3", "unseen-3", "parameter-3")
def test_a_capture_serves_values_with_which_the_code_does_the_same(kind: str, needed: int) -> None:
    torch.manual_seed(0)
    compiled = csc.compile(Deciding(kind), mesh="pp=1", example=batch(*BATCHES[0]))
    for counts in BATCHES:
        close(compiled, batch(*counts))
    assert captures(compiled) == needed


def test_a_value_that_something_unknown_is_written_to_is_asked_of_the_batch() -> None:
    """What is written is of tokens: the batch alone decides all the same."""
    compiled = csc.compile(Deciding("unknown"), mesh="pp=1", example=batch(2, 3))
    for counts in BATCHES[:3]:
        close(compiled, batch(*counts))
    other = batch(2, 3)
    other["labels"] = torch.tensor([1, 5, 7, 8, 9])
    close(compiled, other)


def test_what_another_process_knows_takes_nothing_away() -> None:
    compiled = csc.compile(Deciding("branch"), mesh="pp=1", example=batch(2, 3))
    compiled.prepare()
    others = compiled.compiler.guards.copy()
    compiled.train_step(batch(4, 3))
    compiled.compiler.adopt(others)
    compiled.train_step(batch(5, 3))
    assert captures(compiled) == 2 and sum(one.calls is not None for one in compiled.compiler.guards.captures) == 2


def test_the_code_runs_once_for_values_that_come_again() -> None:
    class Counting(Deciding):
        calls = 0

        def forward(self, labels: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            return super().forward(labels, rows, counts)

    compiled = csc.compile(Counting("moved"), mesh="pp=1", example=batch(2, 3))
    compiled.train_step(batch(3, 4))
    before = Counting.calls
    compiled.train_step(batch(3, 4))
    assert Counting.calls == before
    compiled.train_step(batch(4, 3))
    assert Counting.calls == before + 1


@pytest.mark.slow
def test_code_that_does_not_run_without_data_is_traced_again() -> None:
    class Exact(Deciding):
        def forward(self, labels: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            if type(rows).__name__ == "FakeTensor" and not torch.compiler.is_exporting():
                raise RuntimeError("not without data")
            return super().forward(labels, rows, counts)

    compiled = csc.compile(Exact("moved"), mesh="pp=1", example=batch(2, 3))
    for counts in BATCHES[:2]:
        close(compiled, batch(*counts))


def test_where_row_numbers_cannot_be_traced_each_batch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("csc.capture.capture")
    own = module.export

    def without_rows(*given: Any) -> Any:
        if given[5]:
            raise CscError("rows have no numbers here", "model", "none")
        return own(*given)

    monkeypatch.setattr(module, "export", without_rows)
    compiled = csc.compile(Deciding("ended"), mesh="pp=1", example=batch(2, 3))
    for counts in BATCHES[:2]:
        close(compiled, batch(*counts))
    assert captures(compiled) == 2


def test_the_model_is_as_it_was_after_a_replay() -> None:
    model = Deciding("moved").eval()
    compiled = csc.compile(model, mesh="pp=1", example=batch(2, 3))
    names, call = [name for name, _ in model.named_parameters()], nn.Module.__call__
    compiled.train_step(batch(4, 3))
    assert [name for name, _ in model.named_parameters()] == names
    assert not model.training and nn.Module.__call__ is call and not torch.compiler.is_compiling()
