"""python -m benchmarks.house [--against REVISION] [--json]: what the source is to who reads it, before and after.

Files, lines and definitions of csc, passes, codegen and kernels; how deep their imports go; how many rooms import one
another; the longest file; names that several files use. `--against` measures a revision of the repository beside it.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from csc import cores

ROOT = Path(__file__).parents[1]
FOLDERS = {"csc": "csc", "passes": "csc.passes", "codegen": "csc.codegen", "kernels": "csc.kernels"}
SHORT = 70  # lines: a file below holds less than a subject, more often than not
LARGEST_ROOMS = 6


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package by its import name."""
    files = {}
    for folder, package in FOLDERS.items():
        for file in sorted((root / folder).rglob("*.py")):
            parts = file.relative_to(root / folder).with_suffix("").parts
            files[".".join([package, *parts]).removesuffix(".__init__")] = file
    return files


def imports(tree: ast.Module, names: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, for types too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in names or node.module in names:
                    yield whole if whole in names else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)


def room(module: str) -> str:
    """The folder that a module lies in: csc.passes of csc.passes.split, csc of csc.devices."""
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 or module in FOLDERS.values() else "csc"


def depths(graph: dict[str, set[str]]) -> dict[str, int]:
    """The length of the longest chain of imports below each module. Circles (of imports for types) are cut."""
    known: dict[str, int] = {}
    for first in graph:
        stack: list[tuple[str, Iterator[str]]] = [(first, iter(sorted(graph[first])))] if first not in known else []
        open_modules = {first}
        while stack:
            module, rest = stack[-1]
            for target in rest:
                if target not in known and target not in open_modules:
                    open_modules.add(target)
                    stack.append((target, iter(sorted(graph[target]))))
                    break
            else:
                known[module] = 1 + max((known.get(target, 0) for target in graph[module]), default=0)
                open_modules.discard(module)
                stack.pop()
    return known


def measured(root: Path) -> dict[str, int | str]:
    """Figures of one tree, by what they are."""
    names = modules(root)
    graph: dict[str, set[str]] = {}
    lines: dict[str, int] = {}
    definitions: Counter[str] = Counter()
    for module, file in names.items():
        text = file.read_text()
        tree = ast.parse(text)
        lines[module] = text.count("\n")
        graph[module] = {target for target in imports(tree, names) if target != module}
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        definitions["all"] += len(functions)
        top_level = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        definitions.update(f"name {name}" for name in top_level)
    rooms = Counter(room(module) for module in names)
    figures: dict[str, int | str] = {
        "files": len(names),
        "lines": sum(lines.values()),
        "definitions": definitions.pop("all"),
        f"files below {SHORT} lines": sum(count < SHORT for count in lines.values()),
        "lines of the longest file": max(lines.values()),
        "the longest file": max(lines, key=lambda module: lines[module]),
        "floors": max(depths(graph).values()),
        "arrows between files": sum(map(len, graph.values())),
        "arrows between rooms": len({(room(a), room(b)) for a in graph for b in graph[a] if room(a) != room(b)}),
        "names that several files define": sum(count > 1 for count in definitions.values()),
    }
    for name, count in rooms.most_common(LARGEST_ROOMS):
        inside = {m: {t for t in targets if room(t) == name} for m, targets in graph.items() if room(m) == name}
        figures[f"{name}: files"] = count
        figures[f"{name}: floors"] = max(depths(inside).values())
    return figures


def of_revision(revision: str) -> dict[str, int | str]:
    """Figures of the tree as git has it at a revision."""
    command = ["git", "archive", revision, *FOLDERS]
    done = subprocess.run(command, cwd=ROOT, env=cores.environment(), capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
        return measured(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REVISION", help="a revision of the repository to stand beside")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    columns = {"here": measured(ROOT)}
    if options.against:
        columns = {options.against: of_revision(options.against), **columns}
    if options.json:
        print(json.dumps(columns, indent=1))
        return
    table = Table("", *columns)
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        table.add_row(name, *(str(column.get(name, "")) for column in columns.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
