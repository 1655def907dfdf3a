"""The pass runner: runs passes in order, times and verifies each, and keeps the Program after every one.

Programs are immutable and share what a pass did not change, so keeping them all is cheap; `csc dump --after` and
`csc diff` are nothing more than printing them.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from csc.passes.attention import attention, attention_order
from csc.passes.context import context
from csc.passes.data_parallel import data_parallel
from csc.passes.differentiate import differentiate
from csc.passes.dropout import dropout
from csc.passes.features import features
from csc.passes.freeze import freeze
from csc.passes.head import head
from csc.passes.in_place import in_place
from csc.passes.loss import loss
from csc.passes.overlap import overlap
from csc.passes.partition import partition, schedule
from csc.passes.precision import precision
from csc.passes.prune import prune
from csc.passes.recompute import recompute
from csc.passes.regions import regions
from csc.passes.sequence import sequence
from csc.passes.shapes import shapes
from csc.passes.simplify import simplify
from csc.passes.split import split
from csc.passes.tensor import tensor
from csc.passes.views import views
from torch import fx

from csc.analysis.placements import CheckedGraphs, verify_on
from csc.errors import InputError
from csc.ir.groups import Group
from csc.ir.program import Options, Program, Record
from csc.ir.verifier import verify

Pass = Callable[[Program, Options], Program]
CAPTURE = "capture"

# Up to `views` nothing depends on what is frozen; a new frozen set starts again behind it.
TRACING: tuple[Pass, ...] = (
    shapes, dropout, precision, attention, context, data_parallel, loss, head, regions, tensor, sequence,
    differentiate, simplify, views,
)  # fmt: skip
DIVIDING: tuple[Pass, ...] = (freeze, prune, features, recompute, split, attention_order, overlap, in_place)
PLANNING: tuple[Pass, ...] = (*DIVIDING, partition, schedule)


@dataclass(frozen=True)
class Contract:
    """What the docstring of a pass says of it."""

    name: str
    summary: str
    requires: str
    ensures: str
    before: str
    after: str


def contracts() -> list[Contract]:
    """The contracts of all passes, in the order they run."""
    return [_contract(one) for one in (*TRACING, *PLANNING)]


def _contract(one: Pass) -> Contract:
    text = inspect.getdoc(one) or ""
    fields = {}
    for field in ("Requires", "Ensures", "Before", "After"):
        found = re.search(rf"^{field}\s+(.*?)(?=^\w+\s\s|\Z)", text, flags=re.DOTALL | re.MULTILINE)
        fields[field.lower()] = re.sub(r"\s+", " ", found[1]).strip() if found else ""
    summary = re.split(r"\n\s*\n|\nRequires", text)[0]
    return Contract(one.__name__, re.sub(r"\s+", " ", summary).strip(), **fields)


def run(
    history: Sequence[Program],
    passes: Sequence[Pass],
    options: Options,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Program]:
    """`history` and the Program after each of the passes. Raises CscError if a pass or its verification fails."""
    programs = list(history)
    sound: set[tuple[fx.Graph, int]] = set()
    placed: dict[str, CheckedGraphs] = {}
    for one in passes:
        progress(one.__name__)
        start = time.perf_counter()
        program = one(programs[-1], options)
        verify(program, after=one.__name__, sound=sound)
        if options.mesh.sizes(Group.TENSOR) != (1,):
            verify_on(options.mesh, program, one.__name__, placed)
        record = Record(one.__name__, time.perf_counter() - start, _summary(program))
        programs.append(replace(program, history=(*programs[-1].history, record)))
    return programs


def after(history: Sequence[Program], name: str) -> Program:
    """The Program after a pass ("capture" for the first). Raises InputError for an unknown name."""
    names = [CAPTURE, *(one.__name__ for one in (*TRACING, *PLANNING))]
    if name not in names:
        raise InputError(f"there is no pass {name!r}", "--after", f"choose one of {', '.join(names)}")
    return history[names.index(name)]


def _summary(program: Program) -> str:
    """What the Program holds now, in a few words."""
    if program.schedule is not None:
        ranks = program.schedule.ranks
        return f"{program.schedule.name}: {sum(map(len, ranks))} actions on {len(ranks)} ranks"
    if program.stages:
        return f"{len(program.stages)} stages, {len(program.messages)} messages"
    if program.variants:
        nodes = sum(len(v.pruned.nodes) for v in program.variants.values())
        return f"{len(program.variants)} variants, {nodes} nodes"
    if program.regions:
        return f"{len(program.regions)} regions, {len(program.templates)} templates"
    return f"{len(program.graph.nodes)} nodes"
