"""csc.compose: checks what is put together, and builds what is said by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from csc.composition import encoders as known
from csc.composition.encoders import REDUCING, Modality, ProjectorSpec, build, keywords, projector_spec
from csc.composition.model import TEXT_INPUTS, ComposedModel
from csc.composition.towers import Tower
from csc.errors import InputError


def compose(
    *,
    encoders: Mapping[str, nn.Module | Tower],
    projectors: Mapping[str, str | Mapping[str, Any] | nn.Module],
    language_model: nn.Module,
    placeholders: Mapping[str, int],
    feature_layer: int | Mapping[str, int | None] | None = None,
    keep_prefix: bool | Mapping[str, bool] = False,
) -> ComposedModel:
    """One multimodal LLM out of unimodal models, which stay as they are and keep their weights.

    Args:
        encoders: By modality (a name of your choice): CLIPVisionModel, SiglipVisionModel, Dinov2Model, ViTModel, a
            WhisperEncoder, a model of timm or a TimmWrapperModel; any other nn.Module as a csc.composition.Tower.
        projectors: For each "linear", "mlp", "pixel-shuffle-mlp", "stack-mlp", {"kind": ..., "factor": r}, or an
            nn.Module of (items, tokens, width) -> (items, tokens, hidden).
        language_model: A decoder-only ...ForCausalLM (Llama, Qwen2, Qwen3, Mistral, Gemma, Gemma 3 text were tried).
        placeholders: For each modality the token id whose places in input_ids its features take.
        feature_layer: None: the encoder's last hidden state; a number: hidden_states[number], -2 as LLaVA has it. For
            all modalities, or by modality.
        keep_prefix: Also keep the class token of CLIP, ViT and DINOv2. For all modalities, or by modality.

    Returns:
        An nn.Module that takes a batch as its processor makes it, and returns the loss.

    Raises:
        InputError: Something does not fit together.
    """
    _check_names(encoders, projectors, placeholders)
    embedding = _input_embedding(language_model)
    vocabulary, hidden = embedding.weight.shape
    kinds = {name: known.kind_of(name, encoder) for name, encoder in encoders.items()}
    _check_placeholders(placeholders, vocabulary)
    modalities, modules = [], {}
    for name, keyword in keywords(kinds).items():
        projector, layer = projectors[name], _for_modality("feature_layer", feature_layer, name, kinds)
        prefix = _for_modality("keep_prefix", keep_prefix, name, kinds) or False
        spec = None if isinstance(projector, nn.Module) else projector_spec(name, projector)
        known.check_layer(name, encoders[name], kinds[name], layer)
        _check_reduction(name, kinds[name], spec, prefix)
        if isinstance(projector, nn.Module):
            modules[name] = projector
        else:
            assert spec is not None
            modules[name] = build(spec, known.width(encoders[name], kinds[name]), hidden).to(
                embedding.weight.device, embedding.weight.dtype
            )
        modalities.append(Modality(name, kinds[name], keyword, placeholders[name], spec, layer, prefix))
    encoder_modules = {
        name: encoder.module if isinstance(encoder, Tower) else encoder for name, encoder in encoders.items()
    }
    return ComposedModel(language_model, modalities, encoder_modules, modules)


def _check_names(encoders: Any, projectors: Any, placeholders: Any) -> None:
    for option, value in (("encoders", encoders), ("projectors", projectors), ("placeholders", placeholders)):
        if not isinstance(value, Mapping) or not value:
            raise InputError(f"{option} is {value!r}", "compose", f'give {option} by modality: {{"vision": ...}}')
    names = {*encoders, *projectors, *placeholders}
    for name in sorted(names, key=str):
        if not isinstance(name, str) or not name.isidentifier():
            raise InputError(f"{name!r} cannot name a modality", "compose", "names become attributes: use letters")
        for option, value in (("encoders", encoders), ("projectors", projectors), ("placeholders", placeholders)):
            if name not in value:
                raise InputError(
                    f"{option} has no entry {name!r}",
                    "compose",
                    "every modality needs an encoder, a projector and a placeholder; give all three the same names",
                )


def _input_embedding(language_model: Any) -> Any:
    """The LLM's input embedding, or InputError for a module that cannot be the LLM."""
    kind = type(language_model).__name__
    remedy = "pass a decoder-only model with a language modelling head, for example LlamaForCausalLM"
    if not callable(getattr(language_model, "get_input_embeddings", None)):
        raise InputError(f"language_model is a {kind} without input embeddings", "compose", remedy)
    takes = inspect.signature(language_model.forward).parameters
    missing = [name for name in ("inputs_embeds", *TEXT_INPUTS[1:]) if name not in takes]
    if missing or getattr(getattr(language_model, "config", None), "is_encoder_decoder", False):
        why = f"its forward takes no {missing[0]}" if missing else "it has an encoder of its own"
        raise InputError(f"language_model is a {kind}, and {why}", "compose", remedy)
    return language_model.get_input_embeddings()


def _check_placeholders(placeholders: Mapping[str, Any], vocabulary: int) -> None:
    names: dict[int, str] = {}
    for name, token in placeholders.items():
        where = f"compose, placeholder of {name!r}"
        if isinstance(token, bool) or not isinstance(token, int):
            raise InputError(f"it is {token!r}", where, "give a token id; tokenizer.convert_tokens_to_ids has it")
        if not 0 <= token < vocabulary:
            raise InputError(
                f"token {token} is outside the vocabulary of {vocabulary}",
                where,
                "use a spare token, or add one: language_model.resize_token_embeddings(n)",
            )
        if token in names:
            raise InputError(f"token {token} is that of {names[token]!r} too", where, "give each modality its own")
        names[token] = name


def _for_modality(option: str, value: Any, name: str, kinds: Mapping[str, Any]) -> Any:
    """An option that is given for all modalities or by modality; one that is not mentioned has the default."""
    if not isinstance(value, Mapping):
        return value
    for key in value:
        if key not in kinds:
            raise InputError(f"{option} names {key!r}", "compose", f"the modalities are {', '.join(kinds)}")
    return value.get(name)


def _check_reduction(name: str, kind: known.EncoderFamily, spec: ProjectorSpec | None, keep_prefix: bool) -> None:
    where = f"compose, projector {name!r}"
    if spec is None or spec.kind not in REDUCING:
        return
    right = "stack-mlp" if kind.is_of_sound else "pixel-shuffle-mlp"
    if spec.kind != right:
        raise InputError(f"{spec.kind} does not fit the output of a {kind.name}", where, f"use {right}")
    if keep_prefix and kind.prefix:
        raise InputError(
            "a class token is no patch of a grid", where, "leave keep_prefix at False, or use the projector 'mlp'"
        )
