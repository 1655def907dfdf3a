"""One file per variant of a template, its F, B, W and BW as functions; and the tables that stages make of the batch."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from csc.codegen.python import WIDTH, body, comment, one_or_tuple, quoted, source, with_note, wrapped
from torch import fx

from csc.ir import graph as g
from csc.ir.graph import extract, identifier
from csc.ir.program import BatchLoss, BatchValue, Context, Program, Region, Stage, Template, Variant
from csc.torch_private.exported import OpOverload

# --- Which tables a program does not make in each step ---------------------------------------------------------------
#
# Tables that no batch changes (positions, rotary tables, causal masks) are made once. Tables that sizes alone change
# (windows of images) are made once while these are the same.
#
# Terms: a call is *fixed* if constants and numbers alone lead to it, *sized* if sizes of the batch (Program.sizes) do,
# too. Of such calls those are *kept* that a function returns or that another call reads. Functions that need the same
# kept values get them from one function.


MOST = 2**24  # bytes of one kept value: what is larger is made in each step, and gone after it
LEAST = 3  # sized calls that are worth a look at the sizes
ONCE = "@once\n"
WHILE_EQUAL = "@while_equal("
OF_MASKS = frozenset({"csc::pack_mask", "csc::group_ranges", "csc::seeing_ranges"})  # csc's own that read values alone


@dataclass(frozen=True)
class KeptTables:
    """One function of kept values: `results`, under the names of their nodes, for the functions `readers`. entries: the
    sizes that it is made of; none: it is fixed.
    """

    name: str
    readers: tuple[str, ...]
    results: tuple[fx.Node, ...]
    entries: tuple[str, ...] = ()


def decorator(tables: KeptTables) -> str:
    """With the end of its line."""
    if not tables.entries:
        return ONCE
    return "\n".join(wrapped(WHILE_EQUAL, map(quoted, tables.entries), ")", indent=0)) + "\n"


def kept(graph: fx.Graph, wanted: Mapping[str, Sequence[fx.Node]], sizes: Collection[str]) -> list[KeptTables]:
    """One for each set of readers, fixed ones first, in the order of the graph. Sized ones read fixed ones, too."""
    returned = {node for results in wanted.values() for node in results}
    needed = {name: g.ancestors(results) for name, results in wanted.items()}
    sized = _sized(graph, needed, returned, sizes)
    if sized:
        ends = {node for function in sized for node in function.results}
        needed = {name: g.ancestors(results, until=ends) for name, results in wanted.items()}
        needed |= {function.name: g.ancestors(function.results) for function in sized}
    nodes, _ = _kept(graph, returned, needed, ())
    return [*_tables("_fixed", _by_readers(nodes, needed)), *sized]


def _sized(
    graph: fx.Graph, needed: Mapping[str, set[fx.Node]], returned: set[fx.Node], sizes: Collection[str]
) -> list[KeptTables]:
    """Those that take more than a look at the sizes does."""
    if not sizes:
        return []
    _, fixed = _kept(graph, returned, needed, ())
    nodes, _ = _kept(graph, returned, needed, sizes)
    functions = []
    for tables in _tables("_sized", _by_readers([node for node in nodes if node not in fixed], needed)):
        ancestors = g.ancestors(tables.results, until=fixed) - fixed
        entries = [
            node.meta["role"][1] for node in g.placeholders(graph) if node in ancestors and _is_size(node, sizes)
        ]
        if sum(node.op == "call_function" for node in ancestors) >= LEAST:
            functions.append(replace(tables, entries=tuple(entries)))
    return functions


def _by_readers(
    nodes: Sequence[fx.Node], needed: Mapping[str, set[fx.Node]]
) -> dict[tuple[str, ...], list[fx.Node]]:  # fmt: skip
    groups: dict[tuple[str, ...], list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(tuple(name for name in needed if node in needed[name]), []).append(node)
    return groups


def _tables(prefix: str, groups: Mapping[tuple[str, ...], Sequence[fx.Node]]) -> list[KeptTables]:
    return [KeptTables(f"{prefix}_{i + 1}", names, tuple(nodes)) for i, (names, nodes) in enumerate(groups.items())]


def _kept(
    graph: fx.Graph, returned: set[fx.Node], needed: Mapping[str, set[fx.Node]], sizes: Collection[str]
) -> tuple[list[fx.Node], set[fx.Node]]:
    """(what is kept of a graph: nothing that is too large, but what leads to it is; all that these sizes and constants
    lead to).
    """
    asked = set[fx.Node]().union(*needed.values())
    large: set[fx.Node] = set()
    while True:
        reached = _led_to(graph, sizes, large)
        kept = [
            node for node in g.calls(graph)
            if node in reached & asked and (node in returned or not reached.issuperset(asked.intersection(node.users)))
        ]  # fmt: skip
        beyond = {node for node in kept if not 0 <= _bytes(node) <= MOST}
        if not beyond:
            return kept, reached
        large |= beyond


def _led_to(graph: fx.Graph, sizes: Collection[str], large: set[fx.Node]) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            alone = node.meta["role"][0] == "constant" or _is_size(node, sizes)
        else:
            alone = node.op == "call_function" and node not in large and _of_values(node)
        if alone and reached.issuperset(node.all_input_nodes):
            reached.add(node)
    return reached


def _is_size(node: fx.Node, sizes: Collection[str]) -> bool:
    return node.op == "placeholder" and node.meta["role"][0] == "input" and node.meta["role"][1] in sizes


def _of_values(node: fx.Node) -> bool:
    """Whether a call gives the same whenever its operands are the same, and does nothing else."""
    if not isinstance(node.target, OpOverload):
        return g.op_name(node) == "getitem"
    drawn = torch.Tag.nondeterministic_seeded in node.target.tags
    return (node.target.namespace == "aten" and not drawn) or g.op_name(node) in OF_MASKS


def _bytes(node: fx.Node) -> int:
    """Of what a call gives; -1 if it is no tensor."""
    value = node.meta["val"]
    if not hasattr(value, "stride"):
        return -1
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return int(value.dtype.itemsize * (1 + reach)) if 0 not in value.shape else 0


# --- One file per variant of a template: its F, B, W and BW as functions ---------------------------------------------
#
# Terms: saved: what F keeps for B; stashed: what B stashes for W; w: the parameters of one region by their local
# names.


VOCABULARY = ("rows", "rows_backward", "divided_loss", "divided_loss_backward", "divided_linear_cross_entropy")
SINGLE = {"masked_scatter_backward": "scattered_rows"}
BEGUN = ("start_", "finish_")  # of a collective in two calls
BATCH_LOSS = ("from_batch_loss", "to_batch_loss")
COLLECTIVES = (
    "all_gather", "all_reduce", "gather_pieces", "gather_shared", "own_part", "reduce_scatter", "scatter_pieces",
    "share",
)  # fmt: skip


def header(functions: Sequence[str]) -> str:
    """The imports of a file that holds these functions."""
    lines = ["import torch"]
    for module in operators(functions):
        lines.append(f"import csc.kernels.{module}  # the operators torch.ops.csc")
    decorators = {"once": ONCE, "while_equal": WHILE_EQUAL}
    used = [name for name, line in decorators.items() if any(text.startswith(line) for text in functions)]
    if used:
        lines.append(f"from csc.runtime.made_once import {', '.join(used)}")
    named = any(re.search(r"\baten\.", text) for text in functions)
    return "\n".join([*lines, "", *(["aten = torch.ops.aten", ""] if named else [])])


def operators(functions: Sequence[str]) -> list[str]:
    """The modules of csc.kernels that define the operators which these functions call."""
    called = {name for text in functions for name in re.findall(r"torch\.ops\.csc\.(\w+)", text)}
    seeded = dict.fromkeys((name.removeprefix("csc::") for name in g.SEEDED), "dropout")
    by_name = (
        seeded
        | dict.fromkeys(BATCH_LOSS, "batch_loss")
        | dict.fromkeys(COLLECTIVES, "collectives")
        | dict.fromkeys(VOCABULARY, "linear_cross_entropy")
        | SINGLE
    )
    families = ("opaque", "context", "linear_cross_entropy", "quantised")
    return sorted({
        "collectives" if name.startswith(BEGUN)
        else next((family for family in families if name.startswith(family)), by_name.get(name, "attention"))
        for name in called
    })  # fmt: skip


@dataclass(frozen=True)
class Signature:
    """How a rank file calls one function of a variant: the tables and gradients it takes, and whether it takes `w`."""

    tables: tuple[str, ...]
    takes_w: bool
    tangents: tuple[str, ...]


def signature(graph: fx.Graph) -> Signature:
    """The arguments of a part, apart from activations or saved values, in the order of the emitted function."""
    roles = [node.meta["role"] for node in g.placeholders(graph)]
    return Signature(
        tables=tuple(name for kind, name in roles if kind == "shared"),
        takes_w=any(kind == "parameter" for kind, _ in roles),
        tangents=tuple(name for kind, name in roles if kind == "tangent"),
    )


def layer_source(program: Program, variant: Variant, template: Template, regions: Sequence[Region]) -> str:
    """The text of layers/NAME.py."""
    functions = [_forward(variant)]
    if variant.backward_input is not None:
        functions.append(_backward_input(variant))
    if variant.backward_weight is not None:
        functions.append(_backward_weight(variant, template))
    if variant.backward is not None:
        functions.append(_backward(variant, template))
    return "\n\n".join([_docstring(program, variant, template, regions) + header(functions), *functions])


def _docstring(program: Program, variant: Variant, template: Template, regions: Sequence[Region]) -> str:
    kind = (
        program.modules[regions[0].module].kind
        if regions[0].kind != "container"
        else "code of " + (regions[0].module or program.name)
    )
    same = f"{len(regions)} equal regions" if len(regions) > 1 else "one region"
    lines = [f'"""{variant.name}: {comment(kind)}, {same}.', ""]
    names = [comment(region.name) for region in regions]
    lines += [f"Regions  {names[0]}" + (f" ... {names[-1]}" if len(names) > 1 else "")]
    work = zip(
        "FBW",
        (variant.forward, variant.backward_input, variant.backward_weight),
        variant.matmuls,
        variant.flops,
    )
    reasons = {"B": "no gradient passes through", "W": "nothing here trains"}
    for letter, part, matmuls, flops in work:
        present = part is not None and (letter != "B" or any(variant.dx))
        text = f"{matmuls} matmuls, {flops:,} FLOPs" if present else reasons[letter]
        lines.append(f"{letter}        {text}")
    if variant.saves is not None:
        lines += _recomputation(variant)
    for axis in template.divided:
        held = f"1 / {axis.ranks // axis.size}" if axis.ranks > axis.size else str(axis.size // axis.ranks)
        shard = f"{held} of {axis.size} {axis.name}: {', '.join(map(comment, axis.parameters))}"
        lines += _listed("Shard", shard)
    frozen = [p for p, trains in zip(template.parameters, variant.dw) if not trains]
    if frozen and any(variant.dw):
        shown = ", ".join(map(comment, frozen[:6])) + (", ..." if len(frozen) > 6 else "")
        lines += _listed("Frozen", shown)
    return "\n".join([*lines, '"""', "", ""])


def _recomputation(variant: Variant) -> list[str]:
    """What F saves, and how much of F is rematerialised in B."""
    assert variant.forward is not None and variant.backward_input is not None
    _, saved = g.outputs(variant.forward)
    again = [node for node in g.calls(variant.backward_input) if node.meta.get("rematerialised")]
    calls = g.calls(variant.forward)
    return [
        *_listed("Saves", ", ".join(node.name for node in saved) or "nothing"),
        f"Remat    {len(again)} of {len(calls)} calls of F are rematerialised in B, {variant.rematerialised:,} FLOPs",
    ]


def _listed(title: str, names: str) -> list[str]:
    """Names under a title of the docstring, on as many lines as they take."""
    return textwrap.wrap(f"{title:<8} {names}", WIDTH, subsequent_indent=" " * 9, break_long_words=False)


def _start(name: str, first: Sequence[str], graph: fx.Graph) -> tuple[list[str], dict[fx.Node, str]]:
    """(def line, source text of the placeholders): arguments are `first`, tables, w, tangents."""
    names: dict[fx.Node, str] = {}
    for node in g.placeholders(graph):
        kind, label = node.meta["role"]
        names[node] = f"w[{quoted(label)}]" if kind == "parameter" else node.name
    tables = [n.name for n in g.placeholders(graph) if n.meta["role"][0] == "shared"]
    tangents = [n.name for n in g.placeholders(graph) if n.meta["role"][0] == "tangent"]
    w = ["w"] if signature(graph).takes_w else []
    return wrapped(f"def {name}(", [*first, *tables, *w, *tangents], "):", indent=0), names


def _types(graph: fx.Graph, roles: set[str]) -> list[str]:
    """Comment lines with the types of the arguments."""
    lines = []
    for node in g.placeholders(graph):
        kind, label = node.meta["role"]
        if kind in roles:
            shown = f"w[{comment(label)}]" if kind == "parameter" else node.name
            lines += with_note(f"# {shown}", g.type_text(node.meta["val"]))
    return lines


def _forward(variant: Variant) -> str:
    graph = variant.forward
    assert graph is not None
    activations = [n.name for n in g.placeholders(graph) if n.meta["role"][0] == "activation"]
    lines, names = _start("forward", activations, graph)
    lines.append('    """F."""')
    lines += _types(graph, {"activation", "shared", "parameter"})
    lines += body(graph, names, keep=[n for n in g.placeholders(graph) if n.meta["role"][0] == "activation"])
    if variant.backward_input is None:
        lines.append(f"    return {one_or_tuple(names[n] for n in g.outputs(graph))}")
    else:
        values, saved = g.outputs(graph)
        lines += wrapped("saved = (", [names[n] for n in saved], ",)" if len(saved) == 1 else ")")
        lines.append(f"    return {one_or_tuple(names[n] for n in values)}, saved")
    return "\n".join(lines) + "\n"


def _unpack(graph: fx.Graph, packed: str) -> list[str]:
    saved = [n.name for n in g.placeholders(graph) if n.meta["role"][0] == "saved"]
    if not saved:
        return []
    closing = f",) = {packed}; del {packed}" if len(saved) == 1 else f") = {packed}; del {packed}"
    return wrapped("(", saved, closing)


def _backward_input(variant: Variant) -> str:
    graph = variant.backward_input
    assert graph is not None
    lines, names = _start("backward_input", ["saved"], graph)
    gradients, stashed = g.outputs(graph)
    summary = "B: gradients of the activations" if gradients else "No gradient passes on from here: keep what W needs"
    lines.append(f'    """{summary}."""')
    lines += _types(graph, {"tangent"})
    lines += _unpack(graph, "saved")
    lines += body(graph, names)
    if variant.backward_weight is None:
        lines.append(f"    return {one_or_tuple(names[n] for n in gradients)}")
        return "\n".join(lines) + "\n"
    lines += wrapped("stashed = (", [names[n] for n in stashed], ",)" if len(stashed) == 1 else ")")
    result = f"{one_or_tuple(names[n] for n in gradients)}, stashed" if gradients else "stashed"
    lines.append(f"    return {result}")
    return "\n".join(lines) + "\n"


def _backward_weight(variant: Variant, template: Template) -> str:
    graph = variant.backward_weight
    assert graph is not None
    lines, names = _start("backward_weight", ["stashed"], graph)
    lines.append('    """W: gradients of the parameters that train, by local name."""')
    lines += _unpack(graph, "stashed")
    lines += body(graph, names)
    return "\n".join([*lines, "    return {", *_by_name(variant, template, names, g.outputs(graph)), "    }"]) + "\n"


def _backward(variant: Variant, template: Template) -> str:
    graph = variant.backward
    assert graph is not None
    lines, names = _start("backward", ["saved"], graph)
    gradients, weight_gradients = g.outputs(graph)
    summary = (
        "gradients of the activations, then those of the parameters" if gradients else "gradients of the parameters"
    )
    lines.append(f'    """BW: {summary} by local name. W runs while ranks meet."""')
    lines += _types(graph, {"tangent"})
    lines += _unpack(graph, "saved")
    lines += body(graph, names)
    first = f"{one_or_tuple(names[n] for n in gradients)}, " if gradients else ""
    return (
        "\n".join([*lines, f"    return {first}{{", *_by_name(variant, template, names, weight_gradients), "    }"])
        + "\n"
    )


def _by_name(
    variant: Variant, template: Template, names: dict[fx.Node, str], gradients: Sequence[fx.Node]
) -> list[str]:
    """The items of a dict of parameters' gradients."""
    trained = [name for name, trains in zip(template.parameters, variant.dw) if trains]
    return [f"        {quoted(name)}: {names[node]}," for name, node in zip(trained, gradients)]


# --- layers/tables.py: what each stage makes from the batch and the constants alone ----------------------------------
#
# A stage makes masks, position tables and labels.


DOCSTRING = '''"""What a stage makes from the batch and the constants alone: masks, position tables, shifted labels.

Each stage that needs one computes it by itself: that is cheaper than a message, and nothing of it needs a gradient.
What no batch changes is made once, and what sizes alone change while they are the same.
"""

'''


Tables = Mapping[str, fx.Node]  # the nodes that make them, by name


def tables(program: Program) -> Tables:
    """All tables of the program."""
    assert program.shared is not None
    return dict(zip(program.shared.output_node().meta["names"], g.outputs(program.shared)))


def computed(program: Program, stage: Stage, nodes: Tables) -> list[str]:
    """The tables of a stage that take computation (the others are batch entries and constants as they are)."""
    return [name for name in stage.shared if nodes[name].op == "call_function" and name != program.loss_tokens]


def direct(stage: Stage, nodes: Tables) -> dict[str, tuple[str, str]]:
    """The other tables: name -> (role, name of the batch entry or constant)."""
    return {name: nodes[name].meta["role"] for name in stage.shared if nodes[name].op == "placeholder"}


def seeds(program: Program) -> set[str]:
    """The tables that are the seed of a microbatch's random numbers; a region gets one of its own, by its name."""
    if program.shared is None:
        return set()
    return {name for name, node in tables(program).items() if node.meta.get("role", ("",))[0] == "random"}


def function_names(program: Program, nodes: Tables) -> dict[tuple[str, ...], str]:
    """For each set of tables that some stage computes, the name of its function."""
    names: dict[tuple[str, ...], str] = {}
    for stage in program.stages:
        wanted = tuple(computed(program, stage, nodes))
        if wanted and wanted not in names:
            names[wanted] = f"of_stage_{stage.index}"
    beside = tuple(computed(program, program.features.stage, nodes)) if program.features is not None else ()
    if beside and beside not in names:
        names[beside] = "of_features"
    if program.loss_tokens:
        names[(program.loss_tokens,)] = program.loss_tokens
    return names


def tables_source(program: Program) -> str:
    """The text of layers/tables.py."""
    nodes = tables(program)
    assert program.shared is not None
    wanted = {name: [nodes[table] for table in tables] for tables, name in function_names(program, nodes).items()}
    kept_functions = kept(program.shared, wanted, program.sizes)
    common = _common(program.shared, wanted, {node for function in kept_functions for node in function.results})
    functions = [_kept_source(program.shared, function, kept_functions) for function in kept_functions]
    functions += [_common_source(program.shared, function, kept_functions, common) for function in common]
    for name, results in wanted.items():
        functions.append(
            _function(program.shared, name, results, kept_functions, common, one=name == program.loss_tokens)
        )
    if program.contexts:
        functions += [_visibility(context) for context in program.contexts]
        entries = [f"{quoted(context.component)}: {_visibility_name(context)}" for context in program.contexts]
        functions.append("\n".join(wrapped("VISIBILITY = {", entries, "}", indent=0)) + "\n")
    return "\n\n".join([DOCSTRING + header(functions), *functions])


def _visibility_name(context: Context) -> str:
    return f"{identifier(context.component)}_visibility"


def _visibility(context: Context) -> str:
    """What the masks of a component's spread tokens are made of, for the whole sequence."""
    names = {node: source(node.meta["role"]) for node in g.placeholders(context.graph)}
    lines = [
        f"def {_visibility_name(context)}(batch, constants):",
        f'    """(ranges, admits, kinds) of each mask of {comment(context.component)}, over the whole sequence."""',
    ]
    lines += body(context.graph, names)
    results = iter(names[node] for node in g.outputs(context.graph))
    masks = []
    for mask in context.masks:
        parts = [next(results) if present else "None" for present in (mask.ranges, mask.kinds, mask.kinds)]
        masks.append(f"({', '.join(parts)})")
    return "\n".join([*lines, *wrapped("return [", masks, "]")]) + "\n"


@dataclass(frozen=True)
class _Common:
    """A function of what several others need: `results`, which stand in their bodies under these names."""

    name: str
    readers: tuple[str, ...]
    results: tuple[fx.Node, ...]


# calls that are worth a function


def _common(graph: fx.Graph, wanted: Mapping[str, Sequence[fx.Node]], given: Collection[fx.Node]) -> list[_Common]:
    """What more than one of these functions computes. Those with more readers come first: others may read them.
    given: what they have.
    """
    needed = {name: g.ancestors(results, until=given) - set(given) for name, results in wanted.items()}
    readers = {node: tuple(name for name in wanted if node in needed[name]) for node in g.calls(graph)}
    groups: dict[tuple[str, ...], list[fx.Node]] = {}
    for node, names in readers.items():
        if len(names) > 1:
            groups.setdefault(names, []).append(node)
    returned = {node for results in wanted.values() for node in results}
    functions: list[_Common] = []
    for names, nodes in sorted(groups.items(), key=lambda item: -len(item[0])):
        inside = set(nodes)
        leaving = [n for n in nodes if n in returned or any(readers.get(u) and u not in inside for u in n.users)]
        if len(nodes) >= LEAST:
            functions.append(_Common(f"_common_{len(functions) + 1}", names, tuple(leaving)))
    return functions


Called = TypeVar("Called", _Common, KeptTables)


def _given(functions: Sequence[Called], readers: Collection[str]) -> list[Called]:
    """Those that all of these call."""
    return [function for function in functions if set(readers) <= set(function.readers)]


def _tables_start(
    graph: fx.Graph, results: Sequence[fx.Node], called: Sequence[_Common | KeptTables]
) -> tuple[fx.Graph, dict, list[str]]:
    """The graph of a function's own calls, the names of its placeholders, and those of them that others make."""
    part = extract(graph, results, given={node for function in called for node in function.results})
    names, parameters = {}, []
    for node in g.placeholders(part):
        of_others = node.meta["role"][0] == "activation"
        names[node] = node.name if of_others else source(node.meta["role"])
        parameters += [node.name] if of_others else []
    return part, names, parameters


def _kept_source(graph: fx.Graph, own: KeptTables, kept: Sequence[KeptTables]) -> str:
    """A fixed function, or a sized one, which may read fixed ones."""
    called = _given(kept, [own.name])
    part, names, _ = _tables_start(graph, own.results, called)
    lines = [f"def {own.name}({', '.join(_arguments(own))}):"]
    lines.append('    """What sizes alone change."""' if own.entries else '    """What no batch changes."""')
    for function in called:
        lines += _taken(function, _arguments(function))
    lines += [*body(part, names), *_returned([names[node] for node in g.outputs(part)])]
    return decorator(own) + "\n".join(lines) + "\n"


def _arguments(kept: KeptTables) -> list[str]:
    return ["batch", "constants"] if kept.entries else ["constants"]


def _common_source(graph: fx.Graph, own: _Common, kept: Sequence[KeptTables], common: Sequence[_Common]) -> str:
    called: list[_Common | KeptTables] = [
        *_given(kept, own.readers),
        *(function for function in _given(common, own.readers) if function is not own),
    ]
    part, names, parameters = _tables_start(graph, own.results, called)
    lines = wrapped(f"def {own.name}(", ["batch", "constants", *parameters], "):", indent=0)
    lines.append(f'    """What {len(own.readers)} of the functions below need."""')
    lines += body(part, names)
    return "\n".join([*lines, *_returned([names[node] for node in g.outputs(part)])]) + "\n"


def _function(
    graph: fx.Graph,
    name: str,
    results: Sequence[fx.Node],
    kept: Sequence[KeptTables],
    common: Sequence[_Common],
    one: bool = False,
) -> str:
    """The function that returns these results; one: the only one, not in a tuple."""
    before, called = _given(kept, [name]), _given(common, [name])
    part, names, _ = _tables_start(graph, results, [*before, *called])
    lines = [f"def {name}(batch, constants):"]
    for one_kept in before:
        lines += _taken(one_kept, _arguments(one_kept))
    for index, function in enumerate(called):
        callable_functions: list[_Common | KeptTables] = [
            *_given(kept, function.readers),
            *_given(called[:index], function.readers),
        ]
        _, _, parameters = _tables_start(graph, function.results, callable_functions)
        lines += _taken(function, ["batch", "constants", *parameters])
    lines += body(part, names)
    names_out = [names[node] for node in g.outputs(part)]
    return "\n".join([*lines, *([f"    return {names_out[0]}"] if one else _returned(names_out))]) + "\n"


def _taken(function: _Common | KeptTables, arguments: Sequence[str]) -> list[str]:
    """The call of a function, and the names of what it returns."""
    results = [node.name for node in function.results]
    return wrapped("(", results, f"{',' if len(results) == 1 else ''}) = {function.name}({', '.join(arguments)})")


def _returned(names: Sequence[str]) -> list[str]:
    return wrapped("return (", names, ",)" if len(names) == 1 else ")")


# --- batch_loss.py: what of the loss is computed once a step, over values of the whole batch --------------------------


def batch_loss_source(found: BatchLoss) -> str:
    """The text of the file. Its sizes are those of the whole batch, whatever they are."""
    names: dict[fx.Node, str] = {}
    arguments: dict[str, list[str]] = {"value": [], "size": []}
    lines, kinds = list[str](), {"value": "values", "size": "sizes"}
    for node in g.placeholders(found.graph):
        kind, label = node.meta["role"]
        names[node] = f"weights[{quoted(label)}]" if kind == "parameter" else source(node.meta["role"])
        if kind in kinds:
            names[node] = node.name
            arguments[kind].append(node.name)
    for kind, listed in arguments.items():
        if listed:
            lines += wrapped("(", listed, f"{',' if len(listed) == 1 else ''}) = {kinds[kind]}")
    lines += body(found.graph, names)
    (result,) = g.outputs(found.graph)
    rows = [f"{comment(value.name)}: {_joined(value)}" for value in found.values]
    opening = [
        f'"""The loss over the whole batch: samples meet in {comment(found.meets)}.',
        "",
        "It is computed once a step, when F of all microbatches of all replicas has made its values; B begins with its",
        "gradients, which autograd makes. It is 0 in the losses of microbatches.",
        "",
        *rows,
        '"""',
        "",
        "import operator" if "operator." in "\n".join(lines) else None,
        "" if "operator." in "\n".join(lines) else None,
        "import torch",
        "",
        "aten = torch.ops.aten",
        "",
        "",
        "def batch_loss(values, weights, constants, sizes):",
        '    """Of values and sizes of the whole batch."""',
    ]
    return "\n".join([*(line for line in opening if line is not None), *lines, f"    return {names[result]}"]) + "\n"


def _joined(value: BatchValue) -> str:
    if value.kind != "rows":
        return "sum of microbatches" if value.kind == "sum" else "mean of microbatches, each weighted by its samples"
    behind = f"microbatches one behind the other along dimension {value.dim}"
    return f"{behind}, in each of {value.groups} groups" if value.groups > 1 else behind
