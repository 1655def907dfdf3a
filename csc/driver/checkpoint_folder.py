"""The state of a run, saved to a folder and taken up from one by all ranks.

save_state(state, folder, step, keep, beside) -> BackgroundSave
chosen(meeting, choose, where) -> index             the same one on every rank, or None on every rank
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from csc.checkpoints import files, writing
from csc.checkpoints.writing import ProcessState, Save
from csc.driver.adapters import note_adapters
from csc.driver.background import BackgroundSave
from csc.driver.checkpoint import write_config
from csc.driver.training_state import WEIGHTS, State, about, expected, taken
from csc.errors import CscError, InputError, RankLost
from csc.runtime.meeting import NOTHING, Meeting, Said

log = logging.getLogger("csc")


def save_state(
    state: State, folder: Path, step: int, keep: int | None = None, beside: Meeting | None = None
) -> BackgroundSave:
    """Write it, or begin to. All ranks call it. keep: see csc.checkpoints.writing. beside: where threads of all ranks
    meet; then copies are taken, and it returns before they are written. InputError, on every rank, if one cannot.
    """
    start = time.perf_counter()
    trainer = state.saved.trainer
    meeting, first = trainer.transport.meeting, 0 in trainer.transport.ranks

    def take() -> tuple[Said, ProcessState]:
        own = taken(state, beside is not None)
        if first and WEIGHTS in state.has:
            write_config(state.saved.model, folder)
            note_adapters(state.saved.model, folder)
        return Said(value=float(secrets.randbits(32)) if first else 0.0), own

    own, heard = meeting.heard("save a checkpoint", take)
    number = f"{int(sum(one.value for one in heard)):08x}"
    names = expected(state) if WEIGHTS in state.has else {}
    save = Save(folder, number, state.process, about(state, step), names, keep)
    if beside is None:
        saving = BackgroundSave(folder, lambda: writing.write(own, save, meeting))
    else:
        copied, seconds = sum(one.tensor.nbytes for one in own.pieces), time.perf_counter() - start
        saving = BackgroundSave(folder, lambda: _written(own, save, beside), copied, seconds)
        log.info("checkpoint of step %d: %.1f MB copied in %.2f s", step, copied / 1e6, seconds)
    saving.begin(beside is not None)
    return saving


def _written(own: ProcessState, save: Save, beside: Meeting) -> None:
    """In a thread, which does not see what else the process does with its groups."""
    several = beside.group is not None
    try:
        writing.write(own, save, beside)
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

    def read() -> tuple[Said, tuple[files.StepIndex | None, str]]:
        folder = choose()
        if folder is None:
            return NOTHING, (None, "no checkpoint")
        return NOTHING, (files.read(folder), f"{folder.name} ({files.digest_of(folder)[:12]})")

    found, told = meeting.hold("load a checkpoint", read)
    others = meeting.texts("load a checkpoint", told)
    if len(set(others)) > 1:
        rank = next(rank for rank, one in enumerate(others) if one != others[0])
        raise InputError(
            f"rank 0 has found {others[0]} there, and rank {rank} {others[rank]}", str(where),
            "give all ranks a directory that they share, or the number of a step that all have",
        )  # fmt: skip
    return found
