"""Any value as plain text, so that equal values read equal in every process; what cannot be told is an error."""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import re
import sys
import sysconfig
import weakref
from abc import ABCMeta
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, EnumMeta
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

import csc.codegen
import csc.kernels
import csc.passes
from csc.capture import batch
from csc.torch_private.exported import OpOverload
from csc.torch_private.hooks import hooks_of_all_modules, hooks_of_tensor

# --- What has no description -----------------------------------------------------------------------------------------


class Opaque(ValueError):
    """A value that has no description, or code whose result cannot be told beforehand; with its place."""


# --- What a function's code does and looks at, read off its bytecode without running it ------------------------------
#
# Terms
#   names      under which it may look something up: globals, attributes, and strings, which `getattr` may be given


OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
BY_NAME = ("getattr", "vars", "attrgetter", "methodcaller")  # functions that are given names
NEAR = 6  # instructions after such a function within which a name that is written out is loaded


@dataclass(frozen=True)
class Facts:
    """digest: of what it does, without its file and lines. globals: with the line of each. imports: of statements in
    it, (name, how many packages up, names from it, line). dynamic: it asks for something by a name that is computed.
    """

    digest: str
    globals: tuple[tuple[str, int], ...]
    attributes: frozenset[str]
    strings: frozenset[str]
    imports: tuple[tuple[str, int, tuple[str, ...], int], ...]
    dynamic: bool

    @property
    def names(self) -> frozenset[str]:
        """Under which it may look something up in an object or a module."""
        return self.attributes | self.strings


@cache
def facts(code: CodeType) -> Facts:
    """Of a function's code, and of the functions and classes within it."""
    inner = [facts(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    lines: dict[str, int] = {}
    attributes, line, dynamic = set[str](), code.co_firstlineno, False
    imports: list[tuple[str, int, tuple[str, ...], int]] = []
    constants: list[Any] = []
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        if instruction.starts_line is not None:
            line = instruction.starts_line
        if instruction.opname in OF_GLOBALS:
            lines.setdefault(instruction.argval, line)
            if instruction.argval in BY_NAME:
                near = instructions[index + 1 : index + NEAR]
                dynamic = dynamic or not any(o.opname == "LOAD_CONST" and type(o.argval) is str for o in near)
        elif instruction.opname == "IMPORT_NAME":
            above, names = constants[-2:]
            imports.append((instruction.argval, above, names or (), line))
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            attributes.add(instruction.argval)
            dynamic = dynamic or instruction.argval in ("__dict__", *BY_NAME)
        elif instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants.append(instruction.argval)
    strings = {constant for constant in code.co_consts if type(constant) is str}
    for within in inner:
        lines = {**dict(within.globals), **lines}
    return Facts(
        _digest(code),
        tuple(sorted(lines.items())),
        frozenset(attributes).union(*(code_facts.attributes for code_facts in inner)),
        frozenset(strings).union(*(code_facts.strings for code_facts in inner)),
        (*imports, *(item for code_facts in inner for item in code_facts.imports)),
        dynamic or any(code_facts.dynamic for code_facts in inner),
    )


def _digest(code: CodeType) -> str:
    digest = hashlib.sha256(code.co_code + code.co_exceptiontable)
    numbers = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    for values in (code.co_consts, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, numbers):
        digest.update(repr([_constant(item) for item in values]).encode())
    return digest.hexdigest()


def _constant(item: Any) -> Any:
    if isinstance(item, CodeType):
        return facts(item).digest
    return sorted(map(repr, item)) if isinstance(item, frozenset) else item


# --- Where code comes from, as far as it decides what a model computes -----------------------------------------------
#
# Terms
#   installed  code of a distribution that an installer put into a folder of Python's path, site-packages or another
#     (`pip
#              install --target`): its name and version say what it is
#   own        the user's file: its content counts, and that of the own files that it imports, and of those. So is what
#     is
#              installed as editable or cloned, whose version says nothing. Of a large package all files count at once,
#                so
#              that none but those are parsed that import own files from elsewhere
#   csc        csc's own files: the hash of all of them is in every key (see csc.cache.keys)


LARGE = 100  # Python files of a package that is taken as a whole: to parse them takes 20 ms each
IMPORTS = re.compile(rb"(?:^|[;:])[ \t]*(?:from[ \t]+([\w.]+)[ \t]|import[ \t]+([^\n#;]+))", re.MULTILINE)


class Origins:
    """Collects the files and distributions that some code comes from; each is looked into once."""

    def __init__(self) -> None:
        self._distributions: dict[str, str] = {}
        self._files: dict[str, str] = {}  # content's hash by path
        self._modules: dict[tuple[str, str], tuple[str, str] | None] = {}  # what file_of has found

    def file(self, path: str, package: str = "") -> None:
        """Take in a source file and what it imports. package: that it belongs to, for relative imports."""
        if path in self._files or not is_source(path):
            return
        name = distribution(path)
        if name is not None:
            self._installed(name)
        elif is_own(path):
            if (folder := _large_package(path)) is not None:
                self._whole(folder)
                return
            content = Path(path).read_bytes()
            self._files[path] = hashlib.sha256(content).hexdigest()
            for path_found, inside in self._imported(content, path, package):
                self.file(path_found, inside)

    def _whole(self, folder: Path) -> None:
        """Take in a large package: all of its files, and what these import from elsewhere."""
        if str(folder) in self._files:
            return
        self._files[str(folder)] = ""  # what it imports may import it
        digest = hashlib.sha256()
        elsewhere: dict[str, tuple[str, str] | None] = {folder.name: None}
        files = sorted(folder.rglob("*.py"))
        within = set(map(str, files))
        for file in files:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(folder)} {len(content)} ".encode() + content)
            for name in _packages_named(content):
                if name not in elsewhere:
                    elsewhere[name] = file_of(name, str(folder.parent))
                    self.file(*(elsewhere[name] or ("", "")))
                if (found_file := elsewhere[name]) is not None and is_own(found_file[0]):
                    package = ".".join((folder.name, *file.relative_to(folder).parts[:-1]))
                    for path, inside in self._imported(content, str(file), package):
                        if path not in within and not Path(path).is_relative_to(folder):
                            self.file(path, inside)
        self._files[str(folder)] = digest.hexdigest()

    def _imported(self, content: bytes, path: str, package: str) -> Iterator[tuple[str, str]]:
        """(file, package) of everything that a source imports, wherever in it; nothing is imported to find out."""
        beside = str(Path(path).parent)
        for name in _modules_named(content, package):
            if (name, beside) not in self._modules:
                self._modules[name, beside] = file_of(name, beside)
            if (found_module := self._modules[name, beside]) is not None:
                yield found_module

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
    """The installed distribution that a file belongs to."""
    for candidate in (Path(path), Path(path).resolve()):
        for root in _site_packages():
            if _within(candidate, root):
                return _distributions().get(_top(candidate, root))
        for root in _targets(tuple(sys.path)):
            if _within(candidate, root) and (name := _installed_at(root).get(_top(candidate, root))) is not None:
                return name
    return None


def _top(path: Path, root: Path) -> str:
    return path.relative_to(root).parts[0].removesuffix(".py")


@cache
def _targets(searched: tuple[str, ...]) -> tuple[Path, ...]:
    """Folders of Python's path, other than site-packages, that an installer has put packages into."""
    folders = dict.fromkeys(Path(entry).resolve() for entry in searched if entry)
    return tuple(
        folder for folder in folders if folder not in _site_packages() and any(folder.glob("*.dist-info/RECORD"))
    )


@cache
def _installed_at(root: Path) -> dict[str, str]:
    """What is installed in a folder, by what can be imported. An editable distribution's files are elsewhere."""
    distributions = importlib.metadata.distributions(path=[str(root)])
    return {
        top: distribution.metadata["Name"]
        for distribution in distributions
        if distribution.read_text("RECORD") is not None
        for top in _tops(distribution)
    }


@cache
def _distributions() -> dict[str, str]:
    names: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        for top in _tops(distribution):
            names.setdefault(top, []).append(distribution.metadata["Name"])
    return {top: sorted(names)[0] for top, names in names.items()}


def _tops(distribution: importlib.metadata.Distribution) -> set[str]:
    """What can be imported of a distribution, as importlib.metadata.packages_distributions tells it; that makes a path
    of each installed file, and takes a tenth of a second.
    """
    declared = (distribution.read_text("top_level.txt") or "").split()
    if declared:
        return set(declared)
    record = distribution.read_text("RECORD")
    lines = list(map(str, distribution.files or ())) if record is None else record.splitlines()
    parts = {line.partition(",")[0].strip('"').partition("/")[:2] for line in lines}
    names = {first if inside else inspect.getmodulename(first) for first, inside in parts}
    return {name for name in names if name and "." not in name}


@cache
def _site_packages() -> tuple[Path, ...]:
    named = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    named += [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    return tuple(dict.fromkeys(Path(entry).resolve() for entry in named))


@cache
def _large_package(path: str) -> Path | None:
    """The folder of the outermost package that an own file is in, if it has many files."""
    folder, outermost = Path(path).resolve().parent, None
    while (folder / "__init__.py").is_file():
        outermost, folder = folder, folder.parent
    return outermost if outermost is not None and _is_large(outermost) else None


@cache
def _is_large(folder: Path) -> bool:
    return sum(1 for _ in folder.rglob("*.py")) > LARGE


@cache
def _packages_named(content: bytes) -> frozenset[str]:
    """The first parts of all that a source's lines import by a full name, and perhaps of what its texts speak of. Keys
    are made again and again, of sources that stay what they are: each is read for it once.
    """
    packages: set[bytes] = set()
    for source, names in IMPORTS.findall(content.replace(b"\\\n", b" ")):
        packages.update(name.split()[0] for name in (source or names).split(b",") if name.split())
    tops = (name.partition(b".")[0].decode(errors="replace") for name in packages)
    return frozenset(top for top in tops if top.isidentifier())


@cache
def _known() -> tuple[Path, ...]:
    """The folders of Python's library and of csc. (Files in site-packages that no distribution owns are own ones.)"""
    return (*csc_folders(), *(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib")))


def csc_folders() -> tuple[Path, ...]:
    """Where csc's own files lie: one folder, or, of a checkout, several."""
    packages = (csc, csc.codegen, csc.kernels, csc.passes)
    return tuple(dict.fromkeys(Path(package.__path__[0]).resolve() for package in packages))


def _within(path: Path, folder: Path) -> bool:
    if not path.is_relative_to(folder):
        return False
    inside = path.relative_to(folder).parts
    return not any(part in ("site-packages", "dist-packages") for part in inside)


@cache
def _modules_named(content: bytes, package: str) -> tuple[str, ...]:
    """All that a source may import, by full names, and the packages that these are in. package: that the source is in;
    each source is parsed once.
    """
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return ()
    modules: dict[str, None] = {}
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
            modules |= dict.fromkeys(".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return tuple(modules)


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
            package = file_of(head, beside)
            search = [str(Path(package[0]).parent)] if package and package[0].endswith("__init__.py") else []
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


# --- What classes show of themselves ---------------------------------------------------------------------------------
#
# It is where their source is, and whether their objects hold more than Python can show.


CACHED = type(functools.lru_cache(len))


def path_of(kind: type) -> str | None:
    """The source file of a class; None for one of C or of none."""
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    return path if path and is_source(path) else None


def is_own_class(kind: type) -> bool:
    """True for a class of the user's files."""
    return (path := path_of(kind)) is not None and is_own(path)


def is_own_function(function: FunctionType) -> bool:
    """True for a function of the user's files."""
    file = function.__code__.co_filename
    return is_source(file) and is_own(file)


def is_put_there(value: Any) -> bool:
    """True for what only the user can have put among the functions of an installed module: a callable object, a class
    or a partial function of his own.
    """
    if isinstance(value, type):
        return is_own_class(value)
    if isinstance(value, (functools.partial, functools.partialmethod, MethodType)):
        function = getattr(value, "func", None) or getattr(value, "__func__", None)
        return isinstance(function, FunctionType) and is_own_function(function)
    return is_own_class(type(value))


def has_source(kind: type) -> bool:
    """True for a class that Python code defines: what its objects hold is in their attributes."""
    return path_of(kind) is not None and not _of_c(kind)


def _of_c(kind: type) -> bool:
    """A class of an extension may name a module of Python code as its own. It shows in methods and attributes that are
    not Python's, in objects that are larger than attributes make them, or in a class of classes of its own.
    """
    if type(kind) is not type and not isinstance(kind, (ABCMeta, EnumMeta)) and not has_source(type(kind)):
        return True
    for name, member in vars(kind).items():
        descriptors = (MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType, GetSetDescriptorType)
        if isinstance(member, descriptors) and member.__objclass__ is kind and name not in ("__dict__", "__weakref__"):
            return True
        if isinstance(member, BuiltinFunctionType) and member.__self__ is kind:
            return True
    words = len(slots(kind)) + 2  # and those of __dict__ and __weakref__
    return kind.__base__ is not None and kind.__basicsize__ > kind.__base__.__basicsize__ + 8 * words


def slots(kind: type) -> tuple[str, ...]:
    """Names of a class's own slots, as its objects have them."""
    declared = vars(kind).get("__slots__", ())
    names = (declared,) if isinstance(declared, str) else tuple(declared)
    return tuple(_mangled(kind, name) for name in names if name not in ("__weakref__", "__dict__"))


def _mangled(kind: type, name: str) -> str:
    private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if private else name


def functions_of(member: Any) -> Iterator[FunctionType]:
    """The functions that a member of a class or module is or wraps."""
    if isinstance(member, property):
        members = [member.fget, member.fset]
    elif isinstance(member, functools.cached_property):
        members = [member.func]
    else:
        members = [getattr(member, "__func__", member)]
    for function in members:
        while isinstance(function, FunctionType) or type(function) is CACHED:
            if isinstance(function, FunctionType):
                yield function
            function = getattr(function, "__wrapped__", None)


@functools.cache
def torch_folder() -> str:
    """Where torch's own files lie."""
    return str(PurePath(inspect.getfile(torch)).parent)


def of_transformers(kind: type) -> bool:
    """True for a class of transformers, or one made from it."""
    return any(cls.__module__.startswith("transformers.") for cls in kind.__mro__)


# --- Classes, as descriptions refer to them: each has a number, in the order in which they were met ------------------
#
# bases, its functions' code, values in it) is told once, under its number.


DESCRIPTORS = (property, classmethod, staticmethod, MemberDescriptorType, GetSetDescriptorType)
HELPING = ("transformers",)  # puts methods of its own into nn.Module when it makes its first model
OF_DYNAMO = ("__compiled_fn_", "__resume_at_", "__import_", "__builtins_dict__")  # put into modules that it compiles
MAKING = ("__init__", "__setstate__")  # of modules, where Dynamo puts its own once it has compiled anything
BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
PLAIN = (bool, int, float, str)
OF_CLASSES = {  # what Python and dataclasses put into every class
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__slots__", "__hash__",
    "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__orig_bases__", "__parameters__", "_abc_impl",
    "__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__firstlineno__",
    "__static_attributes__", "__type_params__", "__classcell__", "__replace__",
}  # fmt: skip


class Describes(Protocol):
    """Describes what classes hold, as csc.cache.describe does; where: its name, as errors give it."""

    origins: Origins

    def tree(self, value: Any, where: str) -> Any: ...

    def function(self, function: FunctionType, where: str) -> Any: ...


class Classes:
    """The classes that a Describer has met."""

    def __init__(self, describer: Describes) -> None:
        self.methods: list[tuple[type, str, FunctionType]] = []
        self._describer = describer
        self._numbers: dict[type, int] = {}
        self._facts: list[Any] = []
        self._modules: dict[str, list[Any]] = {}  # of somebody else: what stands in them now

    def number(self, kind: type, where: str) -> int:
        """Of a class; it and its bases are described when they are met first."""
        if kind not in self._numbers:
            number = self._numbers[kind] = len(self._numbers)
            self._facts.append(None)
            self._facts[number] = self._described(kind, where)
        return self._numbers[kind]

    def tree(self) -> Any:
        """What the classes are."""
        return [self._facts, sorted(self._modules.items())]

    def _described(self, kind: type, where: str) -> Any:
        path = path_of(kind)
        is_users = path is not None and is_own(path)
        name = kind.__qualname__ if is_users else f"{kind.__module__}.{kind.__qualname__}"
        if path is None:
            if kind.__module__ == "__main__" or kind.__module__ not in sys.modules:
                raise Opaque(f"{where}: {kind.__qualname__} is in no file")
            return [name]
        module = sys.modules[kind.__module__]
        self._describer.origins.file(path, module.__package__ or "")
        bases = [self.number(base, where) for base in kind.__mro__[1:-1]]
        meta = self.number(type(kind), where) if is_own_class(type(kind)) else type(kind).__qualname__
        members = [fact for n, member in list(vars(kind).items()) for fact in self._member(n, member, kind, path)]
        if not path.startswith(torch_folder()):
            self._replaced(module, path)
        return [PurePath(path).name if is_users else "", name, bases, meta, members]

    def _member(self, name: str, member: Any, kind: type, path: str) -> Iterator[Any]:
        """What a class holds under a name: that code may have been put there after the class was made."""
        where = f"{PurePath(path).name}: {kind.__qualname__}.{name}"
        functions = list(functions_of(member))
        for function in functions:
            file = function.__code__.co_filename
            if file.startswith("<") and (name.startswith("__") or not is_own(path)):
                yield [name, facts(function.__code__).digest]  # written by a decorator of the class, such as dataclass
                continue
            if not is_source(file):
                raise Opaque(f"{where} is in no file")
            if not is_own(file):
                made_by_torch = name in MAKING and file.startswith(torch_folder())
                if path.startswith(torch_folder()) and (made_by_torch or distribution(file) in HELPING):
                    continue
                yield [name, _signature(function)]
            else:
                yield [name, self._describer.function(function, where)]
                self.methods.append((kind, name, function))
        if functions or name in OF_CLASSES:
            return
        if isinstance(kind, EnumMeta):
            if isinstance(member, Enum):
                yield [name, self._describer.tree(member.value, where)]
        elif type(member) in PLAIN:
            if not (name.startswith("__") and not is_own(path)):
                yield [name, self._describer.tree(member, where)]
        elif is_own(path) and not isinstance(member, DESCRIPTORS) and type(member).__name__ != "_tuplegetter":
            yield [name, self._describer.tree(member, where)]
        elif isinstance(member, BUILT_IN):
            yield [name, member.__qualname__]
        elif is_put_there(member):
            yield [name, self._describer.tree(member, where)]

    def _replaced(self, module: ModuleType, path: str) -> None:
        """The functions and classes that a module of somebody else has, some of which may have been put there."""
        if is_own(path) or module.__name__ in self._modules:
            return
        described: list[Any] = []
        self._modules[module.__name__] = described
        for name, value in list(vars(module).items()):
            if name.startswith(OF_DYNAMO):
                continue
            registered = isinstance(value, Mapping) and not isinstance(value, dict)
            for key, member in list(value.items()) if registered else [("", value)]:
                where = f"{module.__name__}.{name}"
                for function in functions_of(member):
                    described.append([name, str(key), _signature(function)])
                    if is_own_function(function):
                        described.append([name, str(key), self._describer.tree(function, where)])
                if isinstance(member, type):
                    known = (
                        self.number(member, where) if is_own_class(member) else [member.__module__, member.__qualname__]
                    )
                    described.append([name, str(key), known])
                elif is_put_there(member):
                    described.append([name, str(key), self._describer.tree(member, where)])
                elif type(member) in (bool, int, float) and not name.startswith("__"):
                    described.append([name, str(key), repr(member)])


def _signature(function: FunctionType) -> Any:
    """Which of an installed distribution's functions it is; of an own one what it does."""
    if is_own_function(function):
        return [function.__qualname__, facts(function.__code__).digest]
    return [function.__module__, function.__qualname__, function.__code__.co_name, function.__code__.co_firstlineno]


# --- Any value as plain text, so that equal values read equal in every process; what cannot be told is an error ------
#
# Terms
#   tree       nested lists of numbers, strings, booleans and None: JSON
#   opaque     a value whose state Python cannot show (an object of a C extension, a code without a file)
#   found      code that is reached from the model: csc.cache.keys describes what it looks at
#   escaped    an own module that is a value somewhere: code may look up anything in it


PLACES = {"name_or_path", "_name_or_path", "_commit_hash"}  # where weights came from
INERT = {"generation_config", batch.INSTALLED, "_is_hf_initialized"}  # not for training
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_MODULES = {"training", "_parameters", "_buffers", "_modules"} | {
    name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs", "_always_called", "_set"))
}
NAMED = (torch.dtype, torch.layout, torch.memory_format, OpOverload)

SIMPLE = (complex, bytes, bytearray, range, slice, type(Ellipsis), type(NotImplemented))
MAPPINGS = (dict, MappingProxyType, OrderedDict, defaultdict, Counter)


class Describer:
    """Describes values, and collects in `origins` where their code comes from."""

    def __init__(self, origins: Origins, device: str = "cpu") -> None:
        """device: the kind of device that parameters without data stand for."""
        self.origins = origins
        self.classes = Classes(self)
        self.functions: dict[FunctionType, None] = {}  # found as values, not as methods
        self.escaped: dict[int, ModuleType] = {}
        self._device = device
        self._known: dict[int, Any] = {}  # descriptions
        self._open: dict[int, int] = {}  # what is being described, each within the one before
        self._alive: list[Any] = []  # an id is a name as long as its object lives
        self._paths: dict[int, str] = {}

    def model(self, model: nn.Module, prefix: str = "") -> Any:
        """The whole module tree: classes, attributes, hooks, parameters up to their values, contents of buffers."""
        for path, module in model.named_modules():
            self._paths.setdefault(id(module), prefix + path)
        modules = [[path, self._module(path, module)] for path, module in model.named_modules()]
        shared = [[path, self._paths[id(m)]] for path, m in model.named_modules(remove_duplicate=False)]
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        parameters = [[names[id(p)], self._parameter(name, p)] for name, p in model.named_parameters()]
        buffers = [[name, self._tensor(b, name)] for name, b in model.named_buffers(remove_duplicate=False)]
        return [modules, shared, parameters, buffers]

    def hooks_of_all(self) -> Any:
        """Hooks that every module has."""
        return [[kind, self.tree(hooks, f"hooks of all modules ({kind})")] for kind, hooks in hooks_of_all_modules()]

    def _parameter(self, name: str, parameter: nn.Parameter) -> Any:
        if type(parameter) is not nn.Parameter:
            raise Opaque(f"parameter {name} is a {type(parameter).__name__}")
        data = parameter.data
        device = data.device.type if data.device.type != "meta" else self._device
        attributes = self.tree(hooks_of_tensor(parameter), f"hooks of {name}"), self._said_of(parameter, name)
        return [str(data.dtype), list(data.shape), list(data.stride()), device, *attributes]

    def _said_of(self, tensor: torch.Tensor, where: str) -> Any:
        """Attributes that a tensor was given."""
        attributes = {name: value for name, value in vars(tensor).items() if name not in INERT}
        return [[name, self.tree(value, f"{where}.{name}")] for name, value in sorted(attributes.items())]

    def _apart(self, module: nn.Module, where: str) -> Any:
        """Of a module that is not a part of the model: its weights are constants."""
        weights = [self._tensor(parameter, where) for parameter in module.parameters()]
        return ["apart", self.model(module, f"{where}: "), weights]

    def _module(self, path: str, module: nn.Module) -> Any:
        where = path or "model"
        hooks = [self._hooks(module, kind, where) for kind in HOOKS]
        left_out = OF_MODULES | (PLACES | INERT if of_transformers(type(module)) else set())
        attributes = {name: value for name, value in vars(module).items() if name not in left_out}
        state = [[name, self.tree(value, f"{where}.{name}")] for name, value in sorted(attributes.items())]
        return [self.classes.number(type(module), where), module.training, state, hooks]

    def _hooks(self, module: nn.Module, kind: str, where: str) -> Any:
        with_kwargs = vars(module).get(f"{kind}_with_kwargs", {})
        hooks = {k: h for k, h in getattr(module, kind).items() if not batch.is_recorder(h)}
        return [[self.tree(hook, f"{where}.{kind}"), key in with_kwargs] for key, hook in hooks.items()]

    def _tensor(self, tensor: torch.Tensor, where: str) -> Any:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise Opaque(f"{where} is a {type(tensor).__name__} of layout {tensor.layout}")
        kind = [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), tensor.device.type]
        kind.append(self._said_of(tensor, where))
        if tensor.device.type == "meta":
            return kind
        data = tensor.detach().cpu().contiguous().reshape(-1)
        content = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return [*kind, hashlib.sha256(content).hexdigest()]

    def tree(self, value: Any, where: str) -> Any:
        """The description. Opaque, with the place in the model, if there is none."""
        if value is None or isinstance(value, bool) or type(value) in (int, str):
            return value
        if type(value) is float:
            return ["float", value.hex()]
        if type(value) in SIMPLE:
            return [type(value).__name__, repr(value)]
        if isinstance(value, NAMED):
            return ["torch", str(value)]
        if isinstance(value, torch.device):
            return ["device", value.type]
        if isinstance(value, Enum):
            return ["enum", self.classes.number(type(value), where), value.name]
        if isinstance(value, re.Pattern):
            return ["pattern", self.tree(value.pattern, where), value.flags]
        if isinstance(value, (PurePath, logging.Logger)):
            return [type(value).__name__, value.name if isinstance(value, logging.Logger) else str(value)]
        if isinstance(value, (np.ndarray, np.generic)):
            return _array(value, where)
        if id(value) in self._paths:
            return ["module", self._paths[id(value)]]
        name = id(value)
        if name in self._open:
            return ["within", len(self._open) - self._open[name]]
        if name not in self._known:
            self._open[name] = len(self._open)
            self._known[name] = self._composed(value, where)
            del self._open[name]
            self._alive.append(value)
        return self._known[name]

    def _composed(self, value: Any, where: str) -> Any:
        """Of a value that may hold others, itself among them."""
        if isinstance(value, torch.Tensor):
            return ["tensor", *self._tensor(value, where)]
        if isinstance(value, nn.Module):
            return self._apart(value, where)
        if isinstance(value, ModuleType):
            return self._python_module(value, where)
        if isinstance(value, type):
            return ["class", self.classes.number(value, where)]
        if isinstance(value, FunctionType):
            self.functions[value] = None
            return ["function", self.function(value, where)]
        if type(value) is CACHED:
            return ["cached", self.tree(value.__wrapped__, where)]
        if isinstance(value, MethodType):
            return ["method", self.tree(value.__func__, where), self.tree(value.__self__, where)]
        if isinstance(value, functools.partial):
            return ["partial", *(self.tree(item, where) for item in (value.func, value.args, value.keywords))]
        if isinstance(value, BUILT_IN):
            holder = getattr(value, "__self__", None)
            held = None if isinstance(holder, (ModuleType, type)) else self.tree(holder, where)
            return ["built in", value.__module__ or "", value.__qualname__, held]
        if isinstance(value, weakref.ref):
            return ["weak", self.tree(value(), where)]
        if type(value) in (list, tuple, deque, torch.Size):
            return [type(value).__name__, *(self.tree(item, where) for item in value)]
        if isinstance(value, (set, frozenset)) and type(value) in (set, frozenset):
            return ["set", *sorted((self.tree(item, where) for item in value), key=json.dumps)]
        if type(value) in MAPPINGS:
            default = self.tree(getattr(value, "default_factory", None), where)
            return [type(value).__name__, default, *self._items(value, where)]
        if type(value) is SimpleNamespace:
            return ["namespace", *self._items(vars(value), where)]
        return self._object(value, where)

    def _items(self, value: Mapping[Any, Any], where: str) -> list[Any]:
        return [[self.tree(key, where), self.tree(item, f"{where}[{key!r}]")] for key, item in value.items()]

    def _object(self, value: Any, where: str) -> Any:
        """An object of Python classes is what is in its attributes, and in the container that it is."""
        kind = type(value)
        bases = [base for base in kind.__mro__ if not has_source(base)]
        plain = {object, dict, list, tuple, int, str, float, set}
        if not all(base in plain or base.__module__ in ("typing", "abc", "collections", "enum") for base in bases):
            raise Opaque(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        if bases == [kind] or not has_source(kind):
            raise Opaque(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        left_out = PLACES if of_transformers(kind) else set()
        filled = [name for base in kind.__mro__ for name in slots(base) if hasattr(value, name)]
        state = {**{name: getattr(value, name) for name in filled}, **getattr(value, "__dict__", {})}
        attributes = [[n, self.tree(v, f"{where}.{n}")] for n, v in sorted(state.items()) if n not in left_out]
        held: Any = None
        if isinstance(value, dict):
            held = self._items(value, where)
            held.append(self.tree(getattr(value, "default_factory", None), where))
        elif isinstance(value, list):
            held = [self.tree(item, where) for item in list.__iter__(value)]
        elif isinstance(value, tuple):
            held = [self.tree(item, where) for item in tuple.__iter__(value)]
        elif isinstance(value, (int, str, float)):
            held = next(base for base in (int, str, float) if isinstance(value, base)).__repr__(value)
        elif isinstance(value, (set, deque)):
            raise Opaque(f"{where} is a {kind.__qualname__}, a set or a queue")
        described = json.dumps([self.classes.number(kind, where), attributes, held])
        return ["object", hashlib.sha256(described.encode()).hexdigest()]  # there may be one in every module

    def _python_module(self, module: ModuleType, where: str) -> Any:
        path = getattr(module, "__file__", None) or ""
        if is_source(path) and is_own(path):
            self.origins.file(path, getattr(module, "__package__", None) or "")
            self.escaped[id(module)] = module
            if type(module) is not ModuleType:
                return ["import", module.__name__, self.classes.number(type(module), where)]
        return ["import", module.__name__]

    def function(self, function: FunctionType, where: str) -> Any:
        """A function's code and what it holds: closure, defaults, attributes."""
        code = function.__code__
        if not is_source(code.co_filename):
            raise Opaque(f"{where} is the function {function.__qualname__}, which is in no file")
        self.origins.file(code.co_filename, _package(function))
        cells = [_content(cell) for cell in function.__closure__ or ()]
        closure = [self.tree(cell, f"{where}: {name}") for name, cell in zip(code.co_freevars, cells)]
        defaults = [self.tree(function.__defaults__, where), self.tree(function.__kwdefaults__, where)]
        attributes = self.tree(vars(function), where) if vars(function) else None
        return [function.__qualname__, facts(code).digest, closure, defaults, attributes]


def _array(value: np.ndarray | np.generic, where: str) -> Any:
    if value.dtype.hasobject:
        raise Opaque(f"{where} is an array of objects")
    return ["numpy", str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]


def _package(function: FunctionType) -> str:
    return getattr(sys.modules.get(function.__module__ or ""), "__package__", None) or ""


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
