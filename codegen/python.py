"""Graphs as Python text: one line an op, its type and source at the end, lifetimes ended by `del`."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from csc.errors import CscError
from csc.ir import graph as g
from csc.ir.groups import BATCH_LOSS, CONTEXT, LOSS_WEIGHTS, PLACE, RANDOM, WEIGHTS, Group, meeting
from csc.torch_private.exported import OpOverload

# --- Calls of operators as users write them: `torch.mm(a, b)` and `a.view(2, 3)`, not `aten.mm.default(a, b)` --------
#
# Only for operators that such a call is, to the bit, for whatever its arguments may be: Python's bindings of torch
# choose the operator by the types of these. They take half the time of a call through `torch.ops`, which counts where
# a model is narrow: a step has more than a hundred of them for each layer.


FUNCTIONS = frozenset({
    "aten::add.Tensor", "aten::addmm", "aten::bmm", "aten::cat", "aten::cos", "aten::div.Scalar", "aten::div.Tensor",
    "aten::exp", "aten::mean.dim", "aten::mm", "aten::mul.Scalar", "aten::mul.Tensor", "aten::ne.Scalar", "aten::neg",
    "aten::pow.Tensor_Scalar", "aten::rsqrt", "aten::sigmoid", "aten::sin", "aten::sub.Tensor", "aten::sum.dim_IntList",
    "aten::t", "aten::tanh", "aten::transpose.int", "aten::unsqueeze",
})  # fmt: skip
OF_SIZES = frozenset({"aten::expand", "aten::permute", "aten::view"})  # methods whose second argument is a list


class Written(NamedTuple):
    """`torch.mm(`, its operands; named: those with their names before them."""

    opening: str
    operands: list[Any]
    named: dict[str, Any]


def as_users_write(node: fx.Node, target: OpOverload, names: Mapping[fx.Node, str]) -> Written | None:
    """Returns a call as users write it, in torch's own names; None where it is written by its own name. names: of
    values, as Python text.
    """
    operator, called = target.name(), target._schema.name.removeprefix("aten::")
    first, *rest = node.args or (None,)
    if operator in FUNCTIONS and not node.kwargs and isinstance(first, (fx.Node, list, tuple)):
        return Written(f"torch.{called}(", [first, *rest], {})
    if not isinstance(first, fx.Node):
        return None
    if operator == "aten::clone" and not rest:
        return Written(f"{names[first]}.clone(", [], dict(node.kwargs))
    if operator == "aten::slice.Tensor" and not node.kwargs:
        return _narrowed(node, first, names)
    if operator in OF_SIZES and len(rest) == 1 and not node.kwargs:
        [sizes] = rest
        if isinstance(sizes, (list, tuple)) and sizes:
            return Written(f"{names[first]}.{called}(", list(sizes), {})
    return None


def _narrowed(node: fx.Node, first: fx.Node, names: Mapping[fx.Node, str]) -> Written | None:
    """Consecutive entries of a dimension, where the sizes of both are numbers."""
    bound = g.bind(node)
    dim, before, after = bound["dim"], first.meta["val"].shape, node.meta["val"].shape
    if bound["step"] != 1 or not all(isinstance(size, int) for size in (before[dim], after[dim])):
        return None
    start, *_ = slice(bound["start"], bound["end"]).indices(before[dim])
    return Written(f"{names[first]}.narrow(", [dim, start, after[dim]], {})


def written_over(node: fx.Node, target: OpOverload, names: Mapping[fx.Node, str]) -> Written:
    """Returns the text of a call that writes its result over its first operand. names: of values, as Python text."""
    called, form = target._schema.name.removeprefix("aten::"), node.meta["in_place"]
    first, *rest = node.args
    assert isinstance(first, fx.Node)
    if form == g.METHOD:
        return Written(f"{names[first]}.{called}_(", rest, {})
    return Written(f"aten.{called}.{form}(", [first, *rest], {form: first})


# --- Graphs as Python text: one line an op, its type and source at the end, lifetimes ended by `del` -----------------
#
# Nothing of a model reaches the text unescaped: names of values are identifiers (csc.ir.graph), every other string
# goes through `repr`, comments through `comment`.


WIDTH = 100  # of code
NOTES = 88  # the column where notes begin
LIMIT = 140  # of a line with its note
NO_END = 2**63 - 1  # what a slice to the end has for its end


def comment(text: str) -> str:
    """Foreign text made safe for a comment or docstring: printable, one line, no quotes or backslashes."""
    flat = re.sub(r"[^\x20-\x7e·×]+", " ", text)
    return flat.replace("\\", "/").replace('"', "'")


def quoted(text: str) -> str:
    """Foreign text as a string literal in double quotes, in ASCII."""
    escaped = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{escaped}"'


def literal(value: Any, names: Mapping[fx.Node, str]) -> str:
    """An argument of a call as Python source. Raises CscError for what has no safe literal."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        items = ", ".join(literal(item, names) for item in value)
        if isinstance(value, list):
            return f"[{items}]"
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, str):
        return quoted(value)
    if value is None or isinstance(value, (bool, int)):
        return "2**63 - 1" if value == NO_END else repr(value)
    if isinstance(value, float):
        return repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
    if isinstance(value, complex):
        return f"complex({literal(value.real, names)}, {literal(value.imag, names)})"
    if isinstance(value, torch.device):
        return f'torch.device("{value.type}")'
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    raise CscError(
        f"an argument of type {type(value).__name__} cannot be written as code", "emission",
        "rewrite the operation that takes it with tensors and plain numbers",
    )  # fmt: skip


def call(node: fx.Node, names: Mapping[fx.Node, str]) -> tuple[str, list[str], str]:
    """The right-hand side of a node: `torch.mm(`, its operands, `)`; `pair[0]` without operands."""
    if node.target is operator.getitem:
        return f"{literal(node.args[0], names)}[{literal(node.args[1], names)}]", [], ""
    target = node.target
    if not isinstance(target, OpOverload) and getattr(operator, g.op_name(node), None) is target:
        return (
            f"operator.{g.op_name(node)}(",
            [literal(argument, names) for argument in node.args],
            ")",
        )  # of whole numbers
    if not isinstance(target, OpOverload) and getattr(torch, g.op_name(node), None) is target:
        return f"torch.{g.op_name(node)}(", [literal(argument, names) for argument in node.args], ")"
    if not isinstance(target, OpOverload):
        raise CscError(f"{target} is no ATen operator", node.meta.get("source") or "emission", "use tensor operations")
    write = written_over if node.meta.get("in_place") else as_users_write
    written = write(node, target, names)
    if written is not None:
        operands = [item for value in written.operands for item in _items(value, names, "")]
        operands += [item for name, value in written.named.items() for item in _items(value, names, f"{name}=")]
        return written.opening, operands, ")"
    namespace = target.namespace if target.namespace == "aten" else f"torch.ops.{target.namespace}"
    by_name = False  # csc's own: values come first, then settings by name
    operands = []
    for value, argument in zip(node.args, target._schema.arguments):
        by_name |= target.namespace != "aten" and not isinstance(value, fx.Node)
        operands += _items(value, names, f"{argument.name}=" if by_name else "")
    for key, value in node.kwargs.items():
        operands += _items(value, names, f"{key}=")
    name = target._schema.name.split("::")[1]
    return f"{namespace}.{name}.{target._overloadname}(", operands, ")"


def _items(value: Any, names: Mapping[fx.Node, str], before: str) -> list[str]:
    """An operand as one item; a list as several, between which a line may end."""
    text = before + literal(value, names)
    return text.split(", ") if isinstance(value, (list, tuple)) and '"' not in text else [text]


def source(role: tuple[str, str]) -> str:
    """Where an emitted function finds a batch entry, a constant, or what the plan of the batch says."""
    kind, label = role
    if kind == "random":
        return f"batch[{quoted(RANDOM)}]"
    if role == LOSS_WEIGHTS:
        return f"batch[{quoted(WEIGHTS)}]"
    if role == BATCH_LOSS:
        return f"batch[{quoted(PLACE)}]"
    if kind == "tensor":
        return f"batch[{quoted(meeting(Group.TENSOR if label == 'number' else Group.of(label)))}]"
    if kind == "context group":
        return f"batch[{quoted(meeting(Group.CONTEXT if label == 'number' else Group.of(label)))}]"
    if kind == "context":
        component, _, field = label.rpartition(".")
        return f"batch[{quoted(CONTEXT)}][{quoted(component)}].{field}"
    return f"{'batch' if kind == 'input' else 'constants'}[{quoted(label)}]"


def with_note(code: str, note: str) -> list[str]:
    """A line of a function with a comment at its end, in one column where the code is short enough; where the line
    would be longer than LIMIT, the comment stands above.
    """
    text, remark = f"    {code}", comment(note)
    line = f"{text:<{NOTES}}  # {remark}" if remark else text
    return [line] if len(line) <= LIMIT or not remark else [f"    # {remark}", text]


def _statement(name: str, value: tuple[str, list[str], str], ended: list[str], note: str) -> list[str]:
    """`name = value; del ended  # note`, over several lines where it is long."""
    opening, operands, closing = value
    text = f"{name} = {opening}{', '.join(operands)}{closing}"
    deletion = f"del {', '.join(ended)}"
    line = with_note(f"{text}; {deletion}" if ended else text, note)
    if len(line) == 1 and len(line[0]) <= LIMIT:
        return line
    deleted = [f"    {deletion}"] if len(deletion) <= WIDTH else wrapped("del (", ended, ")")
    alone = with_note(text, note)
    if not operands or (len(alone) == 1 and len(alone[0]) <= LIMIT):
        return [*alone, *(deleted if ended else [])]
    first, *rest = wrapped(f"{name} = {opening}", operands, closing, across=True)
    return [*with_note(first.lstrip(), note), *rest, *(deleted if ended else [])]


def body(graph: fx.Graph, names: dict[fx.Node, str], keep: Iterable[fx.Node] = ()) -> list[str]:
    """The calls of a graph as lines; a value is deleted after its last use unless it is in `keep` or returned.

    names: the placeholders' source text; filled with the names of the calls.
    """
    returned = set(graph.output_node().all_input_nodes)
    deletable = {n for n in graph.nodes if n.op == "call_function"} | {
        n for n in g.placeholders(graph) if n.meta["role"][0] in ("saved", "tangent", "activation")
    }
    deletable -= returned | set(keep)
    last_use: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last_use[used] = node
    ends: dict[fx.Node, list[str]] = {}
    for used, node in last_use.items():
        if used in deletable and node.op == "call_function":
            names.setdefault(used, used.name)
            ends.setdefault(node, []).append(names[used])
    lines: list[str] = []
    again = False
    for node in g.calls(graph):
        if again != bool(node.meta.get("rematerialised")):
            again = not again
            lines.append("    # F rematerialised, as far as B and W read it:" if again else "    # B:")
        names[node] = node.name
        note = f"{g.type_text(node.meta['val'])}  {node.meta.get('source') or ''}".rstrip()
        lines += _statement(node.name, call(node, names), ends.get(node, []), note)
    return lines


def tuple_text(items: Iterable[str]) -> str:
    """`(a, b)`, `(a,)`, `()`."""
    listed = list(items)
    return f"({listed[0]},)" if len(listed) == 1 else f"({', '.join(listed)})"


def one_or_tuple(items: Iterable[str]) -> str:
    """`a` for one item, `(a, b)` for several, `()` for none."""
    listed = list(items)
    return listed[0] if len(listed) == 1 else tuple_text(listed)


def wrapped(opening: str, items: Iterable[str], closing: str, indent: int = 4, across: bool = False) -> list[str]:
    """`opening a, b, c closing` on one line, or on as many as the width asks for; across: on several in any case."""
    listed = list(items)
    line = f"{' ' * indent}{opening}{', '.join(listed)}{closing}"
    if len(line) <= WIDTH + 10 and not across:
        return [line]
    lines, current = [" " * indent + opening], " " * (indent + 4)
    for item in listed:
        if len(current) + len(item) + 2 > WIDTH + 10:
            lines.append(current.rstrip())
            current = " " * (indent + 4)
        current += f"{item}, "
    return [*lines, current.rstrip(), " " * indent + closing]
