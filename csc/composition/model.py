"""The composed model: encoders, projectors and a language model as one nn.Module; its processor, and its form on
disk.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from csc.composition import encoders
from csc.composition.encoders import Modality, ProjectorSpec, build, keywords
from csc.composition.towers import Tower
from csc.errors import InputError

# --- Features at the placeholders of the text, and the check that they fit -------------------------------------------
#
# Terms
#   placeholder   a token id whose places in the text the features of one modality take, in order
#   slot          room for one item of a sample: a batch has (samples, ...) items, or (samples, slots, ...)
#   empty slot    one that holds zeros alone, in a sample with fewer items than others; its features are used nowhere
#
# Every sample takes its own features. That, unlike filling all places of the batch in order, stays right when a batch
# is divided into microbatches, and for samples that have fewer items than slots.


def merge(embeddings: torch.Tensor, at: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The n-th True of a row of `at` (samples, length) gets the n-th of the row's features (samples, tokens, hidden);
    the embeddings (samples, length, hidden) stay elsewhere. No size depends on a value: torch.export can trace it.
    """
    place = (at.cumsum(1) - 1).clamp(min=0)
    picked = features.gather(1, place.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
    return torch.where(at.unsqueeze(-1), picked.to(embeddings.dtype), embeddings)


def check_places(modality: str, keyword: str, at: torch.Tensor, items: torch.Tensor | None, tokens: int) -> None:
    """at: (samples, length), where the placeholders are; items: (samples, slots, ...) or None; tokens: of one item.

    A sample must have places for all its items, and may have places for empty slots.
    """
    counts = at.sum(1).tolist()
    if items is None:
        for sample, count in enumerate(counts):
            if count:
                raise InputError(
                    f"sample {sample} has {count} placeholders for {modality!r}, and the batch has no {keyword!r}",
                    "batch",
                    f"add {keyword}, or leave the placeholders out of the text",
                )
        return
    slots = items.shape[1]
    for sample, count in enumerate(counts):
        if count == slots * tokens:
            continue
        used = (items[sample].reshape(slots, -1) != 0).any(1).nonzero()
        needed = int(used[-1]) + 1 if len(used) else 0  # slots up to the last that is not empty
        if count % tokens or not needed * tokens <= count <= slots * tokens:
            raise InputError(
                f"sample {sample} needs {needed * tokens} placeholders for {modality!r} ({needed} x {tokens} tokens), "
                f"and has {count}",
                "batch",
                f"repeat the placeholder {tokens} times for each item of {keyword}, as the model's processor does",
            )


# --- Texts, pictures and sound to batches of a composed model --------------------------------------------------------
#
# Terms
#   mark      a modality's placeholder as it stands in a text, for example `<image>`: one mark an item, one token each
#   answer    what the model is to say after the text; the labels are the answers' tokens
#
#     processor = model.processor(tokenizer, {"vision": image_processor, "audio": feature_extractor})
#     batch = processor(["<image> Who is it?"], answers=["a cat"], vision=[picture])


IGNORED = -100  # the label that losses leave out


class Processor:
    """Texts, pictures and sound to batches of a composed model.

    Args:
        model: What the batches are for.
        tokenizer: An HF tokenizer whose vocabulary holds the placeholders.
        preprocessors: By modality, HF's image processors and feature extractors, with the sizes of the encoders.
        slots: By modality, how many items the batches have room for, whatever their samples have; without it a batch
            has room for those of its largest sample. With slots, all batches have the same entries, as a compiled step
            wants them.

    Raises:
        InputError: A modality has no preprocessor, or the tokenizer no padding token.
    """

    def __init__(
        self,
        model: ComposedModel,
        tokenizer: Any,
        preprocessors: Mapping[str, Any],
        slots: Mapping[str, int] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.preprocessors = dict(preprocessors)
        self.slots = dict(slots or {})
        for names in (self.preprocessors, self.slots):
            for name in names:
                if name not in model.modalities:
                    raise InputError(
                        f"the model has no modality {name!r}", "processor", f"it has {', '.join(model.modalities)}"
                    )
        for name in model.modalities:
            if name not in self.preprocessors:
                raise InputError(
                    f"there is no preprocessor for {name!r}",
                    "processor",
                    "give an image processor or feature extractor for every modality",
                )
        if self.tokenizer.pad_token_id is None:
            raise InputError("the tokenizer has no padding token", "processor", "set tokenizer.pad_token")

    def __call__(
        self,
        texts: Sequence[str],
        answers: Sequence[str] | None = None,
        *,
        length: int | None = None,
        mask_prompt: bool = True,
        sampling_rate: int | None = None,
        **items: Sequence[Any] | None,
    ) -> dict[str, torch.Tensor]:
        """A batch: input_ids, attention_mask, labels (samples, length), and an entry for every modality given.

        Args:
            texts: One a sample, with a mark for every item.
            answers: One a sample; an end-of-sequence token follows if the tokenizer has one.
            length: Tokens to pad to on the right, after expansion; None: those of the longest sample.
            mask_prompt: Labels are the answers alone. False, or without answers: all text but marks and padding.
            sampling_rate: Of the sound, in Hz; None: the feature extractor's.
            **items: By modality, for each sample an item, a list of items, or None. Sound is mono, a 1-d array.

        Returns:
            The batch's entries.

        Raises:
            InputError: A sample is longer than `length` (nothing is cut off), or its marks are not its items.
        """
        if answers is not None and len(answers) != len(texts):
            raise InputError(f"{len(texts)} texts and {len(answers)} answers", "processor", "give one for each")
        for name in items:
            if name not in self.model.modalities:
                raise InputError(
                    f"the model has no modality {name!r}", "processor", f"it has {', '.join(self.model.modalities)}"
                )
        batch, tokens = {}, {}
        lists = {name: _lists(name, items.get(name), len(texts)) for name in self.model.modalities}
        for name, of_samples in lists.items():
            values = self._items(name, of_samples, sampling_rate)
            if values is not None:
                modality = self.model.modalities[name]
                tokens[name] = self.model.tokens(name, values.shape[-modality.kind.item_dims :])
                batch[modality.keyword] = values
        rows = [
            self._row(i, text, answers[i] if answers is not None else None, mask_prompt, lists, tokens)
            for i, text in enumerate(texts)
        ]
        return {**self._padded(rows, length), **batch}

    def _row(
        self,
        sample: int,
        text: str,
        answer: str | None,
        mask_prompt: bool,
        lists: Mapping[str, list[list[Any]]],
        tokens: Mapping[str, int],
    ) -> tuple[list[int], list[int]]:
        """(ids, labels) of a sample, every mark repeated for the tokens of its item."""
        marks = {it.placeholder: it for it in self.model.modalities.values()}
        ids: list[int] = []
        labels: list[int] = []
        prompt = list(self.tokenizer(text)["input_ids"])
        for it in marks.values():
            self._check_marks(sample, it, prompt.count(it.placeholder), len(lists[it.name][sample]))
        for token in prompt:
            count = tokens[marks[token].name] if token in marks else 1
            ids += [token] * count
            labels += [IGNORED if token in marks or (answer is not None and mask_prompt) else token] * count
        if answer is not None:
            answer_ids = list(self.tokenizer(answer, add_special_tokens=False)["input_ids"])
            for it in marks.values():
                self._check_marks(sample, it, answer_ids.count(it.placeholder), 0)
            if self.tokenizer.eos_token_id is not None:
                answer_ids.append(self.tokenizer.eos_token_id)
            ids += answer_ids
            labels += answer_ids
        return ids, labels

    def _check_marks(self, sample: int, it: Modality, count: int, expected: int) -> None:
        if count != expected:
            mark = self.tokenizer.convert_ids_to_tokens(it.placeholder)
            raise InputError(
                f"sample {sample} has {expected} items of {it.name!r}, and {count} marks {mark!r} in its text",
                "processor",
                f"write {mark!r} (token {it.placeholder}, which must be one token of the tokenizer) in the text, once "
                "for each item, and never in an answer",
            )

    def _padded(self, rows: Sequence[tuple[list[int], list[int]]], length: int | None) -> dict[str, torch.Tensor]:
        longest = max((len(ids) for ids, _ in rows), default=0)
        if length is not None and longest > length:
            sample = next(i for i, (ids, _) in enumerate(rows) if len(ids) > length)
            raise InputError(
                f"sample {sample} has {len(rows[sample][0])} tokens, and length is {length}",
                "processor",
                "give a larger length, or shorten the text; nothing is cut off",
            )
        shape = (len(rows), longest if length is None else length)
        ids = torch.full(shape, self.tokenizer.pad_token_id)
        mask, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
        for i, (row, label_ids) in enumerate(rows):
            ids[i, : len(row)], labels[i, : len(label_ids)] = torch.tensor(row), torch.tensor(label_ids)
            mask[i, : len(row)] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def _items(self, name: str, lists: list[list[Any]], sampling_rate: int | None) -> torch.Tensor | None:
        """(samples, *item shape) for one slot, else (samples, slots, *item shape), empty slots zero; None: no items."""
        most = max((len(items) for items in lists), default=0)
        slots = self.slots.get(name, most)
        if most > slots:
            raise InputError(
                f"a sample has {most} items of {name!r}, and slots has room for {slots}",
                "processor",
                "raise slots, or give fewer",
            )
        if not slots:
            return None
        flat = [item for items in lists for item in items]
        values = self._preprocessed(name, flat or [self._blank(name)], sampling_rate)
        result = values.new_zeros(len(lists), slots, *values.shape[1:])
        start = 0
        for i, items in enumerate(lists):
            result[i, : len(items)] = values[start : start + len(items)]
            start += len(items)
        return result.squeeze(1) if slots == 1 else result

    def _preprocessed(self, name: str, flat: list[Any], sampling_rate: int | None) -> torch.Tensor:
        kind = self.model.modalities[name].kind
        preprocessor = self.preprocessors[name]
        if kind.is_of_sound:
            rate = preprocessor.sampling_rate if sampling_rate is None else sampling_rate
            return preprocessor(flat, sampling_rate=rate, return_tensors="pt")[kind.input]
        return preprocessor(images=flat, return_tensors="pt")[kind.input]

    def _blank(self, name: str) -> Any:
        """An item to learn the shape from, where a batch has none and slots wants some."""
        if self.model.modalities[name].kind.is_of_sound:
            return torch.zeros(1).numpy()
        return torch.zeros(32, 32, 3, dtype=torch.uint8).numpy()


def _lists(name: str, items: Sequence[Any] | None, samples: int) -> list[list[Any]]:
    """For each sample the list of its items."""
    if items is None:
        return [[] for _ in range(samples)]
    if len(items) != samples:
        raise InputError(
            f"{len(items)} entries of {name!r} for {samples} texts",
            "processor",
            "give one a sample: an item, a list of items, or None",
        )
    return [list(items) if isinstance(items, (list, tuple)) else [] if items is None else [items] for items in items]


# --- A composed model on disk: config.json and safetensors, as Hugging Face lays them out. Nothing is pickled --------
#
# config.json holds, for every part, its Hugging Face configuration with `model_type`, and what csc.compose was told.


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
            else {"tower": type(encoder).__name__}
            if it.kind.tower is not None
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


def _part(module: Any, expected: str) -> dict[str, Any]:
    """expected: the class that its configuration makes."""
    kind = type(module).__name__
    if kind != expected:
        raise InputError(
            f"{kind} cannot be made again: its configuration makes a {expected}",
            "save_pretrained",
            "save a model of Hugging Face's own classes: merge adapters first (merge_and_unload)",
        )
    return {"class": kind, "config": json.loads(module.config.to_json_string(use_diff=False))}


def _causal(language_model: Any) -> str:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(language_model.config), None)
    return getattr(model_class, "__name__", "model of another kind")


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


def parts(directory: Path, modules: Mapping[str, nn.Module | Tower]) -> Parts:
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


def _built(table: Any, modules: Mapping[str, nn.Module | Tower], where: str) -> Parts:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():  # `fill` gives every parameter its value
        language_model = AutoModelForCausalLM.from_config(_hf_config(table["language_model"]["config"]))
    language_model.tie_weights()
    towers: dict[str, nn.Module] = {}
    projectors: dict[str, nn.Module] = {}
    kinds: dict[str, encoders.EncoderFamily] = {}
    unused = dict(modules)
    hidden = language_model.get_input_embeddings().weight.shape[1]
    specs: dict[str, ProjectorSpec | None] = {}
    for name, it in table["modalities"].items():
        part = it["encoder"]
        same = part.get("same_as")
        if same:
            kinds[name], towers[name] = kinds[same], towers[same]
        elif "tower" in part:
            tower = _given(unused, f"{name}_encoder", part["tower"], where)
            kinds[name] = encoders.kind_of(name, tower)
            towers[name] = tower.module if isinstance(tower, Tower) else tower
        else:
            kinds[name] = encoders.KINDS[part["class"]]
            with no_init_weights():
                towers[name] = _encoder(kinds[name], part)
        if "kind" in it["projector"]:
            spec = specs[name] = ProjectorSpec(**it["projector"])
            projectors[name] = build(spec, encoders.width(towers[name], kinds[name]), hidden)
            continue
        specs[name] = None
        projectors[name] = _given(unused, f"{name}_projector", it["projector"]["class"], where)
    if unused:
        raise InputError(
            f"modules names {next(iter(unused))!r}", where, "give only encoders and projectors that were your own"
        )
    modalities = [
        Modality(name, kinds[name], keyword, it["placeholder"], specs[name], it["feature_layer"], it["keep_prefix"])
        for (name, keyword), it in zip(keywords(kinds).items(), table["modalities"].values())
    ]
    return language_model, modalities, towers, projectors


def _given(modules: dict[str, Any], component: str, kind: str, where: str) -> Any:
    """Taken out of the user's modules."""
    if component not in modules:
        raise InputError(
            f"{component} was a module of your own, a {kind}",
            where,
            f'pass one: from_pretrained(directory, modules={{"{component}": ...}})',
        )
    return modules.pop(component)


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


# --- The composed model: encoders, projectors and a language model as one nn.Module ----------------------------------
#
# Terms
#   modality    the user's name of an encoder: "vision", "audio". Its modules are `vision_encoder`, `vision_projector`
#   keyword     the batch entry that an encoder reads: its own name for it (pixel_values, input_features), or
#               `<modality>_<keyword>` for all encoders of which several have the same
#   item, slot  see encoders.py and merging.py


TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids", "labels")


class ComposedModel(nn.Module):
    """Made by `csc.compose` or `from_pretrained`. `modalities`: what it takes besides text, in order."""

    def __init__(
        self,
        language_model: nn.Module,
        modalities: Sequence[Modality],
        encoder_modules: Mapping[str, nn.Module],
        projector_modules: Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        self.modalities = {modality.name: modality for modality in modalities}
        for name in self.modalities:
            self.add_module(f"{name}_encoder", encoder_modules[name])
            self.add_module(f"{name}_projector", projector_modules[name])
        self.language_model = language_model

    @property
    def inputs(self) -> dict[str, str]:
        """The batch entry that each modality is read from."""
        return {name: modality.keyword for name, modality in self.modalities.items()}

    def get_input_embeddings(self) -> Any:
        """Those of the language model."""
        language_model: Any = self.language_model
        return language_model.get_input_embeddings()

    def tokens(self, modality: str, shape: Sequence[int]) -> int:
        """How many placeholders one item of this shape needs: (3, height, width), or (mel bins, frames)."""
        it = self.modalities[modality]
        encoder, projector = self.get_submodule(f"{modality}_encoder"), self.get_submodule(f"{modality}_projector")
        grid = encoders.grid(encoder, it.kind, shape)
        return encoders.token_count(modality, projector, it.projector, grid, it.kind.prefix if it.keep_prefix else 0)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **items: torch.Tensor | None,
    ) -> Any:
        """input_ids, labels, attention_mask, position_ids: (samples, length), as the language model takes them.

        items: one entry a modality, named as `inputs` says: one item a sample (samples, *item shape), or several
        (samples, slots, *item shape). A modality that the batch does not have is left out; its encoder does not run.
        Returns what the language model returns: `.loss` if there are labels, `.logits`.
        """
        if not torch.compiler.is_compiling():
            self.check_batch({"input_ids": input_ids, **items})
        embeddings = self.get_input_embeddings()(input_ids)
        for modality in self.modalities.values():
            value = items.get(modality.keyword)
            if value is not None:
                embeddings = merge(embeddings, input_ids == modality.placeholder, self.features(modality.name, value))
        return self.language_model(
            inputs_embeds=embeddings, attention_mask=attention_mask, position_ids=position_ids, labels=labels
        )

    def features(self, modality: str, items: torch.Tensor) -> torch.Tensor:
        """Embeddings (samples, slots * tokens, hidden) of items (samples, [slots,] *item shape)."""
        it = self.modalities[modality]
        flat = items.flatten(0, 1) if items.dim() == it.kind.item_dims + 2 else items
        encoder, projector = self.get_submodule(f"{modality}_encoder"), self.get_submodule(f"{modality}_projector")
        states = encoders.features(encoder, it.kind, flat, it.feature_layer, it.keep_prefix)
        dtype = next((p.dtype for p in projector.parameters()), states.dtype)
        projected = projector(states.to(dtype))
        samples = items.shape[0]  # not len(): it may be a symbol, which len() would fix
        expected = (self.tokens(modality, flat.shape[1:]), self.get_input_embeddings().weight.shape[1])
        if projected.dim() != 3 or tuple(projected.shape[1:]) != expected:
            raise InputError(
                f"it makes {list(projected.shape)} of features {list(states.shape)}; "
                f"[items, {expected[0]}, {expected[1]}] was expected",
                f"{modality}_projector",
                "let it return (items, tokens, hidden size of the language model); if it changes the number of tokens, "
                "give it a method tokens(count) that says to how many",
            )
        return projected.reshape(samples, -1, expected[1])

    # --- batches -------------------------------------------------------------------------------------------------

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """InputError unless every sample has as many placeholders as its items need. Reads values: it waits for a GPU.

        Eager forward does this itself. A compiled step has no decision that depends on data; `train_step` calls it.
        """
        known = (*TEXT_INPUTS, *self.inputs.values())
        for name in batch:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1, 0.6)
                hint = f"did you mean {close[0]}? " if close else ""
                raise InputError(f"it has an entry {name!r}", "batch", f"{hint}The model takes {', '.join(known)}")
        ids = batch.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            raise InputError("it has no input_ids of shape (samples, length)", "batch", "tokenize the text first")
        for modality in self.modalities.values():
            items = self._slots(modality, batch.get(modality.keyword), len(ids))
            tokens = self.tokens(modality.name, items.shape[2:]) if items is not None else 0
            check_places(modality.name, modality.keyword, ids == modality.placeholder, items, tokens)

    def _slots(self, modality: Modality, items: torch.Tensor | None, samples: int) -> torch.Tensor | None:
        """(samples, slots, *item shape), or InputError for another shape."""
        if items is None:
            return None
        dims = modality.kind.item_dims
        shape = encoders.item_shape(self.get_submodule(f"{modality.name}_encoder"), modality.kind)
        if items.dim() not in (dims + 1, dims + 2) or (shape is not None and tuple(items.shape[-dims:]) != shape):
            wanted = ", ".join(map(str, shape)) if shape is not None else "channels, height, width"
            raise InputError(
                f"{modality.keyword} has shape {list(items.shape)}; (samples, {wanted}) or (samples, slots, {wanted}) "
                "was expected",
                "batch",
                f"set the sizes of the preprocessor to those of {modality.name}_encoder",
            )
        if len(items) != samples:
            raise InputError(
                f"{modality.keyword} has {len(items)} rows and input_ids {samples}",
                "batch",
                "dimension 0 counts samples; stack several items of one sample as (samples, slots, ...)",
            )
        return items if items.dim() == dims + 2 else items.unsqueeze(1)

    def processor(
        self, tokenizer: Any, preprocessors: Mapping[str, Any], slots: Mapping[str, int] | None = None
    ) -> Processor:
        """Texts, pictures and sound to batches; the arguments are those of csc.composition.Processor."""
        return Processor(self, tokenizer, preprocessors, slots)

    # --- on disk -------------------------------------------------------------------------------------------------

    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json and model.safetensors, under the model's own names; `compiled.load` reads them too."""
        save_config(self, self.modalities, Path(directory))
        save_weights(self, Path(directory))

    def save_config(self, directory: str | Path) -> None:
        """config.json alone, for a directory whose weights `compiled.save` writes."""
        save_config(self, self.modalities, Path(directory))

    @staticmethod
    def from_pretrained(directory: str | Path, modules: Mapping[str, nn.Module | Tower] | None = None) -> ComposedModel:
        """The model of a directory, on the CPU, in the dtypes of its files; one file or shards with an index.

        modules: for each projector or tower that was a module of the user's own, one of its kind by component name:
        {"vision_projector": Resampler(), "vision_encoder": Tower(...)}. Its weights are read like all others.
        """
        model = ComposedModel(*parts(Path(directory), modules or {}))
        fill(model, Path(directory))
        return model
