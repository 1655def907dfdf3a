"""The functions of one program that Inductor compiles, from its first step on.

Terms: the program of a run's *first* sizes is compiled before its first step. *Later* ones, for sizes that come on the
way, run as they are until they have been met MET times, and from then on until what compiles them in the background is
done on every rank: no step waits. Before that each rank *tries* what was compiled, in a step that runs as it is: each
compiled function beside the one that it stands for. If one differs on any rank, no rank uses any. *busy*: something is
being compiled for the program in the background, is to be tried, or was found to differ.

    program = FusedProgram(functions, folder, key, background)      background: None for the first sizes
    program.prepare(calls)          before the first step: compiles side by side what is not kept
    program.before(hold)            before each step; hold: some rank is busy with a program of this step
    program.after()                 after each step
    program.rows() -> [FusedRow]    what was compiled, and what runs as it is
    rows_of(folder, fingerprint) -> the same of an earlier start, from what is kept

Ranks switch to compiled functions in the same step: values that several of them compute alike stay alike to the bit.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from csc.runtime.compiled_function import BeingMadeError, write_whole
from csc.runtime.function_order import FunctionOrder
from csc.runtime.inductor import Fused, FusedRow
from csc.runtime.rank import Rank
from csc.runtime.rehearsal import rehearse
from csc.runtime.side_by_side import Background, make_side_by_side, worker_count

log = logging.getLogger("csc")

MET = 4  # steps with a size, before it is compiled: not what comes once
PREFIX = 32  # of a fingerprint, in a key
SIDE_BY_SIDE = 2  # functions to compile, from which on they are looked for ahead
Call = tuple[Rank, Mapping[str, Any], Mapping[str, torch.Tensor]]  # microbatch and weights


class FusedProgram:
    """Of this process' ranks. key: of the program and all that its functions' keys depend on; "" where nothing is kept
    for other processes.
    """

    def __init__(
        self, functions: list[Fused], folder: Path, key: str, device: torch.device, background: Background | None
    ) -> None:
        self._functions, self._background, self._device = functions, background, device
        self._file = program_file(folder, key) if key else None
        self._steps, self._watches, self._switched = 0, False, background is None
        self._left: set[str] = set()
        self._tries, self._tried, self._differs = False, False, False
        self._made = threading.Event()

    def prepare(self, calls: Callable[[], Iterable[Call]]) -> None:
        """Nothing where that was done before. Errors are left to the functions' own first calls."""
        if self._background is not None:
            return
        self._steps += 1
        known = self._file is not None and self._file.is_file()
        if self._steps > 1 or known or self._device.type != "cpu":
            return  # Inductor compiles kernels for GPUs side by side itself
        try:
            orders = self._rehearsed(calls())
        except Exception as error:
            log.debug("fuse: each function is compiled at its first call: %s: %s", type(error).__name__, error)
            return
        for one in self._functions:
            one.ordered |= {order.key for order in orders}
        if len(orders) >= SIDE_BY_SIDE:
            make_side_by_side(orders, _here, worker_count())

    def _rehearsed(self, calls: Iterable[Call]) -> list[FunctionOrder]:
        for one in self._functions:
            one.watch(repeats=False)
        try:
            for call in calls:
                rehearse(*call)
        finally:
            found = self._watched()
        return found

    def _watched(self) -> list[FunctionOrder]:
        """What was called since they are watched and is not kept. None is watched any more, whatever happens: in a
        rehearsal they give tensors without values.
        """
        found: dict[str, FunctionOrder] = {}
        for one in self._functions:
            try:
                found |= {order.key: order for order in one.watched()}
            except Exception as error:  # of a C++ compiler that does not work, say; a first call says so
                tell = log.debug if self._background is None else log.warning
                tell("fuse: %s runs as it is: %s: %s", one.name, type(error).__name__, error)
        return [order for order in found.values() if not order.is_kept]

    @property
    def busy(self) -> bool:
        """Waits instead where steps have to be the same from run to run (torch.use_deterministic_algorithms)."""
        if self._switched or not self._watches_done:
            return False
        if torch.are_deterministic_algorithms_enabled():
            self._made.wait()
        return self._differs or not self._tried

    @property
    def _watches_done(self) -> bool:
        return self._background is not None and self._steps >= MET and not self._watches

    def before(self, hold: bool) -> None:
        """See the module."""
        if self._switched:
            return
        if self._tried and not hold:
            self._switch()
            return
        if self._watches_done and self._made.is_set() and not self._tried:
            self._try(True)
        self._steps += 1
        if self._steps == MET:
            for one in self._functions:
                one.watch(repeats=True)
            self._watches = True

    def _switch(self) -> None:
        for one in self._functions:
            one.on = True
        self._switched = True
        log.info("fuse: the functions for sizes that came later are compiled")

    def _try(self, tries: bool) -> None:
        """One of csc's operators is called by the functions as they are alone, so this rank may do so by itself; a step
        that fails in its middle is followed by another one that tries.
        """
        self._tries = tries
        for one in self._functions:
            one.tries(tries)

    def after(self) -> None:
        """See the module."""
        if self._tries:
            self._try(False)
            found = [why for one in self._functions for why in one.differs]
            self._tried, self._differs = True, bool(found)
            for why in found:
                log.warning("fuse: all functions run as they are for sizes that came later, as %s", why)
        if self._watches and self._background is not None:
            self._watches = False
            orders = self._watched()
            self._left = {order.key for order in orders}
            if not orders:
                self._made.set()
            for one in self._functions:
                one.ordered |= self._left
            self._background.make(orders, self._is_made)
        if self._file is not None and self._steps == 1 and self._switched and not self._file.is_file():
            self._keep_rows(self._file)

    def _keep_rows(self, file: Path) -> None:
        """Where nothing is compiled there is no folder for them; that none could be written is no error of a step."""
        try:
            if self.rows():
                write_whole(file, json.dumps([asdict(row) for row in self.rows()]))
        except OSError as error:
            log.info("fuse: what was compiled is not told to later starts: %s", error)

    def _is_made(self, order: FunctionOrder, why: str) -> None:
        if why:
            log.warning("fuse: %s runs as it is for sizes that came later: %s", order.shown, why.partition("\n")[0])
        self._left.discard(order.key)
        if not self._left:
            self._made.set()

    def rows(self) -> list[FusedRow]:
        """Of each function and layout that was called."""
        return [row for one in self._functions for row in one.rows]


def program_file(folder: Path, key: str) -> Path:
    """Where the rows of a program that has made a step are kept. A key begins with the program's fingerprint."""
    return folder / "functions" / f"{key}.program"


def rows_of(folder: Path, fingerprint: str) -> list[FusedRow]:
    """Of the functions of a program that has made a step on this machine, as the latest start to compile them told."""
    files = sorted(folder.glob(f"functions/{fingerprint[:PREFIX]}-*.program"), key=lambda one: one.stat().st_mtime)
    return [FusedRow(**row) for row in json.loads(files[-1].read_text())] if files else []


def _here(order: FunctionOrder, wait: bool) -> None:
    try:
        order.make(wait)
    except BeingMadeError:
        raise
    except Exception as error:  # its first call says why, and runs it as it is
        log.debug("fuse: %s: %s", order.shown, error)
