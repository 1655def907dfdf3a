"""Small changes of a partition: one unit goes to a neighbouring stage.

Terms: see csc.planning.branches. A *neighbour* of a unit is a stage that holds a unit right before or after it.

    neighbours(found, stages, home, unit)       -> the stages that a unit can go to, so that none becomes empty
    moves(found, stages)                        -> (unit, from, to) of every such change
    moved(found, stages, unit, to)              -> stages, or None if they would wait for each other in a circle
    settle(problem, tables, stages, cap, ...)   -> stages: as good as single moves make them under a cap
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from csc.errors import InputError
from csc.planning.branches import Branches, Stages, numbered
from csc.planning.problem import Problem, Value
from csc.planning.room import Room
from csc.planning.segment_bounds import ChainTables, stage_bounds

ROUNDS = 20  # over all units; what is left to gain after a few is little


def homes(stages: Sequence[Sequence[int]]) -> list[int]:
    """The stage of each unit."""
    home = [0] * sum(len(units) for units in stages)
    for s, units in enumerate(stages):
        for unit in units:
            home[unit] = s
    return home


def neighbours(found: Branches, stages: Sequence[Sequence[int]], home: Sequence[int], unit: int) -> list[int]:
    """Where a unit can go from home[unit]. One with its stage's units on both sides stays, as does one alone."""
    stage = home[unit]
    if len(stages[stage]) == 1:
        return []
    ahead = {home[a] for a in found.before[unit]}
    behind = {home[a] for a in found.after[unit]}
    targets = (ahead if stage not in ahead else set()) | (behind if stage not in behind else set())
    return sorted(targets - {stage})


def moves(found: Branches, stages: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Every (unit, its stage, a neighbour), by unit."""
    home = homes(stages)
    for unit, stage in enumerate(home):
        yield from ((unit, stage, target) for target in neighbours(found, stages, home, unit))


def moved(found: Branches, stages: Sequence[Sequence[int]], unit: int, to: int) -> Stages | None:
    """The stages after the move, numbered anew."""
    home = homes(stages)
    home[unit] = to
    try:
        return numbered(found, home)
    except InputError:
        return None


def depths(found: Branches, stages: Sequence[Sequence[int]]) -> list[int]:
    """The number of stages on the longest path from each stage to the end, itself included. Stages are numbered."""
    home = homes(stages)
    depth = [1] * len(stages)
    for s in range(len(stages) - 1, -1, -1):
        later = {home[after] for unit in stages[s] for after in found.after[unit]} - {s}
        depth[s] = 1 + max((depth[t] for t in later), default=0)
    return depth


def held(problem: Problem, found: Branches, stages: Sequence[Sequence[int]], room: Room) -> list[float]:
    """Bytes that the rank of each stage needs; see csc.planning.room.Room."""
    needs = []
    for members, depth in zip(stages, depths(found, stages)):
        units = [problem.units[u] for u in members]
        saved = sum(unit.saved for unit in units if unit.has_b)
        stashed = sum(unit.stashed for unit in units if unit.has_w)
        working = max(unit.working for unit in units)
        moment = min(max(unit.fused for unit in units), max(0.0, stashed - saved))
        needs.append(
            sum(unit.state for unit in units) + room.scale * (room.in_flight[depth] * saved + moment + working)
        )
    return needs


def settle(
    problem: Problem, tables: ChainTables, stages: Stages, cap: float, room: Room | None, part: Sequence[int]
) -> Stages:
    """Move single units while no bound goes above `cap`, the memory is kept, no stage mixes parts, and it gets better.

    Better: fewer bytes of messages; else the two stages' bounds are smaller, the larger one first; else their state
    and saved bytes are more even.
    """
    found = tables.branches
    touching: list[list[Value]] = [[] for _ in problem.units]
    for value in problem.values:
        for unit in {value.maker, *value.readers}:
            touching[unit].append(value)
    total = 1e-9 * sum(value.size + value.gradient_size for value in problem.values)
    limit = cap * (1 + 1e-12)
    for _ in range(ROUNDS):
        better = False
        for unit, source, target in list(moves(found, stages)):
            if len(stages[source]) == 1 or unit not in stages[source] or part[unit] != part[stages[target][0]]:
                continue
            home = homes(stages)
            before = sum(message_bytes(value, home) for value in touching[unit])
            home[unit] = target
            change = sum(message_bytes(value, home) for value in touching[unit]) - before
            if change > total:
                continue
            pair = [stages[source], stages[target]]
            other = [[u for u in pair[0] if u != unit], sorted([*pair[1], unit])]
            old, new = stage_bounds(tables, pair), stage_bounds(tables, other)
            if max(new) > limit:
                continue
            if change >= -total and not _smaller(new, old, cap):
                continue
            after = moved(found, stages, unit, target)
            if after is None or (room and max(held(problem, found, after, room)) > room.memory * (1 + 1e-12)):
                continue
            if [set(units) for units in after] != [
                set(other[0] if s == source else other[1] if s == target else units) for s, units in enumerate(stages)
            ]:
                better, stages = True, after
                break  # the stages have new numbers
            better, stages = True, after
        if not better:
            break
    return stages


def _smaller(new: Sequence[float], old: Sequence[float], cap: float) -> bool:
    for a, b in zip(sorted(new, reverse=True), sorted(old, reverse=True)):
        if abs(a - b) > 1e-9 * cap:
            return a < b
    return False


def message_bytes(value: Value, home: Sequence[int]) -> float:
    """Bytes that one value sends between stages, forward and back, when unit u is in stage home[u]."""
    made = home[value.maker]
    size = value.size * len({home[reader] for reader in value.readers} - {made})
    visits = [home[reader] for reader, given in zip(value.readers, value.gradient) if given]
    hops = sum(a != b for a, b in zip([made, *visits], visits))
    return size + value.gradient_size * hops
