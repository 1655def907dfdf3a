"""Checkpoints as `save_pretrained` writes them and `from_pretrained` reads them.

Terms: transformers keeps many checkpoints under other names than a model's parameters have (LLaVA's
`language_model.model.layers.0...` is the parameter `model.language_model.layers.0...`), some in other shapes; its
*conversions* lead from the one to the other and back. They are the library's, for every model that it knows; there is
no table here. The *rest* of a model is what no program reads: unused layers, buffers that belong to the weights.

    format_of(model, names) -> WeightLayout              names: the parameters of the program
    read_rest(path, format) -> {name: tensor}      the rest of the model, as far as the files have it
    put_rest(model, format, found)                 puts it into the model
    write_config(model, directory)                 config.json and generation_config.json beside the weights, each whole
"""

from __future__ import annotations

import copy
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from csc.runtime import weights
from csc.runtime.specs import ParameterSpec
from csc.runtime.weights import FileTensors, WeightLayout, published


def is_pretrained(model: nn.Module) -> bool:
    """Whether it is a model of transformers, which `from_pretrained` reads."""
    library = sys.modules.get("transformers")  # if nobody has imported it, the model is not one of its
    return library is not None and isinstance(model, library.PreTrainedModel)


def format_of(model: nn.Module, names: Collection[str]) -> WeightLayout:
    """How files hold this model: as transformers writes it if it is one of its models, else by its own names."""
    kept = model.state_dict().keys()
    tensors = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in kept)]
    rest = {name: tensor.detach() for name, tensor in tensors if name not in names}
    if not is_pretrained(model):
        return WeightLayout(weights.own_groups, dict, rest)
    return WeightLayout(lambda keys: _groups(model, keys), lambda tensors: _stored(model, tensors), rest)


def _stored(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))


def _groups(model: Any, keys: Iterable[str]) -> list[FileTensors]:
    """What each tensor of a checkpoint is in the model, as `from_pretrained` finds it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    there = model.state_dict()
    groups: list[FileTensors] = []
    joined: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, there)
        if name not in there and key in there:
            name, pattern = key, None
        if pattern is None:
            groups.append(_renamed(key, name))
        else:
            joined.setdefault(name, []).append((key, pattern))
    for name, sources in joined.items():
        groups.append(_converted(model, of_pattern[sources[0][1]], name, sources))
    return groups


def _renamed(key: str, name: str) -> FileTensors:
    return FileTensors((key,), (name,), lambda tensors: {name: tensors[key]})


def _converted(model: Any, converter: Any, name: str, sources: list[tuple[str, str]]) -> FileTensors:
    """Several tensors that make one parameter, or the reverse; `name` is that of the first parameter made."""
    first = converter.target_patterns[0]
    names = tuple(name.replace(first, target) for target in converter.target_patterns)

    def make(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(converter)
        for key, pattern in sources:
            own.add_tensor(name, key, pattern, tensors[key])
        made = own.convert(name, model=model, config=model.config)
        return {n: found[0] if isinstance(found, list) else found for n, found in made.items()}

    return FileTensors(tuple(key for key, _ in sources), names, make)


def read_rest(path: str | Path, format: WeightLayout) -> dict[str, torch.Tensor]:
    """The rest of the model, as far as the files have it."""
    specs = [ParameterSpec(n, tuple(t.shape), t.dtype, False, (), ()) for n, t in format.rest.items()]
    return weights.read(path, specs, "cpu", format, optional=True)


def on_meta(format: WeightLayout) -> bool:
    """Whether something of the rest is on the meta device."""
    return any(tensor.is_meta for tensor in format.rest.values())


@torch.no_grad()
def put_rest(model: nn.Module, format: WeightLayout, found: Mapping[str, torch.Tensor]) -> None:
    """Give the rest of the model these values. What is on the meta device is replaced by a tensor that has them."""
    for name, tensor in found.items():
        if not format.rest[name].is_meta:
            format.rest[name].copy_(tensor)
            continue
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        before = getattr(module, own)
        trains = before.requires_grad
        setattr(module, own, nn.Parameter(tensor, trains) if isinstance(before, nn.Parameter) else tensor)


def write_config(model: Any, directory: str | Path) -> None:
    """What `from_pretrained` needs besides the weights, for models of transformers."""
    if not is_pretrained(model):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory(prefix="csc-") as folder:
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        for made in sorted(Path(folder).iterdir()):
            published(Path(directory) / made.name, partial(shutil.copyfile, made))
