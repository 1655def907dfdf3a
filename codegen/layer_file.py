"""One file per variant of a template: its F, B, W and BW as functions.

Terms: saved: what F keeps for B; stashed: what B stashes for W; w: the parameters of one region by their local names.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from csc.codegen.kept_tables import ONCE, WHILE_EQUAL
from csc.codegen.python import WIDTH, body, comment, one_or_tuple, quoted, with_note, wrapped
from torch import fx

from csc.ir import graph as g
from csc.ir.program import Program, Region, Template, Variant

VOCABULARY = ("rows", "rows_backward", "divided_loss", "divided_loss_backward", "divided_linear_cross_entropy")
SINGLE = {"masked_scatter_backward": "scattered_rows"}
BEGUN = ("start_", "finish_")  # of a collective in two calls
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
    others = (
        seeded | dict.fromkeys(COLLECTIVES, "collectives") | dict.fromkeys(VOCABULARY, "linear_cross_entropy") | SINGLE
    )
    families = ("opaque", "context", "linear_cross_entropy")
    return sorted({
        "collectives" if name.startswith(BEGUN)
        else next((family for family in families if name.startswith(family)), others.get(name, "attention"))
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
        what = f"{held} of {axis.size} {axis.name}: {', '.join(map(comment, axis.parameters))}"
        lines += _listed("Shard", what)
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
    what = "B: gradients of the activations" if gradients else "No gradient passes on from here: keep what W needs"
    lines.append(f'    """{what}."""')
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
    gradients, made = g.outputs(graph)
    what = "gradients of the activations, then those of the parameters" if gradients else "gradients of the parameters"
    lines.append(f'    """BW: {what} by local name. W runs while ranks meet."""')
    lines += _types(graph, {"tangent"})
    lines += _unpack(graph, "saved")
    lines += body(graph, names)
    first = f"{one_or_tuple(names[n] for n in gradients)}, " if gradients else ""
    return "\n".join([*lines, f"    return {first}{{", *_by_name(variant, template, names, made), "    }"]) + "\n"


def _by_name(variant: Variant, template: Template, names: dict[fx.Node, str], made: Sequence[fx.Node]) -> list[str]:
    """The items of a dict of parameters' gradients."""
    trained = [name for name, trains in zip(template.parameters, variant.dw) if trains]
    return [f"        {quoted(name)}: {names[node]}," for name, node in zip(trained, made)]
