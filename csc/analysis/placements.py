"""What the ranks of a tensor-parallel group hold of each value of a graph, followed through its calls.

Terms
  equal    all ranks have the same                     shard    of one dimension, each its own entries
  part     terms of a sum, which nothing has added up  unknown  what is not known for sure: no error comes of it

    followed = Followed()                      what was followed once is known
    followed.of(graph, given) -> Types         .held: {node: EQUAL | PART | UNKNOWN | a dimension}
                                               .problems: sentences, each with the value it is about

A sum that is lost leaves a part where a whole is needed, one that is doubled adds up what is equal. Which dimension a
shard has is taken from the table of operators; where that does not tell, the value is unknown.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import fx

from csc.analysis.operators.table import (
    ATTENTION,
    CASTS,
    CONTEXT_ATTENTION,
    GROUPED_BACKWARD,
    LOOK_UPS,
    NEW,
    PRODUCTS,
    RESHAPES,
    RULES,
    SIZED_VIEWS,
    SIZES_READ,
    Use,
    filled_with,
    is_linear,
    is_pointwise,
    reduction,
    relation_of_features,
)
from csc.ir import graph as g

Placement = str | int  # a shard's dimension
EQUAL, PART, UNKNOWN = "equal", "part", "unknown"
ELSEWHERE = "elsewhere"  # of a group's number, or a plan: its ranks are not those that are asked about
SUMS = ("csc::all_reduce", "csc::reduce_scatter")
GATHERS = ("csc::all_gather", "csc::gather_shared", "csc::context_whole")
TAKES = ("csc::own_part", "csc::context_own")  # a rank's own entries of what is equal
PIECES = ("csc::gather_pieces", "csc::scatter_pieces")
MEETS = (*SUMS, *GATHERS, *TAKES, *PIECES, "csc::share")
DIVIDED_HEAD = "csc::divided_linear_cross_entropy"
VOCABULARY = ("csc::rows", "csc::rows_backward", "csc::divided_loss", "csc::divided_loss_backward", DIVIDED_HEAD)
BACKWARDS = (f"{ATTENTION}_backward", f"{CONTEXT_ATTENTION}_backward")
OVER_ROWS = ("aten::native_layer_norm_backward", "aten::convolution_backward")  # d_x, then sums over all rows
SCATTERS = ("aten::embedding_dense_backward", "aten::slice_backward", "aten::select_backward")
NORMS = ("aten::native_layer_norm",)  # and numbers of each row
TERMS = ("aten::add", "aten::sub")
FACTORS = ("aten::mul", "aten::div")
Held = dict[fx.Node, Placement]


@dataclass(frozen=True)
class Types:
    """What ranks hold of every value of a graph, and what is wrong with its calls."""

    held: Held
    problems: Sequence[str]


class Followed:
    """Through the graphs of a run of passes, most of which hand most graphs on as they are."""

    def __init__(self) -> None:
        self._known: dict[tuple[fx.Graph, int, tuple[Placement, ...]], Types] = {}

    def of(self, graph: fx.Graph, given: Mapping[fx.Node, Placement]) -> Types:
        """given: what ranks hold of placeholders."""
        key = graph, len(graph.nodes), tuple(given.values())
        if key not in self._known:
            self._known[key] = _followed(graph, given)
        return self._known[key]


def _followed(graph: fx.Graph, given: Mapping[fx.Node, Placement]) -> Types:
    types: Held = {}
    found: list[str] = []

    def tell(node: fx.Node, said: str) -> None:
        found.append(f"%{node.name} ({g.op_name(node)} at {g.place(node)}) {said}")

    for node in graph.nodes:
        if node.op == "placeholder":
            types[node] = given.get(node, UNKNOWN)
        elif node.op == "call_function":
            met = _collective(node, types, tell)
            types[node] = _call(node, types, tell) if met is None else met
    return Types(types, found)


def _collective(node: fx.Node, types: Held, tell: Callable[[fx.Node, str], None]) -> Placement | None:
    """None of a call that is none."""
    name = g.op_name(node).replace("csc::finish_", "csc::")
    if not name.startswith("csc::") or not node.all_input_nodes:
        return None
    if name.startswith("csc::start_"):
        return EQUAL  # a ticket; what it is for is asked where it is waited for
    held = types[node.all_input_nodes[0]]
    if name in MEETS and any(types[used] == ELSEWHERE for used in node.all_input_nodes):
        return held  # with others, each of these ranks in the same way
    if name in VOCABULARY and any(types[used] == ELSEWHERE for used in node.all_input_nodes):
        return EQUAL if all(types[used] in (EQUAL, ELSEWHERE) for used in node.all_input_nodes) else UNKNOWN
    if name in SUMS:
        if held == EQUAL or isinstance(held, int):
            tell(node, f"adds up %{node.all_input_nodes[0].name}, which is {said(held)}")
        return EQUAL if name == "csc::all_reduce" else g.bind(node)["dim"]
    if name in GATHERS:
        if held == PART:
            tell(node, f"gathers %{node.all_input_nodes[0].name}, which is {said(held)}")
        return EQUAL
    if name in (*TAKES, "csc::share"):
        if held == PART or (isinstance(held, int) and name in TAKES):
            tell(node, f"takes %{node.all_input_nodes[0].name} as equal on all ranks, which is {said(held)}")
        if name == "csc::own_part" and g.bind(node)["samples"] == 1:
            return PART  # the first rank has it, the others zeros
        return g.bind(node)["dim"] if name in TAKES else held
    if name in PIECES:
        return held if isinstance(held, int) else UNKNOWN
    if name == "csc::divided_loss_backward":
        return types[g.bind(node)["logits"]]
    return PART if name == "csc::rows" else EQUAL if name in ("csc::divided_loss", DIVIDED_HEAD) else None


def said(held: Placement) -> str:
    """In words."""
    return {EQUAL: "equal on all ranks", PART: "a part of a sum that nothing has added up"}.get(str(held), "a shard")


def _call(node: fx.Node, types: Held, tell: Callable[[fx.Node, str], None]) -> Placement:
    used = node.all_input_nodes
    if any(types[one] == ELSEWHERE for one in used):  # a plan of other ranks
        types = types | {one: EQUAL for one in used if types[one] == ELSEWHERE}
    held = [types[one] for one in used]
    name = g.op_name(node)
    if node.target is operator.getitem:
        return _item(node, types)
    if all(one == EQUAL for one in held):
        return EQUAL
    if UNKNOWN in held:
        return UNKNOWN
    if name == "csc::dropout" and types[used[0]] != PART:
        return _dropped(node, types, tell)
    if PART in held:
        return _of_parts(node, name, held, tell)
    if name == "aten::index_select" and held == [EQUAL, 0]:  # of the whole, by the numbers of a rank's own entries
        return g.bind(node)["dim"]
    if name in OVER_ROWS:
        return _rows(node, types)
    if name == "aten::slice_backward":
        return held[0] if g.bind(node)["dim"] != held[0] else UNKNOWN
    known = relation_of_features(node)
    related = {use.node for use in known.uses} if known is not None else set()
    if name == CONTEXT_ATTENTION and {types[g.bind(node)[one]] for one in ("q", "k", "v")} in ({0}, {1}, {2}):
        return held[0]  # of samples, heads, or tokens: keys and values of others come to a rank's own queries
    if name in (ATTENTION, CONTEXT_ATTENTION) and related != set(used):
        return held[0]
    if known is None or any(types[one] != EQUAL for one in set(used) - related):  # a kernel of weights has no rows
        return UNKNOWN
    if name in RESHAPES:
        return _reshaped(used[0].meta["val"].shape, node.meta["val"].shape, held[0])
    return _linked(known.uses, types)


def _dropped(node: fx.Node, types: Held, tell: Callable[[fx.Node, str], None]) -> Placement:
    """A shard takes its own entries of the whole's mask."""
    bound = g.bind(node)
    own = [
        dim for which, dim in ((bound["tokens"], bound["dim"]), (bound["entries"], bound["along"]))
        if which is not None and types[which] != EQUAL
    ]  # fmt: skip
    x = types[bound["x"]]
    if own != ([x] if isinstance(x, int) else []):
        tell(node, f"takes entries of a mask along dimensions {own} for %{bound['x'].name}, which is {said(x)}")
    return x


def _item(node: fx.Node, types: Held) -> Placement:
    """One of several results: of attention that of queries, of its backward those of what it was given."""
    several, which = node.args
    assert isinstance(several, fx.Node) and isinstance(which, int)
    name = g.op_name(several)
    if name == DIVIDED_HEAD and not any(types[used] == ELSEWHERE for used in several.all_input_nodes):
        return (EQUAL, PART, 0, 0)[which]  # the loss, gradients of x, weight and bias
    if name in BACKWARDS and which < 3:
        bound = g.bind(several)
        of = types.get(bound[("q", "k", "v")[which]], UNKNOWN)
        return of if isinstance(of, int) else UNKNOWN
    if name == GROUPED_BACKWARD:
        return _grouped_backward(several, types)[which] if which < 2 else UNKNOWN
    if name in OVER_ROWS and isinstance(types[several], int):
        return types[several] if which == 0 else PART
    if name in (ATTENTION, CONTEXT_ATTENTION) and which == 1 and types[several] in (0, 1, 2):
        return types[several]  # a number for each query of each head
    first = which == 0 or name in (*NORMS, "aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind")
    return types[several] if first or types[several] in (EQUAL, PART) else UNKNOWN


def _rows(node: fx.Node, types: Held) -> Placement:
    """Of the gradient that a norm or a convolution hands on, whose ranks have some of the rows."""
    gradient, x, *rest = node.all_input_nodes
    dim = types[gradient]
    apart = 1 if g.op_name(node) == "aten::convolution_backward" else x.meta["val"].dim() - len(node.args[2])  # type: ignore[arg-type]
    rows = isinstance(dim, int) and dim < apart and types[x] == dim
    return dim if rows and all(types[one] in (EQUAL, dim) for one in rest) else UNKNOWN


def _of_parts(node: fx.Node, name: str, held: Sequence[Placement], tell: Callable[[fx.Node, str], None]) -> Placement:
    """A sum's terms stay terms where a call is linear in them."""
    if name in TERMS and len(node.all_input_nodes) > 1:
        if set(held) == {PART}:
            return PART
        tell(node, f"adds a part of a sum to what is {said(next(one for one in held if one != PART))}")
        return UNKNOWN
    backward = "_backward" in name and set(held[1:]) <= {EQUAL}  # linear in the gradient, the first that it reads
    if (backward or name.endswith("norm_backward") or name in SCATTERS or name in LOOK_UPS) and held[0] == PART:
        return PART
    if name in NEW or name in SIZES_READ:
        return EQUAL
    if name in ("aten::index_put", "aten::scatter"):  # what was looked up, put back into zeros
        into, values = node.args[0], node.args[2 if name == "aten::index_put" else 3]
        plain = isinstance(into, fx.Node) and filled_with(into) == 0 and held.count(PART) == 1
        return PART if plain and node.all_input_nodes[held.index(PART)] is values else UNKNOWN
    linear = is_linear(node) or name in CASTS or name in SIZED_VIEWS or RULES.get(name) is reduction
    if linear or name in PRODUCTS or (name in FACTORS and (held[0] == PART or name == FACTORS[0])):
        return PART if held.count(PART) == 1 and not any(isinstance(one, int) for one in held) else UNKNOWN
    if is_pointwise(node) and name not in (*TERMS, *FACTORS, "aten::where", "aten::neg") and len(held) == 1:
        tell(node, f"reads %{node.all_input_nodes[0].name}, a part of a sum that nothing has added up")
    return UNKNOWN


def _grouped_backward(node: fx.Node, types: Held) -> tuple[Placement, Placement]:
    """Gradients of rows and of matrices: along what either is divided by."""
    bound = g.bind(node)
    held = tuple(types[bound[name]] for name in ("input", "weight", "grad_output"))
    if held == (EQUAL, 2, 1):
        return PART, 2
    return (1, 1) if held == (1, 1, EQUAL) else (UNKNOWN, UNKNOWN)


def _linked(uses: Sequence[Use], types: Held) -> Placement:
    """Of a result: a shard along the dimension that shards of operands walk along, a part where they are added up."""
    found: set[Placement] = set()
    walks: list[int | None] = []
    for use in uses:
        dim = types[use.node]
        if not isinstance(dim, int):
            continue
        end = use.end(dim)
        if end is None:
            found |= {place for place, along in enumerate(use.link) if along == dim}
        elif end.how in ("contracted", "summed"):
            found.add(PART)
            walks.append(end.walk)
        elif end.how in ("grouped", "cut", "joined") and end.dim is not None:
            found.add(end.dim)
        elif end.how != "unread":
            return UNKNOWN
    contracted = [use for use in uses if any(end.how == "contracted" for end in use.ends.values())]
    if PART in found and (len(set(walks)) > 1 or (contracted and len(walks) != 2)):
        return UNKNOWN
    return found.pop() if len(found) == 1 else UNKNOWN


def _reshaped(before: Sequence[int], after: Sequence[int], held: Placement) -> Placement:
    """A shard's dimension in other sizes: the outermost of what it becomes, if that is one for sure."""
    if not isinstance(held, int):
        return held
    ahead = prod(before[:held])
    places = [place for place in range(len(after)) if prod(after[:place]) == ahead]
    return places[0] if len(places) == 1 else UNKNOWN
