"""The programs that trials run: one for all parts of the same code and sizes, which each pair's weights are put into.

Terms
  kind      of a model with a batch: code, configuration and sizes, but not weights. Models of a kind share a program,
            if all of their weights train: a frozen weight stays that of the first one
  trial     the model that a pair's program is of, and its example
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
    alone: a lock on a name, so that of several processes one captures and the others find that in the cache;
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
        self._kinds: dict[Pair, str] = {}  # likewise
        self._compiled: dict[str, CompiledModel] = {}  # by kind
        self._fronts: dict[str, CompiledModel] = {}  # by encoder
        self._given: dict[int, tuple[nn.Module, Weights]] = {}  # by identity: a part may have two names
        self._most: dict[str, tuple[int, int]] = {}  # by encoder, tokens and width of its features

    @property
    def _encoder(self) -> str:
        return f"{self._modality}_encoder"

    @property
    def _projector(self) -> str:
        return f"{self._modality}_projector"

    def of(self, candidate: SearchedPair) -> Reader:
        """A pair's, compiled for the first pair that has it."""
        name = self._name(candidate.pair)
        if name not in self._readers:
            self._readers[name] = self._made(candidate)
        return self._readers[name]

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
        for part, weights in self._given.values():
            for name, parameter in part.named_parameters():
                parameter.copy_(weights[name])

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
            self._fronts[candidate.encoder] = self._shared(_kind(model, {"items": items}), candidate.encoder, made)
        return self._fronts[candidate.encoder]

    def _name(self, pair: Pair) -> Pair:
        """What pairs that have one program for certain have in common."""
        return ("", pair[1]) if self._candidates.remembered else pair

    def _made(self, candidate: SearchedPair) -> Reader:
        model, batch, tokens = self._trial(candidate)
        given = self._weights(self._candidates.llms[candidate.llm], LLM)
        if not self._candidates.remembered:
            given |= self._weights(self._candidates.encoders[candidate.encoder], self._encoder)

        def made() -> CompiledModel:
            compiled = compile(model, example=batch, freeze=self._freeze, **self._options)
            compiled.compile_for(batch)
            return compiled

        compiled = self._shared(self._kind(candidate.pair), candidate.llm, made)
        width = _width(model.get_submodule(self._projector).state_dict())
        return Reader(compiled, tokens, width, given)

    def _trial(self, candidate: SearchedPair) -> tuple[nn.Module, Mapping[str, Any], int]:
        """Model, example, and the tokens of the features in it."""
        batch = self._example(candidate)
        if not self._candidates.remembered:
            return candidate.model, batch, 0
        self._candidates.states(candidate, batch)  # raises what is wrong with this pair
        tokens, width = (max(sizes) for sizes in zip(*self._sizes().values()))
        model = trial_model(candidate, self._modality, self._candidates.spec, width)
        return model, self._candidates.entries(candidate, batch, tokens, width), tokens

    def _kind(self, pair: Pair) -> str:
        """Of a pair's trial; "" for what shares no program. All are told before the first capture: ranks have to agree,
        and what a capture leaves in the one that makes it might tell the others' models apart.
        """
        for other in [] if self._kinds else self._candidates.pairs:
            if self._name(other) not in self._kinds:
                self._kinds[self._name(other)] = self._told(other)
        return self._kinds[self._name(pair)]

    def _told(self, pair: Pair) -> str:
        try:
            model, batch, _ = self._trial(self._candidates.candidate(pair))
        except Exception:  # what the user's batch and encoder raise, the pair's own trial says
            return ""
        trains = not self._freeze and all(weight.requires_grad for weight in model.parameters())
        return _kind(model, batch) if trains else ""

    def _shared(self, kind: str, part: str, made: Callable[[], CompiledModel]) -> CompiledModel:
        """The program of a kind, if there is one; kind: "" for what is of none."""
        key = kind or f"alone {len(self._compiled)}"
        if key not in self._compiled:
            began = time.perf_counter()
            with self._alone(kind or part):
                compiled = self._compiled[key] = made()
            self._tell(part, len(compiled.compiler.captures), time.perf_counter() - began)
        return self._compiled[key]

    def _weights(self, part: nn.Module, path: str) -> Weights:
        """Of an encoder or a language model, as they were given, under the names that they have in a pair. One that is
        frozen as a whole stays as it is.
        """
        if path in self._freeze:
            return {}
        if id(part) not in self._given:
            self._given[id(part)] = part, {name: one.detach().clone() for name, one in part.named_parameters()}
        return {f"{path}.{name}": weight for name, weight in self._given[id(part)][1].items()}

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Tokens and width of each encoder's features, from its first batch; those that can make none have none."""
        for pair in self._candidates.pairs:
            if pair[0] not in self._most:
                candidate = self._candidates.candidate(pair)
                try:
                    states = self._candidates.states(candidate, self._example(candidate))
                except Exception:  # what the user's batch and encoder raise, the pair's own trial says
                    continue
                self._most[pair[0]] = states.shape[1], states.shape[2]
        return self._most


def _width(projector: Mapping[str, torch.Tensor]) -> int:
    """Of the features that a projector takes."""
    return projector[first_matrix(projector)].shape[1]


def _kind(model: nn.Module, batch: Mapping[str, Any]) -> str:
    """Of a model with such a batch. "" for one that cannot be described, as it holds what only this process has."""
    tensors, extra = split_batch(batch)
    sizes = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in sorted(tensors.items())}
    try:
        return model_key(model, {**extra, "sizes": sizes})
    except Exception:  # attributes are the user's objects: they may raise whatever they like
        return ""
