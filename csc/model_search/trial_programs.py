"""The programs that trials run: one for all parts of the same code and sizes, which each pair's weights are put into.

Terms
  part      an encoder or a language model, by kind ("encoder", "llm") and name
  kind      of a model: what a capture of it depends on, its code, configuration and sizes, but not its weights. Models
            of a kind share a program, where all of their weights train: a frozen weight stays that of the first one
  reader    a pair's program with the weights that the pair begins with. Where encoders are frozen it is of the language
            model on features, for whatever encoder; where they train it is of the whole pair
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from csc.api import compile
from csc.cache.keys import model_key
from csc.capture.batch import split_batch
from csc.driver.compiled import CompiledModel
from csc.model_search.candidates import Candidates, SearchedPair, first_matrix, narrowed, trial_model, widened
from csc.model_search.pair_plans import Front
from csc.model_search.strategies import Pair

LLM = "language_model"
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reader:
    """compiled: a program that may be that of another pair, too. tokens, width: of the features that it takes. parts:
    the weights of the pair's parts as they were given, under the program's names.
    """

    compiled: CompiledModel
    tokens: int
    width: int
    parts: Weights


class TrialPrograms:
    """Of one search, in one process. freeze: components; options: of csc.compile. example: makes a pair's first batch;
    alone: a lock on a part's name, so that of several processes one captures and the others find that in the cache;
    tell: called with what was compiled, the captures that it took and its seconds.
    """

    def __init__(
        self, candidates: Candidates, freeze: tuple[str, ...], options: Mapping[str, Any],
        example: Callable[[SearchedPair], Mapping[str, Any]], alone: Callable[[str], AbstractContextManager[None]],
        tell: Callable[[str, int, float], None],
    ) -> None:  # fmt: skip
        self._candidates, self._options = candidates, options
        self._example, self._alone, self._tell = example, alone, tell
        self._modality = candidates.parts.modality
        trained_behind = [name for name in freeze if name.partition(".")[0] != self._encoder]
        self._freeze = trained_behind if candidates.remembered else list(freeze)
        self._readers: dict[Pair, Reader] = {}  # of whatever encoder under ""
        self._compiled: dict[str, CompiledModel] = {}  # by kind
        self._fronts: dict[str, CompiledModel] = {}  # by encoder
        self._given: dict[tuple[str, str], Weights] = {}  # by part
        self._most: dict[str, tuple[int, int]] = {}  # by encoder, tokens and width of its features

    @property
    def _encoder(self) -> str:
        return f"{self._modality}_encoder"

    @property
    def _projector(self) -> str:
        return f"{self._modality}_projector"

    def of(self, candidate: SearchedPair) -> Reader:
        """A pair's, compiled for the first pair that has it."""
        encoder = "" if self._candidates.remembered else candidate.encoder
        known = self._readers.get((encoder, candidate.llm))
        if known is None:
            known = self._readers[encoder, candidate.llm] = self._made(candidate)
        return known

    def entries(self, candidate: SearchedPair, batch: Mapping[str, Any], reader: Reader) -> Mapping[str, Any]:
        """A pair's batch as its program takes it."""
        if not self._candidates.remembered:
            return batch
        return self._candidates.entries(candidate, batch, reader.tokens, reader.width)

    def begin(self, candidate: SearchedPair, reader: Reader, projector: Weights) -> None:
        """Put a pair's weights into its program: those of its parts as they were given, and a projector's."""
        weights = {f"{self._projector}.{name}": weight for name, weight in widened(projector, reader.width).items()}
        with torch.no_grad():
            for name, parameter in reader.compiled.named_parameters():
                parameter.copy_(weights[name] if name in weights else reader.parts[name])
        reader.compiled.zero_grad()

    def hand_over(self, candidate: SearchedPair, reader: Reader) -> None:
        """What was trained into the pair's model."""
        trained: Any = reader.compiled.gather()
        parts = [LLM] if self._candidates.remembered else [LLM, self._encoder]
        for part in parts:
            source, target = trained.get_submodule(part), candidate.model.get_submodule(part)
            if source is not target:
                target.load_state_dict(source.state_dict())
        projector = candidate.model.get_submodule(self._projector)
        weights = trained.get_submodule(self._projector).state_dict()
        if projector is not trained.get_submodule(self._projector):
            width = _width(projector.state_dict())
            projector.load_state_dict(narrowed(weights, width))

    @torch.no_grad()
    def restore(self) -> None:
        """Parts as they were given."""
        for compiled in self._compiled.values():
            compiled.zero_grad()
        for (kind, name), weights in self._given.items():
            for key, parameter in self._part(kind, name).named_parameters():
                parameter.copy_(weights[key])

    def captures(self, pair: Pair) -> tuple[CompiledModel | None, CompiledModel, float]:
        """What a pair's step is planned from: its encoder, None where that is in its program; its program; the bytes
        of a microbatch's features.
        """
        candidate = self._candidates.candidate(pair)
        rear = self.of(candidate).compiled
        if not self._candidates.remembered:
            return None, rear, 0.0
        batch = self._example(candidate)
        states = self._candidates.states(candidate, batch)
        return self._front(candidate, batch), rear, float(states.nbytes)

    def _front(self, candidate: SearchedPair, batch: Mapping[str, Any]) -> CompiledModel:
        if candidate.encoder not in self._fronts:
            items = self._candidates.items(candidate, batch)
            model = Front(self._candidates.encoders[candidate.encoder], candidate.model, self._modality)
            made = partial(compile, model, example={"items": items}, freeze=["encoder"], check=False)
            self._fronts[candidate.encoder] = self._shared(_kind(model, {}), candidate.encoder, made)
        return self._fronts[candidate.encoder]

    def _made(self, candidate: SearchedPair) -> Reader:
        parts = self._candidates.parts
        tokens = width = 0
        model: Any = candidate.model
        batch = self._example(candidate)
        if self._candidates.remembered:
            tokens, width = (max(sizes) for sizes in zip(*self._sizes().values()))
            model = trial_model(candidate, parts.modality, self._candidates.spec, width)
            batch = self._candidates.entries(candidate, batch, tokens, width)
        given = self._weights("llm", candidate.llm, LLM)
        if not self._candidates.remembered:
            given |= self._weights("encoder", candidate.encoder, self._encoder)

        def made() -> CompiledModel:
            # Of several processes one captures, and the others find that in the cache.
            with self._alone(candidate.llm):
                compiled = compile(model, example=batch, freeze=self._freeze, **self._options)
                compiled.compile_for(batch)
            return compiled

        all_train = not self._freeze and all(weight.requires_grad for weight in model.parameters())
        kind = _kind(model, split_batch(batch)[1]) if all_train else ""
        compiled = self._shared(kind, candidate.llm, made)
        width = _width(model.get_submodule(self._projector).state_dict())
        return Reader(compiled, tokens, width, given)

    def _shared(self, kind: str, part: str, made: Callable[[], CompiledModel]) -> CompiledModel:
        """The program of a kind, if there is one; kind: "" for what is of none."""
        key = kind or f"alone {len(self._compiled)}"
        if key not in self._compiled:
            began = time.perf_counter()
            compiled = self._compiled[key] = made()
            self._tell(part, len(compiled.compiler.captures), time.perf_counter() - began)
        return self._compiled[key]

    def _weights(self, kind: str, name: str, path: str) -> Weights:
        """A part's, as they were given, under the names that they have in a pair."""
        if (kind, name) not in self._given:
            named = self._part(kind, name).named_parameters()
            self._given[kind, name] = {key: weight.detach().clone() for key, weight in named}
        return {f"{path}.{key}": weight for key, weight in self._given[kind, name].items()}

    def _part(self, kind: str, name: str) -> nn.Module:
        return (self._candidates.encoders if kind == "encoder" else self._candidates.llms)[name]

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Tokens and width of each encoder's features, from its first batch."""
        for pair in self._candidates.pairs:
            if pair[0] not in self._most:
                candidate = self._candidates.candidate(pair)
                states = self._candidates.states(candidate, self._example(candidate))
                self._most[pair[0]] = states.shape[1], states.shape[2]
        return self._most


def _width(projector: Mapping[str, torch.Tensor]) -> int:
    """Of the features that a projector takes."""
    return projector[first_matrix(projector)].shape[1]


def _kind(model: nn.Module, extra: Mapping[str, Any]) -> str:
    """extra: entries of its batch that are no tensors. "" for a model that cannot be described, as it holds what only
    this process has.
    """
    try:
        return model_key(model, extra)
    except Exception:  # attributes are the user's objects: they may raise whatever they like
        return ""
