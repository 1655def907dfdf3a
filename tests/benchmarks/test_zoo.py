"""`python -m benchmarks.coverage --all`: configs made small, rows that are kept, and the tables made of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.coverage.zoo import campaign
from benchmarks.coverage.zoo.batches import encoder
from benchmarks.coverage.zoo.names import architectures
from benchmarks.coverage.zoo.shrinking import Tokens, shrunk
from benchmarks.coverage.zoo.try_one import small
from benchmarks.judge import loss_of


def test_numbers_are_made_small_by_their_names() -> None:
    config = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 32000, "attention_dropout": 0.1, "rms_norm_eps": 1e-6, "use_cache": True, "hidden_act": "silu",
        "pad_token_id": 151643, "image_token_id": 151655, "layer_types": ["full", "full", "sliding"] * 10,
        "vision_config": {"hidden_size": 1152, "patch_size": 14, "deepstack_visual_indexes": [8, 16, 24]},
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    found = shrunk(config, Tokens())
    assert found == {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": 128, "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "use_cache": True, "hidden_act": "silu",
        "pad_token_id": 0, "image_token_id": 123, "layer_types": ["full", "sliding"],
        "vision_config": {"hidden_size": 32, "patch_size": 8, "deepstack_visual_indexes": [1]},
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
    }  # fmt: skip


def test_a_token_is_the_same_in_every_part_of_a_config() -> None:
    found = shrunk({"image_token_id": 7, "text_config": {"image_token_index": 7, "audio_token_id": 8}}, Tokens())
    assert (
        found["image_token_id"] == found["text_config"]["image_token_index"] != found["text_config"]["audio_token_id"]
    )


def test_each_class_is_there_once() -> None:
    found = architectures()
    assert {"LlamaForCausalLM", "T5ForConditionalGeneration", "LlavaForConditionalGeneration"} <= found.keys()
    assert len({(one.name) for one in found.values()}) == len(found) > 200


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlavaForConditionalGeneration", "BartForConditionalGeneration"])
def test_a_model_is_made_small_and_takes_a_batch(name: str) -> None:
    found = small(name)
    model = found.make()
    assert sum(p.numel() for p in model.parameters()) < 10**6
    assert torch.isfinite(loss_of(model(**found.entries)))
    assert (encoder(model) is None) == (name == "LlamaForCausalLM")


def row(name: str, result: str = "right", reason: str = "") -> dict[str, Any]:
    return {"name": name, "task": "", "eager": "", "ways": {"pp=2": [result, reason, []]}}


def test_rows_are_kept_and_only_those_asked_for_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    names = campaign.mixed(sorted(architectures())[:3])

    def limited(name: str, *_: Any) -> dict[str, Any]:
        made.append(name)
        return row(name, "slow" if name == names[0] and len(made) < 4 else "right")

    monkeypatch.setattr(campaign, "_limited", limited)
    rows = tmp_path / "rows.jsonl"
    campaign.run(rows, names[:2], 1, 1)
    campaign.run(rows, names, 1, 1)
    assert made == names
    assert {found["name"] for found in campaign.read(rows)} == set(names)
    campaign.run(rows, names, 1, 1, again=["slow"])
    assert made == [*names, names[0]]
    assert [campaign.kinds(found) for found in campaign.read(rows)] == [{"right"}] * 3
    assert len(rows.read_text("utf-8").splitlines()) == 3


def stuck(name: str) -> Iterator[dict[str, Any]]:
    yield row(name)
    torch.ones(1)
    while True:
        pass


def dead(name: str) -> Iterator[dict[str, Any]]:
    yield row(name)
    raise SystemExit(3)


@pytest.mark.parametrize(("work", "seconds", "kind"), [(stuck, 1, "slow"), (dead, 600, "crash")])
@pytest.mark.long_cases("stuck-1-slow")
def test_a_process_that_hangs_or_dies_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Any, seconds: float, kind: str
) -> None:
    monkeypatch.setattr(campaign, "row", work)
    campaign.run(tmp_path / "rows.jsonl", ["LlamaForCausalLM"], seconds, 64)
    (found,) = campaign.read(tmp_path / "rows.jsonl")
    assert {way: result[0] for way, result in found["ways"].items()} == {"pp=2": "right", "cp=2": kind}


def test_the_summary_counts_by_reason() -> None:
    rows = [
        row("A"),
        row("B", "refused", "model.layers.0, a.py:3: 7 heads."),
        row("C", "refused", "x, b.py:8: 9 heads."),
    ]
    rows.append(row("D") | {"eager": "ValueError"})
    text = campaign.summary(rows)
    assert "| pp=2 | 1 | 2 | 0 | 0 | 0 | 0 | 3 |" in text
    assert "4 architectures, of 3 the eager step runs" in text
    assert "- 2 refused: N heads." in text
    assert campaign.table(rows).splitlines()[2:] == [
        "| A | right | - | - |",
        "| B | refused | - | - |",
        "| C | refused | - | - |",
    ]
