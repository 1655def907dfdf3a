"""Training pairs and scoring them: one program for each language model, one checkpoint and one record for each pair.

Terms
  trial     the training of one pair; it goes on from its checkpoint at the next rung
  score     what the user's function makes of a pair: a number, or one for each sample; higher is better
  spread    of a score: the standard error of a mean of samples; None where the score is one number

A trial sees samples in one order, which is the same for all pairs. What a killed process had trained since its last
checkpoint is trained again, and gives the same bits.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from csc.api import compile
from csc.composition import ComposedModel
from csc.driver.checkpoint_manager import CheckpointManager
from csc.driver.compiled import CompiledModel
from csc.errors import InputError, RankLost, StepFailed
from csc.model_search.candidates import Candidates, SearchedPair, first_matrix, narrowed, sentence, trial_model, widened
from csc.model_search.ledger import LOCK, Ledger, alone
from csc.model_search.pair_plans import front, problem_of
from csc.model_search.similarity import Floats, distances
from csc.model_search.strategies import Pair
from csc.planning.problem import Problem

Batch = Callable[[SearchedPair, list[Any]], Mapping[str, Any]]
Score = Callable[[SearchedPair], Any]
TRIAL, FAILED, COMPILED = "trial", "failed", "compiled"
LOOK = 0.05  # seconds between looks at what another process has done
FEWEST_PROBES = 8  # samples that clusters are told by


@dataclass(frozen=True)
class Task:
    """What pairs are trained and scored on. data: samples by number; batch: from some of them to a pair's batch."""

    data: Sequence[Any]
    batch: Batch
    score: Score
    probe: int = 64


@dataclass(frozen=True)
class TrialSettings:
    """How a trial is trained. optimizer: from parameters; scheduler: from an optimizer, a step for each batch; clip: of
    the norm of gradients, or None. save_every: seconds between checkpoints within a rung. options: of csc.compile.
    """

    batch_size: int
    freeze: tuple[str, ...]
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    clip: float | None
    seed: int
    save_every: float
    options: Mapping[str, Any]


@dataclass
class Reader:
    """A language model's program. tokens, width: of the features that it takes; began: its weights as they were given,
    and its projector's.
    """

    compiled: CompiledModel
    tokens: int
    width: int
    began: dict[str, torch.Tensor]


class PairTrials:
    """Of one search, in one process or on the ranks of one mesh."""

    def __init__(
        self,
        candidates: Candidates,
        task: Task,
        settings: TrialSettings,
        ledger: Ledger,
        directory: Path,
        speaks: bool = True,
    ) -> None:
        """speaks: this process scores and writes the ledger; one rank of a mesh does."""
        self.candidates, self.task, self.settings, self.ledger = candidates, task, settings, ledger
        self._directory, self._speaks = directory, speaks
        self._readers: dict[str, Reader] = {}
        self._most: dict[str, tuple[int, int]] = {}  # by encoder, tokens and width of its features
        self._fronts: dict[str, CompiledModel] = {}
        self._epochs: dict[int, list[int]] = {}

    # --- what strategies ask ------------------------------------------------------------------------------------------

    def train(self, pair: Pair, samples: int) -> float | None:
        """The pair's score after so many samples, from the ledger if it is there."""
        known = self.known(pair, samples)
        if known is not None:
            return known.get("score")
        candidate = self.candidates.candidate(pair)
        record: dict[str, Any] = {"encoder": pair[0], "llm": pair[1], "samples": samples}
        try:
            record |= {"kind": TRIAL, **self._trained(candidate, samples)}
        except (RankLost, StepFailed):
            raise
        except Exception as error:  # whatever a user's batch and score raise: the other pairs go on
            record |= {"kind": FAILED, "why": sentence(error)}
        if self._speaks:
            self.ledger.add(record)
        return self.awaited(pair, samples).get("score")

    def awaited(self, pair: Pair, samples: int) -> dict[str, Any]:
        """The record of a pair that another process trains, once it is there."""
        while True:
            known = self.known(pair, samples)
            if known is not None:
                return known
            time.sleep(LOOK)

    def known(self, pair: Pair, samples: int) -> dict[str, Any] | None:
        """The record of a pair at so many samples, or of its failure."""
        of_pair = [
            record
            for kind in (FAILED, TRIAL)
            for record in self.ledger.records(kind)
            if (record["encoder"], record["llm"]) == pair
        ]
        return next((record for record in of_pair if record["kind"] == FAILED or record["samples"] == samples), None)

    def encoder_distances(self) -> Floats:
        """By what they make of the probe, the mean over tokens."""
        features = []
        for encoder in self.candidates.encoders:
            pair = next((pair for pair in self.candidates.pairs if pair[0] == encoder), None)
            if pair is None:
                features.append(np.zeros((len(self._probe()), 1)))
                continue
            candidate = self.candidates.candidate(pair)
            states = self.candidates.states(candidate, self._batch(candidate, self._probe()))
            features.append(states.double().mean(1).numpy())
        return distances(features)

    def llm_distances(self, encoder: str) -> Floats:
        """By what they made of the probe when a rung with the encoder first ended; see `_represent`."""
        known_states = []
        for llm in self.candidates.llms:
            file = self._representation((encoder, llm))
            known = load_file(file)["states"].double().numpy() if file.is_file() else np.zeros((len(self._probe()), 1))
            known_states.append(known)
        return distances(known_states)

    # --- training -----------------------------------------------------------------------------------------------------

    def _trained(self, candidate: SearchedPair, samples: int) -> dict[str, Any]:
        reader = self._reader(candidate)
        optimizer, manager = self._taken_up(candidate, reader)
        done = manager.latest or 0
        steps = samples // self.settings.batch_size
        began = saved = time.perf_counter()
        for step in range(done, steps):
            loss = self._step(candidate, reader, optimizer, step)
            if not math.isfinite(loss):
                raise InputError(
                    f"its loss is {loss} in step {step}, with {step * self.settings.batch_size:,} samples behind it",
                    " x ".join(candidate.pair), "lower the rate of the optimizer, or clip gradients",
                )  # fmt: skip
            if time.perf_counter() - saved > self.settings.save_every:
                manager.save(step + 1)
                saved = time.perf_counter()
        seconds = time.perf_counter() - began
        if steps > done:
            manager.save(steps)
        self._into(candidate, reader)
        began = time.perf_counter()
        score, spread = self._scored(candidate) if self._speaks else (0.0, None)
        if self._speaks and not self._representation(candidate.pair).is_file():
            self._represent(candidate)
        return {
            "score": score, "spread": spread, "seconds": seconds, "scoring": time.perf_counter() - began,
            "trained": (steps - done) * self.settings.batch_size,
        }  # fmt: skip

    def _step(self, candidate: SearchedPair, reader: Reader, optimizer: Any, step: int) -> float:
        compiled = reader.compiled
        batch = self._batch(candidate, self._order(step))
        loss = compiled.train_step(self.candidates.entries(candidate, batch, reader.tokens, reader.width))
        if self.settings.clip is not None:
            compiled.clip_grad_norm_(self.settings.clip)
        optimizer.optimizer.step()
        if optimizer.scheduler is not None:
            optimizer.scheduler.step()
        compiled.zero_grad()
        return float(loss)

    def _taken_up(self, candidate: SearchedPair, reader: Reader) -> tuple[Any, CheckpointManager]:
        """An optimizer and the trial's checkpoints, with weights as they were, or as they were given."""
        weights = self._beginning(candidate, reader)
        with torch.no_grad():
            for name, parameter in reader.compiled.named_parameters():
                parameter.copy_(weights[name])
        reader.compiled.zero_grad()
        stepping = self._stepping(reader)
        manager = CheckpointManager(
            self._folder(candidate.pair), reader.compiled, optimizer=stepping.optimizer, scheduler=stepping.scheduler,
            keep=1,
        )  # fmt: skip
        torch.manual_seed(_number(self.settings.seed, *candidate.pair))
        manager.load()
        return stepping, manager

    def _stepping(self, reader: Reader) -> Stepping:
        optimizer = reader.compiled.optimizer(self.settings.optimizer)
        make = self.settings.scheduler
        return Stepping(optimizer, make(optimizer) if make is not None else None)

    def _beginning(self, candidate: SearchedPair, reader: Reader) -> dict[str, torch.Tensor]:
        """The language model's own weights, and a projector by the seed."""
        modality = self.candidates.parts.modality
        torch.manual_seed(_number(self.settings.seed, *candidate.pair))
        fresh = self.candidates.composed(candidate.pair, candidate.model.language_model)
        weights = widened(fresh.get_submodule(f"{modality}_projector").state_dict(), reader.width)
        return {**reader.began, **{f"{modality}_projector.{name}": weight for name, weight in weights.items()}}

    def _into(self, candidate: SearchedPair, reader: Reader) -> None:
        """What was trained into the pair's model, whose language model is the program's own."""
        trained: Any = reader.compiled.gather()
        projector = candidate.model.get_submodule(f"{self.candidates.parts.modality}_projector")
        weights = projector.state_dict()
        width = weights[first_matrix(weights)].shape[1]
        projector.load_state_dict(narrowed(trained.projector.state_dict(), width))

    def _reader(self, candidate: SearchedPair) -> Reader:
        """The program of a pair's language model, made for the first pair that has it."""
        known = self._readers.get(candidate.llm)
        if known is not None:
            return known
        tokens, width = (max(sizes) for sizes in zip(*self._sizes().values()))
        parts = self.candidates.parts
        example = self.candidates.entries(candidate, self._batch(candidate, self._order(0)), tokens, width)
        freeze = [name for name in self.settings.freeze if not name.startswith(f"{parts.modality}_encoder")]
        began = time.perf_counter()
        model = trial_model(candidate, parts.modality, self.candidates.spec, width)
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        # Of several processes one captures, and the others find that in the cache.
        with alone(self._directory / f"{LOCK}-{quote(candidate.llm, safe='')}") if self._speaks else nullcontext():
            compiled = compile(model, example=example, freeze=freeze, **self.settings.options)
            compiled.compile_for(example)
        trained = {name: weights[name] for name, _ in compiled.named_parameters()}
        self._readers[candidate.llm] = Reader(compiled, tokens, width, trained)
        self._tell_compiled(candidate.llm, compiled, time.perf_counter() - began)
        return self._readers[candidate.llm]

    def _tell_compiled(self, part: str, compiled: CompiledModel, seconds: float) -> None:
        if self._speaks:
            captures = len(compiled.compiler.captures)
            self.ledger.add({"kind": COMPILED, "of": part, "captures": captures, "seconds": seconds})

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Tokens and width of each encoder's features, from its first batch."""
        for pair in self.candidates.pairs:
            if pair[0] not in self._most:
                candidate = self.candidates.candidate(pair)
                states = self.candidates.states(candidate, self._batch(candidate, self._order(0)))
                self._most[pair[0]] = states.shape[1], states.shape[2]
        return self._most

    def reader(self, llm: str) -> Reader:
        """The program of a language model."""
        pair = next(pair for pair in self.candidates.pairs if pair[1] == llm)
        return self._reader(self.candidates.candidate(pair))

    def front(self, encoder: str, options: Mapping[str, Any]) -> tuple[Problem, float]:
        """An encoder's regions as a planning problem, and the bytes of a microbatch's features."""
        candidate = self.candidates.candidate(next(pair for pair in self.candidates.pairs if pair[0] == encoder))
        modality = self.candidates.parts.modality
        batch = self._batch(candidate, self._order(0))
        began = time.perf_counter()
        items = batch[candidate.model.inputs[modality]]
        items = items.flatten(0, 1) if items.dim() == candidate.model.modalities[modality].kind.item_dims + 2 else items
        if encoder not in self._fronts:
            compiled = front(self.candidates.encoders[encoder], candidate.model, modality, items)
            self._fronts[encoder] = compiled
            self._tell_compiled(encoder, compiled, time.perf_counter() - began)
        return problem_of(self._fronts[encoder], options), self.candidates.states(candidate, batch).nbytes

    # --- scoring ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _scored(self, candidate: SearchedPair) -> tuple[float, float | None]:
        with evaluating(candidate):
            scored = self.task.score(candidate)
        numbers = torch.as_tensor(scored, dtype=torch.float64).flatten()
        if not len(numbers) or not bool(torch.isfinite(numbers).all()):
            raise InputError(
                f"score() gave {scored!r:.80}", " x ".join(candidate.pair),
                "return a finite number, or one for each sample that is scored",
            )  # fmt: skip
        spread = float(numbers.std() / math.sqrt(len(numbers))) if len(numbers) > 1 else None
        return float(numbers.mean()), spread

    @torch.no_grad()
    def _represent(self, candidate: SearchedPair) -> None:
        """Keep what the language model makes of the probe behind this encoder: the mean of its last states where
        answers stand, which its head reads.
        """
        batch = self._batch(candidate, self._probe())
        language_model: Any = candidate.model.language_model
        read: list[torch.Tensor] = []
        hook = language_model.get_output_embeddings().register_forward_pre_hook(
            lambda _, inputs: read.append(inputs[0])
        )
        try:
            with evaluating(candidate):
                candidate.model(**batch)
        finally:
            hook.remove()
        labels = batch.get("labels")
        counted = (labels != -100) if labels is not None else torch.ones(read[0].shape[:2], dtype=torch.bool)
        weights = counted.to(read[0].device, torch.float64).unsqueeze(-1)
        states = (read[0].double() * weights).sum(1) / weights.sum(1).clamp(min=1)
        file = self._representation(candidate.pair)
        file.parent.mkdir(parents=True, exist_ok=True)
        building = file.with_suffix(".new")
        save_file({"states": states.cpu().contiguous()}, building)
        building.replace(file)

    # --- samples ------------------------------------------------------------------------------------------------------

    def _order(self, step: int) -> list[int]:
        """The numbers of a step's samples: data in an order by the seed, another one in each epoch."""
        size, count = self.settings.batch_size, len(self.task.data)
        numbers = []
        for place in range(step * size, (step + 1) * size):
            epoch, within = divmod(place, count)
            numbers.append(self._epoch(epoch)[within])
        return numbers

    def _epoch(self, epoch: int) -> list[int]:
        if epoch not in self._epochs:
            chance = np.random.default_rng([self.settings.seed, epoch])
            self._epochs[epoch] = chance.permutation(len(self.task.data)).tolist()
        return self._epochs[epoch]

    def _probe(self) -> list[int]:
        """The first samples of the first epoch: those that every trial begins with."""
        return self._epoch(0)[: self.task.probe]

    def _batch(self, candidate: SearchedPair, numbers: Sequence[int]) -> Mapping[str, Any]:
        return self.task.batch(candidate, [self.task.data[number] for number in numbers])

    # --- weights ------------------------------------------------------------------------------------------------------

    def model(self, pair: Pair) -> ComposedModel:
        """A composed model of its own, in training mode, with the weights of the pair's last checkpoint."""
        candidate = self.candidates.candidate(pair)
        reader = self._reader(candidate)
        self._taken_up(candidate, reader)
        self._into(candidate, reader)
        composed = self.candidates.composed(pair, copy.deepcopy(candidate.model.language_model))
        modality = self.candidates.parts.modality
        weights = candidate.model.get_submodule(f"{modality}_projector").state_dict()
        composed.get_submodule(f"{modality}_projector").load_state_dict(weights)
        self.restore()
        return composed

    @torch.no_grad()
    def restore(self) -> None:
        """Language models as they were given."""
        for reader in self._readers.values():
            for name, parameter in reader.compiled.named_parameters():
                parameter.copy_(reader.began[name])
            reader.compiled.zero_grad()
            reader.compiled.gather()

    def _folder(self, pair: Pair) -> Path:
        return self._directory / "trials" / _file_name(pair)

    def _representation(self, pair: Pair) -> Path:
        return self._directory / "probe" / (_file_name(pair) + ".safetensors")


@dataclass(frozen=True)
class Stepping:
    """What steps a trial's weights."""

    optimizer: torch.optim.Optimizer
    scheduler: Any


@contextmanager
def evaluating(candidate: SearchedPair) -> Iterator[None]:
    """The pair's model in eval mode; each of its modules is as it was afterwards."""
    modes = {module: module.training for module in candidate.model.modules()}
    candidate.model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _file_name(pair: Pair) -> str:
    """One that no other pair has: a name that is quoted holds no +."""
    return "+".join(quote(name, safe="") for name in pair)


def _number(*names: Any) -> int:
    """A seed that is the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:4])
