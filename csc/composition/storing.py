"""A composed model on disk: config.json and safetensors, as Hugging Face lays them out. Nothing is pickled.

config.json holds, for every part, its Hugging Face configuration with `model_type`, and what csc.compose was told.

    save_config(model, modalities, directory)      save_weights(model, directory)
    parts(directory, modules)                        what config.json says, built
    fill(model, directory)                           InputError if a name or shape does not fit
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from csc.composition import encoders
from csc.composition.modality import Modality, keywords
from csc.composition.projectors import ProjectorSpec, build
from csc.errors import InputError

Parts = tuple[nn.Module, list[Modality], dict[str, nn.Module], dict[str, nn.Module]]
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FORMAT = 1


def save_config(model: nn.Module, modalities: Mapping[str, Modality], directory: Path) -> None:
    """Write config.json. InputError for a part that `parts` could not make again."""
    table: dict[str, Any] = {"model_type": "csc_composed", "format": FORMAT}
    language_model = model.get_submodule("language_model")
    table["language_model"] = _part(language_model, _causal(language_model))
    first: dict[int, str] = {}
    table["modalities"] = {}
    for name, it in modalities.items():
        encoder = model.get_submodule(f"{name}_encoder")
        same = first.setdefault(id(encoder), name)
        part = (
            {"same_as": same}
            if same != name
            else {**_part(encoder, it.kind.name), "arguments": it.kind.arguments(encoder)}
        )
        projector = model.get_submodule(f"{name}_projector")
        table["modalities"][name] = {
            "encoder": part,
            "projector": {"class": type(projector).__name__} if it.projector is None else asdict(it.projector),
            "placeholder": it.placeholder,
            "feature_layer": it.feature_layer,
            "keep_prefix": it.keep_prefix,
        }
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / CONFIG, lambda file: file.write_text(json.dumps(table, indent=2) + "\n"))


def _part(module: Any, made: str) -> dict[str, Any]:
    """made: the class that its configuration makes."""
    kind = type(module).__name__
    if kind != made:
        raise InputError(
            f"{kind} cannot be made again: its configuration makes a {made}",
            "save_pretrained",
            "save a model of Hugging Face's own classes: merge adapters first (merge_and_unload)",
        )
    return {"class": kind, "config": json.loads(module.config.to_json_string(use_diff=False))}


def _causal(language_model: Any) -> str:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    made = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(language_model.config), None)
    return getattr(made, "__name__", "model of another kind")


def save_weights(model: nn.Module, directory: Path) -> None:
    """Write model.safetensors: every parameter and buffer of the state once, under its first name."""
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items() if name in names}
    alone = {  # safetensors stores nothing that shares memory
        name: t if t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes else t.contiguous().clone()
        for name, t in state.items()
    }
    _replace(directory / SINGLE, lambda file: save_file(alone, file, metadata={"format": "pt"}))
    (directory / INDEX).unlink(missing_ok=True)  # of older shards: readers would prefer it


def _replace(path: Path, write: Any) -> None:
    """A file appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def parts(directory: Path, modules: Mapping[str, nn.Module]) -> Parts:
    """The arguments of ComposedModel, from config.json: the parts with their configurations, not yet their weights."""
    table = _config(directory / CONFIG)
    try:
        return _built(table, modules, str(directory / CONFIG))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"it says no composed model: {type(error).__name__}: {error}", str(directory / CONFIG), "save it again"
        ) from error


def _config(path: Path) -> Any:
    try:
        table = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError("there is no such file", str(path), "give a directory that save_pretrained wrote") from None
    except ValueError as error:
        raise InputError(f"it is not JSON: {error}", str(path), "save the model again") from None
    if not isinstance(table, dict) or table.get("model_type") != "csc_composed" or table.get("format") != FORMAT:
        raise InputError("it is not that of a composed model", str(path), "load Hugging Face models with their classes")
    return table


def _built(table: Any, modules: Mapping[str, nn.Module], where: str) -> Parts:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():  # `fill` gives every parameter its value
        language_model = AutoModelForCausalLM.from_config(_hf_config(table["language_model"]["config"]))
    language_model.tie_weights()
    made: dict[str, nn.Module] = {}
    projectors: dict[str, nn.Module] = {}
    kinds: dict[str, encoders.EncoderFamily] = {}
    given = dict(modules)
    hidden = language_model.get_input_embeddings().weight.shape[1]
    specs: dict[str, ProjectorSpec | None] = {}
    for name, it in table["modalities"].items():
        part = it["encoder"]
        same = part.get("same_as")
        kinds[name] = kinds[same] if same else encoders.KINDS[part["class"]]
        with no_init_weights():
            made[name] = made[same] if same else _encoder(kinds[name], part)
        if "kind" in it["projector"]:
            spec = specs[name] = ProjectorSpec(**it["projector"])
            projectors[name] = build(spec, encoders.width(made[name], kinds[name]), hidden)
            continue
        specs[name] = None
        component = f"{name}_projector"
        if component not in given:
            raise InputError(
                f"{component} was a module of your own, a {it['projector']['class']}",
                where,
                f'pass one: from_pretrained(directory, modules={{"{component}": ...}})',
            )
        projectors[name] = given.pop(component)
    if given:
        raise InputError(f"modules names {next(iter(given))!r}", where, "give only projectors that were your own")
    modalities = [
        Modality(name, kinds[name], keyword, it["placeholder"], specs[name], it["feature_layer"], it["keep_prefix"])
        for (name, keyword), it in zip(keywords(kinds).items(), table["modalities"].values())
    ]
    return language_model, modalities, made, projectors


def _hf_config(table: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    fields = dict(table)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _encoder(kind: encoders.EncoderFamily, part: dict[str, Any]) -> nn.Module:
    """By the class that the kind names, never by a name out of the file."""
    make = getattr(importlib.import_module(kind.module), kind.name)
    return make(_hf_config(part["config"]), **part["arguments"])


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    index = directory / INDEX
    try:
        files = {SINGLE}
        if index.is_file():
            files = set(json.loads(index.read_text())["weight_map"].values())
            if outside := sorted(file for file in files if Path(file).name != file):
                raise ValueError(f"the index names {outside[0]!r:.80}, which is no file beside it")
        return {name: tensor for file in sorted(files) for name, tensor in load_file(directory / file).items()}
    except FileNotFoundError as error:
        raise InputError(f"a file is missing: {error}", str(directory), "save the weights again") from None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"the weights cannot be read: {error}", str(directory), "save the weights again") from None


def fill(model: nn.Module, directory: Path) -> None:
    """Every parameter and buffer gets its tensor, in the tensor's dtype; nothing is missing, nothing left over."""
    tensors, where = _tensors(directory), str(directory)
    state = model.state_dict(keep_vars=True)
    own = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    own &= state.keys()
    for problem, names in (("has no", own - tensors.keys()), ("has, and the model has not,", tensors.keys() - own)):
        if names:
            raise InputError(f"it {problem} {', '.join(sorted(names)[:3])}", where, "are these weights of this model?")
    for name in own:
        if state[name].shape != tensors[name].shape:
            raise InputError(
                f"{name} has shape {list(tensors[name].shape)} there, {list(state[name].shape)} in the configuration",
                where,
                "are these weights of this model?",
            )
        state[name].data = tensors[name]
