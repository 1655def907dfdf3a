"""What csc.compose refuses: one sentence that says what is wrong, where, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as hf
from torch import nn

import csc
from csc.errors import InputError
from tests.models.composed import ENCODERS, LANGUAGE_MODELS, TEXT, composed

GOOD: dict[str, Any] = {
    "encoders": {"vision": ENCODERS["clip"]()},
    "projectors": {"vision": "mlp"},
    "language_model": LANGUAGE_MODELS["llama"](),
    "placeholders": {"vision": 99},
}
BODY = hf.LlamaModel(hf.LlamaConfig(**TEXT))
BERT = hf.BertModel(hf.BertConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2))
T5 = hf.T5ForConditionalGeneration(hf.T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2, vocab_size=100))
CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "unknown projector": ({"projectors": {"vision": "mpl"}}, "no projector 'mpl'", "'vision'", "did you mean mlp?"),
    "no projector": ({"projectors": {"vision": 7}}, "7 says no projector", "'vision'", "an nn.Module"),
    "unknown field": (
        {"projectors": {"vision": {"kind": "mlp", "depth": 3}}}, "says no projector", "'vision'", "an nn.Module",
    ),
    "factor of mlp": ({"projectors": {"vision": {"kind": "mlp", "factor": 2}}}, "is 2", "'vision'", "none with"),
    "factor 0": (
        {"projectors": {"vision": {"kind": "pixel-shuffle-mlp", "factor": 0}}}, "is 0", "'vision'", "from 1 on",
    ),
    "stacked patches": ({"projectors": {"vision": "stack-mlp"}}, "does not fit", "'vision'", "use pixel-shuffle-mlp"),
    "shuffled class token": (
        {"projectors": {"vision": "pixel-shuffle-mlp"}, "keep_prefix": True}, "class token", "'vision'", "keep_prefix",
    ),
    "token outside": ({"placeholders": {"vision": 100}}, "token 100 is outside", "'vision'", "resize_token_embeddings"),
    "negative token": ({"placeholders": {"vision": -1}}, "token -1 is outside", "'vision'", "resize_token_embeddings"),
    "token as text": ({"placeholders": {"vision": "<image>"}}, "'<image>'", "'vision'", "convert_tokens_to_ids"),
    "unknown encoder": ({"encoders": {"vision": nn.Linear(2, 2)}}, "of a Linear", "'vision'", "CLIPVisionModel"),
    "text encoder": (
        {"encoders": {"vision": BERT}}, "of a BertModel", "'vision'", "CLIPVisionModel",
    ),
    "no encoders": ({"encoders": {}}, "encoders is {}", "compose", "by modality"),
    "missing projector": ({"projectors": {"audio": "mlp"}}, "encoders has no entry 'audio'", "compose", "same names"),
    "missing placeholder": (
        {"encoders": {"vision": ENCODERS["clip"](), "audio": ENCODERS["whisper"]()},
         "projectors": {"vision": "mlp", "audio": "mlp"}},
        "placeholders has no entry 'audio'", "compose", "same names",
    ),
    "bad name": (
        {"encoders": {"a.b": ENCODERS["clip"]()}, "projectors": {"a.b": "mlp"}, "placeholders": {"a.b": 9}},
        "'a.b' cannot name", "compose", "letters",
    ),
    "one token twice": (
        {"encoders": {"vision": ENCODERS["clip"](), "audio": ENCODERS["whisper"]()},
         "projectors": {"vision": "mlp", "audio": "mlp"}, "placeholders": {"vision": 9, "audio": 9}},
        "token 9 is that of 'vision' too", "'audio'", "its own",
    ),
    "feature layer": ({"feature_layer": 3}, "hidden states -3 to 2", "'vision'", "-2 as LLaVA does"),
    "option of another": ({"feature_layer": {"audio": 1}}, "names 'audio'", "compose", "modalities are vision"),
    "no head": ({"language_model": BODY}, "takes no labels", "compose", "LlamaForCausalLM"),
    "encoder-decoder": ({"language_model": T5}, "T5ForConditionalGeneration", "compose", "LlamaForCausalLM"),
    "no language model": ({"language_model": nn.Linear(2, 2)}, "without input embeddings", "compose", "decoder-only"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_is_refused(case: str) -> None:
    change, what, where, remedy = CASES[case]
    with pytest.raises(InputError) as caught:
        csc.compose(**{**GOOD, **change})
    error = caught.value
    assert what in error.what and where in error.where and remedy in error.remedy, str(error)
    assert "\n" not in str(error)


def test_the_good_parts_are_taken() -> None:
    assert csc.compose(**GOOD).inputs == {"vision": "pixel_values"}


@pytest.mark.parametrize(
    "encoder, kind, factor, shape, what",
    [
        ("clip", "pixel-shuffle-mlp", 3, (3, 32, 32), "4 x 4 patches are no square whose side 3 divides"),
        ("dinov2", "pixel-shuffle-mlp", 2, (3, 16, 64), "2 x 8 patches are no square whose side 2 divides"),
        ("whisper", "stack-mlp", 3, (8, 32), "3 does not divide the 16 frames"),
    ],
)
def test_a_factor_that_does_not_divide(encoder: str, kind: str, factor: int, shape: tuple[int, ...], what: str) -> None:
    model = composed({"vision": encoder}, {"vision": {"kind": kind, "factor": factor}})
    with pytest.raises(InputError, match=what):
        model.tokens("vision", shape)
