"""The house's floors (DESIGN.md): no import goes up, none goes in a circle, private torch lives in one room."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.launching import PATIENCE

ROOT = Path(__file__).parents[2]

# The first prefix that fits decides. Imports go to the same floor or a lower one.
FLOORS = {
    "csc.commands": 5, "csc.reports": 5, "csc.integrations": 5, "csc.run": 5,
    "csc.api": 4, "csc.balance": 4, "csc.driver": 4, "csc.check": 4, "csc.checkpoints": 4, "csc.cache": 4,
    "csc.model_search": 4,
    "csc.capture": 3, "csc.composition": 3, "csc.passes": 3, "csc.codegen": 3, "csc.runtime": 3,
    "csc.planning": 2,
    "csc.analysis": 1, "csc.masks": 1, "csc.simulation": 1,
    "csc.ir": 0, "csc.kernels": 0, "csc.cores": 0, "csc.devices": 0, "csc.errors": 0, "csc.temporary": 0,
    "csc.installation": 0,
    "csc.torch_private": 0,
}  # fmt: skip

# What a room may import besides itself, csc.cores, csc.devices, csc.errors, csc.installation, csc.temporary and
# csc.torch_private.
ROOMS = {
    "csc.ir": set(),
    "csc.kernels": set(),
    "csc.analysis": {"csc.ir", "csc.kernels.collectives", "csc.kernels.recordable"},
    "csc.composition": set(),
    "csc.masks": {"csc.kernels"},
    "csc.simulation": {"csc.ir.schedule"},
    "csc.planning": {
        "csc.simulation",
        "csc.ir.schedule",
        "csc.ir.mesh",
        "csc.analysis.clocks",
    },
    "csc.capture": {"csc.ir", "csc.analysis", "csc.kernels"},
    "csc.passes": {"csc.ir", "csc.kernels", "csc.analysis", "csc.planning", "csc.simulation"},
    "csc.codegen": {"csc.ir"},
    "csc.runtime": {
        "csc.kernels",
        "csc.planning.dispatch",
        "csc.simulation",
        "csc.ir.groups",
        "csc.ir.strides",
        "csc.ir.mesh",
        "csc.ir.schedule",
    },
    "csc.checkpoints": {"csc.runtime", "csc.ir.groups", "csc.ir.mesh"},
    "csc.run": {"csc.runtime", "csc.simulation", "csc.ir.groups", "csc.cache.inductor_folder", "csc.cache.store"},
}


def modules() -> dict[str, Path]:
    """Every module of the package by its import name."""
    found = {}
    for folder, package in (
        ("csc", "csc"),
        ("passes", "csc.passes"),
        ("codegen", "csc.codegen"),
        ("kernels", "csc.kernels"),
    ):
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = file
    return found


MODULES = modules()


def imported(file: Path) -> Iterator[tuple[str, int, bool]]:
    """(full name, line, runs at import) of everything that a file imports, inside functions too; not for types only."""

    def walk(node: ast.AST, runs: bool) -> Iterator[tuple[str, int, bool]]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, runs) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno, runs) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from walk(child, runs and not inside)

    yield from walk(ast.parse(file.read_text()), True)


def own(name: str) -> str | None:
    """The module of csc that an imported name belongs to: `csc.ir.graph` for csc.ir.graph.op_name."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def room(module: str) -> str | None:
    return next((r for r in ROOMS if module == r or module.startswith(f"{r}.")), None)


def floor(module: str) -> int:
    if module == "csc":
        return 0  # its names are looked up on first use
    found = [level for prefix, level in FLOORS.items() if module == prefix or module.startswith(f"{prefix}.")]
    assert found, f"{module} has no floor: give it one in this test, and in DESIGN.md"
    return found[0]


@cache
def edges() -> tuple[tuple[str, str, int, bool], ...]:
    found = []
    for module, file in MODULES.items():
        for name, line, runs in imported(file):
            target = own(name) if name.split(".")[0] == "csc" else None
            if target is not None and target != module:
                found.append((module, target, line, runs))
    return tuple(found)


def test_there_is_something_to_check() -> None:
    assert len(MODULES) > 40
    assert len(edges()) > 150


def test_every_module_has_a_floor() -> None:
    assert {floor(module) for module in MODULES} >= {0, 1, 2, 3, 4, 5}


def test_no_import_goes_up() -> None:
    up = [f"{m}:{line} imports {t}" for m, t, line, _ in edges() if floor(t) > floor(m)]
    assert up == []


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_what_it_may(name: str) -> None:
    everywhere = {
        "csc", "csc.cores", "csc.devices", "csc.errors", "csc.installation", "csc.temporary", "csc.torch_private"
    }  # fmt: skip
    allowed = ROOMS[name] | {name} | everywhere
    wrong = [
        f"{module}:{line} imports {target}"
        for module, target, line, _ in edges()
        if room(module) == name and not any(target == a or (a != "csc" and target.startswith(f"{a}.")) for a in allowed)
    ]
    assert wrong == []


def test_no_import_goes_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, target, _, _ in edges():
        graph.setdefault(module, set()).add(target)
    graph.pop("csc", None)  # lazy on purpose
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")
    assert "csc.ir.graph" in order


def test_no_rooms_are_in_a_circle() -> None:
    """A room is what stands right below csc, with the rooms within it."""
    graph: dict[str, set[str]] = {}
    for module, target, _, _ in edges():
        here, there = (".".join(name.split(".")[:2]) for name in (module, target))
        if here != there and "csc" not in (here, there):
            graph.setdefault(here, set()).add(there)
    assert {"csc.driver", "csc.check", "csc.capture", "csc.runtime"} <= graph.keys()
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of rooms: {' -> '.join(error.args[1])}")


def test_the_runtime_never_imports_the_compiler() -> None:
    compiler = (
        "csc.capture",
        "csc.passes",
        "csc.codegen",
        "csc.api",
        "csc.driver",
        "csc.analysis",
        "csc.planning",
    )
    found = [
        f"{module}:{line}"
        for module, target, line, _ in edges()
        if module.startswith(("csc.runtime", "csc.run"))
        and target.startswith(compiler)
        and not target.startswith("csc.planning.dispatch")  # token dispatch is planned for every batch
    ]
    assert found == []


@pytest.mark.slow
def test_importing_the_runtime_loads_no_compiler_and_the_compiler_no_transformers() -> None:
    """The same, observed: also what is imported by way of something else. transformers is for loading a model alone."""
    code = (
        "import csc.runtime.trainer, csc.runtime.c10d, csc.run, sys; print(*sys.modules)\n"
        "import csc; csc.compose, csc.compile; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    runtime, compiler = map(str.split, done.stdout.splitlines())
    assert "csc.runtime.trainer" in runtime and {"csc.composition.model", "csc.api"} <= {*compiler}
    foreign = (
        "csc.capture",
        "csc.passes",
        "csc.codegen",
        "csc.api",
        "csc.driver",
        "csc.analysis",
        "csc.torch_private",
    )
    assert [m for m in runtime if m.startswith((*foreign, "transformers", "csc.ir.graph", "csc.ir.program"))] == []
    assert [m for m in compiler if m.startswith(("transformers", "tokenizers"))] == []


def private(file: Path) -> Iterator[str]:
    """Uses of private torch: imports and attribute chains with a part that starts with `_`, or fx.experimental."""
    tree = ast.parse(file.read_text())
    for name, line, _ in imported(file):
        if _is_private(name):
            yield f"{file.name}:{line}: import {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            if "(" not in chain and _is_private(chain) and not chain.startswith("torch.ops."):
                yield f"{file.name}:{node.lineno}: {chain}"


def _is_private(name: str) -> bool:
    parts = name.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] == "torch" and (hidden or name.startswith("torch.fx.experimental"))


def test_private_torch_is_in_one_room() -> None:
    home = {module: file for module, file in MODULES.items() if module.startswith("csc.torch_private")}
    assert [use for module, file in MODULES.items() if module not in home for use in private(file)] == []
    assert len([use for file in home.values() for use in private(file)]) >= 4


def test_the_example_of_a_private_use_is_found(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("import torch\nfrom torch._dynamo import x\ny = torch._C.z\ntorch.ops._c10d.a\ntorch.__version__\n")
    assert {use.split(":")[1] for use in private(file)} == {"2", "3"}


def test_help_comes_without_torch() -> None:
    """`csc --help` in a fraction of a second: importing torch's tracer takes seconds."""
    code = "import sys, csc.commands.main; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
