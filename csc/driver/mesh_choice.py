"""Which mesh trains a step's samples fastest on so many devices: every layout priced by the costs of plans.

Terms
  layout    see csc.planning.meshes
  way       what makes a layout take less memory: ZeRO-1 (which costs nothing where ranks hold the same parameters),
            recomputation, ZeRO-3. The fastest that fits counts: where memory lets few microbatches wait, to
            compute again may be faster
  price     the simulated makespan of a plan, and behind it gradients summed and the optimizer's step

  order     how ranks count through the axes, which says what stands within a node (csc.ir.mesh)

    choose(compiled, devices, step, seconds, tell, fixed) -> MeshChoice

Where several nodes are filled, the fastest plan of a layout is priced in every order of its ranks, and planned for one
that makes it faster. A layout whose work alone takes longer than the best plan so far is not planned. Tracing is what
takes time: it is made once for each tp, cp and size of a microbatch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from csc.capture.batch import split_batch
from csc.driver.compiled import CompiledModel
from csc.driver.dividing import samples_of
from csc.driver.rank_orders import priced_orders
from csc.errors import CscError, InputError
from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program
from csc.passes.pipeline_problem import chosen_hardware, problem
from csc.passes.step_end import seconds_behind
from csc.planning.meshes import MeshLayout, layouts
from csc.planning.plan import PipelinePlan, plan
from csc.planning.problem import Problem

EFFORT, LIMIT = 0.1, 2.0  # of the search for each layout, in seconds
LARGEST = 16  # samples of a microbatch
GAIN = 1e-3  # what another order of ranks has to save, to be looked at
WAYS = ((1, "none"), (1, "full"), (3, "none"), (3, "full"))  # zero, recompute


@dataclass(frozen=True)
class MeshRow:
    """seconds: of a step, its end included. peak_memory: of the fullest rank. fits: within the limit."""

    mesh: str
    microbatches: int
    samples: int
    zero: int
    recompute: str
    seconds: float
    idle: float
    peak_memory: float
    fits: bool


@dataclass(frozen=True)
class MeshChoice:
    """rows: the fastest first, those that do not fit behind all others. slower: layouts that were left out, as their
    work alone takes longer than the best. refused: why there is none, by mesh. left: layouts there was no time for.
    """

    devices: int
    step: int
    memory: float | None
    rows: tuple[MeshRow, ...]
    slower: int
    refused: Mapping[str, str]
    left: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Fixed:
    """What is not chosen, but given. None: it is chosen."""

    microbatches: int | None = None
    zero: int | None = None
    recompute: Any = None

    def ways(self) -> list[tuple[int, Any]]:
        """(zero, recompute), in the order in which they are tried."""
        found = [
            (zero if self.zero is None else self.zero, recompute if self.recompute is None else self.recompute)
            for zero, recompute in WAYS
        ]
        return [way for number, way in enumerate(found) if way not in found[:number]]


NOTHING_FIXED = Fixed()


def choose(
    compiled: CompiledModel, devices: int, step: int | None, seconds: float, tell: Callable[[str], None],
    fixed: Fixed = NOTHING_FIXED,
) -> MeshChoice:  # fmt: skip
    """The layouts of a compiled model's example on so many devices. step: samples of a step; None: the example's.

    Takes about `seconds` once the model is captured. InputError if the samples cannot be divided, or there is no mesh
    at all.
    """
    return _MeshSearch(compiled, devices, step, seconds, tell, fixed).choice()


class _MeshSearch:
    def __init__(
        self, compiled: CompiledModel, devices: int, step: int | None, seconds: float, tell: Callable[[str], None],
        fixed: Fixed,
    ) -> None:  # fmt: skip
        plain = compiled.with_options(mesh=Mesh(), microbatches=1, schedule="auto", recompute=(("*", "none"),), zero=0)
        self.compiled, self.devices, self.tell, self.fixed = plain, devices, tell, fixed
        batches = compiled.example if isinstance(compiled.example, (list, tuple)) else [compiled.example]
        self.samples = sum(samples_of(split_batch(batch)[0]) for batch in batches)
        self.step = step or self.samples
        sizes = [n for n in range(1, min(self.samples, LARGEST) + 1) if self.samples % n == 0 and n & (n - 1) == 0]
        self.microbatches: dict[int, Mapping[str, Any]] = {}
        program = self._smallest(plain, sizes)
        hardware = chosen_hardware(program, plain.options)
        self.asked = [
            one for one in layouts(devices, self.step, sizes, hardware.ranks_per_node, len(program.regions))
            if fixed.microbatches in (None, one.microbatches)
        ]  # fmt: skip
        if not self.asked:
            many = "" if fixed.microbatches is None else f" with microbatches={fixed.microbatches}"
            raise InputError(
                f"{self.step} samples of a step cannot be divided among {devices} devices alike{many}", "samples",
                f"give a multiple of {devices}, or fewer devices",
            )  # fmt: skip
        self.memory: float | None = None
        self.best = math.inf
        self.end = time.monotonic() + seconds  # from here on: the model has been captured

    def choice(self) -> MeshChoice:
        rows: list[MeshRow] = []
        refused: dict[tuple[str, int], str] = {}
        slower = left = 0
        for layout in self.asked:
            if time.monotonic() >= self.end:
                left += 1
                continue
            divided = (_division(layout), layout.samples)
            if divided in refused:
                continue
            try:
                found = self._priced(layout)
            except CscError as error:  # csc cannot divide the model so, or microbatches of this size
                refused[divided] = str(error)
                continue
            rows += [found] if found is not None else []
            slower += found is None
        if not rows:
            raise InputError(
                f"no mesh of {self.devices} devices was found", "mesh",
                "; ".join(dict.fromkeys(refused.values())) or "allow more seconds",
            )  # fmt: skip
        rows.sort(key=lambda row: (not row.fits, row.seconds))
        return MeshChoice(self.devices, self.step, self.memory, tuple(rows), slower, self._told(refused), left)

    def _told(self, refused: Mapping[tuple[str, int], str]) -> dict[str, str]:
        """Why there is none, by the division of layers and tokens where the microbatch makes no difference."""
        sizes = {(_division(layout), layout.samples) for layout in self.asked}
        found = {}
        for (division, samples), why in refused.items():
            alike = {refused.get(one) for one in sizes if one[0] == division} == {why}
            found[division if alike else f"{division} with microbatches of {samples}"] = why
        return found

    def _priced(self, layout: MeshLayout) -> MeshRow | None:
        """By the fastest way that fits, else by the last one; None if the layout cannot be the best."""
        several = len(layout.mesh.group(Group.DATA, 0)) > 1
        self.tell(str(layout))
        rows: list[MeshRow] = []
        for zero, recompute in self.fixed.ways():
            if zero == 3 and not several and self.fixed.zero is None:
                continue
            own = self.compiled.with_options(
                mesh=layout.mesh, microbatches=layout.microbatches, zero=zero if several else 0, recompute=recompute
            )
            program = self._divided(own, layout.samples)
            numbers = replace(problem(program, own.options), microbatches=layout.microbatches)
            self.memory = numbers.memory
            work = sum(unit.forward + unit.backward_input + unit.backward_weight for unit in numbers.units)
            if work * layout.microbatches / layout.mesh.pp < self.best:
                rows.append(self._ordered(layout, own.options, program, numbers, recompute))
                self.best = min([self.best, *(row.seconds for row in rows if row.fits)])
        fitting = [row for row in rows if row.fits]
        return min(fitting, key=lambda row: row.seconds) if fitting else rows[-1] if rows else None

    def _ordered(
        self, layout: MeshLayout, options: Options, program: Program, numbers: Problem, recompute: Any
    ) -> MeshRow:
        """By the order of ranks in which this plan is the fastest."""
        planned, fits = _planned(numbers)
        best = self._row(layout, options, program, recompute, planned, fits)
        orders = priced_orders(
            program, options, numbers, planned.stages, planned.placement, planned.schedule
        )  # fmt: skip
        for other in orders[1:]:
            if other.seconds >= best.seconds * (1 - GAIN):
                continue
            again, fits = _planned(other.problem)
            row = self._row(layout, other.options, program, recompute, again, fits)
            best = min(best, row, key=lambda one: (not one.fits, one.seconds))
        return best

    @staticmethod
    def _row(
        layout: MeshLayout, options: Options, program: Program, recompute: Any, planned: PipelinePlan, fits: bool
    ) -> MeshRow:
        return MeshRow(
            mesh=str(options.mesh),
            microbatches=layout.microbatches,
            samples=layout.samples,
            zero=options.zero,
            recompute=recompute if isinstance(recompute, str) else "as given",
            seconds=planned.makespan + seconds_behind(program, options, planned.stages, planned.placement),
            idle=sum(planned.bubble) / len(planned.bubble),
            peak_memory=max(planned.peak_memory),
            fits=fits,
        )

    def _smallest(self, compiled: CompiledModel, sizes: Sequence[int]) -> Program:
        """Of the fewest samples that csc can divide. CscError if there are none."""
        for samples in sizes[:-1]:
            with suppress(CscError):
                return self._divided(compiled, samples)
        return self._divided(compiled, sizes[-1])

    def _divided(self, compiled: CompiledModel, samples: int) -> Program:
        if samples not in self.microbatches:
            cut = self.compiled.with_options(microbatches=self.samples // samples)
            self.microbatches[samples] = cut.inspected.microbatch
        return compiled.inspected.divided(self.microbatches[samples])


def _planned(numbers: Problem) -> tuple[PipelinePlan, bool]:
    """A plan, and whether it keeps to the limit."""
    try:
        return plan(numbers, "auto", effort=EFFORT, limit=LIMIT), True
    except CscError:  # nothing does
        return plan(replace(numbers, memory=None), "1f1b", effort=EFFORT, limit=LIMIT), False


def _division(layout: MeshLayout) -> str:
    """Of layers and tokens."""
    return f"tp={layout.mesh.tp}, cp={layout.mesh.cp}"
