"""The mesh of a model that was compiled for a number of ranks: csc.Mesh(ranks=64)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from csc.capture.batch import device_of, split_batch
from csc.driver.batches import samples_of
from csc.driver.compiled import CompiledModel
from csc.driver.compiler import uncollected
from csc.driver.mesh_candidates import NOTHING_FIXED, DividedModel, FixedChoices, MeshChoice, MeshRow
from csc.driver.mesh_search import MeshSearch, workers_here
from csc.driver.model_programs import GivenBatches, ModelPrograms
from csc.driver.options import changed
from csc.driver.search_clock import SECONDS
from csc.errors import CscError, InputError
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program
from csc.passes.recompute import NONE
from csc.runtime.launch import join_group
from csc.runtime.meeting import broadcast_group, first_makes
from csc.simulation.page import bytes_text, seconds_text

# --- Which mesh trains a step's samples fastest on so many devices: layouts priced by the costs of plans -------------
#
# Terms and the search itself: csc.driver.mesh_search.


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
    for name, number in (("devices", devices), ("samples", 1 if step is None else step)):
        if not isinstance(number, int) or number < 1:
            raise InputError(f"{name} is {number!r}", "mesh", "give a whole number of at least 1")
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
    samples = sum(samples_of(split_batch(batch)[0], compiled.inspected.axes) for batch in batches)
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
        arguments = model, devices, samples if step is None else step, seconds, tell, fixed
        return MeshSearch(*arguments, workers=workers or workers_here()).choice()


# --- The mesh of a model that was compiled for a number of ranks: csc.Mesh(ranks=64) ---------------------------------
#
# What the caller gives of these (more than one microbatch, zero above 0, recomputation) stays. Of several processes
# the first one chooses, for all of them: how far a search gets depends on the clock. What was chosen is kept in the
# cache, for the same model, sizes, options and hardware: another start finds it.


log = logging.getLogger("csc")

CHOSEN = "mesh"  # the one file that the first rank hands out
OF_ONE_MESH = ("cuts", "stages", "placement", "chunks")


def with_chosen_mesh(programs: ModelPrograms, given: GivenBatches, options: Options) -> Options:
    """The fastest of the layouts that fit, by the costs of their plans for the example. All ranks call it.

    InputError without an example, for options that are of one mesh, and where nothing fits or divides.
    """
    ranks = options.mesh.size
    _refuse(options, given)
    device = device_of(programs.compiler.model).type

    def make() -> dict[str, bytes]:
        return {CHOSEN: _kept(programs, given, options).encode()}

    several = join_group(device, programs.settings.timeout, ranks, str(options.mesh))
    files = first_makes(make, broadcast_group()) if several else make()
    assert files is not None
    chosen = json.loads(files[CHOSEN])
    chosen_options = changed(options, **chosen["options"])
    programs.chosen = chosen_options.mesh, chosen["why"]
    return chosen_options


def _kept(programs: ModelPrograms, batches: GivenBatches, options: Options) -> str:
    """The choice as text, from the cache if it is there."""
    tensors, extra = split_batch(batches.example)
    entries, example = programs.compiler.kept, tensors | extra
    failures = programs.settings.failures
    known = entries.mesh(example, options, failures)
    if known:
        try:
            chosen = json.loads(known)
            changed(options, **chosen["options"])
            chosen["why"] += ", at an earlier start"
            log.info("%s", chosen["why"])
            return json.dumps(chosen)
        except (ValueError, KeyError, TypeError, CscError) as error:  # nothing that csc wrote
            log.info("the mesh in the cache is not used: %s", error)
    text = json.dumps(_chosen(programs, batches, options, options.mesh.size))
    entries.keep_mesh(text, example, options, failures)
    return text


def _refuse(options: Options, batches: GivenBatches) -> None:
    if not batches.known:
        raise InputError(
            f"{options.mesh} is a mesh that csc has to choose, and there is no example batch", "mesh",
            "pass example=, a batch as a step has it, or the sizes of the axes",
        )  # fmt: skip
    if isinstance(batches.example, (list, tuple)):
        raise InputError(
            f"the example is a list of ready microbatches, and {options.mesh} leaves their number to csc", "mesh",
            "pass one batch of all samples of a step, or the sizes of the axes",
        )  # fmt: skip
    fixed = [name for name in OF_ONE_MESH if getattr(options, name) != getattr(Options(), name)]
    fixed += [name for name in ("hardware", "memory") if isinstance(getattr(options, name), tuple)]
    if options.schedule != "auto":
        fixed.append("schedule")
    if fixed:
        raise InputError(
            f"the options {', '.join(fixed)} are of one mesh, and csc has to choose it", "mesh",
            f"leave them out, or give the sizes of the axes in place of {options.mesh}",
        )  # fmt: skip


def _chosen(programs: ModelPrograms, batches: GivenBatches, options: Options, ranks: int) -> dict[str, Any]:
    """options: what is chosen of them, as `changed` takes them; why: in words."""
    start = time.perf_counter()
    recompute = options.recompute if options.recompute != Options().recompute else None
    fixed = FixedChoices(
        options.microbatches if options.microbatches > 1 else None, options.zero or None, recompute,
        programs.settings.failures,
    )  # fmt: skip
    plain = CompiledModel(programs, batches, replace(options, mesh=Mesh(), microbatches=1, zero=0))
    choice = choose(plain, ranks, None, SECONDS, _told(programs), fixed)
    best = choice.rows[0]
    if not best.fits:
        left = f" ({choice.left} layouts were not looked at)" if choice.left else ""
        raise InputError(
            f"no mesh of {ranks} ranks fits{left}: {_text(best)} needs {bytes_text(best.peak_memory)} on its fullest "
            f"rank, of {bytes_text(choice.memory or 0)}", "mesh",
            f"take more ranks or memory, or train fewer parameters; `csc plan --devices {2 * ranks}` shows what fits",
        )  # fmt: skip
    why = f"the mesh of {ranks} ranks was chosen in {time.perf_counter() - start:.1f} s: {_text(best)}{_next(choice)}"
    log.info("%s", why)
    chosen = {
        "mesh": best.mesh, "microbatches": best.microbatches, "zero": best.zero,
        "sequence_parallel": best.sequence_parallel, "context": dict(options.context) | dict(best.context),
    }  # fmt: skip
    recomputation = None if best.recompute == NONE else best.recompute
    return {"options": chosen if recompute is not None else {**chosen, "recompute": recomputation}, "why": why}


def _told(programs: ModelPrograms) -> Callable[[str], None]:
    def tell(layout: str) -> None:
        programs.progress(f"mesh [{layout}]")

    return tell


def _text(row: MeshRow) -> str:
    return f"{row.mesh} with {row.how}: {seconds_text(row.seconds)} a step"


def _next(choice: MeshChoice) -> str:
    """The best one of another mesh."""
    other = next((row for row in choice.rows if row.mesh != choice.rows[0].mesh and row.fits), None)
    left = f"; {choice.left} layouts were not looked at" if choice.left else ""
    return (f"; next {_text(other)}" if other is not None else "") + left
