"""layers/tables.py: what each stage makes from the batch and the constants alone (masks, position tables, labels)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from csc.codegen.layer_file import header
from csc.codegen.python import body, comment, quoted, source, wrapped
from torch import fx

from csc.ir import graph as g
from csc.ir.naming import identifier
from csc.ir.program import Context, Program, Stage
from csc.ir.rewrite import extract

DOCSTRING = '''"""What a stage makes from the batch and the constants alone: masks, position tables, shifted labels.

Each stage that needs one computes it by itself: that is cheaper than a message, and nothing of it needs a gradient.
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
    if program.loss_tokens:
        names[(program.loss_tokens,)] = program.loss_tokens
    return names


def tables_source(program: Program) -> str:
    """The text of layers/tables.py."""
    nodes = tables(program)
    functions = [_function(program, nodes, name, wanted) for wanted, name in function_names(program, nodes).items()]
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


def _function(program: Program, nodes: Tables, name: str, wanted: Sequence[str]) -> str:
    assert program.shared is not None
    graph = extract(program.shared, [nodes[table] for table in wanted])
    names = {node: source(node.meta["role"]) for node in g.placeholders(graph)}
    lines = [f"def {name}(batch, constants):", *body(graph, names)]
    results = [names[node] for node in g.outputs(graph)]
    if name == program.loss_tokens:
        lines.append(f"    return {results[0]}")
    else:
        lines += wrapped("return (", results, ",)" if len(results) == 1 else ")")
    return "\n".join(lines) + "\n"
