"""What someone who has never seen csc reads: lines that fit, names of values, nothing twice, words for the actions."""

from __future__ import annotations

import ast
import re
from pathlib import PurePosixPath
from typing import Any

import pytest
import torch
from csc.codegen.layer_file import header
from csc.codegen.python import LIMIT, body
from csc.codegen.write import sources
from torch import fx

from csc.driver.compiled import CompiledModel
from csc.ir import graph as g
from csc.ir.graph import Writer
from csc.ir.schedule import parse
from csc.torch_private.traces import FakeTensorMode
from tests.compiler.conftest import Models

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava in shards": ("llava", {"mesh": "pp=2,cp=2"}),
    "llava in stages": ("llava", {"mesh": "pp=4", "microbatches": 2}),
    "packed": ("packed", {"mesh": "pp=2"}),
}


@pytest.fixture(params=CASES)
def files(models: Models, request: pytest.FixtureRequest) -> dict[str, str]:
    """The emitted files of a case."""
    name, options = CASES[request.param]
    compiled = models(name, **options)
    return sources(compiled.program, compiled.options)


@pytest.mark.long_cases("packed")
def test_lines_fit_on_a_screen(files: dict[str, str]) -> None:
    assert [line for text in files.values() for line in text.splitlines() if len(line) > LIMIT] == []


def functions(text: str) -> dict[str, list[str]]:
    """The statements of each function of a file, as text without comments."""
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {one.name: [ast.unparse(line) for line in one.body] for one in found}


def test_no_table_is_computed_in_two_functions(files: dict[str, str]) -> None:
    """But for short ones, which are not worth a function."""
    bodies = functions(files["layers/tables.py"])
    made = {
        name: {s for s in lines if re.search(r" = .*\(", s)}
        for name, lines in bodies.items()
        if "visibility" not in name
    }
    for one in made:
        for other in made:
            assert one == other or len(made[one] & made[other]) < 3, (one, other)


def test_settings_of_own_operators_are_named(files: dict[str, str]) -> None:
    calls = [
        node
        for path, text in files.items()
        if PurePosixPath(path).suffix == ".py"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("torch.ops.csc", "plan."))
    ]
    assert calls
    for node in calls:
        assert not [one for one in node.args if isinstance(one, ast.Constant)], ast.unparse(node)


def test_the_schedule_has_a_word_for_each_action(files: dict[str, str]) -> None:
    text = files["schedule.txt"]
    comments = "".join(line for line in text.splitlines() if line.startswith("#"))
    kinds = {action.kind for actions in parse(text).ranks for action in actions}
    assert {"F", "REDUCE"} < kinds and all(re.search(rf"\b{kind}\b", comments) for kind in kinds)
    assert str(parse(text)).splitlines()[1:] == [line for line in text.splitlines() if not line.startswith("#")]


def arguments(compiled: CompiledModel, region: str) -> tuple[str, ...]:
    (found,) = (one for one in compiled.program.regions if one.name == region)
    return compiled.program.templates[found.template].activations


def test_code_of_a_container_takes_values_by_their_names(models: Models) -> None:
    compiled = models("llava", mesh="pp=2")
    assert arguments(compiled, "model.merge") == ("multi_modal_projector", "embed_tokens")
    assert arguments(compiled, "model.language_model.layers.0") == ("hidden_states",), "a module's are its own"


def written(count: int, word: str) -> tuple[list[str], list[str]]:
    """(names of the inputs, lines) of a function that joins so many values and returns the sum."""
    mode, graph = FakeTensorMode(), fx.Graph()
    with mode:
        value = torch.empty(2, 3)
    given = [g.add_placeholder(graph, f"{word}_{i}", value, ("activation", str(i))) for i in range(count)]
    joined = Writer(graph, mode).named(f"joined_{word}", None, torch.ops.aten.cat.default, given, -1)
    joined.meta["source"] = f"modeling_{word}.py:12"
    graph.output((Writer(graph, mode).named("total", joined, torch.ops.aten.sum.default, joined),))
    names = {node: node.name for node in given}
    return [node.name for node in given], body(graph, names)


@pytest.mark.parametrize("count", [1, 3, 5, 9, 60])
@pytest.mark.parametrize("word", ["x", "features_of_an_image", "a_value_with_a_name_that_goes_on_and_on_and_on"])
def test_long_calls_are_written_over_several_lines(count: int, word: str) -> None:
    names, lines = written(count, word)
    assert max(map(len, lines)) <= LIMIT
    text = "\n".join([header(lines), f"def run({', '.join(names)}):", *lines, "    return total, dir()"])
    space: dict[str, Any] = {}
    exec(text, space)
    total, left = space["run"](*[torch.full((2, 3), float(i)) for i in range(count)])
    assert float(total) == 6 * sum(range(count))
    assert left == ["total"], "what is read for the last time is deleted"
