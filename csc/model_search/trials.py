"""Training pairs and scoring them: one checkpoint and one record for each pair.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from csc.composition import ComposedModel
from csc.driver.checkpoint_manager import CheckpointManager
from csc.errors import InputError, RankLost, StepFailed
from csc.model_search.candidates import Candidates, SearchedPair, evaluating, sentence
from csc.model_search.ledger import LOCK, Ledger, alone
from csc.model_search.similarity import Floats, distances
from csc.model_search.strategies import Pair
from csc.model_search.trial_programs import Reader, TrialPrograms

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
        self.programs = TrialPrograms(
            candidates, settings.freeze, settings.options, self._first_batch, self._alone, self._tell_compiled
        )
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
        reader = self.programs.of(candidate)
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
        self.programs.hand_over(candidate, reader)
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
        loss = compiled.train_step(self.programs.entries(candidate, batch, reader))
        if self.settings.clip is not None:
            compiled.clip_grad_norm_(self.settings.clip)
        optimizer.optimizer.step()
        if optimizer.scheduler is not None:
            optimizer.scheduler.step()
        compiled.zero_grad()
        return float(loss)

    def _taken_up(self, candidate: SearchedPair, reader: Reader) -> tuple[Any, CheckpointManager]:
        """An optimizer and the trial's checkpoints, with weights as they were, or as they were given."""
        self.programs.begin(candidate, reader, self._projector(candidate))
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

    def _projector(self, candidate: SearchedPair) -> dict[str, torch.Tensor]:
        """Weights of a projector that has learnt nothing, by the seed."""
        torch.manual_seed(_number(self.settings.seed, *candidate.pair))
        fresh = self.candidates.composed(candidate.pair, candidate.model.language_model)
        return fresh.get_submodule(f"{self.candidates.parts.modality}_projector").state_dict()

    def _first_batch(self, candidate: SearchedPair) -> Mapping[str, Any]:
        return self._batch(candidate, self._order(0))

    def _alone(self, part: str) -> AbstractContextManager[None]:
        return alone(self._directory / f"{LOCK}-{quote(part, safe='')}") if self._speaks else nullcontext()

    def _tell_compiled(self, part: str, captures: int, seconds: float) -> None:
        if self._speaks:
            self.ledger.add({"kind": COMPILED, "of": part, "captures": captures, "seconds": seconds})

    # --- scoring ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _scored(self, candidate: SearchedPair) -> tuple[float, float | None]:
        with evaluating(candidate.model):
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
            with evaluating(candidate.model):
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
        reader = self.programs.of(candidate)
        self._taken_up(candidate, reader)
        self.programs.hand_over(candidate, reader)
        modality = self.candidates.parts.modality
        trained = None if self.candidates.remembered else candidate.model.get_submodule(f"{modality}_encoder")
        composed = self.candidates.composed(pair, copy.deepcopy(candidate.model.language_model), copy.deepcopy(trained))
        weights = candidate.model.get_submodule(f"{modality}_projector").state_dict()
        composed.get_submodule(f"{modality}_projector").load_state_dict(weights)
        self.programs.restore()
        return composed

    def _folder(self, pair: Pair) -> Path:
        return self._directory / "trials" / _file_name(pair)

    def _representation(self, pair: Pair) -> Path:
        return self._directory / "probe" / (_file_name(pair) + ".safetensors")


@dataclass(frozen=True)
class Stepping:
    """What steps a trial's weights."""

    optimizer: torch.optim.Optimizer
    scheduler: Any


def _file_name(pair: Pair) -> str:
    """One that no other pair has: a name that is quoted holds no +."""
    return "+".join(quote(name, safe="") for name in pair)


def _number(*names: Any) -> int:
    """A seed that is the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:4])
