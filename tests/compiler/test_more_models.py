"""Model families that csc has no code for, each with wiring that has broken a capture before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import csc
from csc.reports.verification import verify
from tests.exactness import FLOAT32
from tests.tiers import long

pytestmark = pytest.mark.slow
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "head_dim": 8,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def words(samples: int = 2, length: int = 20, images: int = 0) -> dict[str, torch.Tensor]:
    ids = 1 + (7 * torch.arange(samples)[:, None] + torch.arange(length)) % 90
    ids[:, 1 : 1 + images] = 99
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : 2 + images] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def pixels(samples: int = 2, size: int = 32) -> torch.Tensor:
    return torch.randn(samples, 3, size, size, generator=torch.Generator().manual_seed(0))


def gemma3_with_images() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Its mask is built by vmap inside a no_grad block."""
    config = hf.Gemma3Config(
        vision_config={**VISION, "vision_use_head": False},
        text_config={**TEXT, "sliding_window": 8},
        mm_tokens_per_image=4,
        image_token_id=99,
    )
    batch = words(images=4)
    batch |= {"pixel_values": pixels(), "token_type_ids": (batch["input_ids"] == 99).long()}
    return hf.Gemma3ForConditionalGeneration(config), batch


def t5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Encoder and decoder; the attention mask holds a trained bias, so attention runs another kernel under autograd."""
    config = hf.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=100,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config), words(length=12)


def mixtral() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A mixture of experts."""
    return hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT, num_local_experts=4)), words()


def vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """No tokens at all."""
    return hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=5)), {
        "pixel_values": pixels(),
        "labels": torch.tensor([1, 3]),
    }


@pytest.mark.parametrize("build", [long(gemma3_with_images), t5, long(mixtral), vit], ids=lambda build: build.__name__)
@pytest.mark.long_cases("t5")
def test_gradients_are_those_of_eager(build: Any) -> None:
    torch.manual_seed(0)
    model, batch = build()
    result = verify(csc.compile(model.train(), mesh="pp=3", example=batch))
    assert not result.params_missing and not result.params_unexpected
    assert result.loss_rel <= FLOAT32 and result.grad_rel_max <= FLOAT32


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.conv(pixel_values)).relu().mean((2, 3))
        return nn.functional.cross_entropy(self.head(features), labels)


def test_a_module_in_eval_mode_stays_in_it() -> None:
    """The remedy that the error about batch norm names."""
    torch.manual_seed(0)
    model = Normed()
    batch = {"pixel_values": pixels(4, 8), "labels": torch.arange(4)}
    with pytest.raises(csc.CscError, match=r"running_mean.*eval mode"):
        csc.compile(model, example=batch)
    model.norm.eval()
    result = verify(csc.compile(model, mesh="pp=2", example=batch, microbatches=2))
    assert result.grad_rel_max <= FLOAT32 and result.params_checked == 6
    assert model.training and not model.norm.training


def test_an_opaque_one_in_training_mode_does_as_in_eager() -> None:
    """The other remedy that the error names; statistics included."""
    torch.manual_seed(0)
    eager, batch = Normed(), {"pixel_values": pixels(4, 8), "labels": torch.arange(4)}
    model = copy.deepcopy(eager)
    csc.opaque(model.norm)
    compiled = csc.compile(model, mesh="pp=2", example=batch, cache=False)
    for _ in range(2):
        eager.zero_grad()
        model.zero_grad()
        eager(**batch).backward()
        compiled.train_step(batch)
    for (name, parameter), (_, right) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, right.grad, rtol=FLOAT32, atol=1e-8, msg=name)
    for (name, buffer), (_, kept) in zip(model.named_buffers(), eager.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, kept, rtol=FLOAT32, atol=1e-8, msg=name)


def test_one_tensor_under_two_names_is_two_inputs() -> None:
    """labels=input_ids is one object in the example; in a later batch the two may differ."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT))
    batch = words()
    again = dict(batch, labels=batch["input_ids"])
    compiled = csc.compile(model, mesh="pp=1", example=again)
    loss = compiled.train_step(batch)
    assert float(loss) == float(model(**batch).loss)
