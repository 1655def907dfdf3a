"""Checkpoints of a training run: saved at one mesh and frozen set, taken up at any other."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from csc.checkpoints import files, writing
from csc.checkpoints.writing import CONFIGS, ProcessState, Save
from csc.driver import training_state
from csc.driver.checkpoint import is_pretrained, note_adapters, write_config
from csc.driver.compiled import CompiledModel
from csc.driver.notices import NAMED, notice
from csc.driver.training_state import (
    ALL,
    LOADER,
    OPTIMIZER,
    SCHEDULER,
    WEIGHTS,
    Restored,
    State,
    about,
    expected,
    take_up,
    taken,
)
from csc.errors import CscError, InputError, RankLost
from csc.runtime.meeting import LONGEST_MAKING, NOTHING, Meeting, Vote, without_dead

# --- What a model's configuration says otherwise than the one beside a checkpoint: shapes may agree all the same -----


OF_NO_MODEL = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")  # what it is run with


def differences(model: nn.Module, folder: Path) -> list[str]:
    """None for a model that is not of transformers, and where no configuration can be read."""
    file = folder / CONFIGS[0]
    if not is_pretrained(model) or not file.is_file():
        return []
    config: Any = model.config
    try:
        then, now = json.loads(file.read_text()), json.loads(config.to_json_string())
    except (OSError, ValueError):
        return []
    return list(_of(then, now, "")) if isinstance(then, dict) else []


def _of(then: Mapping[str, Any], now: Mapping[str, Any], within: str) -> Iterator[str]:
    for name in dict.fromkeys([*then, *now]):
        if name in OF_NO_MODEL or name.startswith("_"):
            continue
        before, other = then.get(name), now.get(name)
        if isinstance(before, dict) and isinstance(other, dict):
            yield from _of(before, other, f"{within}{name}.")
        elif before != other:
            yield f"{within}{name} is {_told(before)} there, and {_told(other)} in the model"


def _told(value: Any) -> str:
    return "its default" if value is None else str(value)


# --- A checkpoint that is written while training goes on -------------------------------------------------------------


log = logging.getLogger("csc")


class BackgroundSave:
    """Of one checkpoint.

    Attributes:
        folder: Where it will be.
        copied: Bytes that this process has copied before training went on; 0 where it waited.
        seconds: What that took.
    """

    def __init__(self, folder: Path, write: Callable[[], object], copied: int = 0, seconds: float = 0.0) -> None:
        self.folder, self.copied, self.seconds = folder, copied, seconds
        self._write = write
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, background: bool) -> None:
        """Write it; in the background, errors are kept for `wait`."""
        if not background:
            self._write()
            return
        # No daemon: a script that ends has its last checkpoint written, unless it has left the process group.
        self._thread = threading.Thread(target=self._run, name=f"csc-{self.folder.name}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
            log.error("the checkpoint %s was not saved: %s", self.folder, error)

    @property
    def done(self) -> bool:
        """Whether it is on the disk, or failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Until it is on the disk, on all ranks.

        Returns:
            The folder.

        Raises:
            InputError: It could not be written here; StepFailed: on another rank. What was saved before is as it was.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self.folder


# --- The state of a run, saved to a folder and taken up from one by all ranks ----------------------------------------


def save_state(
    state: State, folder: Path, step: int, keep: int | None = None, beside: Meeting | None = None
) -> BackgroundSave:
    """Write it, or begin to. All ranks call it. keep: see csc.checkpoints.writing. beside: where threads of all ranks
    meet; then copies are taken, and it returns before they are written. InputError, on every rank, if one cannot.
    """
    start = time.perf_counter()
    trainer = state.saved.trainer
    meeting, first = trainer.transport.meeting, 0 in trainer.transport.ranks

    def take() -> tuple[Vote, ProcessState]:
        pieces = taken(state, beside is not None)
        if first and WEIGHTS in state.has:
            write_config(state.saved.model, folder)
            note_adapters(state.saved.model, folder)
        return Vote(value=float(secrets.randbits(32)) if first else 0.0), pieces

    own, votes = meeting.votes("save a checkpoint", take)
    number = f"{int(sum(vote.value for vote in votes)):08x}"
    names = expected(state) if WEIGHTS in state.has else {}
    save = Save(folder, number, state.process, about(state, step), names, keep)
    if beside is None:
        saving = BackgroundSave(folder, lambda: writing.write(own, save, meeting))
    else:
        copied, seconds = sum(piece.tensor.nbytes for piece in own.pieces), time.perf_counter() - start
        saving = BackgroundSave(folder, lambda: _written(own, save, beside), copied, seconds)
        log.info("checkpoint of step %d: %.1f MB copied in %.2f s", step, copied / 1e6, seconds)
    saving.begin(beside is not None)
    return saving


def _written(state: ProcessState, save: Save, beside: Meeting) -> None:
    """In a thread, which does not see what else the process does with its groups."""
    several = beside.group is not None
    try:
        writing.write(state, save, beside)
    except Exception as error:
        if isinstance(error, CscError) and not isinstance(error, RankLost):
            raise
        if several and not dist.is_initialized():
            raise RankLost(
                "the process group was destroyed before all ranks had written it", str(save.folder),
                "call wait() of the CheckpointManager before destroy_process_group()",
            ) from error  # fmt: skip
        raise


def chosen(meeting: Meeting, choose: Callable[[], Path | None], where: Path) -> files.StepIndex | None:
    """What is in the folder that `choose` gives. InputError if ranks see other ones."""

    def read() -> tuple[Vote, tuple[files.StepIndex | None, str]]:
        folder = choose()
        if folder is None:
            return NOTHING, (None, "no checkpoint")
        return NOTHING, (files.read(folder), f"{folder.name} ({files.digest_of(folder)[:12]})")

    step, told_text = meeting.hold("load a checkpoint", read)
    texts = meeting.texts("load a checkpoint", told_text)
    if len(set(texts)) > 1:
        rank = next(rank for rank, text in enumerate(texts) if text != texts[0])
        raise InputError(
            f"rank 0 has found {texts[0]} there, and rank {rank} {texts[rank]}", str(where),
            "give all ranks a directory that they share, or the number of a step that all have",
        )  # fmt: skip
    return step


# --- Checkpoints of a training run: saved at one mesh and frozen set, taken up at any other --------------------------


class CheckpointManager:
    """Saves and resumes a training run: weights, the optimizer's state, scheduler, position of the data, generators
    of random numbers, and what the caller adds.

    Each rank writes what it holds, and every entry is written once; a run that is taken up may have another mesh, level
    of ZeRO, number of processes or frozen set. Nothing is pickled. All ranks call its methods, in the same order.

    Args:
        directory: Of the run: each step gets a folder in it, `step-00000100`. Of several machines, one that all share.
        compiled: The model.
        optimizer: Made by `compiled.optimizer(...)`, or over `compiled.parameters()`.
        scheduler: Anything with state_dict() and load_state_dict().
        loader: Likewise; its position is saved for each share of the samples.
        keep: How many checkpoints stay, the last ones; None: all.
        asynchronous: `save` copies what this process writes to the CPU's memory and returns; a thread writes it while
            training goes on.

    Raises:
        InputError: `keep` is no positive number, or scheduler or loader have no state.
    """

    def __init__(
        self,
        directory: str | Path,
        compiled: CompiledModel,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        loader: Any = None,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise InputError(f"keep is {keep!r}", "CheckpointManager", "pass a whole number of at least 1, or None")
        if loader is not None:
            training_state.check(loader)
        if scheduler is not None and not hasattr(scheduler, "load_state_dict"):
            raise InputError(
                f"a {type(scheduler).__name__} has no state_dict() and load_state_dict()", "CheckpointManager",
                "pass a scheduler of torch.optim.lr_scheduler, or anything with these two",
            )  # fmt: skip
        if asynchronous and compiled.survive is not None:
            raise InputError(
                "what a thread writes would lack the part of a rank that dies", "CheckpointManager",
                "use asynchronous=False, or compile without survive=",
            )  # fmt: skip
        self.directory = Path(directory)
        self._compiled, self._optimizer, self._scheduler, self._loader = compiled, optimizer, scheduler, loader
        self._keep, self._asynchronous = keep, asynchronous
        self._saving: BackgroundSave | None = None
        self._beside: Meeting | None = None  # of the threads that write

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        return sorted(files.saved(self.directory))

    @property
    def latest(self) -> int | None:
        """The last step with a checkpoint; None without any."""
        return max(self.steps, default=None)

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> BackgroundSave:
        """Save the run as it is now, after the optimizer's step.

        Args:
            step: How many steps were made: the number of the checkpoint. One that is there is replaced once all is
                written.
            extra: Numbers, texts, tensors, lists and dicts of the caller's own; those of the first rank are kept.

        Returns:
            What `wait()` can be asked of. Without `asynchronous` all is written.

        Raises:
            InputError: It cannot be written, or something has no form without pickle; or the asynchronous save before
                has failed. What was saved earlier is as it was.
        """
        self.wait()
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise InputError(f"step is {step!r}", "save", "pass a whole number of at least 0")
        return without_dead(lambda: self._saved(step, extra or {}))

    def _saved(self, step: int, extra: Mapping[str, Any]) -> BackgroundSave:
        state = self._state(extra, None)
        meeting = state.saved.trainer.transport.meeting
        if self._asynchronous and self._beside is None:
            alone = meeting.group is None
            self._beside = Meeting() if alone else Meeting.of_all(LONGEST_MAKING.total_seconds())
        folder = files.folder_of(self.directory, step)
        saving = save_state(state, folder, step, self._keep, self._beside)
        if self._asynchronous:
            self._saving = saving
        return saving

    def wait(self) -> None:
        """Until the save that is under way is on the disk, on all ranks. To be called at the end of training.

        Raises:
            InputError: It could not be written; StepFailed: on another rank. What was saved before is as it was.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def load(self, step: int | None = None, only: Collection[str] | None = None) -> Restored | None:
        """Take a run up where it was saved.

        Args:
            step: Of the checkpoint; None: the last one that was saved to its end.
            only: Some of "weights", "optimizer", "scheduler", "loader", "random", "extra"; None: all that this manager
                was given, with weights, random numbers and extra.

        Returns:
            What was taken up; None if `step` is None and nothing was saved yet.

        Raises:
            InputError: There is no such checkpoint, something is missing or damaged, or it is of another model or
                optimizer: nothing was changed then.
        """
        self.wait()
        state = self._state({}, only)
        meeting = state.saved.trainer.transport.meeting

        def choose() -> Path | None:
            if self.directory.exists() and not self.directory.is_dir():
                raise InputError("it is no directory", str(self.directory), "give the one that the run is saved to")
            if step is None and not files.saved(self.directory) and not (self.directory / files.FILE).is_file():
                return None
            return files.find(self.directory, step)

        found = chosen(meeting, choose, self.directory)
        if found is None:
            begun = ", ".join(folder.name for folder in files.cut_off(self.directory))
            if begun and 0 in state.saved.trainer.transport.ranks:
                notice(f"{self.directory} has no checkpoint: the save of {begun} was cut off")
            return None
        restored = take_up(state, found)
        self._tell(restored, state)
        return restored

    def _tell(self, restored: Restored, state: State) -> None:
        if 0 not in state.saved.trainer.transport.ranks:
            return
        if restored.begun:
            notice(
                f"the optimizer begins without a state for {_named(restored.begun)}: frozen, or not in the optimizer, "
                f"when {restored.folder.name} was saved"
            )
        changes = differences(state.saved.model, restored.folder) if WEIGHTS in state.has else []
        if changes:
            notice(f"{restored.folder.name} was saved with another config.json: {_named(changes, '; ')}")

    def _state(self, extra: Mapping[str, Any], only: Collection[str] | None) -> State:
        objects = {OPTIMIZER: self._optimizer, SCHEDULER: self._scheduler, LOADER: self._loader}
        lacking = [part for part, obj in objects.items() if obj is None]
        has = [part for part in ALL if part not in lacking] if only is None else list(only)
        for part in has:
            if part not in ALL or part in lacking:
                raise InputError(
                    f"only has {part!r}" + (", and the manager was given none" if part in lacking else ""), "load",
                    f"name some of {', '.join(part for part in ALL if part not in lacking)}",
                )  # fmt: skip
        saved = self._compiled.saved(self._loader, self._optimizer)
        return State(saved, self._scheduler, extra, has)


def _named(differences: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(differences) - NAMED} more" if len(differences) > NAMED else ""
    return between.join(differences[:NAMED]) + more
