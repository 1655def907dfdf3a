"""Texts, pictures and sound to batches that the model takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import csc
from csc.composition import ComposedModel, Processor
from csc.errors import InputError
from tests.composition.tools import feature_extractor, image_processor, picture, tokenizer, tone
from tests.models.composed import composed, valm

IMAGE, AUDIO, IGNORED = 99, 98, -100


def processor_of(model: ComposedModel, **options: Any) -> Processor:
    tools = {"vision": image_processor(), "audio": feature_extractor()}
    return model.processor(tokenizer(), {name: tools[name] for name in model.modalities}, **options)


def test_marks_become_the_tokens_of_their_items() -> None:
    model = valm()  # 4 x 4 patches, shuffled to 4 tokens; 16 frames, stacked to 8
    batch = processor_of(model)(
        ["<image> what is it <audio>", "hear <audio> <image>"],
        answers=["cat", "dog"],
        vision=[picture(0), [picture(1)]],
        audio=[tone(20), tone(300, 5000)],
    )
    assert batch["input_ids"].tolist() == [
        [IMAGE] * 4 + [4, 5, 6] + [AUDIO] * 8 + [7, 2],
        [9] + [AUDIO] * 8 + [IMAGE] * 4 + [8, 2, 0, 0],
    ]
    assert batch["attention_mask"].tolist() == [[1] * 17, [1] * 15 + [0, 0]]
    assert batch["labels"].tolist() == [
        [IGNORED] * 15 + [7, 2],
        [IGNORED] * 13 + [8, 2, IGNORED, IGNORED],
    ]
    assert torch.equal(batch["pixel_values"][1], image_processor()(picture(1), return_tensors="pt")["pixel_values"][0])
    short = feature_extractor()(tone(300, 5000), sampling_rate=16000, return_tensors="pt")["input_features"]
    assert torch.equal(batch["input_features"][1], short[0])
    assert torch.isfinite(model(**batch).loss)


def test_labels_of_the_whole_text() -> None:
    processor = processor_of(composed({"vision": "clip"}, {"vision": "pixel-shuffle-mlp"}))
    without = processor(["what <image> is it"], vision=[picture(0)])
    assert without["labels"].tolist() == [[4] + [IGNORED] * 4 + [5, 6]]
    whole = processor(["what <image>"], answers=["cat"], mask_prompt=False, vision=[picture(0)], length=8)
    assert whole["labels"].tolist() == [[4] + [IGNORED] * 4 + [7, 2, IGNORED]]


def test_samples_of_one_two_and_no_pictures() -> None:
    model = composed({"vision": "clip"}, {"vision": "pixel-shuffle-mlp"})
    batch = processor_of(model)(
        ["<image> <image>", "cat", "<image> dog"], vision=[[picture(0), picture(1)], None, picture(2)]
    )
    assert batch["pixel_values"].shape == (3, 2, 3, 32, 32)
    empty = (batch["pixel_values"] == 0).flatten(2).all(2)
    assert empty.tolist() == [[False, False], [True, True], [False, True]]
    assert torch.isfinite(model(**batch).loss)
    assert "pixel_values" not in processor_of(model)(["cat", "dog"])


@pytest.mark.slow
def test_slots_give_every_batch_the_same_entries() -> None:
    """So that one compiled program serves batches with and without pictures."""
    model = composed({"vision": "clip"}, {"vision": "pixel-shuffle-mlp"})
    processor = processor_of(model, slots={"vision": 1})
    some = processor(["<image> what is it", "cat"], ["dog", "cat"], vision=[picture(0), None], length=12)
    none = processor(["cat", "dog is it"], ["dog", "cat"], length=12)
    assert none["pixel_values"].shape == some["pixel_values"].shape == (2, 3, 32, 32)
    assert not none["pixel_values"].any()
    compiled = csc.compile(model, mesh="pp=2", example=some, freeze=["vision_encoder"])
    for batch in (some, none):
        assert abs(float(compiled.train_step(batch)) - float(model.train()(**batch).loss.detach())) < 1e-6
    with pytest.raises(InputError, match="a sample has 2 items of 'vision', and slots has room for 1"):
        processor(["<image> <image>"], vision=[[picture(0), picture(1)]])


def wrong(what: str, *texts: str, **arguments: Any) -> None:
    processor = processor_of(composed({"vision": "clip"}, {"vision": "mlp"}))
    with pytest.raises(InputError) as caught:
        processor(list(texts), **arguments)
    assert what in str(caught.value) and caught.value.remedy


def test_what_does_not_fit_is_refused() -> None:
    wrong("sample 1 has 0 items of 'vision', and 1 marks '<image>'", "cat", "<image>")
    wrong("sample 0 has 1 items of 'vision', and 0 marks '<image>'", "cat", vision=[picture(0)])
    wrong("sample 0 has 0 items of 'vision', and 1 marks '<image>'", "cat", answers=["<image>"])
    wrong("2 entries of 'vision' for 1 texts", "cat", vision=[None, None])
    wrong("1 texts and 2 answers", "cat", answers=["dog", "dog"])
    wrong("no modality 'audio'", "cat", audio=[tone(10)])
    wrong("sample 0 has 17 tokens, and length is 9", "<image> cat", vision=[picture(0)], length=9)


def test_a_processor_needs_all_its_parts() -> None:
    model = valm()
    with pytest.raises(InputError, match="no preprocessor for 'audio'"):
        model.processor(tokenizer(), {"vision": image_processor()})
    with pytest.raises(InputError, match="no modality 'sound'"):
        model.processor(tokenizer(), {"vision": image_processor(), "sound": feature_extractor()})
    bare = tokenizer()
    bare.pad_token = None
    with pytest.raises(InputError, match="no padding token"):
        model.processor(bare, {"vision": image_processor(), "audio": feature_extractor()})
