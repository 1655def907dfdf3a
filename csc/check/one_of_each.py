"""A program that is too large to run here, beside eager PyTorch: its model with one layer of each kind.

Terms: the *shallow* model is the user's own with the other layers handing on what they are given (csc.check.shallow).
It is captured, compiled and compared as any model, on at most two microbatches of the batch, on one rank but for
context parallelism, and runs the layer files of the large program. Those that it cannot run are named.

    check_by_layer(compiler, ready, options, files) -> Checked      DifferenceError if they differ
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from typing import Any

from torch import nn

from csc.check.compiling import Compiles
from csc.check.eager import joined
from csc.check.first import BUG, ROOM, Checked, check, room_of
from csc.check.layer_files import install_alike, not_the_same
from csc.check.one_step import step_of
from csc.check.shallow import bytes_of, kinds, shallow
from csc.errors import CscError, DifferenceError
from csc.ir.program import Options, Program
from csc.runtime.loaded_program import load
from csc.runtime.trainer import Trainer
from csc.runtime.transport import InProcess

log = logging.getLogger("csc")

MICROBATCHES = 2  # enough for their weights to show
WORK = 2e12  # FLOPs of a check on a CPU: seconds to tens of seconds


def check_by_layer(
    compiler: Compiles, ready: Sequence[Mapping[str, Any]], options: Options, files: Mapping[str, bytes]
) -> Checked:
    """ready: microbatches of one batch, in order; files: of the program, by their names in its directory.

    Holds three times the weights of the shallow model, and what one step of it keeps. DifferenceError that names the
    region where both part; the model is as before in any case.
    """
    start = time.perf_counter()
    model = compiler.model
    staged = tuple((component, 1) for component, _ in options.mesh.own_ranks)  # they need stages of their own
    mesh = replace(options.mesh, dp=1, pp=1 + len(staged), own_stages=staged, own_replicas=())
    alone = replace(
        options, mesh=mesh, cuts=None, stages=None, placement=None, chunks=None, schedule="auto", memory=None,
        features=False,
    )  # fmt: skip
    whole = compiler.finished(ready[0], alone)
    left_out = kinds(whole)
    ready = ready[:MICROBATCHES] if not _too_much(model, whole, left_out, MICROBATCHES) else ready[:1]
    reason = _too_much(model, whole, left_out, len(ready))
    if reason:
        return Checked(skipped=reason)
    alone = replace(alone, microbatches=len(ready))
    trainable = {parameter.name for parameter in whole.parameters if parameter.trainable}
    alone = replace(alone, freeze=None)
    with shallow(model, left_out, trainable), tempfile.TemporaryDirectory(prefix="csc-check-") as folder:
        small = _Shallow(compiler.of(model), _together(compiler, ready), ready, alone, Path(folder))
        try:
            small.write()
        except CscError as error:
            return Checked(skipped=f"the model with one layer of each kind does not compile: {error}")
        found, apart = _compared(small, files)
    if found.skipped:
        return found
    what = "with one layer of each kind" + (f" (not {', '.join(apart)})" if apart else "")
    return replace(found, seconds=time.perf_counter() - start, what=what)


@dataclass(frozen=True)
class _Shallow:
    """The shallow model's compiler, its batch, and a folder for its programs."""

    compiler: Compiles
    batch: Any
    ready: Sequence[Mapping[str, Any]]
    options: Options
    folder: Path

    def write(self) -> None:
        program = self.compiler.finished(self.ready[0], self.options)
        complete = self.compiler.complete(self.ready[0])
        copytree(self.compiler.emit(program, self.options, self.folder / "own", complete), self.folder / "given")

    def check(self, name: str) -> Checked:
        loaded = load(self.folder / name)
        trainer = Trainer(loaded, dict(self.compiler.model.named_parameters()), InProcess(loaded))
        complete = map(self.compiler.complete, self.ready)
        trainable = {name for name, _ in trainer.named_parameters()}
        return check(
            self.compiler, lambda: step_of(trainer, list(complete)), trainable, self.batch, self.ready, self.options
        )


def _compared(small: _Shallow, files: Mapping[str, bytes]) -> tuple[Checked, tuple[str, ...]]:
    """The comparison with the large program's layer files as far as they can be run, and the others."""
    others = install_alike(files, small.folder / "given")
    if others:
        try:
            return small.check("given"), not_the_same(files, small.folder / "given")
        except DifferenceError as error:
            small.check("own")  # raises if these are wrong, too
            raise DifferenceError(
                f"{error.what.split(';')[0]}; with the layer files of the same model with fewer layers it would",
                ", ".join(others), f"It {BUG}",
            ) from None  # fmt: skip
        except Exception as error:  # they were planned otherwise: what F keeps for B, for one
            log.info("%s cannot be run with one layer of each kind: %s", ", ".join(others), error)
    return small.check("own"), not_the_same(files, small.folder / "own")


def _too_much(model: nn.Module, whole: Program, left_out: Mapping[str, str], microbatches: int) -> str:
    """Why the shallow model cannot run here either; "" if it can."""
    held, room = bytes_of(model, left_out), ROOM * room_of(model)
    if 3 * held > room:
        return (
            f"weights and two sets of gradients of one layer of each kind, and of what is in no layer, are "
            f"{3 * held / 1e9:.0f} GB, and a check takes up to {room / 1e9:.0f} GB here"
        )
    work = 2 * microbatches * sum(
        sum(whole.variants[region.variant].flops) for region in whole.regions if region.module not in left_out
    )  # fmt: skip
    if whole.device == "cpu" and work > WORK:
        return (
            f"one layer of each kind, and what is in no layer, take {work / 1e12:.1f} TFLOP at these sizes, and a "
            f"check on a CPU up to {WORK / 1e12:.0f}; compile for a shorter example to have it"
        )
    return ""


def _together(compiler: Compiles, ready: Sequence[Mapping[str, Any]]) -> Any:
    """Microbatches as one batch, if they can be."""
    if len(ready) == 1:
        return ready[0]
    whole = joined(ready)
    if whole is None:
        return list(ready)
    alike = compiler.whole_entries(whole, len(ready))
    return {name: ready[0][name] if name in alike else value for name, value in whole.items()}
