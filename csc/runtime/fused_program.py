"""The functions of one program that Inductor compiles, from its first step on.

Terms: the program of a run's *first* sizes is compiled before its first step. *Later* ones, for sizes that come on the
way, run as they are until they have been met MET times, and from then on until what compiles them in the background is
done on every rank: no step waits. Before that each rank *tries* what was compiled, in a step that runs as it is: each
compiled function beside the one that it stands for. If one differs on any rank, no rank uses any. So it is with a first
program whose functions cannot be run without values, but that its second step waits. *busy*: something is being
compiled for the program in the background, or is to be tried. *settled*: see csc.runtime.fused_words.

    program = FusedProgram(number, functions, folder, kept, device, background, without, later)
    program.says -> flags           before each step: BUSY, PREPARES, READY
    program.before(calls, hold)     in each step; hold: some rank is busy with a program of this step
    program.word(hold), .settle(words, hold)       in a step in which some rank prepares, or is ready and none is busy
    program.after()                 after each step
    program.rows() -> [FusedRow]    what was compiled, and what runs as it is

Ranks switch to compiled functions in the same step, and to the same ones: values that several of them compute alike
stay alike to the bit.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from csc.kernels.onednn import least_multiplications
from csc.runtime.compiled_function import BeingMadeError, settings
from csc.runtime.function_order import FunctionOrder
from csc.runtime.fused_words import FusedWord
from csc.runtime.inductor import ALL, COMPILED, KEPT, Fused, FusedRow
from csc.runtime.kept_program import CalledForm, KeptProgram
from csc.runtime.rank import Rank
from csc.runtime.rehearsal import rehearse
from csc.runtime.side_by_side import Background, CompileWorker, make_side_by_side, worker_count

log = logging.getLogger("csc")

UNLIKE = "not all ranks' CPUs and C++ compilers have the same vector instructions"
MET = 4  # steps with a size, before it is compiled: not what comes once
BUSY, PREPARES, READY = 1, 2, 4  # what a program says before a step
Call = tuple[Rank, Mapping[str, Any], Mapping[str, torch.Tensor]]  # microbatch and weights


class FusedProgram:
    """Of this process' ranks. number: in the order in which all ranks take programs. folder: of what is compiled. kept:
    None where nothing is kept for other processes. without: why this process cannot compile; "": it can. worker: gives
    one that makes functions beside this process; None: a new one each time.
    """

    def __init__(
        self, number: int, functions: list[Fused], folder: Path, kept: KeptProgram | None, device: torch.device,
        background: Background, positions: Sequence[int] = (0,), without: str = "", later: bool = False,
        worker: Callable[[], CompileWorker] | None = None,
    ) -> None:  # fmt: skip
        self._number, self._positions, self._without = number, positions, without
        self._functions, self._background, self._device = functions, background, device
        self._worker = worker
        self._by_name = {one.name: one for one in functions}
        self._folder, self._kept, self._later = folder, kept, later
        self._steps, self._notes_at = 0, MET if later else 0  # the step in which calls are noted; 0: in none
        self._watches, self._noted, self._settled = False, False, False
        self._orders: list[tuple[Fused, FunctionOrder]] = []
        self._to_make: list[FunctionOrder] = []
        self._prepared = False
        self._left: set[str] = set()  # keys of what is being made
        self._failed: dict[str, str] = {}  # why what was ordered was not made, by key
        self._refused: dict[str, str] = {}  # why a function does not run compiled here: by its name, or that and a form
        self._elsewhere: dict[str, str] = {}  # the same of any rank
        self._nothing = ""  # why no function is to run compiled on any rank
        self._tries, self._tried = False, False
        self._made = threading.Event()

    @property
    def says(self) -> int:
        """Waits where a step is to be the first one that can be compiled, and where steps have to be the same from run
        to run (torch.use_deterministic_algorithms).
        """
        if self._settled:
            return 0
        if not self._noted:
            return 0 if self._notes_at else PREPARES
        if not self._later or torch.are_deterministic_algorithms_enabled():
            self._made.wait()
        return READY if self._tried else BUSY

    @property
    def is_settled(self) -> bool:
        """Whether what runs stays so."""
        return self._settled

    def before(self, calls: Callable[[], Iterable[Call]], hold: bool) -> None:
        """See the module."""
        if self._settled:
            return
        self._steps += 1
        if not self._notes_at:
            self._prepare(calls)
        if self._noted and self._made.is_set() and not self._tried:
            self._take(self._to_make)
            self._try(True)
        if self._steps == self._notes_at and not self._without:
            self._note()

    # ahead of the first step

    def _prepare(self, calls: Callable[[], Iterable[Call]]) -> None:
        """Compile side by side what is not kept, once."""
        if self._prepared or self._without:
            return
        try:
            self._orders = self._told() or self._rehearsed(calls())
        except Exception as error:
            log.info(
                "fuse: the first step runs as it is, as its functions cannot be run without values: %s: %s",
                type(error).__name__, error,
            )  # fmt: skip
            self._notes_at = self._steps
            return
        left = self._take_kept()
        workers = worker_count() if self._device.type == "cpu" else 0  # Inductor has its own for kernels of GPUs
        make_side_by_side(left, self._here, workers, self._worker)
        self._take(left)
        self._prepared = True

    def _told(self) -> list[tuple[Fused, FunctionOrder]]:
        """What an earlier start has kept."""
        forms = self._kept.forms() if self._kept is not None else None
        known = [(self._by_name.get(form.name), form) for form in forms or ()]
        return [(one, one.order(form.structure, form.layouts)) for one, form in known if one is not None]

    def _rehearsed(self, calls: Iterable[Call]) -> list[tuple[Fused, FunctionOrder]]:
        for one in self._functions:
            one.watch(repeats=False)
        try:
            for call in calls:
                rehearse(*call)
        finally:
            found = self._watched()
        return found

    def _here(self, order: FunctionOrder, wait: bool) -> None:
        one = next(one for one, other in self._orders if other is order)
        try:
            one.make(order, wait)
        except BeingMadeError:
            raise
        except Exception as error:  # of whatever stands in the file
            self._failed[order.key] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

    def _watched(self) -> list[tuple[Fused, FunctionOrder]]:
        """What was called since they are watched. None is watched any more, whatever happens: in a rehearsal they give
        tensors without values.
        """
        found: dict[str, tuple[Fused, FunctionOrder]] = {}
        for one in self._functions:
            try:
                found |= {order.key: (one, order) for order in one.watched()}
            except Exception as error:  # of a C++ compiler that does not work, say
                self._refuse(one, ALL, f"{type(error).__name__}: {error}")
        return list(found.values())

    # on the way

    def _note(self) -> None:
        """All functions run as they are in this step, and what they are called with is compiled after it."""
        for one in self._functions:
            one.watch(repeats=True)
        self._watches = True

    def _take_kept(self) -> list[FunctionOrder]:
        """Take what is there; what is to be made."""
        return [order for one, order in self._orders if not order.is_kept or one.take(order, KEPT)]

    def _take(self, left: Sequence[FunctionOrder]) -> None:
        """What was made; why the rest was not."""
        made = {order.key for order in left}
        for one, order in self._orders:
            if order.key in made:
                why = self._failed.get(order.key) or one.take(order, COMPILED)
                if why and not self._later and order.key not in self._failed:  # what another process could not make
                    self._here(order, True)
                    why = self._failed.get(order.key) or one.take(order, COMPILED)
                if why:
                    self._refuse(one, order.form, why)

    def _refuse(self, function: Fused, form: str, why: str) -> None:
        """Of this rank's own."""
        log.warning("fuse: %s runs as it is%s: %s", function.name, self._when, why)
        self._refused[_named(function, form)] = why
        function.refuse(form, why)

    @property
    def _when(self) -> str:
        return " for sizes that came later" if self._later else ""

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
            self._tried = True
            for one in self._functions:
                untried = {_named(one, form): "it was not called in the step that tries it" for form in one.untried}
                self._refused = untried | self._refused
        if self._watches:
            self._watches = False
            self._orders, self._noted = self._watched(), True
            self._to_make = self._take_kept()
            self._left = {order.key for order in self._to_make}
            if not self._left:
                self._made.set()
            self._background.make(self._to_make, self._is_made)

    def _is_made(self, order: FunctionOrder, why: str) -> None:
        if why and self._later:
            self._failed[order.key] = why.partition("\n")[0]
        self._left.discard(order.key)
        if not self._left:
            self._made.set()

    # with the other ranks

    def word(self, hold: bool) -> FusedWord | None:
        """What the others have to know before they settle it; None: there is nothing to settle in this step."""
        notes = not self._later and self._steps == self._notes_at
        ready = self._prepared or (self._tried and not hold)
        if self._settled or not (self._without or notes or ready):
            return None
        differs = next((why for one in self._functions for why in one.differs), "")
        return FusedWord(self._number, self._positions, self._built(), self._without or differs, self._refused, notes)

    def _built(self) -> str:
        try:
            if self._without:
                return ""
            built = settings(self._folder, self._device.type == "cpu")
            return json.dumps(built | {"products by oneDNN from": least_multiplications()}, sort_keys=True)
        except Exception:  # of a compiler that does not work: then nothing was taken, and each function says why
            return ""

    def settle(self, words: Sequence[FusedWord], hold: bool) -> None:
        """words: of all ranks, on any program."""
        ours = [one for one in words if one.program == self._number]
        for word in ours:
            self._nothing = self._nothing or word.everything or ("" if word.built in (ours[0].built, "") else UNLIKE)
            self._elsewhere |= word.refused
        own = self.word(hold)
        if own is not None and not own.notes:
            if any(one.notes and set(one.positions) & set(self._positions) for one in ours):
                self._prepared, self._notes_at = False, self._steps  # as what computes the same values
                self._note()
                return
            self._switch()
        elif self._settled:  # another replica's
            self._refuse_elsewhere()

    def _switch(self) -> None:
        self._settled = True
        self._refuse_elsewhere()
        if self._nothing:
            log.warning("fuse: all functions run as they are%s, as %s", self._when, self._nothing)
            return
        for one in self._functions:
            one.on = True
        if self._later:
            log.info("fuse: the functions for sizes that came later are compiled")
        if self._kept is not None:
            forms = [CalledForm(one.name, order.structure, order.layouts) for one, order in self._orders]
            self._kept.keep(self.rows(), forms)

    def _refuse_elsewhere(self) -> None:
        """Run as they are, here too, the functions that a rank could not have compiled."""
        for one, order in self._orders:
            why = self._elsewhere.get(_named(one, order.form)) or self._elsewhere.get(_named(one, ALL)) or self._nothing
            if why and one.refuse(order.form, why) and not self._nothing:
                log.warning("fuse: %s runs as it is%s, as on another rank: %s", one.name, self._when, why)

    def rows(self) -> list[FusedRow]:
        """Of each function and layout that was called."""
        return [row for one in self._functions for row in one.rows]


def _named(function: Fused, form: str) -> str:
    return f"{function.name} {form}".rstrip()
