"""Which mesh trains a step's samples fastest on so many devices: layouts priced by the costs of plans.

    choose(compiled, devices, step, seconds, tell, fixed, workers) -> MeshChoice

Terms and the search itself: csc.driver.mesh_search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from csc.capture.batch import split_batch
from csc.driver.compiled import CompiledModel
from csc.driver.compiler import uncollected
from csc.driver.dividing import samples_of
from csc.driver.mesh_rows import NOTHING_FIXED, DividedModel, FixedChoices, MeshChoice
from csc.driver.mesh_search import MeshSearch
from csc.driver.search_workers import workers_here
from csc.errors import InputError
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program

LARGEST = 16  # samples of a microbatch


def choose(
    compiled: CompiledModel, devices: int, step: int | None, seconds: float, tell: Callable[[str], None],
    fixed: FixedChoices = NOTHING_FIXED, workers: int | None = None,
) -> MeshChoice:  # fmt: skip
    """The layouts of a compiled model's example on so many devices. step: samples of a step; None: the example's.

    Takes about `seconds`, the capture of the model among them; at least four fifths are for the search. InputError if
    the samples cannot be divided, or there is no mesh at all, and for hardware or memory that is said of each pipeline
    rank. workers: processes that search; None: as many as there are cores, four at most.
    """
    for what, number in (("devices", devices), ("samples", 1 if step is None else step)):
        if not isinstance(number, int) or number < 1:
            raise InputError(f"{what} is {number!r}", "mesh", "give a whole number of at least 1")
    if not seconds >= 0:
        raise InputError(f"the search for a mesh may take {seconds!r} seconds", "mesh", "give 0 or more")
    for name in ("hardware", "memory"):
        if isinstance(getattr(compiled.options, name), tuple):
            raise InputError(
                f"{name} is given for each pipeline rank, and how many there are is to be chosen", name,
                "give one for all, or the mesh",
            )  # fmt: skip
    plain = compiled.with_options(
        mesh=Mesh(), microbatches=1, schedule="auto", recompute=None, zero=0, cuts=None, stages=None,
        placement=None, chunks=None, sequence_parallel=False,
    )  # fmt: skip
    batches = compiled.example if isinstance(compiled.example, (list, tuple)) else [compiled.example]
    samples = sum(samples_of(split_batch(batch)[0]) for batch in batches)
    microbatches: dict[int, Mapping[str, Any]] = {}

    def divided(options: Options, size: int) -> Program:
        if size not in microbatches:
            microbatches[size] = plain.with_options(microbatches=samples // size).inspected.microbatch
        return plain.with_options(
            mesh=options.mesh,
            microbatches=options.microbatches,
            zero=options.zero,
            recompute=options.recompute,
            sequence_parallel=options.sequence_parallel,
            context=dict(options.context),
        ).inspected.divided(microbatches[size])

    sizes = [n for n in range(1, min(samples, LARGEST) + 1) if samples % n == 0 and n & (n - 1) == 0]
    model = DividedModel(plain.options, tuple(sizes), divided)
    with uncollected():
        asked = model, devices, samples if step is None else step, seconds, tell, fixed
        return MeshSearch(*asked, workers=workers or workers_here()).choice()
