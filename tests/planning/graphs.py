"""Planning problems for tests, and brute force over them.

problems(...)            hypothesis: chains, encoders and a trunk, DeepStack, cross-attention, any small DAG
assignments(problem)     every acyclic assignment of units to `ranks` non-empty stages
bound_of(problem, units) the bound of one stage, from its definition: longest paths over F, B and W
best_makespan(...)       the least makespan over all orders
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from csc.planning.problem import Problem, Unit, Value, pipeline
from tests.simulation.random_loads import taken

Op = tuple[str, int]


def problem_of(
    links: dict[int, list[int]],
    times: Sequence[tuple[float, bool]],
    ranks: int,
    microbatches: int,
    sizes: Sequence[tuple[float, float]] | None = None,
    scale: tuple[float, ...] | None = None,
    components: Sequence[str] | None = None,
) -> Problem:
    """times[u]: (seconds of F, trains). links[u]: who reads what u makes. sizes[u]: (saved, state)."""
    count = len(times)
    ahead = {u: [a for a, readers in links.items() if u in readers] for u in range(count)}
    turns = [False] * count
    units = []
    for u, (forward, trains) in enumerate(times):
        gives = any(turns[a] for a in ahead[u])
        turns[u] = trains or gives
        saved, state = sizes[u] if sizes else (0.0, 0.0)
        units.append(
            Unit(
                f"u{u}",
                components[u] if components else "trunk",
                forward,
                forward * (1 + u % 2) if gives else 0.0,
                forward if trains else 0.0,
                has_b=turns[u],
                has_w=trains,
                saved=saved,
                stashed=saved * (u % 3) if trains else 0.0,
                state=state,
            )
        )
    values = tuple(
        Value(a, tuple(sorted(readers)), (turns[a],) * len(readers), 1.0 + a, 2.0)
        for a, readers in sorted(links.items())
        if readers
    )
    return Problem(tuple(units), values, ranks, microbatches, scale=scale)


def chain(*parts: range | list[int]) -> dict[int, list[int]]:
    """Links along each of the parts."""
    links: dict[int, list[int]] = {}
    for part in parts:
        for a, b in itertools.pairwise(part):
            links.setdefault(a, []).append(b)
    return links


@st.composite
def problems(draw: st.DrawFn, most: int = 6, ranks: int = 4, microbatches: Sequence[int] = (1, 2, 4, 8)) -> Problem:
    """Small problems of the shapes that multimodal models have, and arbitrary ones."""
    count = draw(st.integers(3, most))
    kind = draw(st.sampled_from(["chain", "encoders", "deepstack", "cross", "any"]))
    if kind == "chain":
        links = chain(range(count))
    elif kind == "encoders":
        a = draw(st.integers(1, count - 2))
        b = draw(st.integers(a + 1, count - 1))
        links = chain(range(a), range(a, b), range(b, count))
        links.setdefault(a - 1, []).append(b)
        links.setdefault(b - 1, []).append(b)
    elif kind == "deepstack":
        links = chain(range(count))
        a = draw(st.integers(0, count - 3))
        links[a].append(draw(st.integers(a + 2, count - 1)))
    elif kind == "cross":
        a = draw(st.integers(1, count - 2))
        links = chain(range(a), range(a, count))
        readers = draw(st.sets(st.integers(a + 1, count - 1), min_size=1))
        links.setdefault(a - 1, []).extend(sorted(readers))
    else:
        links = {a: sorted(draw(st.sets(st.integers(a + 1, count - 1), max_size=2))) for a in range(count - 1)}
    seconds = st.integers(1, 6).map(float)
    times = draw(st.lists(st.tuples(seconds, st.booleans()), min_size=count, max_size=count))
    size = st.integers(0, 5).map(float)
    sizes = draw(st.lists(st.tuples(size, size), min_size=count, max_size=count))
    step = draw(st.sampled_from(microbatches))
    scale = draw(st.none() | st.tuples(*[st.sampled_from([0.5, 1.0, 1.5])] * step))
    ahead = draw(st.lists(st.sampled_from(["a", "b"]), min_size=count - 1, max_size=count - 1))
    components = [*sorted(ahead), "c"]
    return problem_of(
        links, times, draw(st.integers(1, min(ranks, count))), step, sizes, scale, components
    )  # fmt: skip


def orders(problem: Problem) -> set[tuple[int, int]]:
    """(a, b): unit a must not be in a later stage than unit b."""
    found = set()
    for value in problem.values:
        found |= {(value.maker, reader) for reader in value.readers}
        giving = [r for r, given in zip(value.readers, value.gradient) if given]
        found |= set(itertools.pairwise(giving))
    return found


def assignments(problem: Problem) -> Iterator[tuple[int, ...]]:
    """The stage of each unit, for every acyclic assignment; the same stages may come in several orders."""
    edges = orders(problem)
    for home in itertools.product(range(problem.ranks), repeat=len(problem.units)):
        if len(set(home)) == problem.ranks and all(home[a] <= home[b] for a, b in edges):
            yield home


def members(home: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(u for u, stage in enumerate(home) if stage == s) for s in range(max(home) + 1))


def edges_of(problem: Problem) -> list[tuple[Op, Op]]:
    """What waits for what in one microbatch."""
    found: list[tuple[Op, Op]] = []
    for value in problem.values:
        found += [(("F", value.maker), ("F", reader)) for reader in value.readers]
        visits = [r for r, given in zip(value.readers, value.gradient) if given][::-1]
        found += [(("B", a), ("B", b)) for a, b in itertools.pairwise([*visits, value.maker])]
    for u in range(len(problem.units)):
        found += [(("F", u), ("B", u)), (("B", u), ("W", u))]
    return found


def seconds_of(problem: Problem, op: Op) -> float:
    unit = problem.units[op[1]]
    return {"F": unit.forward, "B": unit.backward_input, "W": unit.backward_weight}[op[0]]


def paths(problem: Problem) -> tuple[dict[Op, float], dict[Op, float]]:
    """Longest paths that end with each operation, and that start with it."""
    count = len(problem.units)
    sequence = [("F", u) for u in range(count)] + [("B", u) for u in reversed(range(count))]
    sequence += [("W", u) for u in range(count)]
    edges = edges_of(problem)
    ends: dict[Op, float] = {}
    starts: dict[Op, float] = {}
    for op in sequence:
        ends[op] = max((ends[a] for a, b in edges if b == op), default=0.0) + seconds_of(problem, op)
    for op in reversed(sequence):
        starts[op] = max((starts[b] for a, b in edges if a == op), default=0.0) + seconds_of(problem, op)
    return ends, starts


def bound_of(problem: Problem, units: Sequence[int], priced: Problem | None = None) -> float:
    """The bound of a stage as csc.planning.partition_bound states it. priced: whose seconds its own work takes."""
    inside = set(units)
    ends, starts = paths(problem)
    scale = problem.scale or (1.0,) * problem.microbatches
    m, r = sum(scale), min(scale)
    f, b, w = (sum(seconds_of(priced or problem, (kind, u)) for u in inside) for kind in "FBW")
    edges = [(x, y) for x, y in edges_of(problem) if x[0] == y[0]]
    entering = [(x, y) for x, y in edges if y[1] in inside and x[1] not in inside]
    leaving = [(x, y) for x, y in edges if x[1] in inside and y[1] not in inside]
    into = {kind: max((ends[x] for x, _ in entering if x[0] == kind), default=0.0) for kind in "FB"}
    out = {kind: max((starts[y] for _, y in leaving if y[0] == kind), default=0.0) for kind in "FB"}
    before_f, after_b = into["F"], out["B"]
    before_b = max(into["B"], before_f + f)
    after_f = max(out["F"], b + max(after_b, w))
    return max(
        r * (before_f + after_f) + m * f,
        r * (before_f + after_b) + m * (f + b),
        r * before_f + m * (f + b + w),
        r * (before_b + after_b) + m * b,
        r * before_b + m * (b + w),
    )


def main_chain(problem: Problem) -> list[int]:
    """The longest path, by units, along what comes before what."""
    edges = orders(problem)
    best: dict[int, list[int]] = {}
    for u in range(len(problem.units)):
        best[u] = [*max((best[a] for a, b in edges if b == u), key=lambda path: (len(path), path[-1]), default=[]), u]
    return max(best.values(), key=lambda path: (len(path), -path[-1]))


def paced_bound_of(problem: Problem, stages: Sequence[Sequence[int]], steps: Sequence[float]) -> float:
    """What csc.planning.partition_bound states about a partition, its pace lowered to the next of `steps`."""
    chain = main_chain(problem)
    count = problem.microbatches
    ends, starts = paths(problem)
    forward = [sum(problem.units[u].forward for u in units) * bool(set(units) & set(chain)) for units in stages]
    pace = max(step for step in steps if step < max(forward))
    slowest = max(s for s, seconds in enumerate(forward) if seconds > pace)
    bound = 0.0
    for units in stages[slowest + 1 :]:
        inside = set(units)
        f, b, w = (sum(seconds_of(problem, (kind, u)) for u in inside) for kind in "FBW")
        if not inside & set(chain) or not b:
            continue
        edges = [(x, y) for x, y in edges_of(problem) if x[0] == y[0]]
        f0 = max((ends[x] for x, y in edges if x[0] == "F" and y[1] in inside and x[1] not in inside), default=0.0)
        b0 = max((ends[x] for x, y in edges if x[0] == "B" and y[1] in inside and x[1] not in inside), default=0.0)
        after = max((starts[y] for x, y in edges if x[0] == "B" and x[1] in inside and y[1] not in inside), default=0.0)
        start = max(f0 + f, b0)
        ahead = sum(problem.units[u].forward for u in chain[: min(chain.index(u) for u in inside & set(chain))])
        early = sum(min(f, max(0.0, start - max(f0, ahead + k * pace))) for k in range(count))
        bound = max(bound, start + count * (f + b) - min(early, start - f0) + max(after, count * w))
    return bound


def depths_of(problem: Problem, home: Sequence[int]) -> list[int]:
    depth = [1] * (max(home) + 1)
    for s in reversed(range(len(depth))):
        later = {home[b] for a, b in orders(problem) if home[a] == s} - {s}
        depth[s] = 1 + max((depth[t] for t in later), default=0)
    return depth


def needs_of(problem: Problem, home: Sequence[int]) -> list[float]:
    """Bytes of each stage with min(microbatches, depth) in flight, one of them perhaps between B and W of a unit."""
    most = max(problem.scale or (1.0,))
    units = problem.units
    needs = []
    for inside, depth in zip(members(home), depths_of(problem, home)):
        saved = sum(units[u].saved for u in inside if units[u].has_b)
        kept = sum(units[u].stashed for u in inside if units[u].has_w)
        flying = min(problem.microbatches, depth)
        apart = (flying - 1) * saved + kept  # one of them waits for its W
        fused = flying * saved + max(units[u].stashed - units[u].saved if units[u].has_w else 0.0 for u in inside)
        needs.append(sum(units[u].state for u in inside) + most * max(flying * saved, min(apart, fused)))
    return needs


def best_makespan(problem: Problem, stages: Sequence[Sequence[int]], placement: Sequence[int]) -> float:
    """The least makespan of these stages on these ranks over all orders: branch over active schedules.

    Giffler and Thompson 1960: of the operations that could come next take the one that would end first; on its rank,
    try every operation that could start before that. One of the schedules that come out is optimal.
    """
    numbers = pipeline(problem, stages)
    count = problem.microbatches
    seconds: dict[tuple[str, int, int], float] = {}
    for s, stage in enumerate(numbers.stages):
        for k in range(count):
            seconds["F", s, k] = taken(numbers, "forward", s, k)
            if stage.has_b:
                seconds["B", s, k] = taken(numbers, "backward_input", s, k)
            if stage.has_w:
                seconds["W", s, k] = taken(numbers, "backward_weight", s, k)
    ahead: dict[tuple[str, int, int], list[tuple[str, int, int]]] = {op: [] for op in seconds}
    for kind, s, k in seconds:
        ahead[kind, s, k] += [(kind, a, k) for (channel, a, b) in numbers.messages if (channel, b) == (kind, s)]
        if kind == "B":
            ahead[kind, s, k].append(("F", s, k))
        if kind == "W":
            ahead[kind, s, k].append(("B", s, k))
    best = math.inf

    def extend(ended: dict[tuple[str, int, int], float], free: tuple[float, ...]) -> None:
        nonlocal best
        if len(ended) == len(seconds):
            best = min(best, max(free))
            return
        ready = {
            op: max(free[placement[op[1]]], *(ended[a] for a in ahead[op]), 0.0)
            for op in seconds
            if op not in ended and all(a in ended for a in ahead[op])
        }
        first = min(ready, key=lambda op: ready[op] + seconds[op])
        limit, rank = ready[first] + seconds[first], placement[first[1]]
        left = [0.0] * len(free)
        for op in seconds:
            if op not in ended:
                left[placement[op[1]]] += seconds[op]
        if max(a + b for a, b in zip(free, left)) >= best:
            return
        for op, start in ready.items():
            if placement[op[1]] == rank and (start < limit or op == first):
                now = list(free)
                now[rank] = start + seconds[op]
                extend({**ended, op: now[rank]}, tuple(now))

    extend({}, (0.0,) * (max(placement) + 1))
    return best


def mllm(
    encoders: Sequence[tuple[int, float]],
    trunk: tuple[int, float],
    ranks: int,
    frozen: Sequence[str] = ("encoder", "llm"),
    microbatches: int = 24,
    recompute: bool = True,
    memory: float | None = None,
) -> Problem:
    """Encoders (layers, seconds of F of one) with a trained projector each, into a trunk of layers and a head."""
    units: list[Unit] = []
    links: dict[int, list[int]] = {}

    def add(name: str, component: str, forward: float, trains: bool, ahead: list[int]) -> int:
        gives = any(units[a].has_b for a in ahead)
        backward = (forward if gives else 0.0) + (forward if recompute and (gives or trains) else 0.0)
        turns = gives or trains
        units.append(
            Unit(
                name, component, forward, backward, forward if trains else 0.0, turns, trains,
                saved=forward if turns else 0.0, stashed=forward / 2 if trains else 0.0,
                state=forward * (8 if trains else 1),
            )
        )  # fmt: skip
        for a in ahead:
            links.setdefault(a, []).append(len(units) - 1)
        return len(units) - 1

    ends = []
    for e, (layers, seconds) in enumerate(encoders):
        last: list[int] = []
        for i in range(layers):
            last = [add(f"encoder{e}.{i}", f"encoder{e}", seconds, "encoder" not in frozen, last)]
        ends.append(add(f"projector{e}", f"projector{e}", 0.05 * seconds, True, last))
    ends.append(add("embed", "llm", 0.001 * trunk[1], "llm" not in frozen, []))
    last = ends
    for i in range(trunk[0]):
        last = [add(f"llm.{i}", "llm", trunk[1], "llm" not in frozen, last)]
    add("head", "llm", trunk[1], "llm" not in frozen, last)
    values = tuple(
        Value(a, tuple(readers), (units[a].has_b,) * len(readers), 1.0, 1.0) for a, readers in sorted(links.items())
    )
    return Problem(tuple(units), values, ranks, microbatches, memory)


def with_memory(problem: Problem, memory: float) -> Problem:
    return replace(problem, memory=memory)
