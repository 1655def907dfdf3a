"""The candidates of a search, and what each pair of them is: an ordinary model of csc.compose, or a sentence that says
why it cannot be one.

Terms
  candidate     an encoder and a language model by name, with the model that both are
  trial model   of a language model: a projector and the language model on features. It serves the features of every
                encoder: they are as wide as the widest encoder's, with zeros behind a narrower one's, and as many as
                those of the encoder with the most tokens. The weights of the zeros begin at 0 and have a gradient of 0,
                and features behind the last placeholder are read by none, so it trains what the pair alone would
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from csc.composition import ComposedModel, compose
from csc.composition import encoders as known
from csc.composition.encoders import Modality, ProjectorSpec, build, projector_spec, space_to_depth, stacked
from csc.composition.model import merge
from csc.errors import InputError
from csc.model_search.encoder_features import RememberedEncoder
from csc.model_search.strategies import Pair
from csc.runtime.consistency import Sample, read

Part = nn.Module | Callable[[], nn.Module]
FEATURES = "features"  # the entry of a trial model's batch


@dataclass(frozen=True)
class Parts:
    """How pairs are composed; docs/compose.md. placeholders: of all language models, or by name."""

    projector: str | Mapping[str, Any]
    placeholders: int | Mapping[str, int]
    modality: str = "vision"
    feature_layer: int | None = None
    keep_prefix: bool = False


@dataclass(frozen=True)
class SearchedPair:
    """A pair. model: of csc.compose; while the search runs it has the weights that the pair has been trained to."""

    encoder: str
    llm: str
    model: ComposedModel

    @property
    def pair(self) -> Pair:
        """Both names."""
        return self.encoder, self.llm


class TrialModel(nn.Module):
    """The step of a composed model behind its encoder. Its modules have the names that they have there."""

    def __init__(self, modality: str, projector: nn.Module, language_model: nn.Module, placeholder: int) -> None:
        super().__init__()
        self.modality, self.placeholder = modality, placeholder
        self.add_module(f"{modality}_projector", projector)
        self.language_model = language_model

    @property
    def projector(self) -> Any:
        """Of features as wide as the widest encoder's."""
        return self.get_submodule(f"{self.modality}_projector")

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Any:
        """features: (samples, tokens, width), in order of the placeholders; those behind the last one are not read."""
        language_model: Any = self.language_model
        embeddings = language_model.get_input_embeddings()(input_ids)
        projected = self.projector(features.to(next(self.projector.parameters()).dtype))
        embeddings = merge(embeddings, input_ids == self.placeholder, projected)
        return language_model(
            inputs_embeds=embeddings, attention_mask=attention_mask, position_ids=position_ids, labels=labels
        )


class Candidates:
    """Made with each encoder and language model once; functions that make them are called here. features: where those
    of frozen encoders are kept; None: encoders train, and `remembered` is empty.
    """

    def __init__(
        self, encoders: Mapping[str, Part], llms: Mapping[str, Part], parts: Parts, features: Path | None
    ) -> None:
        self.parts = parts
        self._check(encoders, llms)
        self.spec = projector_spec(parts.modality, parts.projector)
        self.encoders = {name: _made(name, part) for name, part in encoders.items()}
        self.llms = {name: _made(name, part) for name, part in llms.items()}
        self.impossible: dict[Pair, str] = {}
        self._models: dict[Pair, ComposedModel] = {}
        remembered: dict[str, RememberedEncoder] = {}
        for encoder in self.encoders:
            for llm in self.llms:
                pair = encoder, llm
                try:
                    model = self.composed(pair, self.llms[llm])
                except Exception as error:
                    self.impossible[pair] = f"it cannot be composed: {sentence(error)}"
                    continue
                self._models[pair] = model
                if features is None:
                    continue
                if encoder not in remembered:
                    remembered[encoder] = RememberedEncoder(self.encoders[encoder], parts.feature_layer, features)
                model.add_module(f"{parts.modality}_encoder", remembered[encoder])
        self.remembered = remembered
        if not self._models:
            pair, why = next(iter(self.impossible.items()))
            raise InputError(
                f"none of {len(self.impossible)} pairs can be searched; {' x '.join(pair)}: {why}", "csc.search",
                "give encoders and language models that csc.compose takes",
            )  # fmt: skip

    def fingerprints(self) -> dict[str, str]:
        """Of each encoder's and language model's weights, by what they are called in sentences."""
        parts = {"encoder": self.encoders, "language model": self.llms}
        return {
            f"weights of {kind} {name}": _fingerprint(module)
            for kind, modules in parts.items()
            for name, module in modules.items()
        }

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Those that can be composed."""
        return tuple(self._models)

    def candidate(self, pair: Pair) -> SearchedPair:
        """A pair with its model."""
        return SearchedPair(*pair, self._models[pair])

    def composed(self, pair: Pair, language_model: nn.Module, encoder: nn.Module | None = None) -> ComposedModel:
        """The pair's model with its encoder, if no other is given, and a projector that has learnt nothing."""
        modality, placeholders = self.parts.modality, self.parts.placeholders
        if isinstance(placeholders, Mapping) and pair[1] not in placeholders:
            raise InputError(f"placeholders has no entry {pair[1]!r}", "csc.search", "give one for each language model")
        placeholder = placeholders[pair[1]] if isinstance(placeholders, Mapping) else placeholders
        return compose(
            encoders={modality: encoder or self.encoders[pair[0]]}, projectors={modality: self.parts.projector},
            language_model=language_model, placeholders={modality: placeholder},
            feature_layer=self.parts.feature_layer, keep_prefix=self.parts.keep_prefix,
        )  # fmt: skip

    def items(self, candidate: SearchedPair, batch: Mapping[str, Any]) -> torch.Tensor:
        """(items, *item shape) of what the encoder sees of a batch, whose samples may have slots for several."""
        it = self._modality(candidate)
        items = self._entry(candidate, batch)
        return items.flatten(0, 1) if items.dim() == it.kind.item_dims + 2 else items

    @torch.no_grad()
    def states(self, candidate: SearchedPair, batch: Mapping[str, Any]) -> torch.Tensor:
        """(samples, tokens, width) of what a batch shows: what the projector's first matrix takes."""
        it = self._modality(candidate)
        encoder = candidate.model.get_submodule(f"{it.name}_encoder")
        with evaluating(encoder):
            states = known.features(encoder, it.kind, self.items(candidate, batch), it.feature_layer, it.keep_prefix)
        if self.spec.kind == "pixel-shuffle-mlp":
            states = space_to_depth(states, self.spec.factor)
        if self.spec.kind == "stack-mlp":
            states = stacked(states, self.spec.factor)
        return states.reshape(len(self._entry(candidate, batch)), -1, states.shape[-1])

    def entries(
        self, candidate: SearchedPair, batch: Mapping[str, Any], tokens: int = 0, width: int = 0
    ) -> dict[str, torch.Tensor]:
        """A pair's batch as the trial model takes it: at least so many features, and at least so wide."""
        candidate.model.check_batch(batch)
        states = self.states(candidate, batch)
        padding = (0, max(0, width - states.shape[2]), 0, max(0, tokens - states.shape[1]))
        kept = {name: value for name, value in batch.items() if name != self._modality(candidate).keyword}
        return {**kept, FEATURES: F.pad(states, padding)}

    def _entry(self, candidate: SearchedPair, batch: Mapping[str, Any]) -> torch.Tensor:
        """The batch's entry that the encoder sees."""
        keyword = self._modality(candidate).keyword
        entry: torch.Tensor | None = batch.get(keyword)
        if entry is None:
            raise InputError(
                f"batch() made no {keyword} for {' x '.join(candidate.pair)}", "csc.search",
                f"return what the encoder sees as {keyword}, as candidate.model.processor(...) does",
            )  # fmt: skip
        return entry

    def _modality(self, candidate: SearchedPair) -> Modality:
        return candidate.model.modalities[self.parts.modality]

    def _check(self, encoders: Any, llms: Any) -> None:
        for part, value in (("encoders", encoders), ("llms", llms)):
            if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
                raise InputError(f"{part} is {value!r:.80}", "csc.search", f'give {part} by name: {{"small": ...}}')
        if isinstance(self.parts.projector, nn.Module):
            raise InputError(
                "projector is a module", "csc.search",
                "name a kind of csc.compose: each pair has a projector of its own, with the widths of both sides",
            )  # fmt: skip


def trial_model(candidate: SearchedPair, modality: str, spec: ProjectorSpec, width: int) -> TrialModel:
    """Of the candidate's language model, for features of `width`."""
    language_model: Any = candidate.model.language_model
    weight = language_model.get_input_embeddings().weight
    plain = ProjectorSpec("linear" if spec.kind == "linear" else "mlp")  # reductions are made before
    projector = build(plain, width, weight.shape[1]).to(weight.device, weight.dtype)
    return TrialModel(modality, projector, language_model, candidate.model.modalities[modality].placeholder)


def first_matrix(state: Mapping[str, torch.Tensor]) -> str:
    """The name of the weight that features meet, of a projector of a kind that has a name."""
    return "weight" if "weight" in state else "linear_1.weight"


def widened(state: Mapping[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """The weights of a pair's projector as the trial model's has them: zeros for features that the encoder has not."""
    first = first_matrix(state)
    return {**state, first: F.pad(state[first], (0, width - state[first].shape[1]))}


def narrowed(state: Mapping[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """The other way: the weights of the first `width` features."""
    first = first_matrix(state)
    return {**state, first: state[first][:, :width]}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in eval mode; each of its modules is as it was afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def sentence(error: BaseException) -> str:
    """What an error says, in a line."""
    text = str(error).strip().splitlines()
    kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    return kind + (text[0] if text else "without a word")


def _made(name: str, part: Part) -> nn.Module:
    module = part if isinstance(part, nn.Module) else part()
    if not isinstance(module, nn.Module):
        raise InputError(
            f"{name!r} is a {type(module).__name__}", "csc.search", "give modules, or functions that make them"
        )
    return module


def _fingerprint(module: nn.Module) -> str:
    """A hash of names, shapes, dtypes and 256 entries of each weight: all of a large model would take minutes."""
    weights = module.state_dict(keep_vars=True)
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
    digest.update(read(Sample(weight.detach()) for weight in weights.values()))
    return digest.hexdigest()[:16]
