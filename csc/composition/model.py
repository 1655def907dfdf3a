"""The composed model: encoders, projectors and a language model as one nn.Module.

Terms
  modality    the user's name of an encoder: "vision", "audio". Its modules are `vision_encoder`, `vision_projector`
  keyword     the batch entry that an encoder reads: its own name for it (pixel_values, input_features), or
              `<modality>_<keyword>` for all encoders of which several have the same
  item, slot  see encoders.py and merging.py

    model(input_ids, attention_mask, position_ids, labels, pixel_values=..., input_features=...) -> the LLM's output
    model.check_batch(batch)           InputError for a batch that does not fit; csc's train_step calls it too
    model.processor(tokenizer, {"vision": image_processor}) -> Processor
    model.save_pretrained(directory)   ComposedModel.from_pretrained(directory)
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from csc.composition import encoders, projectors, storing
from csc.composition.merging import check_places, merge
from csc.composition.modality import Modality
from csc.composition.processor import Processor
from csc.errors import InputError

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
        return projectors.token_count(modality, projector, it.projector, grid, it.kind.prefix if it.keep_prefix else 0)

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
            given = items.get(modality.keyword)
            if given is not None:
                embeddings = merge(embeddings, input_ids == modality.placeholder, self.features(modality.name, given))
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
        storing.save_config(self, self.modalities, Path(directory))
        storing.save_weights(self, Path(directory))

    def save_config(self, directory: str | Path) -> None:
        """config.json alone, for a directory whose weights `compiled.save` writes."""
        storing.save_config(self, self.modalities, Path(directory))

    @staticmethod
    def from_pretrained(directory: str | Path, modules: Mapping[str, nn.Module] | None = None) -> ComposedModel:
        """The model of a directory, on the CPU, in the dtypes of its files; one file or shards with an index.

        modules: for each projector that was a module of the user's own, a module of its kind by component name:
        {"vision_projector": Resampler()}. Its weights are read like all others.
        """
        model = ComposedModel(*storing.parts(Path(directory), modules or {}))
        storing.fill(model, Path(directory))
        return model
