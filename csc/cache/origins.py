"""Where code comes from, as far as it decides what a model computes.

Terms
  installed  code of a distribution in site-packages: its name and version say what it is
  own        the user's file: its content counts, and that of the own files that it imports, and of those
  csc        csc's own files: the hash of all of them is in every key (see csc.cache.keys)

    origins = Origins(); origins.file(path, module) ...; origins.tree() -> [["torch", "2.13.0"], ["net.py", sha256]]
    is_own(path) -> bool          csc_folders() -> where csc's own files lie
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

import csc.codegen
import csc.kernels
import csc.passes


class Origins:
    """Collects the files and distributions that some code comes from; each is looked into once."""

    def __init__(self) -> None:
        self._distributions: dict[str, str] = {}
        self._files: dict[str, str] = {}  # content's hash by path

    def file(self, path: str, package: str = "") -> None:
        """Take in a source file and what it imports. package: that it belongs to, for relative imports."""
        if path in self._files or not is_source(path):
            return
        name = distribution(path)
        if name is not None:
            self._installed(name)
        elif is_own(path):
            content = Path(path).read_bytes()
            self._files[path] = hashlib.sha256(content).hexdigest()
            for found, inside in _imported(content, path, package):
                self.file(found, inside)

    def _installed(self, name: str) -> None:
        if name not in self._distributions:
            self._distributions[name] = version(name)

    def tree(self) -> list[list[str]]:
        """What was taken in; own files by their own names and contents, wherever they lie."""
        files = sorted([Path(path).name, digest] for path, digest in self._files.items())
        return [*map(list, sorted(self._distributions.items())), *files]


def is_source(path: str) -> bool:
    """True for a Python file that is there. One of a distribution stays for as long as the process runs."""
    return _is_installed(path) or (path.endswith(".py") and os.path.isfile(path))


@cache
def _is_installed(path: str) -> bool:
    return path.endswith(".py") and distribution(path) is not None and os.path.isfile(path)


@cache
def version(name: str) -> str:
    """Of an installed distribution, which no process changes while it runs."""
    return importlib.metadata.version(name)


@cache
def is_own(path: str) -> bool:
    """True for a file that belongs to neither a distribution, Python itself nor csc."""
    resolved = Path(path).resolve()
    return distribution(path) is None and not any(_within(resolved, root) for root in _known())


@cache
def distribution(path: str) -> str | None:
    """The distribution in site-packages that a file belongs to."""
    for root in _site_packages():
        for candidate in (Path(path), Path(path).resolve()):
            if _within(candidate, root):
                top = candidate.relative_to(root).parts[0].removesuffix(".py")
                return _distributions().get(top)
    return None


@cache
def _distributions() -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for one in importlib.metadata.distributions():
        for top in _tops(one):
            found.setdefault(top, []).append(one.metadata["Name"])
    return {top: sorted(names)[0] for top, names in found.items()}


def _tops(one: importlib.metadata.Distribution) -> set[str]:
    """What can be imported of a distribution, as importlib.metadata.packages_distributions tells it; that makes a path
    of each installed file, and takes a tenth of a second.
    """
    declared = (one.read_text("top_level.txt") or "").split()
    if declared:
        return set(declared)
    record = one.read_text("RECORD")
    lines = list(map(str, one.files or ())) if record is None else record.splitlines()
    parts = {line.partition(",")[0].strip('"').partition("/")[:2] for line in lines}
    names = {first if inside else inspect.getmodulename(first) for first, inside in parts}
    return {name for name in names if name and "." not in name}


@cache
def _site_packages() -> tuple[Path, ...]:
    named = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    named += [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    return tuple(dict.fromkeys(Path(entry).resolve() for entry in named))


@cache
def _known() -> tuple[Path, ...]:
    """The folders of Python's library and of csc. (Files in site-packages that no distribution owns are own ones.)"""
    return (*csc_folders(), *(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib")))


def csc_folders() -> tuple[Path, ...]:
    """Where csc's own files lie: one folder, or, of a checkout, several."""
    packages = (csc, csc.codegen, csc.kernels, csc.passes)
    return tuple(dict.fromkeys(Path(one.__path__[0]).resolve() for one in packages))


def _within(path: Path, folder: Path) -> bool:
    if not path.is_relative_to(folder):
        return False
    inside = path.relative_to(folder).parts
    return not any(part in ("site-packages", "dist-packages") for part in inside)


def _imported(content: bytes, path: str, package: str) -> Iterator[tuple[str, str]]:
    """(file, package) of everything that a source imports, wherever in it; nothing is imported to find out."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return
    beside = str(Path(path).parent)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = ".".join(parts[: len(parts) + 1 - node.level]) if node.level else ""
            base = ".".join(part for part in (above, node.module or "") if part)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)] if base else []
        else:
            continue
        for name in names:
            parts = name.split(".")
            for count in range(1, len(parts) + 1):
                found = file_of(".".join(parts[:count]), beside)
                if found is not None:
                    yield found


def file_of(name: str, beside: str) -> tuple[str, str] | None:
    """(file, package) of a module by its name, loaded or not. beside: the folder of the file that imports it."""
    module = sys.modules.get(name)
    if module is not None:
        path = getattr(module, "__file__", None)
        return (path, getattr(module, "__package__", None) or "") if path else None
    head, _, last = name.rpartition(".")
    if head:
        parent = sys.modules.get(head)
        search = list(getattr(parent, "__path__", ())) if parent is not None else []
        if not search:
            found = file_of(head, beside)
            search = [str(Path(found[0]).parent)] if found and found[0].endswith("__init__.py") else []
        if not search:
            return None
    else:
        search = [beside, *sys.path]
    try:
        spec = PathFinder.find_spec(last if not head else name, search)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return spec.origin, name if spec.submodule_search_locations else head
