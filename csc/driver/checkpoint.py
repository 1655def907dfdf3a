"""Checkpoints as `save_pretrained` writes them and `from_pretrained` reads them, of adapters too, and as other
formats.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from csc.checkpoints import converting, dcp, files, restoring
from csc.checkpoints.converting import Contents
from csc.checkpoints.files import FILE, StepIndex, saved
from csc.checkpoints.writing import ADAPTERS, CONFIGS, staged
from csc.driver.notices import notice
from csc.errors import InputError, MissingPackage, installing
from csc.runtime import weights
from csc.runtime.loaded_program import read_json
from csc.runtime.meeting import first_line
from csc.runtime.specs import ParameterSpec
from csc.runtime.weights import INDEX, OWN, SINGLE, FileTensors, WeightLayout, flushed, published
from csc.temporary import TemporaryFolder

# --- Checkpoints as `save_pretrained` writes them and `from_pretrained` reads them -----------------------------------
#
# Terms: transformers keeps many checkpoints under other names than a model's parameters have (LLaVA's
# `language_model.model.layers.0...` is the parameter `model.language_model.layers.0...`), some in other shapes; its
# *conversions* lead from the one to the other and back. They are the library's, for every model that it knows; there is
# no table here. The *rest* of a model is what no program reads: unused layers, buffers that belong to the weights.


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
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    weights = model.state_dict()
    groups: list[FileTensors] = []
    joined: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, weights)
        if name not in weights and key in weights:
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
        copied = copy.deepcopy(converter)
        for key, pattern in sources:
            copied.add_tensor(name, key, pattern, tensors[key])
        converted = copied.convert(name, model=model, config=model.config)
        return {n: value[0] if isinstance(value, list) else value for n, value in converted.items()}

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
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        before = getattr(module, leaf)
        trains = before.requires_grad
        setattr(module, leaf, nn.Parameter(tensor, trains) if isinstance(before, nn.Parameter) else tensor)


def write_config(model: Any, directory: str | Path) -> None:
    """What `from_pretrained` needs besides the weights, for models of transformers."""
    if not is_pretrained(model):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    with TemporaryFolder() as folder:
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            published(Path(directory) / file.name, partial(shutil.copyfile, file))


# --- Weights of a checkpoint as files of Hugging Face, which `from_pretrained` reads ---------------------------------
#
# Terms: a *group* is some tensors of the files that some parameters make together (csc.runtime.weights.WeightLayout).
# One is held at a time.


SHARD = 4 * 2**30  # bytes of a file


class StoredGroup(NamedTuple):
    """Tensors of the files, as meta tensors, and the parameters that make them."""

    tensors: Mapping[str, torch.Tensor]
    names: tuple[str, ...]


def write_pretrained(index: StepIndex, out: Path, tell: Callable[[str], None]) -> None:
    """In files of at most 4 GiB. InputError if something cannot be read, or written."""
    model = model_of(index.folder)
    form = OWN if model is None else format_of(model, list(index.parameters))
    metas = {n: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for n, s in index.parameters.items()}
    groups = list(_stored_groups(form, metas))
    tensors = _each(index, form, groups, tell)
    shards = list(_shards({key: tensor for group in groups for key, tensor in group.tensors.items()}))
    files_of: dict[str, str] = {}
    for number, about in enumerate(shards, 1):
        file = SINGLE[0] if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files.write_each(out / file, about, (next(tensors) for _ in range(len(about))), in_header=True)
        files_of |= dict.fromkeys(about, file)
    if len(shards) > 1:
        table = {"metadata": {"total_size": sum(s.nbytes for a in shards for s in a.values())}, "weight_map": files_of}
        published(out / INDEX, lambda path: path.write_text(json.dumps(table, indent=2) + "\n"))
    for name in CONFIGS:
        if (index.folder / name).is_file():
            published(out / name, partial(shutil.copyfile, index.folder / name))


def _stored_groups(form: WeightLayout, metas: Mapping[str, torch.Tensor]) -> Iterator[StoredGroup]:
    """Those that a conversion of their own parameters makes; the rest, if there is one, together."""
    stored = dict(form.stored(metas))
    left, of_rest = dict(stored), set(metas)
    for group in form.groups(stored):
        names = tuple(name for name in group.names if name in metas)
        tensors = {key: stored[key] for key in group.keys}
        stored_names = form.stored({name: metas[name] for name in names})
        if _sizes(stored_names) == _sizes(tensors) and tensors.keys() <= left.keys():
            yield StoredGroup(tensors, names)
            left = {key: tensor for key, tensor in left.items() if key not in tensors}
            of_rest -= set(names)
    if left:
        yield StoredGroup(left, tuple(name for name in metas if name in of_rest))


def _sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}


def _each(
    index: StepIndex, form: WeightLayout, groups: list[StoredGroup], tell: Callable[[str], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the files, group by group."""
    done, size = 0, sum(tensor.nbytes for group in groups for tensor in group.tensors.values())
    for group in groups:
        tell(f"{next(iter(group.tensors))}, {done / 1e9:.1f} of {size / 1e9:.1f} GB written")
        weights = {name: restoring.whole(index, index.parameters[name], repr(name)) for name in group.names}
        stored_weights = form.stored(weights)
        yield from ((key, stored_weights[key].contiguous()) for key in group.tensors)
        done += sum(tensor.nbytes for tensor in group.tensors.values())


def _shards(stored: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for key, tensor in stored.items():
        if shard and size + tensor.nbytes > SHARD:
            yield shard
            shard, size = {}, 0
        shard[key] = tensor
        size += tensor.nbytes
    yield shard


def model_of(folder: Path) -> Any:
    """None if there is no config.json, or not one of a model of transformers'. InputError if it cannot be read."""
    file = folder / CONFIGS[0]
    if not file.is_file():
        return None

    def fail(fault: str) -> InputError:
        return InputError(fault, str(file), "take another copy of it; without the file, names stay the model's own")

    read_json(file, fail)
    try:
        import transformers
    except ModuleNotFoundError:
        raise InputError(
            "transformers is not installed, which knows how weights of this model are named in files", str(file),
            installing("transformers"),
        ) from None  # fmt: skip
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model_class = getattr(transformers, (config.architectures or [""])[0], None)
        if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
            return None
        with torch.device("meta"):
            return model_class._from_config(config, dtype=config.dtype)
    except Exception as error:  # transformers says all kinds of things
        raise fail(f"transformers makes no model of it: {first_line(error)}") from error


# --- Adapters of PEFT in a checkpoint of training, and as PEFT's own files -------------------------------------------
#
# Terms: the *base* is the model without its adapters, whose config.json lies beside the checkpoint. A model that PEFT
# has wrapped names parameters of both in its own way.


BASE = "base_model"
ITS_CONFIG = "adapter_config.json"  # as PEFT calls it


def note_adapters(model: Any, folder: Path) -> None:
    """And the base's configuration. A configuration that PEFT cannot write is no error of a save: a line says so."""
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        (folder / ADAPTERS).unlink(missing_ok=True)  # of another model that was saved there
        return
    try:
        configs = {name: _told(config) for name, config in model.peft_config.items()}
    except Exception as error:  # PEFT says all kinds of things
        notice(
            f"{folder.name} does not tell its adapters, and `csc checkpoint convert` names weights as the model does: "
            f"{type(error).__name__}: {first_line(error)}"
        )
        return
    write_config(model.get_base_model(), folder)
    published(folder / ADAPTERS, lambda path: path.write_text(json.dumps(configs, indent=2) + "\n"))


def _told(config: Any) -> Any:
    with TemporaryFolder() as made:
        config.save_pretrained(made)
        return json.loads((Path(made) / ITS_CONFIG).read_text())


def write_adapters(index: StepIndex, out: Path, tell: Callable[[str], None]) -> None:
    """Adapters are read at once, the base's weights tensor by tensor. With a base that is not of transformers, which
    nothing here can make, all in the model's own names. InputError if PEFT makes no such model, or a parameter is
    missing.
    """
    made = model_of(index.folder)
    if made is None:
        write_pretrained(index, out, tell)
        return
    wrapped, of_base = _wrapped(index.folder, made)
    adapters = {name: stored for name, stored in index.parameters.items() if name not in of_base}
    base = {of_base[name]: stored for name, stored in index.parameters.items() if name in of_base}
    lacking = [name for name, _ in wrapped.named_parameters() if name not in index.parameters]
    if lacking:
        raise InputError(
            f"it has no parameter {lacking[0]!r}, and {len(lacking) - 1} more that {ADAPTERS} tells of",
            str(index.folder), "take another checkpoint, or save_adapter of the compiled model where it is trained",
        )  # fmt: skip
    tell(f"adapters, {sum(parameter.nbytes() for parameter in adapters.values()) / 1e9:.1f} GB")
    values = {name: restoring.whole(index, stored, repr(name)) for name, stored in adapters.items()}
    wrapped.save_pretrained(str(out), state_dict=values)
    for file in out.iterdir():
        flushed(file)
    write_pretrained(replace(index, parameters=base), out / BASE, tell)


def _wrapped(folder: Path, base: Any) -> tuple[Any, Mapping[str, str]]:
    """The model of a base, without values, and what parameters and buffers of the base are called in it: {there: in the
    base}.
    """

    def fail(fault: str) -> InputError:
        return InputError(fault, str(folder / ADAPTERS), "take another copy of it, or an older checkpoint")

    configs = read_json(folder / ADAPTERS, fail)
    try:
        from peft import PeftConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise MissingPackage.of(error, "checkpoint convert") or error from error
    base.name_or_path = None  # PEFT would put the checkpoint's folder for a name that is not known
    names = {id(tensor): name for name, tensor in _tensors(base)}
    wrapped: Any = None
    try:
        with TemporaryFolder() as made, torch.device("meta"):
            for adapter, config in configs.items():
                (Path(made) / ITS_CONFIG).write_text(json.dumps(config))
                peft_config = PeftConfig.from_pretrained(made)
                if isinstance(getattr(peft_config, "init_lora_weights", None), str):
                    peft_config.init_lora_weights = (
                        True  # the base has been changed for it: not once more where it is read
                    )
                if wrapped is None:
                    wrapped = get_peft_model(base, peft_config, adapter_name=adapter)
                else:
                    wrapped.add_adapter(adapter, peft_config)
    except Exception as error:  # PEFT says all kinds of things
        raise fail(f"PEFT makes no model of it: {first_line(error)}") from error
    if wrapped is None:
        raise fail("it names no adapter")
    prompts = [name for name, config in wrapped.peft_config.items() if config.is_prompt_learning]
    if prompts:
        raise InputError(
            f"the adapter {prompts[0]!r} is of prompts, which PEFT makes from a model with values",
            str(folder), "write it with save_adapter of the compiled model, or convert to dcp",
        )  # fmt: skip
    return wrapped, {name: names[id(tensor)] for name, tensor in _tensors(wrapped) if id(tensor) in names}


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


# --- Checkpoints of training from and to other formats: Hugging Face's safetensors, torch.distributed.checkpoint -----
#
# Terms: a directory of Hugging Face has config.json beside its weights, by which transformers names and shapes them in
# its own way; without one, names are the model's own. `save` puts that file into a checkpoint, too. What is converted
# is read and written tensor by tensor, and is there whole or not at all.


CSC, HF, DCP = "csc", "hf", "dcp"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Conversion:
    """What was made. left: keys that a checkpoint has no place for."""

    made: Path
    left: list[str]


def kind(path: Path) -> str:
    """By the files that are there."""
    if (path / FILE).is_file() or saved(path):
        return CSC
    if (path / dcp.METADATA).is_file():
        return DCP
    if path.is_file() or (path / INDEX).is_file() or any((path / single).is_file() for single in SINGLE):
        return HF
    raise InputError(
        f"it has neither {FILE} nor {INDEX}, {SINGLE[0]} or {dcp.METADATA}", str(path),
        "give a checkpoint of csc, a directory of Hugging Face, or one of torch.distributed.checkpoint",
    )  # fmt: skip


def convert(
    source: Path, out: Path, to: str, step: int | None = None, optimizer: str | None = None, tell: Tell = lambda _: None
) -> Conversion:
    """step: which of a run, or of the new checkpoint. optimizer: the class whose state a DCP directory has. InputError
    if one of the two is no checkpoint of csc, something cannot be read, or `out` has something: nothing is made then.
    """
    here = kind(source)
    if (here == CSC) == (to == CSC):
        raise InputError(
            f"it is {here}, and --to is {to}", str(source),
            "convert a checkpoint of csc to hf or dcp, and either of them to csc",
        )  # fmt: skip
    if step is not None and step < 0:
        raise InputError(f"step is {step}", "convert", "give a number of at least 0")
    with staged(out) as stage:
        if here == HF:
            folder, left = _from_hf(source, stage, step or 0, tell)
            return Conversion(out / folder.name, left)
        if here == DCP:
            checkpoint = dcp.read(source, optimizer)
            about = {name: parameter.about for name, parameter in checkpoint.parameters.items()}
            contents = Contents(
                about,
                ((name, parameter.load()) for name, parameter in checkpoint.parameters.items()),
                checkpoint.optimizer,
            )
            return Conversion(out / converting.write(stage, step or 0, contents, "model", tell).name, checkpoint.left)
        index = files.read(files.find(source, step))
        if not index.parameters:
            raise InputError(
                f"it has {', '.join(index.has)}, and no weights", str(index.folder),
                "weights are beside it: CompiledTrainer writes them as from_pretrained reads them",
            )  # fmt: skip
        if to == DCP:
            dcp.write(stage, index, tell)
        elif (index.folder / ADAPTERS).is_file():
            write_adapters(index, stage, tell)
        else:
            write_pretrained(index, stage, tell)
        return Conversion(out, [])


def _from_hf(path: Path, run: Path, step: int, tell: Tell) -> tuple[Path, list[str]]:
    """Weights alone; and what the files have that the model does not."""
    model, headers = None if path.is_file() else model_of(path), weights.headers(path)
    about, form = dict(headers), weights.OWN
    if model is not None:
        kept = model.state_dict()
        about = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in kept}}
        form = format_of(model, list(about))
    values = weights.each(path, [_spec(name, tensor) for name, tensor in about.items()], format=form)
    named: Any = type(model).__name__ if model is not None else "model"
    folder = converting.write(run, step, Contents(about, values), named, tell)
    for name in CONFIGS:
        if path.is_dir() and (path / name).is_file():
            published(folder / name, partial(shutil.copyfile, path / name))
    return folder, [key for group in form.groups(headers) if about.keys().isdisjoint(group.names) for key in group.keys]


def _spec(name: str, tensor: torch.Tensor) -> ParameterSpec:
    return ParameterSpec(name, tuple(tensor.shape), tensor.dtype, False, (), ())
