"""Checkpoints of a training run: saved at one mesh and frozen set, taken up at any other.

checkpoints = CheckpointManager("run", compiled, optimizer=optimizer, scheduler=scheduler, keep=3)
restored = checkpoints.load()                    None at the first start
checkpoints.save(step)      checkpoints.wait()
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from csc.checkpoints import files
from csc.driver import loader_state
from csc.driver.background import BackgroundSave
from csc.driver.checkpoint_folder import chosen, save_state
from csc.driver.compiled import CompiledModel
from csc.driver.notices import NAMED, notice
from csc.driver.other_config import differences
from csc.driver.training_state import ALL, LOADER, OPTIMIZER, SCHEDULER, WEIGHTS, Restored, State, take_up
from csc.errors import InputError
from csc.runtime.meeting import LONGEST_MAKING, Meeting


class CheckpointManager:
    """Saves and takes up a training run: weights, the optimizer's state, scheduler, position of the data, generators
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
            loader_state.check(loader)
        if scheduler is not None and not hasattr(scheduler, "load_state_dict"):
            raise InputError(
                f"a {type(scheduler).__name__} has no state_dict() and load_state_dict()", "CheckpointManager",
                "pass a scheduler of torch.optim.lr_scheduler, or anything with these two",
            )  # fmt: skip
        self.directory = Path(directory)
        self._compiled, self._optimizer, self._scheduler, self._loader = compiled, optimizer, scheduler, loader
        self._keep, self._asynchronous = keep, asynchronous
        self._saving: BackgroundSave | None = None
        self._beside: Meeting | None = None  # of the threads that write

    @property
    def steps(self) -> list[int]:
        """Of which there is a checkpoint."""
        return sorted(files.saved(self.directory))

    @property
    def latest(self) -> int | None:
        """The last of these."""
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
        state = self._state(extra or {}, None)
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
        found = differences(state.saved.model, restored.folder) if WEIGHTS in state.has else []
        if found:
            notice(f"{restored.folder.name} was saved with another config.json: {_named(found, '; ')}")

    def _state(self, extra: Mapping[str, Any], only: Collection[str] | None) -> State:
        given = {OPTIMIZER: self._optimizer, SCHEDULER: self._scheduler, LOADER: self._loader}
        lacking = [what for what, one in given.items() if one is None]
        has = [what for what in ALL if what not in lacking] if only is None else list(only)
        for what in has:
            if what not in ALL or what in lacking:
                raise InputError(
                    f"only has {what!r}" + (", and the manager was given none" if what in lacking else ""), "load",
                    f"name some of {', '.join(one for one in ALL if one not in lacking)}",
                )  # fmt: skip
        saved = self._compiled.saved(self._loader, self._optimizer)
        return State(saved, self._scheduler, extra, has)


def _named(found: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return between.join(found[:NAMED]) + more
