"""Losses whose samples meet (contrastive ones, batch statistics): computed once, over values of the whole batch.

Terms
  head    the calls from where samples first meet to the loss, or to the term of it in which they meet
  value   what the head reads of samples: of the whole batch it is rows of its microbatches one behind the other, or
          their sum, or their mean over samples

What makes the values is done for each microbatch, like any model. F hands them over (csc.kernels.batch_loss); once all
microbatches of all replicas are there, the runtime computes the head and its gradients, and B begins with these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from csc.kernels.batch_loss import TO_BATCH_LOSS
from torch import fx

from csc.analysis.cutting import label
from csc.analysis.operators.execution import VIEWS, is_random, is_view
from csc.analysis.operators.table import CASTS, COPIES, SDPA, SIZE_NUMBERS
from csc.analysis.samples.combining import followed, proven
from csc.analysis.samples.propagation import (
    UNPROVEN,
    Mixed,
    NewTensor,
    PartsOfSum,
    SampleRows,
    State,
    Terms,
    Whole,
    shape_of,
)
from csc.analysis.symbolic import sized
from csc.ir import graph as g
from csc.ir.graph import Writer
from csc.ir.groups import BATCH_LOSS
from csc.ir.program import BatchLoss, BatchSize, BatchValue, Combination, Program
from csc.torch_private.exported import OpOverload
from csc.torch_private.traces import FakeTensorMode, without_messages

TURNED = {"aten::t", "aten::transpose", "aten::permute"}  # views of a value that the head takes for itself
CONVOLUTIONS = {f"aten::{name}" for name in ("convolution", "conv1d", "conv2d", "conv3d")}
LEFT_OUT = (VIEWS | COPIES) | CASTS  # what pass `shapes` leaves out where it changes nothing
OWN_CODE = ("csc::incoming", "csc::own_gradient", "csc::checkpointed", "csc::with_hooks", "csc::opaque")


class _Impossible(Exception):
    """Why the loss cannot be computed over values of the whole batch, as a clause."""


def over_batch(program: Program, found: Combination) -> tuple[Program, Combination]:
    """A program whose samples meet in its head alone, and how what is left combines; the program as it is, where that
    cannot be, and `found` with the reason.

    found: what is not proven of the program.
    """
    assert program.symbolic is not None
    try:
        divided = _Division(program, found).made()
        left, _ = proven(divided, divided.symbolic)  # type: ignore[arg-type]
        if left.problem or left.weight not in ("sum", "terms"):
            raise _Impossible(f"the rest of the loss is no sum over samples either: {left.problem or left.weight}")
    except _Impossible as reason:
        text = f"{found.problem}; nor can csc compute it once over the whole batch: {reason}"
        return program, replace(found, problem=text)
    return divided, left


@dataclass
class _Head:
    """As it is found. calls: in no order. sizes: whole numbers that are read of values and entries."""

    calls: set[fx.Node] = field(default_factory=set)
    values: dict[fx.Node, None] = field(default_factory=dict)
    sizes: dict[fx.Node, None] = field(default_factory=dict)
    placed: dict[fx.Node, None] = field(default_factory=dict)  # parameters and constants


class _Division:
    """Of the symbolic graph, whose calls the program's own graph has under the same names."""

    def __init__(self, program: Program, found: Combination) -> None:
        assert program.symbolic is not None
        self.program, self.symbolic = program, program.symbolic
        begins = next((entry.name for entry in program.inputs if entry.begins), None)
        if begins is not None:  # those of microbatches, one behind the other, are not those of the batch
            raise _Impossible(f"{begins!r} counts from the first row of each microbatch, not of the batch")
        self.named = {node.name: node for node in program.graph.nodes}
        try:
            at_size = followed(program, self.symbolic)
            graph_of_batch = sized(self.symbolic, {entry.name: entry.shape for entry in program.inputs})
        except Exception as error:
            raise _Impossible(f"its graph runs in no other sizes ({type(error).__name__})") from None
        if at_size is None:
            raise _Impossible("it was traced for one number of samples")
        self.graph, states = at_size
        self.states: dict[str, State] = {node.name: state for node, state in states.items()}
        self.at_size = {node.name: node for node in self.graph.nodes}
        self.own = {node.name: node.meta.get("val") for node in graph_of_batch.nodes}
        self.found = found

    def made(self) -> Program:
        """The program with its head apart."""
        (loss,) = g.outputs(self.symbolic)
        meets, factor = self._where_they_meet(loss)
        head = self._head_of(meets)
        self._check(head)
        values = tuple(map(self._value, head.values))
        parameters = [node for node in head.placed if node.meta["role"][0] == "parameter"]
        graph = self._graph(meets, head)
        dtype = meets.meta["val"].dtype
        spec = BatchLoss(
            graph=graph,
            values=values,
            parameters=tuple(node.meta["role"][1] for node in parameters),
            constants=tuple(n.meta["role"][1] for n in head.placed if n.meta["role"][0] == "constant"),
            sizes=tuple(map(self._size, head.sizes)),
            factor=factor,
            meets=f"{g.op_name(self._first(head))} at {g.line(self._first(head))}",
        )
        handed = [*head.values, *(node for node in parameters if g.is_inexact(node))]
        graphs = [self._rewritten(graph, meets, handed, dtype) for graph in (self.program.graph, self.symbolic)]
        return replace(self.program, graph=graphs[0], symbolic=graphs[1], batch_loss=spec)

    def _first(self, head: _Head) -> fx.Node:
        """The call in which samples meet first."""
        mixing = {state.node.name for state in self.states.values() if isinstance(state, Mixed)}
        ordered = (node for node in self.symbolic.nodes if node in head.calls)
        return next((node for node in ordered if node.name in mixing), next(iter(head.calls)))

    # --- The term of the loss in which samples meet

    def _state(self, node: fx.Node) -> State:
        return self.states[node.name]

    def _where_they_meet(self, loss: fx.Node) -> tuple[fx.Node, float]:
        """The value that the head makes, and the number that it is multiplied by in the loss."""
        node, factor = loss, 1.0
        while True:
            if not isinstance(node, fx.Node) or not isinstance(self._state(node), Mixed):
                raise _Impossible("what it ends in meets no samples")
            name, below = g.op_name(node), None
            if name in ("aten::mul", "aten::div") and len(node.args) == 2 and not node.kwargs:
                first, second = node.args
                number = second if isinstance(first, fx.Node) else first
                if isinstance(number, (int, float)) and (name == "aten::mul" or number is second):
                    below = first if isinstance(first, fx.Node) else second
                    factor = factor * number if name == "aten::mul" else factor / number
            elif name == "aten::add" and len(node.args) == 2 and not node.kwargs:
                terms = [term for term in node.args if isinstance(term, fx.Node)]
                mixed = [term for term in terms if isinstance(self._state(term), Mixed)]
                rest = [self._state(term) for term in terms if term not in mixed]
                if len(mixed) == 1 and all(isinstance(state, Whole | PartsOfSum | Terms) for state in rest):
                    below = mixed[0]
            elif name in CASTS | COPIES or is_view(node):
                below = node.args[0]
            if not isinstance(below, fx.Node) or not isinstance(self._state(below), Mixed):
                return node, factor
            if below.meta["val"].numel() != 1:
                return node, factor
            node = below

    # --- The head: what leads there from where samples are apart

    def _head_of(self, meets: fx.Node) -> _Head:
        head, stack, seen = _Head(), [meets], set[fx.Node]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "placeholder":
                self._place(head, node)
            elif self._is_value(node) and g.op_name(node) not in TURNED and self._found(node) is not None:
                head.values[node] = None
            elif self._is_size(node):
                head.sizes[node] = None
            else:
                head.calls.add(node)
                stack.extend(node.all_input_nodes)
        order = {node: place for place, node in enumerate(self.symbolic.nodes)}
        for part in ("values", "sizes", "placed"):
            setattr(head, part, dict.fromkeys(sorted(getattr(head, part), key=order.__getitem__)))
        return head

    def _place(self, head: _Head, node: fx.Node) -> None:
        kind, name = node.meta["role"]
        if kind in ("parameter", "constant"):
            head.placed[node] = None
        elif self._is_value(node):
            head.values[node] = None
        else:
            raise _Impossible(f"it reads {name!r} of the batch, whose rows are no samples, where samples meet")

    def _found(self, node: fx.Node) -> fx.Node | None:
        """A value in the program's own graph, which leaves out what changes nothing; None: passes before made another
        of it.
        """
        return next((self.named[source.name] for source in _sources(node) if source.name in self.named), None)

    def _is_value(self, node: fx.Node) -> bool:
        """Whether a value can be put together with those of other microbatches: rows of samples, or a sum over these
        that is no larger than what is summed.
        """
        state = self._state(node)
        if isinstance(state, PartsOfSum):
            return self._adds(node, state)
        if not isinstance(state, SampleRows) or state.powers or state.spare is not None or g.tensor_value(node) is None:
            return False
        return shape_of(self.at_size[node.name])[state.axis[0]] % (state.axis[1] * state.count) == 0

    def _adds(self, node: fx.Node, state: PartsOfSum) -> bool:
        if g.tensor_value(node) is None or node.op == "placeholder":
            return False
        sizes = [
            self.own[operand.name].numel() for operand in node.all_input_nodes if g.tensor_value(operand) is not None
        ]
        return self._samples(state) is not None and self.own[node.name].numel() <= sum(sizes)

    def _samples(self, state: PartsOfSum) -> int | None:
        """Of the microbatch, for a mean over samples; 0 for a sum; None for what is divided by something else."""
        if not state.powers:
            return 0
        ((count, power), *more) = state.powers
        if more or power != -1 or count.kind != "rows" or not count.plain:
            return None
        entry = next((entry for entry in self.program.inputs if entry.name == count.name), None)
        return entry.shape[entry.samples] if entry is not None else None

    def _is_size(self, node: fx.Node) -> bool:
        """Whether a number is a size of a value that the head has not itself."""
        if g.op_name(node) not in SIZE_NUMBERS:
            return False
        source = node.args[0]
        assert isinstance(source, fx.Node)
        state = self._state(source)
        if isinstance(state, NewTensor):
            raise _Impossible(f"it reads the size of what the model's code makes of a microbatch ({g.line(node)})")
        return isinstance(state, SampleRows | Whole)

    def _value(self, node: fx.Node) -> BatchValue:
        state, name, dtype = self._state(node), node.name, node.meta["val"].dtype
        shape = tuple(self.own[name].shape)
        if isinstance(state, PartsOfSum):
            samples = self._samples(state)
            assert samples is not None
            return BatchValue(name, shape, dtype, "mean" if samples else "sum", samples=samples)
        assert isinstance(state, SampleRows)
        dim, inner = state.axis
        groups = shape_of(self.at_size[node.name])[dim] // (inner * state.count)
        return BatchValue(name, shape, dtype, "rows", dim, groups)

    def _size(self, node: fx.Node) -> BatchSize:
        source, state = node.args[0], self._state(node.args[0])  # type: ignore[arg-type]
        assert isinstance(source, fx.Node)
        if g.op_name(node) == "aten::sym_numel":
            return BatchSize(self.own[node.name], isinstance(state, SampleRows))
        dim = int(node.args[1]) % len(source.meta["val"].shape)  # type: ignore[arg-type]
        return BatchSize(self.own[node.name], isinstance(state, SampleRows) and state.axis[0] == dim)

    def _check(self, head: _Head) -> None:
        if not head.values:
            raise _Impossible("it reads nothing of the samples")
        for state in (self._state(node) for node in head.calls):
            if isinstance(state, Mixed) and state.why in UNPROVEN:
                raise _Impossible(f"nothing shows that samples meet in {g.op_name(state.node)} ({g.line(state.node)})")
        for node in head.calls:
            where, name = g.line(node), g.op_name(node)
            if isinstance(node.target, OpOverload) and is_random(node):
                raise _Impossible(f"{name} at {where} draws random numbers behind the place where samples meet")
            if name.startswith(OWN_CODE):
                raise _Impossible(f"code with a backward or hooks of its own runs where samples meet ({where})")
            reads_parameter = any(
                operand.op == "placeholder" and operand.meta["role"][0] == "parameter"
                for operand in node.all_input_nodes
            )
            _, role = label(node.meta.get("module", ""), self.program.modules)
            if name in CONVOLUTIONS or name == SDPA or (reads_parameter and role == "layer"):
                raise _Impossible(f"samples meet in the middle of the model, and {name} at {where} comes after that")
        sizes = {parameter.name: parameter.numel for parameter in self.program.parameters}
        read = sum(sizes[node.meta["role"][1]] for node in head.placed if node.meta["role"][0] == "parameter")
        if 2 * read > sum(sizes.values()):
            raise _Impossible("samples meet in the middle of the model, and most of its parameters come after that")

    # --- The graphs

    def _graph(self, meets: fx.Node, head: _Head) -> fx.Graph:
        graph, mapping = fx.Graph(), dict[fx.Node, Any]()
        for kind, nodes in (("value", head.values), ("size", head.sizes)):
            for place, node in enumerate(nodes):
                mapping[node] = g.add_placeholder(graph, node.name, node.meta["val"], (kind, str(place)))
        for node in head.placed:
            mapping[node] = g.add_placeholder(graph, node.name, node.meta["val"], node.meta["role"])
        for node in self.symbolic.nodes:
            if node in head.calls:
                g.copy_node(graph, node, mapping)
        graph.output((mapping[meets],))
        return graph

    def _rewritten(self, graph: fx.Graph, meets: fx.Node, handed: list[fx.Node], dtype: torch.dtype) -> fx.Graph:
        """The graph with what it hands over in the head's place."""
        graph, _ = g.copy_graph(graph)
        named = {node.name: node for node in graph.nodes}
        values, result = [self._there(node, named) for node in handed], self._there(meets, named)
        with self.program.fake_mode, graph.inserting_before(next(iter(graph.nodes))):
            number = torch.empty((), dtype=torch.int64)
            place = g.add_placeholder(graph, "batch_loss", number, BATCH_LOSS)
        writer = _Adding(graph, self.program)
        with graph.inserting_before(result):
            total = writer.sum_of(result, [(value, index) for index, value in enumerate(values)], dtype, place)
        result.replace_all_uses_with(total)
        g.erase_dead(graph)
        return graph

    def _there(self, node: fx.Node, named: Mapping[str, fx.Node]) -> fx.Node:
        """The same in another graph, which leaves out what changes nothing."""
        for source in _sources(node):
            if source.name in named:
                return named[source.name]
        raise _Impossible(f"a pass before has changed {g.op_name(node)} at {g.line(node)}")


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    while node.op == "call_function" and g.op_name(node) in LEFT_OUT and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        yield node


# --- What it takes ---------------------------------------------------------------------------------------------------


def held(found: BatchLoss, microbatches: int, parts: int) -> int:
    """Bytes on a rank of the loss' stage: values of its own microbatches, those of the whole batch with their
    gradients, and all that the head makes of them. parts: microbatches of all replicas.
    """
    handed_over = microbatches * sum(math.prod(value.shape) * value.dtype.itemsize for value in found.values)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    results: dict[fx.Node, Any] = {}
    total = 0
    with mode, without_messages():
        for node in found.graph.nodes:
            if node.op == "placeholder":
                results[node] = _of_batch(found, node, parts)
                if node.meta["role"][0] == "value":
                    total += 2 * results[node].nbytes
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), results.__getitem__)
                results[node] = node.target(*args, **kwargs)
                listed = results[node] if isinstance(results[node], (list, tuple)) else [results[node]]
                total += sum(
                    result.nbytes for result in listed if isinstance(result, torch.Tensor) and not is_view(node)
                )
    return handed_over + total


def _of_batch(loss: BatchLoss, node: fx.Node, parts: int) -> Any:
    """A placeholder's value, where microbatches are as large as this one."""
    kind, place = node.meta["role"]
    if kind == "size":
        size = loss.sizes[int(place)]
        return size.size * parts if size.adds else size.size
    val = node.meta["val"]
    shape = list(val.shape)
    if kind == "value":
        value = loss.values[int(place)]
        shape = [
            size * parts if value.kind == "rows" and dim == value.dim else size for dim, size in enumerate(value.shape)
        ]
    return torch.empty(shape, dtype=val.dtype, device=val.device)


class _Adding:
    """Calls in a graph that has symbolic sizes or not: what is handed over is a number each, whatever its sizes."""

    def __init__(self, graph: fx.Graph, program: Program) -> None:
        self.graph, self.program = graph, program
        self.writer = Writer(graph, program.fake_mode)

    def sum_of(self, like: fx.Node, given: list[tuple[fx.Node, int]], dtype: torch.dtype, place: fx.Node) -> fx.Node:
        with self.program.fake_mode:
            number = torch.empty((), dtype=dtype, device=self.program.device)
        parts = [
            g.add_call(self.graph, TO_BATCH_LOSS, (value, index, dtype, place), val=number, like=like)
            for value, index in given
        ]
        total = parts[0]
        for part in parts[1:]:
            total = g.add_call(self.graph, torch.ops.aten.add.Tensor, (total, part), val=number, like=like)
        return total
