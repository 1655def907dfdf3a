"""rank_R.py: what one rank holds, receives, computes and sends, top to bottom; position_P.py: what several ranks share.

Terms: a *position* is an index on the pp axis. Its ranks, a replica and a shard of a sequence each, run the
same functions. A rank that is alone at its position has them in its own file; else they stand once, in the file of the
position, and the files of its ranks import them from there.

    rank_sources(index, mesh) -> {path: text}
    rank_path(rank) -> "rank_617.py"      position_path(position) -> "position_9.py"

The work is linear in ranks, stages, regions and messages.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from csc.codegen.index import ProgramNames
from csc.codegen.python import WIDTH, comment, wrapped
from csc.codegen.segments import Segment
from csc.codegen.stage_functions import StageWriter, place

from csc.ir.groups import Group, group_over
from csc.ir.mesh import Mesh
from csc.ir.program import Message, Program, Stage


def rank_path(rank: int) -> str:
    """The file of a rank."""
    return f"rank_{rank}.py"


def position_path(position: int) -> str:
    """The file of what the ranks of a position share; there is none if it has one rank."""
    return f"position_{position}.py"


def rank_sources(index: ProgramNames, mesh: Mesh) -> dict[str, str]:
    """The text of each rank's file, and of the files that ranks share. Where a rank has several stages, names of
    functions end in the stage.
    """
    stages: list[list[Stage]] = [[] for _ in range(mesh.pp)]
    for stage in index.program.stages:
        stages[stage.rank].append(stage)
    files: dict[str, str] = {}
    for position, (own, ranks) in enumerate(zip(stages, mesh.groups(Group.POSITION), strict=True)):
        written = _position(index, position, own, mesh)
        shared = len(ranks) > 1
        if shared:
            opening = f'"""Position {position} of {mesh.pp}: {_held(written, index.program)}, for {len(ranks)} ranks.'
            files[position_path(position)] = _file([opening, "", *written.docstring], written.imports, written.code)
            names = ["STAGES", *sorted(written.functions)]
            note = f"# {len(ranks)} ranks share these; what is defined below is this rank's own."
            line = f"from .position_{position} import {', '.join(names)}"
            wide = wrapped(f"from .position_{position} import (", names, ")", indent=0)
            code = "\n".join([note, *([line] if len(line) <= WIDTH else wide), ""])
        for rank in ranks:
            docstring = [*_opening(index.program, mesh, rank, written), *written.docstring]
            parts = [code] if shared else [written.imports, written.code]
            files[rank_path(rank)] = _file(docstring, *parts)
    return files


@dataclass(frozen=True)
class _Position:
    """What is the same on all ranks of a position: lines of the docstring, then the code."""

    stages: tuple[int, ...]
    functions: tuple[str, ...]
    docstring: tuple[str, ...]
    imports: str
    code: str


def _position(index: ProgramNames, position: int, stages: Sequence[Stage], mesh: Mesh) -> _Position:
    claimed: set[str] = set()
    writers = []
    for stage in stages:
        writers.append(StageWriter(index, stage, claimed, f"_{stage.index}" if len(stages) > 1 else ""))
        claimed |= set(writers[-1].prefixes())
    docstring = []
    for writer in writers:
        docstring += [f"Stage {writer.stage.index}"] if len(writers) > 1 else []
        docstring += _contents(index, writer.stage, writer.segments, mesh)
    functions = {name: text for writer in writers for name, text in writer.functions().items()}
    return _Position(
        tuple(stage.index for stage in stages),
        tuple(functions),
        (*docstring, *_order(index.program, position, mesh.sharers(position))),
        imports(writers),
        "\n\n".join(functions.values()),
    )


def _file(docstring: Sequence[str], *parts: str) -> str:
    return "\n".join([*docstring, '"""', "", ""]) + "\n\n".join(parts)


def imports(writers: Sequence[StageWriter]) -> str:
    """What a file of these stages begins with."""
    stages = [writer.stage.index for writer in writers]
    lines = [
        "from csc.runtime.weight_names import under",
        *(["from csc.runtime.seeds import seed_of"] if any(writer.seeds for writer in writers) else []),
        "",
        "from . import layers",
        "",
        f"STAGES = ({', '.join(map(str, stages))}{',' if len(stages) == 1 else ''})",
    ]
    lines += [f"{name} = {source}" for writer in writers for name, source in writer.prefixes().items()]
    return "\n".join(lines) + "\n"


def _held(position: _Position, program: Program) -> str:
    *first, last = map(str, position.stages)
    return (f"stages {', '.join(first)} and {last}" if first else f"stage {last}") + f" of {len(program.stages)}"


def _opening(program: Program, mesh: Mesh, rank: int, position: _Position) -> list[str]:
    """The first lines of a rank's docstring: what no other rank's says."""
    at = mesh.coordinates(rank)
    first, *more = mesh.replicas_of(rank)
    replicas = f"replicas {first} to {more[-1]}" if more else f"replica {first}"
    others = f", cp rank {at.cp} of {mesh.cp}" if mesh.cp > 1 else ""
    others += f", tp rank {at.tp} of {mesh.width(at.pp)}" if mesh.sizes(Group.TENSOR) != (1,) else ""
    return [
        f'"""Rank {rank} of {mesh.size}: {_held(position, program)}, {replicas} of {mesh.dp}{others}, '
        f"{comment(program.name)}.",
        "",
        *_copies(mesh, rank),
        *_token_shards(program, mesh, rank),
    ]


def _copies(mesh: Mesh, rank: int) -> list[str]:
    """Which part the rank has of components whose layers fewer tp ranks divide."""
    there = mesh.width(mesh.coordinates(rank).pp)
    lines: list[str] = []
    for component in [one for one in mesh.held_in_copies if mesh.tp_ranks(one) == there]:
        (part, copy), parts = mesh.part(component, rank), mesh.dividing(component)
        lines.append(
            f"{'' if lines else 'Divided':<9} part {part} of {parts} of {comment(component)}, copy {copy} of "
            f"{there // parts}"
        )
    return lines


def _token_shards(program: Program, mesh: Mesh, rank: int) -> list[str]:
    """Which part of the tokens of each component the rank has, where they are spread."""
    rows = [
        f"shard {mesh.place(group_over(one.axis), rank) % one.ranks} of {one.ranks} of {comment(one.component)}: "
        f"{one.shard} slots for {one.tokens} tokens"
        for one in program.contexts
    ]
    return [f"{'Tokens' if not i else '':<9} {row}" for i, row in enumerate(rows)]


def _contents(index: ProgramNames, stage: Stage, parts: Sequence[Segment], mesh: Mesh) -> list[str]:
    """What a stage holds, receives and sends."""
    lines = []
    for number, segment in enumerate(parts):
        name = comment(segment.first.name)
        if segment.loops:
            name += f" ... {comment(segment.last.name)} ({len(segment.regions)} layers)"
        own = [p for region in segment.regions for p in region.parameters]
        trained = sum(p in index.trainable for p in own)
        state = (
            "no parameters"
            if not own
            else "frozen"
            if not trained
            else "trained"
            if trained == len(own)
            else (f"{trained} of {len(own)} parameters trained")
        )
        lines.append(f"{'Holds' if not number else '':<9} {name}: {state}")
    for title, messages, other in (
        ("Receives", index.arriving, "source"),
        ("Sends", index.leaving, "destination"),
    ):
        rows = [
            f"{'' if kind == 'F' else 'gradient of '}{comment(value)} {index.types[value]} "
            f"{'from' if other == 'source' else 'to'} {place(index.program, getattr(message, other), stage)}"
            f"{_counterparts(mesh, index.program, message)}"
            for kind in "FB"
            for message in messages.get((kind, stage.index), ())
            for value in message.values
        ]
        lines += [f"{title if not i else '':<9} {row}" for i, row in enumerate(rows or ["nothing"])]
    return lines


def _counterparts(mesh: Mesh, program: Program, message: Message) -> str:
    """Who of the tp ranks sends, and to how many, where one end has fewer of them."""
    source, destination = (mesh.extent(program.stages[one].rank) for one in (message.source, message.destination))
    several = f", {destination[0] // source[0]} replicas for each" if source[0] < destination[0] else ""
    several = f", each from {source[0] // destination[0]} replicas" if source[0] > destination[0] else several
    here, there = source[1], destination[1]
    if here < there:
        return f"{several}, {there // here} ranks for each of {here}"
    return f"{several}, by tp rank{f's 0 to {there - 1}' if there > 1 else ' 0'} alone" if here > there else several


ORDER_LINES = 6


def _order(program: Program, position: int, replicas: int) -> list[str]:
    """The rank's actions as in schedule.txt, the first lines of them where there are many."""
    assert program.schedule is not None
    text = ""
    for action in program.schedule.ranks[position]:
        text += f"{' | ' if text else ''}{action}"
        if len(text) > (ORDER_LINES + 1) * WIDTH:  # more than can be shown
            break
    rows = textwrap.wrap(text, WIDTH - 10)
    if len(rows) > ORDER_LINES:
        rows = [*rows[: ORDER_LINES - 1], f"... and so on: see 'rank {position}' in schedule.txt"]
    rows += ["each action once for every replica, in turn"] if replicas > 1 else []
    return [f"{'Order' if not i else '':<9} {row}" for i, row in enumerate(rows)]
