"""torch.utils.checkpoint in a model: gradients are eager's, also of the reentrant one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from transformers import LlamaForCausalLM

import csc
from tests.compiler.eager import WIDTH, Applying, Stack, assert_as_eager, batch, stack
from tests.models import hf
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        yield


def reentrant(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    return checkpoint(lambda y: torch.tanh(y) * layer.scale, x, use_reentrant=True)


class Checkpointed(nn.Module):
    """All of it in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: y + torch.tanh(self.linear(y)), x, use_reentrant=True)


def checkpointed() -> Stack:
    torch.manual_seed(0)
    return Stack([Checkpointed() for _ in range(3)])


@pytest.mark.slow
@pytest.mark.parametrize("again", [long(True), False])
def test_llama(again: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(hf.llama_config(layers=3))
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": again})
    ids = (torch.arange(16).view(2, 8) * 3 + 1) % hf.VOCABULARY
    assert_as_eager(model, {"input_ids": ids, "labels": ids})


def test_in_a_layer() -> None:
    assert_as_eager(stack(reentrant), batch())


def test_in_sequence() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.parts, 2, x, use_reentrant=True)

    torch.manual_seed(0)
    assert_as_eager(Stack([Sequence()]), batch())


@pytest.mark.parametrize("frozen", [[], ["layers.0."], ["embed.", "layers."]])
def test_frozen_as_eager(frozen: list[str]) -> None:
    assert_as_eager(checkpointed(), batch(), frozen=frozen, meshes=["pp=2"])


def test_nothing_before_trains() -> None:
    """Eager gives the layers no gradient then, and warns; csc could, and would not train what eager does."""
    model = checkpointed()
    with pytest.raises(csc.InputError, match=r"gives none to 'layers\.0\.linear\.bias' inside it") as caught:
        csc.compile(model, example=batch(), cache=False, freeze=["embed.*"])
    assert "test_checkpoints.py" in caught.value.where


def test_inputs_that_ask_for_a_gradient() -> None:
    """As enable_input_require_grads() does."""
    model = checkpointed()
    model.embed.register_forward_hook(lambda module, given, result: result.requires_grad_(True))
    assert_as_eager(model, batch(), frozen=["embed."], meshes=["pp=2"])
