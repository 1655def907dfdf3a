"""layers/tables.py: what each stage makes from the batch and the constants alone (masks, position tables, labels)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from csc.codegen.kept_tables import KeptTables, decorator, kept
from csc.codegen.layer_file import header
from csc.codegen.python import body, comment, quoted, source, wrapped
from torch import fx

from csc.ir import graph as g
from csc.ir.graph import extract, identifier
from csc.ir.program import Context, Program, Stage

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
    wanted = {name: [nodes[table] for table in made] for made, name in function_names(program, nodes).items()}
    given = kept(program.shared, wanted, program.sizes)
    common = _common(program.shared, wanted, {node for one in given for node in one.results})
    functions = [_kept_source(program.shared, one, given) for one in given]
    functions += [_common_source(program.shared, one, given, common) for one in common]
    for name, results in wanted.items():
        functions.append(_function(program.shared, name, results, given, common, one=name == program.loss_tokens))
    if program.contexts:
        functions += [_visibility(context) for context in program.contexts]
        entries = [f"{quoted(one.component)}: {_visibility_name(one)}" for one in program.contexts]
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
    made = iter(names[node] for node in g.outputs(context.graph))
    masks = []
    for mask in context.masks:
        parts = [next(made) if there else "None" for there in (mask.ranges, mask.kinds, mask.kinds)]
        masks.append(f"({', '.join(parts)})")
    return "\n".join([*lines, *wrapped("return [", masks, "]")]) + "\n"


@dataclass(frozen=True)
class _Common:
    """A function of what several others need: `results`, which stand in their bodies under these names."""

    name: str
    readers: tuple[str, ...]
    results: tuple[fx.Node, ...]


LEAST = 3  # calls that are worth a function


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
    found: list[_Common] = []
    for names, nodes in sorted(groups.items(), key=lambda item: -len(item[0])):
        inside = set(nodes)
        leaving = [n for n in nodes if n in returned or any(readers.get(u) and u not in inside for u in n.users)]
        if len(nodes) >= LEAST:
            found.append(_Common(f"_common_{len(found) + 1}", names, tuple(leaving)))
    return found


Called = TypeVar("Called", _Common, KeptTables)


def _given(functions: Sequence[Called], readers: Collection[str]) -> list[Called]:
    """Those that all of these call."""
    return [one for one in functions if set(readers) <= set(one.readers)]


def _start(
    graph: fx.Graph, results: Sequence[fx.Node], called: Sequence[_Common | KeptTables]
) -> tuple[fx.Graph, dict, list[str]]:
    """The graph of a function's own calls, the names of its placeholders, and those of them that others make."""
    part = extract(graph, results, given={node for one in called for node in one.results})
    names, given = {}, []
    for node in g.placeholders(part):
        of_others = node.meta["role"][0] == "activation"
        names[node] = node.name if of_others else source(node.meta["role"])
        given += [node.name] if of_others else []
    return part, names, given


def _kept_source(graph: fx.Graph, own: KeptTables, kept: Sequence[KeptTables]) -> str:
    """A fixed function, or a sized one, which may read fixed ones."""
    called = _given(kept, [own.name])
    part, names, _ = _start(graph, own.results, called)
    lines = [f"def {own.name}({', '.join(_arguments(own))}):"]
    lines.append('    """What sizes alone change."""' if own.entries else '    """What no batch changes."""')
    for one in called:
        lines += _taken(one, _arguments(one))
    lines += [*body(part, names), *_returned([names[node] for node in g.outputs(part)])]
    return decorator(own) + "\n".join(lines) + "\n"


def _arguments(kept: KeptTables) -> list[str]:
    return ["batch", "constants"] if kept.entries else ["constants"]


def _common_source(graph: fx.Graph, own: _Common, kept: Sequence[KeptTables], common: Sequence[_Common]) -> str:
    called = [*_given(kept, own.readers), *(one for one in _given(common, own.readers) if one is not own)]
    part, names, given = _start(graph, own.results, called)
    lines = wrapped(f"def {own.name}(", ["batch", "constants", *given], "):", indent=0)
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
    part, names, _ = _start(graph, results, [*before, *called])
    lines = [f"def {name}(batch, constants):"]
    for one_kept in before:
        lines += _taken(one_kept, _arguments(one_kept))
    for at, function in enumerate(called):
        others = [*_given(kept, function.readers), *_given(called[:at], function.readers)]
        _, _, given = _start(graph, function.results, others)
        lines += _taken(function, ["batch", "constants", *given])
    lines += body(part, names)
    found = [names[node] for node in g.outputs(part)]
    return "\n".join([*lines, *([f"    return {found[0]}"] if one else _returned(found))]) + "\n"


def _taken(function: _Common | KeptTables, arguments: Sequence[str]) -> list[str]:
    """The call of a function, and the names of what it returns."""
    made = [node.name for node in function.results]
    return wrapped("(", made, f"{',' if len(made) == 1 else ''}) = {function.name}({', '.join(arguments)})")


def _returned(names: Sequence[str]) -> list[str]:
    return wrapped("return (", names, ",)" if len(names) == 1 else ")")
