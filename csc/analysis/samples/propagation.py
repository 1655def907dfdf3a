"""What the samples of a batch are to every value of a graph, followed from the batch to the loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.execution import draws, is_view
from csc.analysis.operators.table import (
    CASTS,
    COPIES,
    EXACT_COPIES,
    EXPAND,
    FILLED,
    LOOK_UPS,
    NEW,
    RESHAPES,
    SIZE_NUMBERS,
    SIZED_VIEWS,
    SIZES_READ,
    Axis,
    Use,
    links,
    relation,
    reshaped,
    shape_of,
)
from csc.analysis.tokens import TOKENS, SortedRows, follow, positions
from csc.ir import graph as g

# --- What the samples of a batch can be to a value of a graph --------------------------------------------------------


@dataclass(frozen=True)
class Count:
    """A number that adds up over microbatches.

    kind: "rows", those of the batch entry `name`; "value", of the call `name`, made of the batch alone; "labels", those
    that the loss `name` is a mean over. added, least: what is divided by is count + added, or
    least if that is more; no limit with 0.
    """

    kind: str
    name: str
    added: float = 0.0
    least: float = 0.0

    @property
    def plain(self) -> bool:
        return self.added == 0 and self.least == 0


Powers = frozenset[tuple[Count, int]]
NONE: Powers = frozenset()


@dataclass(frozen=True)
class Whole:
    powers: Powers = NONE


@dataclass(frozen=True)
class SampleRows:
    """count: of the samples; entry: the batch entry whose rows they are. spare: the mask of which a microbatch
    without any keeps one, which the batch does not; None: there is none.
    """

    axis: Axis
    count: int
    entry: str
    powers: Powers = NONE
    spare: fx.Node | None = None


@dataclass(frozen=True)
class PartsOfSum:
    powers: Powers = NONE


@dataclass(frozen=True)
class TermOfSum:
    """An operand of a call that adds or stacks, and the number that it is divided by."""

    call: str
    operand: int
    count: Count


@dataclass(frozen=True)
class Terms:
    terms: frozenset[TermOfSum]


@dataclass(frozen=True)
class RowNumbers:
    """step: by how much the numbers of one sample are larger than those of the sample before. within: the least and the
    largest that a number may lie behind the first of its sample; None: that is not known.

    sequences: the entry that says where packed sequences begin, if these are numbers of sequences, and how many a
    sample has is its own matter; step and within are then those of one sequence. "": of rows.
    """

    axis: Axis
    count: int
    entry: str
    step: int
    within: tuple[int, int] | None
    sequences: str = ""

    @property
    def is_own(self) -> bool:
        """Whether no number is another sample's."""
        return self.within is not None and self.within[0] >= 0 and self.within[1] < self.step


@dataclass(frozen=True)
class SortedSamples:
    """rows: as they were before."""

    found: SortedRows
    rows: SampleRows


@dataclass(frozen=True)
class NewTensor:
    """statistic: of all samples of the microbatch at once (`ids.unique()`), so that the whole batch has another."""

    statistic: bool = False
    powers: Powers = field(default=NONE, init=False)


@dataclass(frozen=True)
class Mixed:
    """why: a phrase with the operation as its subject. unless: it is nothing mixed again once it has been "looked up"
    by numbers made for the microbatch (rows of samples among others); has put rows in "order", those that a mask
    selects first; these were "scattered" to places that are as many; or rows are "searched" in it, which says where
    packed sequences begin.
    """

    node: fx.Node
    why: str
    unless: str = ""


State = Whole | SampleRows | PartsOfSum | Terms | RowNumbers | SortedSamples | NewTensor | Mixed


class Lost(Exception):
    """Ends the rules of a call that mixes samples. The argument says what it does, as a phrase."""


UNKNOWN = "is an operation of which csc does not know that it keeps samples apart"
ALONG_SAMPLES = "works along the samples"
EVERY_OTHER = "combines every sample with every other"
BY_NUMBER = "takes as much of a value as there are samples"
NOT_LINEAR = "does more than scale what was summed over samples, or divided by their number"
SPARE = "adds up a row that a microbatch without any keeps, and the whole batch does not"
OF_OTHERS = (
    "reads rows by number, which may be another sample's (a length of 0, less 1); x[torch.arange(n), place] reads each "
    "sample's own"
)
STATISTIC = (
    "combines samples with a statistic of all samples of a microbatch (unique, bincount, a count or mean of what was "
    "made for the microbatch), of which the whole batch has another: make it of the whole batch, outside of the model, "
    "and give it as an entry of the batch for each sample"
)
PERMUTES = (
    "draws one permutation for all samples, of which each microbatch would draw its own: draw it outside of the model, "
    "and give it as an entry of the batch for each sample"
)
FIXED = "meets samples with a value that is the same for every batch, entry by entry"

UNPROVEN = (UNKNOWN, OF_OTHERS, SPARE, STATISTIC, PERMUTES)  # samples may well be apart, or meet in a microbatch alone


def rows_of(entry: str) -> Count:
    """The number of a batch entry's rows. Lost if it is that of no entry."""
    if not entry:
        raise Lost("counts rows that were picked by numbers made for the microbatch")
    return Count("rows", entry)


def times(one: Powers, other: Powers, sign: int = 1) -> Powers:
    """The powers of a product; of a quotient with sign = -1."""
    total = dict(one)
    for count, power in other:
        total[count] = total.get(count, 0) + sign * power
    return frozenset((count, power) for count, power in total.items() if power)


# --- Samples whose rows are sorted by the experts that work on them, group by group, and put back where they were ----


BEGIN = {"aten::sort", "aten::argsort", "aten::histc"}  # to sort rows, or to count them


def sorted_rows(states: Mapping[fx.Node, State], node: fx.Node) -> State | None:
    """Each row's result is its own, whichever others are sorted with it, as csc.analysis.tokens finds: so samples stay
    apart. Other operands are the same for every batch, or the numbers of the rows that an order is inverted with.
    """
    operand_states = {operand: states[operand] for operand in node.all_input_nodes}
    known = {operand: state.found for operand, state in operand_states.items() if isinstance(state, SortedSamples)}
    were = [state.rows for state in operand_states.values() if isinstance(state, SortedSamples)]
    rows = [*were, *(state for state in operand_states.values() if isinstance(state, SampleRows))]
    if not rows or not (known or _begins(node)):
        return None
    before = rows[0]

    def dims(one: fx.Node) -> tuple[int, ...]:
        state = operand_states.get(one)
        if isinstance(state, SampleRows):
            return (state.axis[0],)
        return (0,) if isinstance(state, SortedSamples) or one is node else ()

    rest = [operand for operand, state in operand_states.items() if not isinstance(state, SortedSamples | SampleRows)]
    fixed = all(operand_states[operand] == Whole() or operand is positions(node) for operand in rest)
    behind = all(
        _one_behind_the_other(operand, state)
        for operand, state in operand_states.items()
        if isinstance(state, SampleRows)
    )
    alike = behind and all(rows_state.count == before.count and not rows_state.powers for rows_state in rows)
    picked = follow(node, known, dims) if fixed and alike else ALONG_SAMPLES
    if picked == TOKENS:
        return before
    if isinstance(picked, SortedRows):
        return SortedSamples(picked, before)
    return Mixed(node, picked or ALONG_SAMPLES) if known else None


def _one_behind_the_other(node: fx.Node, rows: SampleRows) -> bool:
    """Whether the rows of a sample are, and in front of those of the next."""
    dim, inner = rows.axis
    return dim == 0 and shape_of(node)[0] == inner * rows.count


def _begins(node: fx.Node) -> bool:
    """A mask is not sorted by experts: what puts its rows in order picks them (csc.analysis.samples.rules)."""
    values = node.args[0] if g.op_name(node) in BEGIN else None
    return isinstance(values, fx.Node) and values.meta["val"].dtype is not torch.bool


# --- A row that a model keeps where it would keep none, as in `keep[0] |= ~keep.any()` of a mask of images -----------
#
# A microbatch without any row to keep then has a *spare* one, which the whole batch does not keep. Computing with it
# row by row harms nobody, and where the rows that this very mask keeps are scattered to the places that samples have
# for them (as many as are kept, which is checked before the step) there is none for it. Adding it up would do harm,
# and so would a place for it, which rows have that are scattered as they are, or that another mask selects.


EITHER, NOT = ("aten::bitwise_or", "aten::logical_or", "aten::__or__"), ("aten::bitwise_not", "aten::logical_not")


def written_to(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """Returns the mask that a `select_scatter` writes one entry to, and whether the mask may then keep one row more.
    Returns None where it writes something else, or is another call. Of a mask with one dimension.
    """
    if g.op_name(node) != "aten::select_scatter":
        return None
    bound = g.bind(node)
    mask, written, place = bound["self"], _uncopied(bound["src"]), bound["index"]
    if len(shape_of(mask)) != 1:
        return None
    if _is_entry(written, mask, place):
        return mask, False
    if g.op_name(written) not in EITHER:
        return None
    entries = [_is_entry(operand, mask, place) for operand in written.all_input_nodes]
    nones = [_is_none(operand, mask) for operand in written.all_input_nodes]
    return (mask, True) if entries in ([True, False], [False, True]) and nones == entries[::-1] else None


def without_spare(mask: fx.Node) -> fx.Node:
    """Returns the mask as it is before a spare row is kept; the mask itself where none is."""
    mask_left, spares = mask, False
    while (before := written_to(mask_left)) is not None:
        mask_left, spares = before[0], spares or before[1]
    return mask_left if spares else mask


def spare_of_order(order: Any) -> fx.Node | None:
    """Returns the mask that an `argsort` puts first, without its spare row; None where it has none."""
    negated = order.args[0]
    if g.op_name(order) != "aten::argsort" or g.op_name(negated) != "aten::logical_not":
        return None
    kept = without_spare(negated.args[0])
    return None if kept is negated.args[0] else kept


def _uncopied(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and g.op_name(node) in EXACT_COPIES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_entry(node: fx.Node, mask: fx.Node, place: Any) -> bool:
    if g.op_name(node) != "aten::select":
        return False
    bound = g.bind(node)
    return bound["self"] is mask and bound["index"] == place


def _is_none(node: fx.Node, mask: fx.Node) -> bool:
    """Whether a value says that nothing of the mask is kept."""
    if g.op_name(node) not in NOT:
        return False
    condition: Any = node.args[0]
    return g.op_name(condition) == "aten::any" and condition.all_input_nodes == [mask] and not shape_of(condition)


# --- What the samples of a batch are to every value of a graph, followed from the batch to the loss ------------------
#
# A batch is cut into microbatches along the sample dimension of its entries. For each value csc knows one of these:
#   Whole    does not change with the samples that are there: parameters, tables
#   Rows     of the batch it is, along an axis, those of its microbatches one behind the other
#   Parts    of the batch it is the sum of those of its microbatches
#   Terms    sums of Parts that are divided by different numbers, and of what is Whole
#   Numbers  numbers of rows: those of a microbatch count from 0 again
#   Sorted   rows in the order of the experts that work on them, and what leads there and back (csc.analysis.tokens)
#   Made     made by the model's own code of one microbatch, before the step, for its rows; or a statistic of all its
#            rows
#   Mixed    none of these: something looked at several samples at once, or csc has no rule for it
# Each but the last four times powers of counts: `x / n` is x, times n to the power of -1, where n of the batch is the
# sum of those of its microbatches. So a mean over samples is Parts with the number of samples to the power of -1.


class SamplePropagation:
    """The states of a graph's values, as far as they are known; what the rules of csc.analysis.samples.rules ask."""

    def __init__(
        self,
        entries: Mapping[str, State],
        special: Mapping[str, Any],
        linear: Collection[str],
        specialised: bool,
        apart: Collection[str],
    ) -> None:
        """special: rules by the name of the operation, (following, node) -> State, before those of the table of links.
        linear: operations whose rule knows Terms.

        specialised: the trace may hold numbers of samples as plain numbers. apart: entries whose rows are never split
        by values of the batch that the model has decided by (how many patches each image has).
        """
        self.entries, self.special, self.linear = entries, special, linear
        self.specialised, self.apart = specialised, apart
        self.states: dict[fx.Node, State] = {}
        self.of_batch: set[fx.Node] = set()  # made of the batch and constants alone

    def run(self, graph: fx.Graph) -> dict[fx.Node, State]:
        for node in graph.nodes:
            if node.op == "placeholder":
                kind, name = node.meta["role"]
                self.states[node] = self.entries.get(name, Whole()) if kind == "input" else Whole()
                if kind != "parameter":
                    self.of_batch.add(node)
            elif node.op == "call_function":
                known = all(used in self.of_batch for used in self.operands(node)) and not draws(node)
                if known or g.op_name(node) in SIZE_NUMBERS:  # sizes are a matter of those of the batch
                    self.of_batch.add(node)
                self.states[node] = self._spared(node, self._state(node))
        return self.states

    def _spared(self, node: fx.Node, state: State) -> State:
        """What a call gives, spare if rows are that it reads. Mixed rows are not: those of one order alone are taken
        up again (`_after`), and it asks for the spare mask.
        """
        rows = [row for used in self.operands(node) if isinstance(row := self.states[used], SampleRows)]
        spares = {state.spare for state in [*rows, state] if isinstance(state, SampleRows) and state.spare is not None}
        if g.op_name(node) in SIZES_READ or isinstance(state, Mixed) or not spares:
            return state
        if isinstance(state, SampleRows) and len(spares) == 1:
            return replace(state, spare=spares.pop())
        return Mixed(node, SPARE)

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """Of a call, whole numbers too."""
        operands: dict[fx.Node, None] = {}
        fx.map_arg(node.meta["given"], lambda used: operands.setdefault(used))
        return list(operands)

    def _state(self, node: fx.Node) -> State:
        name = g.op_name(node)
        used = [self.states[operand] for operand in self.operands(node)]
        write = written_to(node)
        if write is not None and isinstance(state := self.states[write[0]], SampleRows):
            return replace(state, spare=write[0]) if write[1] else state
        if name == "aten::randperm":
            return Mixed(node, PERMUTES)
        if name not in SIZES_READ:
            lost = next((state for state in used if isinstance(state, Mixed)), None)
            if lost is not None:
                return self._after(node, lost)
            if all(state == Whole() for state in used) and name not in GRADIENTS:
                return Whole()
            if STATISTICS in used:
                return self._of_statistic(node)
            if name not in self.linear and any(isinstance(state, Terms) for state in used):
                return Mixed(node, NOT_LINEAR)
        routed = sorted_rows(self.states, node)
        if routed is not None:
            return routed
        try:
            rule = self.special.get(name)
            return rule(self, node) if rule is not None else self.by_links(node)
        except Lost as lost_here:
            return Mixed(node, str(lost_here), UNLESS.get(name, ""))

    def _after(self, node: fx.Node, lost: Mixed) -> State:
        """What a call gives that reads a mixed value."""
        name = g.op_name(node)
        states = [self.states[operand] for operand in self.operands(node)]
        if lost.unless == "looked up" and name in LOOK_UPS and len(states) == 2 and NewTensor() in states:
            return NewTensor()
        if lost.unless == "searched" and name in SEARCHES:
            return self.special[name](self, node)
        if lost.unless == "order" and name == "aten::index_select" and states == [states[0], lost]:
            rows: Any = node.args[0]
            fits = isinstance(states[0], SampleRows) and self.outermost(rows, states[0]) and not states[0].powers
            if fits and states[0].spare in (None, spare_of_order(node.args[2])):  # type: ignore[union-attr]
                return Mixed(lost.node, lost.why, "scattered")
        if lost.unless == "scattered" and name == "aten::masked_scatter" and self.states[node.args[2]] is lost:  # type: ignore[index]
            return self.special[name](self, node)
        if name == "aten::argsort" and node in self.of_batch and g.bind(node).get("stable"):
            return Mixed(lost.node, lost.why, "order")
        kept = is_view(node) or name in MOVES
        return lost if kept else Mixed(lost.node, lost.why)

    def _of_statistic(self, node: fx.Node) -> State:
        """What a call gives that reads a statistic of the microbatch: one again, if it reads nothing of samples."""
        unread = TYPE_ALONE.get(g.op_name(node))
        operand_states = [
            self.states[operand]
            for operand in self.operands(node)
            if unread is None or operand is not node.args[unread]
        ]
        kinds = (SampleRows, RowNumbers, SortedSamples, PartsOfSum, Terms)
        return Mixed(node, STATISTIC) if any(isinstance(state, kinds) for state in operand_states) else STATISTICS

    def by_links(self, node: fx.Node, linear: bool = False, powers: Powers | None = None) -> State:
        """The rule of most calls: rows stay where the links of their operands lead.

        linear: in all operands with powers, which must agree. powers: of the result, if they are known.
        """
        used = [self.states[operand] for operand in node.all_input_nodes]
        kinds = {type(state) for state in used}
        if powers is None:
            powers = self._common_powers(used, linear)
        if kinds & {PartsOfSum, Terms}:
            if not linear or len(kinds) > 1 or self._sized_by_samples(node):
                raise Lost(NOT_LINEAR)
            if Terms in kinds:
                return Terms(frozenset().union(*(state.terms for state in used if isinstance(state, Terms))))
            return PartsOfSum(powers)
        if kinds & {SampleRows, RowNumbers} and not (
            kinds <= {RowNumbers, NewTensor, Whole} and {RowNumbers, NewTensor} <= kinds
        ):
            result = self._joined(node, powers)
            sized = self._sized_by_samples(node)
            if (
                sized
                and g.op_name(node) not in RESHAPES
                and (g.op_name(node) != "aten::expand" or sized != {result.axis[0]})
            ):
                raise Lost(BY_NUMBER)
            return result
        if NewTensor in kinds:
            return NewTensor(self._makes_a_statistic(node))
        if self._sized_by_samples(node):
            raise Lost(BY_NUMBER)
        return Whole(powers)

    def _makes_a_statistic(self, node: fx.Node) -> bool:
        """Whether a call makes one number of all that was made for the microbatch, or repeats it for each sample."""
        if g.op_name(node) in COPIED_FOR_EACH:
            return bool(self._sized_by_samples(node))
        several = any(
            prod(shape_of(operand)) > 1 for operand in node.all_input_nodes if self.states[operand] == NewTensor()
        )
        return several and not is_view(node) and g.tensor_value(node) is not None and prod(shape_of(node)) == 1

    def _sized_by_samples(self, node: fx.Node) -> set[int]:
        """The dimensions that a reshape or an `expand` gives a number of samples as their size; {-1} if another call
        has such a number among its arguments.
        """
        numbers = [self.states[operand] for operand in self.operands(node) if operand not in node.all_input_nodes]
        if not any(self._by_samples(number) for number in numbers):
            return set()
        sizes = g.op_name(node) in SIZED_VIEWS
        return (self._given_sizes(node) or set()) if sizes else {-1}

    def _common_powers(self, states: list[State], linear: bool) -> Powers:
        powers = {state.powers for state in states if isinstance(state, Whole | SampleRows | PartsOfSum)}
        if powers <= {NONE}:
            return NONE
        if not linear or len(powers) > 1:
            raise Lost(NOT_LINEAR)
        return powers.pop()

    def _joined(self, node: fx.Node, powers: Powers) -> SampleRows | RowNumbers:
        """The rows of all operands that have some, which must come to lie on one axis of the result."""
        linked = links(node)
        rows = [
            operand for operand in node.all_input_nodes if isinstance(self.states[operand], SampleRows | RowNumbers)
        ]
        if not {operand for operand, _ in linked}.issuperset(rows):
            raise Lost(UNKNOWN if not linked else EVERY_OTHER)
        result: SampleRows | RowNumbers | None = None
        for operand, link in linked:
            state = self.states[operand]
            if isinstance(state, SampleRows | RowNumbers):
                moved = self.moved(node, operand, link, state)
                result = moved if result is None else self.together(result, moved)
        assert result is not None
        for operand, link in linked:
            if self.states[operand] == Whole() and link and self._varies(operand, link[result.axis[0]]):
                raise Lost(FIXED)
            if isinstance(self.states[operand], NewTensor) and link and not along(operand, node, link, result.axis[0]):
                raise Lost(STATISTIC)
        if isinstance(result, RowNumbers):
            if len(rows) != 1 or len(node.all_input_nodes) != 1 or not (is_view(node) or g.op_name(node) in MOVES):
                raise Lost("computes with the numbers of samples")
            return result
        return replace(result, powers=powers)

    def moved(
        self, node: fx.Node, operand: fx.Node, link: tuple[int | None, ...], state: SampleRows | RowNumbers
    ) -> Any:
        """An operand's rows in the result."""
        dim, inner = state.axis
        if g.op_name(node) in RESHAPES:
            return self._reshaped(node, operand, state)
        if dim not in link:
            raise Lost(ALONG_SAMPLES)
        return replace(state, axis=(link.index(dim), inner))

    def _reshaped(self, node: fx.Node, operand: fx.Node, state: SampleRows | RowNumbers) -> Any:
        """Several samples, or other rows, may be joined: those of a microbatch are as many as the reshape needs."""
        sizes = self._given_sizes(node)
        for count in range(state.count, 1, -1):
            if state.count % count or (count < state.count and sizes is None):
                continue
            axis = reshaped(
                shape_of(operand), shape_of(node), (state.axis[0], state.axis[1] * state.count // count), count
            )
            if axis is not None and (sizes is None or sizes <= {axis[0]}):
                if isinstance(state, RowNumbers) and count < state.count:
                    break
                return replace(state, axis=axis, count=count)
        raise Lost("joins or cuts samples")

    def _given_sizes(self, node: fx.Node) -> set[int] | None:
        """The dimensions of a reshape whose sizes the number of samples gives; None if all are plain numbers."""
        args = node.meta["given"][0]
        sizes: Any = args[1] if len(args) > 1 else []
        sized_dims = {
            d for d, size in enumerate(sizes) if isinstance(size, fx.Node) and self._by_samples(self.states[size])
        }
        return sized_dims or ({d for d, size in enumerate(sizes) if size == -1} or None)

    @staticmethod
    def _by_samples(size: State) -> bool:
        """False for the number of rows of one entry over that of another: microbatches have the same."""
        return not isinstance(size, Whole) or sum(power for _, power in size.powers) != 0

    def together(self, one: Any, other: Any) -> Any:
        """Rows of two operands on one axis: those with fewer, larger samples."""
        if type(one) is not type(other):
            raise Lost("computes with the numbers of samples")
        if one.axis == other.axis and one.count == other.count:
            if not one.entry or not other.entry:
                return one if one.entry else other
            return one if one.entry <= other.entry or one.entry in self.primary else other
        same = one.axis[0] == other.axis[0] and one.axis[1] * one.count == other.axis[1] * other.count
        fewer, more = (one, other) if one.count < other.count else (other, one)
        if not same or more.count % fewer.count:
            raise Lost(EVERY_OTHER)
        return fewer

    @property
    def primary(self) -> set[str]:
        return {state.entry for state in self.entries.values() if isinstance(state, SampleRows)}

    def _varies(self, operand: fx.Node, dim: int | None) -> bool:
        """Whether an operand has values of its own along a dimension, not one that is repeated."""
        if self._uniform(operand):
            return False
        val = operand.meta["val"]
        val = val[0] if isinstance(val, (tuple, list)) else val
        return dim is not None and val.shape[dim] > 1 and val.stride(dim) != 0

    def _uniform(self, node: fx.Node) -> bool:
        """Whether all entries of a value are the same number, as a trace for one number of samples fills tensors."""
        while node.op == "call_function" and (is_view(node) or g.op_name(node) in MOVES):
            node = node.args[0]  # type: ignore[assignment]
        return g.op_name(node) in FILLED if node.op == "call_function" else False

    def outermost(self, node: fx.Node, state: SampleRows | RowNumbers) -> bool:
        """Whether a value's samples lie one behind the other in its order of elements."""
        shape, (dim, inner) = shape_of(node), state.axis
        return prod(shape[:dim]) == 1 and shape[dim] == inner * state.count

    def counting(self, node: fx.Node) -> Count | None:
        """The count that a value is, if it is one number made of the batch alone that adds up over microbatches."""
        alone = node in self.of_batch and self.states[node] == PartsOfSum() and prod(shape_of(node)) == 1
        return Count("value", node.name) if alone else None


def along(operand: fx.Node, node: fx.Node, link: tuple[int | None, ...], dim: int) -> bool:
    """Whether an operand has an entry of its own for each that the result has along a dimension, none that is for all
    of them.
    """
    place = link[dim]
    return place is not None and shape_of(operand)[place] == shape_of(node)[dim]


STATISTICS = NewTensor(statistic=True)
TYPE_ALONE = {"aten::type_as": 1, **dict.fromkeys(NEW, 0)}  # the operand that is looked at for its type alone
COPIED_FOR_EACH = {EXPAND, "aten::repeat"}
GRADIENTS = {
    "csc::incoming",
    "csc::own_gradient",
    "csc::to_batch_loss",
}  # whose gradient each microbatch has its own of
UNLESS = {"aten::cat": "looked up", "aten::argsort": "order", "aten::slice": "searched"}
SEARCHES = {"aten::bucketize": "boundaries", "aten::searchsorted": "sorted_sequence"}
MOVES = COPIES | RESHAPES | CASTS


# --- What rules ask of an operand, for following samples: it may be a call, or a plain number ------------------------


def of(following: SamplePropagation, value: Any) -> State:
    return following.states[value] if isinstance(value, fx.Node) else Whole()


def number_of(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, fx.Node) else value


def powers_of(state: State) -> Powers:
    return state.powers if isinstance(state, Whole | SampleRows | PartsOfSum) else NONE


def uses_of(node: fx.Node) -> tuple[Use, ...]:
    """Lost for a call of which the table of operators says nothing."""
    found_relation = relation(node)
    if found_relation is None:
        raise Lost(UNKNOWN)
    return found_relation.uses
