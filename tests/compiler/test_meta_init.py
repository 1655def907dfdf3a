"""Models without weights: compiled to the same program, refused where weights are needed."""

from __future__ import annotations

import pytest
import torch
from csc.codegen.write import sources
from torch import nn

import csc
from benchmarks.coverage.models import CASES
from csc.errors import InputError
from csc.reports.verification import verify
from tests.tiers import long


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LLaVA", long("Qwen2-Audio")])
def test_the_program_is_that_of_the_model_with_weights(name: str) -> None:
    real, batch = CASES[name]()
    with csc.meta_init():
        fake, _ = CASES[name]()
    assert all(p.device.type == "meta" for p in fake.parameters())
    one, other = (
        csc.compile(model, mesh=csc.Mesh(pp=2, dp=2), example=[batch], microbatches=2, schedule="1f1b")
        for model in (real, fake)
    )
    assert sources(one.program, one.options) == sources(other.program, other.options)


class Tied(nn.Module):
    """A weight in two places, set before anything is a module's."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.ones(3, 3), requires_grad=False)
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.one.weight = self.other.weight = weight
        self.register_buffer("table", torch.arange(3.0))
        self.register_parameter("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.other(self.one(x)) + self.table).pow(2).mean()


def test_parameters_without_data_stay_what_they_were() -> None:
    with csc.meta_init():
        model = Tied()
    assert model.one.weight is model.other.weight and not model.one.weight.requires_grad
    assert model.table.tolist() == [0.0, 1.0, 2.0] and model.absent is None
    assert nn.Linear(2, 2).weight.device.type == "cpu"  # outside, all is as ever
    before = dict(model.named_parameters())
    compiled = csc.compile(model, example={"x": torch.ones(2, 3)})
    assert [p.aliases for p in compiled.program.parameters if p.name == "one.weight"] == [("other.weight",)]
    assert all(before[name] is p for name, p in model.named_parameters())  # the trace leaves them


def test_what_needs_weights_says_so() -> None:
    with csc.meta_init():
        model = Tied()
    compiled = csc.compile(model, example={"x": torch.ones(2, 3)})
    with pytest.raises(InputError, match=r"'one\.weight' has no data, and verify runs the model"):
        verify(compiled)
    with torch.device("meta"):
        empty = Tied()
    with pytest.raises(InputError, match=r"the buffer 'table' is on the meta device.*csc\.meta_init"):
        csc.compile(empty, example={"x": torch.ones(2, 3)})
