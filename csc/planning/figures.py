"""Whether the numbers of a problem, and of what is asked of a plan, are numbers that can be planned with.

check_figures(problem)                  InputError: the first that is not, whose it is, and what to do
check_asked(chunks, effort, limit)      the same for these
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Integral, Real

from csc.errors import InputError
from csc.planning.problem import SECONDS, Problem
from csc.simulation.pipeline import Network, RankNodes

BYTES = ("saved", "stashed", "state", "gathered", "working")


def check_figures(problem: Problem) -> None:
    """Every time and size is finite and at least 0, the memory is one number, ranks and microbatches are whole, every
    microbatch has a size, values lead from units to later ones. Memory below 0 is what a limit leaves that constants
    alone exceed: the partition says what would fit.
    """
    memory = problem.memory
    if memory is not None and not _number(memory):
        raise InputError(
            f"the memory is {memory!r}, and has to be one number of bytes",
            "memory",
            "Give ranks that differ as kinds, each with its own",
        )
    if memory is not None and not math.isfinite(memory):
        raise InputError(f"a rank cannot work with {memory} bytes of memory", "memory", "Give a number, or no limit")
    per_node = problem.network.ranks_per_node
    _check_whole("ranks", problem.ranks, "Ask for at least 1")
    _check_whole("microbatches", problem.microbatches, "Ask for at least 1")
    if per_node is not None:
        _check_whole("ranks on a node", per_node, "Give at least 1, or None where all are on one")
    _check_kinds(problem)
    _check_values(problem)
    for what, number in _figures(problem):
        if not _number(number) or not 0 <= number < math.inf:
            raise InputError(
                f"{what} is {number!r}",
                "planning",
                "Times and sizes are finite and at least 0: look at the hardware profile or the measured costs",
            )
    if problem.scale is not None and len(problem.scale) != problem.microbatches:
        raise InputError(
            f"{len(problem.scale)} microbatches have a size, the step has {problem.microbatches}",
            "planning",
            "Give one size for each microbatch",
        )
    if problem.scale is not None and not sum(problem.scale):
        raise InputError("no microbatch has a size above 0", "planning", "Give the step something to do")
    whole = sum(unit.work for unit in problem.units) * (sum(problem.scale or ()) or problem.microbatches)
    if not whole < math.inf:
        raise InputError("the step takes more seconds than a float can hold", "planning", "Look at the measured costs")


def _check_values(problem: Problem) -> None:
    """Units that there are, the maker ahead of its readers, and of each reader whether it gives a gradient."""
    for number, value in enumerate(problem.values):
        there = range(len(problem.units))
        if not all(unit in there for unit in (value.maker, *value.readers)):
            raise InputError(
                f"value {number} goes from unit {value.maker} to {list(value.readers)} of {len(there)} units",
                "planning",
                "Number the units from 0, in an order in which they can run",
            )
        if any(reader <= value.maker for reader in value.readers) or len(value.gradient) != len(value.readers):
            raise InputError(
                f"value {number} goes from unit {value.maker} to {list(value.readers)}, with gradients "
                f"{list(value.gradient)}",
                "planning",
                "Units stand in an order in which they can run, and each reader gives a gradient or not",
            )


def _check_kinds(problem: Problem) -> None:
    """Every rank is of one kind and at one place; each kind has seconds of every unit; all have a limit, or none."""
    listed = sorted(rank for kind in problem.kinds for rank in kind.ranks)
    if problem.kinds and listed != list(range(problem.ranks)):
        raise InputError(
            f"the kinds name the ranks {listed}, and there are {problem.ranks}", "planning", "Name each rank once"
        )
    limited = [kind.memory is not None for kind in problem.kinds]
    if any(limited) and not all(limited):
        raise InputError(
            "some kinds of ranks have a memory limit and others have none", "planning", "Give all of them one, or none"
        )
    places = problem.network.places
    if places and len(places) != problem.ranks:
        raise InputError(
            f"the network has places of {len(places)} ranks, and there are {problem.ranks}",
            "planning",
            "Give one for each rank, or none",
        )
    for kind in problem.kinds:
        if len(kind.seconds) != len(problem.units):
            raise InputError(
                f"{kind.name} has the seconds of {len(kind.seconds)} units of {len(problem.units)}",
                "planning",
                "Give those of every unit",
            )


def check_asked(chunks: int | None, effort: float, limit: float | None) -> None:
    """The stages of a rank are a whole number; effort and seconds are finite and at least 0."""
    if chunks is not None:
        _check_whole("stages on a rank", chunks, "Ask for at least 1")
    for name, number in (("effort", effort), ("limit", 0.0 if limit is None else limit)):
        if not _number(number) or not 0 <= number < math.inf:
            raise InputError(f"{name} is {number!r}", "planning", "Give a finite number of at least 0")


def _number(given: object) -> bool:
    return isinstance(given, Real) and not isinstance(given, bool)


def _check_whole(what: str, given: object, remedy: str) -> None:
    if not isinstance(given, Integral) or isinstance(given, bool) or given < 1:
        raise InputError(f"there cannot be {given!r} {what}", "planning", remedy)


def _figures(problem: Problem) -> Iterator[tuple[str, float]]:
    """Every number that goes into a plan, and what it is."""
    for unit in problem.units:
        for name in SECONDS:
            yield f"the {name.replace('_', ' ')} time of {unit.name}", getattr(unit, name)
        for name in BYTES:
            yield f"the {name} bytes of {unit.name}", getattr(unit, name)
    for value in problem.values:
        maker = problem.units[value.maker].name
        yield f"the size of a value of {maker}", value.size
        yield f"the size of the gradient of a value of {maker}", value.gradient_size
    yield "what the runtime takes for an action", problem.action
    yield "what it takes for an end of a message", problem.handling
    for number, factor in enumerate(problem.scale or ()):
        yield f"the size of microbatch {number}", factor
    for kind in problem.kinds:
        for unit, seconds in zip(problem.units, kind.seconds):
            for name, each in zip(SECONDS, seconds):
                yield f"the {name.replace('_', ' ')} time of {unit.name} on {kind.name}", each
    links = {"of the shards' gathers": problem.gathering}
    ends: tuple[Network | RankNodes, ...] = (problem.network, *problem.network.places)
    for end in ends:
        links |= {"within nodes": end.within, "between nodes": end.between}
        for where, link in links.items():
            yield f"the latency {where}", link.latency
            yield f"the seconds for a byte {where}", _for_a_byte(link.bandwidth)


def _for_a_byte(bandwidth: float) -> float:
    """What is no number stays what it is."""
    if not _number(bandwidth):
        return bandwidth
    return 1 / bandwidth if bandwidth else math.inf
