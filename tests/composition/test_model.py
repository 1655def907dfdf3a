"""The composed model in eager mode: against Hugging Face's LLaVA, against brute force, and its own check of batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import csc
from csc.composition.encoders import space_to_depth, stacked
from csc.composition.model import merge
from csc.errors import InputError
from tests.exactness import FLOAT32
from tests.models import hf
from tests.models.composed import ENCODERS, PLACEHOLDERS, Resampler, batch, composed, items, valm


def test_it_is_llava_where_the_parts_are_llavas() -> None:
    """Same parts, layer -2 without the class token, two matrices with a GELU: loss and every gradient bit for bit."""
    llava = hf.llava()
    model = csc.compose(
        encoders={"vision": llava.model.vision_tower},
        projectors={"vision": "mlp"},
        language_model=hf.LlamaForCausalLM(hf.llama_config()),
        placeholders={"vision": hf.IMAGE_TOKEN},
        feature_layer=-2,
    )
    model.language_model.model.load_state_dict(llava.model.language_model.state_dict())
    model.language_model.lm_head.load_state_dict(llava.lm_head.state_dict())
    model.vision_projector.load_state_dict(llava.model.multi_modal_projector.state_dict())
    given = hf.llava_batch(3)
    expected = llava(**given, use_cache=False).loss
    expected.backward()
    theirs = {name: p.grad for name, p in llava.named_parameters()}
    towers = {name: p.grad for name, p in llava.model.vision_tower.named_parameters()}
    llava.zero_grad()
    loss = model(**given).loss
    loss.backward()
    assert loss.item() == expected.item()
    for name, parameter in model.named_parameters():
        if name.startswith("vision_encoder."):
            wanted = towers[name.removeprefix("vision_encoder.")]
        else:
            theirs_name = name.replace("vision_projector", "model.multi_modal_projector")
            theirs_name = theirs_name.replace("language_model.model", "model.language_model")
            wanted = theirs[theirs_name.replace("language_model.lm_head", "lm_head")]
        assert (parameter.grad is None) == (wanted is None), name
        assert wanted is None or torch.equal(parameter.grad, wanted), name


def test_merge_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    at = torch.rand(4, 12, generator=generator) < 0.4
    at[2] = False
    embeddings, features = torch.randn(4, 12, 3, generator=generator), torch.randn(4, 12, 3, generator=generator)
    expected = embeddings.clone()
    for row in range(4):
        for rank, column in enumerate(at[row].nonzero().flatten().tolist()):
            expected[row, column] = features[row, rank]
    assert torch.equal(merge(embeddings, at, features), expected)


def test_reductions_put_neighbours_together() -> None:
    grid = torch.arange(2 * 36 * 2).float().view(2, 6, 6, 2)
    shuffled = space_to_depth(grid.view(2, 36, 2), 3)
    for row in range(2):
        for column in range(2):
            square = grid[1, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
            assert torch.equal(shuffled[1, 2 * row + column], square.flatten())
    frames = torch.arange(2 * 6 * 2).float().view(2, 6, 2)
    assert torch.equal(stacked(frames, 3)[1, 1], frames[1, 3:6].flatten())


@pytest.mark.parametrize("kind, tokens", [("clip", 16), ("siglip", 16), ("dinov2", 16), ("vit", 16), ("whisper", 16)])
def test_tokens_are_those_that_the_encoder_makes(kind: str, tokens: int) -> None:
    model = composed({"vision": kind}, {"vision": "linear"})
    given = items(model, "vision", 2)
    assert model.tokens("vision", given.shape[1:]) == tokens
    assert model.features("vision", given).shape == (2, tokens, 32)


@pytest.mark.parametrize("kind, extra", [("clip", 1), ("siglip", 0), ("dinov2", 1), ("vit", 1), ("whisper", 0)])
def test_the_class_token_can_stay(kind: str, extra: int) -> None:
    model = composed({"vision": kind}, {"vision": "linear"}, keep_prefix=True)
    given = items(model, "vision", 2)
    assert model.tokens("vision", given.shape[1:]) == 16 + extra
    without = composed({"vision": kind}, {"vision": "linear"}).features("vision", given)
    largest = FLOAT32 * float(without.detach().abs().max())  # one row more or less is multiplied by another kernel
    torch.testing.assert_close(model.features("vision", given)[:, extra:], without, rtol=0, atol=largest)


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_feature_layer_is_the_hidden_state_of_that_number(kind: str) -> None:
    model = composed({"vision": kind}, {"vision": "linear"}, feature_layer={"vision": -2})
    given = items(model, "vision", 1)
    prefix = model.modalities["vision"].kind.prefix
    state = model.vision_encoder(given, output_hidden_states=True).hidden_states[-2][:, prefix:]
    assert torch.equal(model.features("vision", given), model.vision_projector(state))


def test_dinov2_takes_pictures_of_other_sizes() -> None:
    model = composed({"vision": "dinov2"}, {"vision": "pixel-shuffle-mlp"})
    assert model.tokens("vision", (3, 48, 48)) == 9
    assert model.features("vision", torch.randn(2, 3, 48, 48)).shape == (2, 9, 32)


def test_two_encoders_of_one_keyword_have_entries_of_their_own() -> None:
    model = composed({"vision": "clip", "ocr": "vit", "audio": "whisper"}, dict.fromkeys(PLACEHOLDERS, "linear"))
    assert model.inputs == {
        "vision": "vision_pixel_values",
        "ocr": "ocr_pixel_values",
        "audio": "input_features",
    }
    assert torch.isfinite(model(**batch(model)).loss)


def test_every_sample_gets_its_own_items() -> None:
    """Two slots: what a sample's loss is does not depend on the other samples, and does on each of its items."""
    model = valm()
    given = batch(model, samples=2, slots=2)
    given["attention_mask"] = torch.ones_like(given["attention_mask"])
    both = model(**given).logits
    alone = model(**{name: tensor[1:] for name, tensor in given.items()}).logits
    assert torch.allclose(both[1:], alone, atol=1e-5)
    for keyword in model.inputs.values():
        other = {**given, keyword: given[keyword].clone()}
        other[keyword][1, 1] += 1.0
        changed = model(**other).logits
        assert torch.equal(changed[0], both[0]) and not torch.allclose(changed[1], both[1], atol=1e-3)


def test_a_sample_may_have_fewer_items_than_slots() -> None:
    """The features of an empty slot are used nowhere."""
    model = composed({"vision": "clip"}, {"vision": "linear"})
    given = batch(model, samples=2, slots=2)
    given["pixel_values"][0, 1] = 0
    given["input_ids"][0, 17:33] = 7  # the places of the second picture
    short = model(**given).logits[0]
    one = {name: tensor[:1] for name, tensor in given.items()}
    one["pixel_values"] = one["pixel_values"][:, :1]
    assert torch.allclose(short, model(**one).logits[0], atol=1e-5)


def test_without_pictures_it_is_the_language_model() -> None:
    model = valm()
    given = {name: tensor for name, tensor in batch(model).items() if name not in model.inputs.values()}
    given["input_ids"] = given["input_ids"].clamp(max=90)
    assert torch.equal(model(**given).loss, model.language_model(**given).loss)
    assert model(input_ids=given["input_ids"]).loss is None


def test_features_of_another_dtype_than_the_language_model() -> None:
    model = csc.compose(
        encoders={"vision": ENCODERS["clip"]()},
        projectors={"vision": "mlp"},
        language_model=hf.LlamaForCausalLM(hf.llama_config()).bfloat16(),
        placeholders={"vision": 99},
    )
    assert model.vision_projector.linear_1.weight.dtype == torch.bfloat16
    assert model(**batch(model)).logits.dtype == torch.bfloat16


# --- batches that do not fit -------------------------------------------------------------------------------------


def broken(change: Any, slots: int | None = None) -> str:
    model = composed({"vision": "clip"}, {"vision": "linear"})
    given = batch(model, slots=slots)
    change(given)
    with pytest.raises(InputError) as caught:
        model(**given)
    with pytest.raises(InputError) as again:
        model.check_batch(given)
    assert str(caught.value) == str(again.value)
    return str(caught.value)


def test_too_few_placeholders_name_the_sample() -> None:
    said = broken(lambda b: b["input_ids"][1, 3:4].fill_(7))
    assert "sample 1 needs 16 placeholders for 'vision' (1 x 16 tokens), and has 15" in said


def test_too_many_placeholders_name_the_sample() -> None:
    said = broken(lambda b: b["input_ids"][0, -1:].fill_(99))
    assert "sample 0 needs 16 placeholders for 'vision' (1 x 16 tokens), and has 17" in said


def test_a_picture_without_placeholders_is_no_empty_slot() -> None:
    def change(given: dict[str, torch.Tensor]) -> None:
        given["input_ids"][1, 17:33] = 7

    assert "sample 1 needs 32 placeholders for 'vision' (2 x 16 tokens), and has 16" in broken(change, slots=2)


def test_placeholders_without_pictures() -> None:
    assert "sample 0 has 16 placeholders for 'vision', and the batch has no 'pixel_values'" in broken(
        lambda b: b.pop("pixel_values")
    )


def test_pictures_of_another_size() -> None:
    said = broken(lambda b: b.update(pixel_values=torch.zeros(2, 3, 24, 24)))
    assert "(samples, 3, 32, 32) or (samples, slots, 3, 32, 32) was expected" in said


def test_rows_that_differ() -> None:
    said = broken(lambda b: b.update(pixel_values=torch.zeros(3, 3, 32, 32)))
    assert "pixel_values has 3 rows and input_ids 2" in said


def test_an_unknown_entry() -> None:
    assert "'pixel_value'. did you mean pixel_values? The model takes input_ids," in broken(
        lambda b: b.update(pixel_value=b.pop("pixel_values"))
    )


def test_a_projector_that_changes_the_number_of_tokens_in_silence() -> None:
    own = Resampler()
    model = composed({"vision": "clip"}, {"vision": own})
    assert model.tokens("vision", (3, 32, 32)) == 8
    assert torch.isfinite(model(**batch(model)).loss)

    class Silent(nn.Module):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return own(features)

    model = composed({"vision": "clip"}, {"vision": Silent()})
    with pytest.raises(InputError, match=r"it makes \[2, 8, 32\] of features \[2, 16, 24\]; \[items, 16, 32\] was"):
        model(**batch(model))
