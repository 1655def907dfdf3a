"""How the losses of microbatches make the loss of the whole batch, proven from the captured graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.table import CASTS, COPIES, COUNTED, EXPAND, LABELS, RESHAPES, SLICE, STOPS
from csc.analysis.samples.propagation import (
    Count,
    Mixed,
    NewTensor,
    PartsOfSum,
    SamplePropagation,
    SampleRows,
    State,
    Terms,
    Whole,
)
from csc.analysis.samples.rules import OF_TERMS, RULES
from csc.analysis.symbolic import sized
from csc.ir import graph as g
from csc.ir.capture_guards import evaluated
from csc.ir.program import Combination, Divisor, Input, Program, Term
from csc.torch_private.exported import OpOverload

# --- How the losses of microbatches make the loss of the whole batch, proven from the captured graph -----------------
#
# The samples are followed from the batch to the loss (csc.analysis.samples.propagation). The loss is found to be a sum
# over them, or one divided by a number that adds up over microbatches, or a sum of such terms; or the operation is
# named that makes it anything else.
#
# A proof holds for every size if it was made with more samples than the batch has, and no two sizes that are free were
# the same, nor one of them 1: then which dimensions an operation joins, splits and sums cannot have been a
# coincidence.


ONE_NUMBER = (
    "it was traced for one number of samples, as code with range(n) or int(n) in it is; len(x) and x.shape[0] can vary"
)
HOW_MANY = (
    "the model's code asks in Python how many there are of what unique, bincount or histc gave: of the whole batch "
    "that is another number. make it of the whole batch, outside of the model, and give it as an entry"
)
MOST = 3  # entries that are tried for having no samples
FACTORS = (5, 3, 2)  # more samples than a batch has: a dimension that counts them is then like no other


def combination(program: Program, graph: fx.Graph) -> Combination:
    """As `proven`, of this size."""
    return proven(program, graph)[0]


def proven(program: Program, graph: fx.Graph) -> tuple[Combination, bool]:
    """Never raises: what cannot be proven is the Combination's problem.

    An entry whose rows turn out to be no samples (a number for each layer) is whole, if with that the loss is proven.
    """
    primary = _primary(program)
    if primary is None:
        return Combination(problem="the batch has no entry with samples", where="batch"), False
    question = _asked_how_many(program)
    if question is not None:
        readers = [node for node in g.placeholders(graph) if node.meta["role"][1] == question.name]
        sources = [user.meta.get("source") for node in readers for user in node.users]
        where = next(filter(None, [*sources, program.statistics[question.name]]), "model")
        return Combination(problem=HOW_MANY, where=where, rows=primary.name), False
    verdict, always = _followed(program, graph, primary, ())
    if verdict.problem:
        entries = [
            entry.name for entry in _given(program) if len(entry.shape) == 1 and _own_rows(program, entry, primary)
        ]
        for number in range(1, len(entries) + 1):
            for whole in combinations(entries[:MOST], number):
                again, _ = _followed(program, graph, primary, whole)
                if not again.problem and again.weight:
                    return replace(again, whole=whole), False
    return verdict, always and not verdict.problem


def assumed(program: Program) -> tuple[Any, ...]:
    """Of entries, beside the capture's own sizes."""
    primary = _primary(program)
    alike = tuple(
        (entry.name, len(entry.shape), entry.samples, primary is not None and _is_alike(entry, primary))
        for entry in program.inputs
    )
    return counting(program), alike


def _followed(program: Program, graph: fx.Graph, primary: Input, whole: Collection[str]) -> tuple[Combination, bool]:
    for shapes, scaled in _sizes(program, whole):
        try:
            at_size = sized(graph, shapes)
        except Exception:  # whatever an operation raises: these sizes are none that the graph is for
            continue
        entries = _entries(program, primary, shapes, whole)
        apart = {primary.name} if program.guards and program.guards.values else {entry.name for entry in program.inputs}
        following = SamplePropagation(entries, RULES, OF_TERMS, not scaled or fixed(program, whole), apart)
        states = following.run(at_size)
        (loss,) = g.outputs(at_size)
        verdict = _verdict(loss, states[loss], primary.name)
        if verdict.problem and not scaled:
            verdict = replace(verdict, problem=f"{verdict.problem} ({ONE_NUMBER})")
        return verdict, scaled and _are_unlike(program, primary, at_size, shapes)
    problem = "the graph runs on no batch of the sizes it was traced for"
    return Combination(problem=problem, where="model", rows=primary.name), False


def followed(program: Program, graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, State]] | None:
    """The graph with more samples than the batch has, and what samples are to its values; None if it cannot have more:
    then nothing in it tells what counts them.
    """
    primary = _primary(program)
    for shapes, scaled in _sizes(program, ()) if primary is not None else ():
        try:
            at_size = sized(graph, shapes)
        except Exception:  # as in `_followed`
            continue
        if not scaled or primary is None:
            return None
        entries = _entries(program, primary, shapes, ())
        apart = {primary.name} if program.guards and program.guards.values else {entry.name for entry in program.inputs}
        return at_size, SamplePropagation(entries, RULES, OF_TERMS, fixed(program), apart).run(at_size)
    return None


def counting(program: Program) -> str:
    """The entry whose rows are taken to be the samples; "" if there is none."""
    primary = _primary(program)
    return "" if primary is None else primary.name


def _are_unlike(program: Program, primary: Input, graph: fx.Graph, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether free sizes of entries that are read are all others in these shapes, and more than 1. Entries with a
    number for each token have those of the tokens.
    """
    free = dict[str, int]()
    read = {node.meta["role"][1] for node in g.placeholders(graph) if node.meta["role"][0] == "input" and node.users}
    for entry in (entry for entry in program.inputs if entry.name in read):
        tokens = entry.name != primary.name and _is_alike(entry, primary)
        of_tokens = (entry.samples, entry.samples + 1) if tokens else ()
        for dim, (expression, size) in enumerate(zip(_expressions(program, entry), shapes[entry.name])):
            if dim not in of_tokens and not isinstance(expression, int):
                free[str(expression)] = size
    return len(set(free.values())) == len(free) and 1 not in free.values()


def _asked_how_many(program: Program) -> Input | None:
    """A statistic of a microbatch (its distinct tokens) of which the model's code asked in Python how many it has."""
    if program.guards is None:
        return None
    ranges = program.guards.sizes.ranges
    for entry in program.inputs:
        for size in _expressions(program, entry) if entry.name in program.statistics else ():
            if isinstance(size, int) or (size.is_Symbol and len(set(ranges[str(size)])) == 1):
                return entry
    return None


def labels_read(program: Program) -> tuple[str, str] | None:
    """An entry that holds labels of a cross entropy and whose values the model's code reads in Python, and the line.
    Those of a microbatch may say other things than those of the whole batch: how many classes there are, the largest.
    """
    if not program.reads or program.symbolic is None:
        return None
    for call in g.calls(program.symbolic):
        if g.op_name(call) in LABELS:
            seen, nodes = set[fx.Node](), [g.bind(call)["target"]]
            while nodes:
                node = nodes.pop()
                role = node.meta.get("role", ("", ""))
                if role[0] == "input" and role[1] in program.reads:
                    return role[1], program.reads[role[1]]
                nodes += [operand for operand in node.all_input_nodes if operand not in seen]
                seen |= {*node.all_input_nodes}
    return None


def _verdict(loss: fx.Node, state: State, rows: str) -> Combination:
    if state == Whole():
        return Combination("mean", rows)
    if isinstance(state, PartsOfSum) and not state.powers:
        return Combination("sum", rows)
    if isinstance(state, PartsOfSum) and len(state.powers) == 1:
        ((count, power),) = state.powers
        if power == -1:
            return _divided(count, rows)
    if isinstance(state, Terms):
        terms = sorted(state.terms, key=lambda term: (term.call, term.operand))
        return Combination(
            "terms", rows, terms=tuple(Term(term.call, term.operand, _divisor(term.count)) for term in terms)
        )
    if isinstance(state, Mixed):
        where = state.node.meta.get("source") or state.node.meta.get("module") or state.node.name
        return Combination(rows=rows, problem=f"{g.op_name(state.node)} {state.why}", where=where)
    problem = f"{g.op_name(loss)} gives no sum over samples, nor one divided by a number that csc knows"
    return Combination(rows=rows, problem=problem, where=loss.meta.get("source") or "model output")


def _divided(count: Count, rows: str) -> Combination:
    if count.kind == "rows":
        return Combination("mean", count.name)
    return Combination("tokens", rows, count.name, count.added, count.least)


def _divisor(count: Count) -> Divisor:
    if count.kind == "rows":
        return Divisor(rows=count.name)
    return Divisor(counted=count.name, added=count.added, least=count.least, value=count.kind == "value")


def _primary(program: Program) -> Input | None:
    """The entry whose first dimension is taken to count samples: token ids or labels, if there are any."""
    entries = [entry for entry in _given(program) if entry.shape]
    tokens = [
        entry for entry in entries if len(entry.shape) > 1 and not entry.dtype.is_floating_point and not entry.samples
    ]
    return next(iter([entry for entry in tokens if entry.name in ("input_ids", "labels")] or tokens or entries), None)


def _given(program: Program, whole: Collection[str] = ()) -> list[Input]:
    """What a batch has, and is cut; not what the model's own code makes of a microbatch."""
    return [entry for entry in program.inputs if entry.name not in program.made and entry.name not in whole]


def _own_rows(program: Program, entry: Input, primary: Input) -> bool:
    """Whether nothing says that an entry has as many rows as there are samples."""
    symbol = _symbol(program, entry, entry.samples)
    return entry is not primary and not (symbol is not None and symbol == _symbol(program, primary, primary.samples))


def fixed(program: Program, whole: Collection[str] = ()) -> bool:
    """Whether some entry's number of rows is a plain number of the trace."""
    if program.guards is None:
        return True
    entries = [entry for entry in _given(program, whole) if entry.shape]
    return any(isinstance(_expressions(program, entry)[entry.samples], int) for entry in entries)


def _expressions(program: Program, entry: Input) -> tuple[Any, ...]:
    assert program.guards is not None
    return program.guards.sizes.entries[entry.name][1] if entry.name in program.guards.sizes.entries else entry.shape


def _sizes(program: Program, entry: Collection[str]) -> Iterator[tuple[Mapping[str, tuple[int, ...]], bool]]:
    """Shapes to look at the graph in: with more samples, as long as nobody says that it is for these alone."""
    shapes = {entry.name: entry.shape for entry in program.inputs}
    if program.guards is not None:
        known = {
            str(size): length
            for entry in program.inputs
            for size, length in zip(_expressions(program, entry), entry.shape)
            if not isinstance(size, int) and size.is_Symbol
        }
        first = {str(_expressions(program, entry)[entry.samples]) for entry in _given(program, entry) if entry.shape}
        of_made = {
            str(_expressions(program, entry)[0])
            for entry in program.inputs
            if entry.name in program.made and entry.shape
        }
        for factor in FACTORS:
            for more in (first | of_made, first):
                values = {name: size * factor if name in more else size for name, size in known.items()}
                if values != known and program.guards.sizes.holds(values):
                    yield {entry.name: _shape(program, entry, values) for entry in program.inputs}, True
    yield shapes, False


def _shape(program: Program, entry: Input, values: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(
        size if isinstance(size, int) else int(evaluated(size, values)) for size in _expressions(program, entry)
    )


def _entries(
    program: Program, primary: Input, shapes: Mapping[str, tuple[int, ...]], whole: Collection[str]
) -> dict[str, State]:
    """What each entry is to the samples."""
    states: dict[str, State] = {}
    symbols: dict[
        Any, tuple[int, str]
    ] = {}  # of what counts samples, or images: how many there are, and of which entry
    count = shapes[primary.name][primary.samples]
    for entry in sorted(_given(program, whole), key=lambda entry: entry is not primary):
        if not entry.shape:
            continue
        size, symbol = shapes[entry.name][entry.samples], _symbol(program, entry, entry.samples)
        as_many = symbol == _symbol(program, primary, primary.samples)
        alike = entry.name == primary.name or _is_alike(entry, primary) or as_many
        many, name = (count, primary.name) if alike else symbols.get(symbol, (size, entry.name))
        if size % many:
            many, name = size, entry.name
        states[entry.name] = SampleRows((entry.samples, size // many), many, name)
        if symbol is not None:
            symbols.setdefault(symbol, (many, name))
    for entry in program.inputs:
        if entry.name in program.made:
            states[entry.name] = NewTensor(entry.name in program.statistics)
            if entry.name in program.statistics:  # as many as there are samples by chance
                continue
            for dim in range(len(entry.shape)):
                symbol = _symbol(program, entry, dim)
                if symbol in symbols:
                    many, name = symbols[symbol]
                    states[entry.name] = SampleRows((dim, shapes[entry.name][dim] // many), many, name)
                    break
    return states


def _symbol(program: Program, entry: Input, dim: int) -> Any:
    """The symbol that a size is a multiple of; None for a plain number."""
    if program.guards is None:
        return None
    size = _expressions(program, entry)[dim]
    if isinstance(size, int) or len(size.free_symbols) != 1:
        return None
    (symbol,) = size.free_symbols
    return symbol if (size / symbol).is_Integer else None


def _is_alike(entry: Input, primary: Input) -> bool:
    """Whether an entry has a number for each token, as the primary one has."""
    whole = not entry.dtype.is_floating_point and entry.dtype is not torch.complex64
    sizes = entry.shape[entry.samples : entry.samples + 2]
    return whole and len(sizes) > 1 and sizes == primary.shape[primary.samples : primary.samples + 2]


# --- Whether a model does the same to each sample, however many there are --------------------------------------------
#
# Two of its graphs are compared, one of so many samples and one of more.
#
# A trace that was made for one number of samples n has what Python made of that number as literals: `math.sqrt(n)`,
# `torch.tensor(n)`, one branch of `if n > 8`. No rule for an operation can tell them from numbers of the model's own.
# In the graph for another number of samples they are others.


REPEATS = (COPIES - CASTS - STOPS) | {EXPAND, SLICE}
SIZES = frozenset({"size", "shape", "repeats"})  # arguments that say how large a result is, and nothing else

Values = Callable[[str], torch.Tensor]  # of a constant of the trace, by name


def unlike(one: fx.Graph, other: fx.Graph, times: int, values: tuple[Values, Values]) -> str:
    """one, other: of csc.analysis.symbolic; `other` is of so many times the samples. values: constants of each."""
    calls, other_calls = _tensor_calls(one), _tensor_calls(other)
    same: dict[fx.Node, fx.Node] = {}
    for node, its in zip(calls, other_calls):
        reshapes = {g.op_name(node), g.op_name(its)} <= RESHAPES
        if node.target is not its.target and not reshapes:
            return f"{g.op_name(node)} becomes {g.op_name(its)} ({g.line(node)})"
        assert isinstance(node.target, OpOverload)
        mine, theirs = g.bind(node), g.bind(its)
        for name, *both in zip(mine, mine.values(), theirs.values()):
            argument, its_argument = _result_sizes(node, its) if name == "size" and reshapes else both
            sizes = times if name in SIZES or COUNTED.get(g.op_name(node)) == name else 1
            if not _alike(argument, its_argument, same, sizes, values):
                return f"{g.op_name(node)} is given another '{name}' ({g.line(node)})"
        same[node] = its
    if len(calls) != len(other_calls):
        return f"{len(other_calls)} operations are made in place of {len(calls)}"
    return ""


def _result_sizes(*calls: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Of their results: what they are given may leave one out (-1)."""
    return tuple(tuple(node.meta["val"].shape) for node in calls)


def named_alike(one: fx.Graph, other: fx.Graph) -> dict[str, str]:
    """Graphs as captured, or of csc.analysis.symbolic."""
    return {its.name: node.name for node, its in zip(_tensor_calls(one), _tensor_calls(other), strict=True)}


def _tensor_calls(graph: fx.Graph) -> list[fx.Node]:
    """Without those that repeat a value for each of several samples, or copy it so that these lie one behind the other:
    for one there is nothing to do.
    """
    return [
        node for node in g.calls(graph)
        if isinstance(node.target, OpOverload) and not _is_number(node) and not _repeats(node)
    ]  # fmt: skip


def _repeats(node: fx.Node) -> bool:
    """Whether a call expands or copies a value, or takes all of it."""
    if node.op != "call_function" or g.op_name(node) not in REPEATS:
        return False
    sizes = [operand.meta["val"].shape for operand in (node, node.args[0])]  # type: ignore[union-attr]
    return g.op_name(node) != SLICE or sizes[0] == sizes[1]


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], (int, float, bool))


def _alike(one: Any, other: Any, same: dict[fx.Node, fx.Node], times: int, values: tuple[Values, Values]) -> bool:
    """times: by which a number may be larger, as it is a size."""
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        one, other = _unexpanded(one), _unexpanded(other)
        if one.op == "placeholder" and other.op == "placeholder":
            return _given_alike(one, other, values)
        if one in same:
            return same[one] is other
        return one.args[1:] == other.args[1:] and _alike(one.args[0], other.args[0], same, 1, values)  # of several
    if isinstance(one, Sequence) and not isinstance(one, str):
        return (
            isinstance(other, Sequence)
            and len(one) == len(other)
            and all(_alike(*both, same, times, values) for both in zip(one, other))
        )
    return one == other or (times > 1 and isinstance(one, int) and isinstance(other, int) and one * times == other)


def _unexpanded(node: fx.Node) -> fx.Node:
    while _repeats(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _given_alike(one: fx.Node, other: fx.Node, values: tuple[Values, Values]) -> bool:
    """Entries of the batch, parameters and buffers by name; constants of the trace by what they hold."""
    (kind, name), (other_kind, other_name) = one.meta["role"][:2], other.meta["role"][:2]
    if kind != "constant" or other_kind != "constant":
        return (kind, name) == (other_kind, other_name)
    mine, theirs = values[0](name), values[1](other_name)
    return mine is theirs or (not mine.is_meta and mine.shape == theirs.shape and torch.equal(mine, theirs))
