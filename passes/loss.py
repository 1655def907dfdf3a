"""Pass `loss`: how the losses of microbatches combine into the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from csc.passes.batch_loss import over_batch
from torch import fx

from csc.analysis.operators.execution import is_view
from csc.analysis.operators.table import CASTS, COPIES, LABELS
from csc.analysis.samples.combining import assumed, proven
from csc.analysis.samples.rules import MEAN
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import Writer
from csc.ir.groups import LOSS_WEIGHTS
from csc.ir.program import Combination, Divisor, Options, Pass, Program, Term
from csc.torch_private.exported import OpOverload

# --- Terms of a loss that are divided by different numbers: each gets a weight of its own where it is added ----------
#
# Terms: a *divisor* is what one or several of the terms are divided by (csc.ir.program). Its *weight* in a microbatch
# is its share of that of all microbatches; the runtime knows it before F, and hands it in with the batch.


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
        ones_of = torch.empty(len(divisors), dtype=torch.float64, device=program.device)
        weights = g.add_placeholder(graph, "loss_weights", ones_of, LOSS_WEIGHTS)
    writer = Writer(graph, program.fake_mode)
    weight_of = {}
    for place, divisor in enumerate(divisors):
        with graph.inserting_after(weights):
            weight_of[divisor] = writer.call(None, aten.select.int, weights, 0, place)
    for divisor, weight in weight_of.items():
        if divisor.can_be_zero:
            (_never_divide_by_zero if divisor.value else _zero_for_no_label)(writer, named, divisor, weight)
    for term in terms:
        call = named[term.call]
        with graph.inserting_before(call):
            _weigh(writer, call, term.operand, weight_of[term.divisor])
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
    named, rows = _named(graph), {entry.name: entry.shape[entry.samples] for entry in program.inputs if entry.shape}
    if any(divisor.counted and divisor.counted not in named for divisor in divisors):
        return None
    with graph.inserting_before(graph.output_node()):
        writer = Writer(graph, program.fake_mode)
        row_counts = [_count(program, writer, divisor, named, rows) for divisor in divisors]
        count = writer.call(None, aten.stack.default, row_counts)
    count.meta["hint"] = "counted_terms"
    return count


def _count(
    program: Program, writer: Writer, divisor: Divisor, named: Mapping[str, fx.Node], rows: Mapping[str, int]
) -> fx.Node:
    if divisor.rows:
        return writer.call(None, aten.full.default, [], rows[divisor.rows], dtype=torch.float64, device=program.device)
    count = count_of_labels(writer, named[divisor.counted])
    count = writer.call(None, aten.view.default, count, []) if count.meta["val"].dim() else count
    return writer.call(None, aten._to_copy.default, count, dtype=torch.float64)


def count_of_labels(writer: Writer, node: fx.Node) -> fx.Node:
    """What a loss function is a mean over; of a value that is the count, a copy that nothing else reads."""
    if g.op_name(node) not in LABELS:
        return writer.call(None, aten._to_copy.default, number_of(node), dtype=torch.float64)
    bound = g.bind(node)
    count = counted_labels(partial(writer.call, None), bound["target"], int(bound["ignore_index"]), bound.get("weight"))
    count.meta["hint"] = "counted_labels"
    return count


def number_of(node: fx.Node) -> fx.Node:
    """The number that a mean over spread tokens is divided by (csc.passes.sharding), or a count itself, which may be
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


# --- Pass `loss`: how the losses of microbatches combine into the loss of the whole batch ----------------------------


OF_TERMS = "adds terms of the loss that are divided by different numbers"
ONE_SAMPLE = (
    "the model asks for the number of samples and was traced for one: that microbatches of one sample combine by their "
    "labels is read off the loss, and not proven"
)


@dataclass(frozen=True)
class LossPass(Pass):
    """Find what the loss is a sum over and what it is divided by, and count it.

    Ensures   `loss_weight` is "tokens", "mean", "sum" or "terms"; for "tokens" the graph's second output counts the
              microbatch's labels, or whatever else the loss is divided by, from the batch alone; for "terms" it counts
              that of each term, which is multiplied by a weight where it is added. `combination` says what is proven.
    Before    %loss = aten.cross_entropy_loss(%logits, %labels);  return (%loss,)
    After     %counted = aten.sum(aten.ne(%labels, -100));        return (%loss, %counted)
    """

    requires: ClassVar = ("captured", "sized")
    establishes: ClassVar = ("weighed",)
    breaks: ClassVar = ("unweighed",)

    loss_weight: str = "auto"

    def __call__(self, program: Program, options: Options) -> Program:
        options = self.over(options)
        (result,) = g.outputs(program.graph)
        program, combination = _combination(program)
        if combination.problem and options.over_batch:
            program, combination = over_batch(program, combination)
            (result,) = g.outputs(program.graph)
        combination = replace(combination, summed=options.mesh.cp > 1 and labels_of(result) is None)
        if combination.problem:
            combination = _as_it_ends(combination, result)
        weight = combination.weight if options.loss_weight == "auto" else options.loss_weight
        counted = _node_named(program.graph, combination.counted)
        if (options.mesh.cp > 1 and not combination.summed) or not weight or (weight == "tokens" and counted is None):
            counted = labels_of(result)
            if options.loss_weight == "auto":
                weight = "mean" if counted is None else "tokens"
        if combination.problem and _is_mean_of_one_sample(program, combination, result):
            program = replace(program, notes=(*program.notes, ONE_SAMPLE))
            combination = replace(combination, problem="", where="", ends="")
        if weight == "terms":
            return _of_terms(program, combination)
        program = replace(program, combination=combination, loss_weight=weight)
        if weight != "tokens":
            return program
        if counted is None:
            raise InputError(
                "the loss is no mean over labels, so its labels cannot be counted", "loss_weight='tokens'",
                "use loss_weight='mean' or 'sum'",
            )  # fmt: skip
        graph, mapping = g.copy_graph(program.graph)
        with graph.inserting_before(graph.output_node()):
            count = count_of_labels(Writer(graph, program.fake_mode), mapping[counted])
        graph.output_node().args = ((mapping[result], count),)
        return replace(program, graph=graph)


def _of_terms(program: Program, combination: Combination) -> Program:
    """If a pass has changed the calls that add terms, or what they are divided by, nothing is proven."""
    graph, mapping = g.copy_graph(program.graph)
    divisors, (result,) = combination.divisors, g.outputs(program.graph)
    count = counts(program, graph, divisors)
    if count is not None:
        graph.output_node().args = ((mapping[result], count),)
    if count is None or not weighed(program, graph, combination.terms, divisors):
        call = _node_named(program.graph, combination.terms[0].call)
        refused = Combination(
            rows=combination.rows, problem=OF_TERMS, where=g.place(call) if call is not None else "loss"
        )
        labels = labels_of(result) is not None
        return replace(program, combination=refused, loss_weight="tokens" if labels else "mean")
    return replace(program, graph=graph, combination=combination, loss_weight="terms")


def _combination(program: Program) -> tuple[Program, Combination]:
    """As another size of the capture has proven it for all, else as this one does."""
    assert program.symbolic is not None
    known, key = program.joints.combinations if program.joints is not None else {}, assumed(program)
    if key in known:
        return program, known[key]
    combination, always = proven(program, program.symbolic)
    if always and program.joints is not None:
        joints = replace(program.joints, combinations={**known, key: combination})
        program = replace(program, joints=joints)
    return program, combination


def check_combination(program: Program, options: Options) -> None:
    """InputError if the batch is cut into microbatches and nothing proves how their losses combine."""
    combination = program.combination
    if combination.problem and options.loss_weight == "auto" and options.microbatches * options.mesh.dp > 1:
        raise InputError(
            f"csc cannot prove that the losses of microbatches make the loss of the batch: {combination.problem}",
            combination.where,
            "use one microbatch and dp=1, with which the step is the model's own; or, if its samples do not depend on "
            f"each other, {possible_weights(combination)}",
        )


def possible_weights(found: Combination) -> str:
    """Each `loss_weight` that may be right where nothing is proven, and how to tell which it is; a remedy's clause."""
    place = f", as by {found.ends}" if found.ends else ""
    offered = ["loss_weight='mean' where it is divided by a number of samples", "loss_weight='sum' where by nothing"]
    if found.counted:
        offered.insert(0, f"loss_weight='tokens' where it is divided by a number of labels or the sum of a mask{place}")
    return (
        f"say by what the loss is divided: {', '.join(offered)}. A weight that does not make eager "
        "PyTorch's loss and gradients of the whole batch is refused in the first step, unless check=False"
    )


def _is_mean_of_one_sample(program: Program, combination: Combination, result: fx.Node) -> bool:
    """Whether a model that asks for the number of samples was traced for one, and its loss is a mean over labels.

    Then nothing in the graph tells what would be done to several; but microbatches have one sample each, so that none
    meets another in them. What the model does to a whole batch the check compares (csc.check).
    """
    rows = next((entry.shape[entry.samples :] for entry in program.inputs if entry.name == combination.rows), ())
    return rows[:1] == (1,) and labels_of(result) is not None


def labels_of(result: Any) -> fx.Node | None:
    """The mean over integer labels, known from the batch alone, that a loss ends in; None if it ends otherwise."""
    node = result
    while isinstance(node, fx.Node) and _scales_only(node):
        node = node.args[0]
    if not isinstance(node, fx.Node) or g.op_name(node) not in LABELS:
        return None
    bound = g.bind(node)
    is_class_labels = bound["target"].meta["val"].dtype is torch.int64 and bound.get("weight") is None
    return (
        node if is_class_labels and bound["reduction"] == MEAN and not g.reads_parameters([bound["target"]]) else None
    )


def _as_it_ends(combination: Combination, result: Any) -> Combination:
    """What the loss is divided by in its last operation, if that can be counted: nothing proves that it adds up over
    microbatches, but `loss_weight="tokens"` may say so.
    """
    node = result
    while isinstance(node, fx.Node) and _scales_only(node):
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return combination
    if g.op_name(node) in LABELS:
        bound = g.bind(node)
        known = not bound["target"].meta["val"].dtype.is_floating_point and bound["reduction"] == MEAN
        if known and not g.reads_parameters([bound["target"], bound.get("weight")]):
            return replace(combination, counted=node.name, ends=_at(node))
    if g.op_name(node) == "aten::div" and isinstance(node.args[1], fx.Node):
        count, added, least = _counted_value(node.args[1])
        alone = count.meta["val"].numel() == 1 and not g.reads_parameters([count])
        if alone and any(ancestor.meta.get("role", ("",))[0] == "input" for ancestor in g.ancestors([count])):
            return replace(combination, counted=count.name, added=added, least=least, ends=_at(node))
    return combination


def _at(node: fx.Node) -> str:
    return f"{g.op_name(node)} at {g.line(node)}"


def _counted_value(divisor: fx.Node) -> tuple[fx.Node, float, float]:
    """A divisor as `max(count + added, least)`: (count, added, least), 0 where there is no limit."""
    added = least = 0.0
    while divisor.op == "call_function":
        name, number = g.op_name(divisor), divisor.args[1] if len(divisor.args) > 1 else None
        if name in COPIES | CASTS or is_view(divisor):
            pass
        elif name in ("aten::clamp", "aten::clamp_min") and len(divisor.args) == 2 and not added and not least:
            least = float(number)  # type: ignore[arg-type]
        elif name == "aten::add" and isinstance(number, (int, float)) and len(divisor.args) == 2:
            added += float(number)
        else:
            break
        divisor = divisor.args[0]  # type: ignore[assignment]
    return divisor, added, least


def _scales_only(node: fx.Node) -> bool:
    """Casts, views and products with a literal: they do not change what is averaged over."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if g.op_name(node) in ("aten::mul", "aten::div"):
        return isinstance(node.args[0], fx.Node) and not isinstance(node.args[1], fx.Node)
    return is_view(node) or g.op_name(node) in COPIES


def _node_named(graph: fx.Graph, name: str) -> fx.Node | None:
    return next((node for node in graph.nodes if node.name == name), None) if name else None
