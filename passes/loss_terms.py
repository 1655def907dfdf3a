"""Terms of a loss that are divided by different numbers: each gets a weight of its own where it is added.

Terms: a *divisor* is what one or several of the terms are divided by (csc.ir.program). Its *weight* in a microbatch
is its share of that of all microbatches; the runtime knows it before F, and hands it in with the batch.

    weighed(program, graph, terms, divisors) -> bool        in place, after `counts`; False if a term is no longer there
    counted(writer, node) -> fx.Node             what a loss function is a mean over, or the copy of a count
    counts(program, graph, divisors) -> fx.Node | None      of all divisors, float64[divisors]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.table import LABELS
from csc.ir import graph as g
from csc.ir.graph import Writer
from csc.ir.groups import LOSS_WEIGHTS
from csc.ir.program import Divisor, Program, Term

aten = torch.ops.aten
OPERANDS = ("self", "other")


def weighed(program: Program, graph: fx.Graph, terms: Sequence[Term], divisors: Sequence[Divisor]) -> bool:
    """Call it after `counts`. A microbatch that has nothing of a divisor, as one without labels, makes no NaN: a loss
    over no label is 0, and what would be divided by 0 is divided by -1, as its weight then has it.
    """
    named = _named(graph)
    if any(term.call not in named for term in terms):
        return False
    first = next(iter(graph.nodes))
    with program.fake_mode, graph.inserting_before(first):
        each = torch.empty(len(divisors), dtype=torch.float64, device=program.device)
        weights = g.add_placeholder(graph, "loss_weights", each, LOSS_WEIGHTS)
    writer = Writer(graph, program.fake_mode)
    own = {}
    for place, divisor in enumerate(divisors):
        with graph.inserting_after(weights):
            own[divisor] = writer.call(None, aten.select.int, weights, 0, place)
    for divisor, weight in own.items():
        if divisor.can_be_zero:
            (_never_divide_by_zero if divisor.value else _zero_for_no_label)(writer, named, divisor, weight)
    for term in terms:
        call = named[term.call]
        with graph.inserting_before(call):
            _weigh(writer, call, term.operand, own[term.divisor])
    return True


def _zero_for_no_label(writer: Writer, named: Mapping[str, fx.Node], divisor: Divisor, weight: fx.Node) -> None:
    """Instead of the mean over nothing, where the weight is 0."""
    mean = named[divisor.counted]
    readers = _readers(writer.graph, mean)
    with writer.graph.inserting_after(weight):
        nothing = writer.call(None, aten.eq.Scalar, weight, 0)
    with writer.graph.inserting_after(mean):
        instead = writer.call(mean, aten.masked_fill.Scalar, mean, nothing, 0)
    _read(readers, mean, instead)


def _never_divide_by_zero(writer: Writer, named: Mapping[str, fx.Node], divisor: Divisor, weight: fx.Node) -> None:
    """A microbatch that is alone weighs 1, and divides by 0 as the model does."""
    count = number_of(named[divisor.counted])
    readers = _readers(writer.graph, count)
    with writer.graph.inserting_after(weight):
        shared = writer.call(None, aten.ne.Scalar, weight, 1)
    with writer.graph.inserting_before(count.next):
        zero = writer.call(count, aten.eq.Scalar, count, -divisor.added)
        zero = writer.call(count, aten.logical_and.default, zero, shared)
        value = divisor.for_zero - divisor.added
        instead = writer.call(count, aten.masked_fill.Scalar, count, zero, value)
    _read(readers, count, instead)


def _readers(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """All but what counts, which sees zeros."""
    counting = g.ancestors(g.outputs(graph)[1:])
    return [user for user in node.users if user not in counting and user.op != "output"]


def _read(readers: Sequence[fx.Node], node: fx.Node, instead: fx.Node) -> None:
    for reader in readers:
        reader.replace_input_with(node, instead)


def _weigh(writer: Writer, call: fx.Node, operand: int, weight: fx.Node) -> None:
    """Multiply an operand of a call that adds, or a tensor of a call that stacks."""
    stacked, dtype = isinstance(call.args[0], (list, tuple)), call.meta["val"].dtype
    values: Any = call.args[0] if stacked else [g.bind(call)[name] for name in OPERANDS]
    value = values[operand]
    if dtype is not torch.float64:
        weight = writer.call(call, aten._to_copy.default, weight, dtype=dtype)
    if isinstance(value, fx.Node):
        product = writer.call(call, aten.mul.Tensor, value, weight)
    else:
        product = writer.call(call, aten.mul.Tensor, weight, value)
        call.target = getattr(call.target.overloadpacket, "Tensor")  # type: ignore[union-attr]  # noqa: B009
    if stacked:
        call.args = ([*values[:operand], product, *values[operand + 1 :]], *call.args[1:])
    elif OPERANDS[operand] in call.kwargs:
        call.kwargs = {**call.kwargs, OPERANDS[operand]: product}
    else:
        call.args = (*call.args[:operand], product, *call.args[operand + 1 :])


def counts(program: Program, graph: fx.Graph, divisors: Sequence[Divisor]) -> fx.Node | None:
    """One tensor before the graph's output; None if a call that is counted is no longer there."""
    named, rows = _named(graph), {one.name: one.shape[one.samples] for one in program.inputs if one.shape}
    if any(one.counted and one.counted not in named for one in divisors):
        return None
    with graph.inserting_before(graph.output_node()):
        writer = Writer(graph, program.fake_mode)
        found = [_count(program, writer, one, named, rows) for one in divisors]
        count = writer.call(None, aten.stack.default, found)
    count.meta["hint"] = "counted_terms"
    return count


def _count(
    program: Program, writer: Writer, divisor: Divisor, named: Mapping[str, fx.Node], rows: Mapping[str, int]
) -> fx.Node:
    if divisor.rows:
        return writer.call(None, aten.full.default, [], rows[divisor.rows], dtype=torch.float64, device=program.device)
    count = counted(writer, named[divisor.counted])
    count = writer.call(None, aten.view.default, count, []) if count.meta["val"].dim() else count
    return writer.call(None, aten._to_copy.default, count, dtype=torch.float64)


def counted(writer: Writer, node: fx.Node) -> fx.Node:
    """What a loss function is a mean over; of a value that is the count, a copy that nothing else reads."""
    if g.op_name(node) not in LABELS:
        return writer.call(None, aten._to_copy.default, number_of(node), dtype=torch.float64)
    bound = g.bind(node)
    count = counted_labels(partial(writer.call, None), bound["target"], int(bound["ignore_index"]), bound.get("weight"))
    count.meta["hint"] = "counted_labels"
    return count


def number_of(node: fx.Node) -> fx.Node:
    """The number that a mean over spread tokens is divided by (csc.passes.token_sums), or a count itself, which may be
    a quotient too.
    """
    total, *divisor = node.args
    spread = isinstance(total, fx.Node) and g.op_name(total) in LABELS and total.name == f"{node.name}_sum"
    return divisor[0] if spread else node  # type: ignore[return-value]


def counted_labels(call: Callable[..., fx.Node], labels: fx.Node, ignored: int, weight: fx.Node | None) -> fx.Node:
    """How many labels there are, or what their classes weigh. call(target, *arguments): makes a call."""
    mask = call(aten.ne.Scalar, labels, ignored)
    if weight is not None:  # each label counts as much as its class weighs
        classes = call(aten.mul.Tensor, labels, mask)
        mask = call(aten.mul.Tensor, call(aten.index.Tensor, weight, [classes]), mask)
    return call(aten.sum.default, mask)


def _named(graph: fx.Graph) -> dict[str, fx.Node]:
    return {node.name: node for node in graph.nodes if node.op == "call_function"}
