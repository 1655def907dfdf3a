"""Tensor parallelism of layers that call a user's own operators, of which csc knows what they say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import InputError
from tests.compiler.check_gradients import differing
from tests.tiers import in_turn

WIDTH, VOCABULARY = 16, 50


@torch.library.custom_op("own_rules::gate", mutates_args=())
def gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


@torch.library.custom_op("own_rules::tagged_gate", mutates_args=(), tags=(torch.Tag.pointwise,))
def tagged_gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


@torch.library.custom_op("own_rules::mixed", mutates_args=())
def mixed(x: torch.Tensor) -> torch.Tensor:
    """Features with their neighbours: wrong on a shard."""
    return x + x.roll(1, -1)


def _keep(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _of_gate(context: Any, gradient: torch.Tensor) -> torch.Tensor:
    (x,) = context.saved_tensors
    chance = torch.sigmoid(x)
    return gradient * chance * (1 + x * (1 - chance))


for operator in (gate, tagged_gate, mixed):
    operator.register_fake(torch.empty_like)
for operator in (gate, tagged_gate):
    operator.register_autograd(_of_gate, setup_context=_keep)
mixed.register_autograd(lambda _, gradient: gradient + gradient.roll(-1, -1), setup_context=_keep)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(hidden).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention, and two linear layers with an operator between."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.norm, self.between = nn.LayerNorm(WIDTH), between

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(hidden)
        return hidden + self.down(self.between(self.up(self.norm(hidden))))


class Model(nn.Module):
    """In front of the layers nothing can be divided, so that an operator there is none's business."""

    def __init__(self, between: Any, first: Any = F.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(each) for each in (F.gelu, between, F.gelu))
        self.first = first

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.embed(ids))
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def batch() -> dict[str, torch.Tensor]:
    ids = 7 * torch.arange(24).view(2, 12) % VOCABULARY
    return {"ids": ids, "labels": (ids + 1) % VOCABULARY}


def divided(model: nn.Module, **options: Any) -> set[str]:
    """The parameters that ranks of tp=2 divide."""
    compiled = csc.compile(model, mesh="tp=2", example=batch(), cache=False, check=False, **options)
    return {one.name for one in compiled.program.parameters if one.boxes}


ALL = {f"layers.{layer}.{name}.weight" for layer in range(3) for name in ("attention.project", "up", "down")}


@pytest.mark.parametrize("operator", [gate, mixed])
def test_a_call_without_a_rule_is_an_error(operator: Any) -> None:
    name = f"own_rules::{operator._opoverload._schema.name.split('::')[1]}"
    with pytest.raises(InputError) as raised:
        divided(Model(operator))
    said = str(raised.value)
    for part in (
        "tp=2 cannot divide features of up.weight in layers.1", f"{name} at layers.1, {Path(__file__).name}:",
        "has no rule", "tags=(torch.Tag.pointwise,)", f"replicate=['{name}']", "tp=1",
    ):  # fmt: skip
        assert part in said, part


def test_one_that_says_it_is_pointwise_is_divided() -> None:
    assert divided(Model(tagged_gate)) >= ALL
    assert differing(Model(tagged_gate), batch(), mesh="tp=2") == {}


@pytest.mark.parametrize(("operator", "more"), in_turn([gate, mixed], [{}, {"sequence_parallel": True}]))
@pytest.mark.long_cases("operator3-more3")
def test_one_that_is_replicated_leaves_the_rest_divided(operator: Any, more: dict[str, Any]) -> None:
    options = {"replicate": [operator._opoverload._schema.name], **more}
    assert divided(Model(operator), **options) >= ALL - {"layers.1.up.weight", "layers.1.down.weight"}
    assert not divided(Model(operator), **options) & {"layers.1.up.weight", "layers.1.down.weight"}
    assert differing(Model(operator), batch(), mesh="tp=2", **options) == {}


def test_a_divisible_operator_can_be_replicated_too() -> None:
    left = divided(Model(F.gelu), replicate=["aten::gelu"])
    assert ALL & left == {f"layers.{layer}.attention.project.weight" for layer in range(3)}


def slopes(x: torch.Tensor) -> torch.Tensor:
    return F.prelu(x, torch.full((1,), 0.25))


def test_nobody_is_told_to_register_operators_of_torch() -> None:
    with pytest.raises(InputError, match=r"aten::renorm at layers.1.* has no rule. replicate=\['aten::renorm'\]"):
        divided(Model(lambda x: torch.renorm(x, 2, -1, 1.0)))


def test_one_slope_for_all_features() -> None:
    assert divided(Model(slopes)) >= ALL
    assert differing(Model(slopes), batch(), mesh="tp=2") == {}


@pytest.mark.parametrize(("dim", "whole"), [(0, True), (1, False), (None, True)])
@pytest.mark.long_cases("1-False", "0-True")
def test_norms_of_weights(dim: int | None, whole: bool) -> None:
    """Features are divided where each has a length of its own, in both weights that have them."""
    model = Model(F.gelu)
    for layer in model.layers:
        torch.nn.utils.parametrizations.weight_norm(layer.up, dim=None if dim is None else 0)
        torch.nn.utils.parametrizations.weight_norm(layer.down, dim=dim)
    features = {name for name in divided(model) if "up.parametrizations" in name or "down.parametrizations" in name}
    assert bool(features) is not whole
    assert differing(model, batch(), mesh="tp=2") == {}


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.rand(x.shape[-1])


def test_what_csc_draws_itself_is_whole() -> None:
    assert not divided(Model(noisy)) & {"layers.1.up.weight", "layers.1.down.weight"}


def test_without_anything_to_divide_beside_it_nothing_is_asked() -> None:
    """It works on what layers hand each other, which is whole on every rank."""
    assert divided(Model(F.gelu, first=mixed)) >= ALL
    assert differing(Model(F.gelu, first=mixed), batch(), mesh="tp=2") == {}


def test_options_of_one_name_are_two_programs() -> None:
    model = Model(F.gelu)
    compiled = csc.compile(model, mesh="tp=2", example=batch(), cache=False, check=False)
    other = compiled.with_options(replicate=["aten::gelu"])
    assert sum(bool(one.boxes) for one in other.program.parameters) < sum(
        bool(one.boxes) for one in compiled.program.parameters
    )
